"""Momentum before compression: each worker's own, conserved with the residual, of every parameter and round."""

from __future__ import annotations

import pytest
import torch

import gradwire as gw
from gradwire.errors import HyperparameterError, IncompatibleError

METHODS = [
    gw.ErrorFeedback(momentum=0.5),
    gw.ErrorFeedback(compressor=gw.GRandK(cycle=3), momentum=0.75),
    gw.EFSignSGD(momentum=0.5),
    gw.EFSignSGD(block_size=64, momentum=0.9),
    gw.OneBit(momentum=0.9),
    gw.OneBit(block_size=32, momentum=0.5),
    gw.Coded(compressor=gw.ErrorFeedback(momentum=0.9)),
]


def factor(method: gw.Method) -> float:
    return float(getattr(method, "compressor", method).momentum if isinstance(method, gw.Coded) else method.momentum)  # type: ignore[attr-defined]


def held(link: gw.SimulatedLink, kind: str, name: str = "w") -> torch.Tensor:
    return torch.stack([link.state_dict()[f"rank {r}"][f"{kind}/{name}"] for r in range(link.world_size)])


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_mean_and_residual_add_up_to_the_momentum_and_the_old_residual(method: gw.Method) -> None:
    """Averaged over workers, with different gradients on each, in every round."""
    link = gw.SimulatedLink([("w", torch.empty(30, 40))], method, 3, min_numel=0)
    generator = torch.Generator().manual_seed(0)
    momentum, residual = torch.zeros(3, 1200), torch.zeros(3, 1200)
    for _ in range(6):
        g = torch.randn(3, 1200, generator=generator)
        momentum = factor(method) * momentum + g
        mean = link.reduce_(g.clone())
        after = held(link, "residual")
        # Float32 rounding of each product and sum, of values up to about 50.
        assert torch.allclose(held(link, "momentum"), momentum, atol=1e-5)
        assert torch.allclose(mean + after.mean(0), (momentum + residual).mean(0), atol=3e-5)
        assert float(after.norm()) > 0
        residual = after


@pytest.mark.parametrize("warmup_steps", [0, 2, 9])
def test_where_nothing_is_lost_it_is_the_momentum_of_sgd(warmup_steps: int) -> None:
    """Of small parameters and of whole rounds in float32, too: equal magnitudes of a block are sent exactly."""
    like = [("w", torch.empty(2000)), ("bias", torch.empty(3))]
    link = gw.SimulatedLink(like, gw.EFSignSGD(momentum=0.5), 2, warmup_steps=warmup_steps)
    sign = torch.where(torch.randn(2003, generator=torch.Generator().manual_seed(0)) >= 0, 1.0, -1.0)
    velocity = torch.zeros(2003)
    for round in range(5):
        g = sign * 2.0**-round
        velocity = 0.5 * velocity + g
        assert torch.equal(link.reduce_(g.expand(2, -1).clone()), velocity), round
    assert torch.equal(held(link, "momentum", "bias")[0], velocity[2000:])


def test_warm_up_leaves_no_residual() -> None:
    link = gw.SimulatedLink([("w", torch.empty(2000))], gw.OneBit(momentum=0.5), 2, warmup_steps=1)
    link.reduce_(torch.randn(2, 2000, generator=torch.Generator().manual_seed(0)))
    assert set(link.state_dict()["rank 0"]) == {"momentum/w"}


@pytest.mark.parametrize("bad", ["w", "bias"])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_round_with_an_infinity_changes_nothing(method: gw.Method, bad: str) -> None:
    """Also where it lies in a parameter that travels in float32."""
    link = gw.SimulatedLink([("w", torch.empty(40, 50)), ("bias", torch.empty(10))], method, 2)
    generator = torch.Generator().manual_seed(0)
    link.reduce_(torch.randn(2, 2010, generator=generator))
    before = link.state_dict()["rank 1"]
    assert set(before) == {"residual/w", "momentum/w", "momentum/bias"}
    g = torch.randn(2, 2010, generator=generator)
    g[1, 7 if bad == "w" else 2005] = torch.inf
    assert not bool(torch.isfinite(link.reduce_(g)).all())
    after = link.state_dict()["rank 1"]
    assert all(torch.equal(before[k], after[k]) for k in before)


@pytest.mark.parametrize("kind", ["ErrorFeedback", "EFSignSGD", "OneBit"])
def test_what_is_no_factor_and_a_second_momentum_are_refused(kind: str) -> None:
    for wrong in ("1.0", "-0.1", "True", "'0.9'", "None"):
        with pytest.raises(HyperparameterError, match="momentum is a number from 0 to below 1"):
            gw.method(f"{kind}(momentum={wrong})")
    parameters = [torch.nn.Parameter(torch.zeros(3))]
    sgd = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    with pytest.raises(IncompatibleError, match=r"momentum=0\.9 beside it"):
        gw.check_options(f"{kind}(momentum=0.5)", optimizer=sgd)
    gw.check_options(f"{kind}(momentum=0.5)", optimizer=torch.optim.SGD(parameters, lr=0.1))
    gw.check_options(f"{kind}()", optimizer=sgd)


def test_a_momentum_that_the_method_has_not_is_dropped_and_named(caplog: pytest.LogCaptureFixture) -> None:
    like = [("w", torch.empty(2000))]
    first = gw.SimulatedLink(like, "EFSignSGD(momentum=0.5)", 2)
    first.reduce_(torch.randn(2, 2000, generator=torch.Generator().manual_seed(0)))
    second = gw.SimulatedLink(like, "EFSignSGD()", 2)
    second.load_state_dict(first.state_dict())
    assert set(second.state_dict()["rank 0"]) == {"residual/w"}
    assert "'momentum' dropped" in caplog.text


def test_no_momentum_is_the_method_without_the_field() -> None:
    g = torch.randn(2, 2000, generator=torch.Generator().manual_seed(0))
    for plain, zero in (("onebit", "OneBit(momentum=0.0)"), ("errorfeedback", "ErrorFeedback(momentum=0)")):
        assert gw.method(plain) == gw.method(zero)
        found = gw.simulate(g, zero)
        assert torch.equal(gw.simulate(g, plain).mean, found.mean)
        assert set(found.state["rank 0"]) == {"residual/0"}
