"""Gradients of a profiled model, by their values and the order of these: both decide the bytes of coders."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

INTERVALS = 80
"""Number of intervals between the quantiles of a gradient."""

MOST_VALUES = 1 << 18
"""Number of elements of a gradient that are sorted for its quantiles."""

RUN, MOST_RUNS = 512, 64
"""Adjacent elements of a gradient whose order is kept, and the most runs of so many."""

RANK = np.dtype("<u2")
"""Type of the rank of an element among those whose order is kept."""


@dataclass(frozen=True)
class GradientValues:
    """Values of a gradient and their order, by which similar gradients are drawn.

    Attributes:
        quantiles: :data:`INTERVALS` + 1 quantiles at :func:`probabilities`; empty if nothing is known.
        order: The rank of each element among all elements, from 0, in the order of memory, as 16-bit integers, the
            lower byte first. Of a gradient with more than ``RUN * MOST_RUNS`` elements, it has those of
            :func:`_runs`, and their ranks among one another.
    """

    quantiles: tuple[float, ...] = ()
    order: bytes = b""

    def to_json(self) -> dict[str, Any]:
        """Return the values and their order as JSON values."""
        return {"quantiles": self.quantiles, "order": base64.b64encode(self.order).decode("ascii")}

    @classmethod
    def from_json(cls, record: Mapping[str, Any], numel: int) -> GradientValues:
        """Build them, of a gradient of ``numel`` elements, from the values of :meth:`to_json`.

        Raises:
            ValueError: there are too few or too many quantiles, or an element has no rank of its own.
        """
        found = cls(tuple(map(float, record["quantiles"])), base64.b64decode(record["order"]))
        if not found.quantiles:
            return cls()
        if len(found.quantiles) != INTERVALS + 1:
            raise ValueError(f"{INTERVALS + 1} quantiles of a gradient are needed")
        ranks = np.sort(np.frombuffer(found.order, RANK))
        if not np.array_equal(ranks, np.arange(min(numel, RUN * MOST_RUNS))):
            raise ValueError(f"the ranks of {min(numel, RUN * MOST_RUNS)} elements of a gradient are needed")
        return found


Gradients = Mapping[str, GradientValues]
"""Values of gradients by the names of parameters."""


def probabilities() -> torch.Tensor:
    """Return the probabilities of the quantiles: 0, 2^-17 to 1/8, by 1/32 to 7/8, as far from 1 as from 0, and 1.

    They are closer to one another near 0 and 1, since few elements may decide a scale, or be all that are not zero.
    """
    tail = torch.exp2(torch.linspace(-17.0, -3.0, 28, dtype=torch.float64, device="cpu"))
    middle = torch.arange(5, 28, dtype=torch.float64, device="cpu") / 32
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64, device="cpu")
    return torch.cat([ends[:1], tail, middle, (1.0 - tail).flip(0), ends[1:]])


def values_of(gradient: torch.Tensor) -> GradientValues:
    """Return a gradient's quantiles, from the least to the largest, at :func:`probabilities`, and its order.

    Quantiles are rounded to five digits. Of a large gradient, elements at equal distances are taken for them, and the
    least and the largest of all. Equal elements are in a random order. Without elements, or with one that is not
    finite, nothing is known.
    """
    by_stride = sorted(range(gradient.dim()), key=gradient.stride, reverse=True)
    values = gradient.detach().permute(by_stride).reshape(-1).to(torch.float32)
    if not len(values) or not bool(torch.isfinite(values).all()):
        return GradientValues()
    ordered = values[:: -(-len(values) // MOST_VALUES)].sort().values
    places = (probabilities() * (len(ordered) - 1)).round().long()
    found = ordered[places.to(ordered.device)]
    found[0], found[-1] = values.min(), values.max()
    kept = values[torch.cat([torch.arange(at, at + size, device=values.device) for at, size, _ in _runs(len(values))])]
    shuffled = torch.randperm(len(kept), generator=torch.Generator().manual_seed(0), device="cpu")
    ascending = shuffled[kept.cpu()[shuffled].sort(stable=True).indices].numpy()
    ranks = np.empty(len(kept), RANK)
    ranks[ascending] = np.arange(len(kept))
    return GradientValues(tuple(float(f"{value:.5g}") for value in found.tolist()), ranks.tobytes())


def _runs(numel: int) -> list[tuple[int, int, int]]:
    """Return where each run begins whose order is kept, its elements, and those up to the next run or the end.

    Runs begin at multiples of :data:`RUN`, as blocks do.
    """
    if numel <= RUN * MOST_RUNS:
        return [(0, numel, numel)]
    starts = [RUN * (numel // RUN * run // MOST_RUNS) for run in range(MOST_RUNS)]
    return [(at, RUN, end - at) for at, end in zip(starts, [*starts[1:], numel])]


def drawn(numel: Mapping[str, int], known: Gradients, generator: torch.Generator) -> torch.Tensor:
    """Return a vector of gradients of some parameters, one after the other, each in the order of memory.

    The values of a parameter have its quantiles, and between two of them all are equally likely. Their order is the
    known one; that of a run is repeated up to the next run. If the values of one parameter are not known, all are from
    a standard normal distribution, since nothing then tells its scale among the others.

    Args:
        numel: Number of elements of each parameter.
        known: Values of the parameters' gradients.
        generator: Source of randomness.
    """
    # The values of a parameter without elements are not known.
    if not all(name in known and known[name].quantiles for name, count in numel.items() if count):
        return torch.randn(sum(numel.values()), generator=generator, dtype=torch.float32, device="cpu")
    limits, parts = probabilities().float(), [torch.empty(0, dtype=torch.float32, device="cpu")]
    for name, count in ((name, count) for name, count in numel.items() if count):
        values = torch.tensor(known[name].quantiles, dtype=torch.float32, device="cpu")
        ranks = torch.from_numpy(np.frombuffer(known[name].order, RANK).astype(np.float32))
        runs = _runs(count)
        below = torch.cat(
            [
                run.repeat(-(-room // size))[:room]
                for run, (_, size, room) in zip(ranks.split([size for _, size, _ in runs]), runs)
            ]
        )
        at = (below + torch.rand(count, generator=generator, dtype=torch.float32, device="cpu")) / len(ranks)
        before = torch.bucketize(at, limits, right=True).clamp_(max=INTERVALS) - 1
        share = (at - limits[before]) / (limits[before + 1] - limits[before])
        parts.append(torch.lerp(values[before], values[before + 1], share))
    return torch.cat(parts)
