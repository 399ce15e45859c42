"""Two quantisers of others that are made for sums: THC, whose codes add up, and DynamiQ, for re-quantised partial sums.

Both agree on something before they quantise, so they are given the vectors of all workers at once.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.lib.formats import hadamard, signs

__all__ = ["THC", "DynamiQ", "DynamiQRound", "best_epsilon", "dynamiq_values", "thc_table", "widths_of"]


def normal_cdf(x: Tensor) -> Tensor:
    """Return the distribution function of a standard normal value."""
    return torch.erfc(-x / math.sqrt(2)) / 2


@functools.cache
def thc_table(bits: int, granularity: int, outside: float) -> tuple[Tensor, float]:
    """Return the 2^bits multiples of 2 t / granularity, counted from -t, with the least error, and t.

    t is where a standard normal value is outside of [-t, t] with probability ``outside``. Both ends belong to the
    table. Values between neighbours l and h are rounded to either without bias, with the variance (h - x) (x - l); the
    sum of its means over all intervals is least by dynamic programming over the table's entries.

    Source: M. Li et al., "THC: Accelerating Distributed Deep Learning Using Tensor Homomorphic Compression", NSDI 2024,
    section 5; the prototype has 4 bits, granularity 30 and 1/32 outside.
    """
    end = float(torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(1 - outside / 2, dtype=torch.float64)))
    grid = torch.linspace(-end, end, granularity + 1, dtype=torch.float64)
    density = torch.exp(-grid.square() / 2) / math.sqrt(2 * math.pi)
    share, first = normal_cdf(grid), -density
    second = share - grid * density
    # cost[i, j]: integral of (h - x) (x - l) over the interval from l = grid[i] to h = grid[j].
    low, high = grid[:, None], grid[None, :]
    parts = [moment[None, :] - moment[:, None] for moment in (share, first, second)]
    cost = -low * high * parts[0] + (low + high) * parts[1] - parts[2]
    cost = torch.where(low < high, cost, math.inf)
    best, come = cost[0].clone(), []
    for _ in range(2**bits - 2):
        best, place = (best[:, None] + cost).min(0)
        come.append(place)
    chosen = [granularity]
    for place in reversed(come):
        chosen.append(int(place[chosen[-1]]))
    return torch.tensor([0, *reversed(chosen)]), end


@dataclass(frozen=True)
class THC:
    """THC: one rotation for all workers, values rounded at random to a table, and sums of the table's integers.

    With n vectors of d elements (d a power of two), M the largest of their lengths, and t and the table T of
    :func:`thc_table`::

        z = sqrt(d) / M  H D x, cut at +-t     y = (z + t) g / (2 t), rounded at random to an entry of T
        mean = M / sqrt(d)  D H (2 t / (g n) sum y - t)

    Where all send to all, an index into the table is sent, of ``width`` bits; where sums travel, they take as many bits
    as g n needs, and are exact. What is cut is lost: the paper's error feedback, which sends it later, has a memory
    and does not enter the error of one round.

    Source: see :func:`thc_table`; and the authors' public implementation for what is scaled by what.
    """

    width: int = 4
    granularity: int = 30
    outside: float = 1 / 32

    def bits(self, numel: int) -> float:
        """Return the bits of an element where codes are sent."""
        return self.width + 32 / numel

    def sum_bits(self, numel: int, workers: int) -> float:
        """Return the bits of an element where sums are sent."""
        return math.ceil(math.log2(self.granularity * workers + 1)) + 32 / numel

    def mean(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        """Return the decoded mean of all rows."""
        table, end = thc_table(self.width, self.granularity, self.outside)
        count, numel = rows.shape
        longest, turn = rows.norm(dim=1).max().clamp(min=1e-38), signs((numel,), generator)
        entries, total = table.float(), torch.zeros(numel)
        for row in rows:
            z = (hadamard(row * turn) * (math.sqrt(numel) / longest)).clamp(-end, end)
            y = ((z + end) * (self.granularity / (2 * end))).clamp(0, self.granularity)
            upper = torch.bucketize(y, entries).clamp(1, len(entries) - 1)
            low, high = entries[upper - 1], entries[upper]
            up = torch.rand(numel, generator=generator) < (y - low) / (high - low)
            total += torch.where(up, high, low)
        z = total * (2 * end / (self.granularity * count)) - end
        return hadamard(z) * turn * (longest / math.sqrt(numel))


def dynamiq_values(bits: int, epsilon: float) -> Tensor:
    """Return DynamiQ's magnitudes of ``bits`` bits, one of which is the sign.

    They are ((1 + 2 e^2)^r - 1) / ((1 + 2 e^2)^(m) - 1) for r from 0 to m = 2^(bits - 1) - 1: even steps for a small e,
    and steps that grow as the values do for a large one.

    Example:
        >>> dynamiq_values(3, 1e-4)
        tensor([0.0000, 0.3333, 0.6667, 1.0000])
    """
    most = 2 ** (bits - 1) - 1
    powers = math.log1p(2 * epsilon**2) * torch.arange(most + 1, dtype=torch.float64)
    return (torch.expm1(powers) / torch.expm1(powers[-1])).float()


@functools.cache
def best_epsilon(bits: int, group: int = 16) -> float:
    """Return the e of :func:`dynamiq_values` with the least error for groups of normal values.

    The published text leaves e open; this is the best that a fixed one does where nothing is known of the values.
    """
    drawn = torch.randn(8192, group, generator=torch.Generator().manual_seed(0)).abs()
    largest = drawn.amax(1, keepdim=True)
    x = drawn / largest

    def error(epsilon: float) -> float:
        values = dynamiq_values(bits, epsilon)
        upper = torch.bucketize(x, values).clamp(1, len(values) - 1)
        return float(((values[upper] - x) * (x - values[upper - 1]) * largest.square()).sum())

    return min((2.0 ** (power / 4) for power in range(-32, 5)), key=error)


def widths_of(energy: Tensor, budget: float, widths: Sequence[int]) -> Tensor:
    """Return the bits of each super-group: more where its energy is larger, ``budget`` on the average at most.

    Halving a step quarters the error, so that going from a to b bits takes F (4^-a - 4^-b) off, F the energy, and is
    worth that over b - a for each bit. Equal worth at all thresholds ties them to one another: F exceeds the threshold
    to b bits by (b - a) / (4^-a - 4^-b) times what the last bit is worth, which a bisection finds.
    """
    need = [(b - a) / (4.0**-a - 4.0**-b) for a, b in itertools.pairwise(widths)]
    table = torch.tensor(widths)

    def chosen(log_worth: float) -> Tensor:
        borders = torch.tensor(need, dtype=torch.float64) * 2.0**log_worth
        return table[torch.bucketize(energy.double(), borders, right=True)]

    low, high = -400.0, 400.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if float(chosen(middle).double().mean()) <= budget else (middle, high)
    return chosen(high)


@dataclass(frozen=True)
class DynamiQ:
    """DynamiQ: bits by the energy of super-groups, levels that grow, scales of scales, and correlated rounding.

    Before anything else the workers sum the mean and the energy of super-groups of 256, in bfloat16. The common mean is
    subtracted, and :func:`widths_of` gives each super-group its bits for the whole all-reduce. A group of 16 is divided
    by its largest magnitude, which is rounded at random to a multiple of 1/255 of the super-group's, that in bfloat16;
    magnitudes are rounded at random to :func:`dynamiq_values`. Of the n senders that quantise an element, each uses
    u = (p + r) / n with p its place in a random order, and r uniform in [0, 1): where one rounds up, another one rounds
    down. At 16 bits elements are bfloat16.

    ``budget`` is the average of all bits of an element: 32/256 for the first sums, 8/16 and 16/256 for scales, and the
    rest for elements.

    Source: W. Han et al., "DynamiQ: Accelerating Gradient Synchronization using Compressed Multi-hop All-reduce", arXiv
    2602.08923 v3, SIGCOMM 2026, section 3 (read in public notes that repeat its formulas). Its parameter e is not in
    them: see :func:`best_epsilon`.
    """

    budget: float = 5.0
    widths: tuple[int, ...] = (2, 4, 8)
    group = 16
    size = 256

    def begin(self, rows: Tensor, generator: torch.Generator) -> DynamiQRound:
        """Agree on means and bits; rows have a multiple of 256 elements."""
        return DynamiQRound(self, rows, generator)


class DynamiQRound:
    """What is agreed for one all-reduce.

    Attributes:
        rows: The vectors without the common means.
        widths: Bits of each super-group.
        bits: Bits of an element, all included.
    """

    def __init__(self, of: DynamiQ, rows: Tensor, generator: torch.Generator) -> None:
        self.of, self.generator = of, generator
        groups = rows.view(len(rows), -1, of.size)
        self.mean = groups.mean(2).bfloat16().float().mean(0).bfloat16().float()
        energy = groups.square().sum(2).bfloat16().float().sum(0)
        overhead = 32 / of.size + 8 / of.group + 16 / of.size
        self.widths = widths_of(energy, of.budget - overhead, of.widths)
        self.bits = float(self.widths.double().mean()) + overhead
        self.rows = (groups - self.mean[:, None]).reshape(rows.shape)
        place = torch.rand(rows.shape, generator=generator).argsort(0)
        self.uniform = (place + torch.rand(rows.shape, generator=generator)) / len(rows)

    def quantise(self, x: Tensor, slots: slice | None) -> Tensor:
        """Return the decoded values of partial sums; ``slots`` says which senders' random numbers to use."""
        of = self.of
        uniform = torch.rand(x.shape, generator=self.generator) if slots is None else self.uniform[slots]
        groups = x.view(len(x), -1, of.size // of.group, of.group)
        noise, found = uniform.view(groups.shape), torch.empty_like(groups)
        largest = groups.abs().amax(3, keepdim=True)
        # Away from zero, so that no group's scale is more than 255 of it.
        whole = (largest.amax(2, keepdim=True) * (1 + 2.0**-7)).bfloat16().float()
        ratio = largest / whole.clamp(min=1e-38) * 255
        scale = (ratio + torch.rand(ratio.shape, generator=self.generator)).floor().clamp(max=255) / 255 * whole
        y = groups.abs() / largest.clamp(min=1e-38)
        for width in of.widths:
            mine = self.widths == width
            if width == 16:
                found[:, mine] = groups[:, mine].bfloat16().float()
                continue
            values, part = dynamiq_values(width, best_epsilon(width)), y[:, mine]
            upper = torch.bucketize(part, values).clamp(1, len(values) - 1)
            low, high = values[upper - 1], values[upper]
            rounded = torch.where(noise[:, mine] < (part - low) / (high - low), high, low)
            found[:, mine] = rounded * groups[:, mine].sign() * scale[:, mine]
        return found.view(x.shape)

    def finish(self, mean: Tensor) -> Tensor:
        """Add the common means to the mean of all workers."""
        return (mean.view(-1, self.of.size) + self.mean[:, None]).reshape(-1)
