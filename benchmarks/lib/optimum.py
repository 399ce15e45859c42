"""The optimum of a convex problem to the last digits of float64, by (proximal) Newton steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.lib.convex import LogisticProblem
from gradwire.tools.experiments.errors import TrainingError

STEPS, HALVINGS, SWEEPS = 100, 40, 1000
ROUNDING = 2.0**-50
"""By how much the objective's value may seem to rise in a step that improves it."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Optimum:
    """What is known about a problem at its optimum.

    Attributes:
        x: The optimum, float64 ``[features]``; zeros are exact where ``l1 > 0``.
        support: Where ``x`` is not zero.
        gradients: Of every f_i, float64 ``[workers, features]``. Their mean is 0 without an l1 term.
        residual: Norm of the smallest subgradient of P.
        heterogeneity: ``sigma*^2``, the mean over workers of ``|grad f_i(x*)|^2``.
        smoothness: L of the mean of all f_i, everywhere.
        smoothness_max: The largest L of a single f_i.
        convexity: mu = l2, everywhere.
        curvature: Smallest and largest eigenvalue of the Hessian at ``x``; what descent feels near the optimum.
    """

    x: Tensor
    support: Tensor
    gradients: Tensor
    residual: float
    heterogeneity: float
    smoothness: float
    smoothness_max: float
    convexity: float
    curvature: tuple[float, float]

    @property
    def condition(self) -> float:
        """L / mu."""
        return self.smoothness / self.convexity


def residual(problem: LogisticProblem, x: Tensor, gradient: Tensor) -> float:
    """Return the norm of the smallest subgradient of P at ``x``, where ``gradient`` is that of the smooth part."""
    l1 = problem.l1
    free = gradient - gradient.clamp(-l1, l1)
    return float(torch.where(x == 0, free, gradient + l1 * x.sign()).norm())


def find_optimum(problem: LogisticProblem, tolerance: float = 1e-14) -> Optimum:
    """Solve the problem until the smallest subgradient's norm is at most ``tolerance``.

    Each step minimises the quadratic model (with the l1 term as it is) and halves until the objective does not rise:
    quadratic convergence, whatever the condition.

    Raises:
        TrainingError: the tolerance is below what float64 gives on this problem.
    """
    x = torch.zeros(problem.features, dtype=torch.float64)
    left = float("inf")
    for _ in range(STEPS):
        gradients = problem.gradients(x)
        gradient = gradients.mean(0)
        left = residual(problem, x, gradient)
        if left <= tolerance:
            return _describe(problem, x, gradients, left)
        x = _line_search(problem, x, _model_minimum(problem.hessian(x), gradient, x, problem.l1))
    raise TrainingError(f"the optimum is known to {left:.1e} only after {STEPS} steps: use a tolerance above that")


def _describe(problem: LogisticProblem, x: Tensor, gradients: Tensor, left: float) -> Optimum:
    smoothness, largest = problem.smoothness()
    curvature = torch.linalg.eigvalsh(problem.hessian(x))
    return Optimum(
        x=x,
        support=x != 0,
        gradients=gradients,
        residual=left,
        heterogeneity=float(gradients.square().sum(1).mean()),
        smoothness=smoothness,
        smoothness_max=largest,
        convexity=problem.l2,
        curvature=(float(curvature[0]), float(curvature[-1])),
    )


def _line_search(problem: LogisticProblem, x: Tensor, target: Tensor) -> Tensor:
    allowed = problem.value(x) * (1 + ROUNDING)
    for _ in range(HALVINGS):
        if problem.value(target) <= allowed:
            break
        target = (x + target) / 2
    return target


def _model_minimum(hessian: Tensor, gradient: Tensor, x: Tensor, l1: float) -> Tensor:
    """Minimise ``gradient.(u - x) + (u - x)' H (u - x) / 2 + l1 |u|_1`` over u.

    Coordinate descent finds the support and its signs; on a support with signs that satisfy the conditions of
    optimality the minimum is the solution of linear equations.
    """
    if l1 == 0:
        minimum: Tensor = x - torch.linalg.solve(hessian, gradient)
        return minimum
    u, slope = x.clone(), gradient.clone()
    rows, diagonal = list(hessian), hessian.diagonal().tolist()
    for _ in range(SWEEPS):
        for j, (row, curvature) in enumerate(zip(rows, diagonal)):
            before = float(u[j])
            goal = before - float(slope[j]) / curvature
            after = goal - min(max(goal, -l1 / curvature), l1 / curvature)
            if after != before:
                u[j] = after
                slope.add_(row, alpha=after - before)
        exact = _on_support(hessian, hessian @ x - gradient, u, l1)
        if exact is not None:
            return exact
    return u


def _on_support(hessian: Tensor, linear: Tensor, u: Tensor, l1: float) -> Tensor | None:
    """Minimise ``u' H u / 2 - linear.u + l1 |u|_1`` given the signs of ``u``; None where other signs are better."""
    support, signs = u != 0, u.sign()
    exact = torch.zeros_like(u)
    exact[support] = torch.linalg.solve(hessian[support][:, support], linear[support] - l1 * signs[support])
    slope = (hessian @ exact - linear)[~support]
    if bool((exact.sign() != signs).any()) or bool((slope.abs() > l1 * (1 + ROUNDING)).any()):
        return None
    return exact
