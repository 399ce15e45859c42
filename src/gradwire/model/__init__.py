"""The performance model: predictions of the time of a step on other clusters, and of its bottleneck.

:mod:`~gradwire.model.cluster` is a closed form for hosts of several GPUs; it needs no measurement.
"""

from gradwire.model.cluster import (
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
