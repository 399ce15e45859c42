"""What ranks tell each other before levels are fitted: normals or histograms, their bytes, their order, their fits."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

import gradwire as gw
from fitted_models import normal
from gradwire.exchange.drivers import Meter, dry_run, simulate_ranks
from gradwire.exchange.protocols import Context, Memory
from gradwire.exchange.protocols.bucket_plan import BucketPlan
from gradwire.exchange.segments import Parameter, lay_out
from gradwire.exchange.wire import HEADER_BYTES, padded
from gradwire.kernels import SegmentTable, get_kernels
from gradwire.methods.levels import level_statistics as level_histogram
from gradwire.methods.levels.level_fitting import Mixture, best_levels, best_ratio, powers
from gradwire.methods.levels.level_statistics import BINS, Histogram, bin_edges, count_values
from plans import make_plan

METHODS = [gw.ALQ, gw.ALQN, gw.AMQ, gw.AMQN]


def runs_of(sizes: list[int]) -> SegmentTable:
    begins = np.cumsum([0, *sizes[:-1]])
    return SegmentTable(begins, sizes, [0] * len(sizes), np.zeros((len(sizes), 2)))


@pytest.mark.parametrize("method", [gw.ALQ, gw.ALQN, gw.AMQ, gw.AMQN], ids=lambda m: m.__name__)
def test_equally_long_euclidean_blocks_weigh_their_squared_norms_to_the_last_bit(method: type[gw.ALQ]) -> None:
    """As in the paper: what R^2 d is then proportional to; and whatever the weights are for, no bit differs."""
    g = torch.randn(2, 8 * 256, generator=torch.Generator().manual_seed(1)) ** torch.tensor([[3], [5]])
    table = []
    for blocks in g.view(2, 8, 256):
        runs = SegmentTable(range(0, 8 * 256, 256), [256] * 8, [0] * 8, np.zeros((8, 2)))
        m = get_kernels("cpu").moments(blocks.reshape(-1), runs)
        scale = m.norm.float().double()
        rows = torch.stack([m.mean / scale, m.std / scale, m.norm], 1)
        table.append(rows[m.norm.argsort(descending=True)[:5]].float())
    mean, std, norm = torch.cat(table).double().unbind(1)
    mixture = Mixture(mean, std, norm * norm)
    if not method.weighted:
        pooled = ((std * std + mean * mean).mean() - mean.mean() ** 2).sqrt()
        mixture = Mixture(mean.mean()[None], pooled[None], torch.ones(1))
    one = method(block_size=256, kept=5)
    expected = torch.tensor(one.fit(mixture, None), dtype=torch.float64).float().double()
    assert torch.equal(gw.simulate(g, one).state["global"]["levels"], expected)


def test_bins_are_exact_in_float32_and_even_within_an_octave() -> None:
    edges = bin_edges()
    assert edges.shape == (BINS + 1,)
    assert torch.equal(edges, edges.float().double())
    assert torch.equal(edges, -edges.flip(0))
    assert (float(edges[-1]), float(edges[BINS // 2 + 1])) == (1.0, 2.0**-20)
    last = edges[-17:]
    assert torch.equal(last, torch.arange(16, 33, dtype=torch.float64) / 32)


@pytest.mark.parametrize("piece", [1 << 18, 100, 1])
def test_counts_are_those_of_numpy_whatever_the_piece(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weighted, in blocks of unlike lengths and scales, some of them empty."""
    monkeypatch.setattr(level_histogram, "_PIECE", piece)
    sizes = [700, 0, 1, 64, 0, 300]
    x = normal(sum(sizes)) ** 5
    scale, weight = torch.empty(len(sizes)), torch.tensor([3, 9, 2**40, 5, 1, 7])
    for i, part in enumerate(x.split(sizes)):
        scale[i] = part.abs().max() * 1.5 if len(part) else 1.0
    r = torch.cat([part / s for part, s in zip(x.split(sizes), scale)]).double().numpy()
    every = np.repeat(weight.numpy(), sizes)
    number = np.searchsorted(bin_edges().numpy(), r, side="right") - 1
    # Negative values belong to the bin below an edge, as magnitudes do to the bin above.
    on_edge = (r < 0) & np.isin(r, bin_edges().numpy())
    expected = np.zeros(BINS, np.int64)
    np.add.at(expected, number - on_edge, every)
    found = count_values(x, runs_of(sizes), scale, weight)
    assert found.tolist() == expected.tolist()
    assert int(found.sum()) == int(every.sum())


def test_values_at_the_scale_are_levels_and_are_not_counted() -> None:
    x = torch.tensor([4.0, -4.0, 0.0, -0.0, 1e-30, 2.0, torch.nan])
    found = count_values(x, runs_of([6, 1]), torch.tensor([4.0, 1.0]), torch.tensor([1, 0]))
    assert int(found.sum()) == 4
    assert int(found[BINS // 2]) == 3
    assert int(found[(bin_edges() == 0.5).nonzero().item()]) == 1


def test_integrals_and_the_inverse_of_a_histogram() -> None:
    """Three bins by hand, one of them empty: densities 1/2, 0 and 3/4."""
    h = Histogram(torch.tensor([-1.0, -0.5, 0.0, 1.0]), torch.tensor([1.0, 0.0, 3.0]))
    assert h.moments(-1, 1) == pytest.approx((1.0, -0.1875 + 0.375, 0.875 / 6 + 0.25))
    assert h.moments(-0.75, 0.5) == pytest.approx((0.5, -0.078125 + 0.09375, (0.421875 - 0.125) / 6 + 0.125 / 4))
    assert [h.cdf(x) for x in (-1, -0.5, -0.2, 0, 1)] == pytest.approx([0, 0.25, 0.25, 0.25, 1])
    wanted = torch.tensor([0.0, 0.1, 0.25, 0.4, 1.0], dtype=torch.float64)
    low, high = torch.full((5,), -1.0, dtype=torch.float64), torch.full((5,), 1.0, dtype=torch.float64)
    assert torch.allclose(h.distribution(h.inverse(wanted, low, high)), wanted, atol=1e-15, rtol=0)
    assert h.inverse(wanted, low * 0.1, high * 0.2).abs().max() <= 0.2


@pytest.mark.parametrize("count", [3, 8, 16, 256])
def test_levels_of_a_histogram_are_stationary_and_of_a_uniform_one_even(count: int) -> None:
    mass = torch.rand(BINS, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 4
    h = Histogram(bin_edges(), mass)
    levels = best_levels(h, count)
    assert all(a < b for a, b in itertools.pairwise(levels))
    best = h.variance(levels)
    assert best <= h.variance([-1 + 2 * j / (count - 1) for j in range(count)])
    assert best <= h.variance(powers(best_ratio(h, count), count)) or count % 2
    for j in range(1, count - 1):
        for way in (-1, 1):
            other = list(levels)
            other[j] += way * 1e-3 * (levels[j + 1] - levels[j - 1])
            assert h.variance(other) >= best * (1 - 1e-7)
    even = Histogram(bin_edges(), bin_edges().diff())
    assert best_levels(even, count) == pytest.approx([-1 + 2 * j / (count - 1) for j in range(count)], abs=1e-3)


def test_levels_are_even_where_nothing_was_counted() -> None:
    """Any levels serve, but those at one end."""
    found = best_levels(Histogram(bin_edges(), torch.zeros(BINS)), 8)
    assert found == pytest.approx([-1 + 2 * j / 7 for j in range(8)], abs=0.05)


def levels_of(g: torch.Tensor, **options: object) -> list[float]:
    method = gw.ALQ(**{"model": "histogram", "block_size": 64, **options})  # type: ignore[arg-type]
    found: list[float] = gw.simulate(g, method).state["global"]["levels"].tolist()
    return found


def test_blocks_of_zeros_change_no_levels() -> None:
    """They are exact with any levels; by the normalised variance, too."""
    g = normal(2, 640) ** 3
    with_zeros = torch.cat([torch.zeros(2, 320), g, torch.zeros(2, 640)], 1)
    for method, model in itertools.product(METHODS, ("normal", "histogram")):
        one = method(model=model, block_size=64)
        few, many = (gw.simulate(rows, one).state["global"]["levels"] for rows in (g, with_zeros))
        assert torch.equal(few, many)


def test_workers_whose_scales_differ_by_far_count_by_their_own_units() -> None:
    """One of four decades less: all but nothing; a worker's copy beside it: the same levels."""
    g = torch.cat([normal(1, 6400) ** 3, 1e-4 * normal(1, 6400, seed=1)])
    alone, both, equal = levels_of(g[:1]), levels_of(g), levels_of(g[[0, 0]])
    assert both == pytest.approx(alone, abs=1e-4)
    assert equal == alone
    assert max(abs(a - b) for a, b in zip(alone, levels_of(g[1:]))) > 0.02
    for huge in (2.0**120, 2.0**-90):
        assert levels_of(g[:1] * huge) == alone


@pytest.mark.parametrize("weighted", [True, False])
def test_levels_do_not_depend_on_the_order_of_parameters(weighted: bool) -> None:
    """Integers add up to the same sums in any order."""
    sizes = [3000, 17, 800, 5000]
    parts = [10.0 ** (i - 1) * normal(2, n, seed=i) ** 3 for i, n in enumerate(sizes)]
    method = (gw.ALQ if weighted else gw.ALQN)(model="histogram", blocks="parameter", block_size=256)
    found = []
    for order in itertools.permutations(range(4)):
        workers = [{f"p{i}": parts[i][rank] for i in order} for rank in range(2)]
        found.append(gw.simulate(workers, method).state["global"]["levels"])
    assert all(torch.equal(found[0], other) for other in found)


def plan_of(method: gw.Method, backend: str) -> BucketPlan:
    segments = [
        replace(s, dense=s.numel < 100) for s in lay_out([Parameter("a", (4000,), (1,)), Parameter("b", (9,), (1,))])
    ]
    return make_plan(
        method, segments, kernels=get_kernels(backend), world_size=3, collective="all_gather", seed=0,
        chunk_numel=1 << 20,
    )  # fmt: skip


@pytest.mark.parametrize("model", ["normal", "histogram"])
@pytest.mark.parametrize("kept", [3, 350])
def test_the_dry_run_counts_the_statistics_of_an_update(model: str, kept: int) -> None:
    """To the byte, in the rounds of the schedule and between them."""
    method = gw.ALQ(model=model, kept=kept, block_size=512, updates=(0, 2), bits=4)
    plan, memories, counted = plan_of(method, "cpu"), [Memory() for _ in range(3)], []
    for round in range(4):
        meters = [Meter() for _ in range(3)]
        rows = normal(3, 4009, seed=round)
        contexts = [Context(r, 3, round, memory=m) for r, m in enumerate(memories)]
        simulate_ranks([plan.whole(c, row) for c, row in zip(contexts, rows)], meters)
        for memory in memories:
            memory.commit()
        counted.append({(m.sent_bytes, m.received_bytes) for m in meters})
    dry = [dry_run(plan_of(method, "meta"), 4009, 3, round) for round in range(4)]
    assert counted == [{(m.sent_bytes, m.received_bytes)} for m in dry]
    usual = dry_run(plan_of(method, "meta"), 4009, 3).sent_bytes
    assert usual == dry[1].sent_bytes
    told = 8 * (BINS + 1) if model == "histogram" else 12 * min(kept, 8)
    # Statistics and sixteen levels, each behind a header, to two others.
    assert dry[0].sent_bytes - usual == 2 * (HEADER_BYTES + padded(told) + HEADER_BYTES + 8 * 16)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.__name__)
def test_every_rank_has_the_same_levels_of_a_histogram(method: type[gw.ALQ]) -> None:
    plan, memories = plan_of(method(model="histogram", block_size=512), "cpu"), [Memory() for _ in range(3)]
    rows = normal(3, 4009) ** torch.tensor([[1], [3], [5]])
    simulate_ranks([plan.whole(Context(r, 3, 0, memory=m), rows[r]) for r, m in enumerate(memories)], [Meter()] * 3)
    for memory in memories:
        memory.commit()
    first, *others = (memory.state()["global"]["levels"] for memory in memories)
    assert all(torch.equal(first, other) for other in others)
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])


def test_a_histograms_levels_are_resumed_and_those_of_the_other_model_are_not() -> None:
    g = [normal(2, 4000, seed=i) ** 5 for i in range(4)]
    method, usual = gw.ALQ(model="histogram", block_size=512, updates=(0, 3)), gw.ALQ(block_size=512)
    link, same, other = (gw.SimulatedLink([("w", torch.empty(4000))], m, 2) for m in (method, method, usual))
    for rows in g[:2]:
        link.reduce_(rows.clone())
    same.load_state_dict(link.state_dict())
    other.load_state_dict(link.state_dict())
    for rows in g[2:]:
        assert torch.equal(link.reduce_(rows.clone()), same.reduce_(rows.clone()))
    before = other.state_dict()["global"]["levels"]
    other.reduce_(g[2].clone())
    after = other.state_dict()["global"]["levels"]
    assert not torch.equal(after, before)
    assert torch.equal(after, gw.simulate(g[2], usual).state["global"]["levels"])


def test_an_unknown_model_is_refused_by_name() -> None:
    with pytest.raises(gw.HyperparameterError, match="ALQ: model is 'normal' or 'histogram', not 'laplace'"):
        gw.ALQ(model="laplace")
