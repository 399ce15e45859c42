"""Messages that show BBR the bandwidth of new connections: when they are sent, how large, and who is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradwire.errors import PayloadError
from gradwire.exchange.drivers import Lane
from gradwire.exchange.drivers.transports import GlooTransport, gloo
from gradwire.exchange.drivers.transports.opening import MOST_BYTES, SIZES, open_connections
from gradwire.exchange.ops import AllToAll
from gradwire.exchange.wire import with_checksum

N = 3
WAIT = timedelta(seconds=20)


@pytest.fixture
def backends() -> Iterator[list[Any]]:
    """The connections of ranks of this process."""
    store = dist.HashStore()
    with ThreadPoolExecutor(N) as pool:
        yield list(pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, N, WAIT), range(N)))


def opened(backends: list[Any], greetings_s: list[float], clock: Callable[[int], Callable[[], float]]) -> list[Any]:
    """Open the connections of all ranks; return what each returned or raised."""

    def body(rank: int) -> Any:
        try:
            return open_connections(backends[rank], greetings_s[rank], lambda work: work.wait(), clock(rank))
        except Exception as error:
            return error

    with ThreadPoolExecutor(N) as pool:
        return list(pool.map(body, range(N)))


def ticking(step_s: float) -> Callable[[], float]:
    """A clock that goes on by so much whenever it is read."""
    ticks = count()
    return lambda: step_s * next(ticks)


def test_messages_grow_until_round_trips_have_passed(backends: list[Any]) -> None:
    # Ten round trips of 0.1 s, which the greeting of the rank that began last tells, are one second.
    steps_s = [0.0, 0.4, 0.6]
    found = opened(backends, [0.5, 0.1, 0.3], lambda rank: ticking(steps_s[rank]))
    assert found == [SIZES[-1], SIZES[1], SIZES[0]]


def test_what_follows_arrives_whole(backends: list[Any]) -> None:
    assert opened(backends, [0.1] * N, lambda rank: ticking(0.4 * rank))[0] == SIZES[-1]

    def body(rank: int) -> list[list[int]]:
        transport = GlooTransport(None, rank, N, WAIT, connected=lambda *_: backends[rank])
        sent = torch.full((N, 3), rank, dtype=torch.uint8)
        return transport.execute(AllToAll(sent, torch.empty_like(sent)), nullcontext).tolist()

    with ThreadPoolExecutor(N) as pool:
        assert list(pool.map(body, range(N))) == [[[0] * 3, [1] * 3, [2] * 3]] * N


def test_short_round_trips_are_left_alone(backends: list[Any]) -> None:
    assert opened(backends, [0.05, 0.0015, 0.4], lambda rank: ticking(0.0)) == [0] * N


def test_a_rank_of_many_sends_no_more_than_a_limit() -> None:
    sizes = []

    class Alone:
        """A backend of so many ranks that receives what it sends."""

        def size(self) -> int:
            return MOST_BYTES // SIZES[-2] + 1

        def rank(self) -> int:
            return 0

        def send(self, parts: list[torch.Tensor], to: int, tag: int) -> None:
            sizes.append(parts[0].numel())

        def recv(self, parts: list[torch.Tensor], source: int, tag: int) -> None:
            if parts[0].numel() < SIZES[0]:
                parts[0].copy_(with_checksum(torch.tensor([0.1], dtype=torch.float64), source))

    assert open_connections(Alone(), 0.1, lambda work: None, ticking(0.0)) == SIZES[-2]
    assert max(sizes) * (Alone().size() - 1) == MOST_BYTES


def test_a_time_that_changed_on_the_way_is_refused_with_its_sender(backends: list[Any]) -> None:
    class Changed:
        """A backend whose messages to rank 2 change."""

        def __getattr__(self, name: str) -> Any:
            return getattr(backends[1], name)

        def send(self, parts: list[torch.Tensor], to: int, tag: int) -> Any:
            part = parts[0].clone()
            part[3] ^= to == 2
            return backends[1].send([part], to, tag)

    found = opened([backends[0], Changed(), backends[2]], [0.001] * N, lambda rank: ticking(0.0))
    assert found[:2] == [0, 0]
    assert isinstance(found[2], PayloadError)
    assert "the time of a greeting from rank 1" in str(found[2])


@pytest.mark.parametrize("one", [False, True], ids=["no rank", "one rank"])
def test_a_lane_opens_its_connections_if_any_rank_has_bbr(monkeypatch: pytest.MonkeyPatch, one: bool) -> None:
    ranks, told = list[int](), iter(["cubic", "bbr2" if one else "reno", None])
    monkeypatch.setattr(gloo, "congestion_here", lambda: next(told))
    monkeypatch.setattr(gloo, "open_connections", lambda backend, greeting_s, wait_for: ranks.append(backend.rank()))
    store = dist.HashStore()
    with ThreadPoolExecutor(N) as pool:
        lanes = list(pool.map(lambda rank: Lane(store, rank, N, WAIT, "test"), range(N)))
    assert all(lane.close(20.0) for lane in lanes)
    assert sorted(ranks) == (list(range(N)) if one else [])
