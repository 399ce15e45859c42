"""Which plan each bucket gets: users' options, layouts, and the choice of collectives."""

from gradwire.planning.coder_times import measure_coders
from gradwire.planning.options import CHUNK_NUMEL, Options, dense_names
from gradwire.planning.planner import Planner, warm_up

__all__ = ["CHUNK_NUMEL", "Options", "Planner", "dense_names", "measure_coders", "warm_up"]
