"""Where a link's exchanges take place: on which device, by whose kernels, over which transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gradwire.exchange.deferred_checks import AT_ONCE, Checks
from gradwire.exchange.drivers import (
    Device,
    Lane,
    LateChecks,
    TransferOrder,
    choose_transport,
    connector,
    device_of,
    group_timeout,
    one_device,
)
from gradwire.exchange.method import Method
from gradwire.exchange.ops import Scope
from gradwire.exchange.planning import Options, Placement, place_kernels
from gradwire.methods.auto import Auto
from gradwire.methods.spec import method as read_method

__all__ = ["Site"]


@dataclass(frozen=True)
class Site:
    """The device, kernels and transport of one link.

    Attributes:
        device: That the parameters lie on.
        placement: Who computes payloads, and where.
        transport: "gloo", "nccl" or "staged".
        group: Of the link.
        checks: Told whether what arrives is as it was sent.
    """

    device: Device
    placement: Placement
    transport: str
    group: dist.ProcessGroup
    checks: Checks

    @classmethod
    def of(
        cls, method: Method, parameters: Mapping[str, torch.Tensor], options: Options, group: dist.ProcessGroup
    ) -> Site:
        """Choose what the options leave open.

        Raises:
            IncompatibleError: the parameters lie on several devices, or what was asked for cannot carry them.
            BackendError: kernels were asked for that cannot serve the method there.
        """
        specs: list[str | Method] = [*method.candidates] if isinstance(method, Auto) else [method]
        methods = [read_method(spec) for spec in (*specs, *filter(None, [options.fallback]))]
        where = one_device({name: p.device for name, p in parameters.items()})
        placement = place_kernels(methods, options.backend, where)
        transport = choose_transport(options.transport, where, placement.on_device, group)
        return cls(device_of(where), placement, transport, group, LateChecks() if placement.on_device else AT_ONCE)

    @property
    def backend(self) -> str:
        """The backend of the kernels."""
        return self.placement.backend

    @property
    def exchanges_copies(self) -> bool:
        """Whether gradients on a device are copied to main memory, and exchanged there."""
        return not self.device.is_host and not self.placement.on_device

    def lane(self, number: int, store: Any, order: TransferOrder, scopes: Sequence[Scope]) -> Lane:
        """Make one of the link's lanes."""
        return Lane(
            dist.PrefixStore(f"lane/{number}", store),
            self.group.rank(),
            self.group.size(),
            group_timeout(self.group),
            f"gradwire lane {number}",
            order,
            scopes,
            connect=connector(self.transport, self.device, self.placement.on_device, self.checks),
        )

    def terms(self) -> dict[str, object]:
        """Return what all ranks of the link must have in common."""
        return {"transport that serves": self.transport, "payloads made on a device": self.placement.on_device}

    def record(self) -> dict[str, str]:
        """Return what serves, for a run's record."""
        made_on = self.device.name if self.placement.on_device else "cpu"
        return {"device": self.device.name, "transport": self.transport, "kernels_on": made_on} | (
            {} if self.device.is_host else {"kernels_reason": self.placement.reason}
        )
