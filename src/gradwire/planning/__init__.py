"""Which plan each bucket gets: users' options, layouts, and the choice of collectives."""

from gradwire.planning.buckets import own_buckets
from gradwire.planning.coder_times import measure_coders
from gradwire.planning.fragments import FragmentClock, Pieces, cut, exchanged
from gradwire.planning.options import (
    CHUNK_NUMEL,
    Collective,
    Fallback,
    KernelBackend,
    LinkOptions,
    Options,
    RareOptions,
    TransportName,
    dense_names,
    refuse_scatter,
)
from gradwire.planning.placement import Placement, place_kernels
from gradwire.planning.planner import Planner, warm_up
from gradwire.protocols import REDUCE_SCATTER

__all__ = [
    "CHUNK_NUMEL",
    "REDUCE_SCATTER",
    "Collective",
    "Fallback",
    "FragmentClock",
    "KernelBackend",
    "LinkOptions",
    "Options",
    "Pieces",
    "Placement",
    "Planner",
    "RareOptions",
    "TransportName",
    "cut",
    "dense_names",
    "exchanged",
    "measure_coders",
    "own_buckets",
    "place_kernels",
    "refuse_scatter",
    "warm_up",
]
