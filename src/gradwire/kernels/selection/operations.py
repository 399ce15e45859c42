"""Positions of the largest elements, or of those above a threshold: operations, defined in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradwire.errors import HyperparameterError
from gradwire.kernels.front import Front, check_vector
from gradwire.kernels.moments.operations import segments_of
from gradwire.kernels.table import BLOCK_SIZE, SegmentTable

MAX_POSITIONS = 2**31 - 1
"""Elements of a segment, or of a vector, whose positions fit int32."""


EXCESS_LANES = 16
"""Sums that run side by side through a block."""


@dataclass(frozen=True, eq=False)
class Excess:
    """Statistics of each segment's magnitudes above a threshold, on the CPU.

    Attributes:
        count: Their number, int64 ``[S]``.
        total: Sum of magnitude - base, float64 ``[S]``.
        squares: Sum of (magnitude - base)^2, float64 ``[S]``.
    """

    count: torch.Tensor
    total: torch.Tensor
    squares: torch.Tensor


class SelectionOperations(Front):
    """The operations of the family ``selection``.

    Magnitudes are compared by their bits, ``bits(x) & 0x7fffffff`` as integers: a NaN is above an infinity, which is
    above all finite values, and the order is the same on every machine. Positions are int32, counted from the start of
    a segment; they ascend within it and are written segment after segment. Tensors with one number for each segment
    (``counts``, ``limit``, ``threshold``) are in CPU memory.
    """

    def select_largest(
        self, x: torch.Tensor, table: SegmentTable, counts: torch.Tensor, index: torch.Tensor
    ) -> None:  # fmt: skip
        """Write the positions of the ``counts[s]`` elements of the largest magnitude of each segment into ``index``.

        ``x`` is float32, ``counts`` int64 ``[S]`` and ``index`` int32 ``[sum(counts)]``. Of equal magnitudes
        those at the lowest positions are taken, so that the result depends on the values alone.

        Raises:
            HyperparameterError: a count is below zero or above the number of elements of its segment.
        """
        check_vector("x", x, torch.float32, table.extent, at_least=True)
        check_vector("counts", counts, torch.int64, len(table))
        _check_positions(table)
        numel = torch.from_numpy(table.numel.copy())
        wrong = (counts < 0) | (counts > numel)
        if bool(wrong.any()):
            s = int(wrong.nonzero()[0])
            raise HyperparameterError(f"counts[{s}] is {int(counts[s])}: segment {s} has {int(numel[s])} elements")
        check_vector("index", index, torch.int32, int(counts.sum()))
        family = self._serve("selection")
        if index.numel():
            family.select_largest(x.detach(), table, counts, index)

    def select_above(
        self, x: torch.Tensor, table: SegmentTable, threshold: torch.Tensor, limit: torch.Tensor, index: torch.Tensor
    ) -> torch.Tensor:
        """Write the positions of the elements of each segment whose magnitude is at least ``threshold[s]``.

        ``x`` is float32, ``threshold`` float32 ``[S]``, ``limit`` int64 ``[S]`` and ``index`` int32 ``[sum(limit)]``.
        The first ``limit[s]`` positions of segment s, or as many as there are, are written to ``index`` from
        ``sum(limit[:s])`` on; the rest of ``index`` keeps its values.

        Returns:
            The number of elements of each segment at or above its threshold, int64 ``[S]``, which may exceed ``limit``.

        Raises:
            HyperparameterError: a threshold is negative or a NaN, or a limit is negative.
        """
        check_vector("x", x, torch.float32, table.extent, at_least=True)
        check_vector("threshold", threshold, torch.float32, len(table))
        check_vector("limit", limit, torch.int64, len(table))
        _check_positions(table)
        if not bool((threshold >= 0).all()):
            raise HyperparameterError(f"threshold is {threshold.tolist()}: magnitudes of at least zero are needed")
        if bool((limit < 0).any()):
            raise HyperparameterError(f"limit holds {int(limit.min())}: it must not be negative")
        check_vector("index", index, torch.int32, int(limit.sum()))
        found = torch.zeros(len(table), dtype=torch.int64, device="cpu")
        family = self._serve("selection")
        if table.groups:
            # Without the sign of -0.0, which backends would read as a bit of the magnitude.
            family.select_above(x.detach(), table, threshold.detach().abs(), limit, index, found)
        return found

    def excess_sums(
        self, x: torch.Tensor, table: SegmentTable, threshold: torch.Tensor, base: torch.Tensor
    ) -> Excess:  # fmt: skip
        """Count and add up the magnitudes of each segment that are above ``threshold[s]``, less ``base[s]``.

        ``x`` is float32, ``threshold`` float32 ``[S]`` and ``base`` float64 ``[S]``. A segment is cut into blocks of
        4096 elements. Through a block run 16 sums in float64, of every sixteenth element; they are added in pairs,
        ``(0, 8), (1, 9), ...``, then ``(0, 4), ...``, and blocks from the first to the last. An infinity or a NaN is
        above every threshold, and makes the sums of its segment infinite or NaNs.

        Raises:
            HyperparameterError: a threshold is negative or a NaN.
        """
        check_vector("x", x, torch.float32, table.extent, at_least=True)
        check_vector("threshold", threshold, torch.float32, len(table))
        check_vector("base", base, torch.float64, len(table))
        if not bool((threshold >= 0).all()):
            raise HyperparameterError(f"threshold is {threshold.tolist()}: magnitudes of at least zero are needed")
        sums = torch.zeros(2, len(table), dtype=torch.float64, device="cpu")
        out = Excess(torch.zeros(len(table), dtype=torch.int64, device="cpu"), *sums)
        self._serve("selection").excess_sums(x.detach(), table, threshold.detach().abs(), base, out)
        return out


def _check_positions(table: SegmentTable) -> None:
    if len(table) and int(table.numel.max()) > MAX_POSITIONS:
        raise HyperparameterError(
            f"a segment of {int(table.numel.max())} elements has positions beyond int32: split it"
        )


def select_largest(x: torch.Tensor, table: SegmentTable, counts: torch.Tensor, index: torch.Tensor) -> None:
    for values, count, out in zip(segments_of(x, table), counts.tolist(), index.split(counts.tolist())):
        # A stable sort keeps equal magnitudes in the order of their positions.
        order = torch.sort(_magnitudes(values), descending=True, stable=True).indices
        out.copy_(order[:count].sort().values)


def select_above(
    x: torch.Tensor,
    table: SegmentTable,
    threshold: torch.Tensor,
    limit: torch.Tensor,
    index: torch.Tensor,
    found: torch.Tensor,
) -> None:
    for s, (values, out) in enumerate(zip(segments_of(x, table), index.split(limit.tolist()))):
        positions = (_magnitudes(values) >= _magnitudes(threshold[s : s + 1])).nonzero()[:, 0]
        found[s] = len(positions)
        kept = min(len(positions), len(out))
        out[:kept] = positions[:kept]


def excess_sums(x: torch.Tensor, table: SegmentTable, threshold: torch.Tensor, base: torch.Tensor, out: Excess) -> None:
    columns = zip(segments_of(x, table), threshold.to(x.device), base.to(x.device))
    for s, (values, least, start) in enumerate(columns):
        above = _magnitudes(values) > _magnitudes(least[None])
        excess = torch.zeros(-(-len(values) // BLOCK_SIZE) * BLOCK_SIZE, dtype=torch.float64, device=x.device)
        excess[: len(values)] = torch.where(above, values.abs().double() - start, 0.0)
        out.count[s], out.total[s], out.squares[s] = above.sum(), _added(excess), _added(excess * excess)


def _added(values: torch.Tensor) -> float:
    """Add whole blocks in the order that :meth:`SelectionOperations.excess_sums` specifies."""
    blocks = values.reshape(-1, BLOCK_SIZE // EXCESS_LANES, EXCESS_LANES)
    lanes = torch.zeros(len(blocks), EXCESS_LANES, dtype=torch.float64, device=values.device)
    for row in blocks.unbind(1):
        lanes += row
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    total = 0.0
    for block in lanes.flatten().tolist():
        total += block
    return total


def _magnitudes(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32) & 0x7FFFFFFF
