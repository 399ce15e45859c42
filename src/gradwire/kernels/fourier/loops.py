# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled loops of Fourier transforms. ``ternary/loops.py`` states the rules.

LLVM vectorises all loops over neighbours, so there are no explicit vectors. Steps between values fewer than sixteen
apart are done on the transposed matrix of rows of sixteen, where they are steps between whole rows.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.numba_core.compiled import Compiled, kept
from gradwire.kernels.numba_core.vectors import prefer_wide
from gradwire.kernels.table import LANES

# Digest of the sources of the compiled code, and part of its name in Numba's cache; ``make digests`` writes it.
DIGEST = "7034e862ee381775"


_f32 = np.float32


class FourierLoops(Compiled):
    """The operations of the family ``fourier``, compiled."""

    def fourier(self, x, table, z):
        values, out = x.numpy(), z.numpy()

        def work(begin: int, end: int) -> None:
            fourier_range(self.simd, values, table.columns, begin, end, table.size, out)

        self.split(table.blocks, 1, table.coordinates // table.blocks, work)

    def inverse_fourier(self, z, table, x, accumulate):
        values, out = z.numpy(), x.numpy()

        def work(begin: int, end: int) -> None:
            inverse_fourier_range(self.simd, values, table.columns, begin, end, table.size, out, accumulate)

        self.split(table.blocks, 1, table.coordinates // table.blocks, work)


@njit(nogil=True)
def _run(x, begin, size):
    return x[begin : begin + size]


@njit(nogil=True)
def _sums(u, v):
    """Replace u and v by their sum and difference."""
    for j in range(u.size):
        difference = _f32(u[j] - v[j])
        u[j] = _f32(u[j] + v[j])
        v[j] = difference


@njit(nogil=True)
def _times(re, im, cos, sin):
    """Multiply complex numbers by roots, element by element."""
    for j in range(re.size):
        product = _f32(_f32(re[j] * cos[j]) - _f32(im[j] * sin[j]))
        im[j] = _f32(_f32(re[j] * sin[j]) + _f32(im[j] * cos[j]))
        re[j] = product


@njit(nogil=True)
def _times_conjugate(re, im, cos, sin):
    """Multiply complex numbers by the conjugates of roots, element by element."""
    for j in range(re.size):
        product = _f32(_f32(re[j] * cos[j]) + _f32(im[j] * sin[j]))
        im[j] = _f32(_f32(im[j] * cos[j]) - _f32(re[j] * sin[j]))
        re[j] = product


@njit(nogil=True)
def _times_one(re, im, cos, sin):
    """Multiply complex numbers by one root, or, given ``-sin``, by its conjugate."""
    for j in range(re.size):
        product = _f32(_f32(re[j] * cos) - _f32(im[j] * sin))
        im[j] = _f32(_f32(im[j] * cos) + _f32(re[j] * sin))
        re[j] = product


@njit(nogil=True)
def _transpose(x, rows, columns, out):
    """Write the matrix x ``[rows, columns]`` to ``out`` as ``[columns, rows]``."""
    for j in range(columns):
        target = _run(out, j * rows, rows)
        for i in range(rows):
            target[i] = x[i * columns + j]


@njit(nogil=True)
def _apart(re, im, table, h, backward):
    """Do a step between values h apart, where h is at least sixteen, or half of all values."""
    cos, sin = _run(table.cos, h, h), _run(table.sin, h, h)
    for first in range(0, re.size, 2 * h):
        ur, ui, vr, vi = _run(re, first, h), _run(im, first, h), _run(re, first + h, h), _run(im, first + h, h)
        if backward:
            _times(vr, vi, cos, sin)
        _sums(ur, vr)
        _sums(ui, vi)
        if not backward:
            _times_conjugate(vr, vi, cos, sin)


@njit(nogil=True)
def _near(re, im, table, h, lanes, backward):
    """Do a step between values h apart, fewer than sixteen, on the transposed matrix of ``lanes`` rows."""
    length = re.size // lanes
    for lane in range(lanes):
        if lane & h == 0:
            root = h + lane % h
            ur, ui = _run(re, lane * length, length), _run(im, lane * length, length)
            vr, vi = _run(re, (lane + h) * length, length), _run(im, (lane + h) * length, length)
            if backward:
                _times_one(vr, vi, table.cos[root], table.sin[root])
            _sums(ur, vr)
            _sums(ui, vi)
            if not backward:
                _times_one(vr, vi, table.cos[root], -table.sin[root])


@njit(nogil=True)
def _places(table, half, size, lanes, places):
    """Write the place in the transposed matrix of each of ``half`` frequencies."""
    length = half // lanes
    more = (size // 2) // half
    for k in range(half):
        place = table.order[k * more] if half > 1 else 0
        places[k] = place % lanes * length + place // lanes


@njit(nogil=True)
def _transform(x, re, im, ordered_re, ordered_im, table, places):
    """Transform x / b as complex numbers; ``ordered_re`` and ``ordered_im`` get the results by frequency."""
    half = re.size
    lanes = min(LANES, half)
    factor = _f32(1.0 / (2 * half))
    for j in range(half):
        re[j], im[j] = _f32(x[2 * j] * factor), _f32(x[2 * j + 1] * factor)
    h = half // 2
    while h >= lanes:
        _apart(re, im, table, h, False)
        h //= 2
    _transpose(re, half // lanes, lanes, ordered_re)
    _transpose(im, half // lanes, lanes, ordered_im)
    while h:
        _near(ordered_re, ordered_im, table, h, lanes, False)
        h //= 2
    for k in range(half):
        re[k], im[k] = ordered_re[places[k]], ordered_im[places[k]]


@njit(nogil=True)
def _transform_back(re, im, ordered_re, ordered_im, table, places):
    """Transform the results of :func:`_transform` back to complex numbers in ``re`` and ``im``."""
    half = re.size
    lanes = min(LANES, half)
    for k in range(half):
        re[places[k]], im[places[k]] = ordered_re[k], ordered_im[k]
    h = 1
    while h < lanes:
        _near(re, im, table, h, lanes, True)
        h *= 2
    _transpose(re, lanes, half // lanes, ordered_re)
    _transpose(im, lanes, half // lanes, ordered_im)
    re[:], im[:] = ordered_re, ordered_im
    while h < half:
        _apart(re, im, table, h, True)
        h *= 2


@njit(nogil=True)
def _reversed(x, out):
    """Write x to ``out`` in reverse order."""
    last = x.size - 1
    for k in range(x.size):
        out[k] = x[last - k]


@njit(nogil=True)
def _separate(pr, pi, qr, qi, cos, sin, out):
    """Write the pairs of a block, given its half transform at the frequencies k (p) and half - k (q)."""
    half = _f32(0.5)
    for k in range(pr.size):
        er, ei = _f32(half * _f32(pr[k] + qr[k])), _f32(half * _f32(pi[k] - qi[k]))
        dr, di = _f32(half * _f32(pr[k] - qr[k])), _f32(half * _f32(pi[k] + qi[k]))
        out[2 * k] = _f32(er + _f32(_f32(di * cos[k]) - _f32(dr * sin[k])))
        out[2 * k + 1] = _f32(ei - _f32(_f32(dr * cos[k]) + _f32(di * sin[k])))


@njit(nogil=True)
def _join_real(pr, pi, qr, qi, cos, sin, out):
    """Write the real parts of a half transform, given the pairs at the frequencies k (p) and half - k (q)."""
    for k in range(pr.size):
        dr, di = _f32(pr[k] - qr[k]), _f32(pi[k] + qi[k])
        out[k] = _f32(_f32(pr[k] + qr[k]) - _f32(_f32(dr * sin[k]) + _f32(di * cos[k])))


@njit(nogil=True)
def _join_imaginary(pr, pi, qr, qi, cos, sin, out):
    """Write the imaginary parts of a half transform, given the pairs at the frequencies k (p) and half - k (q)."""
    for k in range(pr.size):
        dr, di = _f32(pr[k] - qr[k]), _f32(pi[k] + qi[k])
        out[k] = _f32(_f32(pi[k] - qi[k]) + _f32(_f32(dr * cos[k]) - _f32(di * sin[k])))


@kept(DIGEST)
def fourier_range(simd, x, table, begin, end, size, z):
    """Transform blocks ``begin .. end``."""
    prefer_wide()
    room, all_places, known = np.empty((4, size // 2), np.float32), np.empty(size // 2, np.int64), 0
    for block in range(begin, end):
        numel, offset = table.numel[block], table.offset[block]
        if numel == 1:
            z[table.real[block]] = x[offset]
            continue
        half = numel // 2
        if half != known:
            _places(table, half, size, min(LANES, half), all_places)
            known = half
        re, im, other_re, other_im = (
            _run(room[0], 0, half), _run(room[1], 0, half), _run(room[2], 0, half), _run(room[3], 0, half)
        )  # fmt: skip
        _transform(_run(x, offset, numel), re, im, other_re, other_im, table, all_places)
        real, pairs = _run(z, table.real[block], 2), half - 1
        real[0], real[1] = _f32(re[0] + im[0]), _f32(re[0] - im[0])
        pr, pi, qr, qi = _run(re, 1, pairs), _run(im, 1, pairs), _run(other_re, 0, pairs), _run(other_im, 0, pairs)
        _reversed(pr, qr)
        _reversed(pi, qi)
        cos, sin = _run(table.cos, half + 1, pairs), _run(table.sin, half + 1, pairs)
        _separate(pr, pi, qr, qi, cos, sin, _run(z, table.pair[block], 2 * pairs))


@kept(DIGEST)
def inverse_fourier_range(simd, z, table, begin, end, size, x, accumulate):
    """Transform blocks ``begin .. end`` back."""
    prefer_wide()
    room, all_places, known = np.empty((6, size // 2), np.float32), np.empty(size // 2, np.int64), 0
    for block in range(begin, end):
        numel, offset = table.numel[block], table.offset[block]
        target, real = _run(x, offset, numel), _run(z, table.real[block], min(2, numel))
        if numel == 1:
            target[0] = _f32(target[0] + real[0]) if accumulate else real[0]
            continue
        half = numel // 2
        if half != known:
            _places(table, half, size, min(LANES, half), all_places)
            known = half
        pairs = half - 1
        pr, pi, qr, qi = (
            _run(room[0], 0, pairs), _run(room[1], 0, pairs), _run(room[4], 0, pairs), _run(room[5], 0, pairs)
        )  # fmt: skip
        cos, sin = _run(table.cos, half + 1, pairs), _run(table.sin, half + 1, pairs)
        found = _run(z, table.pair[block], 2 * pairs)
        for k in range(pairs):
            pr[k], pi[k] = found[2 * k], found[2 * k + 1]
        _reversed(pr, qr)
        _reversed(pi, qi)
        ordered_re, ordered_im = _run(room[2], 0, half), _run(room[3], 0, half)
        ordered_re[0], ordered_im[0] = _f32(real[0] + real[1]), _f32(real[0] - real[1])
        _join_real(pr, pi, qr, qi, cos, sin, _run(ordered_re, 1, pairs))
        _join_imaginary(pr, pi, qr, qi, cos, sin, _run(ordered_im, 1, pairs))
        re, im = _run(room[0], 0, half), _run(room[1], 0, half)
        _transform_back(re, im, ordered_re, ordered_im, table, all_places)
        for j in range(half):
            target[2 * j] = _f32(target[2 * j] + re[j]) if accumulate else re[j]
            target[2 * j + 1] = _f32(target[2 * j + 1] + im[j]) if accumulate else im[j]
