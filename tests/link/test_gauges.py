"""Numbers that methods report of their rounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradwire as gw
from cases import TABLE
from gradwire.exchange.protocols import Gauges

CASES = [case.method for rows in TABLE.values() for case in rows]
REPORTING = [method for method in CASES if method.traits.gauges]
SIZES = {"a": 900, "b": 2100, "c": 130_000}


def gradients(workers: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.randn(workers, sum(SIZES.values()), generator=torch.Generator().manual_seed(seed))


def simulated(method: gw.Method | str, **options: Any) -> gw.SimulatedLink:
    like = [(name, torch.empty(numel)) for name, numel in SIZES.items()]
    return gw.SimulatedLink(like, method, 2, min_numel=0, **options)


def test_a_gauge_is_the_ratio_of_its_parts() -> None:
    gauges = Gauges()
    assert gauges.latest == {}
    for total, count in ((3, 10), (1, 10)):
        gauges.add("density", total, count)
    gauges.add("nothing", 0, 0)
    assert gauges.latest == {}
    gauges.end_round(skipped=False)
    assert gauges.latest == {"density": 0.2}
    gauges.add("density", 5, 5)
    gauges.end_round(skipped=True)
    assert gauges.latest == {"density": 0.2}, "a round that was skipped leaves the values of the one before"
    gauges.add("density", 1, 4)
    gauges.end_round(skipped=False)
    assert gauges.latest == {"density": 0.25}


def test_methods_report_what_they_declare() -> None:
    assert {type(method).__name__ for method in REPORTING} >= {"Threshold", "SIDCo", "CAT"}
    small = torch.randn(2, 700, generator=torch.Generator().manual_seed(1))
    for method in CASES:
        link = gw.SimulatedLink([("w", torch.empty(20, 35))], method, 2, min_numel=0)
        link.reduce_(small.clone())
        assert [set(gauges) for gauges in link.gauges()] == [set(method.traits.gauges)] * 2, method


def test_the_density_is_what_each_worker_kept() -> None:
    g = gradients()
    g[1] *= 2
    link = simulated(gw.Threshold(threshold=1.5))
    link.reduce_(g.clone())
    expected = [int((row.abs() >= 1.5).sum()) / g.shape[1] for row in g]
    assert [gauges["density"] for gauges in link.gauges()] == expected
    link = gw.SimulatedLink([("m", torch.empty(20, 35))], gw.Threshold(threshold=6.0, unit="row"), 2, min_numel=0)
    rows = g[:, :700].clone()
    link.reduce_(rows.clone())
    expected = [int((row.view(20, 35).norm(dim=1) >= 6.0).sum()) / 20 for row in rows]
    assert [gauges["density"] for gauges in link.gauges()] == expected
    assert 0 < expected[0] < expected[1]
    link = simulated(gw.SIDCo(density=0.01))
    mean = link.reduce_(g.clone())
    densities = [gauges["density"] for gauges in link.gauges()]
    assert all(0.7 * 0.01 < density <= 1.3 * 0.01 for density in densities)
    apart = [gw.simulate(row[None, 3000:], gw.SIDCo(density=0.01)).mean for row in g]
    # k of the first two parameters, which are too small for a fit: 9 and 21.
    kept = [(9 + 21 + int(part.count_nonzero())) / g.shape[1] for part in apart]
    assert densities == kept
    assert int(mean.count_nonzero()) <= sum(kept) * g.shape[1]


@pytest.mark.parametrize("scheme", ["topk", "sign"])
def test_elements_are_the_budget_of_each_worker(scheme: str) -> None:
    g = gradients(seed=5)
    g[1, :20] *= 1000
    link = simulated(gw.CAT(scheme=scheme))
    link.reduce_(g.clone())
    alone = [int(gw.simulate(row[None], gw.CAT(scheme=scheme)).mean.count_nonzero()) for row in g]
    assert [gauges["elements"] for gauges in link.gauges()] == alone
    assert alone[0] != alone[1]
    parts = simulated(gw.CAT(scheme=scheme, blocks="parameter"))
    parts.reduce_(g.clone())
    pieces = [
        [
            int(gw.simulate(part[None], gw.CAT(scheme=scheme)).mean.count_nonzero())
            for part in row.split([*SIZES.values()])
        ]
        for row in g
    ]
    assert [gauges["elements"] for gauges in parts.gauges()] == [sum(row) / 3 for row in pieces]


def test_a_random_budget_is_the_one_that_is_aimed_at() -> None:
    """Of the first parameter alone: between the numbers that pay for the fixed bytes next to its own."""
    method = gw.CAT(scheme="stochastic", fixed_bytes=200.0)
    link = gw.SimulatedLink([("w", torch.empty(900))], method, 2, min_numel=0)
    numbers = []
    for _ in range(100):
        link.reduce_(gradients()[:, :900].clone())
        numbers.append([gauges["elements"] for gauges in link.gauges()])
    assert all(number == numbers[0] for number in numbers), "the gradient decides, not the draw"
    assert all(value == int(value) > 1 for value in numbers[0])


def test_methods_around_report_what_is_within() -> None:
    for around, inner in ((gw.ErrorFeedback, gw.SIDCo(density=0.01)), (gw.Rotated, gw.CAT())):
        method = around(compressor=inner)
        link = simulated(method)
        link.reduce_(gradients())
        assert all(set(gauges) == set(method.traits.gauges) == set(inner.traits.gauges) for gauges in link.gauges())


def test_rounds_that_travel_in_float32_or_are_skipped_report_nothing() -> None:
    link = simulated(gw.Threshold(threshold=1.0), warmup_steps=1)
    link.reduce_(gradients())
    assert link.gauges() == [{}, {}]
    link.reduce_(gradients())
    before = link.gauges()
    bad = gradients(seed=1)
    bad[0, 5] = torch.inf
    link.reduce_(bad)
    assert link.gauges() == before
    link.reduce_(gradients(seed=2))
    assert link.gauges() != before


def on_ranks(method: str, bucket: int, lanes: int) -> tuple[list[dict[str, float]], dict[str, float]]:
    import torch.distributed as dist

    parameters = {name: torch.zeros(numel, requires_grad=True) for name, numel in SIZES.items()}
    link = gw.Link(parameters.items(), method, min_numel=0, chunk_numel=bucket, lanes=lanes)
    found = []
    for seed in range(2):
        mine = gradients(3, seed)[dist.get_rank()]
        for parameter, part in zip(parameters.values(), mine.split([*SIZES.values()])):
            parameter.grad = part.clone()
        link.reduce_()
        found.append(link.gauges())
    told = link.diagnostics()["gauges"]
    link.close()
    return found, told


@pytest.mark.ranks
@pytest.mark.parametrize("method", ["Threshold(threshold=1.0)", "CAT(blocks='parameter')"])
def test_any_layout_on_real_ranks_reports_what_the_simulation_does(three_ranks: Any, method: str) -> None:
    expected = []
    like = [(name, torch.empty(numel)) for name, numel in SIZES.items()]
    link = gw.SimulatedLink(like, method, 3, min_numel=0)
    for seed in range(2):
        link.reduce_(gradients(3, seed))
        expected.append(link.gauges())
    for bucket, lanes in ((1 << 23, 1), (640, 3)):
        found = three_ranks(on_ranks, method, bucket, lanes)
        assert [[steps[i] for steps, _ in found] for i in range(2)] == expected
        assert [told for _, told in found] == expected[1]
