"""Levels with the least error for standard normal values, given their number or their entropy.

For a given number they are the fixed points of Lloyd and Max: a level is the mean of the values rounded to it, and a
border is halfway between two levels. For a given entropy they are nearly the multiples of one step: the error of these
is at most 1.534 dB, a quarter of a bit, above that of any code.

The tables were computed by :func:`lloyd_max` and :func:`uniform_levels`, which tests repeat. They are stored, since
mathematical libraries may round differently and all ranks must have the same numbers.

References: S. Lloyd, "Least squares quantization in PCM", 1957 (published 1982); J. Max, "Quantizing for minimum
distortion", 1960; H. Gish and J. Pierce, "Asymptotically efficient quantizing", IEEE Transactions on Information
Theory, 1968.
"""

from __future__ import annotations

import itertools
import math

from gradwire.kernels import digit_layout

# fmt: off
NORMAL_LEVELS: dict[int, tuple[float, ...]] = {
    2: (0.797884561,),
    3: (1.22400636,),
    4: (0.452780035, 1.51041761),
    5: (0.764567571, 1.72414741),
    6: (0.317716369, 1.00010605, 1.89359481),
    7: (0.560576888, 1.18814695, 2.03336918),
    8: (0.245094179, 0.756005281, 1.34390928, 2.1519457),
    9: (0.443638648, 0.918795884, 1.47639174, 2.25466364),
    11: (0.367458112, 0.752367292, 1.17882641, 1.69263903, 2.42574639),
    16: (0.12839503, 0.388048299, 0.656759119, 0.942340456, 1.2562312, 1.61804639, 2.06901723, 2.73258957),
    23: (
        0.181687692, 0.365400262, 0.553325367, 0.74801175, 0.952654299, 1.17156077, 1.41100713, 1.68100291,
        1.99952743, 2.40525191, 3.01515014,
    ),
    32: (
        0.0658896598, 0.19805183, 0.331378306, 0.466699523, 0.604933624, 0.747135704, 0.894565117, 1.04878332,
        1.21180438, 1.38634034, 1.57622808, 1.78723322, 2.0287284, 2.3177394, 2.69111958, 3.26073249,
    ),
    40: (
        0.0530027116, 0.159207153, 0.266013918, 0.373842493, 0.483140596, 0.594398323, 0.708165627, 0.825074894,
        0.945871283, 1.071455, 1.20294236, 1.34175743, 1.4897755, 1.64955917, 1.82477121, 2.02095393, 2.24715871,
        2.51987735, 2.87487772, 3.42087525,
    ),
    64: (
        0.0334095064, 0.100278289, 0.167296903, 0.234566985, 0.302192846, 0.370282645, 0.438949672, 0.508313781,
        0.578503031, 0.649655581, 0.721921941, 0.795467656, 0.870476587, 0.947154945, 1.02573635, 1.10648824,
        1.18972014, 1.27579449, 1.36514102, 1.45827637, 1.55583122, 1.6585889, 1.76754188, 1.88397724, 2.00961104,
        2.14681022, 2.29898121, 2.4713048, 2.67227384, 2.91740679, 3.24043706, 3.74410127,
    ),
}
# fmt: on
"""Magnitudes of the levels other than zero, by the number of levels; zero is a level if the number is odd."""

MOST_BITS = max(NORMAL_LEVELS).bit_length() - 1

DISTORTION: dict[int, float] = {
    2: 0.363380228,
    3: 0.190174039,
    4: 0.117481848,
    5: 0.0799411271,
    6: 0.0579776537,
    7: 0.0440003825,
    8: 0.0345477608,
    9: 0.0278532609,
    11: 0.019219508,
    16: 0.00950100801,
    23: 0.00474619946,
    32: 0.00250466836,
    40: 0.00162103515,
    64: 0.000644239665,
}
"""E (z - Q(z))^2 of a standard normal z, by the number of levels."""

# fmt: off
UNIFORM_STEP: dict[float, float] = {
    0.125: 4.88108028, 0.25: 4.23231618, 0.375: 3.79880022, 0.5: 3.45617792, 0.625: 3.16292248, 0.75: 2.89937412,
    0.875: 2.65444029, 1.0: 2.42161946, 1.125: 2.19817649, 1.25: 1.98545513, 1.375: 1.78800594, 1.5: 1.61009599,
    1.625: 1.4527164, 1.75: 1.31406813, 1.875: 1.19146913, 2.0: 1.08244652, 2.25: 0.897484036, 2.5: 0.747380374,
    2.75: 0.624228749, 3.0: 0.522433157, 3.25: 0.437856146, 3.5: 0.367333153, 3.75: 0.308381769, 4.0: 0.25901666,
    4.25: 0.217627946, 4.5: 0.182896944, 4.75: 0.153734607, 5.0: 0.129237585, 5.25: 0.108653302, 5.5: 0.091352972,
    5.75: 0.0768105784, 6.0: 0.0645850751,
}
# fmt: on
"""Step of evenly spaced levels, by the entropy in bits of the nearest level to a standard normal value."""

LEAST_ENTROPY = min(UNIFORM_STEP)

REACH = 5.0
"""Evenly spaced levels end at the first beyond it: one in a million normal values is larger in magnitude."""


def level_count(bits: float) -> int:
    """Return the number of levels for ``bits`` a coordinate.

    It is 2^bits if ``bits`` is a whole number. Otherwise it is the largest number in :data:`NORMAL_LEVELS` whose packed
    digits take at most ``bits`` each, rounded to two decimals.

    Example:
        >>> [level_count(bits) for bits in (2, 2.5, 3, 3.2)]
        [4, 5, 8, 9]
    """
    if bits == int(bits):
        return 1 << int(bits)
    return max(n for n in NORMAL_LEVELS if round(digit_layout(n).bits_per_value, 2) <= bits)


def uniform_step(bits: float) -> float:
    """Return the step whose levels have the entropy ``bits``, within 0.01, interpolated linearly in the table."""
    low = max(b for b in UNIFORM_STEP if b <= bits)
    high = min(b for b in UNIFORM_STEP if b >= bits)
    if low == high:
        return UNIFORM_STEP[low]
    share = (bits - low) / (high - low)
    return UNIFORM_STEP[low] + share * (UNIFORM_STEP[high] - UNIFORM_STEP[low])


def lloyd_max(levels: int) -> tuple[list[float], float]:
    """Return the magnitudes above zero of ``levels`` levels, and their distortion; slow for many levels."""
    middle = levels % 2
    found = [2.5 * (2 * j + 1 + middle) / levels for j in range(levels // 2)]
    change = 1.0
    while change > 1e-13:
        borders = _borders(found, middle)
        mean = [(_density(a) - _density(b)) / (_tail(a) - _tail(b)) for a, b in itertools.pairwise(borders)]
        change = max(abs(x - y) for x, y in zip(found, mean))
        found = mean
    borders = _borders(found, middle)
    kept = sum(2 * m * m * (_tail(a) - _tail(b)) for m, a, b in zip(found, borders, borders[1:]))
    return found, 1 - kept


def uniform_levels(step: float) -> tuple[float, float]:
    """Return the entropy in bits of levels j step, |j| <= ceil(5 / step), and their distortion with the best scale."""
    levels = [j * step for j in range(1, math.ceil(REACH / step) + 1)]
    borders = _borders(levels, 1)
    shares = [_tail(a) - _tail(b) for a, b in itertools.pairwise(borders)]
    inner = sum(2 * m * (_density(a) - _density(b)) for m, a, b in zip(levels, borders, borders[1:]))
    square = sum(2 * m * m * p for m, p in zip(levels, shares))
    zero = 1 - 2 * sum(shares)
    return -sum(p * math.log2(p) for p in (zero, *shares, *shares) if p > 0), 1 - inner * inner / square


def _borders(magnitudes: list[float], zero: int) -> list[float]:
    return [zero * magnitudes[0] / 2, *((a + b) / 2 for a, b in itertools.pairwise(magnitudes)), math.inf]


def _density(t: float) -> float:
    return math.exp(-t * t / 2) / math.sqrt(2 * math.pi)


def _tail(t: float) -> float:
    """Return the probability of a value above t."""
    return math.erfc(t / math.sqrt(2)) / 2
