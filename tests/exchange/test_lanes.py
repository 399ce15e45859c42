"""Exchanges that a lane starts without waiting end in one of two ways, whatever happens."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gradwire.exchange.drivers import Future, Lane, WireError
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


def outcome(
    lane: Lane, generator: Exchange[int], at_once: bool, done: Callable[[int], None] = lambda value: None
) -> list[object]:
    """Run an exchange; give what its callbacks were told before whoever waits for it went on."""
    told: list[object] = []

    def succeed(value: int) -> None:
        told.append(value)
        done(value)

    future = lane.run(generator, then=succeed, fail=told.append, at_once=at_once)
    waiting = threading.Thread(target=future.wait, daemon=True)
    waiting.start()
    waiting.join(60)
    assert not waiting.is_alive(), "neither callback came to an end"
    if isinstance(told[-1], Exception):
        assert future.error is told[-1]
        with pytest.raises(type(told[-1])):
            future.result()
    else:
        assert future.result() == told[-1]
    return told


both_ways = pytest.mark.parametrize("at_once", [True, False], ids=["at once", "in turn"])


@both_ways
def test_its_value_is_handed_on(lane: Lane, at_once: bool) -> None:
    assert outcome(lane, exchange(lambda: None), at_once) == [7]


@both_ways
def test_what_the_decoder_raises_is_told(lane: Lane, at_once: bool) -> None:
    def broken() -> None:
        raise KeyError("decoder")

    (told,) = outcome(lane, exchange(broken), at_once)
    assert isinstance(told, KeyError)


@both_ways
def test_an_exit_that_the_decoder_asks_for_is_told_as_an_error(lane: Lane, at_once: bool) -> None:
    """It ended the lane's thread alone: this rank waited for ever, and the others until the group's timeout."""

    def leave() -> None:
        sys.exit(3)

    (told,) = outcome(lane, exchange(leave), at_once)
    assert isinstance(told, RuntimeError)
    assert str(told) == "SystemExit(3) was raised on a thread that exchanges"


@both_ways
def test_what_done_raises_is_told_too(lane: Lane, at_once: bool) -> None:
    def broken(value: int) -> None:
        raise KeyError("done")

    value, told = outcome(lane, exchange(lambda: None), at_once, broken)
    assert value == 7
    assert isinstance(told, KeyError)


def test_an_exchange_of_two_collectives_is_refused(lane: Lane) -> None:
    (told,) = outcome(lane, exchange(lambda: None, collectives=2), at_once=True)
    assert isinstance(told, TypeError)
    assert not isinstance(told, WireError)


@both_ways
def test_a_lane_that_is_closed_tells_that_a_collective_broke(lane: Lane, at_once: bool) -> None:
    lane.hang_up()
    assert outcome(lane, exchange(lambda: None), at_once=False)
    (told,) = outcome(lane, exchange(lambda: None), at_once)
    assert isinstance(told, WireError)


@both_ways
def test_what_is_submitted_to_a_lane_that_was_closed_is_refused(lane: Lane, at_once: bool) -> None:
    lane.close()
    (told,) = outcome(lane, exchange(lambda: None), at_once)
    assert isinstance(told, WireError)
    assert str(told).endswith("this lane was closed")


@both_ways
def test_what_breaks_between_two_exchanges_is_told_by_the_next(
    lane: Lane, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is: a thread that ended by it would let the next wait for ever."""

    def broken() -> None:
        raise KeyError("prepared")

    class Listener:
        """Hears what broke."""

        def __init__(self) -> None:
            self.errors: list[Exception] = []
            self.heard = threading.Event()

        def tell(self, lane: Lane, error: Exception) -> None:
            self.errors.append(error)
            self.heard.set()

    (transport,), listener = (lane._transports or {}).values(), Listener()
    monkeypatch.setattr(transport, "end_job", broken)
    lane.on_failure(weakref.WeakMethod(listener.tell))
    assert outcome(lane, exchange(lambda: None), at_once=False) == [7]
    # Whoever waits for the first exchange goes on before the lane's thread prepares the next one.
    assert listener.heard.wait(60)
    assert [repr(error) for error in listener.errors] == ["KeyError('prepared')"]
    (told,) = outcome(lane, exchange(lambda: None), at_once)
    assert isinstance(told, WireError)
    assert "KeyError: 'prepared'" in str(told)


def test_the_bytes_of_what_is_started_count_before_it_ends(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks gather beside a round may end after it, and is among the round's bytes all the same."""
    (transport,) = (lane._transports or {}).values()
    replied: torch.futures.Future[object] = torch.futures.Future()
    monkeypatch.setattr(transport, "start", lambda op: (replied, op.recv))
    monkeypatch.setattr(lane, "world_size", 3)
    future = lane.run(exchange(lambda: None), at_once=True)
    begun = lane.meter.sent_bytes
    replied.set_result(None)
    assert future.result() == 7
    assert begun == lane.meter.sent_bytes > 0


def test_exchanges_run_in_the_order_in_which_they_were_handed_over(lane: Lane) -> None:
    """Each after what it waits for, and one that is to come first before it."""
    order: list[str] = []
    future: Future[int] | None = None
    for name in "ab":
        future = lane.run(
            exchange(lambda name=name: order.append(f"{name} second")),  # type: ignore[misc]
            wait=lambda name=name: order.append(f"{name} waits"),  # type: ignore[misc]
            first=exchange(lambda name=name: order.append(f"{name} first")),  # type: ignore[misc]
            then=lambda _, name=name: order.append(f"{name} then"),  # type: ignore[misc]
        )
    assert future is not None
    assert future.result() == 7
    assert order == [f"{name} {what}" for name in "ab" for what in ("waits", "first", "second", "then")]


def test_a_generator_that_a_failure_ends_is_closed_on_the_lanes_thread(lane: Lane) -> None:
    """What it has entered, such as a device's stream, is of that thread."""
    closed: list[str] = []

    def entered() -> Exchange[int]:
        try:
            yield AllToAll(torch.zeros(1, 4, dtype=torch.uint8), torch.empty(1, 4, dtype=torch.uint8))
        finally:
            closed.append(threading.current_thread().name)
        return 7

    lane.hang_up()
    kept = entered()
    with pytest.raises(WireError):
        lane.run(kept).result()
    assert closed == ["lane"]


def test_a_failure_closes_the_connections_though_its_traceback_is_kept(lane: Lane) -> None:
    """Other ranks learn of it when connections close, not when whoever caught the error lets go of it."""
    kept: list[Exception] = []
    ended = threading.Event()

    def broken() -> None:
        raise KeyError("after the exchange")

    transport = lane._transports[None] if lane._transports else None
    lane.run(exchange(broken), fail=kept.append)
    lane.run(exchange(lambda: None), wait=ended.set)
    assert ended.wait(60)
    assert kept
    with pytest.raises(RuntimeError, match="closed"):
        transport.execute(AllToAll(torch.zeros(1, 4, dtype=torch.uint8), torch.empty(1, 4, dtype=torch.uint8)), int)


NODES = Scope("node", ((0, 1), (2, 3)), local=True)
ACROSS = Scope("between nodes", ((0, 2), (1, 3)))


def within(rank: int) -> Exchange[tuple[float, list[int], float]]:
    inside = yield Reduce(torch.tensor([float(1 << rank)]), "sum", NODES)
    # Large enough to be sent in turn where the network is in question, and of another length in each group.
    size = 100_000 + rank % 2
    mine = torch.full((size,), rank, dtype=torch.uint8)
    rows = yield AllGather(mine, torch.empty(2, size, dtype=torch.uint8), scope=ACROSS)
    late = yield AllGather(mine[:100_000], torch.empty(2, 100_000, dtype=torch.uint8), scope=NODES)
    everywhere = yield Reduce(torch.tensor([1.0]), "sum")
    return float(inside), [int(row.unique()) for row in (*rows, *late)], float(everywhere)


def scoped() -> tuple[tuple[float, list[int], float], dict[str, int]]:
    store = dist.PrefixStore("scoped lane", dist.distributed_c10d._get_default_store())
    rank, wait = dist.get_rank(), timedelta(seconds=60)
    made = Lane(store, rank, dist.get_world_size(), wait, "lane", scopes=(NODES, ACROSS))
    try:
        return made.run(within(rank)).result(), dict(made.meter.sent_within)
    finally:
        made.close()


@pytest.mark.ranks
def test_within_a_scope_each_group_is_on_its_own(four_ranks: Ranks) -> None:
    for rank, (found, sent) in enumerate(four_ranks(scoped)):
        node, across = (0, 1) if rank < 2 else (2, 3), (rank % 2, rank % 2 + 2)
        assert found == (float(sum(1 << r for r in node)), [*across, *node], 4.0)
        assert sent == {"node": 4 + 100_000, "between nodes": 100_000 + rank % 2}


def kept_by_its_error(kept: list[BaseException]) -> tuple[str, bool, bool]:
    """Break a lane of three ranks: rank 2 closes it, rank 1 notices, keeps the error, and rank 0 waits for rank 1."""
    rank, other = dist.get_rank(), {0: 1, 1: 2, 2: 0}[dist.get_rank()]
    store = dist.PrefixStore("kept", dist.distributed_c10d._get_default_store())
    lane = Lane(store, rank, 3, timedelta(seconds=60), "lane")
    dist.barrier()
    if rank == 2:
        lane.close()
        return "", False, False

    def swap() -> Exchange[int]:
        yield SendRecv(torch.zeros(4, dtype=torch.uint8), torch.empty(4, dtype=torch.uint8), None, other)
        return 7

    lane.run(swap(), fail=kept.append).wait()
    return type(kept[0]).__name__, bool(kept[0].__traceback__), "timed out" in str(kept[0]).lower()


def keep_the_error() -> tuple[str, bool, bool]:
    kept: list[BaseException] = []
    found = kept_by_its_error(kept)
    # While it is kept, and nobody collects anything, the connections of this rank are closed.
    dist.barrier()
    return found


def test_whoever_keeps_an_error_keeps_no_connection_open(three_ranks: Ranks) -> None:
    ended = ("WireError", True, False)
    assert three_ranks(keep_the_error) == [ended, ended, ("", False, False)]
