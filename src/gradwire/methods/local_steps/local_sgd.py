"""Local SGD: parameters are averaged every so many optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from gradwire.exchange.method import Method, Properties
from gradwire.methods.casts.cast import FP32
from gradwire.methods.local_steps.local_steps import LocalStepsMethod

__all__ = ["LocalSGD"]


@dataclass(frozen=True, kw_only=True)
class LocalSGD(LocalStepsMethod):
    r"""Local SGD: workers step by themselves and average their parameters every ``every`` steps.

    With x the global parameters, the same on all workers, and x_i worker i's after ``every`` optimizer steps from x::

        d_i = x - x_i        x <- x - (1 / N) sum_i C(d_i)        x_i <- x

    C is the inner method, which may remember what it left out: ``ErrorFeedback(...)`` inside sends it with the next
    difference. With ``FP32()`` the parameters themselves are averaged, which rounds less. Between exchanges nothing
    travels. The optimizer may be any; its state stays the worker's own.

    *Post-local* SGD begins with gradients exchanged at every step: the option ``warmup_steps`` says for how many.

    Averages of parameters that have gone different ways are no step of SGD: on unlike data the workers tend to a point
    beside the minimum of their mean loss, the farther off the more steps and the larger they are.

    Args:
        inner: The method by which differences are exchanged.
        every: Optimizer steps from one exchange to the next.

    Raises:
        HyperparameterError: a field is out of range.

    Memory: the global parameters, 4 bytes an element, beside what the inner method keeps.

    Reference: S. U. Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019; T. Lin et al., "Don't Use
    Large Mini-Batches, Use Local SGD", ICLR 2020, for post-local SGD.

    Example:
        >>> import gradwire as gw
        >>> gw.method("LocalSGD(every=8, inner=EDEN(bits=4))").local_steps
        8
    """

    inner: Method = field(default_factory=FP32, kw_only=False)
    every: int = 8

    name: ClassVar[str] = "local_sgd"
    unbiased: ClassVar[bool] = True
    unbiased_note: ClassVar[str | None] = "the mean of parameters"
    properties: ClassVar[Properties] = Properties(
        summary="Workers step by themselves; their parameters are averaged every few steps by any method",
        paper="Stich, ICLR 2019",
        bit_stable=False,
        bits_per_element=32.0,
        state="the global parameters",
        state_bytes_per_element=4.0,
    )

    def __post_init__(self) -> None:
        self.check_inner()

    def step_(
        self, own: torch.Tensor, held: torch.Tensor, mean: torch.Tensor, velocity: torch.Tensor | None, workers: int
    ) -> None:
        held.copy_(mean)
        own.copy_(held)
