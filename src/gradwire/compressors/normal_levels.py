"""Levels that round a standard normal variable with the least squared error: the fixed points of Lloyd and Max.

A level is the mean of what is rounded to it, and a border lies halfway between two levels. The numbers are those of
:func:`lloyd_max`, which a test repeats: kept as they are, since a mathematical library may round them differently and
all ranks must have the same.

References: S. Lloyd, "Least squares quantization in PCM", 1957 (published 1982); J. Max, "Quantizing for minimum
distortion", 1960.
"""

from __future__ import annotations

import itertools
import math

__all__ = ["DISTORTION", "MOST_BITS", "NORMAL_LEVELS", "lloyd_max"]

# fmt: off
NORMAL_LEVELS: dict[int, tuple[float, ...]] = {
    1: (0.797884561,),
    2: (0.452780035, 1.51041761),
    3: (0.245094179, 0.756005281, 1.34390928, 2.1519457),
    4: (0.12839503, 0.388048299, 0.656759119, 0.942340456, 1.2562312, 1.61804639, 2.06901723, 2.73258957),
    5: (
        0.0658896598, 0.19805183, 0.331378306, 0.466699523, 0.604933624, 0.747135704, 0.894565117, 1.04878332,
        1.21180438, 1.38634034, 1.57622808, 1.78723322, 2.0287284, 2.3177394, 2.69111958, 3.26073249,
    ),
    6: (
        0.0334095064, 0.100278289, 0.167296903, 0.234566985, 0.302192846, 0.370282645, 0.438949672, 0.508313781,
        0.578503031, 0.649655581, 0.721921941, 0.795467656, 0.870476587, 0.947154945, 1.02573635, 1.10648824,
        1.18972014, 1.27579449, 1.36514102, 1.45827637, 1.55583122, 1.6585889, 1.76754188, 1.88397724, 2.00961104,
        2.14681022, 2.29898121, 2.4713048, 2.67227384, 2.91740679, 3.24043706, 3.74410127,
    ),
}
# fmt: on
"""Magnitudes of the 2^bits levels, by bits."""

MOST_BITS = max(NORMAL_LEVELS)

DISTORTION: dict[int, float] = {
    1: 0.363380228,
    2: 0.117481848,
    3: 0.0345477608,
    4: 0.00950100801,
    5: 0.00250466836,
    6: 0.000644239665,
}
"""E (z - Q(z))^2 of a standard normal z, by bits."""


def lloyd_max(levels: int) -> tuple[list[float], float]:
    """Return that many magnitudes, and the distortion that they and their negatives leave; slow for many."""
    found = [2.5 * (2 * j + 1) / (2 * levels) for j in range(levels)]
    change = 1.0
    while change > 1e-13:
        borders = _borders(found)
        mean = [(_density(a) - _density(b)) / (_tail(a) - _tail(b)) for a, b in itertools.pairwise(borders)]
        change = max(abs(x - y) for x, y in zip(found, mean))
        found = mean
    borders = _borders(found)
    kept = sum(2 * m * m * (_tail(a) - _tail(b)) for m, a, b in zip(found, borders, borders[1:]))
    return found, 1 - kept


def _borders(magnitudes: list[float]) -> list[float]:
    return [0.0, *((a + b) / 2 for a, b in itertools.pairwise(magnitudes)), math.inf]


def _density(t: float) -> float:
    return math.exp(-t * t / 2) / math.sqrt(2 * math.pi)


def _tail(t: float) -> float:
    """Return the probability of more than t."""
    return math.erfc(t / math.sqrt(2)) / 2
