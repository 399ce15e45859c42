"""TernGrad with the scalers of the round before: what a round encodes with, tells, and remembers."""

from __future__ import annotations

import math

import pytest
import torch

import gradwire as gw
from gradwire.exchange.drivers import Meter, simulate_ranks
from gradwire.exchange.planning import Options, Planner
from gradwire.exchange.protocols import Context
from gradwire.exchange.protocols.memory import Memory

NUMEL = 4000
AHEAD, NOW = gw.TernGrad(ahead=True), gw.TernGrad()


def gradients(seed: int, workers: int = 3, numel: int = NUMEL) -> torch.Tensor:
    return torch.randn(workers, numel, generator=torch.Generator().manual_seed(seed))


def link(method: gw.Method, workers: int = 3, numel: int = NUMEL) -> gw.SimulatedLink:
    return gw.SimulatedLink([("w", torch.empty(numel))], method, workers, min_numel=0)


def scaler(of: gw.SimulatedLink) -> float:
    return float(of.state_dict()["global"]["scaler/w"])


def shared_scaler(g: torch.Tensor, clip: float = 2.5) -> float:
    """The largest over workers of the maximum of the clipped vector."""
    limit = (clip * g.double().square().mean(1).sqrt()).float()
    return float(torch.minimum(g.abs().amax(1), limit).max())


def test_equal_gradients_give_the_bits_of_scalers_of_the_same_round() -> None:
    g, ahead, now = gradients(0), link(AHEAD), link(NOW)
    for _ in range(3):
        assert torch.equal(ahead.reduce_(g.clone()), now.reduce_(g.clone()))


def test_a_round_encodes_with_the_scaler_of_the_round_before() -> None:
    ours = link(AHEAD)
    ours.reduce_(gradients(0))
    for seed in (1, 2):
        before = scaler(ours)
        # Roots in float64 are rounded to float32 once here, and may be once more in a product there.
        assert before == pytest.approx(shared_scaler(gradients(seed - 1)), rel=2**-23)
        mean = ours.reduce_(gradients(seed))
        steps = mean.double() / (before / 3)
        # Each value is an integer multiple of s / N, up to the rounding of the product.
        assert float((steps - steps.round()).abs().max()) < 3 * 3 * 2**-23
        assert float(steps.abs().max()) > 1.5
        assert scaler(ours) == pytest.approx(shared_scaler(gradients(seed)), rel=2**-23)


def test_what_is_larger_than_the_last_scaler_is_clipped_to_it() -> None:
    g = torch.full((2, NUMEL), 0.25)
    ours = link(gw.TernGrad(clip=None, ahead=True), 2)
    ours.reduce_(g.clone())
    assert torch.equal(ours.reduce_(4 * g), g[0])
    assert torch.equal(ours.reduce_(4 * g), 4 * g[0])


def test_what_is_smaller_comes_back_without_bias() -> None:
    """x < s: each of N trits is s with the probability x / s, with the variance s x - x^2."""
    workers, x, s = 2, 0.25, 1.0
    ours = link(gw.TernGrad(clip=None, ahead=True), workers)
    ours.reduce_(torch.full((workers, NUMEL), s))
    mean = ours.reduce_(torch.full((workers, NUMEL), x)).double()
    deviation = math.sqrt((s * x - x * x) / workers / NUMEL)
    assert abs(float(mean.mean()) - x) < 5 * deviation
    assert set(mean.tolist()) <= {0.0, 0.5, 1.0}


def test_a_value_that_is_not_finite_reaches_all_ranks_and_leaves_the_scaler() -> None:
    two = [("w", torch.empty(NUMEL)), ("v", torch.empty(NUMEL))]
    ours = gw.SimulatedLink(two, AHEAD, 2, min_numel=0)
    first = gradients(0, 2, 2 * NUMEL)
    ours.reduce_(first.clone())
    held = ours.state_dict()["global"]
    for worker, value in ((0, math.inf), (1, math.nan)):
        broken = gradients(1, 2, 2 * NUMEL)
        broken[worker, 7] = value
        mean = ours.reduce_(broken)
        assert bool(torch.isposinf(mean[:NUMEL]).all())
        assert bool(torch.isfinite(mean[NUMEL:]).all())
        after = ours.state_dict()["global"]
        assert after["scaler/w"] == held["scaler/w"]
        assert after["scaler/v"] == held["scaler/v"]


def test_a_gradient_that_was_zero_is_not_lost_in_the_next_round() -> None:
    ours, g = link(AHEAD), gradients(1)
    ours.reduce_(torch.zeros(3, NUMEL))
    now = link(NOW)
    now.reduce_(torch.zeros(3, NUMEL))
    assert torch.equal(ours.reduce_(g.clone()), now.reduce_(g.clone()))


def test_the_state_continues_with_the_same_bits() -> None:
    one, two = link(AHEAD), link(AHEAD)
    for seed in range(2):
        one.reduce_(gradients(seed))
    two.load_state_dict(one.state_dict())
    assert torch.equal(one.reduce_(gradients(2)), two.reduce_(gradients(2)))


@pytest.mark.parametrize("coded", [False, True])
def test_bits_depend_on_neither_chunks_nor_a_coder(coded: bool) -> None:
    names = [("w", torch.empty(70, 80)), ("v", torch.empty(NUMEL)), ("bias", torch.empty(10))]
    numel = 70 * 80 + NUMEL + 10
    method = gw.Coded(AHEAD, coder="rans") if coded else AHEAD
    whole = gw.SimulatedLink(names, AHEAD, 3)
    cut = gw.SimulatedLink(names, method, 3, chunk_numel=800)
    for seed in range(3):
        g = gradients(seed, 3, numel)
        assert torch.equal(whole.reduce_(g.clone()), cut.reduce_(g))


def test_the_scaler_has_no_loss_scale() -> None:
    planner = Planner(AHEAD, {"w": torch.empty(NUMEL)}, 2, Options(min_numel=0))
    memories = [Memory(), Memory()]
    means = []
    for round, scale in enumerate((1024.0, 2.0)):
        g = scale * gradients(round, 2)
        plan = planner.plan(["w"], round)
        contexts = [Context(r, 2, round, memory=memories[r], loss_scale=scale) for r in range(2)]
        simulate_ranks([plan.whole(c, flat) for c, flat in zip(contexts, g)], [Meter(), Meter()])
        for memory in memories:
            memory.commit()
        means.append(g[0] / scale)
    now = link(AHEAD, 2)
    for round, mean in enumerate(means):
        assert torch.equal(mean, now.reduce_(gradients(round, 2)))


def test_a_round_waits_for_a_delay_less() -> None:
    # Two workers gather: scalers and trits, or trits alone. Eight have owners of shares, a delay more.
    for workers, counts in ((2, [2, 1]), (8, [3, 2])):
        found = [
            Planner(method, {"w": torch.empty(NUMEL)}, workers, Options(min_numel=0)).delays([["w"]]).count
            for method in (NOW, AHEAD)
        ]
        assert found == counts


def test_what_has_no_shared_scaler_is_refused() -> None:
    with pytest.raises(gw.HyperparameterError, match="share_scaler=False has none"):
        gw.TernGrad(share_scaler=False, ahead=True)
    with pytest.raises(gw.HyperparameterError, match="ahead is True or False"):
        gw.TernGrad(ahead=1)  # type: ignore[arg-type]
