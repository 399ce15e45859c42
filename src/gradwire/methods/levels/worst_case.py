r"""Variance constants of rounding to levels: exact suprema over all vectors.

A block v of d values over its norm R has magnitudes y_i = |v_i| / R in [0, 1]. Unbiased rounding to the neighbouring
levels l <= y_i <= h has the variance e(y_i) R^2 with e(y) = (h - y)(y - l), so that the variance constant is

    omega = sup of sum_i e(y_i) / sum_i y_i^2.

Levels are even, j / s for j = 0 .. s, or powers of two, 2^(j - s) for j = 1 .. s, with or without a zero, or odd
multiples of 1 / s. A shorter block is a longer one with zeros, whose error is not negative: the constant grows with d,
and that of a full block holds for the last one of a parameter, too. Two effects of float32 are left out: the rounding
of R itself, and blocks whose scale is raised to 2^-100, the least that kernels accept.

**Maximum norm.** One value is at 1, without an error, and the other n = d - 1 are free. The ratio exceeds w where
sum_i (e(y_i) - w y_i^2) > w, a sum in which every value may be chosen independently: at the supremum all of them are
equal (Dinkelbach), and w is the root of n max_y (e(y) - w y^2) = w. With y between l and h that is w^2 + (1 + n l h) w
= n (h - l)^2 / 4; omega is the largest root over all intervals.

**Euclidean norm.** sum_i y_i^2 = 1. As a function of y^2, e is concave in every interval, so values in one interval are
equal at the maximum, and a common multiplier makes all values proportional to the middles m = (l + h) / 2 of their
intervals. With w_i = (h - l)^2 / 4, the error in the middle, and M the sum of the squares of the middles,

    omega = max of sum_i w_i - (sqrt(M) - 1)^2 over all choices of an interval for every value;

a choice that would put a value outside its interval is not a maximum and may be included, since its parabola is
negative there. The rest is integer arithmetic, done below for each spacing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence


def even_constant(levels: int, numel: int, norm: str) -> float:
    """Return omega for ``levels`` evenly spaced levels above zero and blocks of ``numel`` values.

    The norm is "max", "l2" or "l1".

    Raises:
        ValueError: the norm is "l1" and there are several levels.

    Example:
        >>> even_constant(1, 64, "max"), even_constant(1, 64, "l2"), even_constant(1, 64, "l1")
        (3.5, 7.0, 63.0)
    """
    if norm == "max":
        # The interval next to zero is the worst: in the others l h reduces the root.
        return _maximum_constant([0.0, 1 / levels], numel)
    if norm == "l1":
        if levels != 1:
            raise ValueError("the constant of the l1 norm is known for one level only")
        # e(y) = y - y^2 and sum y = 1: (1 - sum y^2) / sum y^2, largest where all are equal.
        return numel - 1.0
    return _even_euclidean(levels, numel)


def odd_constant(steps: int, numel: int) -> float:
    """Return omega for levels j / ``steps``, with j and ``steps`` odd, and the maximum norm.

    A value below the least level becomes that level with either sign. With n = numel - 1 the interval's equation is
    (w + 1) (w - n / steps^2) = 0: all but one value are zero. The other intervals have the same width, and l h > 0.

    Example:
        >>> odd_constant(7, 50)
        1.0
    """
    return (numel - 1) / steps**2


def powers_constant(levels: int, numel: int, norm: str, zero: bool = True) -> float:
    """Return omega for ``levels`` powers of two, blocks of ``numel`` values and a norm "max" or "l2".

    Without the zero, a value below the least level becomes that level with either sign: e(y) = l^2 - y^2.

    Example:
        >>> round(powers_constant(5, 512, "l2"), 4), round(powers_constant(5, 512, "max"), 4)
        (0.567, 0.3655)
    """
    magnitudes = [2.0 ** (j - levels) for j in range(1, levels + 1)]
    if norm == "max":
        return _maximum_constant([0.0 if zero else -magnitudes[0], *magnitudes], numel)
    if zero and levels <= 2:
        return _even_euclidean(levels, numel)
    return _powers_euclidean(levels, numel, zero)


def powers_formula(norm: str) -> str:
    """Return a bound just above :func:`powers_constant` with a zero, for blocks of d values and s levels."""
    if norm == "max":
        return "max(1/8, (sqrt(1 + (d - 1) / 4^(s - 1)) - 1) / 2)"
    return "1/8 + 2 * x / 9 if x < 81/16 else sqrt(x) - 1 with x = d / 4^(s - 1)"


def _maximum_constant(ends: Sequence[float], numel: int) -> float:
    n, largest = numel - 1, 0.0
    for low, high in itertools.pairwise(ends):
        b, c = 1 + n * low * high, n * (high - low) ** 2 / 4
        root = math.sqrt(b * b + 4 * c)
        # The positive root of w^2 + b w = c, in the form without cancellation.
        largest = max(largest, 2 * c / (b + root) if b > 0 else (root - b) / 2)
    return largest


def _even_euclidean(levels: int, numel: int) -> float:
    """Return omega for even levels, where middles are (2k + 1) / 2s and every w is 1 / 4s^2: M must be nearest to 1.

    In units of 1 / 4s^2, M is a sum of d odd squares, which is d plus eight times a sum of d triangular numbers. Every
    integer is a sum of three of these (Gauss), so M may be any number of at least d that is d modulo 8.
    """
    if numel == 1:
        return 0.0
    norm = 2 * levels
    square = norm * norm

    def constant(middles: int) -> float:
        return (numel - (math.sqrt(middles) - norm) ** 2) / square

    if numel >= square:
        return constant(numel)
    if numel == 2:
        return max(constant(_nearest_pair(k, norm)) for k in range(levels))
    below = square - (square - numel) % 8
    return max(constant(below), constant(below + 8))


def _nearest_pair(k: int, norm: int) -> int:
    """Return the sum of (2k + 1)^2 and another odd square whose root is nearest to ``norm``."""
    first = (2 * k + 1) ** 2
    middle = (math.isqrt(max(norm * norm - first, 0)) - 1) // 2
    sums = [first + (2 * j + 1) ** 2 for j in (middle, middle + 1) if 0 <= j < norm // 2]
    return min(sums, key=lambda total: abs(math.sqrt(total) - norm))


def _powers_euclidean(levels: int, numel: int, zero: bool) -> float:
    """Return omega for powers of two: most values are in the interval next to zero, and a few in others.

    In units of a quarter of the least level's square, a value next to zero adds 1 to M and 1 to the sum of w (0 and 4
    without a zero), one between 2^j and 2^(j + 1) least levels 9 * 4^j and 4^j. So c values outside the first interval
    contribute by the sum J of c powers of four. For each c the constant is concave in J, with a known maximum, and the
    nearest sums of c powers on either side are found digit by digit. A larger c never has a larger maximum, so the
    search ends when this is not above the best constant found.
    """
    middle, error = (1, 1) if zero else (0, 4)
    norm, top = 2.0**levels, 4 ** (levels - 2) if levels > 1 else 0

    def constant(outside: int, powers: float) -> float:
        inside = numel - outside
        return (error * inside + powers - (math.sqrt(middle * inside + 9 * powers) - norm) ** 2) / norm**2

    largest = max(0.0, constant(0, 0))
    for outside in range(1, numel + 1 if top else 0):
        # At the maximum sqrt(M) is 9/8 of the norm.
        best = (81 / 64 * norm**2 - middle * (numel - outside)) / 9
        if constant(outside, max(best, outside)) <= largest * (1 + 1e-13):
            break
        for powers in _sums_of_powers(best, outside, top):
            largest = max(largest, constant(outside, powers))
    return largest


def _sums_of_powers(target: float, count: int, top: int) -> list[int]:
    """Return the sums of ``count`` powers of four, none above ``top``, that are nearest to ``target`` on either side.

    Sums of fewer powers that equal the target are left out: they belong to a smaller count.
    """
    if target <= count:
        return [count]
    left, total = int(target), 0
    for _ in range(count - 1):
        power = _power_below(left, top)
        total, left = total + power, left - power
        if left <= 0:
            return []
    power = _power_below(left, top)
    return [total + power, *([total + 4 * power] if 4 * power <= top else [])]


def _power_below(number: int, top: int) -> int:
    return min(top, 1 << (number.bit_length() - 1 & ~1))
