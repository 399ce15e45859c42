"""Proximal gradient descent: an optimizer for losses with a non-differentiable part."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, overload

import torch
from torch import Tensor

from gradwire.errors import HyperparameterError, IncompatibleError


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


@dataclass(frozen=True, kw_only=True)
class L1:
    r"""Penalty of absolute values, which makes weights exactly zero.

    ::

        R(x)           = strength * sum_k |x_k|
        prox_{lr R}(x) = sign(x) max(|x| - lr * strength, 0)

    Args:
        strength: Weight of the penalty, at least 0.

    Raises:
        HyperparameterError: ``strength`` is not a finite number of at least 0.

    Example:
        >>> import torch, gradwire as gw
        >>> x = torch.tensor([3.0, -0.25, -2.0])
        >>> gw.L1(strength=1.0).apply_(x, 0.5)
        >>> x
        tensor([ 2.5000,  0.0000, -1.5000])
    """

    strength: float

    def __post_init__(self) -> None:
        """Check the strength."""
        if not (_number(self.strength) and math.isfinite(self.strength) and self.strength >= 0):
            raise HyperparameterError(f"L1: strength is {self.strength!r}: use a finite number of at least 0")
        object.__setattr__(self, "strength", float(self.strength))

    def value(self, x: Tensor) -> float:
        """Return R(x), summed in float64."""
        return self.strength * float(x.detach().abs().sum(dtype=torch.float64))

    def apply_(self, x: Tensor, lr: float) -> None:
        """Replace ``x`` by prox_{lr R}(x); NaN stays NaN."""
        threshold = lr * self.strength
        # If |x| is at most the threshold, x - x is an exact zero.
        x.sub_(x.clamp(-threshold, threshold))


@dataclass(frozen=True, kw_only=True)
class Box:
    r"""Bounds: the penalty is 0 inside and infinite outside, so its operator is the projection.

    ::

        prox_{lr R}(x) = min(max(x, low), high)

    Args:
        low: Smallest value allowed; -inf for none.
        high: Largest value allowed, at least ``low``; inf for none.

    Raises:
        HyperparameterError: a bound is not a number, or there is no finite number between them.

    Example:
        >>> import torch, gradwire as gw
        >>> x = torch.tensor([3.0, -0.25])
        >>> gw.Box(low=0.0, high=1.0).apply_(x, 0.5)
        >>> x
        tensor([1., 0.])
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        """Check that the bounds are not empty."""
        numbers = _number(self.low) and _number(self.high)
        if not (numbers and self.low <= self.high and self.low < math.inf and self.high > -math.inf):
            raise HyperparameterError(
                f"Box: low is {self.low!r} and high is {self.high!r}: use two numbers, low not above high"
            )
        object.__setattr__(self, "low", float(self.low))
        object.__setattr__(self, "high", float(self.high))

    def value(self, x: Tensor) -> float:
        """Return R(x): 0 if every entry is within the bounds, else infinity."""
        inside = (x >= self.low) & (x <= self.high)
        return 0.0 if bool(inside.all()) else math.inf

    def apply_(self, x: Tensor, lr: float) -> None:
        """Replace ``x`` by its projection; ``lr`` is ignored, and NaN stays NaN."""
        x.clamp_(self.low, self.high)


Prox: TypeAlias = L1 | Box
KINDS: dict[str, type[L1] | type[Box]] = {"L1": L1, "Box": Box}


def _plain(prox: Prox | None) -> dict[str, Any] | None:
    return None if prox is None else {"name": type(prox).__name__, **dataclasses.asdict(prox)}


def _prox(plain: Mapping[str, Any] | None) -> Prox | None:
    if plain is None:
        return None
    fields = dict(plain)
    name = fields.pop("name", None)
    if name not in KINDS:
        raise HyperparameterError(f"the saved optimizer has the operator {name!r}; known here: {', '.join(KINDS)}")
    return KINDS[name](**fields)


class ProximalSGD(torch.optim.Optimizer):
    r"""Stochastic gradient descent followed by a proximal step.

    For a loss f + R, where g is the gradient of f only::

        v <- momentum * v + g
        x <- prox_{lr R}(x - lr * v)

    Without an operator the bits are those of ``torch.optim.SGD``. Leave R out of the loss that is differentiated. With
    R = strength |x|_1 the operator produces exact zeros, and a method whose mean gradient tends to that of f converges
    to the solution, where that gradient is not zero.

    Args:
        params: Parameters, or dicts of parameter groups with their own ``lr``, ``prox`` and ``momentum``.
        lr: Step size, at least 0; a scheduler may change it, and the operator's threshold follows.
        prox: :class:`L1`, :class:`Box`, or None for R = 0. It is applied to every entry of its group's parameters.
        momentum: Factor of the velocity, at least 0 and below 1. With an operator, theory asks for 0.

    Raises:
        HyperparameterError: a setting is invalid, here or in ``add_param_group`` or ``load_state_dict``.
        IncompatibleError: from ``step``, for a sparse gradient.

    A parameter without a gradient is not changed. ``state_dict`` has operators as plain dicts, so it can be loaded with
    ``torch.load(..., weights_only=True)``.

    Reference: K. Mishchenko et al., "Distributed Learning with Compressed Gradient Differences", 2019, algorithm 1,
    last two lines.

    Example:
        >>> import torch, gradwire as gw
        >>> x = torch.nn.Parameter(torch.tensor([1.0, 0.25]))
        >>> optimizer = gw.ProximalSGD([x], lr=0.5, prox=gw.L1(strength=1.0))
        >>> (x.square().sum() / 2).backward()
        >>> optimizer.step()
        >>> x.tolist()
        [0.0, 0.0]
    """

    def __init__(self, params: Any, lr: float, prox: Prox | None = None, momentum: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "prox": prox, "momentum": momentum})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; settings that it does not have are the optimizer's defaults."""
        self._check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def _check(self, group: Mapping[str, Any]) -> None:
        lr, prox, momentum = group["lr"], group["prox"], group["momentum"]
        if not (_number(lr) and 0 <= lr < math.inf):
            raise HyperparameterError(f"ProximalSGD: lr is {lr!r}: use a finite number of at least 0")
        if not (_number(momentum) and 0 <= momentum < 1):
            raise HyperparameterError(f"ProximalSGD: momentum is {momentum!r}: use a number of at least 0 and below 1")
        if prox is not None and not isinstance(prox, (L1, Box)):
            raise HyperparameterError(
                f"ProximalSGD: prox is {prox!r}: use gradwire.L1(strength=...), gradwire.Box(low=..., high=...) or None"
            )

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step; ``closure``, if given, first computes gradients and the loss, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)
        return loss

    def _move(self, parameter: Tensor, direction: Tensor, group: Mapping[str, Any]) -> None:
        if direction.layout != torch.strided:
            raise IncompatibleError(
                "ProximalSGD moves every entry and takes no sparse gradient: build the embedding with sparse=False"
            )
        if group["momentum"]:
            state = self.state[parameter]
            if "velocity" not in state:
                state["velocity"] = direction.clone()
            else:
                state["velocity"].mul_(group["momentum"]).add_(direction)
            direction = state["velocity"]
        parameter.add_(direction, alpha=-group["lr"])
        if group["prox"] is not None:
            group["prox"].apply_(parameter, group["lr"])

    def state_dict(self) -> dict[str, Any]:
        """Return velocities and groups, with operators as plain dicts."""
        state: dict[str, Any] = super().state_dict()
        groups = [{**group, "prox": _plain(group["prox"])} for group in state["param_groups"]]
        return {**state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state returned by :meth:`state_dict`.

        Raises:
            HyperparameterError: a setting is invalid.
            IncompatibleError: it is another optimizer's state.
        """
        missing = {field for field in self.defaults for group in state_dict["param_groups"] if field not in group}
        if missing:
            raise IncompatibleError(
                f"this is another optimizer's state: its groups have no {', '.join(map(repr, sorted(missing)))}, and a "
                "ProximalSGD needs it; load it where it was saved, or start the ProximalSGD without a state"
            )
        groups = [{**group, "prox": _prox(group["prox"])} for group in state_dict["param_groups"]]
        for group in groups:
            self._check(group)
        super().load_state_dict({**state_dict, "param_groups": groups})
