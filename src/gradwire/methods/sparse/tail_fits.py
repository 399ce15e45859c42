"""Thresholds that a share of magnitudes exceeds, estimated from their moments by fitting a distribution."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["FIRST_TAIL", "MODELS", "Fit", "inverse_gamma_tail", "tail_threshold"]

FIRST_TAIL = 0.25
"""The share that the first of several stages aims at."""

FEWEST = 32
"""Magnitudes that a later stage needs: moments of fewer say little of a tail."""

PIECE = 1 << 16
"""Magnitudes that are added up at a time, in float64."""

Magnitudes: TypeAlias = npt.NDArray[np.float32]
Fit: TypeAlias = Callable[[Magnitudes, float, float], float | None]
"""``fit(x, base, tail)`` returns what ``x - base`` exceeds with probability ``tail``, as fitted to x > base (float32);
None where the moments allow no fit."""


def tail_threshold(x: Magnitudes, density: float, model: str, stages: int) -> float | None:
    """Return a threshold that about ``density len(x)`` of the magnitudes exceed.

    Zeros are no part of the fit. With several stages the first aims at :data:`FIRST_TAIL`, and each later one fits the
    excess over the threshold before it, with equal factors of the share that is left::

        eta_1 = fit(x, 1/4)     eta_m = eta_(m-1) + fit(x - eta_(m-1) of all x above, (4 density)^(1 / (stages - 1)))

    Args:
        x: Float32, at least 0.
        model: A key of :data:`MODELS`.
        stages: At least 1.

    Returns:
        The threshold; None where a fit degenerates: magnitudes that are all alike, not finite, or too few.

    Reference: A. M. Abdelmoniem et al., MLSys 2021, section 2 and algorithm 1.

    Example:
        >>> x = np.random.default_rng(0).exponential(size=100_000).astype(np.float32)
        >>> eta = tail_threshold(x, 0.01, "exponential", 1)
        >>> 0.9 < float((x > eta).mean()) / 0.01 < 1.1
        True
    """
    first, later = MODELS[model]
    left = x[x != 0]
    tail = density * len(x) / max(1, len(left))
    if len(left) < FEWEST or tail >= 1:
        return None
    if stages == 1 or tail >= FIRST_TAIL:
        return first(left, 0.0, tail)
    eta = first(left, 0.0, FIRST_TAIL)
    each = (tail / FIRST_TAIL) ** (1 / (stages - 1))
    for _ in range(stages - 1):
        if eta is None:
            return None
        left = left[left > np.float64(eta)]
        excess = later(left, eta, each) if len(left) >= FEWEST else None
        eta = None if excess is None else eta + excess
    return eta


def exponential_tail(x: Magnitudes, base: float, tail: float) -> float | None:
    """Fit an exponential distribution: ``-mean ln(tail)``.

    Example:
        >>> exponential_tail(np.float32([1, 3]), 0.0, math.exp(-2))
        4.0
    """
    return _usable(-_mean(x, base, np.positive) * math.log(tail))


def gamma_tail(x: Magnitudes, base: float, tail: float) -> float | None:
    """Fit a gamma distribution, by the mean mu and the mean logarithm.

    With s = ln mu - mean ln x, the shape is a = (3 - s + sqrt((s - 3)^2 + 24 s)) / (12 s), a closed form close to the
    most likely one, and the scale mu / a. The tail is inverted exactly; the authors' program approximates it by
    ``-ln(tail) - ln Gamma(a)``, above which there is far less than ``tail`` where a < 1.
    """
    mean = _mean(x, base, np.positive)
    if _usable(mean) is None:
        return None
    s = math.log(mean) - _mean(x, base, np.log)
    if not 1e-9 < s < math.inf:
        return None
    shape = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    return _usable(mean / shape * inverse_gamma_tail(shape, tail))


def pareto_tail(x: Magnitudes, base: float, tail: float) -> float | None:
    """Fit a generalised Pareto distribution that begins at ``base``, by the mean mu and the variance v.

    The shape is c = (1 - mu^2 / v) / 2, which is below 1/2, and the scale b = mu (1 + mu^2 / v) / 2; the threshold is
    b (tail^-c - 1) / c, of which -b ln(tail) is the limit for c = 0.
    """
    mean, count = _mean(x, base, np.positive), len(x)
    variance = (_mean(x, base, np.square) - mean * mean) * count / (count - 1)
    if _usable(mean) is None or not variance > 0:
        return None
    ratio = mean * mean / variance
    shape, scale = (1 - ratio) / 2, mean * (1 + ratio) / 2
    lengths = -math.log(tail)
    # (tail^-c - 1) / c, without cancellation.
    return _usable(scale * (lengths if shape == 0 else math.expm1(min(700.0, shape * lengths)) / shape))


def inverse_gamma_tail(shape: float, tail: float) -> float:
    """Return z with Q(shape, z) = tail, the regularised upper incomplete gamma function.

    Found by bisection of ln z, to within 2^-50 of z where Q is known as well; ``torch.special.gammaincc`` has some
    1e-13 of relative error.

    Args:
        shape: Above 0.
        tail: Above 0 and below 1.

    Example:
        >>> abs(inverse_gamma_tail(1.0, 0.01) + math.log(0.01)) < 1e-12
        True
    """
    a = torch.tensor(shape, dtype=torch.float64)
    low, high = -700.0, math.log(shape + 1.0) + 1.0
    while float(torch.special.gammaincc(a, torch.tensor(math.exp(high), dtype=torch.float64))) > tail:
        high += 1.0
    while high - low > 2.0**-51 and low < (low + high) / 2 < high:
        middle = (low + high) / 2
        above = float(torch.special.gammaincc(a, torch.tensor(math.exp(middle), dtype=torch.float64))) > tail
        low, high = (middle, high) if above else (low, middle)
    return math.exp((low + high) / 2)


MODELS: dict[str, tuple[Fit, Fit]] = {
    "exponential": (exponential_tail, exponential_tail),
    "gamma": (gamma_tail, pareto_tail),
    "pareto": (pareto_tail, pareto_tail),
}
"""The fit of the first stage, and that of the excess in later ones."""


def _mean(x: Magnitudes, base: float, function: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]) -> float:
    """Return the mean of ``function(x - base)``, by sums of fixed pieces that are added up exactly.

    NumPy adds up a piece in one thread and in an order of its own, so that a vector has one mean on a machine.
    """
    pieces = (x[a : a + PIECE].astype(np.float64) - base for a in range(0, len(x), PIECE))
    return math.fsum(float(function(piece).sum()) for piece in pieces) / len(x)


def _usable(value: float) -> float | None:
    return value if 0 < value < math.inf else None
