# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled loops over segments for powers of two; see ``ternary/loops.py`` for the rules."""

from __future__ import annotations

from numba import njit

from gradwire.kernels.numba_core.overloads import either
from gradwire.kernels.numba_core.vectors import prefer_wide

__all__ = ["natural_encode_range", "natural_mean_range"]

# Of all that this is compiled from, so that Numba drops what it kept when that changes (``make digests``).
DIGEST = "e9c0801294f2aee8"

natural_groups = either("natural_groups", "natural.scalar", "natural.simd")
natural_sums = either("natural_sums", "natural.scalar", "natural.simd")


@njit(nogil=True, cache=True)
def natural_encode_range(
    variant, x, offset, numel, start, key, first_group, round, stream, begin, end, segment, out
):  # fmt: skip
    """Encode groups ``begin .. end``, the first in ``segment``; exponents begin behind the signs of all groups."""
    prefer_wide()
    exponents = (10 * first_group[offset.size] + 15) // 16 * 16
    group = begin
    while group < end:
        while first_group[segment + 1] <= group:
            segment += 1
        within = 80 * (group - first_group[segment])
        stop = min(end, first_group[segment + 1])
        natural_groups(
            variant, x, offset[segment] + within, min(80 * (stop - group), numel[segment] - within), key[segment, 0],
            key[segment, 1], round, stream, (start[segment] + within) // 80 * 16, out, exponents + 80 * group,
            10 * group,
        )  # fmt: skip
        group = stop


@njit(nogil=True, cache=True)
def natural_mean_range(
    variant, rows, stride, number, offset, numel, first_group, weight, begin, end, segment, x, accumulate
):  # fmt: skip
    """Decode groups ``begin .. end``, the first in ``segment``."""
    prefer_wide()
    exponents = (10 * first_group[offset.size] + 15) // 16 * 16
    group = begin
    while group < end:
        while first_group[segment + 1] <= group:
            segment += 1
        within = 80 * (group - first_group[segment])
        stop = min(end, first_group[segment + 1])
        natural_sums(
            variant, rows, exponents + 80 * group, 10 * group, stride, number,
            min(80 * (stop - group), numel[segment] - within), weight, x, offset[segment] + within, accumulate,
        )  # fmt: skip
        group = stop
