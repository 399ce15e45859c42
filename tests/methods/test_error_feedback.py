"""Error feedback: nothing is lost, residuals stay bounded, memory follows parameters and survives."""

from __future__ import annotations

import pytest
import torch

import gradwire as gw
from gradwire.errors import HyperparameterError

INNER = [gw.QSGDinf(block_size=256), gw.QSGDinf(levels=2, block_size=16), gw.NUQSGD(), gw.QSGD(levels=23)]


def residuals(state: dict[str, dict[str, torch.Tensor]], world_size: int, name: str = "w") -> torch.Tensor:
    return torch.stack([state[f"rank {r}"][f"residual/{name}"] for r in range(world_size)])


@pytest.mark.parametrize("inner", INNER, ids=repr)
def test_conservation(inner: gw.Method) -> None:
    """Averaged over workers: output + new residual = gradient + old residual, every round."""
    generator = torch.Generator().manual_seed(0)
    link = gw.SimulatedLink([("w", torch.empty(3000))], gw.ErrorFeedback(compressor=inner), 3, min_numel=0)
    before = torch.zeros(3, 3000)
    for _ in range(6):
        g = torch.randn(3, 3000, generator=generator)
        mean = link.reduce_(g.clone())
        after = residuals(link.state_dict(), 3)
        # Float32 rounding of sums of three, relative to values of about ten.
        assert torch.allclose(mean + after.mean(0), (g + before).mean(0), atol=3e-6)
        assert float(after.norm()) > 0
        before = after


def test_residuals_stay_bounded() -> None:
    method = gw.ErrorFeedback(compressor=gw.QSGDinf(levels=2, block_size=16))
    q = method.compressor.omega
    link = gw.SimulatedLink([("w", torch.empty(1600))], method, 2, min_numel=0)
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        link.reduce_(torch.nn.functional.normalize(torch.randn(2, 1600, generator=generator)))
    bound = q**0.5 / (1 - q**0.5)
    assert float(residuals(link.state_dict(), 2).norm(dim=1).max()) < bound


@pytest.mark.parametrize(
    "compressor",
    [
        gw.QSGDinf(),
        gw.QSGDinf(levels=2, block_size=None),
        gw.QSGDMaxNorm(levels=3),
        gw.MultiScale(levels=(3, 15)),
    ],
    ids=repr,
)
def test_residuals_stay_below_their_largest_magnitudes_bound(compressor: gw.Method) -> None:
    """More variance than signal is no harm where no element errs by as much as the largest magnitude."""
    c = compressor.traits.worst_step
    link = gw.SimulatedLink([("w", torch.empty(2000))], gw.ErrorFeedback(compressor=compressor), 2, min_numel=0)
    generator = torch.Generator().manual_seed(1)
    for _ in range(150):
        # A few large values and many small ones: the relative variance is far above 1.
        g = torch.rand(2, 2000, generator=generator) ** 8 * 2 - 1e-3
        link.reduce_(g.clamp(-1, 1))
    assert float(residuals(link.state_dict(), 2).abs().max()) <= c / (1 - c)


@pytest.mark.parametrize(
    "spec", ["terngrad", "QSGDinf(levels=1)", "QSGD(levels=1)", "errorfeedback", "alq", "QSGD(block_size=None)", "fp16"]
)
def test_what_is_no_contraction_is_refused(spec: str) -> None:
    with pytest.raises(HyperparameterError, match=r"no contraction|operator on one vector"):
        gw.ErrorFeedback(compressor=gw.method(spec))


def test_float32_is_refused_since_it_leaves_nothing() -> None:
    with pytest.raises(HyperparameterError, match=r"not FP32\(\): float32 leaves nothing out"):
        gw.ErrorFeedback(gw.FP32())


def test_without_the_refusal_it_would_diverge() -> None:
    """The reason is real: an unbiased operator with more noise than signal, fed back by hand."""
    e, generator = torch.zeros(1, 4096), torch.Generator().manual_seed(2)
    sizes = []
    for round in range(60):
        p = torch.randn(1, 4096, generator=generator) + e
        e = p - gw.simulate(p, gw.QSGD(levels=1, block_size=4096), round=round).mean
        sizes.append(float(e.norm()))
    assert sizes[-1] > 1e6 * sizes[0]


def test_memory_follows_parameters_to_another_layout() -> None:
    """Buckets are laid out anew after a first step: the same bits as with one layout from the start."""
    like = {n: torch.empty(k) for n, k in (("a", 300), ("b", 500), ("c", 200))}
    generator = torch.Generator().manual_seed(3)
    rounds = [{n: torch.randn(2, p.numel(), generator=generator) for n, p in like.items()} for _ in range(4)]

    def run(orders: list[str]) -> list[dict[str, torch.Tensor]]:
        found, state = [], None
        for order, g in zip(orders, rounds):
            link = gw.SimulatedLink([(n, like[n]) for n in order], gw.ErrorFeedback(), 2, min_numel=0)
            if state is not None:
                link.load_state_dict(state)
            mean = link.reduce_(torch.cat([g[n] for n in order], 1))
            found.append(dict(zip(order, mean.split([like[n].numel() for n in order]))))
            state = link.state_dict()
        return found

    for one, other in zip(run(["abc"] * 4), run(["abc", "cab", "bca", "abc"])):
        assert all(torch.equal(one[n], other[n]) for n in "abc")


def test_a_round_with_an_infinity_changes_nothing() -> None:
    link = gw.SimulatedLink([("w", torch.empty(2000))], gw.ErrorFeedback(), 2)
    link.reduce_(torch.randn(2, 2000))
    before = residuals(link.state_dict(), 2)
    g = torch.randn(2, 2000)
    g[1, 7] = torch.inf
    assert not bool(torch.isfinite(link.reduce_(g)).all())
    assert torch.equal(residuals(link.state_dict(), 2), before)


def test_small_parameters_have_no_residual() -> None:
    like = [("w", torch.empty(2000)), ("bias", torch.empty(10))]
    link = gw.SimulatedLink(like, gw.ErrorFeedback(), 2)
    link.reduce_(torch.randn(2, 2010))
    assert set(link.state_dict()["rank 0"]) == {"residual/w"}
    assert float(residuals(link.state_dict(), 2, "w").abs().max()) > 0


def test_a_parameter_that_is_excluded_later_leaves_its_residual_once() -> None:
    like = [("a", torch.empty(2000)), ("b", torch.empty(2000))]
    before = gw.SimulatedLink(like, "ErrorFeedback(TopK(density=0.1))", 2)
    rows = torch.randn(2, 4000, generator=torch.Generator().manual_seed(0))
    came = before.reduce_(rows.clone())
    after = gw.SimulatedLink(like, "ErrorFeedback(TopK(density=0.1))", 2, exclude=("b",))
    after.load_state_dict(before.state_dict())
    for _ in range(3):
        came += after.reduce_(torch.zeros_like(rows))
    torch.testing.assert_close(came[2000:], rows[:, 2000:].mean(0))
    assert float(residuals(after.state_dict(), 2, "b").abs().max()) == 0
    assert float(residuals(after.state_dict(), 2, "a").abs().max()) > 0


def test_warm_up_leaves_no_residual() -> None:
    link = gw.SimulatedLink([("w", torch.empty(2000))], gw.ErrorFeedback(), 2, warmup_steps=2)
    for round in range(3):
        g = torch.randn(2, 2000)
        mean = link.reduce_(g.clone())
        assert torch.allclose(mean, g.mean(0), atol=1e-6) == (round < 2)
