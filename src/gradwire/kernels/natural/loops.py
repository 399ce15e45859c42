# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled loops over groups for powers of two, with plain bodies. ``ternary/loops.py`` states the rules."""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.natural import simd
from gradwire.kernels.natural.operations import natural_sign_bytes
from gradwire.kernels.numba_core.compiled import (
    Compiled,
    draw_of,
    either,
    find_segment,
    kept,
    next_piece,
    noise_at,
    rows_of,
)
from gradwire.kernels.numba_core.philox import plain_five_words
from gradwire.kernels.numba_core.vectors import prefer_wide
from gradwire.kernels.table import GROUP_SIZE

# Digest of the sources of the compiled code, and part of its name in Numba's cache; ``make digests`` writes it.
DIGEST = "e5e42e605538b802"


_u8, _u32, _f32 = np.uint8, np.uint32, np.float32


@njit(nogil=True)
def plain_natural_groups(x, first, count, noise, out, exponents, signs):
    for group in range((count + 79) // 80):
        for octet in range(10):
            out[signs + 10 * group + octet] = _u8(0)
        values = x[first + 80 * group : first + min(80 * group + 80, count)].view(_u32)
        for lane in range(16):
            for plane, word in enumerate(plain_five_words(noise, 16 * group + lane)):
                e = 16 * plane + lane
                raw = values[e] if e < values.size else _u32(0)
                bits = _u32(raw & _u32(0x7FFFFFFF))
                rounded = min(_u32(_u32(bits + _u32(word >> np.uint64(9))) >> _u32(23)), _u32(254))
                out[exponents + 80 * group + e] = _u8(255) if bits >= _u32(0x7F800000) else _u8(rounded)
                out[signs + 10 * group + e // 8] |= _u8(_u32(raw >> _u32(31)) << _u32(e % 8))


@njit(nogil=True)
def plain_natural_sums(rows, exponents, signs, count, weight, x, first, accumulate):
    one = np.empty(1, np.uint32)
    value = one.view(np.float32)
    for e in range(count):
        total = _f32(0)
        for row in range(rows.number):
            exponent = _u32(rows.octets[row * rows.stride + exponents + e])
            octet = _u32(rows.octets[row * rows.stride + signs + e // 8])
            one[0] = _u32(_u32(exponent << _u32(23)) | _u32(_u32(octet >> _u32(e % 8)) << _u32(31)))
            part = _f32(np.inf) if exponent == _u32(255) else _f32(value[0] * weight)
            total = part if row == 0 else _f32(total + part)
        x[first + e] = _f32(x[first + e] + total) if accumulate else total


natural_groups = either(plain_natural_groups, simd.natural_groups)
natural_sums = either(plain_natural_sums, simd.natural_sums)


class NaturalLoops(Compiled):
    """The operations of the family ``natural``, compiled."""

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
    """Encode groups ``begin .. end``; the exponents of all groups begin at ``out[exponents]``."""
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
    """Decode groups ``begin .. end`` of all rows and sum them."""
    prefer_wide()
    segment, group = find_segment(table, begin), begin
    while group < end:
        piece = next_piece(table, segment, group, end)
        segment = piece.segment
        natural_sums(simd, rows, exponents + 80 * group, 10 * group, piece.numel, weight, x, piece.at, accumulate)
        group = piece.stop
