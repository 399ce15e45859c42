"""The fluid model of a step: cases that can be worked out by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.exchange.drivers import Stage
from gradwire.model.exchange_profile import BucketJobs, ExchangeProfile
from gradwire.model.machine import LinkModel, Machine, connection_rate
from gradwire.model.profile import ReadyBucket, Timeline
from gradwire.model.schedule import Load, _Item, _shares, step_time

FREE = Machine(
    efficiency=1.0,
    round_s=0.0,
    call_s=0.0,
    message_s=0.0,
    byte_s=0.0,
    sum_byte_s=0.0,
    bucket_s=0.0,
    contention=1.0,
)
ALONE = Load(ranks=1, cores=2)


def timeline(*ready_s: float, forward_s: float = 1.0, backward_s: float = 2.0, after_s: float = 0.5) -> Timeline:
    buckets = tuple(ReadyBucket(names=(str(i),), numel=10, ready_s=at) for i, at in enumerate(ready_s))
    return Timeline(forward_s=forward_s, buckets=buckets, backward_s=backward_s, after_s=after_s)


def ring(sent: int) -> BucketJobs:
    return BucketJobs((), ((Stage(0.0, "ring", sent, 2, 2, delays=4), Stage(0.0)),), asynchronous=True)


def coded(work_s: float, sent: int, rest_s: float = 0.0) -> BucketJobs:
    stage = Stage(work_s, "all_to_all", sent, 1, 1, delays=2)
    return BucketJobs((), ((stage, Stage(rest_s)),), asynchronous=False)


def paired(sent: int, rest_s: float = 0.0) -> BucketJobs:
    return BucketJobs((), ((Stage(0.0, "pairs", sent, 1, 1, delays=2), Stage(rest_s)),), asynchronous=False)


def steps(
    buckets: list[BucketJobs], at: Timeline, machine: Machine = FREE, link: LinkModel | None = None, load: Load = ALONE
):
    return step_time(at, ExchangeProfile("x", 2, tuple(buckets)), machine=machine, link=link or LinkModel(), load=load)


def test_without_costs_a_step_is_its_computing() -> None:
    found = steps([ring(1000)], timeline(1.0))
    assert found.step_s == pytest.approx(3.5)
    assert found.floor_s == pytest.approx(3.5)
    assert found.bottleneck == "compute"


def test_the_last_bucket_is_waited_for_and_earlier_ones_hide_behind_backward() -> None:
    link = LinkModel(bandwidth_bytes_per_s=100.0)
    # 50 bytes from 1.0 + 0.5 on: done before backward ends at 3.0.
    assert steps([ring(50)], timeline(0.5), link=link).step_s == pytest.approx(3.5)
    # 50 bytes from the end of backward on: half a second more.
    assert steps([ring(50)], timeline(2.0), link=link).step_s == pytest.approx(4.0)


def test_two_buckets_share_the_link_and_lose_nothing() -> None:
    link = LinkModel(bandwidth_bytes_per_s=100.0)
    found = steps([ring(100), ring(100)], timeline(2.0, 2.0), link=link)
    assert found.step_s == pytest.approx(3.0 + 2.0 + 0.5)
    assert found.wire_s == pytest.approx(2.0)
    assert found.bottleneck == "link"


def test_efficiency_latency_and_calls_add_up() -> None:
    machine = dataclasses.replace(FREE, efficiency=0.5, round_s=0.1, call_s=0.01, message_s=0.001)
    link = LinkModel(bandwidth_bytes_per_s=100.0, latency_s=0.05)
    # Two rounds of 0.1 s, then 50 bytes at 50 a second, while half of which messages travel; the CPU of the call goes
    # on beside them.
    assert steps([ring(50)], timeline(2.0), machine, link).step_s == pytest.approx(3.5 + 0.2 + 1.0)
    # A request and a message before the bytes.
    found = steps([paired(50)], timeline(2.0), machine, link)
    assert found.step_s == pytest.approx(3.5 + 0.1 + 2 * 0.05 + 1.0)
    assert steps([ring(50)], timeline(2.0), machine).step_s == pytest.approx(3.5 + 0.2)


def test_a_ring_sends_one_segment_while_the_other_travels() -> None:
    def taken(sent: int, delay_s: float) -> float:
        link = LinkModel(bandwidth_bytes_per_s=100.0, latency_s=delay_s)
        return steps([ring(sent)], timeline(2.0), link=link).step_s - 3.5

    # max(B, B / 2 + 4 d): bytes alone, as long as a segment is longer than the way, then both.
    for sent, delay_s in ((100, 0.05), (100, 0.125), (100, 0.25), (0, 0.25)):
        assert taken(sent, delay_s) == pytest.approx(max(sent / 100, sent / 200 + 4 * delay_s))


def test_two_rings_send_while_the_messages_of_both_travel() -> None:
    link = LinkModel(bandwidth_bytes_per_s=100.0, latency_s=0.25)
    # Both travel for a second, in which half of their bytes are sent; the other halves share the link.
    found = steps([ring(80), ring(40)], timeline(2.0, 2.0), link=link)
    assert found.step_s == pytest.approx(3.5 + 1.0 + 0.6)
    # Without a delay nothing is held back.
    near = dataclasses.replace(link, latency_s=0.0)
    assert steps([ring(80), ring(40)], timeline(2.0, 2.0), link=near).step_s == pytest.approx(3.5 + 1.2)


def test_a_lossy_connection_is_slow_and_a_crowd_of_them_is_faster() -> None:
    # One packet in a hundred at a round trip of 40 ms: a window of sqrt(150) segments.
    rate = 1448 * math.sqrt(150) / 0.04
    assert connection_rate(0.02, 0.01) == pytest.approx(rate)
    assert connection_rate(0.02, 0.0) == connection_rate(0.0, 0.01) == math.inf
    link = LinkModel(bandwidth_bytes_per_s=100 * rate, latency_s=0.02, loss=0.01)

    def taken(kind: str, delays: int) -> float:
        stage = Stage(0.0, kind, round(3 * rate), 1, 3 if kind != "ring" else 6, delays=delays)
        bucket = BucketJobs((), ((stage, Stage(0.0)),), asynchronous=False)
        exchange = ExchangeProfile("x", 4, (bucket,))
        return step_time(timeline(2.0), exchange, machine=FREE, link=link, load=ALONE).step_s - 3.5

    # Resending: the end of one of 3 * 4 messages in one turn, which a probe after two round trips tells.
    lost_s = (1 - 0.99**12) * 0.088
    assert taken("pairs", 1) == pytest.approx(3.0 + 0.02 + lost_s, rel=1e-6)
    assert taken("all_to_all", 1) == pytest.approx(1.0 + 0.02 + lost_s, rel=1e-6)


def test_what_one_jobs_connection_cannot_carry_is_left_to_the_next_in_turn() -> None:
    fast = LinkModel(bandwidth_bytes_per_s=1e9, latency_s=0.02, loss=0.01)
    rate = fast.connection_bytes_per_s
    bucket = BucketJobs((), ((Stage(0.0, "pairs", round(2 * rate), 0, 1, delays=0), Stage(0.0)),), asynchronous=False)

    def taken(link: LinkModel) -> float:
        exchange = ExchangeProfile("x", 2, (bucket, bucket))
        return step_time(timeline(2.0, 2.0), exchange, machine=FREE, link=link, load=ALONE).step_s - 3.5

    # Two lanes have a connection each, of which a link of one and a half leaves the second job's half a connection's.
    assert taken(fast) == pytest.approx(2.0, rel=1e-6)
    assert taken(dataclasses.replace(fast, bandwidth_bytes_per_s=1.5 * rate)) == pytest.approx(2.0 + 1.0, rel=1e-6)
    assert taken(dataclasses.replace(fast, bandwidth_bytes_per_s=rate)) == pytest.approx(4.0, rel=1e-6)


def test_sums_of_the_backend_share_a_connection_that_losses_limit() -> None:
    link = LinkModel(bandwidth_bytes_per_s=1e9, latency_s=0.02, loss=0.01)
    rate = link.connection_bytes_per_s

    def taken(asynchronous: bool) -> float:
        stage = Stage(0.0, "all_to_all", round(2 * rate), 0, 1)
        buckets = (BucketJobs((), ((stage, Stage(0.0)),), asynchronous=asynchronous),) * 2
        exchange = ExchangeProfile("x", 2, buckets)
        return step_time(timeline(2.0, 2.0), exchange, machine=FREE, link=link, load=ALONE).step_s - 3.5

    assert taken(True) == pytest.approx(4.0, rel=0.01)
    assert taken(False) == pytest.approx(2.0, rel=0.01)


def test_a_lost_message_of_one_packet_waits_for_the_whole_timeout() -> None:
    link = LinkModel(latency_s=0.02, loss=0.01)
    assert link.resending_s(4, 2, 4 * 1000) == pytest.approx(2 * (1 - 0.99**2) * 0.24)
    assert link.resending_s(4, 2, 4 * 2000) == pytest.approx(2 * (1 - 0.99**2) * 0.088)
    far = dataclasses.replace(link, latency_s=0.2)
    assert far.resending_s(4, 2, 4 * 2000) == pytest.approx(2 * (1 - 0.99**2) * 0.6)
    assert LinkModel(latency_s=0.02).resending_s(4, 2, 4 * 2000) == 0.0


@pytest.mark.parametrize("name", ["bbr", "bbr3"])
def test_losses_cost_bbr_a_round_trip_at_the_end_of_a_message_and_no_throughput(name: str) -> None:
    link = LinkModel(bandwidth_bytes_per_s=1e6, latency_s=0.02, loss=0.01, congestion=name)
    assert link.connection_bytes_per_s == math.inf
    ends_s = 2 * (1 - 0.99**2) * 0.088
    assert link.resending_s(4, 2, 4 * 14480) == pytest.approx(ends_s + 2 * (1 - 0.99**20) * 0.04)
    # A lost packet that more than a round trip of bytes follows is there again before they are.
    held = 0.04 * 1e6 / 1448
    assert link.resending_s(4, 2, 4e9) == pytest.approx(ends_s + 2 * (1 - 0.99 ** (2 * held)) * 0.04)


def test_bbr_spreads_a_message_over_half_a_round_trip() -> None:
    link = LinkModel(bandwidth_bytes_per_s=1e9, latency_s=0.05, congestion="bbr")
    assert [link.pacing_s(count) for count in (0, 1448)] == [0.0, 0.0]
    assert link.pacing_s(14480) == pytest.approx(0.46 * 0.1 * 0.9)
    assert dataclasses.replace(link, congestion="cubic").pacing_s(14480) == 0.0

    def taken(kind: str, sent: int, bytes_per_s: float | None = 1e9) -> float:
        at = dataclasses.replace(link, bandwidth_bytes_per_s=bytes_per_s)
        stage = Stage(0.0, kind, sent, 1, 3, delays=2)
        exchange = ExchangeProfile("x", 4, (BucketJobs((), ((stage, Stage(0.0)),), asynchronous=False),))
        return step_time(timeline(2.0), exchange, machine=FREE, link=at, load=ALONE).step_s - 3.5

    for rate in (1e9, None):
        assert taken("all_to_all", 3 * 14480, rate) == pytest.approx(0.1 + 2 * 0.0414)
    # Bytes that take longer are not slowed down; a ring never rests.
    assert taken("all_to_all", 3 * 10**9) == pytest.approx(0.1 + 3.0)
    assert taken("ring", 3 * 14480) < 0.11


def test_bbr_sends_smaller_messages_at_the_rate_of_the_largest_of_the_same_lane() -> None:
    link = LinkModel(latency_s=0.05, congestion="bbr")
    assert link.pacing_s(14480, 144800) == pytest.approx(0.46 * 0.1 * 0.09)
    assert link.pacing_s(144800, 144800) == link.pacing_s(144800) == pytest.approx(0.46 * 0.1 * 0.99)
    small, large = (Stage(0.0, "all_to_all", 3 * count, 1, 3, delays=1) for count in (14480, 144800))

    def taken(*chunks: tuple[Stage, ...]) -> float:
        exchange = ExchangeProfile("x", 4, (BucketJobs((), chunks, asynchronous=False),))
        return step_time(timeline(2.0), exchange, machine=FREE, link=link, load=ALONE).step_s - 3.5

    assert taken((small, small)) == pytest.approx(2 * (0.05 + 0.0414))
    assert taken((small, large)) == pytest.approx(2 * 0.05 + 0.00414 + 0.04554)
    # Another lane has connections of its own, which have sent nothing large.
    assert taken((large,), (small, small)) == pytest.approx(2 * (0.05 + 0.0414))


def test_cubic_is_faster_than_reno_over_long_ways_with_rare_losses() -> None:
    reno = 1448 * math.sqrt(1.5e6) / 0.4
    assert connection_rate(0.2, 1e-6) == pytest.approx(1448 * (1.48 / 1.2) ** 0.25 * (0.4e6) ** 0.75 / 0.4)
    assert connection_rate(0.2, 1e-6) > reno


def test_what_a_slow_connection_leaves_the_other_lane_takes() -> None:
    items = [_Item(sent_bytes=1.0, most_bytes_per_s=cap) for cap in (math.inf, 10.0, 40.0)]
    assert _shares(items, 90.0) == [10.0, 40.0, 40.0]
    assert _shares(items, 300.0) == [10.0, 40.0, 250.0]
    assert _shares([_Item(most_bytes_per_s=5.0)], math.inf) == [5.0]


def test_a_byte_costs_more_where_it_is_added_and_a_bucket_costs_the_thread_that_computes() -> None:
    machine = dataclasses.replace(FREE, sum_byte_s=0.01, byte_s=0.002, bucket_s=0.125)
    assert steps([ring(50)], timeline(2.0), machine).step_s == pytest.approx(3.5 + 0.125 + 0.5)
    assert steps([coded(0.0, 50)], timeline(2.0), machine).step_s == pytest.approx(3.5 + 0.125 + 0.1)
    assert steps([ring(50)], timeline(2.0), machine).busy_s == pytest.approx(0.625)


def test_codec_runs_beside_backward_only_where_a_core_is_free() -> None:
    work = [coded(1.0, 10)]
    assert steps(work, timeline(0.0), load=Load(ranks=1, cores=2)).step_s == pytest.approx(3.5)
    # One core: both threads at half speed for two seconds, then backward's second half.
    assert steps(work, timeline(0.0), load=Load(ranks=1, cores=1)).step_s == pytest.approx(4.5)
    # Two ranks on one core: the timeline was measured so, the codec takes twice its time.
    assert steps(work, timeline(0.0), load=Load(ranks=2, cores=1)).step_s == pytest.approx(5.5)


def test_an_asynchronous_plans_first_work_delays_backward() -> None:
    cast = BucketJobs((), ((Stage(0.25, "ring", 0, 2, 2), Stage(0.5)),), asynchronous=True)
    assert steps([cast], timeline(1.0)).step_s == pytest.approx(3.75)
    # What follows the reply is done elsewhere, and waited for.
    assert steps([cast], timeline(2.0)).step_s == pytest.approx(3.5 + 0.25 + 0.5)


def test_chunks_wait_for_the_preparation_and_take_both_lanes() -> None:
    prepare = (Stage(0.5),)
    chunks = ((Stage(1.0),), (Stage(1.0),))
    bucket = BucketJobs(prepare, chunks, asynchronous=False)
    many = Load(ranks=1, cores=8)
    assert steps([bucket], timeline(2.0), load=many).step_s == pytest.approx(3.5 + 0.5 + 1.0)
    assert steps([bucket], timeline(2.0), load=Load(ranks=1, cores=1)).step_s == pytest.approx(3.5 + 0.5 + 2.0)


def test_ranks_of_one_host_share_its_link_and_tell_each_other_nothing_over_it() -> None:
    link = LinkModel(bandwidth_bytes_per_s=100.0, ranks_per_host=2)
    # Four ranks on two hosts: two of three messages leave; a ring crosses once for two ranks.
    assert link.leaving(90, ring=False, ranks=range(4)) == pytest.approx(60)
    assert link.leaving(90, ring=True, ranks=range(4)) == pytest.approx(45)
    assert link.leaving(90, ring=False, ranks=range(2)) == 0.0
    exchange = ExchangeProfile("x", 4, (coded(0.0, 90),))
    found = step_time(timeline(2.0), exchange, machine=FREE, link=link, load=Load(ranks=2, cores=4))
    assert found.step_s == pytest.approx(3.5 + 60 / 50)


@given(
    sent=st.lists(st.integers(0, 10_000), min_size=1, max_size=5),
    work_s=st.floats(0, 0.5),
    rest_s=st.floats(0, 0.5),
    bandwidth=st.floats(10, 1e6),
    latency_s=st.floats(0, 0.5),
    cores=st.integers(1, 6),
)
def test_a_step_lies_between_its_floor_and_one_thing_after_another(
    sent: list[int], work_s: float, rest_s: float, bandwidth: float, latency_s: float, cores: int
) -> None:
    at = timeline(*[2.0 * (i + 1) / len(sent) for i in range(len(sent))])
    buckets = [coded(work_s, n, rest_s) for n in sent]
    load = Load(ranks=2, cores=cores)
    links = [LinkModel()]
    links += [LinkModel(bandwidth_bytes_per_s=speed, latency_s=latency_s) for speed in (2 * bandwidth, bandwidth)]
    found = [steps(buckets, at, link=link, load=load) for link in links]
    waits_s = [step.wire_s + 2 * len(sent) * link.latency_s for step, link in zip(found, links)]
    for step, wait_s in zip(found, waits_s):
        assert step.floor_s - 1e-9 <= step.step_s <= step.compute_s + step.busy_s + wait_s + 1e-6
    bytes_free_s, fast_s, slow_s = (step.step_s for step in found)
    if len(sent) == 1:
        assert bytes_free_s <= fast_s + 1e-6
        assert fast_s <= slow_s + 1e-6
    if load.runners == 1.0:
        # On one core nothing beats never waiting, and no step waits longer than its bytes and latencies take: a faster
        # link can lose no more than that (see the next test).
        assert bytes_free_s <= min(fast_s, slow_s) + 1e-6
        assert fast_s - slow_s <= waits_s[1] + 1e-6


def test_a_faster_link_can_leave_nothing_to_do_while_the_last_bytes_travel() -> None:
    at, load = timeline(1.0, 2.0), Load(ranks=2, cores=1)
    buckets = [coded(0.5, 6, 0.25), coded(0.5, 1, 0.25)]
    slow = steps(buckets, at, link=LinkModel(bandwidth_bytes_per_s=10.0), load=load)
    fast = steps(buckets, at, link=LinkModel(bandwidth_bytes_per_s=20.0), load=load)
    # The core has 6.5 s of work. On the slow link the first bucket is decoded while the second's byte travels.
    assert slow.step_s == pytest.approx(6.5)
    # On the fast one it was decoded before, so the core waits for that byte: 1/20 s.
    assert fast.step_s == pytest.approx(6.5 + 0.05)


def test_large_rows_go_one_job_after_the_other_and_small_ones_share_the_link() -> None:
    link, at = LinkModel(bandwidth_bytes_per_s=100.0), timeline(0.0, 0.0, backward_s=0.0)
    crowd = steps([coded(0.0, 100, 1.0), coded(0.0, 100)], at, link=link)
    # Both arrive after two seconds, then the first one's are decoded for one.
    assert crowd.step_s == pytest.approx(1.5 + 3.0)
    turns = steps([paired(100, 1.0), paired(100)], at, link=link)
    # The second one's rows leave while the first one's are decoded.
    assert turns.step_s == pytest.approx(1.5 + 2.0)


def test_a_small_operation_does_not_wait_for_a_large_one_before_it() -> None:
    link, at = LinkModel(bandwidth_bytes_per_s=100.0), timeline(0.0, 0.0, backward_s=0.0)
    found = steps([paired(100), coded(3.0, 0)], at, link=link)
    assert found.step_s == pytest.approx(1.5 + 3.0)
