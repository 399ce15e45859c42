"""The table of blocks that are transformed one by one, the places of their coefficients, and roots of unity."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gradwire.errors import HyperparameterError
from gradwire.kernels.rotation.blocks import LEAST_BLOCK, MOST_BLOCK
from gradwire.kernels.table import SegmentTable


class FourierColumns(NamedTuple):
    """A :class:`FourierTable`, as one argument of compiled code.

    Columns have one row for each block, except three: ``cos`` and ``sin`` hold cos(pi j / h) and sin(pi j / h) at
    h + j, for 0 <= j < h and powers of two h; ``order`` holds the bit-reversed order of half a block of the largest
    size.
    """

    offset: npt.NDArray[np.int64]
    numel: npt.NDArray[np.int64]
    real: npt.NDArray[np.int64]
    pair: npt.NDArray[np.int64]
    cos: npt.NDArray[np.float32]
    sin: npt.NDArray[np.float32]
    order: npt.NDArray[np.int64]


class FourierTable:
    """Whole parameters cut into blocks of powers of two, and a vector of the coefficients of all blocks.

    The blocks of a parameter have ``size`` elements. The rest at its end is cut by its binary digits, the largest block
    first: 4096 + 300 elements are blocks of 4096, 256, 32, 8 and 4. So there are as many coefficients as elements,
    without any padding.

    The coefficients of a parameter follow those of the parameter before. First come the real ones of all its blocks, of
    the frequencies 0 and b / 2 (a block of one element has one), then the pairs of all its blocks: the real and the
    imaginary part of each of the frequencies 1 to b / 2 - 1.

    Args:
        offset, numel: First element and number of elements of each parameter; they ascend and do not overlap.
        size: A power of two, 256 to 32768.

    Attributes:
        blocks: Number of blocks.
        coordinates: Number of coefficients of all blocks, as many as elements.
        extent: Number of elements that the vector must have at least.
        place: First coefficient of each parameter, int64 ``[parameters]``.
        reals: Number of real coefficients of each parameter, int64 ``[parameters]``; the others are pairs.
        columns: The table as one argument of compiled code.

    Raises:
        HyperparameterError: ``size`` is no such power of two, or parameters overlap or descend.

    Example:
        >>> table = FourierTable(offset=[0, 700], numel=[556, 3], size=256)
        >>> table.columns.numel.tolist(), table.place.tolist(), table.reals.tolist()
        ([256, 256, 32, 8, 4, 2, 1], [0, 556], [10, 3])
    """

    __slots__ = ("blocks", "columns", "coordinates", "extent", "place", "reals", "size")

    def __init__(
        self, offset: Sequence[int] | npt.NDArray[Any], numel: Sequence[int] | npt.NDArray[Any], size: int
    ) -> None:
        if not LEAST_BLOCK <= size <= MOST_BLOCK or size & (size - 1):
            raise HyperparameterError(f"blocks of {size}: a power of two from {LEAST_BLOCK} to {MOST_BLOCK} is needed")
        begin = np.array(offset, np.int64)
        table = SegmentTable(begin, numel, np.zeros_like(begin), np.zeros((len(begin), 2), np.uint32))
        self.size, self.extent, self.coordinates = size, table.extent, int(table.numel.sum())
        cut = [block_sizes(n, size) for n in table.numel.tolist()]
        sizes = np.array([b for blocks in cut for b in blocks], np.int64)
        segment = np.repeat(np.arange(len(table)), [len(blocks) for blocks in cut])
        self.blocks, self.place = len(sizes), np.cumsum(table.numel) - table.numel
        real, (cos, sin) = np.minimum(sizes, 2), _roots(size)
        self.reals = np.bincount(segment, real, len(table)).astype(np.int64)
        self.columns = FourierColumns(
            table.offset[segment] + _within(sizes, segment),
            sizes,
            self.place[segment] + _within(real, segment),
            (self.place + self.reals)[segment] + _within(sizes - real, segment),
            cos,
            sin,
            bit_reversed(size // 2),
        )
        for column in (*self.columns, self.place, self.reals):
            column.flags.writeable = False

    def __repr__(self) -> str:
        return f"FourierTable({self.blocks} blocks, {self.coordinates} coordinates)"


def block_sizes(numel: int, size: int) -> list[int]:
    """Return the sizes of a parameter's blocks, in order.

    Example:
        >>> block_sizes(556, 256)
        [256, 256, 32, 8, 4]
    """
    rest = numel % size
    return [size] * (numel // size) + [1 << k for k in range(size.bit_length() - 2, -1, -1) if rest >> k & 1]


def bit_reversed(count: int) -> npt.NDArray[np.int64]:
    """Return 0 to ``count - 1`` with their binary digits reversed; ``count`` is a power of two.

    Example:
        >>> bit_reversed(8).tolist()
        [0, 4, 2, 6, 1, 5, 3, 7]
    """
    order = np.zeros(1, np.int64)
    while len(order) < count:
        order = np.concatenate([2 * order, 2 * order + 1])
    return order


def _within(counts: npt.NDArray[np.int64], segment: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return for each block the sum of the counts of earlier blocks of its segment."""
    before = np.cumsum(counts) - counts
    first = np.searchsorted(segment, segment)
    return before - before[first]


@cache
def _roots(size: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return cos(pi j / h) and sin(pi j / h) at h + j, for h = 1, 2, 4, ... size / 2 and 0 <= j < h.

    Angles are halved by adding the unit vectors of their two sides and dividing by the length of the sum. IEEE 754
    rounds these float64 operations identically on every machine, whereas the sines of mathematical libraries may differ
    in the last bit.
    """
    points = np.array([[1.0, 0.0, -1.0], [0.0, 1.0, 0.0]])
    levels = [np.array([[0.0], [0.0]]), points[:, :1]]
    while 2 * len(levels[-1][0]) < size:
        levels.append(points[:, :-1])
        middle = points[:, :-1] + points[:, 1:]
        middle = middle / np.sqrt(middle[0] * middle[0] + middle[1] * middle[1])
        both = np.empty((2, 2 * points.shape[1] - 1))
        both[:, ::2], both[:, 1::2] = points, middle
        points = both
    cos, sin = np.concatenate(levels, axis=1).astype(np.float32)
    return cos, sin
