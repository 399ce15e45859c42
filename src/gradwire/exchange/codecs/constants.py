"""Tensors that stay as they are from round to round."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Constant"]


class Constant:
    """Values that do not change, kept on each device where they are needed.

    To copy them there in every round would make a thread wait for the device in every round: memory that is not
    page-locked can be copied in no other way.

    Args:
        values: In main memory; copied.
    """

    def __init__(self, values: npt.NDArray[Any] | torch.Tensor) -> None:
        self._here = values.clone() if isinstance(values, torch.Tensor) else torch.from_numpy(np.array(values))
        self._there: dict[torch.device, torch.Tensor] = {}

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the values on a device; not to be written to."""
        if device.type == "cpu":
            return self._here
        if device not in self._there:
            self._there[device] = self._here.to(device)
        return self._there[device]
