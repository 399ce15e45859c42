"""What a message costs on a link: stated, measured or from a checkpoint; the same on all ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from gradwire.errors import HyperparameterError, IncompatibleError
from gradwire.exchange.drivers import Lane, group_timeout
from gradwire.exchange.method import Method
from gradwire.exchange.network_cost import LinkCost
from gradwire.exchange.planning import Planner
from gradwire.link.failures import Failures
from gradwire.link.handshake import agreement
from gradwire.link.selection.control_channel import ControlChannel
from gradwire.model.machine import DEFAULT, LinkModel, Machine
from gradwire.model.schedule import Load

LINK_COST_STATE = "link_cost"
"""Key of what was measured in the part of a link's state that is the same on all ranks."""


class CostMeter(Protocol):
    """What measures a link."""

    def cost(self) -> LinkCost:
        """Measure what a message costs (collective); the same on all ranks."""


class CostKeeper:
    """Keeps what a message costs, for methods that must be told.

    What the user states is an option, and holds whatever a checkpoint says. Otherwise it is measured once, when the
    link is built, and a checkpoint holds what was measured: a training that is continued goes on with it, on whatever
    link. Methods that need not be told have none measured.

    Attributes:
        value: None where nobody knows, or needs to.
    """

    def __init__(self, method: Method, stated: LinkCost | None) -> None:
        self._open = method.traits.needs_link_cost and stated is None
        self.value = stated
        self._source = "stated"

    def measure(self, meter: CostMeter) -> None:
        """Measure the cost where the method needs it and nobody stated it (collective)."""
        if self._open:
            self.value, self._source = meter.cost(), "measured when the link was built"

    def record(self) -> dict[str, Any] | None:
        """Return the cost and where it is from, in plain values; None where there is none."""
        return None if self.value is None else {**asdict(self.value), "source": self._source}

    def state(self) -> dict[str, torch.Tensor]:
        """Return what was measured, for a checkpoint: seconds a message and bytes a second, float64 ``[2]``."""
        if not self._open or self.value is None:
            return {}
        return {LINK_COST_STATE: torch.tensor([self.value.message_s, self.value.bytes_per_s], dtype=torch.float64)}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take what :meth:`state` gave; without it, what was measured stays.

        Raises:
            IncompatibleError: it is no cost.
        """
        if self._open and LINK_COST_STATE in state:
            self.value, self._source = read_cost(state[LINK_COST_STATE]), "taken from a checkpoint"


def read_cost(value: torch.Tensor) -> LinkCost:
    """Return the cost that a state holds.

    Raises:
        IncompatibleError: it is none.
    """
    try:
        if value.dtype != torch.float64 or value.shape != (2,):
            raise HyperparameterError(f"{value.dtype} of shape {tuple(value.shape)}")
        message_s, bytes_per_s = value.tolist()
        return LinkCost(message_s=message_s, bytes_per_s=bytes_per_s)
    except HyperparameterError as error:
        raise IncompatibleError(f"the state's {LINK_COST_STATE!r} is not what a message costs: {error}") from None


CODER_STATE = "coder"
"""Key of the settled coders in the part of a link's state that is the same on all ranks."""

Times: TypeAlias = Mapping[str, Mapping[str, float]]
"""Seconds by method (its spec) and coder."""


class CoderSelection:
    """Settles the coder of all planners whose methods leave it open.

    A coder takes as long as on the slowest rank, since all wait for that one; of these times the least decides, at
    equal ones the coder listed first. A choice once made is kept in checkpoints and not measured again.
    """

    def __init__(self) -> None:
        self._planners: dict[str, Planner] = {}
        self._records: dict[str, dict[str, Any]] = {}

    def watch(self, planner: Planner) -> Planner:
        """Take a planner into account; return it."""
        if planner.open_coders:
            self._planners[repr(planner.method)] = planner
        return planner

    def measure(self) -> dict[str, dict[str, float]]:
        """Return what this rank's coders take for each method."""
        return {spec: planner.measure_coders() for spec, planner in self._planners.items()}

    def agree(self, everyone: Sequence[Times]) -> None:
        """Settle on coders from what :meth:`measure` gave on each rank, by rank; the same on all of them."""
        for spec, planner in self._planners.items():
            slowest = {name: max(times[spec][name] for times in everyone) for name in planner.open_coders}
            planner.settle(min(slowest, key=lambda name: slowest[name]))
            ranks = f"on the slowest of {len(everyone)} ranks" if len(everyone) > 1 else "here"
            self._records[spec] = {
                "reason": f"the least time to encode and decode a payload {ranks}",
                "encode_decode_s": slowest,
            }

    def record(self, planner: Planner) -> dict[str, Any] | None:
        """Return what a planner's coder is and why, in plain values; None where it has none.

        ``encode_decode_s`` has each coder's time on the slowest rank where the choice was open, and ``variants`` which
        variant of each part of the chosen coder runs on this rank.
        """
        if planner.coder is None:
            return None
        found = self._records.get(repr(planner.method), {"reason": "named by the method", "encode_decode_s": {}})
        variants = planner.kernels.coder(planner.coder).variants
        return {"chosen": planner.coder, **found, "variants": {} if variants is None else asdict(variants)}

    def state(self) -> dict[str, torch.Tensor]:
        """Return the choice for a checkpoint, nothing where none was open.

        It is a JSON object of coders by their methods' specs, in UTF-8: uint8 ``[n]``.
        """
        if not self._planners:
            return {}
        chosen = {spec: planner.coder for spec, planner in self._planners.items()}
        return {CODER_STATE: torch.tensor(list(json.dumps(chosen).encode()), dtype=torch.uint8)}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take the choice of a checkpoint; for methods that it does not hold, and without one, what was measured stays.

        Raises:
            IncompatibleError: it is no such choice, or names a coder that the method does not know.
        """
        if CODER_STATE not in state:
            return
        found = _read(state[CODER_STATE])
        for spec, planner in self._planners.items():
            if spec in found and found[spec] not in planner.open_coders:
                raise IncompatibleError(
                    f"the checkpoint's coder of {spec} is {found[spec]!r}: this version has "
                    f"{', '.join(planner.open_coders)}"
                )
        for spec, planner in self._planners.items():
            if spec in found:
                planner.settle(found[spec])
                self._records[spec] = {
                    **self._records[spec],
                    "chosen": found[spec],
                    "reason": "taken from a checkpoint",
                }


def _read(value: torch.Tensor) -> dict[str, str]:
    try:
        if value.dtype != torch.uint8 or value.dim() != 1:
            raise ValueError(f"{value.dtype} of shape {tuple(value.shape)}")
        found = json.loads(bytes(value.tolist()).decode())
        if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
            raise ValueError(f"{found!r}")
    except (AttributeError, ValueError) as error:
        raise IncompatibleError(f"the state's {CODER_STATE!r} is no choice of coders: {error}") from None
    return found


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
