"""The order of samples depends on seed and step alone."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.experiments.order import DataOrder, generator, share


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
