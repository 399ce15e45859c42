# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""The compiled loop of the relay: it moves frames between the hosts' TAP devices at the times at which they are due.

Each step that a frame takes computes with the time at which the frame was due, not with the time at which the loop came
to it, so that its lateness does not add up.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numba import njit, types

from gradwire.tools.lab import relay_rules
from gradwire.tools.lab.relay_rules import DELAY_NS, GROUP, VNET_BYTES, delayed, is_lost, leaves, silent, wire_bytes

Array = Any

SMALL_BYTES, LARGE_BYTES = 2048, 67_584
"""Sizes of slots: for one frame with its virtio header, and for up to 64 KiB that the kernel has not cut."""

ETHERNET_BYTES = 14
BATCH = 8
"""Frames to read from a host before the other hosts have their turn."""

LATENESS_BUCKETS = 32

# Rows of `State.counters`.
READ, READ_BYTES, WRITTEN, WRITTEN_BYTES, LOST, LOST_BYTES, SILENCED, SILENCED_BYTES = range(8)
OVERFLOWED, OVERFLOWED_BYTES, OVERTOOK, WAIT_NS = range(8, 12)
COUNTERS = 12

# Rows of `State.slots` and `State.heap`.
LENGTH, WIRE, SOURCE, TARGET, FREE = range(5)
DUE, ORDER, EVENT = range(3)

# Entries of `State.numbers`.
OUTAGES_FROM_NS, IDLE_NS, WALL_NS, SATURATED_NS, LATE, LATEST_NS, LATE_LIMIT_NS = range(7)
PENDING, MOST_PENDING, NO_ROOM, REFUSED, STRAY = range(7, 12)
SMALL_SLOTS, ALL_SLOTS, FREE_SMALL, FREE_LARGE, EVENTS, SEQUENCE = range(12, 18)
NUMBERS = 18

# Steps that a frame has behind it.
LEFT_HOST, LEFT_GROUP, AT_HOST, DELIVERED = range(4)


class State(NamedTuple):
    """Everything that the loop knows. H hosts, G groups, S slots; a link is a host's, or behind them a group's.

    Attributes:
        counters: int64 [COUNTERS, H + G].
        numbers: int64 [NUMBERS].
        lateness: int64 [LATENESS_BUCKETS]; entry i counts frames that left 2^(i-1) to 2^i microseconds late.
        links: int64 [4, H + G]: group of a host, delay, jitter, and 1 if the last frame was lost.
        chances: float64 [3, H + G]: that a frame is lost after one that was not, that one is not lost after one that
            was, and that a frame is not delayed.
        drawn: uint64 [3, H + G]: generators for loss, jitter and reordering.
        buckets: float64 [4, H + 2 G]: for receiving hosts, sending groups and receiving groups: nanoseconds a byte, 0
            without limit; bytes of the bucket; when it is full again; when the last frame left.
        last_ns: int64 [2, H, H]: when the last frame from host to host was due, behind the host and behind the group.
        outages: int64 [n, 4]: first nanosecond, end, host or -1 for all, and peer or -1 for all.
        polled: int32 [H + 1, 2]: ``struct pollfd`` of each TAP device, and of the pipe of commands.
        time: int64 [2]: ``struct timespec``.
        pool: uint8: the slots, the small ones first, and room for a frame to be thrown away.
        slots: int64 [5, S]: length, bytes on the wire, source and target; and the stacks of free slots, the small ones
            from the beginning on, the large ones from the end on.
        heap: int64 [3, S]: when, in which order at the same time, and 4 slot + step.
    """

    counters: Array
    numbers: Array
    lateness: Array
    links: Array
    chances: Array
    drawn: Array
    buckets: Array
    last_ns: Array
    outages: Array
    polled: Array
    time: Array
    pool: Array
    slots: Array
    heap: Array


# By name, not by address: so the compiled loop can be stored on disk.
_read: Any = types.ExternalFunction("read", types.intp(types.intc, types.uintp, types.uintp))
_write: Any = types.ExternalFunction("write", types.intp(types.intc, types.uintp, types.uintp))
_ppoll: Any = types.ExternalFunction("ppoll", types.intc(types.uintp, types.uintp, types.uintp, types.uintp))
_clock_gettime: Any = types.ExternalFunction("clock_gettime", types.intc(types.intc, types.uintp))

CLOCK_MONOTONIC = 1
POLLIN = 1
SECOND_NS = 1_000_000_000


@njit
def _now(time):
    _clock_gettime(CLOCK_MONOTONIC, time.ctypes.data)
    return time[0] * SECOND_NS + time[1]


@njit
def push(heap, numbers, due, event):
    """Add an event that is due at a time."""
    numbers[SEQUENCE] += 1
    order, i = numbers[SEQUENCE], numbers[EVENTS]
    numbers[EVENTS] = i + 1
    while i > 0:
        parent = (i - 1) >> 1
        # The order of the new event is the highest.
        if heap[DUE, parent] <= due:
            break
        heap[DUE, i], heap[ORDER, i], heap[EVENT, i] = heap[DUE, parent], heap[ORDER, parent], heap[EVENT, parent]
        i = parent
    heap[DUE, i], heap[ORDER, i], heap[EVENT, i] = due, order, event


@njit
def pop(heap, numbers):
    """Remove the first event, and return it."""
    first, last = heap[EVENT, 0], numbers[EVENTS] - 1
    numbers[EVENTS] = last
    due, order, event = heap[DUE, last], heap[ORDER, last], heap[EVENT, last]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= last:
            break
        other = child + 1
        if other < last and (heap[DUE, other], heap[ORDER, other]) < (heap[DUE, child], heap[ORDER, child]):
            child = other
        if (due, order) < (heap[DUE, child], heap[ORDER, child]):
            break
        heap[DUE, i], heap[ORDER, i], heap[EVENT, i] = heap[DUE, child], heap[ORDER, child], heap[EVENT, child]
        i = child
    heap[DUE, i], heap[ORDER, i], heap[EVENT, i] = due, order, event
    return first


@njit
def _place(numbers, slot):
    """Return the first byte of a slot in the pool."""
    small = numbers[SMALL_SLOTS]
    return slot * SMALL_BYTES if slot < small else small * SMALL_BYTES + (slot - small) * LARGE_BYTES


@njit
def _release(slots, numbers, slot):
    numbers[PENDING] -= 1
    if slot < numbers[SMALL_SLOTS]:
        slots[FREE, numbers[FREE_SMALL]] = slot
        numbers[FREE_SMALL] += 1
    else:
        numbers[FREE_LARGE] += 1
        slots[FREE, slots.shape[1] - numbers[FREE_LARGE]] = slot


@njit
def _count(counters, row, link, size):
    counters[row, link] += 1
    counters[row + 1, link] += size


@njit
def _take(descriptor, pool, slots, numbers):
    """Read a frame into a free slot, and return the slot; -1 if there is no frame, -2 if there is no room for it."""
    small, large = numbers[FREE_SMALL], numbers[FREE_LARGE]
    whole = numbers[ALL_SLOTS] > numbers[SMALL_SLOTS]
    base = pool.ctypes.data
    if small == 0 or (whole and large == 0):
        away = base + _place(numbers, numbers[ALL_SLOTS])
        return -2 if _read(descriptor, away, LARGE_BYTES) >= 0 else -1
    slot = slots[FREE, slots.shape[1] - large] if whole else slots[FREE, small - 1]
    far = _place(numbers, slot)
    length = _read(descriptor, base + far, LARGE_BYTES if whole else SMALL_BYTES)
    if length < VNET_BYTES + ETHERNET_BYTES:
        return -1
    if whole and length <= SMALL_BYTES:
        slot = slots[FREE, small - 1]
        near = _place(numbers, slot)
        pool[near : near + length] = pool[far : far + length]
    numbers[FREE_SMALL if slot < numbers[SMALL_SLOTS] else FREE_LARGE] -= 1
    numbers[PENDING] += 1
    numbers[MOST_PENDING] = max(numbers[MOST_PENDING], numbers[PENDING])
    slots[LENGTH, slot] = length
    return slot


@njit
def _note_lateness(lateness, numbers, late):
    bucket, us = 0, late // 1000
    while us > 0 and bucket < LATENESS_BUCKETS - 1:
        us >>= 1
        bucket += 1
    lateness[bucket] += 1
    numbers[LATE] += late > numbers[LATE_LIMIT_NS]
    numbers[LATEST_NS] = max(numbers[LATEST_NS], late)


def _kept(function):
    """Compile a function, and keep the code on disk as long as neither this file nor the rules change.

    Numba itself notices changes of the function's own file only.
    """
    digest = hashlib.sha256(Path(relay_rules.__file__).read_bytes()).hexdigest()[:16]
    function.__qualname__ += f".{digest}"
    return njit(nogil=True, cache=True)(function)


@_kept
def relay_frames(
    counters,
    numbers,
    lateness,
    links,
    chances,
    drawn,
    buckets,
    last_ns,
    outages,
    polled,
    time,
    pool,
    slots,
    heap,
    until,
):
    """Relay frames until a time or a command; return the time. Frames on their way stay in the state.

    Takes the fields of :class:`State` one by one: Numba takes many times as long to compile with the tuple.
    """
    now = began = _now(time)
    idle, hosts, taken = 0, last_ns.shape[1], 0
    groups = links.shape[1] - hosts
    source = hosts
    while True:
        # The next frame: one that is due, or one that a host has sent; or wait for either.
        if numbers[EVENTS] and heap[DUE, 0] <= now:
            t = heap[DUE, 0]
            event = pop(heap, numbers)
            slot, step = event >> 2, event & 3
        elif source < hosts:
            if taken == BATCH or polled[source, 1] >> 16 != POLLIN:
                if taken < BATCH and polled[source, 1] >> 16:
                    # The device is gone with its namespace: ppoll skips negative numbers.
                    polled[source, 0] = -1
                source, taken = source + 1, 0
                continue
            slot = _take(polled[source, 0], pool, slots, numbers)
            taken += 1
            if slot < 0:
                numbers[NO_ROOM] += slot == -2
                taken = taken if slot == -2 else BATCH
                continue
            at, length = _place(numbers, slot), slots[LENGTH, slot]
            now = _now(time)
            frame = pool[at : at + length]
            target = (np.int64(frame[VNET_BYTES + 4]) << 8 | np.int64(frame[VNET_BYTES + 5])) - 1
            if frame[VNET_BYTES] != 2 or target < 0 or target >= hosts:
                numbers[STRAY] += 1
                _release(slots, numbers, slot)
                continue
            size = length - VNET_BYTES
            _count(counters, READ, source, size)
            # The pattern of losses counts all frames, whether a link is silent or not.
            fails = is_lost(links, chances, drawn, source)
            still = silent(outages, source, target, now - numbers[OUTAGES_FROM_NS])
            if fails or still:
                _count(counters, SILENCED if still else LOST, source, size)
                _release(slots, numbers, slot)
                continue
            slots[WIRE, slot], slots[SOURCE, slot], slots[TARGET, slot] = wire_bytes(frame, length), source, target
            step, t = LEFT_HOST, delayed(links, chances, drawn, source, last_ns[0], source, target, now)
            counters[OVERTOOK, source] += t == now and links[DELAY_NS, source] > 0
            if t > now:
                push(heap, numbers, t, 4 * slot + step)
                continue
        else:
            now = _now(time)
            if now >= until:
                break
            wait = min(until, heap[DUE, 0]) - now if numbers[EVENTS] else until - now
            wait = max(0, wait)
            time[0], time[1] = wait // SECOND_NS, wait % SECOND_NS
            for i in range(hosts + 1):
                polled[i, 1] = POLLIN
            ready = _ppoll(polled.ctypes.data, hosts + 1, time.ctypes.data, 0)
            before, now = now, _now(time)
            if wait:
                idle += now - before
            if ready > 0:
                if polled[hosts, 1] != POLLIN:
                    break
                source, taken = 0, 0
            continue

        # Take it as far as it comes until now.
        source_of, target = slots[SOURCE, slot], slots[TARGET, slot]
        size = slots[LENGTH, slot] - VNET_BYTES
        while step < DELIVERED:
            if step == LEFT_HOST and links[GROUP, source_of] != links[GROUP, target]:
                group = hosts + links[GROUP, source_of]
                bucket, link, following = group, group, LEFT_GROUP
                _count(counters, READ, link, size)
            elif step == LEFT_GROUP:
                link = hosts + links[GROUP, target]
                bucket, following = link + groups, AT_HOST
            else:
                bucket, link, following = target, target, DELIVERED
            arrived = t
            t = leaves(buckets, bucket, slots[WIRE, slot], t)
            if t < 0:
                _count(counters, OVERFLOWED, link, size)
                break
            counters[WAIT_NS, link] = max(counters[WAIT_NS, link], t - arrived)
            if following == LEFT_GROUP:
                if is_lost(links, chances, drawn, link):
                    _count(counters, LOST, link, size)
                    t = -1
                    break
                arrived = t
                t = delayed(links, chances, drawn, link, last_ns[1], source_of, target, t)
                counters[OVERTOOK, link] += t == arrived and links[DELAY_NS, link] > 0
            elif following == AT_HOST:
                _count(counters, WRITTEN, link, size)
            step = following
            if t > now:
                break
        if t < 0:
            _release(slots, numbers, slot)
        elif t > now:
            push(heap, numbers, t, 4 * slot + step)
        else:
            if silent(outages, target, source_of, t - numbers[OUTAGES_FROM_NS]):
                _count(counters, SILENCED, target, size)
            else:
                now = _now(time)
                _note_lateness(lateness, numbers, now - t)
                if _write(polled[target, 0], pool.ctypes.data + _place(numbers, slot), size + VNET_BYTES) < 0:
                    numbers[REFUSED] += 1
                else:
                    _count(counters, WRITTEN, target, size)
            _release(slots, numbers, slot)
    numbers[IDLE_NS] += idle
    numbers[WALL_NS] += now - began
    if 20 * idle < now - began:
        numbers[SATURATED_NS] += now - began
    return now
