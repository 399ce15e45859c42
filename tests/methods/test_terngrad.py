"""The numbered properties of TernGrad (docs/methods/ternary.md)."""

from __future__ import annotations

import math

import pytest
import torch

import gradwire as gw
from laws import ternary


def gaussian(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def test_a_ternary_vector_comes_back_exactly() -> None:
    g = torch.tensor([0.0, 0.3, -0.3, 0.3, 0.0, -0.3]).repeat(50)
    for clip in (None, 2.5):
        assert torch.equal(gw.simulate(g.expand(4, -1), gw.TernGrad(clip=clip)).mean, g)


def test_a_single_entry_comes_back_exactly() -> None:
    for world_size in (3, 4):
        g = torch.zeros(world_size, 200)
        g[:, 17] = -1.7
        mean = gw.simulate(g, gw.TernGrad(clip=None)).mean
        # N (s * float32(1 / N)) is s itself where N is a power of two, and within two roundings of it elsewhere.
        assert torch.allclose(mean, g[0], rtol=2 * 2**-23 if world_size == 3 else 0, atol=0)


def test_worst_case_of_the_relative_variance() -> None:
    """s = max|g|: at most (sqrt(d) - 1) / 2, attained by one large entry and equal ones of size 1 / (1 + sqrt(d))."""
    d = 400
    g = torch.full((1, d), 1 / (1 + math.sqrt(d)))
    g[0, 0] = 1.0
    link = gw.SimulatedLink([("w", torch.empty(d))], gw.TernGrad(clip=None), 1, min_numel=0)
    errors = [float((link.reduce_(g.clone()) - g[0]).square().sum() / g.square().sum()) for _ in range(400)]
    mean = sum(errors) / len(errors)
    deviation = math.sqrt(sum((e - mean) ** 2 for e in errors) / len(errors) ** 2)
    assert abs(mean - (math.sqrt(d) - 1) / 2) < 4 * deviation


def test_a_shared_scaler_adds_its_price() -> None:
    """Sharing a larger scaler adds exactly (s - s_i) |g_i|_1 to worker i's variance."""
    small, large = gaussian(20_000), 5 * gaussian(20_000, 1)
    g = torch.stack([small, large])
    noise = []
    for shared in (False, True):
        rounds = [gw.simulate(g, gw.TernGrad(clip=None, share_scaler=shared), round=r).mean for r in range(20)]
        noise.append(sum(float((m - g.mean(0)).double().square().sum()) for m in rounds) / 20)
    extra = float((large.abs().max() - small.abs().max()) * small.abs().sum()) / 4
    assert noise[1] - noise[0] == pytest.approx(extra, rel=0.05)


@pytest.mark.parametrize("world_size", [2, 3, 4, 7, 64])
def test_the_mean_is_an_integer_multiple(world_size: int) -> None:
    g = torch.stack([gaussian(1000, s) for s in range(world_size)])
    scale = g.abs().max()
    levels = gw.simulate(g, gw.TernGrad(clip=None)).mean * world_size / scale
    assert torch.allclose(levels, levels.round(), atol=1e-4)
    assert float(levels.abs().max()) <= world_size
    assert len(levels.round().unique()) > 2


@pytest.mark.parametrize(
    ("clip", "fraction", "norm_ratio", "angle", "variance"),
    [(2.0, 0.0455, 0.960, 5.8, 0.70), (2.5, 0.0124, 0.989, 2.76, 1.03), (3.0, 0.0027, 0.9975, 1.2, 1.40)],
)
def test_clipping_a_gaussian(clip: float, fraction: float, norm_ratio: float, angle: float, variance: float) -> None:
    g = gaussian(400_000)
    limit = clip * float(g.double().square().mean().sqrt())
    f = g.clamp(-limit, limit)
    assert float((g.abs() > limit).float().mean()) == pytest.approx(fraction, rel=0.05)
    assert float(f.norm() / g.norm()) == pytest.approx(norm_ratio, rel=0.002)
    cosine = float(f @ g / f.norm() / g.norm())
    assert math.degrees(math.acos(cosine)) == pytest.approx(angle, rel=0.05)
    got = gw.simulate(g[None], gw.TernGrad(clip=clip)).mean
    assert float((got - f).square().sum() / f.square().sum()) == pytest.approx(variance, rel=0.02)
    # The largest value that can come out is the threshold, on the positive and on the negative side.
    assert float(got.max()) == pytest.approx(limit, rel=1e-6)
    assert float(got.min()) == pytest.approx(-limit, rel=1e-6)


def test_each_worker_clips_at_its_own_threshold() -> None:
    """The paper clips before the scaler is shared, so a worker with a small gradient keeps its own threshold."""
    small = gaussian(5000)
    small[0] = 40.0
    large = 10 * gaussian(5000, 1)
    link = gw.SimulatedLink([("0", small)], "terngrad", 2, min_numel=0)
    # The mean is a view of what was given.
    rounds = [float(link.reduce_(torch.stack([small, large]))[0]) * 2 for _ in range(400)]
    limit_small, scale = (2.5 * float(x.double().square().mean().sqrt()) for x in (small, large))
    mean = sum(rounds) / len(rounds)
    expected = limit_small + float(large[0])
    # Each of the two trits has a standard deviation of at most scale / 2.
    assert abs(mean - expected) < 4 * scale / 2 * math.sqrt(2 / 400)
    # Clipping at the shared threshold instead would have given this, which the tolerance excludes.
    assert abs(scale + float(large[0]) - mean) > 4 * scale / 2 * math.sqrt(2 / 400)


@pytest.mark.parametrize("clip_by", ["rms", "std"])
def test_a_constant_parameter_is_not_clipped_away(clip_by: str) -> None:
    g = torch.full((2, 100), 0.5)
    assert torch.equal(gw.simulate(g, gw.TernGrad(clip_by=clip_by)).mean, g[0])


@pytest.mark.parametrize("value", [0.1, -1 / 3, 1e-30, 3e38])
def test_clipping_at_the_root_mean_square_keeps_a_constant(value: float) -> None:
    """The threshold of equal entries is their magnitude, to the last bit, whatever its binary digits."""
    for numel in (1, 77, 5000, 100_000):
        g = torch.full((2, numel), value)
        assert torch.equal(gw.simulate(g, gw.TernGrad(clip=1.0)).mean, g[0])


@pytest.mark.parametrize("share_scaler", [True, False])
@pytest.mark.parametrize("spread", [0.01, 0.2])
@pytest.mark.parametrize("backend", ["reference", "cpu", "cpu-plain"])
def test_a_gradient_with_a_mean_comes_back(backend: str, spread: float, share_scaler: bool) -> None:
    """1 + spread n within its declared law; the paper's threshold, about the mean, returns 2.5 spread instead."""
    numel, draws = 2000, 40
    g = torch.stack([1 + spread * gaussian(numel, seed) for seed in (0, 1)])
    target, variance = ternary(2.5, share_scaler)
    # No entry is 2.5 root mean squares from zero, so nothing is clipped.
    assert torch.equal(target(g), g)

    def mean_of(method: gw.Method) -> torch.Tensor:
        link = gw.SimulatedLink([("w", torch.empty(numel))], method, 2, min_numel=0, backend=backend)
        return torch.stack([link.reduce_(g.clone()).double() for _ in range(draws)]).mean(0)

    found = mean_of(gw.TernGrad(share_scaler=share_scaler))
    law = variance(g).sum(0) / 4 / draws
    # The sum of all elements, nearly normal: five of its deviations.
    assert abs(float((found - g.double().mean(0)).sum())) < 5 * math.sqrt(float(law.sum()))
    papers = mean_of(gw.TernGrad(clip_by="std", share_scaler=share_scaler))
    # Moments truncate values by 2^-23 at most, which moves the deviation by no more; then float32 rounds.
    deviation = float(g.double().std(1, correction=0).max()) + 2**-23
    assert float(papers.abs().max()) <= 2.5 * deviation * (1 + 2**-23)


def test_both_thresholds_agree_where_the_mean_is_zero() -> None:
    """Up to what float64 rounds: the same float32 threshold, hence the same bits."""
    half = gaussian(10_000)
    g = torch.cat([half, -half])[None]
    for share_scaler in (True, False):
        found = [gw.simulate(g, gw.TernGrad(clip_by=word, share_scaler=share_scaler)).mean for word in ("rms", "std")]
        assert torch.equal(*found)
    # A sample's mean is not zero: threshold^2 differs by mean^2, a part in numel.
    g = gaussian(100_000)[None]
    largest = [float(gw.simulate(g, gw.TernGrad(clip_by=word)).mean.max()) for word in ("rms", "std")]
    mean, std = float(g.double().mean()), float(g.double().std(correction=0))
    assert largest[0] / largest[1] == pytest.approx(math.sqrt(1 + (mean / std) ** 2), rel=1e-6)


def test_one_worker_s_payload_is_unbiased_for_small_entries() -> None:
    """The comparison's direction: an entry of a tenth of the scaler fires in a tenth of the draws."""
    g = torch.full((1, 8000), 0.1)
    g[0, 0] = 1.0
    fired = float((gw.simulate(g, gw.TernGrad(clip=None)).mean[1:] != 0).float().mean())
    assert abs(fired - 0.1) < 4.5 * math.sqrt(0.09 / 7999)
