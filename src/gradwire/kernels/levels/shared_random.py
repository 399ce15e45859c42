"""Grids whose digits are decoded with a random integer that sender and receiver share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gradwire.errors import HyperparameterError
from gradwire.kernels.levels.grid import Grid, GridColumns
from gradwire.kernels.moments.operations import inverse_scale

_MOST_INTEGERS = 256


class SharedRandomColumns(NamedTuple):
    """A :class:`SharedRandomGrid`, as one argument of compiled code.

    With the integer h, digit d is decoded as ``values.values[d H + h]``; ``integers`` is H, ``shift`` its logarithm.
    """

    points: GridColumns
    values: GridColumns
    inverse: npt.NDArray[np.float32]
    integers: int
    shift: int
    middle: int


class SharedRandomGrid:
    """Points t_0 < ... < t_n to which values are rounded, their digits, and the values of digits.

    A value is rounded without bias to one of its two neighbours among the points, like in :class:`Grid`; beyond the
    ends it is rounded to the end. With an integer h in 0 .. H - 1, point g becomes the digit ``floor((g + h) / H)``,
    which is decoded as ``values[h, digit]``. If sender and receiver draw the same uniform h, a digit carries more
    information than the nearest of a few levels.

    Args:
        points: The ``(base - 1) H + 1`` points, ascending from -T to T.
        values: Value of each digit for each integer, ``[H, base]``; H is a power of two, 256 at most.

    Attributes:
        points: Grid of the points divided by T.
        values: Value of each digit for each integer, float32 ``[H, base]``, read-only.
        base: Number of digits.
        integers: Number H of integers.
        inverse: 2^24 / T, float32 ``[1]``.
        columns: The grid as one argument of compiled code.

    Raises:
        HyperparameterError: the numbers of points and values do not match, H is no such power of two, or the points do
            not ascend from -T to T.
    """

    __slots__ = ("__weakref__", "base", "columns", "integers", "inverse", "points", "values")

    def __init__(self, points: Sequence[float], values: npt.NDArray[np.float64]) -> None:
        t = np.asarray(points, np.float64)
        self.values = np.asarray(values).astype(np.float32)
        self.integers, self.base = self.values.shape
        if self.integers > _MOST_INTEGERS or self.integers & (self.integers - 1):
            raise HyperparameterError(f"{self.integers} integers: a power of two up to {_MOST_INTEGERS} is needed")
        if len(t) != (self.base - 1) * self.integers + 1:
            raise HyperparameterError(f"{len(t)} points do not make {self.base} digits with {self.integers} integers")
        self.points = Grid.ordered((t / t[-1]).tolist())
        self.inverse = inverse_scale(torch.tensor([t[-1]], dtype=torch.float32, device="cpu"))
        by_digit = np.ascontiguousarray(self.values.T).reshape(-1)
        for array in (self.values, by_digit):
            array.flags.writeable = False
        self.columns = SharedRandomColumns(
            self.points.columns, self.points.columns._replace(values=by_digit), self.inverse.numpy(), self.integers,
            self.integers.bit_length() - 1, self.base // 2,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"SharedRandomGrid({self.points.steps + 1} points, {self.base} digits, {self.integers} integers)"
