"""The interface of methods with local steps, as a link uses it."""

from __future__ import annotations

from typing import Protocol

import torch

GLOBAL, VELOCITY = "global", "outer_momentum"
"""Kinds of state that such a method keeps for a parameter, besides the state of the method inside it."""


class StepsLocally(Protocol):
    """A method with local steps, see :class:`gradwire.methods.local_steps.local_sgd.LocalStepsMethod`."""

    @property
    def every(self) -> int:
        """Number of optimizer steps between two exchanges."""

    @property
    def fragments(self) -> int:
        """Number of parts of the model that are exchanged one after the other."""

    @property
    def delay(self) -> int:
        """Number of steps from the start of an exchange to its effect."""

    @property
    def order(self) -> str:
        """Order in which elements are assigned to fragments: "sequential" or "strided"."""

    @property
    def keeps_own(self) -> bool:
        """True if workers' own parameters differ from the global ones after an exchange."""

    @property
    def remembers_beside(self) -> tuple[str, ...]:
        """The kinds of vectors, of those above, that it keeps besides those of the method inside."""

    @property
    def exchanges_parameters(self) -> bool:
        """True if parameters are exchanged, and not differences."""

    def step_(
        self, own: torch.Tensor, held: torch.Tensor, mean: torch.Tensor, velocity: torch.Tensor | None, workers: int
    ) -> None:
        """Update a worker's own parameters and the global ones."""
