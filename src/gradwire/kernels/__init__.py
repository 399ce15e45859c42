"""Arithmetic on blocks and bits: one backend a file, the same bits from all of them."""

from gradwire.kernels.base import Kernels, Moments, inverse_scale
from gradwire.kernels.dispatch import BACKENDS, get_kernels
from gradwire.kernels.entropy.base import CODERS, Coder
from gradwire.kernels.entropy.select import time_coders
from gradwire.kernels.families import FAMILIES
from gradwire.kernels.lattice import dither_shifts
from gradwire.kernels.levels import WHOLE, BlockTable, Grid, packed_groups, summed
from gradwire.kernels.natural import natural_bytes, natural_sign_bytes
from gradwire.kernels.packing.layout import (
    MAX_WORLD_SIZE,
    DigitLayout,
    byte_layout,
    digit_layout,
    packed_bytes,
    sum_layout,
)
from gradwire.kernels.signs import SIGN_BYTES, RunTable, SignSums
from gradwire.kernels.table import GROUP_BYTES, GROUP_SIZE, SegmentTable

__all__ = [
    "BACKENDS",
    "CODERS",
    "FAMILIES",
    "GROUP_BYTES",
    "GROUP_SIZE",
    "MAX_WORLD_SIZE",
    "SIGN_BYTES",
    "WHOLE",
    "BlockTable",
    "Coder",
    "DigitLayout",
    "Grid",
    "Kernels",
    "Moments",
    "RunTable",
    "SegmentTable",
    "SignSums",
    "byte_layout",
    "digit_layout",
    "dither_shifts",
    "get_kernels",
    "inverse_scale",
    "natural_bytes",
    "natural_sign_bytes",
    "packed_bytes",
    "packed_groups",
    "sum_layout",
    "summed",
    "time_coders",
]
