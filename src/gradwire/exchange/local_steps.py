"""What a link must know of a method whose workers step by themselves between exchanges."""

from __future__ import annotations

from typing import Protocol

import torch

GLOBAL, VELOCITY = "global", "outer_momentum"
"""What such a method remembers of a parameter, beside what the method inside it does."""


class StepsLocally(Protocol):
    """A method with local steps, see :class:`gradwire.methods.local_steps.local_sgd.LocalStepsMethod`."""

    @property
    def every(self) -> int:
        """Optimizer steps from one exchange to the next."""

    @property
    def fragments(self) -> int:
        """How many parts of the model are exchanged one after the other."""

    @property
    def delay(self) -> int:
        """Steps from the beginning of an exchange to its effect."""

    @property
    def order(self) -> str:
        """Which elements a fragment has: "sequential" or "strided"."""

    @property
    def keeps_own(self) -> bool:
        """Whether workers' own parameters stay apart from the global ones after an exchange."""

    @property
    def remembers_beside(self) -> tuple[str, ...]:
        """The vectors that it keeps beside those of the method inside: of the kinds above."""

    @property
    def exchanges_parameters(self) -> bool:
        """Whether parameters themselves are exchanged, and not differences."""

    def step_(
        self, own: torch.Tensor, held: torch.Tensor, mean: torch.Tensor, velocity: torch.Tensor | None, workers: int
    ) -> None:
        """Step a worker's own parameters, and the global ones."""
