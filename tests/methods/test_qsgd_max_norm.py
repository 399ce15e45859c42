"""QSGDMaxNorm: the numbered properties of all-reduce compatible quantisers (docs/methods/levels.md)."""

from __future__ import annotations

import math

import pytest
import torch

import gradwire as gw
from laws import levels


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def alone(g: torch.Tensor, rank: int, method: gw.Method, round: int) -> torch.Tensor:
    """Return what worker ``rank`` contributed: the mean where all others hold zeros, times N."""
    only = torch.zeros_like(g)
    only[rank] = g[rank]
    # One element keeps every worker's scale the same.
    only[:, 0] = g[:, 0]
    return gw.simulate(only, method, round=round).mean * len(g)


@pytest.mark.parametrize("s", [1, 5, 15])
def test_the_sum_decodes_to_the_mean_of_what_each_decodes_to(s: int) -> None:
    """1: in integers, exactly."""
    g = gaussian(3, 400)
    g[:, 0] = 6.0
    method = gw.QSGDMaxNorm(levels=s)
    steps = lambda mean: (mean.double() * 3 * s / 6.0).round()[1:]  # noqa: E731
    total = steps(gw.simulate(g, method, round=4).mean)
    assert torch.equal(total, sum(steps(alone(g, r, method, 4) / 3) for r in range(3)))
    assert int(total.abs().max()) > 1


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("s", [1, 7, 15, 40])
def test_the_same_bits_from_either_protocol(world_size: int, s: int) -> None:
    """Shards of sums, or all rows: also where blocks straddle shards, and with several chunks."""
    g = gaussian(world_size, 5000)
    found = []
    for collective in ("two_shot", "all_gather"):
        for chunk_numel in (1 << 20, 1000):
            link = gw.SimulatedLink(
                [("w", torch.empty(5000))], gw.QSGDMaxNorm(levels=s, block_size=48), world_size,
                collective=collective, chunk_numel=chunk_numel,
            )  # fmt: skip
            found.append(link.reduce_(g.clone()).clone())
    assert all(torch.equal(found[0], other) for other in found)


def test_the_variance_of_a_worker_is_bounded() -> None:
    """3: min(d R^2 / (4 s^2), R |v|_1 / s), for the law that the shared tests measure, and for draws."""
    for s in (1, 4, 15):
        for v in (gaussian(1, 512), gaussian(1, 512, seed=1) ** 3 / 8, torch.full((1, 512), 0.3 / s)):
            both = torch.cat([v, torch.full_like(v, 8.0)])
            scale = both.abs().max()
            bound = min(512 * scale**2 / (4 * s * s), scale * v.abs().sum() / s)
            law = float(levels(range(s + 1), None, "max", shared=True)(both)[0].sum())
            assert law <= float(bound) * (1 + 1e-9)
            # The other worker's values are at the scale, which is exact.
            rounds = [gw.simulate(both, gw.QSGDMaxNorm(levels=s), round=r).mean * 2 - 8 - v[0] for r in range(12)]
            found = sum(float(error.square().sum()) for error in rounds) / 12
            # Errors lie within a step w, so their squares have a deviation of at most w sqrt(law) a round.
            assert abs(found - law) <= 5 * 8 / s * math.sqrt(law / 12)
        # Half a step away from every level the first term is reached.
        half = torch.stack([torch.full((512,), 2.0 / s), torch.full((512,), 4.0)])
        law = float(levels(range(s + 1), None, "max", shared=True)(half)[0].sum())
        assert law == pytest.approx(512 * 4.0**2 / (4 * s * s))


def test_one_worker_is_qsgdinf_and_one_level_is_terngrad() -> None:
    """4: the first bit for bit; the second in law, shared scaler included."""
    g = gaussian(1, 3000)
    for size in (64, None):
        ours, theirs = gw.QSGDMaxNorm(levels=7, block_size=size), gw.QSGDinf(levels=7, block_size=size)
        assert torch.equal(gw.simulate(g, ours).mean, gw.simulate(g, theirs).mean)
    g = gaussian(2, 3000) * torch.tensor([[1.0], [3.0]])
    errors = []
    for method in (gw.QSGDMaxNorm(levels=1), gw.TernGrad(clip=None)):
        rounds = [gw.simulate(g, method, round=r).mean for r in range(60)]
        errors.append(sum(float((m - g.mean(0)).square().sum()) for m in rounds))
    # 60 draws of 3000 elements: a relative deviation of about 0.5 %.
    assert errors[0] == pytest.approx(errors[1], rel=0.02)


def test_a_larger_scale_of_another_worker_costs_its_square() -> None:
    """5: up to (R / R_i)^2, reached where steps are short against the values."""
    g = gaussian(1, 20_000)
    own = levels(range(128), None, "max")(g).sum()
    for ratio in (2.0, 4.0):
        both = torch.cat([g, ratio * g])
        shared = levels(range(128), None, "max", shared=True)(both)[0].sum()
        assert float(shared / own) == pytest.approx(ratio**2, rel=0.05)
        found = gw.simulate(both, gw.QSGDMaxNorm(levels=127)).mean
        # Both workers now have the larger one's step, so the same variance each.
        assert float((found - both.mean(0)).square().sum()) == pytest.approx(float(2 * shared / 4), rel=0.05)


@pytest.mark.parametrize(("world_size", "s", "width"), [(1, 127, 8), (2, 63, 8), (8, 16, 32 / 3), (2, 64, 32 / 3)])
def test_sums_around_a_byte_are_exact(world_size: int, s: int, width: float) -> None:
    """8: s N at 126, 127 and 128: wider words, never a wrap."""
    g = torch.tensor([1.0, -1.0, 0.0]).repeat(world_size, 300)
    for collective in ("two_shot", "all_gather"):
        method = gw.QSGDMaxNorm(levels=s)
        # All of it compressed: a parameter below min_numel would come back exactly whatever the width.
        link = gw.SimulatedLink([("w", torch.empty(900))], method, world_size, collective=collective, min_numel=0)
        assert torch.equal(link.reduce_(g.clone()), g[0])
    from gradwire.kernels import digit_layout

    assert digit_layout(2 * s * world_size + 1).bits_per_value == width


def test_sums_that_do_not_fit_are_refused() -> None:
    """8: above 16 bits."""
    g = gaussian(4, 100)
    assert bool(torch.isfinite(gw.simulate(g, gw.QSGDMaxNorm(levels=8191)).mean).all())
    with pytest.raises(gw.IncompatibleError, match="at most levels=8191"):
        gw.simulate(g, gw.QSGDMaxNorm(levels=8192))


def test_gradient_descent_on_a_quadratic_where_all_workers_agree_reaches_the_optimum() -> None:
    """9: x <- x - eta (x - c + noise) with relative variance omega: the distance to the optimum shrinks to zero where
    all workers agree there, since the noise vanishes with the gradient; with s=1 the factor is visibly worse."""
    ends = []
    for s in (1, 15):
        x, target = torch.zeros(256), gaussian(256)
        for round in range(200):
            g = (x - target).expand(2, -1)
            x = x - 0.2 * gw.simulate(g, gw.QSGDMaxNorm(levels=s), round=round).mean
        ends.append(float((x - target).norm() / target.norm()))
    # Without noise: 0.8^200 = 4e-20, below float32's resolution of the target.
    assert ends[1] < 1e-5
    assert ends[0] < 1e-2


def test_an_infinity_reaches_everybody_and_only_its_block() -> None:
    g = gaussian(3, 480)
    g[1, 50] = torch.nan
    mean = gw.simulate(g, gw.QSGDMaxNorm(block_size=48)).mean
    assert bool((mean[48:96] == torch.inf).all())
    assert bool(torch.isfinite(mean[:48]).all() & torch.isfinite(mean[96:]).all())


def test_error_feedback_refuses_a_single_level() -> None:
    """An element may then err by the whole scale; with two it may not, whatever the other workers' scales."""
    with pytest.raises(gw.HyperparameterError, match="no contraction"):
        gw.ErrorFeedback(compressor=gw.QSGDMaxNorm(levels=1))
    assert gw.ErrorFeedback(compressor=gw.QSGDMaxNorm(levels=2)).compressor.traits.worst_step == 0.5
