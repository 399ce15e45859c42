"""Arithmetic on blocks and bits: one front, a folder a family, the same bits from every backend."""

from gradwire.kernels.api import FAMILIES, Kernels
from gradwire.kernels.backends import BACKENDS, chosen, get_kernels
from gradwire.kernels.entropy.base import CODERS, Coder
from gradwire.kernels.entropy.select import time_coders
from gradwire.kernels.fourier.blocks import FourierTable, block_sizes
from gradwire.kernels.indices.formats import (
    FORMATS,
    GapStatistics,
    IndexFormat,
    index_bytes,
    most_index_bytes,
    smallest_format,
)
from gradwire.kernels.lattice.operations import dither_shifts
from gradwire.kernels.levels.grid import WHOLE, BlockTable, Grid
from gradwire.kernels.levels.operations import packed_groups, summed
from gradwire.kernels.levels.shared_random import SharedRandomGrid
from gradwire.kernels.low_rank.operations import MatrixTable
from gradwire.kernels.moments.operations import Moments, inverse_scale
from gradwire.kernels.natural.operations import natural_bytes, natural_sign_bytes
from gradwire.kernels.packing.layout import (
    MAX_WORLD_SIZE,
    DigitLayout,
    byte_layout,
    digit_layout,
    packed_bytes,
    sum_layout,
)
from gradwire.kernels.rotation.blocks import LEAST_BLOCK, MOST_BLOCK, RotationTable
from gradwire.kernels.signs.operations import RunTable, SignSums
from gradwire.kernels.sketch.operations import MOST_COLUMNS, MOST_ROWS
from gradwire.kernels.table import GROUP_BYTES, GROUP_SIZE, SIGN_BYTES, SegmentTable
from gradwire.kernels.triton_core.backend import SERVED as TRITON_FAMILIES

__all__ = [
    "BACKENDS",
    "CODERS",
    "FAMILIES",
    "FORMATS",
    "GROUP_BYTES",
    "GROUP_SIZE",
    "LEAST_BLOCK",
    "MAX_WORLD_SIZE",
    "MOST_BLOCK",
    "MOST_COLUMNS",
    "MOST_ROWS",
    "SIGN_BYTES",
    "TRITON_FAMILIES",
    "WHOLE",
    "BlockTable",
    "Coder",
    "DigitLayout",
    "FourierTable",
    "GapStatistics",
    "Grid",
    "IndexFormat",
    "Kernels",
    "MatrixTable",
    "Moments",
    "RotationTable",
    "RunTable",
    "SegmentTable",
    "SharedRandomGrid",
    "SignSums",
    "block_sizes",
    "byte_layout",
    "chosen",
    "digit_layout",
    "dither_shifts",
    "get_kernels",
    "index_bytes",
    "inverse_scale",
    "most_index_bytes",
    "natural_bytes",
    "natural_sign_bytes",
    "packed_bytes",
    "packed_groups",
    "smallest_format",
    "sum_layout",
    "summed",
    "time_coders",
]
