"""The performance model: what a step would take elsewhere, and what bounds it.

:mod:`~gradwire.perf.cluster` is a closed form for hosts of several GPUs; it needs no measurement.
"""

from gradwire.perf.cluster import (
    Cluster,
    Fabric,
    Message,
    Pattern,
    Point,
    Sizes,
    Step,
    Workload,
    dense,
    step,
    sweep,
    ternary,
)

__all__ = [
    "Cluster",
    "Fabric",
    "Message",
    "Pattern",
    "Point",
    "Sizes",
    "Step",
    "Workload",
    "dense",
    "step",
    "sweep",
    "ternary",
]
