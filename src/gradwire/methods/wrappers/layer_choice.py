"""Choose for each layer how much it is compressed, so that the bytes are the fewest within a budget of error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

__all__ = ["PARTS", "fewest_bytes"]

PARTS = 10_000
"""Of the budget; an error counts as the next whole number of parts."""


def fewest_bytes(
    sizes: Sequence[Sequence[int]], errors: Sequence[Sequence[float]], uniform: int, parts: int = PARTS
) -> list[int]:
    """Choose one candidate a layer with the fewest bytes whose errors add up to those of a uniform choice at most.

    Errors are rounded up to parts of the budget, and the best of all choices that then fit is found by dynamic
    programming: least[b] holds the fewest bytes of the layers so far within b parts. So the sum of the errors never
    exceeds the budget, and a choice that uses 1 - layers / parts of it, or less, is never missed. All arithmetic is
    exact: the same numbers give the same choice on any machine.

    Takes layers x candidates x parts steps, and a byte for each layer and part.

    Args:
        sizes: Bytes of each layer with each candidate, ``[layers][candidates]``.
        errors: Squared errors alike, at least 0 and finite.
        uniform: The candidate whose errors, with all layers, are the budget.
        parts: Into which the budget is divided.

    Returns:
        The candidate of each layer; the uniform one for all where nothing takes fewer bytes.

    Example:
        >>> fewest_bytes([[4, 8, 16], [40, 80, 160]], [[9.0, 3.0, 1.0], [12.0, 9.0, 2.0]], uniform=1)
        [1, 1]
        >>> fewest_bytes([[4, 8, 16], [40, 80, 160]], [[9.0, 3.0, 0.0], [12.0, 9.0, 2.0]], uniform=1)
        [2, 0]
    """
    default = [uniform] * len(sizes)
    budget = sum((Fraction(row[uniform]) for row in errors), Fraction())
    steps = [[_parts(error, budget, parts) for error in row] for row in errors]
    most = sum(row[uniform] for row in sizes) + 1
    least, taken = np.zeros(parts + 1, dtype=np.int64), []
    for size, step in zip(sizes, steps):
        best = np.full(parts + 1, most, dtype=np.int64)
        chosen = np.zeros(parts + 1, dtype=np.uint8)
        for candidate, (count, share) in enumerate(zip(size, step)):
            if share > parts:
                continue
            total = least[: parts + 1 - share] + count
            fewer = total < best[share:]
            best[share:][fewer] = total[fewer]
            chosen[share:][fewer] = candidate
        least = np.minimum(best, most)
        taken.append(chosen)
    if least[parts] >= most - 1:
        return default
    found, left = [], parts
    for chosen, step in zip(reversed(taken), reversed(steps)):
        found.append(int(chosen[left]))
        left -= step[found[-1]]
    return found[::-1]


def _parts(error: float, budget: Fraction, parts: int) -> int:
    """Round an error up to parts of the budget; what is more than all of it is one more than all."""
    if not error:
        return 0
    return parts + 1 if error > budget else math.ceil(Fraction(error) * parts / budget)
