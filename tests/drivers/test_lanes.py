"""Exchanges that a lane starts without waiting end in one of two ways, whatever happens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gradwire.exchange.drivers import Job, Lane, WireError
from gradwire.exchange.ops import AllGather, AllToAll, Exchange, Reduce, Scope, SendRecv
from ranks import Ranks


@pytest.fixture
def lane() -> Iterator[Lane]:
    made = Lane(dist.HashStore(), 0, 1, timedelta(seconds=30), "lane")
    yield made
    made.close()


def exchange(after: Callable[[], object], collectives: int = 1) -> Exchange[int]:
    for _ in range(collectives):
        yield AllToAll(torch.zeros(1, 4, dtype=torch.uint8), torch.empty(1, 4, dtype=torch.uint8))
    after()
    return 7


def outcome(lane: Lane, generator: Exchange[int], done: Callable[[int], None] = lambda value: None) -> list[object]:
    """Start an exchange; give what ``done`` and ``fail`` were told."""
    told: list[object] = []
    ended = threading.Event()

    def succeed(value: int) -> None:
        told.append(value)
        done(value)
        ended.set()

    def fail(error: Exception) -> None:
        told.append(error)
        ended.set()

    lane.begin(generator, succeed, fail)
    assert ended.wait(5), "neither done nor fail came to an end"
    return told


def test_its_value_is_handed_on(lane: Lane) -> None:
    assert outcome(lane, exchange(lambda: None)) == [7]


def test_what_the_decoder_raises_is_told(lane: Lane) -> None:
    def broken() -> None:
        raise KeyError("decoder")

    (told,) = outcome(lane, exchange(broken))
    assert isinstance(told, KeyError)


def test_what_done_raises_is_told_too(lane: Lane) -> None:
    def broken(value: int) -> None:
        raise KeyError("done")

    value, told = outcome(lane, exchange(lambda: None), broken)
    assert value == 7
    assert isinstance(told, KeyError)


def test_an_exchange_of_two_collectives_is_refused(lane: Lane) -> None:
    (told,) = outcome(lane, exchange(lambda: None, collectives=2))
    assert isinstance(told, TypeError)
    assert not isinstance(told, WireError)


def test_a_failure_closes_the_connections_though_its_traceback_is_kept(lane: Lane) -> None:
    """Other ranks learn of it when connections close, not when whoever caught the error lets go of it."""
    kept: list[Exception] = []
    ended = threading.Event()

    def run(lane: Lane) -> None:
        lane.drive(exchange(lambda: None))
        raise KeyError("after the exchange")

    def fail(error: Exception) -> None:
        kept.append(error)
        lane.submit(Job(lambda lane: None, lambda error: None))

    transport = lane._transports[None] if lane._transports else None
    lane.submit(Job(run, fail))
    lane.submit(Job(lambda lane: ended.set(), lambda error: ended.set()))
    assert ended.wait(5)
    assert kept
    with pytest.raises(AttributeError):
        transport.execute(AllToAll(torch.zeros(1, 4, dtype=torch.uint8), torch.empty(1, 4, dtype=torch.uint8)), int)


NODES = Scope("node", ((0, 1), (2, 3)), local=True)
ACROSS = Scope("between nodes", ((0, 2), (1, 3)))


def within(rank: int) -> Exchange[tuple[float, list[int], float]]:
    inside = yield Reduce(torch.tensor([float(1 << rank)]), "sum", NODES)
    # Large enough to be sent in turn where the network is in question, and of another length in each group.
    size = 100_000 + rank % 2
    mine = torch.full((size,), rank, dtype=torch.uint8)
    rows = yield AllGather(mine, torch.empty(2, size, dtype=torch.uint8), scope=ACROSS, last=True)
    late = yield AllGather(mine[:100_000], torch.empty(2, 100_000, dtype=torch.uint8), scope=NODES)
    everywhere = yield Reduce(torch.tensor([1.0]), "sum")
    return float(inside), [int(row.unique()) for row in (*rows, *late)], float(everywhere)


def scoped() -> tuple[tuple[float, list[int], float], dict[str, int]]:
    store = dist.PrefixStore("scoped lane", dist.distributed_c10d._get_default_store())
    rank, wait = dist.get_rank(), timedelta(seconds=60)
    made = Lane(store, rank, dist.get_world_size(), wait, "lane", scopes=(NODES, ACROSS))
    try:
        return made.drive(within(rank)), dict(made.meter.sent_within)
    finally:
        made.close()


@pytest.mark.ranks
def test_within_a_scope_each_group_is_on_its_own(four_ranks: Ranks) -> None:
    for rank, (found, sent) in enumerate(four_ranks(scoped)):
        node, across = (0, 1) if rank < 2 else (2, 3), (rank % 2, rank % 2 + 2)
        assert found == (float(sum(1 << r for r in node)), [*across, *node], 4.0)
        assert sent == {"node": 4 + 100_000, "between nodes": 100_000 + rank % 2}


def kept_by_its_error(kept: list[BaseException]) -> tuple[str, str]:
    """Break a lane of three ranks: rank 2 closes it, rank 1 notices, keeps the error, and rank 0 waits for rank 1."""
    rank, other = dist.get_rank(), {0: 1, 1: 2, 2: 0}[dist.get_rank()]
    store = dist.PrefixStore("kept", dist.distributed_c10d._get_default_store())
    lane = Lane(store, rank, 3, timedelta(seconds=60), "lane")
    dist.barrier()
    if rank == 2:
        lane.close()
        return "", ""

    def swap() -> Exchange[int]:
        yield SendRecv(torch.zeros(4, dtype=torch.uint8), torch.empty(4, dtype=torch.uint8), None, other)
        return 7

    ended = threading.Event()

    def fail(error: Exception) -> None:
        kept.append(error)
        ended.set()

    lane.submit(Job(lambda lane: lane.drive(swap()) and None, fail))
    assert ended.wait(50)
    return type(kept[0]).__name__, str(bool(kept[0].__traceback__))


def keep_the_error() -> tuple[str, str]:
    kept: list[BaseException] = []
    found = kept_by_its_error(kept)
    # While it is kept, and nobody collects anything, the connections of this rank are closed.
    dist.barrier()
    return found


def test_whoever_keeps_an_error_keeps_no_connection_open(three_ranks: Ranks) -> None:
    assert three_ranks(keep_the_error) == [("WireError", "True"), ("WireError", "True"), ("", "")]
