"""The link of a running group, measured."""

from __future__ import annotations

import torch.distributed as dist

from gradwire.errors import IncompatibleError
from gradwire.exchange.drivers import Lane, group_timeout
from gradwire.link.failures import Failures
from gradwire.link.handshake import agreement
from gradwire.link.selection.control_channel import ControlChannel
from gradwire.model.machine import DEFAULT, LinkModel, Machine
from gradwire.model.schedule import Load

__all__ = ["probe"]


def probe(
    process_group: dist.ProcessGroup | None = None, *, machine: Machine = DEFAULT, cores: int | None = None
) -> LinkModel:
    """Measure the link between the hosts of a group (collective), as the performance model means it.

    All-to-alls of two sizes are timed while all ranks send: the small one's time is the latency of a round, the large
    one's the bandwidth. What the model adds to a link (a round's own latency, the share of the bandwidth that payloads
    get, the ranks of a host that share it) is taken off by the same model
    (:class:`gradwire.model.probing.Probed`). Every rank gets the same, where all give the same machine.

    Args:
        process_group: The default group if None.
        machine: Costs of collectives, as the prediction will have them.
        cores: Of a host, likewise; None: no rank waits for a core.

    Returns:
        The bandwidth of a host, latency one way and ranks on a host. The bandwidth is None where no link limited: on
        one host, whose ranks talk over memory, for one.

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
        timeout = group_timeout(group)
    what = "the measurement of the link"
    (lane,) = mine.circle.connected(
        what, lambda store: [Lane(store, group.rank(), group.size(), timeout, "gradwire probe")]
    )
    failures = Failures(mine.circle, [lane])
    try:
        conference = ControlChannel(lane, lambda error, _: failures.record(error, what), mine.circle.ranks)
        found = conference.probe()
    finally:
        lane.close()
    here = found.ranks_per_host
    return found.link(machine, Load(ranks=here, cores=cores or 2 * here))
