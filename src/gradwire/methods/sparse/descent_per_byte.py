"""The number of elements with the most descent for the cost of sending them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.codecs.base import Draw
from gradwire.exchange.network_cost import LinkCost
from gradwire.kernels import SegmentTable
from gradwire.methods.sparse.sparse_codec import Rule

if TYPE_CHECKING:
    from gradwire.kernels import Kernels


FIRST = 1 << 10


"""Elements that are examined first; four times as many as long as the best number may be larger."""


@dataclass(frozen=True)
class MessageCost:
    """Cost of a message in bytes: c0 + bytes, rounded up to whole packets if ``packet`` is given.

    If ``fixed`` is None, :meth:`on` takes c0 from the link.
    """

    fixed: float | None
    packet: int | None = None

    def on(self, link: LinkCost | None) -> MessageCost:
        """Return the cost on a link.

        Raises:
            IncompatibleError: c0 is the link's and not known.
        """
        if self.fixed is not None:
            return self
        if link is None:
            raise IncompatibleError(
                "CAT(fixed_bytes=None) takes what a message costs from the link, and there is none to measure: give "
                "fixed_bytes, or link_cost=gw.LinkCost(message_s=..., bytes_per_s=...) to the simulation"
            )
        return MessageCost(link.fixed_bytes, self.packet)

    def of(self, payload: torch.Tensor) -> torch.Tensor:
        """Return the costs of payloads in bytes, float64."""
        size = payload.double()
        if self.packet is not None:
            size = (size / self.packet).ceil() * self.packet
        return size + (self.fixed or 0.0)


def descent(scheme: str, largest: torch.Tensor, norm1: float, norm2: float) -> torch.Tensor:
    """Return the guaranteed descent of T elements of g, as a share of |g|^2 / (2 L), for T from 1 on, float64.

    ::

        topk:        alpha(T) = sum of the T largest squares / |g|^2
        sign:        beta(T)  = (sum of the T largest magnitudes)^2 / (T |g|^2)
        stochastic:  omega(T) = |g|^2 / sum_i g_i^2 / p_i,   p as in ATOMO with T elements on average

    Args:
        largest: The largest magnitudes, descending, float64, one for each T.
        norm1, norm2: The l1 and the Euclidean norm of all elements.
    """
    number = torch.arange(1, len(largest) + 1, dtype=torch.float64, device="cpu")
    squared = max(norm2 * norm2, 1e-300)
    squares = largest.square().cumsum(0)
    if scheme == "topk":
        return squares / squared
    if scheme == "sign":
        return largest.cumsum(0).square() / (number * squared)
    tails = norm1 - (largest.cumsum(0) - largest)
    # Element i has the probability 1 from this T on; ascending, since magnitudes descend.
    needed = number - 1 + tails / largest.clamp(min=1e-300)
    sure = torch.searchsorted(torch.cummax(needed, 0).values, number, right=True)
    before = torch.cat([torch.zeros(1, dtype=torch.float64, device="cpu"), squares])[sure]
    rest = norm1 - torch.cat([torch.zeros(1, dtype=torch.float64, device="cpu"), largest.cumsum(0)])[sure]
    left = number - sure
    noisy = torch.where(left > 0, rest.clamp(min=0).square() / left.clamp(min=1), 0.0)
    return squared / (before + noisy)


def best_count(
    scheme: str, bits: float, head: float, cost: MessageCost, norm1: float, norm2: float, numel: int,
    largest: Callable[[int], torch.Tensor],
) -> tuple[int, float]:  # fmt: skip
    """Return the smallest T with the most descent over cost, and its descent.

    Args:
        bits: Bits of an element on the wire.
        head: Bytes of a payload without elements.
        largest: Returns the given number of largest magnitudes, descending, float64.
    """
    looked_at = min(numel, FIRST)
    while True:
        found = descent(scheme, largest(looked_at), norm1, norm2)
        costs = cost.of(head + torch.arange(1, looked_at + 1, device="cpu").to(torch.float32) * bits / 8)
        ratio = found / costs
        at = int(ratio.argmax())
        # No T descends by more than |g|^2 / (2 L), and no larger T costs less than the last.
        if looked_at == numel or float(ratio[at]) >= 1.0 / float(costs[-1]) or _is_past(scheme, cost, at, ratio, bits):
            return at + 1, float(found[at])
        looked_at = min(numel, 4 * looked_at)


def _is_past(scheme: str, cost: MessageCost, at: int, ratio: torch.Tensor, bits: float) -> bool:
    """Return whether the ratio is past its peak: a concave descent over an affine cost has only one."""
    step = 1 if cost.packet is None else max(1, math.floor(8 * cost.packet / bits))
    return scheme != "sign" and at + 2 * step < len(ratio)


def largest_magnitudes(kernels: Kernels, x: torch.Tensor, offset: int, numel: int, count: int) -> torch.Tensor:
    """Return the largest magnitudes of a run of elements, descending, float64 ``[count]``."""
    run, index = SegmentTable([offset], [numel], [0], [(0, 0)]), torch.empty(count, dtype=torch.int32, device="cpu")
    kernels.select_largest(x, run, torch.tensor([count], device="cpu"), index)
    return x[offset + index.long()].abs().double().sort(descending=True).values


class BestRatioRule(Rule):
    """Rule that keeps the largest elements of a segment, as many as descend most for their cost."""

    gauges = ("elements",)

    def __init__(self, scheme: str, cost: MessageCost) -> None:
        self.scheme, self.cost = scheme, cost

    def most(self, table: SegmentTable) -> torch.Tensor:
        return torch.from_numpy(table.numel.copy())

    def choose(
        self, kernels: Kernels, scores: torch.Tensor, table: SegmentTable, draw: Draw
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cost = self.cost.on(draw.link)
        moments, sums = kernels.moments(scores, table), kernels.sign_sums(scores, table)
        norm1 = sums.above + sums.below
        counts = []
        for i, n in enumerate(table.numel.tolist()):
            largest = partial(largest_magnitudes, kernels, scores, int(table.offset[i]), n)
            if math.isfinite(float(moments.max_abs[i])) and n:
                bits, head = element_bits(self.scheme, n), 4.0 if self.scheme == "sign" else 0.0
                norms = float(norm1[i]), float(moments.norm[i])
                counts.append(best_count(self.scheme, bits, head, cost, *norms, n, largest)[0])
            else:
                counts.append(min(1, n))
        found = torch.tensor(counts, dtype=torch.int64, device="cpu")
        positions = torch.empty(int(found.sum()), dtype=torch.int32, device="cpu")
        kernels.select_largest(scores, table, found, positions)
        return positions, found


def element_bits(scheme: str, numel: int) -> float:
    """Return the bits that the rule counts for an element: of its value or sign, and of a position below ``numel``."""
    return (1 if scheme == "sign" else 32) + max(1, (numel - 1).bit_length())
