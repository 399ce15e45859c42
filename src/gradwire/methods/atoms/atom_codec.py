"""Codecs that keep atoms at random, and the probabilities with the least variance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from gradwire.exchange.codecs.base import SMALLEST_SCALE, Draw, Summary, usable
from gradwire.exchange.segments import Segment
from gradwire.kernels import GROUP_BYTES, SegmentTable, inverse_scale
from gradwire.methods.sparse.sparse_codec import AboveRule, SparseCodec, choose_above
from gradwire.methods.sparse.sparse_values import CastValues, KeptValues, SignedValues, UnitTable
from gradwire.seeds import parameter_key

if TYPE_CHECKING:
    from gradwire.kernels import Kernels


def kept_magnitude(largest: torch.Tensor, total: float, budget: float) -> float:
    """Return the c for which the probabilities ``min(1, |x_i| / c)`` add up to the budget.

    Of all probabilities with that sum these have the least variance, sum of x_i^2 (1 / p_i - 1). Probabilities of 1 are
    found one by one, from the largest magnitude on, as long as ``|x_i| (budget - i) >= sum of those from i on``.

    Args:
        largest: The ``floor(budget)`` largest magnitudes or more, descending, float64.
        total: Sum of all magnitudes.
        budget: Number of atoms kept on average.

    Returns:
        c, or 0 if no more than ``budget`` atoms are non-zero, all of which are then kept.
    """
    left = budget - torch.arange(len(largest), dtype=torch.float64, device="cpu")
    tails = total - (largest.cumsum(0) - largest)
    keeps = (largest * left >= tails) & (left > 0)
    sure = int(keeps.cumprod(0).sum())
    rest = total - float(largest[:sure].sum())
    # A remainder this small is a rounding error.
    if budget <= sure or rest <= 1e-12 * total:
        return 0.0
    return rest / (budget - sure)


def probabilities(magnitudes: torch.Tensor, budget: float) -> torch.Tensor:
    """Return the probability of each atom, float64, see :func:`kept_magnitude`.

    Args:
        magnitudes: Magnitudes of all atoms, in any order.
    """
    sizes = magnitudes.abs().double()
    c = kept_magnitude(sizes.sort(descending=True).values, float(sizes.sum()), budget)
    return (sizes > 0).double() if c == 0 else (sizes / c).clamp(max=1)


class AtomCodec(SparseCodec):
    """Codec of units kept with the probability ``p_i = min(1, size_i / c)`` and sent over it, one c a parameter.

    Args:
        units: Units that are kept or left out.
        drawn: Segments of each parameter's units in the result of :meth:`sizes`, in the order of parameters without
            gaps, and their random keys.
        density: Share of a parameter's units that is kept on average, which determines c.
        values: Encoding of the values.
    """

    def __init__(
        self,
        kernels: Kernels,
        units: UnitTable,
        world_size: int,
        *,
        drawn: SegmentTable,
        density: float,
        values: KeptValues,
    ) -> None:
        super().__init__(kernels, units, world_size, rule=AboveRule(0.5), block=None, values=values)
        self.drawn, self.density = drawn, density
        self._all = self.rule.most(drawn)
        self._before, self._at = (
            (self._all.cumsum(0) - self._all).to(torch.int32),
            torch.from_numpy(drawn.offset.copy()),
        )
        self._trits = torch.empty(GROUP_BYTES * drawn.groups, dtype=torch.uint8, device="cpu")

    def encode(self, flat: torch.Tensor, summary: Summary, draw: Draw, out: torch.Tensor) -> None:
        number, sizes = len(self.drawn), self.sizes(flat)
        scale, factor = self.magnitudes(sizes, draw)
        limit = torch.full((number,), torch.inf, dtype=torch.float32, device="cpu")
        inverse = inverse_scale(scale)
        groups = self.drawn.groups
        self.kernels.ternary_encode(sizes, self.drawn, limit, inverse, draw.round, draw.stream, 0, groups, self._trits)
        # Parameters have no gaps between them, so that every element is written.
        trits = torch.empty(self.drawn.extent, dtype=torch.float32, device="cpu")
        self.kernels.decode(self._trits, 1, self.drawn, torch.ones_like(limit), 0, groups, trits)
        # Values that are not finite are kept, and so is all of a parameter that fits the budget. If only c is infinite,
        # the largest unit is kept, whose value over its probability is then infinite, too: with nothing kept the round
        # would count as one of zeros.
        if bool(torch.isinf(scale).any()):
            trits[~torch.isfinite(sizes[: len(trits)])] = torch.inf
        for i in torch.nonzero(torch.isinf(scale)).flatten().tolist():
            a, n = int(self.drawn.offset[i]), int(self.drawn.numel[i])
            trits[a + int(sizes[a : a + n].abs().argmax())] = torch.inf
        threshold = torch.full((number,), 0.5, dtype=torch.float32, device="cpu")
        for i in torch.nonzero(scale == 0).flatten().tolist():
            a, n = int(self.drawn.offset[i]), int(self.drawn.numel[i])
            trits[a : a + n] = sizes[a : a + n]
            threshold[i] = 2.0**-149
        positions, counts = choose_above(self.kernels, trits, self.drawn, threshold, self._all)
        before, at, least, factors = (
            torch.repeat_interleave(column, counts) for column in (self._before, self._at, scale, factor)
        )
        chosen = positions + before
        values = self.larger(flat[self.table.places(chosen)], chosen, sizes[at + positions], least)
        self.write(chosen, values * torch.repeat_interleave(factors, self.table.lengths(chosen)), draw, out)

    def sizes(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the size of each unit, float32; for a single element it may have the element's sign."""
        return self.table.score(self.kernels, flat)

    def larger(
        self, values: torch.Tensor, chosen: torch.Tensor, size: torch.Tensor, least: torch.Tensor
    ) -> torch.Tensor:
        """Return the values of chosen units divided by their probabilities, times ``max(1, least / size)``."""
        ratio = torch.where(least > size, least / size, 1.0)
        return values * torch.repeat_interleave(ratio, self.table.lengths(chosen))

    def magnitudes(self, sizes: torch.Tensor, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
        """Return c of each parameter, 0 where all non-zero units are kept, and a factor of the values sent."""
        moments, sums = self.kernels.moments(sizes, self.drawn), self.kernels.sign_sums(sizes, self.drawn)
        total = sums.above + sums.below
        budget = [self.budget(n) for n in self.drawn.numel.tolist()]
        fewest = [min(n, int(b)) for n, b in zip(self.drawn.numel.tolist(), budget)]
        most = torch.tensor(fewest, dtype=torch.int64, device="cpu")
        index = torch.empty(int(most.sum()), dtype=torch.int32, device="cpu")
        self.kernels.select_largest(sizes, self.drawn, most, index)
        found = []
        for part, at, whole, b in zip(index.split(most.tolist()), self.drawn.offset.tolist(), total.tolist(), budget):
            largest = sizes[at + part.long()].abs().double().sort(descending=True).values
            c = kept_magnitude(largest, whole, b)
            found.append(c if c == 0 else max(c, SMALLEST_SCALE))
        # A c beyond float32 is infinite: what would be sent is no number, and the parameter counts as not finite.
        scale = torch.tensor(found, dtype=torch.float64, device="cpu").to(torch.float32)
        return torch.where(torch.isfinite(moments.max_abs), scale, torch.inf), torch.ones_like(scale)

    def budget(self, units: int) -> float:
        """Return the mean number of a parameter's units that are kept, at least one."""
        return max(1.0, self.density * units)


class AtomElementCodec(AtomCodec):
    """Codec of elements kept with the probability ``p_i = min(1, |x_i| / c)`` and sent over it, one c a segment.

    Args:
        density: Share of the elements kept on average, which determines c; None if a norm does.
        norm: "l2" or "max": c is that norm of the segment. All values sent of it are then c or -c, and are encoded as
            one number and a bit each.
    """

    def __init__(
        self,
        kernels: Kernels,
        segments: Sequence[Segment],
        world_size: int,
        seed: int,
        *,
        density: float | None,
        norm: str | None,
    ) -> None:
        # The same draws as the operators to which it is then equal.
        purpose = "levels" if norm == "l2" else "ternary"
        drawn = SegmentTable(
            offset=[s.offset for s in segments],
            numel=[s.numel for s in segments],
            start=[0] * len(segments),
            key=[parameter_key(seed, s.parameter.name, purpose) for s in segments],
        )
        values = CastValues(torch.float32) if norm is None else SignedValues()
        units = UnitTable(segments, [1] * len(segments))
        super().__init__(kernels, units, world_size, drawn=drawn, density=density or 0.0, values=values)
        self.norm = norm

    def magnitudes(self, sizes: torch.Tensor, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
        if self.norm is None:
            return super().magnitudes(sizes, draw)
        moments = self.kernels.moments(sizes, self.drawn)
        norm = moments.norm.clamp(max=torch.finfo(torch.float32).max).to(torch.float32)
        scale = moments.max_abs if self.norm == "max" else torch.maximum(norm, moments.max_abs)
        return usable(torch.where(torch.isfinite(moments.max_abs), scale, torch.inf)), torch.ones_like(scale)

    def larger(
        self, values: torch.Tensor, chosen: torch.Tensor, size: torch.Tensor, least: torch.Tensor
    ) -> torch.Tensor:
        # The value is exactly c; a product would round.
        return torch.copysign(torch.maximum(values.abs(), least), values)
