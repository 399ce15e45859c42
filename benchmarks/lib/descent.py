"""(Proximal) gradient descent on a convex problem, with any exchange of the workers' gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import gradwire as gw
from benchmarks.lib.convex import LogisticProblem
from benchmarks.lib.optimum import Optimum
from gradwire.tools.experiments.errors import TrainingError

Exchange = Callable[[Tensor], Tensor]
"""From the workers' gradients, float64 ``[workers, features]``, to a direction, ``[features]``."""


def exact_mean(gradients: Tensor) -> Tensor:
    """Return the mean in float64."""
    return gradients.mean(0)


def rounded_mean(gradients: Tensor) -> Tensor:
    """Round every worker's gradient to float32, as it is handed to a link; give the mean in float64."""
    return gradients.to(torch.float32).to(torch.float64).mean(0)


def descend(
    problem: LogisticProblem,
    optimum: Optimum,
    *,
    lr: float,
    steps: int,
    exchange: Exchange = exact_mean,
    start: Tensor | None = None,
    watch: Callable[[Tensor], None] = lambda x: None,
) -> list[float]:
    """Step ``x <- prox_{lr l1 |.|_1}(x - lr * exchange(gradients))`` in float64, from zero unless ``start`` says else.

    With the exact mean and ``lr = 1 / L`` the squared distance shrinks by ``(1 - mu / L)^2`` a step.

    Args:
        watch: Called with the iterate after each step; it must not change it.

    Returns:
        Squared distances to the optimum: at the start and after each step.

    Raises:
        TrainingError: the iterates left the finite numbers.
    """
    x = torch.zeros_like(optimum.x) if start is None else start.clone()
    prox = gw.L1(strength=problem.l1)
    distances = [float((x - optimum.x).square().sum())]
    for step in range(steps):
        x.sub_(exchange(problem.gradients(x)), alpha=lr)
        prox.apply_(x, lr)
        watch(x)
        distances.append(float((x - optimum.x).square().sum()))
        if not distances[-1] < float("inf"):
            raise TrainingError(f"the iterate is not finite after step {step + 1}: use a lower learning rate")
    return distances


def float32_floor(problem: LogisticProblem, optimum: Optimum) -> float:
    r"""Predict at what squared distance descent stops when every worker's gradient is rounded to float32.

    Where workers differ, grad f_i(x*) is not zero and its rounding does not shrink on the way to the optimum. With the
    mean error e of these gradients, descent tends to a point off by H^{-1} e, on the support::

        e = (1/N) sum_i (round(grad f_i(x*)) - grad f_i(x*))        floor = |H_S^{-1} e_S|^2

    An estimate: rounding errors change with x, so that what is reached is within a small factor of it.
    """
    error = (rounded_mean(optimum.gradients) - exact_mean(optimum.gradients))[optimum.support]
    hessian = problem.hessian(optimum.x)[optimum.support][:, optimum.support]
    return float(torch.linalg.solve(hessian, error).square().sum())
