"""Calibration: fit the costs of a :class:`Machine` to measured steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gradwire.errors import BackendError, HyperparameterError
from gradwire.model.exchange_profile import ExchangeProfile
from gradwire.model.machine import DEFAULT, LinkModel, Machine
from gradwire.model.profile import Timeline
from gradwire.model.schedule import Load, step_time

BOUNDS = {
    "efficiency": (0.5, 1.0),
    "round_s": (1e-6, 2e-2),
    "call_s": (1e-6, 2e-2),
    "message_s": (1e-7, 5e-3),
    "byte_s": (1e-12, 2e-8),
    "sum_byte_s": (1e-12, 2e-8),
    "bucket_s": (1e-6, 2e-2),
    "contention": (0.2, 4.0),
}
"""Lower and upper bound of each number that is fitted."""


@dataclass(frozen=True)
class Observation:
    """A measured step, and the inputs of its prediction."""

    timeline: Timeline
    exchange: ExchangeProfile
    link: LinkModel
    load: Load
    step_s: float

    def predict(self, machine: Machine) -> float:
        """Return the predicted seconds of the step."""
        return step_time(self.timeline, self.exchange, machine=machine, link=self.link, load=self.load).step_s


def log_error(observation: Observation, machine: Machine) -> float:
    """Return log(measured / predicted)."""
    return math.log(observation.step_s / observation.predict(machine))


SCALE = 0.1
"""Scale of the soft-L1 loss: errors beyond it count linearly instead of by their square."""

LINKS = ("efficiency",)
"""Numbers that only steps over limited network links can determine."""

PRIOR, PRIOR_OF_LINKS = 0.1, 0.5
"""Weights of log(number / start) beside log(measured / predicted): :data:`SCALE` over what the logarithm may be off.

Costs are known to a factor of e before anything is measured, the efficiency of a link to a fifth.
"""


class _OutOfTime(Exception):
    """Raised to end the fit."""


def calibrate(
    observations: Sequence[Observation],
    source: str,
    start: Machine = DEFAULT,
    *,
    fit_links: bool = True,
    few: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> Machine:
    """Fit the costs to measured steps.

    The fit minimises log(measured / predicted) under a soft-L1 loss, so that one disturbed cell does not distort it,
    over the logarithms of the numbers in :data:`BOUNDS`. Each number is drawn weakly towards its start, by a residual
    of a weight times log(number / start): without it, a number on which the steps hardly depend makes up for what the
    model does not know of them, and is wrong for others.

    The residual of the result is that of steps which were not fitted. With n steps and k numbers it is estimated by the
    root mean square of the errors times sqrt(n / (n - k)). With no more steps than numbers the errors tell nothing of
    other steps, and the residual is at least that of ``start``.

    Args:
        observations: Measured steps: at least one more than there are numbers to fit, unless ``few``.
        source: Description of their source.
        start: Costs with which the fit begins.
        fit_links: Also fit the efficiency of network links.
        few: Accept any number of steps but 0.
        stop: Returns whether to end the fit early, with the best costs so far.

    Raises:
        HyperparameterError: there are too few steps.
        BackendError: SciPy is not installed.
    """
    if len(observations) <= (0 if few else len(BOUNDS)):
        raise HyperparameterError(f"{len(observations)} measured steps cannot fix {len(BOUNDS)} numbers: measure more")
    try:
        from scipy.optimize import least_squares
    except ImportError as error:
        raise BackendError('a calibration needs scipy: pip install "gradwire[cli]"') from error
    names = [n for n in BOUNDS if fit_links or n not in LINKS]
    low, high = (np.log([BOUNDS[n][i] for n in names]) for i in (0, 1))
    first = np.clip(np.log([getattr(start, n) for n in names]), low + 1e-6, high - 1e-6)
    drawn = [PRIOR_OF_LINKS if n in LINKS else PRIOR for n in names]
    best = (math.inf, first)

    def machine(x: np.ndarray) -> Machine:
        costs: dict[str, Any] = {n: float(v) for n, v in zip(names, np.exp(x))}
        return replace(start, **costs)

    def errors(x: np.ndarray) -> list[float]:
        nonlocal best
        if math.isfinite(best[0]) and stop():
            raise _OutOfTime
        found = [log_error(o, machine(x)) for o in observations]
        found += [weight * float(off) for weight, off in zip(drawn, x - first)]
        # The soft-L1 loss at the scale below, as the solver sums it.
        cost = sum(2 * SCALE**2 * (math.sqrt(1 + (e / SCALE) ** 2) - 1) for e in found)
        if cost < best[0]:
            best = cost, x.copy()
        return found

    options: dict[str, Any] = {"loss": "soft_l1", "f_scale": SCALE, "diff_step": 1e-2, "max_nfev": 60}
    try:
        fitted = machine(least_squares(errors, first, bounds=(low, high), **options).x)
    except _OutOfTime:
        fitted = machine(best[1])
    spread = float(np.sqrt(np.mean(np.square([log_error(o, fitted) for o in observations]))))
    if len(observations) > len(names):
        spread *= math.sqrt(len(observations) / (len(observations) - len(names)))
    else:
        spread = max(spread, start.residual)
    rates = [o.link.bandwidth_bytes_per_s for o in observations if o.link.bandwidth_bytes_per_s is not None]
    return replace(
        fitted,
        residual=spread,
        source=source,
        most_workers=max(o.exchange.world_size for o in observations),
        slowest_bytes_per_s=min(rates, default=None),
        fastest_bytes_per_s=max(rates, default=None),
    )
