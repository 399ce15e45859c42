"""The order of samples depends on seed and step alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.tools.experiments.errors import UsageError
from gradwire.tools.experiments.order import DataOrder, ShareOrder, generator, share


@given(samples=st.integers(1, 50), batch=st.integers(1, 40), seed=st.integers(0, 1000))
def test_every_epoch_takes_every_sample_once(samples: int, batch: int, seed: int) -> None:
    order = DataOrder(seed, samples, batch)
    steps = -(-2 * samples // batch)
    taken = torch.cat([order.indices(step) for step in range(steps)])
    for epoch in range(2):
        assert sorted(taken[epoch * samples : (epoch + 1) * samples].tolist()) == list(range(samples))


@given(parts=st.integers(1, 8), each=st.integers(1, 5), step=st.integers(0, 30))
def test_workers_share_the_same_global_batch(parts: int, each: int, step: int) -> None:
    batch = parts * each
    whole = DataOrder(3, 37, batch).indices(step)
    joined = torch.cat([DataOrder(3, 37, batch).indices(step)[share(batch, r, parts)] for r in range(parts)])
    assert torch.equal(whole, joined)


def test_a_step_can_be_asked_for_out_of_order() -> None:
    forward = DataOrder(0, 10, 4)
    expected = [forward.indices(step).tolist() for step in range(6)]
    assert [DataOrder(0, 10, 4).indices(step).tolist() for step in (5, 0, 3)] == [expected[s] for s in (5, 0, 3)]


def test_seed_epoch_and_purpose_change_the_order() -> None:
    orders = {tuple(DataOrder(seed, 30, 30).indices(step).tolist()) for seed in (0, 1) for step in (0, 1)}
    assert len(orders) == 4
    draws = [torch.rand(1, generator=generator(0, purpose, 0)).item() for purpose in ("a", "b", "a")]
    assert draws[0] == draws[2] != draws[1]


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    DataOrder(0, 100, 10).indices(3)
    assert torch.equal(before, torch.get_rng_state())


@given(workers=st.integers(1, 6), each=st.integers(0, 4), samples=st.integers(6, 40), seed=st.integers(0, 50))
def test_with_shares_every_worker_keeps_to_its_own(workers: int, each: int, samples: int, seed: int) -> None:
    order = ShareOrder(seed, samples, each * workers, workers)
    own = samples // workers
    steps = -(-own // each) if each else 1
    for rank in range(workers):
        taken = torch.cat([order.indices(step)[share(order.batch, rank, workers)] for step in range(steps)])
        mine = range(rank * own, (rank + 1) * own)
        assert set(taken.tolist()) == set(mine)
        assert sorted(taken[:own].tolist()) == list(mine), "each sample once in the first pass over the share"


def test_a_batch_of_nought_takes_all_shares_in_order_and_leaves_out_the_rest() -> None:
    order = ShareOrder(0, 11, 0, 4)
    assert order.batch == 8
    assert order.indices(3).tolist() == list(range(8))
    with pytest.raises(UsageError, match="3 samples cannot be shared by 4 workers"):
        ShareOrder(0, 3, 0, 4)


def test_the_shares_are_drawn_independently() -> None:
    order = ShareOrder(0, 60, 60, 2)
    first, second = order.indices(0).split(30)
    assert not torch.equal(first, second - 30)
    assert not torch.equal(first, order.indices(1)[:30])
