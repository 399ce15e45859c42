"""Properties of an optimizer that algorithms need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def not_stepped(optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of parameters that an optimizer does not step.

    Example:
        >>> w, b = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(1))
        >>> not_stepped(torch.optim.SGD([w], lr=0.1), {"w": w, "b": b})
        ['b']
    """
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [name for name, p in parameters.items() if id(p) not in stepped]


def not_stepped_here(optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of an optimizer's parameters that it does not step on this rank.

    Other ranks step them, as with :class:`torch.distributed.optim.ZeroRedundancyOptimizer`, where another optimizer, an
    attribute of this one, steps only some of its parameters on this rank, or none.
    """
    held = set(parameters) - set(not_stepped(optimizer, parameters))
    inner, stepped = False, set[str]()
    for one in vars(optimizer).values():
        if not isinstance(one, torch.optim.Optimizer) or one is optimizer:
            continue
        theirs = held - set(not_stepped(one, parameters))
        if theirs or not any(group["params"] for group in one.param_groups):
            inner = True
            stepped |= theirs - set(not_stepped_here(one, parameters))
    return [name for name in parameters if name in held - stepped] if inner else []


def momentum_of(optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> tuple[str, Any] | None:
    """Return the name and the value of an optimizer's momentum setting, or None if it has no momentum.

    Only groups with one of the parameters are considered, or all groups if none has one, for example if parameters are
    not known yet. A momentum of 0, or betas with a first one of 0, are no momentum.

    Example:
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> momentum_of(torch.optim.Adam([w]), {"w": w})
        ('betas', (0.9, 0.999))
    """
    ours = {id(p) for p in parameters.values()}
    groups = [group for group in optimizer.param_groups if any(id(p) in ours for p in group["params"])]
    for group in groups or optimizer.param_groups:
        for setting in ("momentum", "betas"):
            value = group.get(setting)
            if value[0] if isinstance(value, tuple | list) else value:
                return setting, value
    return None
