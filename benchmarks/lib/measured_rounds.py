"""Quantisers as one all-reduce sees them: formats of others, this library's methods, and a study of bits by energy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import gradwire as gw
from benchmarks.lib.summed_formats import THC, DynamiQ

__all__ = [
    "DynamiQMeasured",
    "EnergyRound",
    "FormatRound",
    "LibraryRound",
    "SumsRound",
    "THCRound",
    "library_sums",
    "payload_bits",
]

Format = Callable[[Tensor, torch.Generator], Tensor]


class FormatRound:
    """A format that rounds each vector by itself.

    Attributes:
        rows: The vectors that are quantised.
        bits: Bits of an element where codes of one worker are sent.
        sum_bits: Bits of an element where sums are sent.
    """

    def __init__(self, of: Format, bits: float, rows: Tensor, generator: torch.Generator) -> None:
        self.of, self.rows, self.generator = of, rows, generator
        self.bits = self.sum_bits = bits

    def gathered(self) -> Tensor:
        """Return the sum of all rows, each quantised once."""
        return self.quantise(self.rows, slice(0, len(self.rows))).sum(0)

    def quantise(self, x: Tensor, slots: slice | None) -> Tensor:
        """Return the decoded rows."""
        return self.of(x, self.generator)

    def finish(self, mean: Tensor) -> Tensor:
        """Return the outcome."""
        return mean


class DynamiQMeasured(FormatRound):
    """DynamiQ, whose random numbers belong to senders."""

    def __init__(self, of: DynamiQ, rows: Tensor, generator: torch.Generator) -> None:
        self.inner = of.begin(rows, generator)
        self.rows, self.bits, self.sum_bits = self.inner.rows, self.inner.bits, self.inner.bits
        self.quantise, self.finish = self.inner.quantise, self.inner.finish  # type: ignore[method-assign]


class SumsRound(FormatRound):
    """A quantiser whose codes add up exactly, so that hops change nothing."""

    def __init__(self, rows: Tensor, mean: Tensor, bits: float, sum_bits: float) -> None:
        self.rows, self.mean, self.bits, self.sum_bits = rows, mean, bits, sum_bits

    def gathered(self) -> Tensor:
        """Return the sum."""
        return self.mean * len(self.rows)

    def quantise(self, x: Tensor, slots: slice | None) -> Tensor:
        """Refuse: there is nothing to quantise again."""
        raise TypeError("codes of this method are added, not quantised again")


class THCRound(SumsRound):
    """THC."""

    def __init__(self, of: THC, rows: Tensor, generator: torch.Generator) -> None:
        count, numel = rows.shape
        super().__init__(rows, of.mean(rows, generator), of.bits(numel), of.sum_bits(numel, count))


class LibraryRound(FormatRound):
    """A method of this library through its simulated links.

    Where all send to all, a link of all workers does it, by all-gather, and its traffic is what is sent. A partial sum
    is quantised as the only worker's gradient: one worker's mean is what a receiver decodes. That link sends nothing,
    and a partial sum takes as many bits as a gathered payload, but for coders: see :func:`payload_bits`.

    Args:
        spec: The method.
        rows: The workers' vectors.
        seed: The links' seed.
    """

    def __init__(self, spec: str, rows: Tensor, seed: int) -> None:
        self.spec, self.rows, self.seed = spec, rows, seed
        self.alone: dict[int, gw.SimulatedLink] = {}
        count, numel = rows.shape
        link = library_link(spec, count, numel, seed, "all_gather")
        self.total = link.reduce_(rows.clone()) * count
        self.bits = self.sum_bits = 8 * mean_sent(link) / (count - 1) / numel

    def gathered(self) -> Tensor:
        """Return the sum of all rows, each quantised once."""
        return self.total

    def quantise(self, x: Tensor, slots: slice | None) -> Tensor:
        """Return the decoded rows: blocks of one long vector, whose rounds have random numbers of their own."""
        if x.numel() not in self.alone:
            self.alone[x.numel()] = library_link(self.spec, 1, x.numel(), self.seed)
        return self.alone[x.numel()].reduce_(x.reshape(1, -1).clone()).view(x.shape)


def library_link(spec: str, workers: int, numel: int, seed: int, collective: str = "auto") -> gw.SimulatedLink:
    """Return a link that compresses one vector."""
    like = [("gradient", torch.empty(numel))]
    return gw.SimulatedLink(like, spec, workers, min_numel=0, seed=seed, collective=collective)


def mean_sent(link: gw.SimulatedLink) -> float:
    """Return the bytes that a worker has sent, of all workers' mean: a coder's payloads differ."""
    return sum(link.traffic(worker).sent_bytes for worker in range(link.world_size)) / link.world_size


def payload_bits(spec: str, rows: Tensor) -> tuple[float, float]:
    """Return the bits of an element that a link counts for long vectors of two workers, and for their mean if larger.

    Of a method with a coder, whose payloads depend on values and have tables, a larger share of a short vector.
    """
    found = []
    for two in (rows[:2], rows.mean(0, keepdim=True).expand(2, -1)):
        link = library_link(spec, 2, rows.shape[1], 0, "all_gather")
        link.reduce_(two.clone())
        found.append(8 * mean_sent(link) / rows.shape[1])
    return found[0], max(found)


def library_sums(spec: str, rows: Tensor, seed: int) -> SumsRound:
    """Return the round of a method of this library whose codes add up; bits are those of sums, everywhere."""
    count, numel = rows.shape
    link = library_link(spec, count, numel, seed)
    mean = link.reduce_(rows.clone())
    bits = 8 * mean_sent(link) / (2 * (count - 1) / count) / numel
    return SumsRound(rows, mean.clone(), bits, bits)


class EnergyRound(FormatRound):
    """A study, not a method of the library: EDEN's bits by the energy of blocks of 256, on which workers agree first.

    Of all blocks' bits with a given average, those with the least sum of F e(bits) are taken, F a block's energy on all
    workers and e EDEN's error: for a price of a bit, each block takes what costs it least, and a bisection finds the
    price. Blocks with the same bits are one parameter of a link of the library. Beside EDEN's scale, in its payload, a
    block's energy takes 16 bits, as in DynamiQ.
    """

    SIZE = 256
    STEPS: Sequence[tuple[float, float, float]] = ((0.25, 0.25, 5.283), (0.5, 0.5, 2.142), (1, 1.0, 0.571),
        (1.6, 1.6, 0.2348), (2, 2.0, 0.1331), (2.67, 8 / 3, 0.0615), (3.2, 3.2, 0.02865), (4, 4.0, 0.00959),
        (4.58, 4.5714, 0.00477), (5.34, 16 / 3, 0.00162), (6, 6.4, 0.000645))  # fmt: skip
    """EDEN's field, the bits that its digits take, and its error."""

    def __init__(self, budget: float, rows: Tensor, seed: int) -> None:
        self.rows, self.seed = rows, seed
        blocks = rows.view(len(rows), -1, self.SIZE)
        energy = blocks.square().sum(2).bfloat16().double().sum(0)
        cost = torch.tensor([bits for _, bits, _ in self.STEPS], dtype=torch.float64)
        error = torch.tensor([error for _, _, error in self.STEPS], dtype=torch.float64)
        low, high = -60.0, 60.0
        overhead = 32 / self.SIZE + 16 / self.SIZE
        for _ in range(50):
            middle = (low + high) / 2
            self.chosen = (energy[:, None] * error + 2.0**middle * energy.mean() * cost).argmin(1)
            low, high = (low, middle) if float(cost[self.chosen].mean()) <= budget - overhead else (middle, high)
        self.chosen = (energy[:, None] * error + 2.0**high * energy.mean() * cost).argmin(1)
        # What digits take but for the padding of the last few, which is nothing for vectors of usual lengths.
        self.bits = self.sum_bits = float(cost[self.chosen].mean()) + overhead
        self.links = []
        for step, (field, _, _) in enumerate(self.STEPS):
            mine = (self.chosen == step).nonzero().view(-1)
            if len(mine):
                like = [("blocks", torch.empty(len(mine) * self.SIZE))]
                spec = f"EDEN(bits={field}, block_size={self.SIZE})"
                self.links.append((mine, gw.SimulatedLink(like, spec, 1, min_numel=0, seed=seed + step)))

    def quantise(self, x: Tensor, slots: slice | None) -> Tensor:
        """Return the decoded rows."""
        blocks = x.view(len(x), -1, self.SIZE)
        found = torch.empty_like(blocks)
        for row, (mine, link) in itertools.product(range(len(x)), self.links):
            found[row, mine] = link.reduce_(blocks[row, mine].reshape(1, -1)).view(-1, self.SIZE)
        return found.view(x.shape)
