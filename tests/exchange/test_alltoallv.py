"""Payloads of any length for every other rank: what arrives, what it costs, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import gradwire as gw
from gradwire.exchange.drivers import Meter, simulate_ranks
from gradwire.exchange.ops import AllToAll, Exchange
from gradwire.exchange.protocols import Context, alltoallv

WORLD, MOST = 3, 50
Found = list[torch.Tensor | None]


def body(sender: int, receiver: int) -> torch.Tensor | None:
    """Return 0 to 42 bytes; rank 0 sends rank 1 nothing."""
    if (sender, receiver) == (0, 1):
        return None
    return torch.full((7 * (sender + receiver) * 2 if sender != receiver else 5,), 10 * sender + receiver).byte()


def run(rank: int, round: int = 4) -> Exchange[Found]:
    return alltoallv(Context(rank, WORLD, round, bucket=1), 9, [body(rank, to) for to in range(WORLD)], MOST)


def test_every_rank_receives_what_was_sent_to_it() -> None:
    meters = [Meter() for _ in range(WORLD)]
    found = simulate_ranks([run(rank) for rank in range(WORLD)], meters)
    for receiver, rows in enumerate(found):
        for sender, row in enumerate(rows):
            sent = None if sender == receiver else body(sender, receiver)
            assert (row is None) == (sent is None)
            assert row is None or sent is None or torch.equal(row, sent)
    for rank, meter in enumerate(meters):
        sent = [body(rank, to) for to in range(WORLD) if to != rank]
        came = [body(source, rank) for source in range(WORLD) if source != rank]
        assert meter.sent_bytes == 2 * 8 + sum(32 + len(row) for row in sent if row is not None)
        assert meter.received_bytes == 2 * 8 + sum(32 + len(row) for row in came if row is not None)


def spoilt(change: Callable[[AllToAll], None]) -> Found:
    """Run rank 1 on what rank 2 and itself send, after a change."""
    ops = []
    for rank in range(WORLD):
        generator = run(rank)
        op = next(generator)
        assert isinstance(op, AllToAll)
        ops.append((generator, op))
    generator, mine = ops[1]
    assert mine.arrived is not None
    for source, (_, op) in enumerate(ops):
        assert op.lengths is not None
        mine.recv[source] = op.send[1]
        mine.arrived[source] = op.lengths[1]
    change(mine)
    with pytest.raises(StopIteration) as ended:
        generator.send(mine.recv)
    return ended.value.value  # type: ignore[no-any-return]


def test_a_change_in_any_byte_of_a_payload_is_refused() -> None:
    assert spoilt(lambda op: None)[2] is not None
    for at in range(32 + 42):

        def change(op: AllToAll, at: int = at) -> None:
            op.recv[2, at] ^= 1

        with pytest.raises(gw.PayloadError, match="rank 2"):
            spoilt(change)


@pytest.mark.parametrize("length", [1, 31, 40])
def test_another_length_than_was_sent_is_refused(length: int) -> None:
    def change(op: AllToAll) -> None:
        assert op.arrived is not None
        op.arrived[2] = length

    with pytest.raises(gw.PayloadError, match="rank 2"):
        spoilt(change)


def test_a_payload_of_another_sender_or_round_is_refused() -> None:
    def swap(op: AllToAll) -> None:
        other = run(2, round=5)
        op.recv[2] = next(other).send[1]  # type: ignore[union-attr]

    with pytest.raises(gw.PayloadError, match="round is 5, expected 4"):
        spoilt(swap)
