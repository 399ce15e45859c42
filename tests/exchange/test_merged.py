"""Payloads of shares that owners merge: what ranks end with, what stays behind, what is sent."""

from __future__ import annotations

import pytest
import torch

import gradwire as gw
from joined import joined_rows

NUMEL = 4000


def link(workers: int, density: float = 0.02, **options: object) -> gw.SimulatedLink:
    parameters = [("a", torch.empty(3000)), ("b", torch.empty(NUMEL - 3000))]
    options = {"min_numel": 0, "collective": "two_shot_merged", "check": True} | options
    return gw.SimulatedLink(parameters, gw.GTopK(density=density), workers, **options)  # type: ignore[arg-type]


def heavy(workers: int, numel: int = NUMEL, seed: int = 0) -> torch.Tensor:
    return torch.randn(workers, numel, generator=torch.Generator().manual_seed(seed)) ** 3


def top(x: torch.Tensor, k: int) -> torch.Tensor:
    order = torch.sort(x.abs(), descending=True, stable=True).indices[:k]
    return torch.zeros_like(x).index_copy_(0, order, x[order])


@pytest.mark.parametrize("workers", [1, 2, 4, 5])
def test_of_each_share_the_largest_of_all_workers_largest_are_left(workers: int) -> None:
    """A share ends with a group of eighty elements."""
    g, begin = heavy(workers), 0
    found = link(workers).reduce_(g.clone())
    for rank in range(workers):
        end = min(-(-NUMEL * (rank + 1) // workers // 80) * 80, NUMEL)
        share = g[:, begin:end]
        k = int(0.02 * share.shape[1])
        wanted = top(torch.stack([top(row, k) for row in share]).sum(0), k)
        assert torch.allclose(found[begin:end], wanted / workers, rtol=1e-6, atol=0)
        begin = end


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
def test_nothing_is_lost_and_all_ranks_end_with_the_same_bits(workers: int) -> None:
    """What merges leave out stays with the share's owner; ``check`` compares the ranks."""
    ours, before = link(workers), torch.zeros(workers, NUMEL)
    for seed in range(4):
        g = heavy(workers, seed=seed)
        mean = ours.reduce_(g.clone())
        after = joined_rows(ours, workers, "residual")
        # A merge rounds sums of up to eight float32 values below 200.
        total = workers * mean.double() + after.double().sum(0)
        assert torch.allclose(total, (before + g).double().sum(0), rtol=1e-5, atol=1e-3)
        before = after


def test_traffic_does_not_grow_with_the_workers() -> None:
    sent = {}
    for workers in (2, 4, 16):
        ours = link(workers, density=0.1)
        ours.reduce_(heavy(workers))
        sent[workers] = ours.traffic().sent_bytes
    # A share has a tenth of at most 4000 / N + 80 elements: values of 32 bits and positions of at most 6, with a header
    # of 32 bytes, a count of 16, and a length of 8, rounded up to 16.
    for workers, found in sent.items():
        assert found <= 2 * (workers - 1) * ((400 / workers + 8) * (32 + 6) / 8 + 80)


def test_parameters_that_are_not_compressed_are_the_mean() -> None:
    ours, g = link(3, min_numel=2000), heavy(3)
    found = ours.reduce_(g.clone())
    assert torch.allclose(found[3000:], g[:, 3000:].mean(0), rtol=0, atol=1e-5)
    assert int(found[:3000].count_nonzero()) <= 60


def test_a_value_that_is_not_finite_reaches_all_and_leaves_no_trace() -> None:
    ours, g = link(3), heavy(3)
    ours.reduce_(g.clone())
    before = {k: v.clone() for k, v in ours.state_dict()["rank 1"].items() if isinstance(v, torch.Tensor)}
    bad = g.clone()
    bad[1, 3999] = torch.nan
    assert not bool(torch.isfinite(ours.reduce_(bad)).all())
    after = ours.state_dict()["rank 1"]
    assert before
    assert all(torch.equal(after[k], v) for k, v in before.items())


def test_it_is_taken_where_it_is_named_and_needs_one_vector() -> None:
    # With as many workers it has the fewest bytes, but another outcome.
    usual = link(16, density=0.1, collective="auto")
    usual.reduce_(heavy(16))
    assert set(usual.record()["collectives"]) == {"tree"}
    with pytest.raises(gw.IncompatibleError, match="cannot travel by two_shot_merged"):
        gw.SimulatedLink([("a", torch.empty(9000))], gw.GTopK(blocks="parameter"), 4, collective="two_shot_merged")


def test_chunks_do_not_decide_a_bit() -> None:
    found = [link(3, chunk_numel=n).reduce_(heavy(3)) for n in (1000, 1 << 20)]
    assert torch.equal(*found)
