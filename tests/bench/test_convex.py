"""The convex problem's derivatives, constants and optimum, and plain descent on it, against independent sources."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from benchmarks.lib.convex import LogisticProblem
from benchmarks.lib.descent import descend, exact_mean, float32_floor, rounded_mean
from benchmarks.lib.optimum import find_optimum, residual
from gradwire.tools.experiments.errors import TrainingError, UsageError

pytestmark = pytest.mark.repository

L2, L1 = 0.02, 0.02


@pytest.fixture
def problem(small_libsvm: Path) -> LogisticProblem:
    return LogisticProblem.from_file(small_libsvm, workers=8, l2=L2)


def value_of_worker(problem: LogisticProblem, worker: int, x: torch.Tensor) -> torch.Tensor:
    margins = problem.labels[worker] * (problem.inputs[worker] @ x)
    return torch.log1p(torch.exp(-margins)).mean() + problem.l2 / 2 * x.square().sum()


def somewhere(problem: LogisticProblem) -> torch.Tensor:
    return torch.randn(problem.features, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_derivatives_are_those_of_autograd(problem: LogisticProblem) -> None:
    x = somewhere(problem).requires_grad_()
    expected = [torch.autograd.grad(value_of_worker(problem, i, x), x)[0] for i in range(8)]
    torch.testing.assert_close(problem.gradients(x.detach()), torch.stack(expected), rtol=0, atol=1e-14)

    def whole(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([value_of_worker(problem, i, x) for i in range(8)]).mean()

    hessian = torch.autograd.functional.hessian(whole, x.detach())
    torch.testing.assert_close(problem.hessian(x.detach()), hessian, rtol=0, atol=1e-14)
    assert problem.value(x.detach()) == pytest.approx(float(whole(x.detach())), abs=1e-14)


def test_constants_bound_the_curvature_and_are_reached_at_zero(problem: LogisticProblem) -> None:
    """At x = 0 every row has its largest curvature, 1/4."""
    smoothness, largest = problem.smoothness()
    zero = torch.zeros(problem.features, dtype=torch.float64)
    assert float(torch.linalg.eigvalsh(problem.hessian(zero))[-1]) == pytest.approx(smoothness, rel=1e-12)
    assert float(torch.linalg.eigvalsh(problem.hessian(somewhere(problem)))[-1]) < smoothness
    single = [LogisticProblem(inputs=a[None], labels=b[None], l2=L2) for a, b in zip(problem.inputs, problem.labels)]
    assert largest == pytest.approx(max(one.smoothness()[0] for one in single), rel=1e-12)


def test_workers_hold_equal_shares_sorted_by_label(problem: LogisticProblem) -> None:
    assert problem.labels.shape == (8, 11)
    flat = problem.labels.flatten()
    assert torch.equal(flat, flat.sort().values)


@pytest.mark.parametrize("l1", [0.0, L1])
def test_the_optimum_satisfies_its_conditions(problem: LogisticProblem, l1: float) -> None:
    problem = problem.regularised(l2=L2, l1=l1)
    found = find_optimum(problem)
    assert found.residual <= 1e-14
    gradient = problem.gradients(found.x).mean(0)
    if l1:
        assert 1 <= int((~found.support).sum()) < problem.features
        assert bool((gradient[~found.support].abs() <= l1 + 1e-14).all())
        torch.testing.assert_close(gradient[found.support], -l1 * found.x[found.support].sign(), rtol=0, atol=1e-14)
    else:
        assert float(gradient.norm()) <= 1e-14
    expected = sum(float(problem.gradients(found.x)[i].square().sum()) for i in range(8)) / 8
    assert found.heterogeneity == pytest.approx(expected)
    assert found.heterogeneity > 1e-2, "the workers' own optima are elsewhere"
    assert found.curvature[0] >= L2 * (1 - 1e-12)


@pytest.mark.parametrize("l1", [0.0, L1])
def test_scikit_learn_finds_the_same_optimum_and_support(problem: LogisticProblem, l1: float) -> None:
    linear = pytest.importorskip("sklearn.linear_model")
    problem = problem.regularised(l2=L2, l1=l1)
    ours = find_optimum(problem)
    # Its objective is C times the sum of losses, plus (1 - ratio)/2 |w|^2 + ratio |w|_1.
    ratio = l1 / (l1 + L2)
    strength = 1 / (problem.labels.numel() * (l1 + L2))
    settings = {"C": strength, "l1_ratio": ratio, "solver": "saga", "fit_intercept": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # ``penalty`` is on its way out, but older versions need it.
        theirs = linear.LogisticRegression(
            penalty="elasticnet", tol=1e-12, max_iter=100_000, random_state=0, **settings
        ).fit(problem.inputs.flatten(0, 1).numpy(), problem.labels.flatten().numpy())
    x = torch.from_numpy(theirs.coef_[0])
    # Strong convexity: |x - x*| <= |smallest subgradient at x| / l2.
    off = residual(problem, x, problem.gradients(x).mean(0)) / L2
    assert off < 1e-6, "scikit-learn did not converge"
    assert float((x - ours.x).norm()) <= off + 1e-12
    assert torch.equal(x != 0, ours.support)


@pytest.mark.parametrize("l1", [0.0, L1])
def test_descent_converges_at_the_rate_of_theory(problem: LogisticProblem, l1: float) -> None:
    problem = problem.regularised(l2=L2, l1=l1)
    optimum = find_optimum(problem)
    rate = (1 - 1 / optimum.condition) ** 2
    distances = descend(problem, optimum, lr=1 / optimum.smoothness, steps=800)
    # The optimum itself is known to residual / mu.
    slack = (2e-14 / L2) ** 2
    assert all(distance <= distances[0] * rate**step + 4 * slack for step, distance in enumerate(distances))
    assert distances[0] * rate**800 < 1e-12
    assert distances[-1] < 1e-12


def test_gradients_rounded_to_float32_stop_at_a_floor_where_workers_differ(problem: LogisticProblem) -> None:
    optimum = find_optimum(problem)
    settings = {"lr": 1 / optimum.smoothness, "steps": 1500}
    floor = float32_floor(problem, optimum)
    reached = descend(problem, optimum, exchange=rounded_mean, **settings)[-1]  # type: ignore[arg-type]
    exact = descend(problem, optimum, exchange=exact_mean, **settings)[-1]  # type: ignore[arg-type]
    # The errors that act are those near the optimum, of the same size as those at it, but other draws.
    assert floor / 100 < reached < 100 * floor
    assert exact < floor / 1e4
    bound = 2.0**-48 * optimum.heterogeneity / L2**2
    assert floor <= bound, "half an ulp of every entry, and the smallest curvature"


def test_one_worker_has_no_floor(small_libsvm: Path) -> None:
    """Its gradient tends to zero, and the rounding with it."""
    problem = LogisticProblem.from_file(small_libsvm, workers=1, l2=L2)
    optimum = find_optimum(problem)
    distances = descend(problem, optimum, lr=1 / optimum.smoothness, steps=1500, exchange=rounded_mean)
    assert distances[-1] < 4 * (2e-14 / L2) ** 2


def test_what_cannot_be_solved_is_refused(small_libsvm: Path, problem: LogisticProblem) -> None:
    with pytest.raises(UsageError, match="l2 = 0"):
        problem.regularised(l2=0.0)
    with pytest.raises(UsageError, match="l1 = -1"):
        problem.regularised(l2=0.1, l1=-1.0)
    with pytest.raises(UsageError, match="did you mean 'label"):
        LogisticProblem.from_file(small_libsvm, workers=2, l2=0.1, split="lable")
    with pytest.raises(UsageError, match="90 rows cannot be shared by 91"):
        LogisticProblem.from_file(small_libsvm, workers=91, l2=0.1)
    with pytest.raises(TrainingError, match="use a tolerance above"):
        find_optimum(problem, tolerance=0.0)
    with pytest.raises(TrainingError, match="not finite after step"):
        descend(problem, find_optimum(problem), lr=1e3, steps=1, exchange=lambda g: g.mean(0) * float("inf"))
