"""gTop-k, by number of the property in the paper's summary (docs/properties.md)."""

from __future__ import annotations

import math

import pytest
import torch

import gradwire as gw
from gradwire.errors import HyperparameterError
from joined import joined_rows


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def heavy(workers: int, numel: int, seed: int, alike: float = 0.0) -> torch.Tensor:
    """Heavy-tailed vectors, with a common part of that weight."""
    g = gaussian(workers, numel, seed=seed) + alike * gaussian(numel, seed=seed + 1000)
    return g * gaussian(workers, numel, seed=seed + 2000).abs().exp()


def top(x: torch.Tensor, k: int) -> torch.Tensor:
    order = torch.sort(x.abs(), descending=True, stable=True).indices[:k]
    return torch.zeros_like(x).index_copy_(0, order, x[order])


def residuals(found: gw.Simulation, workers: int) -> torch.Tensor:
    return torch.stack([found.state[f"rank {rank}"]["residual/0"] for rank in range(workers)])


def along_a_tree(x: torch.Tensor, k: int) -> tuple[torch.Tensor, float]:
    """The paper's reduction of a power of two of workers: the result, and the l1 mass that its workers lose.

    A worker puts back what it sent and the result does not hold; what else a merge left out is nowhere.
    """
    sent = torch.stack([top(row, k) for row in x])
    rows = list(sent)
    while len(rows) > 1:
        rows = [top(a + b, k) for a, b in zip(rows[::2], rows[1::2])]
    delivered = sent[:, rows[0] != 0].sum(0)
    return rows[0], float((delivered - rows[0][rows[0] != 0]).abs().sum())


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_the_outcome_is_the_trees(workers: int) -> None:
    """1: one worker's is its own TopK; two workers' the TopK of the sum of both."""
    g = heavy(workers, 200, seed=1, alike=1.5)
    wanted, _ = along_a_tree(g, 5)
    assert torch.allclose(gw.simulate(g, gw.GTopK(density=0.025)).mean, wanted / workers, rtol=1e-6)
    if workers < 3:
        together = top(torch.stack([top(row, 5) for row in g]).sum(0), 5)
        assert torch.equal(wanted, together)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 6, 7, 8, 13])
def test_the_outcome_has_k_elements_and_nothing_is_lost(workers: int) -> None:
    """2, and what the paper's rule does not give: sent and kept parts of all workers are their gradients."""
    parameters = [("a", torch.empty(300)), ("b", torch.empty(700))]
    link = gw.SimulatedLink(parameters, gw.GTopK(density=0.02), workers, min_numel=0)
    before = torch.zeros(workers, 1000)
    for round in range(4):
        g = heavy(workers, 1000, seed=round, alike=1.0)
        mean = link.reduce_(g.clone())
        assert 0 < int(mean.count_nonzero()) <= 20
        after = joined_rows(link, workers, "residual")
        total = workers * mean.double() + after.double().sum(0)
        # A merge rounds one sum a unit, log2(workers) of them one behind the other, of numbers of a few hundred.
        assert torch.allclose(total, (before + g).double().sum(0), rtol=1e-5, atol=1e-3)
        before = after


def test_equal_workers_send_the_largest_and_keep_the_rest() -> None:
    """3."""
    x = gaussian(500, seed=3)
    found = gw.simulate(x.expand(4, 500).clone(), gw.GTopK(density=0.02))
    assert torch.allclose(found.mean, top(x, 10), rtol=1e-6)
    assert torch.equal(residuals(found, 4), (x - top(x, 10)).expand(4, 500))


def test_of_supports_without_a_common_element_the_largest_are_kept() -> None:
    """4."""
    g = torch.zeros(4, 400)
    for rank in range(4):
        g[rank, rank::4] = gaussian(100, seed=rank)
    found = gw.simulate(g, gw.GTopK(density=0.01))
    assert torch.allclose(4 * found.mean, top(g.sum(0), 4), rtol=1e-6)


@pytest.mark.parametrize(("alike", "least"), [(0.0, 0.2), (1.5, 0.5)])
def test_the_papers_rule_would_lose_mass_and_the_tree_is_not_exact(alike: float, least: float) -> None:
    """5, 6: with eight workers, in a good part of the rounds; with two never."""
    lost = same = 0
    for seed in range(60):
        g = heavy(8, 200, seed=seed, alike=alike)
        outcome, mass = along_a_tree(g, 5)
        lost += mass > 1e-3
        exact = top(torch.stack([top(row, 5) for row in g]).sum(0), 5)
        same += torch.equal(outcome != 0, exact != 0)
        assert along_a_tree(g[:2], 5)[1] < 1e-4
    assert lost / 60 > least
    assert 0.05 < same / 60 < 0.95


def test_all_elements_are_the_mean() -> None:
    """7."""
    g = gaussian(5, 600, seed=7)
    found = gw.simulate(g, gw.GTopK(density=1.0))
    assert torch.allclose(found.mean, g.mean(0), atol=1e-6)
    assert float(residuals(found, 5).abs().max()) < 1e-6


def test_a_quadratic_is_solved_with_decreasing_steps_nearly_as_with_a_gather() -> None:
    """8: |x - c_i|^2 / 2 for four workers, two elements of a hundred a round."""
    centres = gaussian(4, 100, seed=8)

    def distance(method: gw.Method) -> float:
        link = gw.SimulatedLink([("w", torch.empty(100))], method, 4, min_numel=0)
        x = torch.zeros(100)
        for step in range(300):
            x = x - 2.0 / (step + 40) * link.reduce_(x - centres)
        return float((x - centres.mean(0)).norm() / centres.mean(0).norm())

    merged = distance(gw.GTopK(density=0.02))
    gathered = distance(gw.ErrorFeedback(compressor=gw.TopK(density=0.02, blocks="model")))
    assert merged < 0.25
    assert gathered < merged < 10 * gathered


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_bytes_grow_with_the_logarithm_of_the_workers(workers: int) -> None:
    numel = 100_000
    g = gaussian(workers, numel, seed=9)
    sent = gw.simulate(g, gw.GTopK(density=0.01)).traffic.sent_bytes / math.log2(workers)
    # 1000 values of 32 bits; positions of 8.14 bits where they are random, fewer where merged ones crowd; headers.
    assert 1000 * (32 + 7.5) / 8 < sent < 1000 * (32 + 8.3) / 8 + 100


@pytest.mark.parametrize("collective", ["tree", "two_shot_merged"])
def test_what_levels_lose_stays_behind_and_all_ranks_draw_alike(collective: str) -> None:
    """Every merge rounds to levels again, in all who do it with the same random numbers; ``check`` compares ranks."""
    method = gw.GTopK(density=0.05, values=gw.QSGDinf(levels=3, block_size=16))
    parameters = [("a", torch.empty(300)), ("b", torch.empty(500))]
    link = gw.SimulatedLink(parameters, method, 5, min_numel=0, check=True, collective=collective)
    before, means = torch.zeros(5, 800), []
    for round in range(4):
        g = heavy(5, 800, seed=round, alike=1.0)
        means.append(link.reduce_(g.clone()))
        after = joined_rows(link, 5, "residual")
        total = 5 * means[-1].double() + after.double().sum(0)
        # Sums of float32 values of a few hundred, a few of them in each element.
        assert torch.allclose(total, (before + g).double().sum(0), rtol=1e-5, atol=1e-3)
        before = after
    # Three levels and zero of a maximum: no more magnitudes than three in each block of sixteen.
    kept = means[0][means[0] != 0].abs()
    assert len(kept) > 20
    assert len(kept.unique()) <= 3 * (len(kept) // 16 + 10)


def test_what_rounding_loses_stays_behind() -> None:
    g = gaussian(3, 800, seed=10)
    found = gw.simulate(g, gw.GTopK(density=0.05, values=gw.BF16()))
    total = 3 * found.mean.double() + residuals(found, 3).double().sum(0)
    assert torch.allclose(total, g.double().sum(0), atol=1e-5)
    assert torch.equal(found.mean[found.mean != 0] * 3, (found.mean[found.mean != 0] * 3).bfloat16().float())


def test_fields_are_checked() -> None:
    for bad in ({"density": 0}, {"blocks": "layer"}, {"values": gw.QSGDinf(block_size=4096)}, {"momentum": 1.0}):
        with pytest.raises(HyperparameterError):
            gw.GTopK(**bad)


JOINED = [gw.GTopK(density=0.01), gw.SketchedSGD(density=0.01), gw.ErrorFeedback(gw.TopK(density=0.01, blocks="model"))]


@pytest.mark.parametrize("method", JOINED, ids=repr)
def test_what_waits_of_joined_parameters_is_kept_by_parameter(method: gw.Method) -> None:
    like = {"a": torch.empty(2500), "b": torch.empty(2500), "c": torch.empty(2000)}
    ours = gw.SimulatedLink(like.items(), method, 2, exclude=("a",))
    rows = torch.randn(2, 7000, generator=torch.Generator().manual_seed(0))
    due = rows.mean(0)
    came = ours.reduce_(rows.clone())
    # Continued in another order, with b in float32, which has waited, and a compressed, which has not.
    other = gw.SimulatedLink({name: like[name] for name in "cab"}.items(), method, 2, exclude=("b",))
    other.load_state_dict(ours.state_dict())
    c, a, b = other.reduce_(torch.zeros(2, 7000)).split([2000, 2500, 2500])
    left = [torch.stack([other.state_dict()[f"rank {r}"][f"residual/{n}"] for r in (0, 1)]).mean(0) for n in "abc"]
    assert float(a.abs().max()) == float(left[0].abs().max()) == 0
    torch.testing.assert_close(came + torch.cat([a, b, c]) + torch.cat(left), due, atol=1e-5, rtol=0)
    assert float(left[1].abs().max()) == 0
    assert float(left[2].abs().max()) > 0


def test_what_an_earlier_version_kept_of_joined_parameters_is_lost_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    link = gw.SimulatedLink([("w", torch.empty(2500))], gw.GTopK(), 2)
    link.reduce_(torch.randn(2, 2500, generator=torch.Generator().manual_seed(0)))
    state = link.state_dict()
    kept = {name: dict(part) for name, part in state.items()}
    kept["rank 1"]["residual/(model)"] = kept["rank 1"].pop("residual/w")
    link.load_state_dict(kept)
    assert "which kept 'residual' of all parameters as one vector: that is lost" in caplog.text
    assert not any("(model)" in key for part in link.state_dict().values() for key in part)
    caplog.clear()
    link.load_state_dict(state)
    assert "residual" not in caplog.text
