"""Sketched-SGD, by number of the property in the paper's summary (docs/properties.md)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import gradwire as gw
from gradwire.exchange.drivers import Meter, simulate_ranks
from gradwire.exchange.protocols import Context
from gradwire.exchange.protocols.bucket_plan import PlanSetting
from gradwire.exchange.segments import Parameter, lay_out
from gradwire.kernels import SegmentTable, get_kernels
from gradwire.seeds import SHARED, parameter_key
from joined import joined_rows
from plans import make_plan

REFERENCE = get_kernels("reference")


def heavy(workers: int, numel: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(workers, numel, generator=generator)
    return g * torch.randn(numel, generator=generator).mul(1.5).exp()


def link(method: gw.Method, numel: int, workers: int, **options: object) -> gw.SimulatedLink:
    return gw.SimulatedLink([("w", torch.empty(numel))], method, workers, min_numel=0, **options)  # type: ignore[arg-type]


def held(link: gw.SimulatedLink, workers: int, kind: str = "residual") -> torch.Tensor:
    return joined_rows(link, workers, kind)


def largest(x: torch.Tensor, k: int) -> torch.Tensor:
    return torch.sort(x.abs(), descending=True, stable=True).indices[:k].sort().values


def rounds(gradients: list[torch.Tensor], method: gw.SketchedSGD, seed: int = 0) -> list[torch.Tensor]:
    """The authors' program with a second round, on one vector; means of gradients where it adds them up."""
    workers, numel = gradients[0].shape
    table = SegmentTable([0], [numel], [0], [parameter_key(seed, "(model)", "sketch")])
    k, size = method.kept(numel), (method.rows, method.columns_of(numel))
    u, v, found = torch.zeros(workers, numel), torch.zeros(workers, numel), []
    for g in gradients:
        u = method.momentum * u + g
        v = v + u
        tables = torch.empty(workers, size[0] * size[1])
        for row, out in zip(v, tables):
            REFERENCE.sketch(row, table, *size, SHARED, out)
        estimates = torch.empty(numel)
        REFERENCE.unsketch(tables.mean(0), table, *size, SHARED, estimates)
        asked = largest(estimates, method.candidates * k)
        sums = v[:, asked].mean(0)
        kept = largest(sums, k)
        found.append(torch.zeros(numel).index_copy(0, asked[kept], sums[kept]))
        u[:, asked[kept]] = 0
        v[:, asked[kept]] = 0
    return found


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_rounds_are_the_authors(workers: int, momentum: float) -> None:
    """Of a power of two of workers, so that dividing before or after a sum is the same."""
    method = gw.SketchedSGD(rows=3, columns=200, density=0.01, momentum=momentum)
    gradients = [heavy(workers, 2000, seed) for seed in range(6)]
    ours = link(method, 2000, workers)
    for expected, g in zip(rounds(gradients, method), gradients):
        found = ours.reduce_(g.clone())
        assert torch.equal(found != 0, expected != 0)
        assert torch.allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("workers", "k", "momentum", "steps"),
    [
        (1, 2, 0.0, [(0.28, 0.34), (0.172, 0.204)]),
        (2, 2, 0.0, [(0.28, 0.34), (0.172, 0.204)]),
        (2, 2, 0.9, [(0.28, 0.34), (0.172, 0.204)]),
        (2, 1, 0.0, [(0.0, 0.34), (0.3288, 0.34)]),
        (2, 1, 0.9, [(0.0, 0.34), (0.5808, 0.34)]),
    ],
)
def test_a_small_regression_takes_the_steps_that_paper_and_pencil_give(
    workers: int, k: int, momentum: float, steps: list[tuple[float, float]]
) -> None:
    """4: squared errors of four rows; gradients are added up over workers, so the mean takes as many times the step."""
    x, y = torch.arange(8.0).view(4, 2), torch.arange(4.0)
    method = gw.SketchedSGD(columns=1 << 20, density=k / 2, momentum=momentum)
    ours, w = link(method, 2, workers), torch.zeros(2)
    for expected in steps:
        parts = zip(x.chunk(workers), y.chunk(workers))
        g = torch.stack([2 * a.T @ (a @ w - b) for a, b in parts])
        w = w - 0.005 * workers * ours.reduce_(g)
        assert w.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_values_are_exact_and_nothing_is_lost(workers: int) -> None:
    """5: outcome and residuals of all workers are their vectors; what was sent is gone from all of them."""
    ours, before = link(gw.SketchedSGD(density=0.01, columns=60), 3000, workers), torch.zeros(workers, 3000)
    for seed in range(5):
        vectors = before + heavy(workers, 3000, seed)
        mean = ours.reduce_(heavy(workers, 3000, seed))
        after, sent = held(ours, workers), mean != 0
        assert int(sent.sum()) == 30
        assert torch.equal(after[:, ~sent], vectors[:, ~sent])
        assert bool((after[:, sent] == 0).all())
        exact = vectors.double().mean(0)
        # A product and a sum are rounded for each worker, of terms that may cancel.
        scale = vectors.abs().double().mean(0)
        assert bool(((mean.double() - exact).abs()[sent] <= (workers + 1) * 2.0**-24 * scale[sent]).all())
        before = after


def test_with_many_columns_it_is_the_largest_of_the_mean() -> None:
    """6: of 2000 elements, three of five rows collide with a chance of 10 (2000 / 2^23)^3."""
    g = heavy(4, 2000)
    found = gw.simulate(g, gw.SketchedSGD(columns=1 << 23, density=0.02, candidates=1)).mean
    mean = g.mean(0)
    kept = largest(mean, 40)
    assert torch.allclose(found, torch.zeros(2000).index_copy(0, kept, mean[kept]), rtol=1e-5)


def test_heavy_elements_are_found_that_no_worker_sees_alone() -> None:
    """3: four elements of 40 000, each an eighth of any worker's largest one, but the same on all 16."""
    workers, numel = 16, 40_000
    generator = torch.Generator().manual_seed(1)
    g = 0.05 * torch.randn(workers, numel, generator=generator)
    common = [10, 9_999, 20_000, 39_999]
    g[:, common] += 1.0
    for rank in range(workers):
        # Pairs of workers whose large elements cancel.
        g[rank, 100 + rank // 2] += 8.0 * (-1) ** rank
    found = gw.simulate(g, gw.SketchedSGD(density=4 / numel, columns=400)).mean
    assert found.nonzero().flatten().tolist() == common


@pytest.mark.parametrize(("spread", "columns", "least", "most"), [
    (1.5, 1000, 0.85, 1.0), (1.5, 100, 0.3, 0.7), (0.0, 1000, 0.2, 0.35), (0.0, 100, 0.15, 0.35),
])  # fmt: skip
def test_what_is_found_depends_on_how_heavy_the_largest_are(
    spread: float, columns: int, least: float, most: float
) -> None:
    """The share of the largest 100 elements' squared norm that the outcome has, mean of eight draws of the hashes."""
    generator = torch.Generator().manual_seed(3)
    scale = torch.randn(100_000, generator=generator).mul(spread).exp()
    g = torch.randn(4, 100_000, generator=generator) * scale
    best = g.mean(0)[largest(g.mean(0), 100)].square().sum()
    method = gw.SketchedSGD(density=0.001, columns=columns)
    shares = [float(gw.simulate(g, method, seed=seed).mean.square().sum() / best) for seed in range(8)]
    assert least < sum(shares) / 8 < most


def test_segments_with_gaps_between_them_are_one_vector() -> None:
    """Elements of all are compared, and those between them stay in float32."""
    parameters = [Parameter(str(i), (n,), (1,)) for i, n in enumerate((300, 60, 500, 40))]
    segments = [replace(s, dense=s.numel < 100) for s in lay_out(parameters)]
    method = gw.SketchedSGD(columns=1 << 20, density=0.02, candidates=1)
    plan = make_plan(
        method, segments, kernels=REFERENCE, world_size=2, collective="two_shot", seed=0, chunk_numel=1 << 20
    )
    g = heavy(2, 900)
    mean, light = g.mean(0), torch.tensor([*range(300), *range(360, 860)])
    simulate_ranks([plan.whole(Context(rank, 2, 0), row) for rank, row in enumerate(g)], [Meter()] * 2)
    expected = mean.index_fill(0, light, 0)
    kept = light[largest(mean[light], 16)]
    assert torch.allclose(g[0], expected.index_copy(0, kept, mean[kept]), rtol=1e-5)
    assert torch.equal(g[0], g[1])


def test_hashes_do_not_depend_on_the_round() -> None:
    """So that sketches of several rounds may be added up; they do depend on the seed."""
    g = heavy(2, 3000)
    method = gw.SketchedSGD(columns=40, density=0.01, candidates=1)
    first = [gw.simulate(g, method, round=round).mean for round in (0, 7)]
    assert torch.equal(*first)
    assert not torch.equal(first[0], gw.simulate(g, method, seed=1).mean)


def test_momentum_is_forgotten_where_elements_were_sent() -> None:
    """And only there: for what travels in float32 beside, it is an optimizer's."""
    parameters = [("a", torch.empty(500)), ("b", torch.empty(40)), ("c", torch.empty(300))]
    ours = gw.SimulatedLink(parameters, gw.SketchedSGD(density=0.05, momentum=0.9), 2, min_numel=100)
    plain = torch.zeros(40)
    for seed in range(3):
        g = heavy(2, 840, seed)
        before = held(ours, 2, "momentum") if seed else torch.zeros(2, 800)
        mean = ours.reduce_(g.clone())
        plain = 0.9 * plain + g[:, 500:540].mean(0)
        assert torch.allclose(mean[500:540], plain, rtol=1e-5, atol=1e-5)
        compressed = torch.cat([g[:, :500], g[:, 540:]], 1)
        sent = torch.cat([mean[:500], mean[540:]]) != 0
        expected = (0.9 * before + compressed) * ~sent
        assert torch.allclose(held(ours, 2, "momentum"), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_round_that_is_not_finite_changes_nothing(bad: float) -> None:
    method = gw.SketchedSGD(density=0.02, momentum=0.5)
    ours, other = link(method, 1000, 3), link(method, 1000, 3)
    for seed in range(3):
        assert torch.equal(ours.reduce_(heavy(3, 1000, seed)), other.reduce_(heavy(3, 1000, seed)))
        spoilt = heavy(3, 1000, 50 + seed)
        spoilt[1, 377] = bad
        assert bool((ours.reduce_(spoilt) == torch.inf).all())
        assert torch.equal(held(ours, 3), held(other, 3))
        assert torch.equal(held(ours, 3, "momentum"), held(other, 3, "momentum"))


def test_a_resumed_run_ends_in_the_same_bits() -> None:
    method = gw.SketchedSGD(density=0.02, momentum=0.9)
    ours, other = link(method, 1000, 3), link(method, 1000, 3)
    for seed in range(3):
        ours.reduce_(heavy(3, 1000, seed))
    other.load_state_dict(ours.state_dict())
    for seed in range(3, 6):
        assert torch.equal(ours.reduce_(heavy(3, 1000, seed)), other.reduce_(heavy(3, 1000, seed)))


@pytest.mark.parametrize("workers", [2, 3, 8])
@pytest.mark.parametrize("beside", [0, 50])
def test_bytes_are_those_of_the_sums_and_of_the_candidates(workers: int, beside: int) -> None:
    rows, columns, numel, candidates = 3, 101, 5000, 4 * 50
    parameters = [("w", torch.empty(numel)), ("b", torch.empty(beside))][: 2 if beside else 1]
    method = gw.SketchedSGD(rows=rows, columns=columns, density=0.01)
    ours = gw.SimulatedLink(parameters, method, workers, min_numel=100, collective="two_shot")
    ours.reduce_(heavy(workers, numel + beside))
    # Both ways a header, and shares of four floats each, to every other rank.
    shares = [math.ceil(math.ceil(floats / 4) / workers) for floats in (rows * columns, candidates + beside)]
    assert ours.traffic().sent_bytes == sum(2 * (workers - 1) * (32 + 16 * share) for share in shares)


def test_a_quadratic_is_solved() -> None:
    """Of unlike workers, with two elements of 200 a round."""
    centres = torch.randn(4, 200, generator=torch.Generator().manual_seed(8))
    ours, x = link(gw.SketchedSGD(density=0.01, columns=50), 200, 4), torch.zeros(200)
    for step in range(600):
        x = x - 2.0 / (step + 80) * ours.reduce_(x - centres)
    assert float((x - centres.mean(0)).norm()) < 0.2 * float(centres.mean(0).norm())


@pytest.mark.parametrize(
    "fields",
    [{"rows": 4}, {"rows": 33}, {"rows": 3.0}, {"columns": 0}, {"columns": 2**23 + 1}, {"columns": 0.5}, {"density": 0},
     {"candidates": 0}, {"candidates": 1.5}, {"momentum": 1.0}],
)  # fmt: skip
def test_fields_out_of_range_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(gw.HyperparameterError, match=next(iter(fields))):
        gw.SketchedSGD(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", ["sketched_sgd", "sketched_amsgrad"])
def test_a_model_beyond_31_bits_is_refused_before_training(spec: str) -> None:
    """It failed in the first step, after the sketch had been exchanged."""
    half, method = 2**30, gw.method(spec)
    names = [Parameter("one", (half,), (1,)), Parameter("two", (half,), (1,))]
    with pytest.raises(gw.IncompatibleError, match="a sketch of 2147483648 elements"):
        method.plan(PlanSetting(lay_out(names), REFERENCE, 2, method.traits.collectives[0], 0, 1 << 23))
    names[1] = Parameter("two", (half - 1,), (1,))
    method.plan(PlanSetting(lay_out(names), REFERENCE, 2, method.traits.collectives[0], 0, 1 << 23))
