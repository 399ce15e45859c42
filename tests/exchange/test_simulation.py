"""Ranks in lockstep: every rank gets what the operation says, in the order of ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gradwire.errors import ExchangeError
from gradwire.exchange.drivers import Meter, simulate_ranks
from gradwire.exchange.ops import AllGather, AllToAll, Broadcast, Exchange, Op, Reduce, Scope

N = 3


def one(op: Op) -> Exchange[list[float]]:
    reply = yield op
    return reply.flatten().tolist()


def simulated(make: Callable[[int], Op]) -> list[list[float]]:
    return simulate_ranks([one(make(rank)) for rank in range(N)], [Meter() for _ in range(N)])


@pytest.mark.parametrize(("kind", "expected"), [("sum", [6.0, 0.0]), ("max", [3.0, 1.0]), ("min", [1.0, -1.0])])
def test_a_reduction_reaches_every_rank(kind: str, expected: list[float]) -> None:
    values = [torch.tensor([r + 1.0, r - 1.0]) for r in range(N)]
    assert simulated(lambda rank: Reduce(values[rank], kind)) == [expected] * N
    assert values[0].tolist() == [1.0, -1.0], "what was given stays as it is"


def test_row_r_goes_to_rank_r() -> None:
    def make(rank: int) -> Op:
        rows = torch.tensor([[10 * rank + to] for to in range(N)], dtype=torch.uint8)
        return AllToAll(rows, torch.empty_like(rows))

    assert simulated(make) == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]


def test_a_gather_brings_every_ranks_row_in_their_order() -> None:
    room = torch.empty(N, 2, dtype=torch.uint8)
    assert simulated(lambda r: AllGather(torch.tensor([r, r], dtype=torch.uint8), room)) == [[0, 0, 1, 1, 2, 2]] * N


def test_a_broadcast_brings_the_roots_value_to_all() -> None:
    values = [torch.tensor([[r + 1.0, r - 1.0]]) for r in range(N)]
    assert simulated(lambda rank: Broadcast(values[rank], root=1)) == [[2.0, 0.0]] * N
    with pytest.raises(ExchangeError, match="different operations"):
        simulated(lambda rank: Broadcast(values[rank], root=rank))


def test_of_a_broadcast_as_much_arrives_as_was_told() -> None:
    rows = [torch.full((4,), r, dtype=torch.uint8) for r in range(N)]
    lengths = [torch.tensor([3 if r == 2 else 0]) for r in range(N)]
    found = simulated(lambda rank: Broadcast(rows[rank], root=2, length=lengths[rank]))
    assert found == [[2, 2, 2, 0], [2, 2, 2, 1], [2, 2, 2, 2]]
    assert [int(length) for length in lengths] == [3] * N


@pytest.mark.parametrize("gathered", [True, False])
def test_every_rank_is_told_how_much_came_from_whom(gathered: bool) -> None:
    arrived = [torch.zeros(N, dtype=torch.int64) for _ in range(N)]

    def make(rank: int) -> Op:
        lengths = torch.tensor([0 if to == rank else 1 + rank + (0 if gathered else 10 * to) for to in range(N)])
        if gathered:
            return AllGather(torch.zeros(50, dtype=torch.uint8), torch.empty(N, 50), lengths, arrived[rank])
        rows = torch.zeros(N, 50, dtype=torch.uint8)
        return AllToAll(rows, torch.empty_like(rows), lengths, arrived[rank])

    if gathered:
        made = [make(rank) for rank in range(N)]
        room = torch.empty(N, 50, dtype=torch.uint8)
        ops = [AllGather(op.send, room, op.lengths, op.arrived) for op in made]
    else:
        ops = [make(rank) for rank in range(N)]
    simulated(lambda rank: ops[rank])
    extra = 0 if gathered else 10
    assert [row.tolist() for row in arrived] == [
        [0 if sender == rank else 1 + sender + extra * rank for sender in range(N)] for rank in range(N)
    ]


NODES = Scope("node", ((0, 1), (2, 3)), local=True)
ACROSS = Scope("between nodes", ((0, 2), (1, 3)))


def test_within_a_scope_each_group_is_on_its_own() -> None:
    def rank(r: int) -> Exchange[list[list[float]]]:
        inside = yield Reduce(torch.tensor([float(1 << r)]), "sum", NODES)
        # Groups of the second scope have members of both groups of the first, and ask for different sizes.
        room = torch.empty(2, 1 + r % 2, dtype=torch.uint8)
        across = yield AllGather(torch.full((1 + r % 2,), r, dtype=torch.uint8), room, scope=ACROSS)
        everywhere = yield Reduce(torch.tensor([float(r)]), "max")
        return [inside.tolist(), across.flatten().tolist(), everywhere.tolist()]

    meters = [Meter(r) for r in range(4)]
    found = simulate_ranks([rank(r) for r in range(4)], meters)
    assert found == [
        [[3.0], [0, 2], [3.0]],
        [[3.0], [1, 1, 3, 3], [3.0]],
        [[12.0], [0, 2], [3.0]],
        [[12.0], [1, 1, 3, 3], [3.0]],
    ]
    # A ring of four bytes between two ranks, and one row.
    assert [dict(m.sent_within) for m in meters] == [{"node": 4, "between nodes": 1 + r % 2} for r in range(4)]


def test_a_group_may_have_less_to_do_than_another() -> None:
    def rank(r: int) -> Exchange[float]:
        if r in (0, 2):
            yield Reduce(torch.zeros(1), "sum", ACROSS)
        reply = yield Reduce(torch.tensor([float(r)]), "sum", NODES)
        return float(reply)

    assert simulate_ranks([rank(r) for r in range(4)], [Meter(r) for r in range(4)]) == [1.0, 1.0, 5.0, 5.0]


def test_scopes_that_never_meet_are_an_error() -> None:
    generators = [one(Reduce(torch.zeros(1), "sum", NODES if r < 2 else ACROSS)) for r in range(4)]
    with pytest.raises(ExchangeError, match=r"different operations.*between nodes"):
        simulate_ranks(generators, [Meter(r) for r in range(4)])


def test_ranks_that_end_at_different_times_are_an_error() -> None:
    def nothing() -> Exchange[list[float]]:
        return [0.0]
        yield

    generators = [one(Reduce(torch.zeros(1), "sum")), nothing()]
    with pytest.raises(ExchangeError, match="different operations"):
        simulate_ranks(generators, [Meter(), Meter()])


def test_with_a_leader_alone_the_others_stop_where_it_ends() -> None:
    ended: list[int] = []

    def rank(number: int) -> Exchange[int]:
        yield Reduce(torch.zeros(1), "sum")
        ended.append(number)
        return number

    assert simulate_ranks([rank(r) for r in range(N)], [Meter() for _ in range(N)], leader_only=True) == [0]
    assert ended == [0]
