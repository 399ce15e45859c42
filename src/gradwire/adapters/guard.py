"""A return to a plain method, for good, once what is sent strays too far from the gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from gradwire.adapters.diagnostics import Diagnostics
from gradwire.adapters.pilot import Network, Pilot
from gradwire.errors import IncompatibleError
from gradwire.methods import Method
from gradwire.planning import Planner

__all__ = ["Guard", "check_fallback"]


def check_fallback(method: Method) -> None:
    """Refuse a method whose outcome a mean cannot take the place of.

    Raises:
        IncompatibleError: naming why.
    """
    reason = (
        "gives a direction, which needs a learning rate of its own"
        if method.direction
        else "brings a momentum, without which steps would be smaller"
        if method.owns_momentum
        else None
    )
    if reason is not None:
        raise IncompatibleError(f"fallback= has no place here: {method!r} {reason}; leave it out")


class Guard:
    """Flies by another pilot until the limit is crossed, and by the fallback from the next round on.

    In the round after each measurement, ranks gather their relative errors, so that all return at once, or none.

    Args:
        pilot: That chooses before.
        fallback: By which gradients travel afterwards.
        limit: On the relative error of what a rank sent.
        diagnostics: That measures it.
        fell: Called with a sentence when the limit is crossed, before the round's first bucket starts.
    """

    def __init__(
        self, pilot: Pilot, fallback: Planner, limit: float, diagnostics: Diagnostics, fell: Callable[[str], None]
    ) -> None:
        self._pilot, self._fallback, self._limit = pilot, fallback, limit
        self._diagnostics, self._fell = diagnostics, fell
        self._since: int | None = None
        self._error, self._rank = 0.0, 0

    @property
    def planner(self) -> Planner:
        """The fallback's, or the other pilot's."""
        return self._pilot.planner if self._since is None else self._fallback

    def begin(self, round: int, network: Network) -> None:
        """Compare what was measured in the round before with the limit."""
        if self._since is not None:
            return
        if round and self._diagnostics.wanted(round - 1):
            errors = [row[0] for row in network.gather([self._diagnostics.relative_error(round - 1)])]
            worst = max(errors)
            if worst > self._limit:
                self._since, self._error, self._rank = round, worst, errors.index(worst)
                self._fell(
                    f"what rank {self._rank} sent in round {round - 1} has a relative error of {worst:.4g}, above "
                    f"fallback_limit={self._limit:g}: gradients travel by {self._fallback.method!r} from now on, and "
                    "what the method remembered is dropped"
                )
                return
        self._pilot.begin(round, network)

    def again(self) -> None:
        """Give the other pilot another chance."""
        self._pilot.again()
        self._since = None

    def record(self) -> dict[str, Any] | None:
        """What the other pilot chose."""
        return self._pilot.record()

    def returned(self) -> dict[str, Any] | None:
        """Since which round the fallback flies, and which rank's error it was; None before."""
        if self._since is None:
            return None
        return {
            "method": repr(self._fallback.method),
            "since_round": self._since,
            "relative_error": self._error,
            "rank": self._rank,
        }

    def state(self) -> dict[str, torch.Tensor]:
        """Give the other pilot's state, and what :meth:`returned` tells."""
        found = self._pilot.state()
        if self._since is not None:
            values = (float(self._since), self._error, float(self._rank))
            found["fallback"] = torch.tensor(values, dtype=torch.float64)
        return found

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take what :meth:`state` gave."""
        self._pilot.load(state)
        self._since = None
        if "fallback" in state:
            since, self._error, rank = state["fallback"].tolist()
            self._since, self._rank = int(since), int(rank)
