"""The cost of a message and the choice of coders: given, measured or from a checkpoint; the same on all ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from gradwire.errors import HyperparameterError, IncompatibleError
from gradwire.exchange.drivers import Lane, TorchGroup
from gradwire.exchange.method import Method
from gradwire.exchange.network_cost import LinkCost
from gradwire.exchange.planning import Planner
from gradwire.link.failures import Failures
from gradwire.link.handshake import agreement
from gradwire.link.selection.control_channel import ControlChannel
from gradwire.model.machine import DEFAULT, LinkModel, Machine
from gradwire.model.schedule import Load

LINK_COST_STATE = "link_cost"
"""Key of the measured cost in the part of a link's state that is the same on all ranks."""


class CostMeter(Protocol):
    """Measures the network."""

    def cost(self) -> LinkCost:
        """Measure the cost of a message, the same on all ranks (collective call)."""


class CostKeeper:
    """Keeps the cost of a message, for methods that depend on it.

    The user may set it by an option, which takes precedence over a checkpoint. Otherwise it is measured once, when the
    link is made, and saved in checkpoints: a continued training uses the saved cost, on any network. For other methods
    nothing is measured.

    Attributes:
        value: The cost; None if it is unknown or not needed.
    """

    def __init__(self, method: Method, stated: LinkCost | None) -> None:
        self._open = method.traits.needs_link_cost and stated is None
        self.value = stated
        self._source = "stated"

    def measure(self, meter: CostMeter) -> None:
        """Measure the cost if the method needs it and the user did not set it (collective call)."""
        if self._open:
            self.value, self._source = meter.cost(), "measured when the link was built"

    def record(self) -> dict[str, Any] | None:
        """Return the cost and its origin as plain values; None if there is no cost."""
        return None if self.value is None else {**asdict(self.value), "source": self._source}

    def state(self) -> dict[str, torch.Tensor]:
        """Return the measured cost for a checkpoint: seconds per message and bytes per second, float64 ``[2]``."""
        if not self._open or self.value is None:
            return {}
        fitted = [self.value.message_s, self.value.bytes_per_s]
        return {LINK_COST_STATE: torch.tensor(fitted, dtype=torch.float64, device="cpu")}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load a state of :meth:`state`; without a cost in it, the measured one is kept.

        Raises:
            IncompatibleError: its value is not a cost.
        """
        if self._open and LINK_COST_STATE in state:
            self.value, self._source = read_cost(state[LINK_COST_STATE]), "taken from a checkpoint"


def read_cost(value: torch.Tensor) -> LinkCost:
    """Return the cost in a state.

    Raises:
        IncompatibleError: the value is not a cost.
    """
    try:
        if value.dtype != torch.float64 or value.shape != (2,):
            raise HyperparameterError(f"{value.dtype} of shape {tuple(value.shape)}")
        message_s, bytes_per_s = value.tolist()
        return LinkCost(message_s=message_s, bytes_per_s=bytes_per_s)
    except HyperparameterError as error:
        raise IncompatibleError(f"the state's {LINK_COST_STATE!r} is not what a message costs: {error}") from None


CODER_STATE = "coder"
"""Key of the chosen coders in the part of a link's state that is the same on all ranks."""

Times: TypeAlias = Mapping[str, Mapping[str, float]]
"""Seconds by spec of the method, then by coder."""


class CoderSelection:
    """Chooses the coder for all planners whose methods leave it open.

    The time of a coder is that on the slowest rank, since all ranks wait for it. The coder with the least time is
    chosen; of equal ones the first in the list. The choice is saved in checkpoints and not measured again.
    """

    def __init__(self) -> None:
        self._planners: dict[str, Planner] = {}
        self._records: dict[str, dict[str, Any]] = {}

    def watch(self, planner: Planner) -> Planner:
        """Add a planner, and return it."""
        if planner.open_coders:
            self._planners[repr(planner.method)] = planner
        return planner

    def measure(self) -> dict[str, dict[str, float]]:
        """Return the seconds of each coder on this rank, for each method."""
        return {spec: planner.measure_coders() for spec, planner in self._planners.items()}

    def agree(self, everyone: Sequence[Times]) -> None:
        """Choose coders from the results of :meth:`measure` on all ranks; the choice is the same on all of them."""
        for spec, planner in self._planners.items():
            slowest = {name: max(times[spec][name] for times in everyone) for name in planner.open_coders}
            planner.settle(min(slowest, key=lambda name: slowest[name]))
            ranks = f"on the slowest of {len(everyone)} ranks" if len(everyone) > 1 else "here"
            self._records[spec] = {
                "reason": f"the least time to encode and decode a payload {ranks}",
                "encode_decode_s": slowest,
            }

    def record(self, planner: Planner) -> dict[str, Any] | None:
        """Return a planner's coder and the reason for it as plain values; None if it has no coder.

        ``encode_decode_s`` has the time of each coder on the slowest rank, if the choice was open, and ``variants`` the
        variant of each part of the chosen coder on this rank.
        """
        if planner.coder is None:
            return None
        found = self._records.get(repr(planner.method), {"reason": "named by the method", "encode_decode_s": {}})
        variants = planner.kernels.coder(planner.coder).variants
        return {"chosen": planner.coder, **found, "variants": {} if variants is None else asdict(variants)}

    def state(self) -> dict[str, torch.Tensor]:
        """Return the choice for a checkpoint; empty if no choice was open.

        Its value is a JSON object of coders by specs of methods, in UTF-8: uint8 ``[n]``.
        """
        if not self._planners:
            return {}
        chosen = {spec: planner.coder for spec, planner in self._planners.items()}
        return {CODER_STATE: torch.tensor(list(json.dumps(chosen).encode()), dtype=torch.uint8, device="cpu")}

    def check(self, state: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """Return the choice of a checkpoint, by spec; empty if it has none.

        Raises:
            IncompatibleError: it is not such a choice, or has a coder that the method does not know.
        """
        found = _read(state[CODER_STATE]) if CODER_STATE in state else {}
        for spec, planner in self._planners.items():
            if spec in found and found[spec] not in planner.open_coders:
                raise IncompatibleError(
                    f"the checkpoint's coder of {spec} is {found[spec]!r}: this version has "
                    f"{', '.join(planner.open_coders)}"
                )
        return found

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the choice of a checkpoint; for methods without one there, the measured choice is kept.

        Raises:
            IncompatibleError: as :meth:`check`.
        """
        found = self.check(state)
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
    """Measure the network between the hosts of a group, in terms of the performance model (collective call).

    All-to-alls of two sizes are timed while all ranks send: the small one gives the latency of a round, the large one
    the bandwidth. Effects that the model adds itself (latency of a round, share of the bandwidth for payloads, ranks
    that share a host) are subtracted (:class:`gradwire.model.probing.Probed`). The result is the same on every rank if
    all pass the same machine.

    Args:
        process_group: The default group if None.
        machine: Costs of collectives, the same as in the prediction.
        cores: Cores of a host, the same as in the prediction; None: no rank waits for a core.

    Returns:
        The bandwidth of a host, the latency one way and the number of ranks on a host. The bandwidth is None if no
        network was the limit, for example on one host.

    Raises:
        IncompatibleError: there is no process group, or it has one rank.
        ExchangeError: a rank is gone.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise IncompatibleError("no process group: call torch.distributed.init_process_group first")
    whole = process_group if process_group is not None else dist.group.WORLD
    if whole is None or whole.size() < 2:
        raise IncompatibleError("a group of one rank has no link to measure: start at least two ranks")
    group = TorchGroup(whole)
    with agreement(group) as mine:
        timeout = group.timeout
    what = "the measurement of the link"
    (lane,) = mine.circle.connected(
        what, lambda store: Lane(store, group.place, group.world_size, timeout, "gradwire probe")
    )
    failures = Failures(mine.circle, [lane])
    try:
        conference = ControlChannel(lane, lambda error, _: failures.record(error, what), mine.circle.ranks)
        found = conference.probe()
    finally:
        lane.close()
    here = found.ranks_per_host
    return found.link(machine, Load(ranks=here, cores=cores or 2 * here))
