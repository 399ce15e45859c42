"""One-way delays on the critical path: shapes counted by hand, and every method's own count."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import gradwire as gw
from cases import EVERY
from gradwire.exchange.drivers import count_delays, count_step_delays
from gradwire.exchange.drivers.delays import Moment, latest, op_delays, ring_segments
from gradwire.exchange.network_cost import Delays
from gradwire.exchange.ops import AllGather, AllToAll, Broadcast, Exchange, Op, Reduce, Scope, SendRecv
from gradwire.exchange.planning import Options, Planner, exchanged
from gradwire.exchange.protocols import Context
from gradwire.exchange.protocols.bucket_plan import BucketPlan
from gradwire.kernels import get_kernels

SMALL, LARGE = 64, 1 << 16

Make = Callable[[Context], Op]


def row(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="meta")


def rows(world_size: int, size: int) -> torch.Tensor:
    return torch.empty((world_size, size), dtype=torch.uint8, device="meta")


def to_each(size: int = SMALL, lengths: bool = False) -> Make:
    def make(context: Context) -> Op:
        n = context.world_size
        told = torch.full((n,), size) if lengths else None
        return AllToAll(rows(n, size), rows(n, size), told, None if told is None else told.clone())

    return make


def to_all(size: int = SMALL, scope: Scope | None = None) -> Make:
    def make(context: Context) -> Op:
        n = context.world_size if scope is None else scope.place(context.rank)[1]
        return AllGather(row(size), rows(n, size), scope=scope)

    return make


def reduced(op: str, numel: int) -> Make:
    return lambda context: Reduce(torch.empty(numel, device="meta"), op)


def hop(sender: int) -> Make:
    """A row from one rank to the next; all other ranks have no part in it."""

    def make(context: Context) -> Op:
        to = sender + 1 if context.rank == sender else None
        source = sender if context.rank == sender + 1 else None
        return SendRecv(row(SMALL), row(SMALL), to, source)

    return make


class Listed(BucketPlan):
    """A plan of one chunk that runs the operations that it is given."""

    def __init__(self, *makes: Make, asynchronous: bool = False) -> None:
        self._makes = makes
        self.chunks, self.collective, self.asynchronous = 1, "", asynchronous

    def prepare(self, context: Context, flat: torch.Tensor) -> Exchange[Any]:
        return
        yield

    def run(self, context: Context, flat: torch.Tensor, prepared: Any) -> Exchange[Any]:
        for make in self._makes:
            yield make(context)


def counted(world_size: int, *makes: Make) -> Delays:
    return count_delays(Listed(*makes), 1, world_size)


def step(world_size: int, *plans: Listed, lanes: int = 2) -> int:
    return count_step_delays([(plan, 1) for plan in plans], world_size, lanes=lanes).count


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_rows_of_all_ranks_were_requested_before_and_take_a_message(world_size: int, size: int) -> None:
    assert counted(world_size, to_all(size)) == Delays({"rows to all": 1})
    assert counted(world_size, to_each(size)) == Delays({"rows to each": 1})
    assert counted(world_size, to_each(size, lengths=True)) == Delays({"rows to each": 1})
    two_shot = counted(world_size, reduced("max", 8), to_each(size), to_all(size))
    assert two_shot == Delays({"agreement": 1, "rows to each": 1, "rows to all": 1})
    assert (two_shot.count, str(two_shot)) == (3, "1 agreement + 1 rows to each + 1 rows to all")


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_the_ring_of_gloo_requests_each_hop_of_both_halves(world_size: int) -> None:
    found = counted(world_size, reduced("sum", 1 << 16))
    assert found == Delays({"sum": 2 * 2 * (world_size - 1)})


def test_a_ring_has_two_segments_of_a_mebibyte_under_way() -> None:
    # 25 MiB among 4: 28 segments, 7 of each rank, 21 places in each half, of which two take a round trip.
    assert ring_segments(25 << 20, 4) == 7
    assert counted(4, reduced("sum", 25 << 18)).count == 2 * 11 * 2
    # A large maximum goes the same way.
    assert counted(4, reduced("max", 25 << 18)) == Delays({"agreement": 44})


def test_a_ring_of_one_element_asks_for_all_hops_at_once() -> None:
    # Receivers have no other segment to wait for, so that only the first request is on the path.
    for world_size in (2, 4, 5):
        assert counted(world_size, reduced("sum", 1)).count == 1 + 2 * (world_size - 1)


def ring_hop_by_hop(world_size: int, starts: Sequence[int], parts: int, filled: int) -> list[int]:
    """Return when each rank has ended Gloo's ring, message by message; a rank has ``parts`` segments."""
    ends = list(starts)
    for first in (1, 0):
        now, before = ends, [ends, ends]
        for place in range(parts * (world_size - 1)):
            now = [max(pair) for pair in zip(now, before[place % 2])]
            done = list(now)
            for rank in range(world_size):
                if ((rank + first) * parts + place) % (parts * world_size) < filled:
                    left = max(now[rank], now[rank - 1] + 1)
                    done[rank] = max(done[rank], left)
                    done[rank - 1] = max(done[rank - 1], left + 1)
            before[place % 2] = done
        ends = [max(times) for times in zip(now, *before)]
    return ends


@pytest.mark.parametrize("world_size", [2, 3, 5, 8, 13])
def test_a_ring_of_few_elements_takes_the_delays_of_its_messages(world_size: int) -> None:
    chain = [hop(rank) for rank in range(world_size - 1)]
    for numel in (1, 2, world_size - 1, world_size, world_size + 1, 2 * world_size - 1):
        found = counted(world_size, reduced("sum", numel))
        assert found.count == max(ring_hop_by_hop(world_size, [0] * world_size, 2, numel))
        # Ranks that begin one after the other, as at the end of a chain.
        late = counted(world_size, *chain, reduced("sum", numel))
        starts = [0, *range(1, world_size)]
        assert late.count == max(ring_hop_by_hop(world_size, starts, 2, numel))


def test_the_work_of_counting_a_ring_grows_with_the_ranks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    world_size = 1024
    calls = 0

    def one_later(self: Moment, phase: str, delays: int = 1, *, real: Any = Moment.later) -> Moment:
        nonlocal calls
        calls += 1
        return real(self, phase, delays)  # type: ignore[no-any-return]

    monkeypatch.setattr(Moment, "later", one_later)
    # 2024 of 2048 segments have elements.
    assert counted(world_size, reduced("sum", 85_002)) == Delays({"sum": 4058})
    assert 0 < calls <= 4 * world_size


@pytest.mark.parametrize(("world_size", "depth"), [(2, 1), (3, 1), (4, 2), (5, 2), (7, 2), (8, 3)])
def test_a_broadcast_asks_once_and_goes_down_a_binomial_tree(world_size: int, depth: int) -> None:
    for root in (0, world_size - 1):
        found = counted(world_size, lambda context, root=root: Broadcast(row(SMALL), root))
        assert found == Delays({"broadcast": 1 + depth})


@pytest.mark.parametrize(("world_size", "count"), [(2, 4), (4, 5)])
def test_a_value_is_requested_when_its_length_has_arrived(world_size: int, count: int) -> None:
    # Of four ranks the deepest has the length after three delays; its request arrives with its parent's value.
    found = counted(world_size, lambda context: Broadcast(row(SMALL), 0, torch.tensor([SMALL])))
    assert found.count == count


def test_a_receive_posted_early_hides_its_request() -> None:
    assert counted(4, hop(0)).count == 1
    assert counted(4, hop(0), hop(1), hop(2)) == Delays({"neighbours": 3})
    # The other way round every rank has its row when the sender of the next one has not yet read its own.
    assert counted(4, hop(2), hop(1), hop(0)).count == 1


def test_messages_within_a_machine_take_no_delay() -> None:
    inside = Scope("node", ((0, 1), (2, 3)), local=True)
    between = Scope("between nodes", ((0, 2), (1, 3)))
    assert counted(4, to_all(scope=inside)).count == 0
    assert counted(4, to_all(scope=inside), to_all(scope=between), to_all(scope=inside)).count == 1


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_lanes_run_side_by_side(size: int) -> None:
    plan = Listed(to_each(size), to_all(size))
    assert [step(3, *[plan] * buckets) for buckets in (1, 2, 3)] == [2, 2, 4]
    assert step(3, plan, plan, lanes=1) == 4


def test_groups_of_a_scope_end_at_times_of_their_own() -> None:
    pairs = Scope("pairs", ((0, 1), (2, 3)))
    # Ranks 2 and 3 receive later than ranks 0 and 1.
    late = Listed(hop(2), to_all(LARGE, scope=pairs))
    assert [step(4, *[late] * buckets) for buckets in (1, 2)] == [2, 2]


def test_a_backend_runs_two_collectives_at_a_time_on_each_lane() -> None:
    cast = Listed(reduced("sum", 1 << 16), asynchronous=True)
    assert [step(2, *[cast] * buckets) for buckets in (1, 4, 5)] == [4, 4, 8]
    assert step(2, *[cast] * 5, lanes=1) == 12


def test_the_latest_of_two_paths_is_kept_with_its_phases() -> None:
    early, late = Moment().later("a"), Moment().later("b").later("c").later("b")
    assert latest(early, late) is late
    assert (late.at, dict(late.path)) == (3, {"b": 2, "c": 1})
    assert latest(early, Moment().later("d")) is early


@pytest.mark.parametrize("world_size", [2, 5])
def test_a_single_operation_takes_what_a_plan_of_it_takes(world_size: int) -> None:
    for make in (to_all(), to_each(LARGE, lengths=True), reduced("max", 8), reduced("sum", 1 << 16)):
        op = make(Context(0, world_size, 0))
        assert op_delays(op, world_size) == counted(world_size, make).count


def planned(method: gw.Method, world_size: int, widths: Sequence[int]) -> dict[str, Delays]:
    """Return the delays of one bucket with a matrix of each width and a short vector, by protocol."""
    parameters: Any = {f"w{width}": torch.empty((80, width), device="meta") for width in widths}
    parameters["b"] = torch.empty(40, device="meta")
    parameters, options = exchanged(method, parameters, Options())
    found = {}
    for collective in method.traits.collectives:
        planner = Planner(method, parameters, world_size, options)
        plan = planner._build(tuple(planner.step_order()), False, collective, get_kernels("meta"))
        found[collective] = count_delays(plan, sum(p.numel() for p in parameters.values()), world_size)
    return found


@pytest.mark.parametrize("method", EVERY, ids=repr)
def test_every_method_has_a_count_that_depends_on_its_protocol_alone(method: gw.Method) -> None:
    for world_size in (2, 4):
        short, long = (planned(method, world_size, [width, 2 * width]) for width in (160, 400))
        for collective, found in short.items():
            assert 0 < found.count < math.inf, collective
            # A ring has as many segments as mebibytes, which these buckets have not.
            assert found == long[collective], collective
            assert all(delays > 0 for delays in found.phases.values())


def test_a_protocol_with_a_message_more_has_a_delay_more() -> None:
    def of(spec: str, collective: str) -> int:
        return planned(gw.method(spec), 4, [200])[collective].count

    assert of("TernGrad(clip=None, share_scaler=True)", "two_shot") == 3
    assert of("TernGrad(clip=None, share_scaler=True)", "all_gather") == 2
    assert of("TernGrad(clip=None, share_scaler=False)", "all_gather") == 1
    # The lengths of coded rows travel beside them.
    assert of("Coded(TernGrad())", "all_gather") == of("TernGrad()", "all_gather")


def test_a_step_of_two_buckets_is_planned_as_a_link_runs_it() -> None:
    parameters = {name: torch.empty(1 << 22, device="meta") for name in ("first", "second")}
    planner = Planner(gw.method("terngrad"), parameters, 4, Options())
    one, two = planner.delays([["first"]]), planner.delays([["first"], ["second"]])
    assert one == Delays({"agreement": 1, "rows to each": 1, "rows to all": 1})
    # Rows of 200 kB wait for the rows before them to be sent, which takes no delay.
    assert two.count == one.count


def test_two_levels_wait_for_the_messages_between_nodes_alone() -> None:
    flat = planned(gw.method("TernGrad()"), 2, [200])
    two = planned(gw.method("Hierarchical(TernGrad(), node_size=2)"), 4, [200])
    assert two == flat
