"""A broadcast on real ranks: what arrives, and the bytes that each process hands to the operating system."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gradwire.exchange.drivers import Lane
from gradwire.exchange.drivers.traffic import broadcast_sends
from gradwire.exchange.ops import Broadcast, Exchange
from ranks import fresh_ranks

COUNTS = Path("/proc/self/io")
LARGE, SMALL = 200_000, 1000
"""Bytes: one that waits for its turn, and one that does not."""


def written() -> int:
    """Return the bytes that this process has handed to the system, for files and sockets together."""
    return int(next(x for x in COUNTS.read_text().splitlines() if x.startswith("wchar")).split()[1])


def one(op: Broadcast) -> Exchange[torch.Tensor]:
    reply: torch.Tensor = yield op
    return reply


def broadcasts() -> list[tuple[int, int, int, bool]]:
    """Return for each broadcast the root, the bytes counted, the bytes written, and whether the value came."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("a lane", dist.distributed_c10d._get_default_store())
    lane, found = Lane(store, rank, world_size, timedelta(seconds=60), "lane"), []
    for size in (SMALL, LARGE):
        for root in range(world_size):
            for used in (None, size - 200):
                value = torch.full((size,), root + 1 if rank == root else 0, dtype=torch.uint8)
                length = None if used is None else torch.tensor([used if rank == root else 0])
                dist.barrier()
                # What the barrier still sends is over by then, and so is the broadcast at the second one.
                time.sleep(0.05)
                sent, before = lane.meter.sent_bytes, written()
                reply = lane.run(one(Broadcast(value, root, length))).result()
                time.sleep(0.05)
                count = size if used is None else used
                came = bool((reply[:count] == root + 1).all()) and (length is None or int(length) == used)
                came = came and (rank == root or not bool(reply[count:].any()))
                found.append((root, lane.meter.sent_bytes - sent, written() - before, came))
    lane.close()
    return found


@pytest.mark.ranks
def test_every_rank_sends_what_is_counted_for_its_place_in_the_tree() -> None:
    """What is written beside the value is heads of Gloo's own: of a message, and of "ready to receive", 64 bytes each.

    A rank has at most 2 ceil(log2 N) of them, twice as many where a length is told. The smallest value has more
    bytes than all of these, so that a message more or less would show.
    """
    if not COUNTS.exists():
        pytest.skip("this system does not count what a process writes")
    world_size = 4
    with fresh_ranks(world_size) as ranks:
        everything = ranks(broadcasts)
    for rank, rows in enumerate(everything):
        for i, (root, counted, wrote, came) in enumerate(rows):
            size, told = (SMALL, LARGE)[i // (2 * world_size)], i % 2 == 1
            assert came
            assert counted == (size - 200 + 8 if told else size) * broadcast_sends(rank, root, world_size)
            assert counted <= wrote < counted + 64 * 2 * 2 * 2
