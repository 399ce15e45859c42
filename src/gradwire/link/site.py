"""Which links are open in this process: those that are draw independent random numbers.

A link's number is the lowest that no open link has on any rank of its group, and becomes free when the link is closed.
So links that are attached in the same order have the same numbers in every run, and one that is attached after
another was closed draws as that one did. A link that is dropped without being closed keeps its number until Python has
collected it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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
from gradwire.kernels import checksum, get_kernels
from gradwire.methods.spec import method as read_method
from gradwire.seeds import LinkNumber


class Numbered(Protocol):
    """What has a number while its ``close`` is alive."""

    number: LinkNumber
    close: weakref.finalize[..., Any]


_links: weakref.WeakSet[Numbered] = weakref.WeakSet()


def register(link: Numbered) -> None:
    """Count a link as open until it is closed or collected."""
    _links.add(link)


def numbers_in_use(but: Numbered | None = None) -> set[int]:
    """Return the numbers of this process's open links, but for one of them."""
    return {link.number.value for link in _links if link.close.alive and link is not but}


def lowest_free(in_use: Iterable[int]) -> int:
    """Return the lowest number that is not in use."""
    taken = set(in_use)
    return next(number for number in range(len(taken) + 1) if number not in taken)


def share_a_number(link: Numbered) -> str | None:
    """Say what is wrong where another open link has this one's number, as after loading in another order."""
    if link.number.value not in numbers_in_use(but=link):
        return None
    return (
        f"two open links have the number {link.number.value}, one of them from a checkpoint: where their parameters "
        "bear the same names, they draw the same random numbers; attach links in the order in which they were attached "
        "when the checkpoint was saved, and load the state of each"
    )


def warm_up(method: str | Method = "terngrad", backend: str = "auto") -> float:
    """Compile what a method will call, once a machine; the result is kept on disk.

    Call it before starting several workers on one machine, so that they do not compile the same code side by side.

    Returns:
        Seconds in which something was compiled; 0 where all of it was kept on disk.
    """
    families = read_method(method).traits.kernels
    return get_kernels(backend).warm_up(families) + checksum.warm_up() if families else 0.0


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
        specs: list[str | Method] = [*method.traits.tries] or [method]
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
