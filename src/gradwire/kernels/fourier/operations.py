"""Fourier transforms of blocks and back: checked operations, defined in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import torch

from gradwire.kernels.fourier.blocks import FourierTable, bit_reversed
from gradwire.kernels.front import Front, check_vector


class FourierOperations(Front):
    """The operations of the family ``fourier``.

    A block x of b real elements has the coefficients ``c_k = 1/b sum_j x_j e^(-2 pi i j k / b)``, so that
    ``x_j = sum_k c_k e^(2 pi i j k / b)``. Since x is real, c_0 and c_{b/2} are real, and c_{b-k} is the conjugate of
    c_k: b real numbers determine the block. ``sqrt(b) c`` is the unitary transform.

    All numbers are float32, and each product is rounded before it is added. Sums are made in the following order. The
    elements of x / b form m = b / 2 complex numbers ``y_j = x_{2j} + i x_{2j+1}``. For h = m / 2, m / 4, ... 1 the
    values at j and j + h, j without the bit h, become their sum, and their difference times
    ``w = e^(-pi i (j mod h) / h)``. The result is the transform Y of y at bit-reversed places. With Y at k and at
    m - k, and ``t = pi k / m``::

        E = (Y_k + conj Y_{m-k}) / 2    D = (Y_k - conj Y_{m-k}) / 2
        c_k = (Re E + (Im D cos t - Re D sin t)) + i (Im E - (Re D cos t + Im D sin t))

    and ``c_0, c_{b/2} = Re Y_0 +- Im Y_0``. The inverse begins with ``E = c_k + conj c_{m-k}``,
    ``D = c_k - conj c_{m-k}`` and ``Y_k = (Re E - (Re D sin t + Im D cos t)) + i (Im E + (Re D cos t - Im D sin t))``.
    Then, for h = 1, 2, ... m / 2, the value at j + h is multiplied by the conjugate of w, and the two become their sum
    and their difference.
    """

    def fourier(self, x: torch.Tensor, table: FourierTable, z: torch.Tensor) -> None:
        """Write the coefficients of all blocks of ``x`` (float32) into ``z`` (float32 ``[coordinates]``).

        If an element of a block is not finite, none of its coefficients is.
        """
        check_vector("x", x, torch.float32, table.extent, at_least=True)
        check_vector("z", z, torch.float32, table.coordinates)
        family = self._serve("fourier")
        if table.blocks:
            family.fourier(x.detach(), table, z)

    def inverse_fourier(self, z: torch.Tensor, table: FourierTable, x: torch.Tensor, accumulate: bool = False) -> None:
        """Write the blocks of the coefficients ``z`` (float32 ``[coordinates]``) into ``x`` (float32), or add them."""
        check_vector("x", x, torch.float32, table.extent, at_least=True)
        check_vector("z", z, torch.float32, table.coordinates)
        family = self._serve("fourier")
        if table.blocks:
            family.inverse_fourier(z.detach(), table, x.detach(), accumulate)


Complex: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Real and imaginary parts, since PyTorch may round products of complex numbers differently."""


def fourier(x: torch.Tensor, table: FourierTable, z: torch.Tensor) -> None:
    for size, index, real, pair in _by_size(table):
        values = x[index] * (1 / size)
        if size == 1:
            z[real] = values
            continue
        half, order = size // 2, torch.from_numpy(bit_reversed(size // 2))
        re, im = (part[:, order] for part in _forward((values[:, ::2], values[:, 1::2]), table))
        z[real] = torch.stack([re[:, 0] + im[:, 0], re[:, 0] - im[:, 0]], 1)
        (pr, pi), (qr, qi) = ((part[:, 1:] for part in (re, im)), (part[:, 1:].flip(1) for part in (re, im)))
        er, ei, dr, di = (0.5 * (pr + qr), 0.5 * (pi - qi), 0.5 * (pr - qr), 0.5 * (pi + qi))
        cos, sin = (part[1:] for part in _roots(table, half))
        z[pair] = er + (di * cos - dr * sin)
        z[pair + 1] = ei - (dr * cos + di * sin)


def inverse_fourier(z: torch.Tensor, table: FourierTable, x: torch.Tensor, accumulate: bool) -> None:
    for size, index, real, pair in _by_size(table):
        values = z[real]
        if size > 1:
            half, order = size // 2, torch.from_numpy(bit_reversed(size // 2))
            pr, pi = z[pair], z[pair + 1]
            qr, qi = pr.flip(1), pi.flip(1)
            er, ei, dr, di = pr + qr, pi - qi, pr - qr, pi + qi
            cos, sin = (part[1:] for part in _roots(table, half))
            re, im = er - (dr * sin + di * cos), ei + (dr * cos - di * sin)
            first, last = values[:, :1], values[:, 1:]
            re, im = torch.cat([first + last, re], 1), torch.cat([first - last, im], 1)
            values = torch.stack(_backward((re[:, order], im[:, order]), table), 2).reshape(-1, size)
        x[index] = x[index] + values if accumulate else values


def _by_size(table: FourierTable) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield the size of blocks, and the places of their elements, real coefficients and pairs, for each size."""
    for size in np.unique(table.columns.numel).tolist():
        blocks = np.flatnonzero(table.columns.numel == size)
        begins = (table.columns.offset, table.columns.real, table.columns.pair)
        offset, real, pair = (torch.from_numpy(column[blocks])[:, None] for column in begins)
        yield (
            size,
            offset + torch.arange(size, device="cpu"),
            real + torch.arange(min(size, 2), device="cpu"),
            pair + 2 * torch.arange(max(0, size // 2 - 1), device="cpu"),
        )


def _roots(table: FourierTable, h: int) -> Complex:
    """Return cos(pi j / h) and sin(pi j / h) for 0 <= j < h."""
    cos, sin = (torch.from_numpy(part[h : 2 * h].copy()) for part in (table.columns.cos, table.columns.sin))
    return cos, sin


def _forward(y: Complex, table: FourierTable) -> Complex:
    """Transform rows; results are at bit-reversed places."""
    (rows, count), (re, im) = y[0].shape, y
    h = count // 2
    while h:
        (ur, vr), (ui, vi) = (part.reshape(rows, -1, 2, h).unbind(2) for part in (re, im))
        cos, sin = _roots(table, h)
        dr, di = ur - vr, ui - vi
        re = torch.stack([ur + vr, dr * cos + di * sin], 2)
        im = torch.stack([ui + vi, di * cos - dr * sin], 2)
        h //= 2
    return re.reshape(rows, count), im.reshape(rows, count)


def _backward(y: Complex, table: FourierTable) -> Complex:
    """Transform rows back, from bit-reversed places."""
    (rows, count), (re, im) = y[0].shape, y
    h = 1
    while h < count:
        (ur, vr), (ui, vi) = (part.reshape(rows, -1, 2, h).unbind(2) for part in (re, im))
        cos, sin = _roots(table, h)
        tr, ti = vr * cos - vi * sin, vr * sin + vi * cos
        re, im = torch.stack([ur + tr, ur - tr], 2), torch.stack([ui + ti, ui - ti], 2)
        h *= 2
    return re.reshape(rows, count), im.reshape(rows, count)
