"""The process that is the network between the hosts: ``python -m gradwire.tools.lab.relay_process``.

Its standard input gives a line of JSON that describes the network, and then commands, each answered with a line:
``{"do": "rates", ...}`` changes rates, ``{"do": "outages"}`` lets the outages count from now, or others where it lists
them, ``{"do": "report"}`` and ``{"do": "groups"}`` ask for counters. At the end of its input, or at SIGTERM, it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import mmap
import os
import select
import signal
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from gradwire.tools.lab import relay_loop as loop
from gradwire.tools.lab import relay_rules as rules
from gradwire.tools.lab.impairments import Outage
from gradwire.tools.lab.iproute import burst_bytes
from gradwire.tools.lab.quantities import Rate
from gradwire.tools.lab.relay_loop import State
from gradwire.tools.lab.topology import Topology
from gradwire.tools.processes import enter_namespace

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
MAP_NORESERVE = 0x4000

SMALL_SLOTS, LARGE_SLOTS = 1 << 18, 1 << 14
"""Room for frames on their way: 512 MiB and 1 GiB of addresses; memory is taken when it is used."""

SLICE_NS = 100_000_000
LATE_NS = 1_000_000
"""A frame that leaves this much after its time is late, or 5 % of the least delay if that is longer."""

PR_SET_TIMERSLACK = 29


def open_tap(interface: str, whole: bool) -> int:
    """Make a TAP device in this process's network namespace; return its descriptor, which the device lives with.

    Args:
        interface: Name of the device.
        whole: Frames of up to 64 KiB are not cut into segments, which saves time.
    """
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", interface.encode(), flags))
    # The checksums of what never leaves this machine need not be computed.
    fcntl.ioctl(descriptor, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 if whole else TUN_F_CSUM)
    return descriptor


def nanoseconds(rate: Rate) -> float:
    """Return the nanoseconds that a byte takes at a rate, 0 without limit."""
    return 0.0 if rate is None else 8e9 / rate


def new_state(topology: Topology, descriptors: Sequence[int], commands: int, whole: bool) -> State:
    """Return the state of a network on which nothing has happened yet."""
    hosts, groups = topology.hosts, topology.groups
    links, buckets = hosts + groups, hosts + 2 * groups
    impairments = [topology.of_host(h) for h in range(hosts)] + [topology.of_group(g) for g in range(groups)]
    small, every = SMALL_SLOTS, SMALL_SLOTS + (LARGE_SLOTS if whole else 0)
    pool = mmap.mmap(
        -1,
        small * loop.SMALL_BYTES + (every - small + 1) * loop.LARGE_BYTES,
        flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE,
    )
    slots = np.zeros((5, every), np.int64)
    slots[loop.FREE] = np.arange(every)
    # The first slots lie on top of their stack, so that few pages are touched.
    slots[loop.FREE, :small] = slots[loop.FREE, :small][::-1].copy()
    links_of = np.zeros((4, links), np.int64)
    links_of[rules.GROUP, :hosts] = [topology.group(h) for h in range(hosts)]
    links_of[rules.DELAY_NS] = [round(i.delay_s * 1e9) for i in impairments]
    links_of[rules.JITTER_NS] = [round(i.jitter_s * 1e9) for i in impairments]
    numbers = np.zeros(loop.NUMBERS, np.int64)
    numbers[loop.SMALL_SLOTS] = numbers[loop.FREE_SMALL] = small
    numbers[loop.ALL_SLOTS], numbers[loop.FREE_LARGE] = every, every - small
    state = State(
        counters=np.zeros((loop.COUNTERS, links), np.int64),
        numbers=numbers,
        lateness=np.zeros(loop.LATENESS_BUCKETS, np.int64),
        links=links_of,
        chances=np.array([[i.begins, i.ends, i.reorder] for i in impairments]).T.copy(),
        drawn=generators(topology.seed, links),
        buckets=np.zeros((4, buckets)),
        last_ns=np.zeros((2, hosts, hosts), np.int64),
        outages=outages_ns(topology.outages),
        polled=np.array([(d, 0) for d in (*descriptors, commands)], np.int32),
        time=np.zeros(2, np.int64),
        pool=np.frombuffer(pool, np.uint8),
        slots=slots,
        heap=np.zeros((3, every), np.int64),
    )
    least_ns = min((topology.of_host(h).delay_s for h in range(hosts)), default=0.0) * 1e9
    state.numbers[loop.LATE_LIMIT_NS] = max(LATE_NS, round(least_ns / 20))
    set_rates(state, topology, 0)
    return state


def generators(seed: int, links: int) -> np.ndarray:
    """Return the first states of the generators of all links: for loss, jitter and reordering."""
    words = [
        [hashlib.blake2b(f"{seed} {purpose} {link}".encode(), digest_size=8).digest() for link in range(links)]
        for purpose in (rules.FOR_LOSS, rules.FOR_JITTER, rules.FOR_REORDER)
    ]
    return np.array([[int.from_bytes(word, "little") for word in row] for row in words], np.uint64)


def outages_ns(outages: Sequence[Outage]) -> np.ndarray:
    """Return the outages as rows for the loop."""
    rows = [
        (
            round(o.from_s * 1e9),
            round((o.from_s + o.lasts_s) * 1e9),
            *(-1 if number is None else number for number in (o.host, o.peer)),
        )
        for o in outages
    ]
    return np.array(rows, np.int64).reshape(len(rows), 4)


def set_rates(state: State, topology: Topology, now: float) -> None:
    """Set all rates that the loop limits from a time on: those at which hosts receive, and groups send and receive."""
    groups = [topology.between_rates(g) for g in range(topology.groups)]
    rates = [topology.receive_rate(h) for h in range(topology.hosts)]
    rates += [send for send, _ in groups] + [receive for _, receive in groups]
    for bucket, rate in enumerate(rates):
        set_rate(state.buckets, bucket, rate, now)


def set_rate(buckets: np.ndarray, bucket: int, rate: Rate, now: float) -> None:
    """Limit a bucket to a rate from a time on; its bytes stay, as far as they find room.

    Frames that wait leave when the former rate lets them, so that those behind do not overtake them.
    """
    cost, depth = nanoseconds(rate), 0.0 if rate is None else float(burst_bytes(rate))
    before, room, full_at, left_at = buckets[:, bucket].tolist()
    if (cost, depth) == (before, room):
        return
    begins = max(now, left_at)
    # When the bucket is full again depends on the rate: what stays is the number of bytes that it lacks.
    missing = max(full_at - begins, 0.0) / before + depth - room if before else 0.0
    buckets[:, bucket] = cost, depth, begins + cost * min(max(missing, 0.0), depth), left_at


def report(state: State) -> dict[str, Any]:
    """Return the counters, as :class:`gradwire.tools.lab.relay.RelayReport` takes them."""
    counters, numbers, lateness = state.counters, state.numbers, state.lateness
    pairs = {"lost": loop.LOST, "silenced": loop.SILENCED, "overflowed": loop.OVERFLOWED}
    found: dict[str, Any] = {}
    for name, row in {"read": loop.READ, "written": loop.WRITTEN, **pairs}.items():
        # Groups' links count frames a second time, but for what they drop.
        links = state.last_ns.shape[1] if name in ("read", "written") else None
        found[f"{name}_frames"] = int(counters[row, :links].sum())
        found[f"{name}_bytes"] = int(counters[row + 1, :links].sum())
    left = int(lateness.sum())
    shares = np.cumsum(lateness) / max(left, 1)
    return found | {
        "overtaking_frames": int(counters[loop.OVERTOOK].sum()),
        "longest_wait_s": float(counters[loop.WAIT_NS].max() / 1e9),
        "pending_frames": int(numbers[loop.PENDING]),
        "most_pending_frames": int(numbers[loop.MOST_PENDING]),
        "no_room_frames": int(numbers[loop.NO_ROOM]),
        "refused_frames": int(numbers[loop.REFUSED]),
        "stray_frames": int(numbers[loop.STRAY]),
        "late_frames": int(numbers[loop.LATE]),
        "late_limit_s": float(numbers[loop.LATE_LIMIT_NS] / 1e9),
        "median_late_s": 2.0 ** int(np.searchsorted(shares, 0.5)) * 1e-6 if left else 0.0,
        "percentile_99_late_s": 2.0 ** int(np.searchsorted(shares, 0.99)) * 1e-6 if left else 0.0,
        "most_late_s": float(numbers[loop.LATEST_NS] / 1e9),
        "idle_s": float(numbers[loop.IDLE_NS] / 1e9),
        "wall_s": float(numbers[loop.WALL_NS] / 1e9),
        "saturated_s": float(numbers[loop.SATURATED_NS] / 1e9),
    }


def groups_of(state: State) -> list[list[int]]:
    """Return bytes and frames sent, and bytes and frames received, of every group's link to the others."""
    rows = [loop.READ_BYTES, loop.READ, loop.WRITTEN_BYTES, loop.WRITTEN]
    found: list[list[int]] = state.counters[rows, state.last_ns.shape[1] :].T.tolist()
    return found


def hurry() -> None:
    """Be scheduled before all ordinary processes, and woken on time, as far as this system allows it."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, -20)


def main() -> None:
    """Make the devices, and relay frames until the input ends."""
    described = json.loads(_line())
    topology, whole = Topology.parse(described["topology"]), described["whole"]
    descriptors = []
    for path in described["namespaces"]:
        enter_namespace(path)
        with contextlib.suppress(OSError):
            # No multicast of IPv6: frames are those of the hosts' commands.
            Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")
        descriptors.append(open_tap(described["interface"], whole))
    # So that who removes the lab's namespaces finds this process in one of them.
    enter_namespace(described["own"])
    state = new_state(topology, descriptors, 0, whole)
    ends: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        ends.append(number)

    signal.signal(signal.SIGTERM, end)
    now = loop.relay_frames(*state, 0)
    state.numbers[loop.OUTAGES_FROM_NS] = now
    hurry()
    _answer({"ready": True})
    while not ends:
        now = loop.relay_frames(*state, now + SLICE_NS)
        while select.select([0], [], [], 0)[0]:
            line = _line()
            if not line:
                return
            command = json.loads(line)
            if command["do"] == "rates":
                set_rates(state, Topology.parse(command["topology"]), now)
            elif command["do"] == "outages":
                if command["outages"] is not None:
                    state = state._replace(outages=outages_ns([Outage.parse(text) for text in command["outages"]]))
                state.numbers[loop.OUTAGES_FROM_NS] = now
            _answer({"groups": groups_of(state)} if command["do"] == "groups" else report(state))


def _line() -> bytes:
    """Read a line without a buffer, which would hide what it holds from ppoll."""
    found = b""
    while not found.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return b""
        found += byte
    return found


def _answer(found: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
