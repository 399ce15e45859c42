"""DiLoCo: local steps, and an outer optimizer that steps by the mean of what they changed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from gradwire.exchange.local_steps import GLOBAL, VELOCITY
from gradwire.exchange.method import Method, Properties, require
from gradwire.methods.casts.cast import FP32
from gradwire.methods.feedback.local_momentum import checked_momentum
from gradwire.methods.local_steps.local_steps import LocalStepsMethod

__all__ = ["DiLoCo"]


@dataclass(frozen=True, kw_only=True)
class DiLoCo(LocalStepsMethod):
    r"""DiLoCo: workers step by themselves, and an outer SGD with Nesterov momentum steps by the mean difference.

    With x the global parameters, the same on all workers, and x_i worker i's after ``every`` optimizer steps from x::

        d_i = x - x_i        d = (1 / N) sum_i C(d_i)
        v <- outer_momentum v + d
        x <- x - outer_lr (d + outer_momentum v)        without ``nesterov``: x <- x - outer_lr v
        x_i <- x

    as ``torch.optim.SGD`` with d for the gradient. C is the inner method. With ``outer_lr=1.0`` and
    ``outer_momentum=0.0`` it is :class:`LocalSGD`. The inner optimizer, AdamW in the paper, keeps its state, which
    never travels.

    Args:
        inner: The method by which differences are exchanged.
        every: Optimizer steps from one exchange to the next: 500 in the paper, some ten to a hundred for small models.
        outer_lr: Learning rate of the outer step, above 0.
        outer_momentum: At least 0 and below 1.
        nesterov: Look ahead, as the paper does.

    Raises:
        HyperparameterError: a field is out of range.

    Memory: the global parameters and the outer momentum, 8 bytes an element, beside what the inner method keeps.

    Reference: A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023
    (arXiv:2311.08105), algorithm 1.

    Example:
        >>> import gradwire as gw
        >>> gw.DiLoCo(every=30, inner=gw.EDEN(bits=4)).remembers
        ('global', 'outer_momentum')
    """

    inner: Method = field(default_factory=FP32, kw_only=False)
    every: int = 30
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True

    name: ClassVar[str] = "diloco"
    unbiased: ClassVar[bool] = False
    unbiased_note: ClassVar[str | None] = "no, an outer step"
    properties: ClassVar[Properties] = Properties(
        summary="Workers step by themselves; an outer optimizer steps by the mean of what they changed",
        paper="Douillard et al., 2023",
        bit_stable=False,
        bits_per_element=32.0,
        state="the global parameters, an outer momentum",
        state_bytes_per_element=8.0,
    )
    remembers_beside: ClassVar[tuple[str, ...]] = (GLOBAL, VELOCITY)

    def __post_init__(self) -> None:
        owner, rate = type(self).__name__, self.outer_lr
        self.check_inner()
        number = isinstance(rate, int | float) and not isinstance(rate, bool)
        require(number and 0 < rate < math.inf, owner, f"outer_lr is above 0, not {rate!r}")
        object.__setattr__(self, "outer_lr", float(rate))
        object.__setattr__(self, "outer_momentum", checked_momentum(owner, self.outer_momentum, "outer_momentum"))
        require(isinstance(self.nesterov, bool), owner, f"nesterov is True or False, not {self.nesterov!r}")

    def step_(
        self, own: torch.Tensor, held: torch.Tensor, mean: torch.Tensor, velocity: torch.Tensor | None, workers: int
    ) -> None:
        difference = held - mean
        if velocity is None:
            raise TypeError("the outer momentum is missing")
        velocity.mul_(self.outer_momentum).add_(difference)
        if not self.nesterov:
            difference = velocity
        elif self.outer_momentum:
            difference.add_(velocity, alpha=self.outer_momentum)
        held.sub_(difference, alpha=self.outer_lr)
        own.copy_(held)
