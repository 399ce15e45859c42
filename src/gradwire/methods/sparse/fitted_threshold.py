"""The rule of sparse codecs whose threshold is estimated from a worker's own vector."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gradwire.exchange.codecs.base import Draw
from gradwire.kernels import SegmentTable
from gradwire.methods.sparse.sparse_codec import LargestRule, Rule, choose_above
from gradwire.methods.sparse.tail_fits import tail_threshold

if TYPE_CHECKING:
    from gradwire.kernels import Kernels

__all__ = ["SMALL_BLOCK", "FittedRule"]

SMALL_BLOCK = 100_000
"""Units of a block below which no distribution is fitted: its last stage would have a few dozens to learn from."""

MOST = 1.3
"""Times the share aimed at that are kept at most."""


class FittedRule(Rule):
    """All units of a block above an estimated threshold, see :func:`tail_threshold`, and no more than 1.3 k of them.

    With k = max(1, floor(density n)) for a block of n units, the 1.3 k largest are kept where more are above. The k
    largest are kept of blocks of fewer than :data:`SMALL_BLOCK` units, where a fit degenerates, and where nothing is
    above: what is kept is always that many of the largest, exactly.
    """

    def __init__(self, density: float, model: str, stages: int) -> None:
        self._largest = LargestRule(density)
        self._density, self._model, self._stages = density, model, stages

    def most(self, table: SegmentTable) -> torch.Tensor:
        aim = self._largest.most(table)
        return torch.where(torch.from_numpy(table.numel.copy()) < SMALL_BLOCK, aim, (aim * MOST).long())

    def choose(
        self, kernels: Kernels, scores: torch.Tensor, table: SegmentTable, draw: Draw
    ) -> tuple[torch.Tensor, torch.Tensor]:
        threshold, most = self.thresholds(scores, table), self.most(table)
        positions, counts = choose_above(kernels, scores, table, threshold, most)
        unfitted = torch.isinf(threshold) | (counts == 0)
        if bool((unfitted | (counts == most)).any()):
            counts = torch.where(unfitted, self._largest.most(table), counts)
            positions = torch.empty(int(counts.sum()), dtype=torch.int32)
            kernels.select_largest(scores, table, counts, positions)
        return positions, counts

    def thresholds(self, scores: torch.Tensor, table: SegmentTable) -> torch.Tensor:
        """Return the threshold of each block, float32 ``[blocks]``; +inf where none is estimated."""
        found = torch.full((len(table),), torch.inf)
        for i, (begin, numel) in enumerate(zip(table.offset.tolist(), table.numel.tolist())):
            if numel >= SMALL_BLOCK:
                x = scores[begin : begin + numel].detach().abs().numpy()
                eta = tail_threshold(x, self._density, self._model, self._stages)
                found[i] = torch.inf if eta is None else eta
        return found
