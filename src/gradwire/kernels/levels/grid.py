"""Grids of quantisation levels with their rule of rounding, and tables of blocks that share a scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gradwire.errors import HyperparameterError
from gradwire.kernels.packing.layout import MAX_WORLD_SIZE
from gradwire.kernels.table import LANES, SegmentTable

UNIT = float(1 << 24)
"""Scale on which levels are compared, so that 24-bit uniform integers need no scaling."""

SOUGHT = 24
"""Steps from which on the step of a value is looked up in a table; with fewer, comparing with each is faster."""

_MOST_CELLS = 1 << 10


class CellColumns(NamedTuple):
    """A lookup table of steps: finds the step of a value without comparing with every step.

    A value a is in the cell ``trunc(a * per_unit + shift)``, computed in float32, from 0 to ``last``. At most one step
    ends in a cell. ``step`` is the step at the beginning of each cell (int32 ``[last + 1]``), ``border`` the end of
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

    With u an element's 24-bit uniform integer, a the magnitude |r| (r itself if ``signed``) and U = 2^24::

        c = number of steps k with a * U > edge_k * U + u * (edge_(k+1) - edge_k)
        digit = positive + c if r >= 0 or signed else negative - c

    A value passes the step it is in with probability (a - edge_k) / (edge_(k+1) - edge_k), so rounding is unbiased. A
    value on a level always passes the step that ends there, since thresholds are rounded to below a step's end. For
    levels j / s the count is computed as floor(a s) + [u < U frac(a s)], the same law with fewer operations.

    Attributes:
        values: The level of each digit, float32 ``[base]``, read-only.
        base: Number of digits.
        edge, gap: Lower end of each step on the scale U, and its length over U; float32 ``[steps]``.
        steps: Largest count c.
        uniform: True if the levels are j / steps.
        signed: True if r, rather than its magnitude, is compared.
        positive, negative: Digits of the count 0.
        columns: The grid as one argument of compiled code.
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
        """The magnitude up to which every value is rounded to the level zero; 0 if zero is no level."""
        return float(self.edge[0]) / UNIT if self.values[self.positive] == 0 else 0.0

    @classmethod
    def even(cls, levels: int) -> Grid:
        """Return the grid of levels 0, +-1/s, ..., +-1 for s = ``levels``, whose base is 2s + 1."""
        s = levels
        ends = np.arange(s + 1) / s
        # Divided in float32, as in decoders.
        values = np.arange(-s, s + 1, dtype=np.float32) / np.float32(s)
        return cls(values.astype(np.float64), ends[:-1], ends[1:], positive=s, negative=s, signed=False, uniform=True)

    @classmethod
    def symmetric(cls, magnitudes: Sequence[float], *, zero: bool = True) -> Grid:
        """Return the grid of levels +-m for ascending magnitudes in (0, 1], the last 1, with the level 0 if ``zero``.

        Without the level 0, values between the two smallest levels may change their sign.
        """
        m = np.asarray(magnitudes, np.float64)
        _check(np.concatenate([[0.0], m]), m[-1:] == 1, magnitudes)
        lower = np.concatenate([[0.0 if zero else -m[0]], m[:-1]])
        values = np.concatenate([-m[::-1], [0.0] if zero else [], m])
        count = len(m)
        return cls(values, lower, m, positive=count if zero else count - 1, negative=count, signed=False)

    @classmethod
    def ordered(cls, levels: Sequence[float]) -> Grid:
        """Return the grid of ascending levels from -1 to 1, which need not be symmetric."""
        v = np.asarray(levels, np.float64)
        _check(v, (v[:1] == -1) & (v[-1:] == 1), levels)
        return cls(v, v[:-1], v[1:], positive=0, negative=0, signed=True)

    @classmethod
    def nearest(cls, magnitudes: Sequence[float], *, zero: bool = False) -> Grid:
        """Return the grid of levels +-m for ascending magnitudes above 0, with the level 0 if ``zero``.

        Each value is rounded to the nearest level, without randomness; halfway between two, to the smaller magnitude.
        Magnitudes may be above 1.
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
    """Return the gaps, shortened until no threshold ``edge + u * gap`` is rounded up to the end of its step."""
    most = np.float32(UNIT - 1)
    gap = ((end.astype(np.float64) - edge) / UNIT).astype(np.float32)
    # Each turn takes off twice as many units in the last place: the gap of adjacent floats is zero after 24 turns.
    for turn in range(25):
        over = edge + most * gap >= end
        if not bool(over.any()):
            break
        gap = np.where(over, gap * np.float32(max(0.0, 1 - 2.0 ** (turn - 23))), gap)
    return gap


def _cells(edge: npt.NDArray[np.float32]) -> CellColumns:
    """Return the cells of steps that begin at ascending edges; no cells if more than ``_MOST_CELLS`` were needed."""
    cells = 2 * len(edge)
    while 0 < cells <= _MOST_CELLS:
        per_unit = np.float32((cells - 1) / (float(edge[-1]) - float(edge[0])))
        shift = np.float32(0.5 - float(edge[0]) * float(per_unit))
        # Computed as in compiled code, where a larger value never gets a lower cell.
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
"""A block size larger than every parameter, so that each parameter is one block."""


class BlockColumns(NamedTuple):
    """A :class:`BlockTable`, as one argument of compiled code."""

    first: npt.NDArray[np.int64]
    phase: npt.NDArray[np.int64]
    size: int


class BlockTable:
    """Segments cut into blocks that share a scale: ``block_size`` elements each, counted from the parameter's start.

    Args:
        table: The segments.
        block_size: A multiple of 16, so that 16 neighbours share a block.

    Attributes:
        first: Number of blocks of all segments before each one, int64 ``[S + 1]``.
        blocks: Number of blocks. A block cut by the end of a segment counts in each of its segments.
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
        """Return a table in which each block is a segment."""
        segment = np.repeat(np.arange(len(self.table)), np.diff(self.first))
        within = (np.arange(self.blocks) - self.first[segment]) * self.block_size - self.phase[segment]
        begin = np.maximum(within, 0)
        end = np.minimum(within + self.block_size, self.table.numel[segment])
        nothing = np.zeros(self.blocks, np.int64)
        return SegmentTable(self.table.offset[segment] + begin, end - begin, nothing, np.zeros((self.blocks, 2)))
