"""Elastic averaging: workers move towards a centre, and the centre towards them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.method import Method, Properties, is_number, require
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting
from gradwire.methods.casts.cast import FP32
from gradwire.methods.local_steps.local_sgd import LocalStepsMethod


@dataclass(frozen=True, kw_only=True)
class EASGD(LocalStepsMethod):
    r"""EASGD: elastic averaging every ``every`` steps.

    With x the centre, the same on all workers, and x_i worker i's parameters::

        d_i = x - x_i        x_i <- x_i + alpha d_i        x <- x - alpha sum_i C(d_i)

    Both right sides have the values before the exchange. Workers stay different, so they explore separately; the centre
    follows their mean. Evaluate the centre: ``link.global_parameters()``. C is the inner method; a worker moves by its
    own uncompressed difference.

    The centre moves by N alpha of the mean difference, which must be at most 1, or it overshoots.

    With Nesterov momentum in the optimizer it is EAMSGD except for the place of the elastic term: the paper takes x_i
    before a step, this method takes it after the step, and ``torch.optim.SGD`` keeps x_i at the point where the next
    gradient is computed. The two become the same as steps become small.

    Args:
        inner: Method that exchanges the differences.
        every: Number of optimizer steps between exchanges.
        alpha: Moving rate, above 0 and below 1; None for 0.9 / N, the paper's beta = 0.9.

    Raises:
        HyperparameterError: a field is out of range, or ``inner`` does not exchange a mean.
        IncompatibleError: when attached, if alpha times the number of workers is above 1.

    Memory: the centre, 4 bytes an element, and the state of the inner method.

    Reference: S. Zhang, A. Choromanska, Y. LeCun, "Deep learning with Elastic Averaging SGD", NIPS 2015, algorithm 1
    with all workers at once, and equations 3 and 4; beta is alpha N.

    Example:
        >>> import gradwire as gw
        >>> gw.EASGD(every=10).traits.local_steps
        10
    """

    inner: Method = field(default_factory=FP32, kw_only=False)
    every: int = 10
    alpha: float | None = None

    name: ClassVar[str] = "easgd"
    keeps_own: ClassVar[bool] = True
    properties: ClassVar[Properties] = Properties(
        summary="Workers step by themselves, drawn to a centre that follows their mean",
        paper="Zhang et al., NIPS 2015",
        bit_stable=False,
        bits_per_element=32.0,
        state="the centre",
        state_bytes_per_element=4.0,
    )

    def __post_init__(self) -> None:
        self.check_inner()
        if self.alpha is not None:
            require(
                is_number(self.alpha, above=0, below=1), "EASGD", f"alpha is above 0 and below 1, not {self.alpha!r}"
            )
            object.__setattr__(self, "alpha", float(self.alpha))

    def plan(self, setting: PlanSetting) -> BucketPlan:
        workers = setting.world_size
        if self.alpha is not None and self.alpha * workers > 1:
            raise IncompatibleError(
                f"EASGD: alpha={self.alpha:g} draws the centre beyond the mean of {workers} workers: use at most "
                f"{1 / workers:g}"
            )
        return super().plan(setting)

    def step_(
        self, own: torch.Tensor, held: torch.Tensor, mean: torch.Tensor, velocity: torch.Tensor | None, workers: int
    ) -> None:
        alpha = 0.9 / workers if self.alpha is None else self.alpha
        own.add_(held - own, alpha=alpha)
        held.add_(mean - held, alpha=alpha * workers)
