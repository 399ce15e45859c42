"""Mixtures of many workers' blocks: what is merged before levels are fitted, and that the fit is none the worse."""

from __future__ import annotations

import pytest
import torch

import gradwire as gw
from gradwire.methods.levels import level_fitting
from gradwire.methods.levels.level_fitting import Mixture, best_levels, best_ratio, powers


def hard(workers: int, blocks: int) -> Mixture:
    """Deviations over four decades, means up to half the interval away, weights over several decades."""
    generator = torch.Generator().manual_seed(1)

    def draw() -> torch.Tensor:
        return torch.rand(workers * blocks, generator=generator, dtype=torch.float64)

    std = 0.9 * 10 ** (-4 * draw())
    return Mixture((draw() - 0.5) * draw(), std, 10 ** (4 * draw()))


def test_merged_components_keep_the_moments_and_few_are_left_alone() -> None:
    m = hard(16, 100)
    small = m.merged()
    assert len(small.mean) == level_fitting.COMPONENTS
    assert small.merged() is small
    # Of the normals themselves, sums of 1600 in float64; truncation changes those of the widest.
    for power in (lambda x: 1.0, lambda x: x.mean, lambda x: x.mean**2 + x.std**2):
        assert float((small.share * power(small)).sum()) == pytest.approx(float((m.share * power(m)).sum()), rel=1e-12)
    for ours, theirs in zip(small.moments(-1, 1), m.moments(-1, 1)):
        assert ours == pytest.approx(theirs, abs=1e-4)


def test_components_alike_become_one_and_those_without_weight_none() -> None:
    n = 2 * level_fitting.COMPONENTS
    columns = torch.tensor([[0.1, -0.3, 0.0], [0.05, 0.6, 0.1], [1.0, 3.0, 0.0]], dtype=torch.float64)
    small = Mixture(*columns.repeat(1, n)).merged()
    assert len(small.mean) == 2
    order = small.mean.argsort(descending=True)
    assert small.mean[order].tolist() == pytest.approx([0.1, -0.3], rel=1e-12)
    assert small.std[order].tolist() == pytest.approx([0.05, 0.6], rel=1e-12)
    assert small.share[order].tolist() == pytest.approx([0.25, 0.75], rel=1e-12)


@pytest.mark.parametrize("count", [8, 16])
def test_levels_of_merged_components_are_as_good_as_those_of_all(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 0.1 %, by the objective of all components."""
    m = hard(16, 100)
    merged = m.variance(best_levels(m, count))
    ratio = m.variance(powers(best_ratio(m, count), count))
    monkeypatch.setattr(level_fitting, "COMPONENTS", len(m.mean))
    assert merged <= 1.001 * m.variance(best_levels(m, count))
    assert ratio <= 1.001 * m.variance(powers(best_ratio(m, count), count))


@pytest.mark.parametrize("count", [4, 8, 16, 32])
def test_no_start_leads_to_better_levels(count: int) -> None:
    """The minimum is the best of many: by descent from quantiles, even, exponential and random levels."""
    m = hard(4, 50)
    generator, best = torch.Generator().manual_seed(0), m.variance(best_levels(m, count))
    even = [-1 + 2 * j / (count - 1) for j in range(count)]
    starts = [even, [-1, *level_fitting._quantiles(m, count - 1).tolist(), 1], powers(0.5, count)]
    for power in (1, 3, 5):
        inner = (2 * torch.rand(count - 2, generator=generator, dtype=torch.float64) - 1) ** power
        starts.append([-1, *inner.sort().values.tolist(), 1])
    for start in starts:
        # A descent may end a little above the minimum that it would reach in more sweeps.
        assert best <= 1.001 * m.variance(level_fitting._descend(m, start))


def test_levels_are_even_where_nothing_is_known() -> None:
    """Blocks of zeros have no weight: the next rounds' gradients are served by any levels but those at one end."""
    nothing = Mixture(torch.zeros(3), torch.zeros(3), torch.zeros(3))
    assert best_levels(nothing, 8) == pytest.approx([-1 + 2 * j / 7 for j in range(8)], abs=0.05)


def test_a_fit_to_sixteen_workers_needs_no_more_than_a_few_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    """All other ranks wait for it: error functions of levels and components are what takes the time."""
    m, evaluated, original = hard(16, 350), [], Mixture._normal

    def counted(self: Mixture, points: torch.Tensor) -> torch.Tensor:
        evaluated.append((len(points), len(self.mean)))
        return original(self, points)

    monkeypatch.setattr(Mixture, "_normal", counted)
    gw.ALQ(bits=4).fit(m, powers(0.5, 16))
    assert max(components for _, components in evaluated) <= level_fitting.COMPONENTS
    # In a half sweep seven levels at most, each with twenty evaluations; before, as many of the places.
    most = (level_fitting.SWEEPS * 2 * 7 * 20 + 20 * level_fitting.PLACES) * level_fitting.COMPONENTS
    assert sum(points * components for points, components in evaluated) <= most


def test_an_inverse_is_found_where_density_vanishes() -> None:
    """Between two narrow peaks, within one, and at the very ends."""
    m = Mixture(*(torch.tensor(x, dtype=torch.float64) for x in ([-0.5, 0.5], [1e-5, 1e-5], [1.0, 1.0])))
    wanted = torch.tensor([0.0, 1e-9, 0.25, 0.5, 0.75, 1.0], dtype=torch.float64)
    ends = torch.tensor([[-1.0], [1.0]], dtype=torch.float64).expand(2, 6)
    found = m.inverse(wanted, *ends)
    assert bool(((found >= -1) & (found <= 1)).all())
    # A place to 2^-32, times the largest density: 0.5 / (1e-5 sqrt(2 pi)).
    assert (m.distribution(found) - wanted).abs().max() <= 2.0**-32 * 2e4
