# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled loops over segments for powers of two; see ``cpu_drivers.py`` for the rules."""

from __future__ import annotations

from numba import njit

from gradwire.kernels.variants import either
from gradwire.kernels.vectors import prefer_wide

__all__ = ["natural_encode_all", "natural_mean_all"]

natural_groups = either("natural_groups", "natural.plain", "natural.vector")
natural_sums = either("natural_sums", "natural.plain", "natural.vector")


@njit(nogil=True, cache=True)
def natural_encode_all(variant, x, offset, numel, start, key, first_group, round, stream, out):
    """Encode all segments; signs begin behind the exponents of all groups."""
    prefer_wide()
    signs = 80 * first_group[offset.size]
    for segment in range(offset.size):
        group = first_group[segment]
        natural_groups(
            variant, x, offset[segment], numel[segment], key[segment, 0], key[segment, 1], round, stream,
            start[segment] // 80 * 16, out, 80 * group, signs + 10 * group,
        )  # fmt: skip
    out[signs + 10 * first_group[offset.size] :] = 0


@njit(nogil=True, cache=True)
def natural_mean_all(variant, rows, stride, number, offset, numel, first_group, weight, x, accumulate):
    """Decode all segments."""
    prefer_wide()
    signs = 80 * first_group[offset.size]
    for segment in range(offset.size):
        group = first_group[segment]
        natural_sums(
            variant, rows, 80 * group, signs + 10 * group, stride, number, numel[segment], weight, x, offset[segment],
            accumulate,
        )  # fmt: skip
