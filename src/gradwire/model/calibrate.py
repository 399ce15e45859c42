"""From measured steps to a :class:`Machine`: the numbers under which the model is least wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gradwire.errors import BackendError, HyperparameterError
from gradwire.model.machine import DEFAULT, LinkModel, Machine
from gradwire.model.profile import Timeline
from gradwire.model.schedule import ExchangeProfile, Load, step_time

BOUNDS = {
    "ring_efficiency": (0.5, 1.0),
    "crowd_efficiency": (0.4, 1.0),
    "round_s": (1e-6, 2e-2),
    "call_s": (1e-6, 2e-2),
    "message_s": (1e-7, 5e-3),
    "byte_s": (1e-12, 2e-8),
    "sum_byte_s": (1e-12, 2e-8),
    "bucket_s": (1e-6, 2e-2),
    "contention": (0.2, 4.0),
}
"""What is fitted, and where it may lie."""


@dataclass(frozen=True)
class Observation:
    """A measured step, and what the model needs to predict it."""

    timeline: Timeline
    exchange: ExchangeProfile
    link: LinkModel
    load: Load
    step_s: float

    def predict(self, machine: Machine) -> float:
        """Return the model's step."""
        return step_time(self.timeline, self.exchange, machine=machine, link=self.link, load=self.load).step_s


def log_error(observation: Observation, machine: Machine) -> float:
    """Return log(measured / predicted)."""
    return math.log(observation.step_s / observation.predict(machine))


SCALE = 0.1
"""Errors beyond this count by their size rather than by their square."""

LINKS = ("ring_efficiency", "crowd_efficiency")
"""What only steps over limited links can tell."""


PRIOR = 0.1
"""Weight of log(cost / starting cost) beside log(measured / predicted), where steps are fewer than costs."""


class _OutOfTime(Exception):
    """Ends the fit."""


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

    Least squares of log(measured / predicted) under a soft-L1 loss, so that one disturbed cell does not bend all; over
    the logarithms of :data:`BOUNDS`' numbers.

    Args:
        observations: At least one more than there are numbers to fit, unless ``few``.
        source: Where they come from.
        start: Where the fit begins.
        fit_links: Also fit the efficiencies of links.
        few: Take what there is. Where steps are fewer than numbers, each number is drawn towards its start: its
            residual is ``PRIOR`` log(number / start).
        stop: Ends the fit when it is true; the best costs until then are taken.

    Raises:
        HyperparameterError: there are fewer steps than numbers to fit, or none.
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
    drawn = PRIOR if few and len(observations) <= len(names) else 0.0
    best = (math.inf, first)

    def machine(x: np.ndarray) -> Machine:
        costs: dict[str, Any] = {n: float(v) for n, v in zip(names, np.exp(x))}
        return replace(start, **costs)

    def errors(x: np.ndarray) -> list[float]:
        nonlocal best
        if math.isfinite(best[0]) and stop():
            raise _OutOfTime
        found = [log_error(o, machine(x)) for o in observations]
        if drawn:
            found += [drawn * float(off) for off in x - first]
        # The soft-L1 loss at the scale below, as the solver adds it up.
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
    rates = [o.link.bandwidth_bytes_per_s for o in observations if o.link.bandwidth_bytes_per_s is not None]
    return replace(
        fitted,
        residual=spread,
        source=source,
        most_workers=max(o.exchange.world_size for o in observations),
        slowest_bytes_per_s=min(rates, default=None),
        fastest_bytes_per_s=max(rates, default=None),
    )
