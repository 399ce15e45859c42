r"""How long gradients wait in a residual, and why an optimizer's momentum does not suit a long wait.

Let g be a worker's gradient, e its residual, p = g + e, s = C(p) the vector sent, and e <- p - s. The share of p that a
round sends is ``delta = <s, p> / |p|^2``. If every round sends that share, a part of a gradient that is there when a
round begins leaves after j further rounds with the share ``delta (1 - delta)^j``, so that it waits

    w = (1 - delta) / delta                     rounds on average.

*Expected*, delta is that of long Gaussian vectors (:meth:`gradwire.Method.typical_delta_of`). *Measured*, an operator
that keeps elements, or projects, has ``<s, e> = 0``: then ``|p|^2 = |s|^2 + |e|^2``, and

    w = |e|^2 / |s|^2

from two norms that a link computes anyway.

Now let an optimizer have a momentum beta after the exchange, and a rate eta. On a quadratic of curvature h the mean
over draws follows ::

    p = h x + e      e <- (1 - delta) p      v <- beta v + delta p      x <- x - eta v

whose characteristic polynomial is ``(z - 1)(z - beta)(z - 1 + delta) + eta h delta z^2``. By Jury's criterion it is
stable for ``eta h < 2 (1 + beta)(2 - delta) / delta`` and

    eta h < (1 - beta) / beta (1 / w + 1 - beta),

a bound that falls with the wait. Without momentum there is no such bound: rates 1 / (1 - beta) times as high, which
make steps as long, are stable. With momentum before the exchange the mean is the same, and so is the bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

import torch

from gradwire.exchange.method import Method
from gradwire.methods.feedback.optimizers import momentum_of

LONG_WAIT = 5.0
"""Rounds that a gradient may wait beside an optimizer's momentum without a warning.

In the table for digits (``docs/accuracy.md``, "Where momentum stands") methods that wait 2.6 rounds or less train as
well with momentum 0.9 after the exchange as elsewhere, and those that wait 9 or more lose by it. This is between.
"""

SMALL_DELTA = 1 / 1024
"""Least share of the worst vector that a contraction keeps for its residual not to be considered large."""


def expected_wait(delta: float) -> float:
    """Return the mean number of rounds that a gradient waits if each round sends a share ``delta`` of what waits.

    Example:
        >>> expected_wait(0.1), expected_wait(1.0)
        (9.0, 0.0)
    """
    return (1 - delta) / delta if delta > 0 else math.inf


def wait_over_cycle(parts: int) -> float:
    """Return the mean wait of elements of which each is sent once in a cycle of rounds, in an order drawn anew.

    Two rounds that send an element are a = parts + u - v rounds apart, u and v uniform in 0 to parts - 1. What enters
    between them waits (a - 1) / 2 rounds on average, and gaps count by their length: (E a^2 / E a - 1) / 2, where
    E a = parts and E a^2 = parts^2 + (parts^2 - 1) / 6.

    Example:
        >>> wait_over_cycle(1), round(wait_over_cycle(64), 1)
        (0.0, 36.8)
    """
    return (parts + (parts - 1 / parts) / 6 - 1) / 2


def share_of_largest(density: float) -> float:
    """Return the share of the squared norm in the largest elements of a long vector of Gaussian elements.

    With z the magnitude above which a share ``density`` lies, it is ``density + 2 z phi(z)``.

    Example:
        >>> [round(share_of_largest(density), 3) for density in (0.01, 0.1, 1.0)]
        [0.084, 0.439, 1.0]
    """
    normal = NormalDist()
    z = normal.inv_cdf(1 - density / 2) if density < 1 else 0.0
    return min(1.0, density + 2 * z * normal.pdf(z))


def longest(parameters: Mapping[str, torch.Tensor]) -> int:
    """Return the number of elements of the longest parameter; 1 if there is none."""
    return max((p.numel() for p in parameters.values()), default=1)


def stable_rate(wait: float, momentum: float) -> float:
    """Return the bound on rate times curvature below which momentum beside a residual is stable in the mean.

    Args:
        wait: Rounds that a gradient waits on average, 0 or more.
        momentum: beta, at least 0 and below 1.

    Example:
        >>> round(stable_rate(0.0, 0.9), 2), round(stable_rate(9.0, 0.9), 4)
        (3.8, 0.0235)
    """
    delta = 1 / (1 + wait)
    flip = 2 * (1 + momentum) * (2 - delta) / delta
    if wait == 0 or momentum == 0:
        return flip
    return min(flip, (1 - momentum) / momentum * (1 / wait + 1 - momentum))


def momentum_beside_residual(
    method: Method, optimizer: Any, *, wait: float | None = None, delta: float = 1.0
) -> str | None:
    """Return a warning if the optimizer has a momentum and what waits in the residual is late or may grow large.

    Args:
        wait: Rounds that a gradient waits on average; None if that is not known. Above :data:`LONG_WAIT` they are many.
        delta: Least share of any vector that the compressor keeps, |C(p) - p|^2 <= (1 - delta) |p|^2. Below
            :data:`SMALL_DELTA` residuals are considered large.
    """
    late = wait is not None and wait > LONG_WAIT
    found = None if optimizer is None or not (late or delta < SMALL_DELTA) else momentum_of(optimizer, {})
    if found is None:
        return None
    setting, value = found
    beta = float(value[0] if isinstance(value, tuple | list) else value)
    beside = f"which {type(optimizer).__name__} with {setting}={value!r} carries too far"
    remedy = f"train with SGD without momentum at {1 / (1 - beta):.2g} times the learning rate"
    if late:
        return (
            f"{method!r} sends a gradient about {wait:.2g} rounds late on average (above {LONG_WAIT:.2g}) and in "
            f"bursts, {beside}: {remedy}, or send more"
        )
    return (
        f"{method!r} leaves out most of a gradient in the worst case (delta={delta:.2g}, below {SMALL_DELTA:.2g}), and "
        f"sends it later in bursts, {beside}: use blocks (block_size=64), or {remedy}, or put momentum before "
        "compression (the method's momentum=0.9 and torch.optim.SGD with momentum=0)"
    )
