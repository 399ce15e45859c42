"""Signs, one bit for each element, votes and decoding: checked operations, defined in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gradwire.errors import HyperparameterError
from gradwire.kernels.front import Front, check_groups, check_matrix, check_rows, check_vector
from gradwire.kernels.moments.operations import integer_blocks, segments_of
from gradwire.kernels.packing.layout import MAX_WORLD_SIZE
from gradwire.kernels.table import GROUP_SIZE, SIGN_BYTES, GroupIndex, SegmentTable


class RunColumns(NamedTuple):
    """A :class:`RunTable`, as one argument of compiled code."""

    first: npt.NDArray[np.int64]
    phase: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]


class RunTable:
    """Segments cut into runs that share a pair of values, counted from the start of each parameter.

    Args:
        table: The segments.
        length: Number of elements of a run, at least 1: one for each segment (int64 ``[S]``), or one for all.

    Attributes:
        phase: Number of elements of each segment's first run that precede the segment, int64 ``[S]``.
        first: Number of runs of all segments before each one, int64 ``[S + 1]``.
        runs: Number of runs. A run cut by the end of a segment counts in each of its segments.
        columns: The table as one argument of compiled code.
    """

    __slots__ = ("__weakref__", "columns", "first", "length", "phase", "runs", "table")

    def __init__(self, table: SegmentTable, length: int | Sequence[int] | npt.NDArray[Any]) -> None:
        self.table = table
        self.length = np.array(np.broadcast_to(np.asarray(length, np.int64), len(table)))
        if np.any(self.length < 1):
            raise HyperparameterError(f"a run of {int(self.length.min())} elements: at least 1 is needed")
        self.phase = table.start % self.length
        counts = np.where(table.numel > 0, -(-(self.phase + table.numel) // self.length), 0)
        self.first = np.zeros(len(table) + 1, np.int64)
        np.cumsum(counts, out=self.first[1:])
        self.runs = int(self.first[-1])
        self.columns = RunColumns(self.first, self.phase, self.length)

    @property
    def owner(self) -> npt.NDArray[np.int64]:
        """The segment of each run, int64 ``[runs]``."""
        return np.repeat(np.arange(len(self.table)), np.diff(self.first))

    @property
    def number(self) -> npt.NDArray[np.int64]:
        """Each run's number within its parameter, int64 ``[runs]``."""
        owner = self.owner
        return np.arange(self.runs) - self.first[owner] + self.table.start[owner] // self.length[owner]

    def elements(self) -> SegmentTable:
        """Return a table in which each run is a segment."""
        owner = self.owner
        within = (np.arange(self.runs) - self.first[owner]) * self.length[owner] - self.phase[owner]
        begin = np.maximum(within, 0)
        end = np.minimum(within + self.length[owner], self.table.numel[owner])
        nothing = np.zeros(self.runs, np.int64)
        return SegmentTable(self.table.offset[owner] + begin, end - begin, nothing, np.zeros((self.runs, 2)))


@dataclass(frozen=True, eq=False)
class SignSums:
    """Sums of each segment by sign: ``above`` of the elements x >= 0, ``below`` of -x for the others.

    ``above`` and ``below`` are float64 ``[S]``; ``count`` (int64 ``[S]``) is the number of x >= 0. A segment that holds
    an infinity or a NaN has ``above = below = +inf`` and ``count = 0``.
    """

    above: torch.Tensor
    below: torch.Tensor
    count: torch.Tensor


class SignOperations(Front):
    """The operations of the family ``signs``.

    The bit of an element is ``x >= 0``: 1 for zero of either sign, 0 for a NaN. Bit i of a group of 80 elements is bit
    ``i % 8`` of its byte ``i // 8``; elements past a segment's end have the bit 0.
    """

    def finite(self, x: torch.Tensor, table: SegmentTable) -> torch.Tensor:
        """Return for every segment of ``x`` (float32) whether all its elements are finite, bool ``[S]``."""
        check_vector("x", x, torch.float32, table.extent, at_least=True)
        out = torch.empty(len(table), dtype=torch.bool, device=x.device)
        self._serve("signs").finite(x.detach(), table, out)
        return out

    def sign_sums(self, x: torch.Tensor, table: SegmentTable) -> SignSums:
        """Sum the elements of every segment of ``x`` (float32) by sign.

        A segment is cut into blocks of 4096 elements. With ``e`` the exponent of a block's largest magnitude (at least
        -104), every element becomes the integer ``q = trunc(x * 2^(23-e))``. The sums of ``q`` and ``|q|`` are
        exact, so their order does not matter. Half their sum and half their difference, times ``2^(e-23)``, are added
        over blocks in float64, first to last.
        """
        check_vector("x", x, torch.float32, table.extent, at_least=True)
        above, below = (torch.empty(len(table), dtype=torch.float64, device=x.device) for _ in range(2))
        out = SignSums(above, below, torch.empty(len(table), dtype=torch.int64, device=x.device))
        self._serve("signs").sign_sums(x.detach(), table, out)
        return out

    def sign_encode(self, x: torch.Tensor, table: SegmentTable, begin: int, end: int, out: torch.Tensor) -> None:
        """Pack the bits of groups ``begin .. end`` of ``x`` (float32) into ``out`` (uint8 ``[10 * (end - begin)]``)."""
        check_vector("x", x, torch.float32, table.extent, at_least=True)
        check_groups(table, begin, end)
        check_vector("out", out, torch.uint8, SIGN_BYTES * (end - begin))
        family = self._serve("signs")
        if begin < end:
            family.sign_encode(x.detach(), table, begin, end, out)

    def sign_vote(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Set each bit of ``out`` (uint8 ``[m]``) that is set in at least half of the ``N`` rows (uint8 ``[N, m]``).

        Rows may be any distance apart.
        """
        _check_bits(rows, rows.shape[-1])
        check_vector("out", out, torch.uint8, rows.shape[1])
        family = self._serve("signs")
        if out.numel():
            family.sign_vote(rows, out)

    def sign_decode(
        self,
        rows: torch.Tensor,
        runs: RunTable,
        above: torch.Tensor,
        below: torch.Tensor,
        begin: int,
        end: int,
        x: torch.Tensor,
        accumulate: bool = False,
    ) -> None:
        """Write the sum over ``N`` rows, first to last, of ``above`` where the bit is 1 and ``below`` where it is 0.

        The elements of groups ``begin .. end`` of ``x`` (float32) are written. ``rows`` has their bits, uint8
        ``[N, 10 * (end - begin)]``; rows may be any distance apart. ``above`` and ``below`` are float32 ``[N, runs]``.
        ``accumulate`` adds the rows' values to ``x``, one after the other.
        """
        check_groups(runs.table, begin, end)
        _check_bits(rows, SIGN_BYTES * (end - begin))
        for name, values in (("above", above), ("below", below)):
            check_matrix(name, values, torch.float32, (rows.shape[0], runs.runs))
        check_vector("x", x, torch.float32, runs.table.extent, at_least=True)
        family = self._serve("signs")
        if begin < end:
            family.sign_decode(rows, runs, above.detach(), below.detach(), begin, end, x.detach(), accumulate)


def _check_bits(rows: torch.Tensor, length: int) -> None:
    check_rows(rows, length)
    if rows.shape[0] > MAX_WORLD_SIZE:
        raise HyperparameterError(f"{rows.shape[0]} rows are outside 1..{MAX_WORLD_SIZE}")


_POWERS = 2 ** torch.arange(8, device="cpu")


def finite(x: torch.Tensor, table: SegmentTable, out: torch.Tensor) -> None:
    for segment, values in enumerate(segments_of(x, table)):
        out[segment] = torch.isfinite(values).all()


def sign_sums(x: torch.Tensor, table: SegmentTable, out: SignSums) -> None:
    for segment, values in enumerate(segments_of(x, table)):
        out.above[segment], out.below[segment], out.count[segment] = _sums(values)


def sign_encode(x: torch.Tensor, table: SegmentTable, begin: int, end: int, out: torch.Tensor) -> None:
    where = GroupIndex(table, begin, end)
    bits = (x[where.index] >= 0) & where.inside
    out.copy_((bits.reshape(-1, 8) * _POWERS).sum(1))


def sign_vote(rows: torch.Tensor, out: torch.Tensor) -> None:
    chosen = 2 * _bits(rows).sum(0) >= rows.shape[0]
    out.copy_((chosen.reshape(-1, 8) * _POWERS).sum(1))


def sign_decode(
    rows: torch.Tensor, runs: RunTable, above: torch.Tensor, below: torch.Tensor, begin: int, end: int,
    x: torch.Tensor, accumulate: bool,
) -> None:  # fmt: skip
    where = GroupIndex(runs.table, begin, end)
    columns = (runs.phase, runs.length, runs.first[:-1])
    phase, length, first = (torch.from_numpy(column.copy())[where.segment, None] for column in columns)
    run = first + (phase + where.within) // length
    for row, bits in enumerate(_bits(rows).reshape(len(rows), -1, GROUP_SIZE)):
        where.write(torch.where(bits == 1, above[row][run], below[row][run]), x, accumulate or row > 0)


def _sums(x: torch.Tensor) -> tuple[float, float, int]:
    blocks = integer_blocks(x)
    if blocks is None:
        return math.inf, math.inf, 0
    above = below = 0.0
    for e, integers in zip(*blocks):
        total, size = int(integers.sum()), int(integers.abs().sum())
        above += math.ldexp(float((size + total) // 2), e - 23)
        below += math.ldexp(float((size - total) // 2), e - 23)
    return above, below, int((x >= 0).sum())


def _bits(rows: torch.Tensor) -> torch.Tensor:
    """Unpack bytes ``[..., m]`` to bits, int64 ``[..., 8 m]``."""
    return (rows.to(torch.int64)[..., None] >> torch.arange(8, device="cpu") & 1).flatten(-2)
