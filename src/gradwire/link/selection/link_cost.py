"""What a message costs on a link: stated, measured or from a checkpoint; the same on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Protocol

import torch

from gradwire.errors import HyperparameterError, IncompatibleError
from gradwire.exchange.method import Method
from gradwire.exchange.network_cost import LinkCost

__all__ = ["LINK_COST_STATE", "CostKeeper", "read_cost"]

LINK_COST_STATE = "link_cost"
"""Key of what was measured in the part of a link's state that is the same on all ranks."""


class CostMeter(Protocol):
    """What measures a link."""

    def cost(self) -> LinkCost:
        """Measure what a message costs (collective); the same on all ranks."""


class CostKeeper:
    """Keeps what a message costs, for methods that must be told.

    What the user states is an option, and holds whatever a checkpoint says. Otherwise it is measured once, when the
    link is built, and a checkpoint holds what was measured: a training that is continued goes on with it, on whatever
    link. Methods that need not be told have none measured.

    Attributes:
        value: None where nobody knows, or needs to.
    """

    def __init__(self, method: Method, stated: LinkCost | None) -> None:
        self._open = method.needs_link_cost and stated is None
        self.value = stated
        self._source = "stated"

    def measure(self, meter: CostMeter) -> None:
        """Measure the cost where the method needs it and nobody stated it (collective)."""
        if self._open:
            self.value, self._source = meter.cost(), "measured when the link was built"

    def record(self) -> dict[str, Any] | None:
        """Return the cost and where it is from, in plain values; None where there is none."""
        return None if self.value is None else {**asdict(self.value), "source": self._source}

    def state(self) -> dict[str, torch.Tensor]:
        """Return what was measured, for a checkpoint: seconds a message and bytes a second, float64 ``[2]``."""
        if not self._open or self.value is None:
            return {}
        return {LINK_COST_STATE: torch.tensor([self.value.message_s, self.value.bytes_per_s], dtype=torch.float64)}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take what :meth:`state` gave; without it, what was measured stays.

        Raises:
            IncompatibleError: it is no cost.
        """
        if self._open and LINK_COST_STATE in state:
            self.value, self._source = read_cost(state[LINK_COST_STATE]), "taken from a checkpoint"


def read_cost(value: torch.Tensor) -> LinkCost:
    """Return the cost that a state holds.

    Raises:
        IncompatibleError: it is none.
    """
    try:
        if value.dtype != torch.float64 or value.shape != (2,):
            raise HyperparameterError(f"{value.dtype} of shape {tuple(value.shape)}")
        message_s, bytes_per_s = value.tolist()
        return LinkCost(message_s=message_s, bytes_per_s=bytes_per_s)
    except HyperparameterError as error:
        raise IncompatibleError(f"the state's {LINK_COST_STATE!r} is not what a message costs: {error}") from None
