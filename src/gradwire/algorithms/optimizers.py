"""What algorithms ask of the optimizer beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["not_stepped"]


def not_stepped(optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of parameters that an optimizer does not step.

    Example:
        >>> w, b = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(1))
        >>> not_stepped(torch.optim.SGD([w], lr=0.1), {"w": w, "b": b})
        ['b']
    """
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [name for name, p in parameters.items() if id(p) not in stepped]
