"""Messages that show BBR the bandwidth of new connections before the first round.

BBR sends no faster than the rate that it has measured. A connection that carries small messages and rests between them
never measures more than a message in a round trip, and so spreads each message over half a round trip, however fast the
network. Messages for several round trips without a pause show it the bandwidth. A lower rate replaces a measured one
only if the network was its reason, not a sender that had no more to send, so that they suffice once, when ranks are
connected. Lost packets undo it: the rate at which one is sent again counts as the network's.

Source: Cardwell, Cheng, Yeganeh, Swett, Jacobson, "BBR congestion control", Internet-Draft
draft-cardwell-iccrg-bbr-congestion-control, sections on delivery rates and their filter;
``benchmarks/speed/lossy_messages.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from gradwire.exchange.wire import checked_values, with_checksum

LONG_S = 0.002
"""Least round trip of connections that are opened: half of a shorter one is not worth the messages."""

SIZES = tuple(1 << bits for bits in (14, 16, 18, 20))
"""Bytes of the messages. BBR doubles its rate in each round trip, from ten packets on, so that each takes about two."""

ROUND_TRIPS = 10
"""Round trips after which no larger message is sent."""

MOST_BYTES = 1 << 25
"""Largest number of bytes that a rank sends at a time."""

TAG = 0
"""Any tag: all these messages have come before the first of another kind leaves."""


def open_connections(
    backend: Any, greeting_s: float, wait_for: Callable[[Any], object], clock: Callable[[], float] = time.perf_counter
) -> int:
    """Send larger and larger messages to all ranks of a Gloo backend, and receive theirs.

    All ranks call it. They first agree on the time of a round trip: the least of the times that their greetings took,
    which is that of the rank that began last and waited for nobody. A rank sends the next message when all of the same
    size have come. Each knows how many will come, and what is left of them when a rank has sent for some round trips
    has one byte. The backend's collectives may go on meanwhile.

    Args:
        backend: A ``torch.distributed.ProcessGroupGloo`` whose ranks have all greeted one another.
        greeting_s: Seconds until this rank had asked all others for a message and had it.
        wait_for: Waits for an operation of the backend.
        clock: Returns seconds.

    Returns:
        The size of the last full message; 0: round trips are too short to matter.

    Raises:
        PayloadError: a rank's message changed on the way.
    """
    n, rank = backend.size(), backend.rank()
    others = [(rank + places) % n for places in range(1, n)]

    def leaving(content: torch.Tensor) -> list[Any]:
        return [backend.send([content], other, TAG) for other in others]

    mine = with_checksum(torch.tensor([greeting_s], dtype=torch.float64, device="cpu"), rank)
    told = mine.repeat(n, 1)
    coming = [backend.recv([told[other]], other, TAG) for other in others]
    for work in [*leaving(mine), *coming]:
        wait_for(work)
    round_trip_s = float(checked_values(told, torch.float64, "the time of a greeting").min())
    sizes = [size for size in SIZES if size * len(others) <= MOST_BYTES] if round_trip_s >= LONG_S else []
    # Nobody reads the messages: one buffer takes them all. Their requests leave at once.
    sink, content = (torch.zeros(max(sizes, default=0), dtype=torch.uint8, device="cpu") for _ in range(2))
    requested = [[backend.recv([sink[:size]], other, TAG) for other in others] for size in sizes]
    largest, until_s = 0, clock() + ROUND_TRIPS * round_trip_s
    for size, coming in zip(sizes, requested):
        if clock() < until_s:
            largest = size
        for work in [*leaving(content[: size if largest == size else 1]), *coming]:
            wait_for(work)
    return largest
