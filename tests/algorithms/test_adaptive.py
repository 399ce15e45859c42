"""ALQ and AMQ: fitted levels, their schedule, their exchange, their place in a checkpoint."""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy import integrate, stats

import gradwire as gw
from gradwire.algorithms.normals import Mixture, best_levels, best_ratio, powers


def gaussian(block_size: int) -> Mixture:
    return Mixture(torch.zeros(1), torch.tensor([block_size**-0.5]), torch.ones(1))


def skewed() -> Mixture:
    return Mixture(*(torch.tensor(x, dtype=torch.float64) for x in ([0.1, -0.3], [0.05, 0.6], [1.0, 3.0])))


def test_integrals_against_quadrature() -> None:
    m = skewed()

    def density(r: float) -> float:
        total = 0.0
        for mean, std, weight in ((0.1, 0.05, 0.25), (-0.3, 0.6, 0.75)):
            law = stats.norm(mean, std)
            total += weight * law.pdf(r) / (law.cdf(1) - law.cdf(-1))
        return total

    for a, b in ((-1, 1), (-0.2, 0.15), (0.1, 0.11), (-1, -0.9)):
        for k, found in enumerate(m.moments(a, b)):
            expected = integrate.quad(lambda r, k=k: r**k * density(r), a, b, points=[0.1] if a < 0.1 < b else None)[0]
            assert found == pytest.approx(expected, abs=1e-9)
        assert m.cdf(b) - m.cdf(a) == pytest.approx(m.moments(a, b)[0], abs=1e-12)
    levels = [-1, -0.4, 0.05, 0.3, 1]
    expected = sum(
        integrate.quad(lambda r, a=a, b=b: (b - r) * (r - a) * density(r), a, b, limit=200)[0]
        for a, b in itertools.pairwise(levels)
    )
    assert m.variance(levels) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("mixture", [gaussian(64), gaussian(8192), skewed()], ids=["64", "8192", "skewed"])
def test_the_optimum_is_stationary_and_better_than_where_it_began(mixture: Mixture) -> None:
    """Property 2: no level moves, and no shift of one lowers the objective."""
    levels = best_levels(mixture, 8)
    assert levels == sorted(levels)
    assert (levels[0], levels[-1]) == (-1, 1)
    best = mixture.variance(levels)
    assert best <= mixture.variance(powers(0.5, 8))
    assert best <= mixture.variance([-1 + 2 * j / 7 for j in range(8)])
    for j in range(1, 7):
        for way in (-1, 1):
            other = list(levels)
            other[j] += way * 1e-3 * (levels[j + 1] - levels[j - 1])
            assert mixture.variance(other) >= best * (1 - 1e-9)


def test_an_even_distribution_has_even_levels() -> None:
    """Property 3: one normal so wide that it is flat on [-1, 1]."""
    flat = Mixture(torch.zeros(1), torch.tensor([1000.0]), torch.ones(1))
    assert best_levels(flat, 5) == pytest.approx([-1, -0.5, 0, 0.5, 1], abs=1e-4)
    assert best_levels(flat, 3)[1] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("block_size", "alq", "inner", "with_zero", "amq", "ratio"),
    [
        (128, 0.172, (0.39, 1.24, 2.57), 0.254, 0.256, 0.35),
        (1024, 0.202, (0.42, 1.36, 3.01), 0.308, 0.366, 0.25),
        (8192, 0.223, (0.44, 1.45, 3.37), 0.348, 0.527, 0.16),
        (16384, 0.229, (0.44, 1.47, 3.48), 0.359, 0.593, 0.13),
    ],
)
def test_gaussian_blocks(
    block_size: int, alq: float, inner: tuple[float, ...], with_zero: float, amq: float, ratio: float
) -> None:
    """Property 8, to the digits of its table."""
    m = gaussian(block_size)
    levels = best_levels(m, 8)
    assert m.variance(levels) * block_size == pytest.approx(alq, abs=6e-4)
    assert [x * block_size**0.5 for x in levels[4:7]] == pytest.approx(inner, abs=6e-3)
    assert m.variance(best_levels(m, 7)) * block_size == pytest.approx(with_zero, abs=6e-4)
    p = best_ratio(m, 8)
    assert m.variance(powers(p, 8)) * block_size == pytest.approx(amq, abs=6e-4)
    assert p == pytest.approx(ratio, abs=6e-3)


def test_ratio_one_half_is_nuqsgd_without_a_zero() -> None:
    """Property 6."""
    assert powers(0.5, 8) == [-1, -0.5, -0.25, -0.125, 0.125, 0.25, 0.5, 1]


def test_the_ratio_is_stationary_by_the_papers_gradient() -> None:
    """The derivative of the objective in p, in the paper's closed form, for a normal with mean and deviation."""
    import math

    mean, std, s = 0.0, 0.05, 3
    law = stats.norm(mean, std)
    mass = law.cdf(1) - law.cdf(-1)

    def gradient(p: float) -> float:
        total = 2 * s * p ** (2 * s - 1) * (law.cdf(p**s) - law.cdf(0))
        for j in range(s):
            a = j * p ** (j - 1) + (j + 1) * p**j if j else 1.0
            total += (mean * a - (2 * j + 1) * p ** (2 * j)) * (law.cdf(p**j) - law.cdf(p ** (j + 1)))
            total += std**2 * a * (law.pdf(p ** (j + 1)) - law.pdf(p**j))
        return 2 * total / mass

    m = Mixture(*(torch.tensor([x], dtype=torch.float64) for x in (mean, std, 1.0)))
    for p in (0.1, 0.25, 0.5):
        h = 1e-6
        slope = (m.variance(powers(p + h, 8)) - m.variance(powers(p - h, 8))) / (2 * h)
        assert gradient(p) == pytest.approx(slope, rel=1e-4, abs=1e-8)
    assert math.isclose(gradient(best_ratio(m, 8)), 0, abs_tol=1e-5)


def test_levels_are_fitted_on_schedule_exchanged_and_kept() -> None:
    method = gw.ALQ(block_size=512, updates=(0, 3), every=5, kept=4)
    generator = torch.Generator().manual_seed(0)
    link = gw.SimulatedLink([("w", torch.empty(4000))], method, 2)
    seen, sent = [], []
    for round in range(8):
        # Heavier tails from round to round, so that every fit gives other levels.
        g = torch.randn(2, 4000, generator=generator) ** (1 + 2 * (round // 2))
        link.reduce_(g)
        seen.append(link.state_dict()["global"]["levels"].tolist())
        sent.append(link.traffic().sent_bytes)
    per_round = [b - a for a, b in itertools.pairwise([0, *sent])]
    changed = [round for round in range(1, 8) if seen[round] != seen[round - 1]]
    assert changed == [3, 5]
    # An update sends, to the other worker, three float32 of four blocks and eight float64 levels.
    assert [b - min(per_round) for b in per_round] == [112 if r in (0, 3, 5) else 0 for r in range(8)]
    other = gw.SimulatedLink([("w", torch.empty(4000))], method, 2)
    other.load_state_dict(link.state_dict())
    g = torch.randn(2, 4000, generator=generator)
    assert torch.equal(other.reduce_(g.clone()), link.reduce_(g.clone()))


def test_hostile_gradients_fit_something() -> None:
    for g in (torch.zeros(2, 2000), torch.full((2, 2000), 1e-40), torch.eye(2, 2000) * 1e30):
        mean = gw.simulate(g, gw.ALQ(block_size=512)).mean
        assert bool(torch.isfinite(mean).all())
    g = torch.randn(2, 2000)
    g[1, 5] = torch.inf
    assert not bool(torch.isfinite(gw.simulate(g, gw.AMQ(block_size=512)).mean).all())


def test_a_round_with_an_infinity_keeps_no_levels() -> None:
    link = gw.SimulatedLink([("w", torch.empty(2000))], gw.ALQ(), 2)
    g = torch.randn(2, 2000)
    g[0, 0] = torch.nan
    link.reduce_(g)
    assert "levels" not in link.state_dict()["global"]
    link.reduce_(torch.randn(2, 2000))
    assert "levels" in link.state_dict()["global"]
