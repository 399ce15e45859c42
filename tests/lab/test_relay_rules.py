"""What the relay does to a frame, from its compiled functions: losses, delays, rates, outages, and sizes."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest

from gradwire.tools.lab import Impairments, Topology, relay_loop, relay_process, relay_rules
from gradwire.tools.lab.relay_process import generators, nanoseconds, outages_ns

FRAMES = 100_000
MS = 1_000_000
"""A millisecond in nanoseconds."""


def settings_of(*links: Impairments) -> tuple[np.ndarray, np.ndarray]:
    """Return the arrays that the rules read: whole numbers and probabilities, a column a link."""
    whole = np.zeros((4, len(links)), np.int64)
    whole[relay_rules.DELAY_NS] = [round(link.delay_s * 1e9) for link in links]
    whole[relay_rules.JITTER_NS] = [round(link.jitter_s * 1e9) for link in links]
    return whole, np.array([[link.begins, link.ends, link.reorder] for link in links]).T.copy()


def pattern(link: Impairments, seed: int = 0, number: int = 0, links: int = 2) -> np.ndarray:
    """Return which of the frames of a link are lost."""
    whole, chances = settings_of(*[link] * links)
    drawn = generators(seed, links)
    return np.array([relay_rules.is_lost(whole, chances, drawn, number) for _ in range(FRAMES)])


def runs(lost: np.ndarray) -> np.ndarray:
    """Return the lengths of the runs of lost frames."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], lost.astype(np.int8), [0]])))
    return edges[1::2] - edges[::2]


@pytest.mark.parametrize(("loss", "burst"), [(0.001, None), (0.01, None), (0.3, None), (0.01, 8.0), (0.2, 3.0)])
def test_as_many_frames_are_lost_as_was_asked_for_and_as_many_in_a_row(loss: float, burst: float | None) -> None:
    """Within 5 standard deviations.

    The share of a chain with correlation c = 1 - p - r between neighbours has the variance loss (1 - loss) (1 + c) /
    (1 - c) / n; the length of a run is geometric, with the variance L (L - 1).
    """
    link = Impairments(loss=loss, burst=burst)
    lost = pattern(link)
    c = 1 - link.begins - link.ends
    deviation = math.sqrt(loss * (1 - loss) * (1 + c) / (1 - c) / FRAMES)
    assert abs(lost.mean() - loss) < 5 * deviation
    length, found = 1 / link.ends, runs(lost)
    assert abs(found.mean() - length) <= 5 * math.sqrt(length * (length - 1) / found.size)


def test_independent_losses_follow_each_other_as_often_as_chance_has_it() -> None:
    lost = pattern(Impairments(loss=0.1))
    pairs = (lost[1:] & lost[:-1]).mean()
    # Pairs overlap; the variance of their number is below three times that of as many independent ones.
    assert abs(pairs - 0.01) < 5 * math.sqrt(3 * 0.01 * 0.99 / FRAMES)


def test_a_link_without_loss_loses_nothing() -> None:
    assert not pattern(Impairments()).any()


def test_the_pattern_is_the_seeds_and_the_links_own() -> None:
    link = Impairments(loss=0.05, burst=4)
    first = pattern(link, seed=3)
    assert (first == pattern(link, seed=3)).all()
    for other in (pattern(link, seed=4), pattern(link, seed=3, number=1)):
        # Two patterns that are independent share 5 % of the losses of one.
        assert (first & other).sum() < first.sum() / 2


def test_a_generator_is_splitmix64() -> None:
    """The first outputs for the seed 1234567, as published with the generator."""
    drawn = np.array([[1234567]], np.uint64)
    published = (6457827717110365317, 3203168211198807973, 9817491932198370423)
    assert [relay_rules.uniform(drawn, 0, 0) for _ in published] == [(z >> 11) * 2.0**-53 for z in published]


def due_times(link: Impairments, arrivals: np.ndarray, targets: np.ndarray | None = None) -> np.ndarray:
    whole, chances = settings_of(link)
    drawn, last = generators(0, 1), np.zeros((1, 2), np.int64)
    to = np.zeros(arrivals.size, np.int64) if targets is None else targets
    pairs = zip(arrivals.tolist(), to.tolist())
    return np.array([relay_rules.delayed(whole, chances, drawn, 0, last, 0, target, t) for t, target in pairs])


def test_a_delay_without_jitter_is_the_same_for_all_frames() -> None:
    arrivals = np.arange(0, 10_000_000, 1000)
    assert (due_times(Impairments(delay_s=0.02), arrivals) == arrivals + 20_000_000).all()


def test_jitter_is_uniform_and_keeps_frames_in_order() -> None:
    link = Impairments(delay_s=0.02, jitter_s=0.004)
    # So far apart that no frame waits for the one before.
    apart = np.arange(20_000) * 10_000_000
    delays = due_times(link, apart) - apart
    assert 16_000_000 <= delays.min() < 16_100_000
    assert 23_900_000 < delays.max() <= 24_000_000
    # A uniform number's standard deviation is its range over the root of 12.
    assert abs(delays.mean() - 20e6) < 5 * 8e6 / math.sqrt(12 * apart.size)
    close = np.arange(20_000) * 10_000
    due = due_times(link, close)
    assert (np.diff(due) >= 0).all()
    assert (due - close >= 16_000_000).all()
    # Frames for another host do not wait for them.
    mixed = due_times(link, close, np.arange(close.size) % 2)
    assert (np.diff(mixed[::2]) >= 0).all()
    assert (np.diff(mixed[1::2]) >= 0).all()
    assert (np.diff(mixed) < 0).any()


def test_reordered_frames_are_not_delayed_and_the_others_stay_in_order() -> None:
    arrivals = np.arange(FRAMES) * 1000
    delays = due_times(Impairments(delay_s=0.01, reorder=0.02), arrivals) - arrivals
    assert set(delays.tolist()) == {0, 10_000_000}
    assert abs((delays == 0).mean() - 0.02) < 5 * math.sqrt(0.02 * 0.98 / FRAMES)


def leaving(rate: float | None, burst_bytes: float, frames: list[tuple[int, int]]) -> list[int]:
    """Return when frames, given by size and arrival, leave a bucket that was full at time 0."""
    buckets = np.zeros((4, 1))
    buckets[relay_rules.COST], buckets[relay_rules.DEPTH] = nanoseconds(rate), burst_bytes
    return [relay_rules.leaves(buckets, 0, size, at) for size, at in frames]


def test_a_rate_lets_a_burst_pass_and_then_a_byte_in_its_time() -> None:
    """At 8 Mbit/s a byte takes a microsecond; 3000 bytes pass at once."""
    assert leaving(8e6, 3000, [(1000, 0)] * 6) == [0, 0, 0, 1_000_000, 2_000_000, 3_000_000]
    # The bucket fills up again: after 5 ms at rest it holds 3000 bytes, after 4 ms from empty as many.
    assert leaving(8e6, 3000, [(3000, 0), (3000, 5_000_000), (1000, 5_000_000), (1000, 7_000_000)]) == [
        0,
        5_000_000,
        6_000_000,
        7_000_000,
    ]
    assert leaving(None, 0, [(1000, 5), (1000, 5)]) == [5, 5]


def test_a_frame_that_would_wait_too_long_is_dropped_and_takes_no_time() -> None:
    # After the burst, 50 frames wait for up to 50 ms.
    found = leaving(8e6, 1000, [(1000, 0)] * 53 + [(1000, 1_000_000)])
    assert found == [n * 1_000_000 for n in range(51)] + [-1, -1, 51_000_000]
    # A long one would wait for longer than a short one behind it.
    assert leaving(8e6, 1000, [(1000, 0), (1000, 0), (60_000, 0), (1000, 0)]) == [0, 1_000_000, -1, 2_000_000]


@pytest.mark.parametrize(
    ("slow", "fast", "at", "leaves"),
    [
        # Of 16 384 bytes 16 000 have passed, and 616 are missing for the next frame; each takes a microsecond now.
        (8e3, 8e6, 0, 616_000),
        # The last of 49 frames that wait leaves at 49.616 ms, and the bucket is empty then.
        (8e6, 8e8, MS, 49_616_000 + 10_000),
    ],
)
def test_a_higher_rate_takes_frames_that_the_former_had_no_room_for(
    slow: float, fast: float, at: int, leaves: int
) -> None:
    buckets = np.zeros((4, 1))
    relay_process.set_rate(buckets, 0, slow, 0)
    while relay_rules.leaves(buckets, 0, 1000, 0) >= 0:
        pass
    relay_process.set_rate(buckets, 0, fast, at)
    assert relay_rules.leaves(buckets, 0, 1000, at) == leaves
    # The same rate once more changes nothing, also while frames wait.
    before = buckets.copy()
    relay_process.set_rate(buckets, 0, fast, at)
    assert (buckets == before).all()


def test_a_lower_rate_takes_frames_once_those_that_wait_have_left() -> None:
    """At 800 Mbit/s 100 frames pass at once, and 5000 wait; at 8 Mbit/s each later one takes 1 ms."""
    buckets = np.zeros((4, 1))
    relay_process.set_rate(buckets, 0, 8e8, 0)
    assert sum(relay_rules.leaves(buckets, 0, 1000, 0) >= 0 for _ in range(6000)) == 5100
    relay_process.set_rate(buckets, 0, 8e6, 2 * MS)
    found = [relay_rules.leaves(buckets, 0, 1000, 2 * MS) for _ in range(3)]
    assert found == [51 * MS, 52 * MS, -1]


def test_a_rate_after_none_begins_with_a_burst() -> None:
    buckets = np.zeros((4, 1))
    relay_process.set_rate(buckets, 0, 8e3, 0)
    while relay_rules.leaves(buckets, 0, 1000, 0) >= 0:
        pass
    relay_process.set_rate(buckets, 0, None, MS)
    assert relay_rules.leaves(buckets, 0, 60_000, MS) == MS
    relay_process.set_rate(buckets, 0, 8e6, 2 * MS)
    assert [relay_rules.leaves(buckets, 0, 16_384, 2 * MS) for _ in range(2)] == [2 * MS, 2 * MS + 16_384_000]


def test_an_outage_silences_its_host_from_its_beginning_to_its_end() -> None:
    topology = Topology.parse("hosts=3,outage=1s@2s:host1+0.5s@5s")
    rows = outages_ns(topology.outages)

    def silent(host: int, second: float) -> bool:
        return bool(relay_rules.silent(rows, host, 2, int(second * 1e9)))

    assert [silent(1, s) for s in (1.999, 2, 2.999, 3, 5)] == [False, True, True, False, True]
    assert [silent(0, s) for s in (2, 2.5, 4.999, 5, 5.499, 5.5)] == [False, False, False, True, True, False]
    assert not relay_rules.silent(outages_ns(()), 0, 1, 0)


def test_an_outage_of_two_hosts_silences_what_they_send_to_each_other() -> None:
    rows = outages_ns(Topology.parse("hosts=4,outage=1s@2s:host1-host3").outages)
    silenced = {(a, b) for a in range(4) for b in range(4) if a != b and relay_rules.silent(rows, a, b, int(2.5e9))}
    assert silenced == {(1, 3), (3, 1)}
    assert not relay_rules.silent(rows, 1, 3, int(3e9))


def frame(size: int, gso_size: int, options: int = 12) -> np.ndarray:
    """Return a frame of TCP over IPv4 with its virtio header, which says into which segments it is to be cut."""
    header = struct.pack("<BBHHHH", 1 if gso_size else 0, 1 if gso_size else 0, 0, gso_size, 34, 16)
    found = np.zeros(10 + size, np.uint8)
    found[:10] = np.frombuffer(header, np.uint8)
    found[10 + 34 + 12] = (20 + options) // 4 << 4
    return found


@pytest.mark.parametrize(
    ("payload", "segment", "expected"),
    [(1448, 0, 66 + 1448), (1448, 1448, 66 + 1448), (1449, 1448, 2 * 66 + 1449), (14_480, 1448, 10 * 66 + 14_480)],
)
def test_a_frame_that_was_not_cut_takes_the_headers_of_all_its_segments(
    payload: int, segment: int, expected: int
) -> None:
    whole = frame(66 + payload, segment)
    assert relay_rules.wire_bytes(whole, whole.size) == expected


def test_events_come_in_order_of_time_and_among_equals_in_order_of_arrival() -> None:
    draws = np.random.default_rng(5)
    numbers, heap = np.zeros(relay_loop.NUMBERS, np.int64), np.zeros((3, 5000), np.int64)
    times = draws.integers(0, 300, 5000)
    for event, due in enumerate(times.tolist()):
        relay_loop.push(heap, numbers, due, event)
    popped = [relay_loop.pop(heap, numbers) for _ in times]
    assert popped == sorted(range(5000), key=lambda event: (times[event], event))
    assert numbers[relay_loop.EVENTS] == 0
