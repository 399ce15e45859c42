"""The site of a link (its device, kernels and transport), and the numbers of the open links of this process.

Random numbers depend on a link's number, so that open links draw independently. It is the lowest number that no open
link has on any rank of the group, and is free again when the link is closed. So links that are made in the same order
have the same numbers in every run. A link that is dropped without ``close()`` keeps its number until it is
garbage-collected.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from gradwire.errors import IncompatibleError
from gradwire.exchange.deferred_checks import AT_ONCE, Checks
from gradwire.exchange.drivers import (
    Device,
    Group,
    Lane,
    LateChecks,
    TransferOrder,
    choose_transport,
    connector,
    device_of,
    one_device,
)
from gradwire.exchange.method import Method
from gradwire.exchange.ops import Scope
from gradwire.exchange.planning import Options, Placement, place_kernels
from gradwire.exchange.segments import is_sharded
from gradwire.kernels import checksum, get_kernels
from gradwire.link.memory_order import MemoryOrder, memory_orders
from gradwire.methods.spec import method as read_method
from gradwire.seeds import LinkNumber


class Numbered(Protocol):
    """An object with a number, which it holds while its ``close`` is alive."""

    number: LinkNumber
    close: weakref.finalize[..., Any]


_links: weakref.WeakSet[Numbered] = weakref.WeakSet()


def register(link: Numbered) -> None:
    """Add a link to the open ones until it is closed or garbage-collected."""
    _links.add(link)


def numbers_in_use(but: Numbered | None = None) -> set[int]:
    """Return the numbers of this process's open links except one of them."""
    return {link.number.value for link in _links if link.close.alive and link is not but}


def lowest_free(in_use: Iterable[int]) -> int:
    """Return the lowest number that is not in use."""
    taken = set(in_use)
    return next(number for number in range(len(taken) + 1) if number not in taken)


def share_a_number(link: Numbered) -> str | None:
    """Return the problem if another open link has the same number, for example after loading in another order."""
    if link.number.value not in numbers_in_use(but=link):
        return None
    return (
        f"two open links have the number {link.number.value}, one of them from a checkpoint: where their parameters "
        "bear the same names, they draw the same random numbers; attach links in the order in which they were attached "
        "when the checkpoint was saved, and load the state of each"
    )


def warm_up(method: str | Method = "terngrad", backend: str = "auto") -> float:
    """Compile the kernels of a method, and keep them on disk.

    Call it before starting several workers on one machine, so that they do not all compile the same code.

    Args:
        method: A method or its spec.
        backend: Backend of the kernels, as for :func:`gradwire.attach`.

    Returns:
        Seconds of compilation; 0 if all kernels were on disk, or the method needs none.

    Raises:
        HyperparameterError: the spec or the backend is wrong.
        BackendError: the backend is not installed.
    """
    families = read_method(method).traits.kernels
    return get_kernels(backend).warm_up(families) + checksum.warm_up() if families else 0.0


@dataclass(frozen=True)
class Site:
    """The site of one link: its device, kernels and transport, and the memory order of its parameters.

    Attributes:
        device: Device of the parameters.
        placement: Kernel backend that computes payloads, and its device.
        transport: "gloo", "nccl" or "staged".
        group: The ranks of the link.
        checks: Takes the results of payload checks.
        orders: Memory order of each parameter when the link was made.
        strides: Those of each parameter then, but for DTensors.
    """

    device: Device
    placement: Placement
    transport: str
    group: Group
    checks: Checks
    orders: Mapping[str, MemoryOrder]
    strides: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, method: Method, parameters: Mapping[str, torch.Tensor], options: Options, group: Group) -> Site:
        """Return the site for some options; choose the parts that they leave open.

        Raises:
            IncompatibleError: the parameters are on several devices, or the transport does not support theirs.
            BackendError: the kernel backend does not support the method there.
        """
        specs: list[str | Method] = [*method.traits.tries] or [method]
        methods = [read_method(spec) for spec in (*specs, *filter(None, [options.fallback]))]
        where = one_device({name: p.device for name, p in parameters.items()})
        placement = place_kernels(methods, options.backend, where)
        transport = choose_transport(options.transport, where, placement.on_device, group)
        checks = LateChecks() if placement.on_device else AT_ONCE
        strides = {name: tuple(p.stride()) for name, p in parameters.items() if not is_sharded(p)}
        return cls(device_of(where), placement, transport, group, checks, memory_orders(parameters), strides)

    def check_orders(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Raise if the elements of a parameter lie in another order than when the link was made.

        Raises:
            IncompatibleError: they do; what the link keeps of the parameter would be of other elements.
        """
        for name, strides in self.strides.items():
            if parameters[name].stride() != strides and MemoryOrder.of(parameters[name]) != self.orders[name]:
                raise IncompatibleError(
                    f"parameter {name!r} has another memory format than when the link was made: call "
                    "model.to(memory_format=...) before the model is wrapped and the link is made"
                )

    @property
    def backend(self) -> str:
        """The backend of the kernels."""
        return self.placement.backend

    @property
    def exchanges_copies(self) -> bool:
        """True if gradients on a device are copied to main memory and exchanged there."""
        return not self.device.is_host and not self.placement.on_device

    def lane(self, number: int, store: Any, order: TransferOrder, scopes: Sequence[Scope]) -> Lane:
        """Make one of the link's lanes."""
        meetings = self.group.meetings
        return Lane(
            dist.PrefixStore(f"lane/{number}", store),
            self.group.place,
            self.group.world_size,
            self.group.timeout,
            f"gradwire lane {number}",
            order,
            scopes,
            connect=meetings.connect(number)
            if meetings is not None
            else connector(
                self.transport,
                self.device,
                self.placement.on_device,
                self.checks,
                partial(self.group.gloo, number),
                self.group.key(f"lane {number}"),
            ),
        )

    def terms(self) -> dict[str, object]:
        """Return the fields in which all ranks of the link must agree."""
        return {"transport that serves": self.transport, "payloads made on a device": self.placement.on_device}

    def record(self) -> dict[str, str]:
        """Return the device, kernels and transport in use, for a link's record."""
        made_on = self.device.name if self.placement.on_device else "cpu"
        return {"device": self.device.name, "transport": self.transport, "kernels_on": made_on} | (
            {} if self.device.is_host else {"kernels_reason": self.placement.reason}
        )
