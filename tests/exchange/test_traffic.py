"""Bytes of every kind of operation, by the known algorithm of each collective."""

from __future__ import annotations

import pytest
import torch

from gradwire.exchange.drivers import Meter, Traffic, dense_bytes
from gradwire.exchange.drivers.dry_run import _shape
from gradwire.exchange.drivers.traffic import (
    GATHERED_REDUCE_BYTES,
    LARGE_BYTES,
    broadcast_sends,
    gathers,
    large,
    op_bytes,
)
from gradwire.exchange.ops import AllGather, AllToAll, Broadcast, Op, Reduce, Scope, SendRecv

N = 4


def octets(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def gather(size: int, lengths: list[int] | None = None, arrived: list[int] | None = None) -> AllGather:
    told = None if lengths is None else torch.tensor(lengths)
    return AllGather(octets(size), octets(N, size), told, None if arrived is None else torch.tensor(arrived))


def all_to_all(size: int, lengths: list[int] | None = None, arrived: list[int] | None = None) -> AllToAll:
    told = None if lengths is None else torch.tensor(lengths)
    return AllToAll(octets(N, size), octets(N, size), told, None if arrived is None else torch.tensor(arrived))


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        # A row to, and from, each of three others.
        (all_to_all(100), (300, 300)),
        (gather(100), (300, 300)),
        # Twice three quarters of the vector, in both directions.
        (Reduce(torch.zeros(1000), "sum"), (6000, 6000)),
        (Reduce(torch.zeros(1000, dtype=torch.bfloat16), "sum"), (3000, 3000)),
        # A small maximum goes by a gather, with eight bytes of checksum, a large one by a ring.
        (Reduce(torch.zeros(10), "max"), (3 * (40 + 8),) * 2),
        (Reduce(torch.zeros(GATHERED_REDUCE_BYTES // 4), "min"), (3 * (GATHERED_REDUCE_BYTES + 8),) * 2),
        (Reduce(torch.zeros(GATHERED_REDUCE_BYTES), "max"), (6 * GATHERED_REDUCE_BYTES,) * 2),
    ],
)
def test_bytes_of_an_operation(op: Op, expected: tuple[int, int]) -> None:
    assert op_bytes(op, N) == expected


@pytest.mark.parametrize("op", [all_to_all(100, [0, 7, 8, 9], [0, 1, 2, 3]), gather(100, [0, 7, 8, 9], [0, 1, 2, 3])])
def test_rows_of_different_lengths_count_as_they_are_and_their_lengths_too(op: Op) -> None:
    """Eight bytes to tell each of three others, and eight from each of them."""
    assert op_bytes(op, N) == (7 + 8 + 9 + 3 * 8, 1 + 2 + 3 + 3 * 8)


def test_an_operation_with_a_scope_counts_with_its_group() -> None:
    """Among three of twelve ranks: two thirds of the vector twice, rows to two others, and the place in their tree."""
    scope = Scope("node", tuple(tuple(range(i, i + 3)) for i in range(0, 12, 3)))
    assert op_bytes(Reduce(torch.zeros(300), "sum", scope), 12, rank=7) == (1600, 1600)
    assert op_bytes(AllGather(octets(100), octets(3, 100), scope=scope), 12, rank=7) == (200, 200)
    # Of three ranks the first sends to both others.
    sent = [op_bytes(Broadcast(octets(100), 0, scope=scope), 12, rank)[0] for rank in (6, 7, 8)]
    assert sent == [200, 0, 0]
    meter = Meter(7)
    meter.count(SendRecv(octets(10), octets(10), to=2, source=None, scope=scope), 12)
    assert (meter.sent_to, meter.sent_within) == ({8: 10}, {"node": 10})


@pytest.mark.parametrize("world_size", range(1, 18))
@pytest.mark.parametrize("root", [0, 1, 5])
def test_a_broadcast_reaches_every_rank_once(world_size: int, root: int) -> None:
    """Played as Gloo's tree is: in step i all that have the value send it 2^i places on, counted from the root."""
    root %= world_size
    sends, have = dict.fromkeys(range(world_size), 0), {0}
    for i in range(world_size.bit_length()):
        for place in sorted(have):
            if place < 1 << i and place + (1 << i) < world_size:
                sends[(place + root) % world_size] += 1
                have.add(place + (1 << i))
    assert have == set(range(world_size))
    assert [broadcast_sends(rank, root, world_size) for rank in range(world_size)] == list(sends.values())
    assert sum(sends.values()) == world_size - 1


@pytest.mark.parametrize(("rank", "sent", "received"), [(2, 2, 0), (3, 1, 1), (0, 0, 1), (1, 0, 1)])
def test_bytes_of_a_broadcast_by_rank(rank: int, sent: int, received: int) -> None:
    """From rank 2 of four, as elements of their own size, and as much of a row as was told, with eight bytes for it."""
    whole = Broadcast(torch.zeros(100), root=2)
    assert op_bytes(whole, N, rank) == (400 * sent, 400 * received)
    part = Broadcast(octets(100), root=2, length=torch.tensor([60]))
    assert op_bytes(part, N, rank) == (68 * sent, 68 * received)
    meter = Meter(rank)
    meter.count(whole, N)
    meter.count(part, N)
    assert (meter.sent_bytes, meter.received_bytes, meter.ring_bytes) == (468 * sent, 468 * received, 0)


def test_a_meter_adds_up_and_tells_what_went_round_a_ring() -> None:
    meter = Meter()
    meter.count(all_to_all(100, [0, 7, 8, 9], [0, 1, 2, 3]), N)
    meter.count(Reduce(torch.zeros(1000), "sum"), N)
    meter.count(Reduce(torch.zeros(10), "max"), N)
    assert (meter.sent_bytes, meter.received_bytes, meter.ring_bytes) == (48 + 6000 + 144, 30 + 6000 + 144, 6000)


def test_which_operations_are_gathered_and_which_go_in_turn() -> None:
    assert not gathers(Reduce(torch.zeros(1), "sum")), "a sum depends on its order"
    assert gathers(Reduce(torch.zeros(GATHERED_REDUCE_BYTES // 4), "max"))
    assert not gathers(Reduce(torch.zeros(GATHERED_REDUCE_BYTES // 4 + 1), "max"))
    for kind in (gather, all_to_all):
        assert large(kind(LARGE_BYTES))
        assert not large(kind(LARGE_BYTES - 1))
    assert not large(Reduce(torch.zeros(LARGE_BYTES), "sum"))
    assert large(Broadcast(torch.zeros(LARGE_BYTES // 4), 0))
    assert not large(Broadcast(octets(LARGE_BYTES - 1), 0))


def test_the_dense_equivalent_is_a_ring_of_float32() -> None:
    assert dense_bytes(1000, 4) == 6000
    assert dense_bytes(1000, 2) == 4000
    assert dense_bytes(1000, 1) == 0


def test_factor_and_bits_of_what_was_sent() -> None:
    traffic = Traffic(sent_bytes=500, received_bytes=1, dense_bytes=4000, elements=1000, rounds=1)
    assert traffic.compression_factor == 8.0
    assert traffic.bits_per_element == 4.0
    for nothing_to_compare in (Traffic(), Traffic(sent_bytes=1), Traffic(dense_bytes=1)):
        assert nothing_to_compare.compression_factor == 1.0
        assert nothing_to_compare.bits_per_element == 32.0


@pytest.mark.parametrize(
    ("op", "kind", "rounds", "messages"),
    [
        (Reduce(torch.zeros(1000), "sum"), "ring", 6, 6),
        (Reduce(torch.zeros(10), "max"), "gather", 1, 3),
        (all_to_all(100), "all_to_all", 1, 3),
        (gather(100), "all_gather", 1, 3),
        (gather(100, [0, 7, 8, 9], [0, 1, 2, 3]), "all_gather", 1, 6),
        (all_to_all(LARGE_BYTES), "pairs", 3, 3),
        (all_to_all(LARGE_BYTES, [0, 7, 8, 9], [0, 1, 2, 3]), "pairs", 3, 6),
        (Broadcast(octets(100), 0), "broadcast", 2, 2),
        (Broadcast(octets(LARGE_BYTES), 0, torch.tensor([70])), "pairs", 4, 4),
    ],
)
def test_rounds_and_messages_of_an_operation(op: Op, kind: str, rounds: int, messages: int) -> None:
    """Of a ring 2 (N - 1) that wait for each other, of pairs N - 1, of a broadcast log2(N), else one.

    Lengths are told by one more message each, which waits for no other but in a broadcast.
    """
    assert _shape(op, N) == (kind, op_bytes(op, N)[0], rounds, messages)


def test_messages_to_a_single_rank_are_counted_by_that_rank() -> None:
    meter = Meter()
    meter.count(SendRecv(octets(100), octets(100), to=2, source=1), N)
    told = torch.tensor([40])
    meter.count(SendRecv(octets(100), octets(100), 2, 1, told, told), N)
    meter.count(SendRecv(octets(50), octets(50), to=1, source=None), N)
    meter.count(SendRecv(octets(50), octets(50), to=None, source=3), N)
    meter.count(all_to_all(100), N)
    # A length of eight bytes goes before a row that has one of its own; what goes to all is not one rank's.
    assert meter.sent_to == {2: 100 + 48, 1: 50}
    assert meter.sent_bytes == 148 + 50 + 300
