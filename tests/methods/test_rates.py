"""Rates and plateaus that the papers prove, on problems whose constants are known."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch

import gradwire as gw
from quadratics import Quadratic

WORKERS, SIZE = 4, 40


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def link_of(method: str | gw.Method, workers: int, numel: int) -> gw.SimulatedLink:
    return gw.SimulatedLink([("x", torch.empty(numel))], method, workers, min_numel=0)


# What each operator's paper says of its relative variance, for vectors of 40 values.
SHARED = SIZE * WORKERS / (4 * 7**2)
PLATEAUS = [
    (gw.QSGD(levels=7, block_size=None), SIZE / 7**2),
    (gw.NUQSGD(levels=3, block_size=None), 1 / 8 + 2 * (SIZE / 4**2) / 9),
    (gw.Natural(), 1 / 8),
    # d R^2 / 4 s^2 with R^2 at most the sum of the workers' squared norms.
    (gw.QSGDMaxNorm(levels=7), SHARED),
    (gw.MultiScale(levels=(7, 14)), SHARED),
]


@pytest.mark.parametrize(("method", "omega"), PLATEAUS, ids=lambda v: v.name if isinstance(v, gw.Method) else "")
def test_unlike_workers_end_on_a_plateau_below_the_bound(method: gw.Method, omega: float) -> None:
    """QSGD 9, NUQSGD 10, natural compression 9, all-reduce 9: 2 gamma omega s^2 / (mu N), and not at the optimum."""
    problem = Quadratic(workers=WORKERS, size=SIZE)
    gamma = 1 / (problem.worst * (1 + 2 * omega / WORKERS))
    link, x, found, mean = link_of(method, WORKERS, SIZE), torch.zeros(SIZE, dtype=torch.float64), [], 0.0
    for step in range(140):
        x = x - gamma * link.reduce_(problem.gradients(x).float()).double()
        found.append(float((x - problem.best).square().sum()))
        mean = mean + (x - problem.best) / 60 * (step >= 80)
    spread = float(problem.at_best.square().sum(1).mean())
    plateau = sum(found[-60:]) / 60
    # What was left of the start shrinks at least by 1 - gamma mu a step.
    left = float(problem.best.square().sum()) * (1 - gamma * problem.mu) ** 80
    bound = 2 * gamma * omega * spread / (problem.mu * WORKERS)
    assert plateau <= bound + left
    # Rounding of float32 gradients alone ends eight orders below: what acts is the operator's noise.
    assert plateau > 1e-4 * bound
    # Points lie around the optimum: with a correlation of r <= 1 - gamma mu from step to step, the mean of 60 has at
    # most (1 + r) / (1 - r) / 60 of their mean square, a sixth; around another point, where an operator is biased, all.
    assert (2 / (gamma * problem.mu) - 1) / 60 < 1 / 6
    assert float(mean.square().sum()) < 0.4 * plateau


def bumps(x: torch.Tensor, centres: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """f_i(x) = sum_k phi(x_k - c_ik), phi(t) = t^2 / (1 + t^2), with |phi''| <= 2: not convex. Values, gradients."""
    t = x - centres
    return (t * t / (1 + t * t)).sum(1), 2 * t / (1 + t * t).square()


@pytest.mark.parametrize(("collective", "master"), [("all_gather", 0.0), ("two_shot", 1 / 8)])
def test_natural_compression_descends_on_a_function_that_is_not_convex(collective: str, master: float) -> None:
    """Natural compression 8 (theorem 9): workers compress, and the master does not, or the owners of shares do."""
    n, d, steps, noise, smooth = 4, 400, 150, 0.1, 2.0
    centres = 0.2 * randn(n, d)
    # The function is a sum over elements, each with its minimum between the centres.
    grid = torch.linspace(-1, 1, 401)[:, None, None]
    least = (((grid - centres) ** 2) / (1 + (grid - centres) ** 2)).mean(1).amin(0).sum()
    x = 1.5 * randn(d, seed=1)
    gap = float(bumps(x, centres)[0].mean() - least)
    beta = 1 + master + (1 + master) / 8 / n
    eta = 0.5 / (beta * smooth)
    link = gw.SimulatedLink([("x", torch.empty(d))], "natural", n, min_numel=0, collective=collective)
    sizes, unlike = list[float](), list[float]()
    for step in range(steps):
        g = bumps(x, centres)[1]
        sizes.append(float(g.mean(0).square().sum()))
        unlike.append(float((g - g.mean(0)).square().sum(1).mean()))
        x = x - eta * link.reduce_(g + noise * randn(n, d, seed=100 + step))
    alpha = (1 + master) * (9 / 8 * d * noise**2 + 1 / 8 * max(unlike)) / n
    bound = (2 * gap / (eta * steps) + alpha * smooth * eta) / (2 - beta * smooth * eta)
    assert sum(sizes) / steps <= bound
    # To stay at the start, or to go somewhere else, would not do.
    assert sizes[0] > 2 * bound


def test_variance_reduced_descent_gains_a_tenth_an_epoch() -> None:
    """QSGD 9 (theorem 3.6): QSVRG's inner steps exchange Q(g_j(x) - g_j(y) + g(y)) with s = sqrt(n)."""
    workers, rows, d, ridge = 2, 8, 64, 0.5
    a = torch.nn.functional.normalize(randn(workers, rows, d).double(), dim=2)
    target = randn(workers, rows, seed=1).double()
    hessian = torch.einsum("wri,wrj->ij", a, a) / (workers * rows) + ridge * torch.eye(d, dtype=torch.float64)
    best = torch.linalg.solve(hessian, torch.einsum("wri,wr->i", a, target) / (workers * rows))

    def gradient(x: torch.Tensor) -> torch.Tensor:
        return a * (a @ x - target)[..., None] + ridge * x

    def gap(x: torch.Tensor) -> float:
        return float((x - best) @ hessian @ (x - best)) / 2

    link, generator = link_of(gw.QSGD(levels=8, block_size=64), workers, d), torch.Generator().manual_seed(2)
    y = torch.zeros(d, dtype=torch.float64)
    gaps, pick = [gap(y)], torch.arange(workers)
    # Smoothness 1.5 of every row's part, condition number 3.
    for _ in range(3):
        whole, x, total = gradient(y), y.clone(), torch.zeros_like(y)
        for _ in range(60):
            j = torch.randint(rows, (workers,), generator=generator)
            g = (gradient(x)[pick, j] - whole[pick, j]) + whole.mean((0, 1))
            x = x - 0.1 * link.reduce_(g.float()).double()
            total += x / 60
        y = total
        gaps.append(gap(y))
    assert all(later <= 0.9 * before for before, later in itertools.pairwise(gaps))
    assert gaps[-1] > 0


# Signs: f(x) = sum_k x_k^2 / 2 in d elements, noise sigma_k = 1: |L|_1 = |sigma|_1 = d.

D, START = 60, 3.0


def sign_descent(step: float, steps: int, noise: float, voters: int, liars: int = 0) -> list[torch.Tensor]:
    """Return the exact gradients along the way of a vote on noisy ones; liars send the opposite of theirs."""
    link, x, found = link_of("signsgd", voters, D), torch.full((D,), START), []
    for k in range(steps):
        found.append(x)
        g = x + noise * randn(voters, D, seed=k)
        g[:liars] *= -1
        x = x - step * link.reduce_(g)
    return found


@pytest.mark.parametrize("voters", [1, 5])
def test_signs_with_growing_batches_descend_at_the_papers_rate(voters: int) -> None:
    """signSGD 1: (mean |g|_1)^2 <= [sqrt(|L|_1) (f_0 + 1/2) + 2 |sigma|_1 / sqrt(M)]^2 / sqrt(N), batches of K."""
    k, first = 500, D * START**2 / 2
    way = sign_descent(1 / math.sqrt(D * k), k, 1 / math.sqrt(k), voters)
    mean = sum(float(g.abs().sum()) for g in way) / k
    bound = (math.sqrt(D) * (first + 0.5) + 2 * D / math.sqrt(voters)) ** 2 / k
    assert mean**2 <= bound
    # To stay at the start would not do.
    assert float(way[0].abs().sum()) ** 2 > 3 * bound
    assert float(way[-1].abs().max()) < 0.2


def test_signs_of_single_gradients_descend_at_the_papers_rate() -> None:
    """signSGD 3: the mixed norm, linear above a signal to noise ratio of 2 / sqrt(3), square below."""
    k, first = 500, D * START**2 / 2
    way = sign_descent(math.sqrt(first / (D * k)), k, 1.0, 1)
    measure = sum(float(torch.where(g.abs() > 2 / math.sqrt(3), g.abs(), g.square()).sum()) for g in way) / k
    assert measure <= 3 * math.sqrt(D * first / k)
    assert float(way[0].abs().sum()) > 2 * 3 * math.sqrt(D * first / k)


@pytest.mark.parametrize("liars", [1, 2])
def test_a_minority_that_lies_slows_the_vote_and_no_more(liars: int) -> None:
    """signSGD 3, second half: a part alpha < 1/2 of the voters sends opposite signs."""
    k, voters, first = 500, 5, D * START**2 / 2
    way = sign_descent(math.sqrt(first / (D * k)), k, 1 / math.sqrt(k), voters, liars)
    mean = sum(float(g.abs().sum()) for g in way) / k
    honest = D / ((1 - 2 * liars / voters) * math.sqrt(voters))
    bound = 4 / k * (honest + math.sqrt(D * first)) ** 2
    assert mean**2 <= bound
    assert float(way[0].abs().sum()) ** 2 > 10 * bound


def fed_back(
    gradient: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, gamma: float, steps: int
) -> tuple[list[torch.Tensor], list[torch.Tensor], float]:
    """Descend by EF-signSGD; give points, gradients, and the least contraction delta on the way."""
    link, before, points, slopes, delta = link_of("ef_signsgd", 1, x.numel()), torch.zeros_like(x), [], [], 1.0
    for _ in range(steps):
        g = gradient(x)
        points.append(x)
        slopes.append(g)
        x = x - gamma * link.reduce_(g[None].clone())
        after = link.state_dict()["rank 0"]["residual/x"]
        delta = min(delta, 1 - float(after.square().sum() / (g + before).square().sum()))
        before = after
    return points, slopes, delta


def test_error_feedback_descends_at_the_papers_rates() -> None:
    """signSGD 8: on a function that is not convex, and on a convex one with edges, with the contraction that was."""
    d, gamma, steps, smooth = 20, 0.01, 500, 2.0
    start, none = 0.7 * randn(d, seed=1), torch.zeros(1, d)
    _, slopes, delta = fed_back(lambda x: bumps(x, none)[1][0], start, gamma, steps)
    least, largest = (pick(float(g.square().sum()) for g in slopes) for pick in (min, max))
    kept = (1 - delta) / delta**2
    bound = 2 * float(bumps(start, none)[0]) / (gamma * steps)
    bound += gamma * smooth * largest + 4 * gamma**2 * smooth**2 * largest * kept
    assert 0 < delta < 1
    assert least <= bound < float(slopes[0].square().sum())
    points, slopes, delta = fed_back(lambda x: x.sign(), start, 0.004, steps)
    largest = max(float(g.square().sum()) for g in slopes)
    bound = float(start.square().sum()) / (2 * 0.004 * steps) + 0.004 * largest * (0.5 + 2 * (1 - delta) ** 0.5 / delta)
    assert float(torch.stack(points).mean(0).abs().sum()) <= bound < float(start.abs().sum())


def test_terngrad_converges_with_decreasing_steps_and_with_constant_ones_it_does_not() -> None:
    """TernGrad 9: steps with an infinite sum and a finite sum of squares, and the bound that the theorem assumes."""
    problem = Quadratic(workers=WORKERS, size=SIZE)
    link, steps = link_of(gw.TernGrad(clip=None), WORKERS, SIZE), 1600
    # For a bound of E |g|_inf |g|_1 by A + B |x - x*|^2: |g|_inf |g|_1 <= sqrt(d) |g|_2^2, with gradients that are
    # 20-Lipschitz.
    a, b = 2 * SIZE**0.5 * float(problem.at_best.square().sum(1).max()), 2 * SIZE**0.5 * problem.worst**2
    ends = []
    for decreasing in (True, False):
        x, found = torch.zeros(SIZE, dtype=torch.float64), []
        for step in range(steps):
            g, distance = problem.gradients(x), float((x - problem.best).square().sum())
            found.append(distance)
            product = g.abs().amax(1) * g.abs().sum(1)
            # Hoelder: what plain SGD needs a bound of is never larger.
            assert bool((g.square().sum(1) <= product).all())
            assert float(product.max()) <= a + b * distance
            gamma = 0.008 / (1 + 0.03 * step * decreasing)
            x = x - gamma * link.reduce_(g.float()).double()
        ends.append([sum(found[end - end // 4 : end]) / (end // 4) for end in (100, 400, 1600)])
    (first, second, third), (early, _, late) = ends
    # In the long run as 1 / t, so that four times the steps divide the distance by about four.
    assert third < second / 2.5 < first / 2.5**2
    assert 0.5 < late / early < 2
    assert third < late / 10
