"""ALQ and AMQ: fitted levels, their schedule, their exchange, their place in a checkpoint."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy import integrate, stats

import gradwire as gw
from gradwire.exchange.drivers import Meter, simulate_ranks
from gradwire.exchange.protocols import Context, Memory
from gradwire.exchange.segments import Parameter, lay_out
from gradwire.kernels import get_kernels
from gradwire.kernels.entropy import tables as huffman_codes
from gradwire.methods.levels import level_fitting
from gradwire.methods.levels.level_fitting import Mixture, best_levels, best_ratio, powers
from laws import Law, fitted
from laws import levels as variance_of
from plans import make_plan


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


@pytest.mark.parametrize("seed", range(3))
def test_a_sweep_never_raises_the_objective_and_keeps_the_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Properties 2 and 4: from any levels, sweep by sweep; a level that has been moved has a derivative of zero."""
    m, generator = (gaussian(64), gaussian(1024), skewed())[seed], torch.Generator().manual_seed(seed)
    monkeypatch.setattr(level_fitting, "SWEEPS", 1)
    inner = (torch.rand(6, generator=generator) * 1.9 - 0.95).sort().values.tolist()
    levels, costs = [-1.0, *inner, 1.0], []
    for _ in range(12):
        costs.append(m.variance(levels))
        levels = level_fitting._descend(m, levels)
        assert all(a < b for a, b in itertools.pairwise(levels))
        # The last of a sweep: the integrals of r - c below the level and of r - d above it cancel.
        c, level, d = levels[-3:]
        (mass, first, _), (above, second, _) = m.moments(c, level), m.moments(level, d)
        slope = (first - c * mass) + (second - d * above)
        # The inverse of F is found to 2 / 16^8 of a unit.
        assert abs(slope) <= 1e-8 + 1e-6 * (first - c * mass)
    assert all(after <= before * (1 + 1e-9) for before, after in itertools.pairwise(costs))
    assert costs[-1] < 0.9 * costs[0]


def test_probabilities_of_levels_and_their_huffman_code() -> None:
    """Property 5: what the model says of how often a level is taken; it adds up to one and is what is seen."""
    for count in (4, 8, 16):
        m = gaussian(1024)
        levels = best_levels(m, count)
        p = probabilities(m, levels)
        assert sum(p) == pytest.approx(1, abs=1e-12)
        counts = np.zeros(256, np.int64)
        counts[:count] = [max(1, round(x * 10**7)) for x in p]
        size = np.zeros(256, np.int64)
        scratch = (
            np.zeros(256, np.int64),
            np.zeros((2, 512), np.int64),
            np.zeros((huffman_codes.MAX_LENGTH, 512), np.uint8),
        )
        huffman_codes.choose_lengths(counts, size, *scratch)
        used = counts[:count] / counts.sum()
        entropy, mean = -(used * np.log2(used)).sum(), float((used * size[:count]).sum())
        # Codes are limited to eleven bits, which costs levels rarer than 2^-11 alone: the two ends.
        assert entropy <= mean < entropy + 1
    g = torch.randn(1, 1024 * 100, generator=torch.Generator().manual_seed(0))
    found = gw.simulate(g, gw.ALQ(block_size=1024))
    levels = found.state["global"]["levels"]
    steps = (found.mean.view(-1, 1024) / g.view(-1, 1024).norm(dim=1, keepdim=True)).double()
    number = (steps[..., None] - levels).abs().argmin(-1).flatten()
    seen = torch.bincount(number, minlength=8) / number.numel()
    p = probabilities(gaussian(1024), levels.tolist())
    # Frequencies among 102400 values, and blocks whose deviation is not quite that of the model: 5 % of the tails.
    assert all(abs(float(a) - b) <= 5 * (b / 102_400) ** 0.5 + 0.02 * b for a, b in zip(seen, p))


def probabilities(m: Mixture, levels: list[float]) -> list[float]:
    found = [0.0] * len(levels)
    for j, (a, b) in enumerate(itertools.pairwise(levels)):
        mass, first, _ = m.moments(a, b)
        found[j + 1] += (first - a * mass) / (b - a)
        found[j] += (b * mass - first) / (b - a)
    return found


def spread_of(ends: list[float], norm: str) -> Law:
    return variance_of(ends, None, norm)


def variance_bound(ends: list[float], size: int) -> float:
    """Property 7: (rho - 1)^2 / (4 rho) + inf over p of K_p l_1^(2-p) d^((2-p)/2), for levels 0 < l_1 < ... < 1."""
    rho = max((b / a for a, b in itertools.pairwise(ends)), default=1.0)
    below = [
        ((1 - p) / (2 - p)) ** (1 - p) / (2 - p) * ends[0] ** (2 - p) * size ** ((2 - p) / 2)
        for p in [k / 200 for k in range(1, 200)]
    ]
    return (rho - 1) ** 2 / (4 * rho) + min(below)


@pytest.mark.parametrize("norm", ["l2", "max"])
def test_any_levels_with_a_zero_have_the_papers_bound_and_others_have_not(norm: str) -> None:
    """Property 7. Levels without a zero, as these methods have, add d l^2, l the one next to zero: no bound holds."""
    generator = torch.Generator().manual_seed(0)
    for size in (16, 256, 4096):
        for _ in range(6):
            ends = [*torch.rand(4, generator=generator).double().add(1e-3).sort().values.tolist(), 1.1]
            ends = [e / 1.1 for e in ends]
            law, bound = spread_of([0, *ends], norm), variance_bound(ends, size)
            for power in (1, 3, 9):
                v = torch.randn(1, size, generator=generator) ** power
                assert float(law(v).sum() / v.square().sum()) <= bound
            flat = torch.full((1, size), ends[0] / 2)
            flat[0, 0] = 1.0
            assert float(law(flat).sum() / flat.double().square().sum()) <= bound
    # The first term is the worst of an interval of ratio rho, at r = 2 l h / (l + h).
    rho, low = 3.0, 1 / 3
    r = torch.tensor([[2 * low / (1 + low), 1.0]])
    worst = float(spread_of([0, low, 1], "max")(r)[0, 0] / r[0, 0].double().square())
    assert worst == pytest.approx((rho - 1) ** 2 / (4 * rho), rel=1e-6)
    without = spread_of([-low, low, 1], norm)
    one = torch.zeros(1, 4096)
    one[0, 0] = 1.0
    assert float(without(one).sum()) == pytest.approx(4095 * low**2, rel=1e-6)
    assert 4095 * low**2 > variance_bound([low, 1.0], 4096)


@pytest.mark.parametrize("method", [gw.ALQ, gw.ALQN, gw.AMQ, gw.AMQN], ids=lambda m: m.__name__)
def test_levels_are_those_of_all_workers_statistics(method: type[gw.ALQ]) -> None:
    """Property 9, and what is exchanged: mean, deviation and weight of the blocks of each worker that weigh most."""
    generator = torch.Generator().manual_seed(1)
    g = torch.randn(3, 8 * 256, generator=generator)
    # Unlike workers, a block of each without weight, and tails.
    g = (g * torch.tensor([[0.1], [1.0], [3.0]])) ** torch.tensor([[1], [3], [5]])
    # (A Euclidean norm makes every block's deviation 1 / 16 - but for its mean - and would leave nothing to tell.)
    one = method(block_size=256, kept=6, norm="max")
    state = gw.simulate(g, one).state
    scale = g.view(3, 8, 256).abs().amax(2)
    r = (g.view(3, 8, 256) / scale[:, :, None]).double()
    keep = scale.argsort(dim=1, descending=True)[:, :6]
    mean, std, scale = (x.gather(1, keep).flatten() for x in (r.mean(2), r.std(2, correction=0), scale.double()))
    if one.weighted:
        mixture = Mixture(mean, std, scale.square())
    else:
        kept = torch.cat([r[i, k] for i, k in enumerate(keep)]).flatten()
        mixture = Mixture(kept.mean()[None], kept.std(correction=0)[None], torch.ones(1))
    expected = powers(best_ratio(mixture, 8), 8) if issubclass(method, gw.AMQ) else best_levels(mixture, 8)
    # Statistics travel in float32; the objective is flat at its minimum, levels move by the root of that.
    found = state["global"]["levels"].tolist()
    assert found == pytest.approx(expected, abs=2e-3)
    assert found == gw.simulate(g, one).state["global"]["levels"].tolist()
    alone = gw.simulate(g[:1], one).state["global"]["levels"].tolist()
    assert max(abs(a - b) for a, b in zip(alone, found)) > 0.05


def test_every_rank_has_the_same_levels_bit_for_bit() -> None:
    """Property 9: each rank's own memory, after an exchange of unlike gradients."""
    parameters = [Parameter("w", (4000,), (1,))]
    plan = make_plan(
        gw.ALQ(block_size=512), lay_out(parameters), kernels=get_kernels("cpu"), world_size=3, collective="all_gather",
        seed=0, chunk_numel=1 << 20,
    )  # fmt: skip
    memories = [Memory() for _ in range(3)]
    rows = torch.randn(3, 4000, generator=torch.Generator().manual_seed(0)) ** torch.tensor([[1], [3], [5]])
    simulate_ranks([plan.whole(Context(r, 3, 0, memory=m), rows[r]) for r, m in enumerate(memories)], [Meter()] * 3)
    for memory in memories:
        memory.commit()
    first, *others = (memory.state()["global"]["levels"] for memory in memories)
    assert all(torch.equal(first, other) for other in others)
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])


@pytest.mark.parametrize(("size", "expected"), [(128, 0.172), (1024, 0.202), (8192, 0.223)])
def test_levels_fitted_to_a_gradient_have_the_variance_of_the_optimum(size: int, expected: float) -> None:
    """Property 8, of what statistics of a Gaussian gradient lead to; draws are held to this law in the shared tests."""
    g = torch.randn(1, 1 << 17, generator=torch.Generator().manual_seed(size))
    law = fitted(gw.ALQ(block_size=size))(g)
    # A tenth of it comes from the hundred values beyond the last inner level: 1 %; half a digit of the table: 0.3 %.
    assert float(law.sum() / g.square().sum()) == pytest.approx(expected, rel=0.03)


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
    codec = gw.NUQSGD(levels=4, zero=False).codec(get_kernels("reference"), [], 2, 0)
    assert codec.grid.values.tolist() == powers(0.5, 8)


@pytest.mark.parametrize("block_size", [1 << 10, 1 << 15, 1 << 20])
def test_few_levels_on_long_blocks_take_a_ratio_as_small_as_it_must_be(block_size: int) -> None:
    m = gaussian(block_size)
    found = m.variance(powers(best_ratio(m, 4), 4))
    assert found <= 1.001 * min(m.variance(powers(10**-e, 4)) for e in torch.linspace(0.05, 4, 80).tolist())


def test_magnitudes_near_the_end_of_float32_leave_levels_that_serve() -> None:
    """Blocks whose norms float32 cannot hold count alike, none without end.

    Their scale is float32's largest number, which is nearer to the values than the norm: fitted levels then lose less.
    """
    g = torch.randn(2, 1 << 15, generator=torch.Generator().manual_seed(0))
    small, large = (gw.simulate(g * scale, gw.ALQ(block_size=8192)).mean / scale for scale in (1.0, 2.0**123))
    assert float((large - g.mean(0)).square().mean()) < float((small - g.mean(0)).square().mean())


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
    assert [b - min(per_round) for b in per_round] == [112 + 2 * 32 if r in (0, 3, 5) else 0 for r in range(8)]
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


@pytest.mark.parametrize(
    ("saved", "method"),
    [
        (gw.ALQ(norm="max"), gw.ALQ()),
        (gw.ALQ(block_size=64), gw.ALQ(block_size=2048)),
        (gw.ALQ(), gw.AMQ()),
        (gw.AMQN(block_size=512), gw.AMQ(block_size=512)),
        (gw.AMQ(bits=4), gw.AMQ(bits=3)),
    ],
    ids=repr,
)
def test_levels_fitted_for_another_method_are_fitted_anew_at_once(saved: gw.Method, method: gw.Method) -> None:
    g = torch.randn(2, 4000, generator=torch.Generator().manual_seed(1))
    # Blocks unlike one another, so that those with large norms weigh.
    g[:, 2000:] = g[:, 2000:] ** 5
    link, other, fresh = (gw.SimulatedLink([("w", torch.empty(4000))], m, 2) for m in (saved, method, method))
    for _ in range(2):
        link.reduce_(g.clone())
    other.load_state_dict(link.state_dict())
    fresh.round = other.round
    assert torch.equal(other.reduce_(g.clone()), fresh.reduce_(g.clone()))
    assert torch.equal(other.state_dict()["global"]["levels"], fresh.state_dict()["global"]["levels"])


def test_levels_that_do_not_say_what_they_were_fitted_for_are_fitted_anew() -> None:
    """States of old say nothing."""
    g = torch.randn(2, 4000, generator=torch.Generator().manual_seed(1))
    link, fresh = (gw.SimulatedLink([("w", torch.empty(4000))], gw.ALQ(), 2) for _ in range(2))
    link.load_state_dict(
        {
            "global": {
                "round": torch.tensor(3),
                "link": torch.tensor(0),
                "levels": torch.linspace(-1, 1, 8, dtype=torch.float64),
            },
            "replicated": {},
            "rank 0": {},
        }
    )
    fresh.round = 3
    assert torch.equal(link.reduce_(g.clone()), fresh.reduce_(g.clone()))


@pytest.mark.parametrize("method", ["ALQ", "ALQ(model='histogram')", "AMQ", "ALQ(overlap=True, blocks='parameter')"])
def test_levels_are_not_fitted_to_zeros(method: str) -> None:
    """A first round of zeros on all ranks is followed as if it had not been; a later one leaves the levels alone."""
    rows = torch.randn(2, 9000, generator=torch.Generator().manual_seed(0))
    link, other = (gw.SimulatedLink([("w", torch.empty(9000))], method, 2, min_numel=0) for _ in range(2))
    link.reduce_(torch.zeros(2, 9000))
    for each in (link, other):
        each.reduce_(rows.clone())
    levels = [each.state_dict()["global"]["levels"] for each in (link, other)]
    assert torch.equal(*levels)
    state = link.state_dict()
    state["global"]["round"] = torch.tensor(100)
    link.load_state_dict(state)
    link.reduce_(torch.zeros(2, 9000))
    assert torch.equal(link.state_dict()["global"]["levels"], levels[0])
