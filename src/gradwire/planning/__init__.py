"""Which plan each bucket gets: users' options, layouts, and the choice of collectives."""

from gradwire.planning.buckets import Planner, warm_up
from gradwire.planning.options import CHUNK_NUMEL, Options, dense_names

__all__ = ["CHUNK_NUMEL", "Options", "Planner", "dense_names", "warm_up"]
