# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""What the relay does to a frame, compiled: losses, delays, rates and outages.

A frame of host a for host b takes these steps; the first is the kernel's, the others are the relay's:

1. the rate at which a sends: ``tc tbf`` on its interface,
2. a's impairments: outage, loss, delay, jitter, reordering,
3. if b is in another group: the rate at which a's group sends, the group's impairments, and the rate at which b's
   group receives,
4. the rate at which b receives, and b's outages.

Times are nanoseconds of CLOCK_MONOTONIC. A link is a host's, or behind the hosts' a group's.
"""

from __future__ import annotations

import numpy as np
from numba import njit

QUEUE_NS = 50_000_000
"""The longest that a frame waits for a rate, as of ``tbf`` in this package."""

VNET_BYTES = 10
"""Bytes of the virtio header before a frame."""

# Rows of arrays, a column a link: of its settings and state, of probabilities, and of generators.
GROUP, DELAY_NS, JITTER_NS, LOSING = range(4)
BEGINS, ENDS, OVERTAKES = range(3)
FOR_LOSS, FOR_JITTER, FOR_REORDER = range(3)

# Rows of the token buckets.
COST, DEPTH, FULL_AT, LEFT_AT = range(4)


@njit
def uniform(drawn, purpose, link):
    """Return the next number in [0, 1) of a generator: SplitMix64 (Steele, Lea and Flood, 2014)."""
    drawn[purpose, link] += np.uint64(0x9E3779B97F4A7C15)
    z = drawn[purpose, link]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.float64((z ^ (z >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53


@njit
def is_lost(links, chances, drawn, link):
    """Return whether the next frame of a link is lost: the chain of two states of ``Impairments``."""
    if chances[BEGINS, link] == 0.0:
        return False
    u = uniform(drawn, FOR_LOSS, link)
    fails = u >= chances[ENDS, link] if links[LOSING, link] else u < chances[BEGINS, link]
    links[LOSING, link] = fails
    return fails


@njit
def delayed(links, chances, drawn, link, last_ns, source, target, t):
    """Return when a frame that enters a link at time t is through: behind those before it, or at once."""
    if chances[OVERTAKES, link] > 0.0 and uniform(drawn, FOR_REORDER, link) < chances[OVERTAKES, link]:
        return t
    due = t + links[DELAY_NS, link]
    if links[JITTER_NS, link]:
        due += np.int64((2.0 * uniform(drawn, FOR_JITTER, link) - 1.0) * links[JITTER_NS, link])
    due = max(due, last_ns[source, target])
    last_ns[source, target] = due
    return due


@njit
def leaves(buckets, bucket, size, t):
    """Return when a frame that arrives at a token bucket at time t leaves it; -1 if it would wait too long.

    Let a byte take c nanoseconds, a bucket of B bytes be full again at time f, and the frame before have left at time
    d. A frame of n bytes (``size``) leaves at ``s = max(t, d, f + c (n - B))``, and then f becomes ``max(f, s) + c n``.
    Without a limit (c = 0) it leaves at t.
    """
    each = buckets[COST, bucket]
    if each == 0.0:
        return t
    at = max(float(t), buckets[LEFT_AT, bucket], buckets[FULL_AT, bucket] + each * (size - buckets[DEPTH, bucket]))
    if at - t > QUEUE_NS:
        return -1
    buckets[LEFT_AT, bucket] = at
    buckets[FULL_AT, bucket] = max(buckets[FULL_AT, bucket], at) + each * size
    return np.int64(at)


@njit
def silent(outages, host, other, since_ns):
    """Return whether a host's link is silent towards another, so many nanoseconds after outages began to count."""
    for i in range(outages.shape[0]):
        if not outages[i, 0] <= since_ns < outages[i, 1]:
            continue
        one, peer = outages[i, 2], outages[i, 3]
        if one < 0 or (one == host and (peer < 0 or peer == other)) or (one == other and peer == host):
            return True
    return False


@njit
def wire_bytes(frame, length):
    """Return the bytes of a frame behind its virtio header, cut into segments as a network card would cut it."""
    size = length - VNET_BYTES
    if frame[1] == 0:
        return size
    segment = np.int64(frame[4]) | np.int64(frame[5]) << 8
    transport = np.int64(frame[6]) | np.int64(frame[7]) << 8
    # The virtio header's own length of the headers is only a hint; TCP's is in the upper half of its byte 12.
    headers = transport + 4 * np.int64(frame[VNET_BYTES + transport + 12] >> 4)
    if segment == 0 or size <= headers:
        return size
    return size + ((size - headers - 1) // segment) * headers
