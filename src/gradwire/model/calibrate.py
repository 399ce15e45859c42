"""From measured steps to a :class:`Machine`: the numbers under which the model is least wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gradwire.errors import BackendError, HyperparameterError
from gradwire.model.exchange import ExchangeProfile
from gradwire.model.machine import DEFAULT, LinkModel, Machine
from gradwire.model.schedule import Load, step_time
from gradwire.model.timeline import Timeline

__all__ = ["Observation", "calibrate", "log_error"]

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


LINKS = ("ring_efficiency", "crowd_efficiency")
"""What only steps over limited links can tell."""


def calibrate(
    observations: Sequence[Observation], source: str, start: Machine = DEFAULT, *, fit_links: bool = True
) -> Machine:
    """Fit the costs to measured steps.

    Least squares of log(measured / predicted) under a soft-L1 loss, so that one disturbed cell does not bend all; over
    the logarithms of :data:`BOUNDS`' numbers.

    Raises:
        HyperparameterError: there are fewer steps than numbers to fit.
        BackendError: SciPy is not installed.
    """
    if len(observations) <= len(BOUNDS):
        raise HyperparameterError(f"{len(observations)} measured steps cannot fix {len(BOUNDS)} numbers: measure more")
    try:
        from scipy.optimize import least_squares
    except ImportError as error:
        raise BackendError('a calibration needs scipy: pip install "gradwire[cli]"') from error
    names = [n for n in BOUNDS if fit_links or n not in LINKS]
    low, high = (np.log([BOUNDS[n][i] for n in names]) for i in (0, 1))

    def machine(x: np.ndarray) -> Machine:
        costs: dict[str, Any] = {n: float(v) for n, v in zip(names, np.exp(x))}
        return replace(start, **costs)

    def errors(x: np.ndarray) -> list[float]:
        return [log_error(o, machine(x)) for o in observations]

    first = np.clip(np.log([getattr(start, n) for n in names]), low + 1e-6, high - 1e-6)
    found = least_squares(errors, first, bounds=(low, high), loss="soft_l1", f_scale=0.1, diff_step=1e-2, max_nfev=60)
    fitted = machine(found.x)
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
