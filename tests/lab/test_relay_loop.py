"""The relay's loop on pairs of sockets instead of TAP devices: what is delivered, when, and what is counted."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest
from run_help import wait_for

from gradwire.tools.lab import Topology, relay_loop
from gradwire.tools.lab.relay_process import groups_of, new_state, report

MS = 1_000_000


class Hosts:
    """A network whose hosts are sockets that keep the bounds of messages; one message is one frame."""

    def __init__(self, text: str, whole: bool = False) -> None:
        self.topology = Topology.parse(text)
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(self.topology.hosts)]
        self.ours, self.theirs = [a for a, _ in pairs], [b for _, b in pairs]
        for each in (*self.ours, *self.theirs):
            each.setblocking(False)
        self.commands = os.pipe()
        self.state = new_state(self.topology, [s.fileno() for s in self.theirs], self.commands[0], whole)
        self.state.numbers[relay_loop.OUTAGES_FROM_NS] = time.monotonic_ns()
        self.sent = 0
        # Compiles, before anything is waited for.
        self.run(0.0)

    def send(self, source: int, target: int, size: int = 100, mark: int = 0) -> None:
        """Send a frame of so many bytes, from the Ethernet header on."""
        ethernet = bytes([2, 0, 0, 0, 0, target + 1, 2, 0, 0, 0, 0, source + 1, 8, 0])
        self.sent += 1
        self.ours[source].send((bytes(10) + ethernet + bytes([mark])).ljust(size + 10))

    def run(self, ms: float = 1.0) -> None:
        """Relay for a while."""
        relay_loop.relay_frames(*self.state, time.monotonic_ns() + int(ms * MS))

    def settle(self) -> None:
        """Relay until all that was sent has been read, and none is on its way."""

        def settled() -> bool:
            self.run()
            found = report(self.state)
            read = found["read_frames"] + found["stray_frames"] + found["no_room_frames"]
            return read == self.sent and found["pending_frames"] == 0

        wait_for(settled, 60, "the frames")

    def received(self, host: int) -> list[int]:
        """Return the marks of the frames that a host has received."""
        marks = []
        while True:
            try:
                marks.append(self.ours[host].recv(100_000)[24])
            except BlockingIOError:
                return marks

    def first(self, host: int) -> list[int]:
        """Relay until a host has received frames, and return their marks as soon as it has."""
        marks: list[int] = []

        def came() -> bool:
            self.run(0.1)
            marks.extend(self.received(host))
            return bool(marks)

        wait_for(came, 60, "a frame")
        return marks

    def close(self) -> None:
        for each in (*self.ours, *self.theirs):
            each.close()
        for descriptor in self.commands:
            os.close(descriptor)


@pytest.fixture
def opened() -> Iterator[list[Hosts]]:
    found: list[Hosts] = []
    yield found
    for hosts in found:
        hosts.close()


def hosts(opened: list[Hosts], text: str, whole: bool = False) -> Hosts:
    opened.append(Hosts(text, whole))
    return opened[-1]


@pytest.mark.parametrize("whole", [False, True])
def test_a_frame_reaches_its_host_alone_and_is_counted(opened: list[Hosts], whole: bool) -> None:
    net = hosts(opened, "hosts=3", whole)
    for mark in range(20):
        net.send(0, 2, 1000 + mark, mark)
    net.send(1, 0, 60, 99)
    net.settle()
    assert (net.received(0), net.received(1), net.received(2)) == ([99], [], list(range(20)))
    found = report(net.state)
    assert found["read_frames"] == found["written_frames"] == 21
    assert found["read_bytes"] == found["written_bytes"] == sum(range(1000, 1020)) + 60
    assert found["pending_frames"] == 0
    assert found["idle_s"] <= found["wall_s"]


def test_large_frames_pass_whole(opened: list[Hosts]) -> None:
    net = hosts(opened, "hosts=2", whole=True)
    for mark, size in enumerate((60_000, 2000, 2038, 2039, 65_000, 100)):
        net.send(0, 1, size, mark)
        net.settle()
        assert net.received(1) == [mark]
    assert report(net.state)["written_bytes"] == 60_000 + 2000 + 2038 + 2039 + 65_000 + 100


def test_frames_are_delayed_by_no_less_than_the_delay(opened: list[Hosts]) -> None:
    net = hosts(opened, "hosts=2,delay=20ms,jitter=5ms")
    began = time.monotonic_ns()
    for mark in range(50):
        net.send(0, 1, mark=mark)
    # No frame was read before it was sent, so none may come before its least delay is over.
    first = net.first(1)
    assert time.monotonic_ns() >= began + 15 * MS
    net.settle()
    assert first + net.received(1) == list(range(50))
    assert report(net.state)["most_late_s"] >= 0.0


def test_a_rate_spreads_frames_over_time_and_drops_what_does_not_fit_its_queue(opened: list[Hosts]) -> None:
    """At 8 Mbit/s a frame of 1000 bytes takes 1 ms; 16 pass at once, and 50 more wait for up to 50 ms."""
    net = hosts(opened, "hosts=2,bandwidth=8mbit")
    for mark in range(80):
        net.send(0, 1, 1000, mark)
    began = time.monotonic_ns()
    # In one go: the queue would be emptied while this process sleeps.
    net.run(100.0)
    net.settle()
    took_ms = (time.monotonic_ns() - began) / MS
    marks = net.received(1)
    found = report(net.state)
    assert found["written_frames"] + found["overflowed_frames"] == 80
    # What arrives while the queue is being emptied finds room: more than 66 pass if the loop was held up.
    assert len(marks) == found["written_frames"] >= 66
    assert took_ms >= len(marks) - 17
    # A sender that is held up lets the queue empty by as long: half of its 50 ms are left for that.
    assert 0.025 < found["longest_wait_s"] <= 0.05


def test_lost_frames_are_counted_and_the_rest_arrives(opened: list[Hosts]) -> None:
    net = hosts(opened, "hosts=3,host0.loss=50%,seed=3")
    for _ in range(40):
        for mark in range(10):
            net.send(0, 1, 200, mark)
            net.send(2, 1, 100, mark)
        net.settle()
        net.received(1)
    found = report(net.state)
    assert found["read_frames"] == 800
    # Within 5 standard deviations of a half of 400.
    assert 150 < found["lost_frames"] < 250
    assert found["lost_bytes"] == 200 * found["lost_frames"]
    assert found["written_frames"] == 800 - found["lost_frames"]


def test_an_outage_drops_what_enters_and_what_leaves(opened: list[Hosts]) -> None:
    net = hosts(opened, "hosts=3,outage=3600s@0s:host1")
    for source, target in ((0, 1), (1, 0), (0, 2), (2, 0), (1, 2)):
        net.send(source, target, mark=10 * source + target)
    net.settle()
    assert (net.received(0), net.received(1), net.received(2)) == ([20], [], [2])
    assert report(net.state)["silenced_frames"] == 3


def test_frames_between_groups_pass_the_groups_links(opened: list[Hosts]) -> None:
    text = "hosts=4,group.near=0+1,group.far=2+3,between=8mbit,between.delay=10ms"
    net = hosts(opened, text)
    began = time.monotonic_ns()
    net.send(0, 1, mark=1)
    net.send(0, 2, 300, mark=2)
    net.send(3, 1, 200, mark=3)
    first = net.first(2)
    assert time.monotonic_ns() >= began + 10 * MS
    net.settle()
    assert [net.received(h) for h in range(4)] == [[], [1, 3], [], []]
    assert first == [2]
    assert groups_of(net.state) == [[300, 1, 200, 1], [200, 1, 300, 1]]
    assert report(net.state)["read_bytes"] == 600


def test_frames_for_no_host_are_counted_apart(opened: list[Hosts]) -> None:
    net = hosts(opened, "hosts=2")
    net.ours[0].send(bytes(10) + b"\xff" * 6 + bytes(60))
    net.sent += 1
    net.send(0, 5)
    net.settle()
    found = report(net.state)
    assert (found["stray_frames"], found["read_frames"], found["pending_frames"]) == (2, 0, 0)


def test_a_host_that_is_gone_does_not_hold_up_the_others(opened: list[Hosts]) -> None:
    net = hosts(opened, "hosts=3")
    net.ours[1].close()
    net.send(0, 1)
    net.send(0, 2, mark=5)
    net.settle()
    assert net.received(2) == [5]
    found = report(net.state)
    assert (found["refused_frames"], found["written_frames"]) == (1, 1)


def test_a_command_ends_the_loop_at_once(opened: list[Hosts]) -> None:
    net = hosts(opened, "hosts=2")
    os.write(net.commands[1], b"\n")
    until = time.monotonic_ns() + 3_600_000 * MS
    assert relay_loop.relay_frames(*net.state, until) < until


def test_frames_that_find_no_room_are_counted(opened: list[Hosts]) -> None:
    net = hosts(opened, "hosts=2,delay=100ms")
    # Room for three.
    net.state.numbers[relay_loop.FREE_SMALL] = 3
    for mark in range(5):
        net.send(0, 1, mark=mark)
    net.settle()
    found = report(net.state)
    assert (found["no_room_frames"], found["most_pending_frames"], found["read_frames"]) == (2, 3, 3)
    assert net.received(1) == [0, 1, 2]
    assert np.array_equal(net.state.polled[:2, 0], [s.fileno() for s in net.theirs])
