"""EF21, by number of the property in docs/properties.md, on unlike workers with exact gradients and with noisy ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.errors import HyperparameterError
from gradwire.exchange.drivers import Meter, simulate_ranks
from gradwire.exchange.planning import Options, Planner
from gradwire.exchange.protocols import Context, Memory
from quadratics import Quadratic, descend

N, D = 8, 40
SIGNS = gw.ScaledSign(block_size=16)
THETA = 1 - math.sqrt(1 - 1 / 16)
BETA = (1 - 1 / 16) / THETA


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def estimates(link: gw.SimulatedLink, workers: int, name: str = "x") -> torch.Tensor:
    state = link.state_dict()
    return torch.stack([state[f"rank {r}"][f"shift/{name}"] for r in range(workers)])


def test_with_a_lossless_operator_it_is_the_mean() -> None:
    """Property 1: within the roundings of a few float32 sums of numbers below ten."""
    link = gw.SimulatedLink([("x", torch.empty(500))], gw.EF21(compressor=gw.FP32()), 3, min_numel=0)
    for seed in range(5):
        g = randn(seed, 3, 500)
        assert torch.allclose(link.reduce_(g.clone()), g.mean(0), rtol=0, atol=1e-5)
        assert torch.allclose(estimates(link, 3).float(), g, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "inner", [gw.ScaledSign(), SIGNS, gw.QSGDinf(block_size=256), gw.Rotated(compressor=gw.ScaledSign())], ids=repr
)
def test_the_first_round_is_the_operators(inner: gw.Method) -> None:
    """Property 2: zeros at first are the paper's start, C(grad_i), to the bit."""
    g = randn(1, 4, 3000)
    first = gw.simulate(g, gw.EF21(compressor=inner), round=5)
    assert torch.equal(first.mean, gw.simulate(g, inner, round=5).mean)
    if inner.properties.stream == "none":
        for r in range(4):
            assert torch.equal(first.state[f"rank {r}"]["shift/0"].float(), gw.simulate(g[r : r + 1], inner).mean)


def test_the_outcome_is_the_mean_of_estimates() -> None:
    """Property 3, in every round, to what float32 rounds off the mean of what is sent: see DIANA's property 2."""
    problem = Quadratic()
    link = gw.SimulatedLink([("x", torch.empty(D))], gw.EF21(compressor=SIGNS), N, min_numel=0)
    x, before, apart = torch.zeros(D, dtype=torch.float64), torch.zeros(N, D, dtype=torch.float64), torch.zeros(D)
    for _ in range(300):
        outcome = link.reduce_(problem.gradients(x).float())
        x = x - 0.02 * outcome.double()
        own, held = estimates(link, N), link.state_dict()["replicated"]["mean_shift/x"]
        assert torch.equal(outcome, held.float())
        now = own.mean(0) - held
        bound = (N + 2) * 2**-24 * (own - before).abs().mean(0) + 8 * 2**-53 * own.abs().mean(0)
        assert bool(((now - apart).abs() <= bound).all())
        before, apart = own, now
    assert float(own.norm()) > 1


def test_estimates_of_a_constant_gradient_contract() -> None:
    """Property 4: by 1 - delta a round, every worker's; where errors of elements have a bound, by that."""
    g = randn(2, 3, 640) * torch.tensor([[1.0], [10.0], [0.1]])
    link = gw.SimulatedLink([("x", torch.empty(640))], gw.EF21(compressor=SIGNS), 3, min_numel=0)
    for t in range(1, 150):
        link.reduce_(g.clone())
        left = (estimates(link, 3) - g).square().sum(1) / g.double().square().sum(1)
        # Differences and what is sent are rounded to float32.
        assert bool((left <= (1 - 1 / 16) ** t * (1 + 1e-4)).all())
    shared = gw.EF21(compressor=gw.QSGDMaxNorm(levels=2))
    link = gw.SimulatedLink([("x", torch.empty(640))], shared, 3, min_numel=0)
    for t in range(1, 16):
        link.reduce_(g.clone())
        assert float((estimates(link, 3) - g).abs().max()) <= 0.5**t * float(g.abs().max()) * (1 + 1e-4)


def test_the_error_of_estimates_obeys_the_lemma() -> None:
    """Property 5: G <= (1 - theta) G + beta mean |move|^2 from round to round, at a step size far too large for it."""
    problem = Quadratic()
    link = gw.SimulatedLink([("x", torch.empty(D))], gw.EF21(compressor=SIGNS), N, min_numel=0)
    x, gradients, error = torch.zeros(D, dtype=torch.float64), problem.gradients(torch.zeros(D).double()), math.inf
    for _ in range(300):
        now = problem.gradients(x)
        moved = float((now - gradients).square().sum(1).mean())
        gradients = now
        x = x - 0.04 * link.reduce_(gradients.float()).double()
        after = float((estimates(link, N) - gradients).square().sum(1).mean())
        # Gradients are rounded to float32: 2^-24 of each, next to the error that is left.
        assert after <= ((1 - THETA) * error + BETA * moved) * (1 + 1e-5) + 1e-11
        error = after


def test_descent_is_no_slower_than_the_theorem() -> None:
    """Property 6: f - f* + gamma / theta G shrinks by 1 - gamma mu a step, from both starts of the paper."""
    problem = Quadratic()
    gamma = min(1 / (problem.smooth + problem.worst * math.sqrt(2 * BETA / THETA)), THETA / (2 * problem.mu))
    hessian = problem.a.mean(0)
    for warmup_steps in (0, 1):
        link = gw.SimulatedLink(
            [("x", torch.empty(D))], gw.EF21(compressor=SIGNS), N, min_numel=0, warmup_steps=warmup_steps
        )
        x, found = torch.zeros(D, dtype=torch.float64), []
        for _ in range(400):
            gradients = problem.gradients(x)
            outcome = link.reduce_(gradients.float()).double()
            away = x - problem.best
            error = float((estimates(link, N) - gradients).square().sum(1).mean())
            found.append(float(away @ hessian @ away) / 2 + gamma / THETA * error)
            x = x - gamma * outcome
        bound = found[0] * (1 - gamma * problem.mu) ** torch.arange(400)
        assert bool((torch.tensor(found) <= bound * (1 + 1e-6)).all())
        assert found[-1] < 0.5 * float(bound[-1])


def test_it_reaches_the_optimum_where_the_operator_and_error_feedback_stop() -> None:
    """Property 7: one constant step size for all."""
    problem, ends = Quadratic(), {}
    for method in (SIGNS, gw.ErrorFeedback(compressor=SIGNS)):
        ends[method.name] = sum(descend(problem, method, 0.02, 200)[-50:]) / 50
    assert ends["scaledsign"] > 1e-2
    assert ends["errorfeedback"] > 1e-3
    # Linearly, until the rounding of float32 gradients ends it.
    found = descend(problem, gw.EF21(compressor=SIGNS), 0.02, 250)
    assert found[200] < 1e-4 * found[50] < 1e-8 * found[0]
    assert found[-1] < 1e-10 * ends["errorfeedback"]


def test_momentum_averages_a_workers_gradients_before_the_operator() -> None:
    """Property 8: v <- momentum v + (1 - momentum) grad, also of what travels in float32 and in rounds of warm-up."""
    method = gw.EF21(compressor=gw.FP32(), momentum=0.75)
    signs = gw.EF21(compressor=SIGNS, momentum=0.75)
    like = [("w", torch.empty(96)), ("b", torch.empty(3))]
    links = [gw.SimulatedLink(like, m, 2, min_numel=10, warmup_steps=w) for m, w in ((method, 0), (signs, 6))]
    small = gw.SimulatedLink(like, signs, 2, min_numel=10)
    v = torch.zeros(2, 99)
    for seed in range(5):
        g = randn(seed, 2, 99)
        v = 0.75 * v + 0.25 * g
        for link in links:
            assert torch.allclose(link.reduce_(g.clone()), v.mean(0), rtol=0, atol=1e-5)
            assert torch.allclose(estimates(link, 2, "w").float(), v[:, :96], rtol=0, atol=1e-5)
        assert torch.allclose(small.reduce_(g.clone())[96:], v.mean(0)[96:], rtol=0, atol=1e-5)


def test_momentum_lowers_the_floor_of_noisy_gradients() -> None:
    """Property 8: with large noise and a contraction that keeps little, at the same step size."""
    problem, floors = Quadratic(workers=4, size=20), {}
    for momentum in (0.0, 0.9):
        method = gw.EF21(compressor=gw.ScaledSign(block_size=32), momentum=momentum)
        link = gw.SimulatedLink([("x", torch.empty(20))], method, 4, min_numel=0)
        x, distances, generator = torch.zeros(20, dtype=torch.float64), [], torch.Generator().manual_seed(7)
        for _ in range(600):
            noise = 10 * torch.randn(4, 20, generator=generator)
            x = x - 0.005 * link.reduce_(problem.gradients(x).float() + noise).double()
            distances.append(float((x - problem.best).square().sum()))
        floors[momentum] = sum(distances[300:]) / 300
    assert floors[0.9] < 0.7 * floors[0.0]


@pytest.mark.parametrize("inner", [SIGNS, gw.QSGDMaxNorm(), gw.FP32(), gw.RandK(density=0.1)], ids=repr)
def test_warm_up_leaves_whole_gradients_as_estimates(inner: gw.Method) -> None:
    """Property 9: the bits of any warm-up; then a round without a change sends nothing but zeros."""
    like = [("v", torch.empty(1000)), ("b", torch.empty(5)), ("w", torch.empty(300))]
    options: dict[str, Any] = {"min_numel": 10, "warmup_steps": 2, "chunk_numel": 320}
    link = gw.SimulatedLink(like, gw.EF21(compressor=inner), 3, **options)
    plain = gw.SimulatedLink(like, inner, 3, **options)
    for seed in range(2):
        g = randn(seed, 3, 1305)
        mean = link.reduce_(g.clone())
        assert torch.equal(mean, plain.reduce_(g.clone()))
        state = link.state_dict()["replicated"]
        for name, part in (("v", slice(0, 1000)), ("w", slice(1005, 1305))):
            assert torch.equal(estimates(link, 3, name).float(), g[:, part])
            assert torch.equal(state[f"mean_shift/{name}"].float(), mean[part])
    spoilt = g.clone()
    spoilt[1, 7] = torch.nan
    link.load_state_dict({**link.state_dict(), "global": {**link.state_dict()["global"], "round": torch.tensor(1)}})
    link.reduce_(spoilt)
    assert torch.equal(estimates(link, 3, "v").float(), g[:, :1000])
    assert torch.equal(link.reduce_(g.clone()), mean)


def test_warm_up_under_mixed_precision_keeps_unscaled_estimates() -> None:
    """Property 9 with a loss scale, a power of two, which divides without a rounding."""
    g, workers, scale = randn(3, 2, 640), 2, 1024.0
    planner = Planner(gw.EF21(momentum=0.5), {"x": torch.empty(640)}, workers, Options(min_numel=0, warmup_steps=1))
    memories = [Memory() for _ in range(workers)]
    contexts = [Context(r, workers, 0, memory=m, loss_scale=scale) for r, m in enumerate(memories)]
    rows = g * scale
    simulate_ranks([planner.plan(["x"], 0).whole(c, row) for c, row in zip(contexts, rows)], [Meter(), Meter()])
    for memory, row in zip(memories, g):
        memory.commit()
        assert torch.equal(memory.state()["rank"]["shift/x"].float(), 0.5 * row)
        assert torch.equal(memory.state()["replicated"]["mean_shift/x"].float(), 0.5 * g.mean(0))
    assert torch.equal(rows[0], 0.5 * scale * g.mean(0))


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_checkpoint_resumes_bit_for_bit(momentum: float) -> None:
    method = gw.EF21(momentum=momentum)
    one, other = (gw.SimulatedLink([("x", torch.empty(640))], method, 2, min_numel=0) for _ in range(2))
    for seed in range(3):
        one.reduce_(randn(seed, 2, 640))
    other.load_state_dict(one.state_dict())
    for seed in range(3, 6):
        assert torch.equal(one.reduce_(randn(seed, 2, 640)), other.reduce_(randn(seed, 2, 640)))


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ("EF21(compressor=QSGD(levels=1, block_size=4096))", "no contraction .*estimates may grow without bound"),
        ("EF21(compressor=QSGDinf(levels=1))", "no contraction .*estimates may grow without bound"),
        ("EF21(compressor=terngrad)", "no bound on its error is known"),
        ("EF21(compressor=bf16)", "sums in sixteen bits, and no estimate sees"),
        ("EF21(compressor=ErrorFeedback())", "operator on one vector"),
        ("EF21(compressor=GRandK())", "operator on one vector"),
        ("EF21(compressor=2)", "operator on one vector"),
        ("EF21(momentum=1.0)", "momentum is a number from 0"),
        ("EF21(shifts='half')", "'float64' or 'float32'"),
    ],
)
def test_what_is_no_contraction_is_refused(spec: str, part: str) -> None:
    """Property 10."""
    with pytest.raises(HyperparameterError, match=part):
        gw.method(spec)


def test_any_contraction_is_taken() -> None:
    for inner in ("ScaledSign()", "QSGDMaxNorm()", "MultiScale()", "natural", "fp32"):
        assert repr(gw.method(f"EF21(compressor={inner})").compressor) == repr(gw.method(inner))  # type: ignore[attr-defined]
