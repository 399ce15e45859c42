"""The learning rates of the step that follows a round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.method import Method

__all__ = ["LearningRates"]


class LearningRates:
    """Reads the learning rate of each parameter from the optimizer that steps after the exchange.

    Args:
        method: Of the link.
        optimizer: None if none was given.
        parameters: That are exchanged, by name.
    """

    def __init__(self, method: Method, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> None:
        self._optimizer = optimizer if method.needs_learning_rates else None
        self._names = {id(p): name for name, p in parameters.items()}

    def read(self) -> dict[str, float] | None:
        """Return the learning rates by name, as the optimizer's groups hold them now.

        Returns:
            None where the method need not know them, or there is no optimizer.

        Raises:
            IncompatibleError: one is negative or not finite.
        """
        if self._optimizer is None:
            return None
        found: dict[str, float] = {}
        for group in self._optimizer.param_groups:
            rate = float(group["lr"])
            ours = [name for p in group["params"] if (name := self._names.get(id(p))) is not None]
            if ours and not 0 <= rate < math.inf:
                raise IncompatibleError(
                    f"the learning rate of parameter {ours[0]!r} is {rate}: a finite number of at least 0 is needed"
                )
            found.update(dict.fromkeys(ours, rate))
        return found
