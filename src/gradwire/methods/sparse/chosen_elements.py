"""Exchange of chosen elements of every parameter, the same on all workers, as parameters of that length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from gradwire.exchange.method import Method
from gradwire.exchange.protocols.bucket_plan import PlanSetting
from gradwire.exchange.segments import divide
from gradwire.methods.wrappers.wrapper import TransformedPlan
from gradwire.seeds import parameter_key

Chosen: TypeAlias = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | None]
"""An element for each slot, counted within its parameter, and the slots that are filled, ascending; None: all slots."""

Choice: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]
"""Places of the chosen elements in the bucket, and their slots; None: all slots, in order."""


class Chooser(Protocol):
    """Choice of elements for each round.

    Attributes:
        slots: Maximum number of elements of each parameter.
        factor: Factor for the mean of each parameter's elements.
    """

    slots: list[int]
    factor: list[float]

    def choose(self, round: int) -> Chosen:
        """Return the elements of a round, parameter after parameter."""
        ...


class ChosenElements(TransformedPlan):
    """Plan that gathers some elements of each parameter into its slots and scatters their mean; all others become zero.

    Args:
        method: Method that exchanges the elements.
        chooser: Creates the choice, the same on all ranks, from the lengths and the Philox keys of the parameters.
    """

    def __init__(
        self,
        setting: PlanSetting,
        method: Method,
        chooser: Callable[[Sequence[int], Sequence[tuple[int, int]]], Chooser],
    ) -> None:
        light = divide(setting.segments)[0]
        key = [parameter_key(setting.seed, s.parameter.name, "choice") for s in light]
        self._chooser = chooser([s.numel for s in light], key)
        slots = torch.tensor(self._chooser.slots, dtype=torch.int64, device="cpu")
        offset = torch.tensor([s.offset for s in light], dtype=torch.int64, device="cpu")
        self._offset = torch.repeat_interleave(offset, slots)
        self._factor = None
        if any(f != 1 for f in self._chooser.factor):
            factor = torch.tensor(self._chooser.factor, dtype=torch.float32, device="cpu")
            self._factor = torch.repeat_interleave(factor, slots)
        self._latest: tuple[int, Choice] | None = None
        super().__init__(method, setting, self._chooser.slots)

    def gather(self, round: int, flat: torch.Tensor, slots: torch.Tensor) -> None:
        places, used = self._choice(round)
        if used is None:
            torch.index_select(flat, 0, places, out=slots)
        else:
            slots.zero_().index_copy_(0, used, flat[places])

    def scatter(self, round: int, slots: torch.Tensor, flat: torch.Tensor, add: bool) -> None:
        places, used = self._choice(round)
        part = slots if used is None else slots[used]
        if self._factor is not None:
            part = part * (self._factor if used is None else self._factor[used])
        if add:
            flat.index_add_(0, places, part)
            return
        for a, b in self.runs[0]:
            flat[a:b].zero_()
        flat.index_copy_(0, places, part)

    def _choice(self, round: int) -> Choice:
        if self._latest is None or self._latest[0] != round:
            elements, full = self._chooser.choose(round)
            places = torch.from_numpy(elements).add_(self._offset)
            used = None if full is None else torch.from_numpy(full)
            self._latest = round, (places if used is None else places[used], used)
        return self._latest[1]
