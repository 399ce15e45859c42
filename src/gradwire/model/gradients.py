"""Gradients of a profiled model, by the quantiles of their values: what coders make of them decides their bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

INTERVALS = 64
"""Number of intervals between the quantiles of a gradient."""

MOST_VALUES = 1 << 18
"""Number of elements of a gradient that are sorted."""

Quantiles = Mapping[str, Sequence[float]]
"""By the names of parameters, :data:`INTERVALS` + 1 quantiles each."""


def probabilities() -> torch.Tensor:
    """Return the probabilities of the quantiles: 0, 2^-17 to 1/2, as far from 1, and 1.

    They are closer to one another near 0 and 1, since few elements may decide a scale, or be all that are not zero.
    """
    tail = torch.exp2(torch.linspace(-17.0, -1.0, INTERVALS // 2, dtype=torch.float64, device="cpu"))
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64, device="cpu")
    return torch.cat([ends[:1], tail, (1.0 - tail[:-1]).flip(0), ends[1:]])


def quantiles(gradient: torch.Tensor) -> tuple[float, ...]:
    """Return the quantiles of a gradient's values, from the least to the largest, at :func:`probabilities`.

    They are rounded to five digits. Of a large gradient, elements at equal distances are taken, and the least and the
    largest of all. Without elements, or with one that is not finite, it returns nothing.
    """
    values = gradient.detach().reshape(-1).to(torch.float32)
    if not len(values) or not bool(torch.isfinite(values).all()):
        return ()
    ordered = values[:: -(-len(values) // MOST_VALUES)].sort().values
    places = (probabilities() * (len(ordered) - 1)).round().long()
    found = ordered[places.to(ordered.device)]
    found[0], found[-1] = values.min(), values.max()
    return tuple(float(f"{value:.5g}") for value in found.tolist())


def drawn(numel: Mapping[str, int], known: Quantiles, generator: torch.Generator) -> torch.Tensor:
    """Return a vector of gradients of some parameters, one after the other.

    Values are drawn independently; between two quantiles all are equally likely. If those of one parameter are not
    known, all values are from a standard normal distribution, since nothing then tells its scale among the others.

    Args:
        numel: Number of elements of each parameter.
        known: Quantiles of the parameters' gradients.
        generator: Source of randomness.
    """
    # A parameter without elements has no quantiles.
    if not all(known.get(name) for name, count in numel.items() if count):
        return torch.randn(sum(numel.values()), generator=generator, dtype=torch.float32, device="cpu")
    limits, parts = probabilities().float(), [torch.empty(0, dtype=torch.float32, device="cpu")]
    for name, count in ((name, count) for name, count in numel.items() if count):
        values = torch.tensor(known[name], dtype=torch.float32, device="cpu")
        at = torch.rand(count, generator=generator, dtype=torch.float32, device="cpu")
        before = torch.bucketize(at, limits, right=True).clamp_(max=INTERVALS) - 1
        share = (at - limits[before]) / (limits[before + 1] - limits[before])
        parts.append(torch.lerp(values[before], values[before + 1], share))
    return torch.cat(parts)
