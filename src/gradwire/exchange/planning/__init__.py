"""The exchange plan of each bucket: users' options, layouts, and the choice of collectives."""

from gradwire.exchange.planning.fragments import FragmentClock, FragmentPieces, cut_fragments, exchanged
from gradwire.exchange.planning.options import (
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
from gradwire.exchange.planning.placement import Placement, place_kernels
from gradwire.exchange.planning.planner import Planner, measure_coders, one_way_bytes, own_buckets
from gradwire.exchange.protocols import REDUCE_SCATTER

__all__ = [
    "CHUNK_NUMEL",
    "REDUCE_SCATTER",
    "Collective",
    "Fallback",
    "FragmentClock",
    "FragmentPieces",
    "KernelBackend",
    "LinkOptions",
    "Options",
    "Placement",
    "Planner",
    "RareOptions",
    "TransportName",
    "cut_fragments",
    "dense_names",
    "exchanged",
    "measure_coders",
    "one_way_bytes",
    "own_buckets",
    "place_kernels",
    "refuse_scatter",
]
