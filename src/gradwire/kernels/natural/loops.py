# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled loops over segments for powers of two. See ``ternary/loops.py`` for the rules."""

from __future__ import annotations

import numpy as np

from gradwire.kernels.natural.operations import natural_sign_bytes
from gradwire.kernels.numba_core.compiled import Compiled, rows_of
from gradwire.kernels.numba_core.overloads import either, kept
from gradwire.kernels.numba_core.segments import draw_of, find_segment, next_piece, noise_at
from gradwire.kernels.numba_core.vectors import prefer_wide
from gradwire.kernels.table import GROUP_SIZE

__all__ = ["NaturalLoops", "natural_encode_range", "natural_mean_range"]

# Of all that this is compiled from: what Numba keeps on disk is kept under this name (``make digests``).
DIGEST = "e41d05bf71343196"

natural_groups = either("natural_groups", "natural.scalar", "natural.simd")
natural_sums = either("natural_sums", "natural.scalar", "natural.simd")


class NaturalLoops(Compiled):
    """The operations of powers of two."""

    def natural_encode(self, x, table, round, stream, out):
        values, octets, exponents = x.numpy(), out.numpy(), natural_sign_bytes(table.groups)
        draw = draw_of(round, stream)

        def work(begin: int, end: int) -> None:
            natural_encode_range(self.simd, values, table.columns, draw, begin, end, octets, exponents)

        self.split(table.groups, 1, GROUP_SIZE, work)

    def natural_mean(self, rows, table, weight, x, accumulate):
        payloads, target, exponents = rows_of(rows), x.numpy(), natural_sign_bytes(table.groups)
        factor = np.float32(weight)

        def work(begin: int, end: int) -> None:
            natural_mean_range(
                self.simd, payloads, exponents, table.columns, factor, begin, end, target, accumulate
            )  # fmt: skip

        self.split(table.groups, 1, GROUP_SIZE * rows.shape[0], work)


@kept(DIGEST)
def natural_encode_range(simd, x, table, draw, begin, end, out, exponents):
    """Encode groups ``begin .. end``; ``exponents`` of ``out`` is where those of all groups begin."""
    prefer_wide()
    segment, group = find_segment(table, begin), begin
    while group < end:
        piece = next_piece(table, segment, group, end)
        segment = piece.segment
        noise = noise_at(table, piece, draw)
        natural_groups(simd, x, piece.at, piece.numel, noise, out, exponents + 80 * group, 10 * group)
        group = piece.stop


@kept(DIGEST)
def natural_mean_range(simd, rows, exponents, table, weight, begin, end, x, accumulate):
    """Decode groups ``begin .. end``."""
    prefer_wide()
    segment, group = find_segment(table, begin), begin
    while group < end:
        piece = next_piece(table, segment, group, end)
        segment = piece.segment
        natural_sums(simd, rows, exponents + 80 * group, 10 * group, piece.numel, weight, x, piece.at, accumulate)
        group = piece.stop
