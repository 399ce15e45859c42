"""Quantisation levels: which values a digit may stand for, and how a value is rounded to one of two neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gradwire.errors import HyperparameterError
from gradwire.kernels.packing.layout import MAX_WORLD_SIZE
from gradwire.kernels.table import LANES, SegmentTable

UNIT = float(1 << 24)
"""Levels are compared on this scale, so that a 24-bit uniform integer needs no scaling."""

SOUGHT = 24
"""Steps from which on the step of a value is looked up: comparisons with fewer take less time."""

_MOST_CELLS = 1 << 10


class CellColumns(NamedTuple):
    """Where steps lie: what finds a value's step without a comparison with each.

    Value a of a grid lies in the cell ``trunc(a * per_unit + shift)``, in float32, from 0 to ``last``. Each cell holds
    the end of one step at most. ``step`` is the step at its beginning (int32 ``[last + 1]``), ``border`` the end of
    that step (infinite after the last). So the step of a is ``step + [a > border]``.
    """

    step: npt.NDArray[np.int32]
    border: npt.NDArray[np.float32]
    per_unit: np.float32
    shift: np.float32
    last: int


class GridColumns(NamedTuple):
    """A :class:`Grid`, as one argument of compiled code."""

    values: npt.NDArray[np.float32]
    edge: npt.NDArray[np.float32]
    gap: npt.NDArray[np.float32]
    steps: int
    positive: int
    negative: int
    signed: bool
    uniform: bool
    cells: CellColumns


class Grid:
    """Levels in [-1, 1] and the rule that rounds a normalised value r = x / scale to one of its two neighbours.

    With u an element's 24-bit uniform integer, a the magnitude |r| (r itself where ``signed``) and U = 2^24::

        c = number of steps k with a * U > edge_k * U + u * (edge_(k+1) - edge_k)
        digit = positive + c if r >= 0 or signed else negative - c

    An interval is passed with probability (a - edge_k) / (edge_(k+1) - edge_k), so that rounding is unbiased; a value
    on a level is passed for sure, since a threshold is always rounded to below the interval's end. Where the levels are
    j / s, the count is computed as floor(a s) + [u < U frac(a s)] instead: the same law, fewer operations.

    Attributes:
        values: The level of each digit, float32 ``[base]``, read-only.
        base: Number of digits.
        edge, gap: float32 ``[steps]``: lower end of each step on the scale U, and its length.
        steps: Largest count c.
        uniform: Whether the levels are j / steps.
        signed: Whether r is compared with its sign.
        positive, negative: Digits of the count 0.
        columns: All of these, but the base.
    """

    __slots__ = (
        "__weakref__", "base", "columns", "edge", "gap", "negative", "positive", "signed", "steps", "uniform", "values",
    )  # fmt: skip

    values: npt.NDArray[np.float32]
    edge: npt.NDArray[np.float32]
    gap: npt.NDArray[np.float32]

    def __init__(self, values: npt.NDArray[np.float64], lower: npt.NDArray[np.float64], upper: npt.NDArray[np.float64],
                 *, positive: int, negative: int, signed: bool, uniform: bool = False) -> None:  # fmt: skip
        self.values = values.astype(np.float32)
        self.base, self.steps = len(values), len(lower)
        self.positive, self.negative, self.signed, self.uniform = positive, negative, signed, uniform
        if not 2 <= self.base <= 2 * MAX_WORLD_SIZE + 1:
            raise HyperparameterError(f"{self.base} levels: 2 to {2 * MAX_WORLD_SIZE + 1} can be packed")
        self.edge = lower.astype(np.float32) * np.float32(UNIT)
        self.gap = _below(self.edge, upper.astype(np.float32) * np.float32(UNIT))
        for column in (self.values, self.edge, self.gap):
            column.flags.writeable = False
        cells = _cells(self.edge) if self.steps >= SOUGHT and not uniform else _cells(self.edge[:0])
        self.columns = GridColumns(
            self.values, self.edge, self.gap, self.steps, positive, negative, signed, uniform, cells
        )

    @property
    def zero_ends(self) -> float:
        """The magnitude up to which everything is rounded to the level zero; 0 where there is no such level."""
        return float(self.edge[0]) / UNIT if self.values[self.positive] == 0 else 0.0

    @classmethod
    def even(cls, levels: int) -> Grid:
        """Return 0, +-1/s, ..., +-1 for s = ``levels``: base 2s + 1."""
        s = levels
        ends = np.arange(s + 1) / s
        # Divided in float32, as decoders do.
        values = np.arange(-s, s + 1, dtype=np.float32) / np.float32(s)
        return cls(values.astype(np.float64), ends[:-1], ends[1:], positive=s, negative=s, signed=False, uniform=True)

    @classmethod
    def symmetric(cls, magnitudes: Sequence[float], *, zero: bool = True) -> Grid:
        """Return +-m for ascending magnitudes in (0, 1], the last 1; and 0 in between if ``zero``.

        Without a zero, what lies between the two smallest levels may change its sign.
        """
        m = np.asarray(magnitudes, np.float64)
        _check(np.concatenate([[0.0], m]), m[-1:] == 1, magnitudes)
        lower = np.concatenate([[0.0 if zero else -m[0]], m[:-1]])
        values = np.concatenate([-m[::-1], [0.0] if zero else [], m])
        count = len(m)
        return cls(values, lower, m, positive=count if zero else count - 1, negative=count, signed=False)

    @classmethod
    def ordered(cls, levels: Sequence[float]) -> Grid:
        """Return ascending levels from -1 to 1, symmetric or not."""
        v = np.asarray(levels, np.float64)
        _check(v, (v[:1] == -1) & (v[-1:] == 1), levels)
        return cls(v, v[:-1], v[1:], positive=0, negative=0, signed=True)

    @classmethod
    def nearest(cls, magnitudes: Sequence[float], *, zero: bool = False) -> Grid:
        """Return +-m for ascending magnitudes above zero, and 0 in between if ``zero``, without random intervals.

        Each value is rounded to the nearest.

        A value halfway between two is rounded to the smaller magnitude. Magnitudes may be above 1.
        """
        m = np.asarray(magnitudes, np.float64)
        if not np.all(np.diff(np.concatenate([[0.0], m]).astype(np.float32)) > 0):
            raise HyperparameterError(f"levels ascend strictly from above zero, in float32 too, not {magnitudes!r}")
        inner = np.concatenate([[0.0], m]) if zero else m
        middle = (inner[1:] + inner[:-1]) / 2
        values = np.concatenate([-m[::-1], inner])
        negative = len(m) if zero else len(m) - 1
        return cls(values, middle, middle, positive=len(m), negative=negative, signed=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Grid) and self.signed == other.signed and np.array_equal(self.values, other.values)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Grid({', '.join(f'{v:.4g}' for v in self.values)})"


def _check(ascending: npt.NDArray[np.float64], ends: npt.NDArray[np.bool_], given: object) -> None:
    single = ascending.astype(np.float32)
    if len(ascending) < 2 or not np.all(np.diff(single) > 0) or not bool(ends.all()):
        raise HyperparameterError(f"levels ascend strictly, in float32 too, and end at 1, not {given!r}")


def _below(edge: npt.NDArray[np.float32], end: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return gaps, shortened until no threshold ``edge + u * gap`` rounds up to the end of its interval."""
    most = np.float32(UNIT - 1)
    gap = ((end.astype(np.float64) - edge) / UNIT).astype(np.float32)
    # Twice as many units of the last place each time: neighbouring levels end at a gap of zero after 24 turns.
    for turn in range(25):
        over = edge + most * gap >= end
        if not bool(over.any()):
            break
        gap = np.where(over, gap * np.float32(max(0.0, 1 - 2.0 ** (turn - 23))), gap)
    return gap


def _cells(edge: npt.NDArray[np.float32]) -> CellColumns:
    """Return cells for steps that begin at these ascending edges; none where that would take too many."""
    cells = 2 * len(edge)
    while 0 < cells <= _MOST_CELLS:
        per_unit = np.float32((cells - 1) / (float(edge[-1]) - float(edge[0])))
        shift = np.float32(0.5 - float(edge[0]) * float(per_unit))
        # Computed as compiled code does: of two values the larger has the higher cell, or the same.
        of_edge = np.clip((edge * per_unit + shift).astype(np.int64), 0, cells - 1)
        if np.all(np.diff(of_edge[1:]) > 0):
            step = np.maximum(np.searchsorted(of_edge, np.arange(cells)) - 1, 0).astype(np.int32)
            border = np.append(edge, np.float32(np.inf))[step + 1]
            return _frozen(step, border, per_unit, shift)
        cells *= 2
    nothing = np.float32(0)
    return _frozen(np.zeros(0, np.int32), np.zeros(0, np.float32), nothing, nothing)


def _frozen(
    step: npt.NDArray[np.int32], border: npt.NDArray[np.float32], per_unit: np.float32, shift: np.float32
) -> CellColumns:  # fmt: skip
    step.flags.writeable = border.flags.writeable = False
    return CellColumns(step, border, per_unit, shift, len(step) - 1)


WHOLE = 1 << 40
"""The block size that makes one block of every parameter."""


class BlockColumns(NamedTuple):
    """A :class:`BlockTable`, as one argument of compiled code."""

    first: npt.NDArray[np.int64]
    phase: npt.NDArray[np.int64]
    size: int


class BlockTable:
    """Segments, and the blocks of ``block_size`` elements, anchored to the parameter, that share a scale.

    Args:
        table: The segments.
        block_size: A multiple of 16, so that 16 neighbours share a block.

    Attributes:
        first: Number of blocks that begin in, or reach into, the segments before each one, int64 ``[S + 1]``.
        blocks: Their number; a block cut by the end of a segment counts in each.
        columns: The table as one argument of compiled code.
    """

    __slots__ = ("__weakref__", "block_size", "blocks", "columns", "first", "phase", "table")

    def __init__(self, table: SegmentTable, block_size: int) -> None:
        if block_size < 1 or block_size % LANES:
            raise HyperparameterError(f"block_size {block_size}: a multiple of {LANES} is needed")
        self.table, self.block_size = table, block_size
        self.phase = table.start % block_size
        counts = np.where(table.numel > 0, -(-(self.phase + table.numel) // block_size), 0)
        self.first = np.zeros(len(table) + 1, np.int64)
        np.cumsum(counts, out=self.first[1:])
        self.blocks = int(self.first[-1])
        self.columns = BlockColumns(self.first, self.phase, block_size)

    def runs(self) -> SegmentTable:
        """Return the elements of each block, a segment each."""
        segment = np.repeat(np.arange(len(self.table)), np.diff(self.first))
        within = (np.arange(self.blocks) - self.first[segment]) * self.block_size - self.phase[segment]
        begin = np.maximum(within, 0)
        end = np.minimum(within + self.block_size, self.table.numel[segment])
        nothing = np.zeros(self.blocks, np.int64)
        return SegmentTable(self.table.offset[segment] + begin, end - begin, nothing, np.zeros((self.blocks, 2)))
