"""Natural compression and natural dithering, by number of the paper's property (docs/methods/natural.md)."""

from __future__ import annotations

import math

import pytest
import torch

import gradwire as gw
from laws import levels, natural

N, M = 2.0**-126, torch.finfo(torch.float32).max


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def many(value: float, draws: int = 4000, round: int = 0) -> torch.Tensor:
    """Draws for one value: elements of a vector have independent random numbers."""
    return gw.simulate(torch.full((1, draws), value), gw.Natural(), round=round).mean.double()


def test_the_variance_is_at_most_an_eighth() -> None:
    """1: tight at 4/3 of a power of two; 0.0794 for uniform mantissas."""
    t = torch.logspace(-30, 30, 20001, base=2.0, dtype=torch.float64)[None].float()
    assert float((natural(t) / t.double().square()).max()) <= 1 / 8
    found = many(4 / 3 * 2.0**-9)
    # (draws) Bernoulli variables with p = 1/3: the deviation of the mean square is below 1.5 %.
    assert float((found * 2**9 * 0.75 - 1).square().mean()) == pytest.approx(1 / 8, rel=0.08)
    mantissa = 1 + torch.rand(1, 200_000, generator=torch.Generator().manual_seed(0))
    mean = gw.simulate(mantissa, gw.Natural()).mean
    assert float(((mean - mantissa[0]) / mantissa[0]).square().mean()) == pytest.approx(0.0794, rel=0.01)


@pytest.mark.parametrize("value", [1.1, -1.5, 1.999, 3e-20, -5e30])
def test_a_value_goes_to_its_neighbours_with_the_right_probability(value: float) -> None:
    """1: the direction of the comparison, and unbiasedness for single values."""
    found, low = many(value), 2.0 ** math.floor(math.log2(abs(value)))
    assert set((found.abs() / low).tolist()) == {1.0, 2.0}
    p = abs(value) / low - 1
    assert float((found.abs() == 2 * low).double().mean()) == pytest.approx(p, abs=4.5 * math.sqrt(p * (1 - p) / 4000))


def test_signs_range_and_scaling() -> None:
    """2: signs stay, |C(t)| in [|t|/2, 2|t|], and C(2^k x) = 2^k C(x), the same draws giving the same bits."""
    g = gaussian(1, 5000)
    found = gw.simulate(g, gw.Natural()).mean
    ratio = found / g[0]
    assert bool(((ratio >= 0.5) & (ratio <= 2)).all())
    for k in (-40, 3, 60):
        assert torch.equal(gw.simulate(g * 2.0**k, gw.Natural()).mean, found * 2.0**k)


def test_powers_of_two_are_exact_and_it_is_idempotent() -> None:
    """3."""
    powers = torch.tensor([[2.0**k for k in range(-126, 128)] + [0.0, -0.0, -1.0, -(2.0**-126)]])
    for round in range(5):
        assert torch.equal(gw.simulate(powers, gw.Natural(), round=round).mean, powers[0])
        once = gw.simulate(gaussian(1, 1000), gw.Natural(), round=round).mean
        assert torch.equal(gw.simulate(once[None], gw.Natural(), round=round + 1).mean, once)


def test_composition_multiplies_the_second_moments() -> None:
    """4: both errors add up; E|C_nat(Q) - g|^2 = E|Q - g|^2 + E natural(Q) <= 9w/8 + 1/8 of |g|^2."""
    g, inner = gaussian(1, 51_200), gw.QSGDinf(levels=1)
    first = levels(range(2), 512, "max")(g).sum()
    # A block's values are 0 or its scale R: |v|_1 / R of them, each rounded with the variance of R.
    blocks = g.view(-1, 512).double()
    scale = blocks.abs().amax(1)
    second = (blocks.abs().sum(1) / scale * natural(scale.float())).sum()
    assert float(second / first) > 0.05, "else nothing could be told"
    errors = []
    for round in range(10):
        middle = gw.simulate(g, inner, round=round).mean
        errors.append(float((gw.simulate(middle[None], gw.Natural(), round=round, seed=1).mean - g[0]).square().sum()))
    # 512 000 squares of errors of a scale of about 3, one in four not zero: a relative deviation of 0.4 %.
    assert sum(errors) / 10 == pytest.approx(float(first + second), rel=0.02)
    omega = float(first / g.square().sum())
    assert float((first + second) / g.square().sum()) <= 9 * omega / 8 + 1 / 8


def test_rounding_to_integers_has_no_bound() -> None:
    """5: why powers of two: t (1 - t) / t^2 of rounding to integers grows as 1 / t."""
    for t in (1e-2, 1e-4):
        assert t * (1 - t) / t**2 > 0.9 / t
        assert float((many(t) / t - 1).square().mean()) < 1 / 8 * 1.1


def test_subnormal_numbers_are_unbiased() -> None:
    for part in (0.25, 0.75):
        found = many(N * part, 20_000)
        assert set(found.tolist()) == {0.0, N}
        assert float(found.mean() / N) == pytest.approx(part, abs=4.5 * math.sqrt(part * (1 - part) / 20_000))


def test_the_largest_numbers_saturate_and_special_ones_reach_everybody() -> None:
    assert set(many(1.9 * 2.0**127).tolist()) == {2.0**127}
    assert set(many(-M).tolist()) == {-(2.0**127)}
    for special in (torch.inf, -torch.inf, torch.nan):
        g = gaussian(3, 300)
        g[1, 100] = special
        g[2, 101] = -special
        mean = gw.simulate(g, gw.Natural()).mean
        assert bool((mean[100:102] == torch.inf).all())
        assert int(torch.isfinite(mean).sum()) == 298


def test_error_feedback_takes_it() -> None:
    """An eighth is a contraction; conservation: output + residual = gradient."""
    g = gaussian(2, 1000)
    found = gw.simulate(g, gw.ErrorFeedback(compressor=gw.Natural()))
    residual = torch.stack([found.state[f"rank {r}"]["residual/0"] for r in (0, 1)])
    assert torch.allclose(found.mean + residual.mean(0), g.mean(0), atol=1e-6)
    assert float(residual.square().sum() / g.square().sum()) == pytest.approx(0.0794, rel=0.1)


@pytest.mark.parametrize("norm", ["l2", "max"])
@pytest.mark.parametrize("s", [1, 3, 8])
def test_dithering_bound(norm: str, s: int) -> None:
    """6: 1/8 + t min(1, t), t = sqrt(d) 2^(1-s), is no less than what is declared, nor than any vector's variance."""
    for size in (16, 256, 4096):
        t = math.sqrt(size) * 2.0 ** (1 - s)
        bound = 1 / 8 + t * min(1, t)
        assert gw.NaturalDithering(levels=s, norm=norm, block_size=size).omega <= bound
        law = levels([0, *(2.0**j for j in range(s))], size, norm)
        for a in (1e-3, 2.0**-s, 0.1, 0.7):
            v = torch.full((1, size), a)
            v[0, 0] = 1.0
            assert float(law(v).sum() / v.square().sum()) <= bound + 1e-6
        v = gaussian(1, size)
        assert float(law(v).sum() / v.square().sum()) <= bound


def test_dithering_is_natural_compression_of_even_levels() -> None:
    """7: in law: the same probability of every level."""
    v = torch.tensor([0.9, 0.3, 0.2, 0.05, 0.01]).repeat_interleave(4000)
    v = torch.cat([v, torch.ones(1)])[None]
    direct = gw.simulate(v, gw.NaturalDithering(levels=4, norm="max")).mean
    even = gw.simulate(v, gw.QSGDinf(levels=8, block_size=None)).mean
    twice = gw.simulate(even[None], gw.Natural(), seed=1).mean
    for part in range(5):
        ours, theirs = (x[4000 * part : 4000 * (part + 1)] for x in (direct, twice))
        for level in (0.0, 0.125, 0.25, 0.5, 1.0):
            p, q = (float((x == level).double().mean()) for x in (ours, theirs))
            # Two means of 4000 draws each.
            assert abs(p - q) <= 4.5 * math.sqrt((p * (1 - p) + q * (1 - q)) / 4000)


def test_dithering_in_the_euclidean_norm_is_nuqsgd() -> None:
    g = gaussian(2, 3000)
    ours, theirs = gw.NaturalDithering(levels=7, block_size=512), gw.NUQSGD(levels=7)
    assert torch.equal(gw.simulate(g, ours).mean, gw.simulate(g, theirs).mean)


def test_gradient_descent_on_a_quadratic_reaches_the_optimum() -> None:
    """9 where all agree: noise of an eighth of the gradient's square vanishes with it; eta = 0.5 < 2 / (1 + 1/8)."""
    x, target = torch.zeros(512), gaussian(512, seed=3)
    for round in range(80):
        x = x - 0.5 * gw.simulate((x - target)[None], gw.Natural(), round=round).mean
    # E shrinks by (1 - eta)^2 + eta^2 / 8 = 0.28 a step or faster, to float32's resolution of the target.
    assert float((x - target).norm() / target.norm()) < 1e-6


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ("NaturalDithering(levels=0)", "1 to 100"),
        ("NaturalDithering(norm='l1')", "'l2' or 'max'"),
        ("NaturalDithering(block_size=8)", "multiple of 16"),
        ("Natural(levels=2)", "unknown field"),
    ],
)
def test_fields_out_of_range_are_refused(spec: str, part: str) -> None:
    with pytest.raises(gw.HyperparameterError, match=part):
        gw.method(spec)
