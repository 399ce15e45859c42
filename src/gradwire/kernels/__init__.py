"""Arithmetic on blocks and bits: one backend a file, the same bits from all of them."""

from gradwire.kernels.base import Kernels, Moments, inverse_scale
from gradwire.kernels.digits import DigitLayout, digit_layout, packed_bytes, sum_layout
from gradwire.kernels.dispatch import BACKENDS, get_kernels
from gradwire.kernels.levels import WHOLE, BlockTable, Grid, packed_groups
from gradwire.kernels.signs import SIGN_BYTES, RunTable, SignSums
from gradwire.kernels.table import GROUP_BYTES, GROUP_SIZE, SegmentTable

__all__ = [
    "BACKENDS",
    "GROUP_BYTES",
    "GROUP_SIZE",
    "SIGN_BYTES",
    "WHOLE",
    "BlockTable",
    "DigitLayout",
    "Grid",
    "Kernels",
    "Moments",
    "RunTable",
    "SegmentTable",
    "SignSums",
    "digit_layout",
    "get_kernels",
    "inverse_scale",
    "packed_bytes",
    "packed_groups",
    "sum_layout",
]
