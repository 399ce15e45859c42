"""Which atoms of a decomposition are kept at random, and with what probability."""

from __future__ import annotations

import torch

__all__ = ["kept_magnitude", "probabilities"]


def kept_magnitude(largest: torch.Tensor, total: float, budget: float) -> float:
    """Return the magnitude c for which the probabilities ``min(1, |x_i| / c)`` add up to the budget.

    These have the least variance, sum of x_i^2 (1 / p_i - 1), of all that do; those of 1 are not clipped at random but
    found one by one, from the largest on: as long as ``|x_i| (budget - i) >= sum of those from i on``.

    Args:
        largest: The ``floor(budget)`` largest magnitudes or more, descending, float64.
        total: Sum of all magnitudes.
        budget: Number of atoms kept on average.

    Returns:
        c; 0 where no more atoms than the budget are other than zero, all of which then are kept.
    """
    left = budget - torch.arange(len(largest), dtype=torch.float64)
    tails = total - (largest.cumsum(0) - largest)
    keeps = (largest * left >= tails) & (left > 0)
    sure = int(keeps.cumprod(0).sum())
    rest = total - float(largest[:sure].sum())
    # What is left of sums of float64 is no atom.
    if budget <= sure or rest <= 1e-12 * total:
        return 0.0
    return rest / (budget - sure)


def probabilities(magnitudes: torch.Tensor, budget: float) -> torch.Tensor:
    """Return the probability of each atom, float64, by :func:`kept_magnitude`.

    Args:
        magnitudes: Of all atoms, in any order.
    """
    sizes = magnitudes.abs().double()
    c = kept_magnitude(sizes.sort(descending=True).values, float(sizes.sum()), budget)
    return (sizes > 0).double() if c == 0 else (sizes / c).clamp(max=1)
