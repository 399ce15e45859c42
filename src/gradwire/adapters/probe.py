"""The link of a running group, measured."""

from __future__ import annotations

import torch
import torch.distributed as dist

from gradwire.adapters.conference import Conference
from gradwire.adapters.handshake import agreement
from gradwire.errors import ExchangeError, IncompatibleError
from gradwire.groups import Lane
from gradwire.perf.machine import Link

__all__ = ["probe"]


def probe(process_group: dist.ProcessGroup | None = None) -> Link:
    """Measure what the ranks of a group can send to each other at once (collective).

    All-to-alls of two sizes: the small one's time is the latency of a message, with what the machine needs for it; the
    difference gives the bandwidth. Every rank gets the slowest rank's bandwidth and the largest latency.

    Raises:
        IncompatibleError: there is no process group, or it has one rank.
        ExchangeError: a rank is gone.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise IncompatibleError("no process group: call torch.distributed.init_process_group first")
    group = process_group if process_group is not None else dist.group.WORLD
    if group is None or group.size() < 2:
        raise IncompatibleError("a group of one rank has no link to measure: start at least two ranks")
    with agreement(group) as mine:
        timeout = group._get_backend(torch.device("cpu")).options._timeout
    store = dist.PrefixStore(f"gradwire/{mine.token}", dist.distributed_c10d._get_default_store())
    lane = Lane(store, group.rank(), group.size(), timeout, "gradwire probe")
    try:
        conference = Conference(lane, lambda error: ExchangeError(f"the link could not be measured: {error}"))
        bandwidth, latency_s = conference.link()
        rows = conference.gather([bandwidth, latency_s])
    finally:
        lane.close()
    return Link(bandwidth_bytes_per_s=min(row[0] for row in rows), latency_s=max(row[1] for row in rows))
