"""Planes of bytes: checked operations, defined with NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gradwire.errors import HyperparameterError
from gradwire.kernels.front import Front, check_matrix, check_vector

WIDTHS = (1, 2, 4, 8)
"""Bytes that a number may have."""


class PlaneOperations(Front):
    """The operations of the family ``planes``.

    Numbers have ``width`` bytes, little endian. Plane p of n numbers has the byte of each that stands in place p,
    counted from the highest. If ``floating``, the highest bit of a number is its sign: it is moved behind the lowest
    first (a rotation by one bit), so that a byte has as much of the exponent as fits, and no sign.
    """

    def split_planes(self, data: torch.Tensor, width: int, floating: bool, planes: torch.Tensor) -> None:
        """Write the planes of numbers.

        Args:
            data: The numbers' bytes, uint8 ``[n * width]``.
            width: Bytes of a number: 1, 2, 4 or 8.
            floating: Whether the highest bit is a sign.
            planes: Takes the planes, uint8 ``[width, n]``.
        """
        _check(data, width, planes)
        family = self._serve("planes")
        if data.numel():
            family.split_planes(data, width, floating, planes)

    def join_planes(self, planes: torch.Tensor, width: int, floating: bool, out: torch.Tensor) -> None:
        """Invert :meth:`split_planes`: write numbers to ``out`` (uint8 ``[n * width]``), given their planes."""
        _check(out, width, planes)
        family = self._serve("planes")
        if out.numel():
            family.join_planes(planes, width, floating, out)


def _check(data: torch.Tensor, width: int, planes: torch.Tensor) -> None:
    check_vector("data", data, torch.uint8, data.numel())
    if width not in WIDTHS or data.numel() % width:
        raise HyperparameterError(f"{data.numel()} bytes, width {width}: a width is one of {WIDTHS} and divides them")
    check_matrix("planes", planes, torch.uint8, (width, data.numel() // width))


def split_planes(data: torch.Tensor, width: int, floating: bool, planes: torch.Tensor) -> None:
    words = _words(data, width)
    if floating:
        words = words << _one(width) | words >> _top(width)
    planes.numpy()[:] = words.view(np.uint8).reshape(-1, width).T[::-1]


def join_planes(planes: torch.Tensor, width: int, floating: bool, out: torch.Tensor) -> None:
    words = _words(torch.from_numpy(np.ascontiguousarray(planes.numpy()[::-1].T).reshape(-1)), width)
    if floating:
        words = words >> _one(width) | words << _top(width)
    out.numpy()[:] = words.view(np.uint8)


def _words(data: torch.Tensor, width: int) -> npt.NDArray[Any]:
    return data.numpy().view(f"<u{width}")


def _one(width: int) -> Any:
    return np.dtype(f"<u{width}").type(1)


def _top(width: int) -> Any:
    return np.dtype(f"<u{width}").type(8 * width - 1)
