"""The choice of the transport for a link's payloads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from gradwire.errors import IncompatibleError
from gradwire.exchange.deferred_checks import Checks
from gradwire.exchange.drivers.devices import CudaDevice, Device, HostDevice
from gradwire.exchange.drivers.groups import Group
from gradwire.exchange.drivers.transports.base import Transport
from gradwire.exchange.drivers.transports.gloo import GlooTransport
from gradwire.exchange.drivers.transports.nccl import NCCLTransport
from gradwire.exchange.drivers.transports.staged import StagedTransport

Connect: TypeAlias = Callable[[Any, int, int, timedelta], Transport]
"""``connect(store, rank, world_size, timeout)`` connects some ranks, which all call it."""


def one_device(devices: Mapping[str, torch.device]) -> torch.device:
    """Return the device of all parameters.

    Raises:
        IncompatibleError: they are on several devices.
    """
    (first, device), *others = devices.items()
    for name, other in others:
        if other != device:
            raise IncompatibleError(
                f"parameter {first!r} is on {device} and {name!r} on {other}: a link exchanges the gradients of one "
                "device; move the model to one, or build a gradwire.Link for the parameters of each"
            )
    return device


def choose_transport(asked: str, device: torch.device, on_device: bool, group: Group) -> str:
    """Return "gloo", "nccl" or "staged".

    Args:
        asked: One of them, or "auto": NCCL for payloads on a device if the group has it, else staged; Gloo for
            gradients in main memory.
        device: Device of the parameters.
        on_device: True if payloads are made on the device; otherwise gradients are copied to main memory and exchanged
            there.
        group: The ranks of the link.

    Raises:
        IncompatibleError: the transport asked for does not support these tensors.
    """
    if device.type == "cpu":
        if asked in ("auto", "gloo"):
            return "gloo"
        raise IncompatibleError(
            f"transport={asked!r} is for parameters on CUDA devices, and these are in main memory: leave transport "
            "out, or use transport='gloo'"
        )
    if asked == "gloo":
        raise IncompatibleError(
            f"transport='gloo' sends from main memory, and the parameters are on {device}: use transport='staged', "
            "which copies payloads to main memory and sends them by Gloo"
        )
    if asked == "nccl":
        if not dist.is_nccl_available():
            raise IncompatibleError(
                f"transport='nccl' needs a PyTorch with NCCL, and {torch.__version__} was built without it: install a "
                "CUDA build of PyTorch, or use transport='staged'"
            )
        if not on_device:
            raise IncompatibleError(
                "transport='nccl' carries payloads that are made on the device, and those of this method are made in "
                "main memory (link.record()['kernels_on'] says so): use transport='staged', or a method with Triton "
                "kernels, such as 'terngrad'"
            )
        return "nccl"
    return "nccl" if asked == "auto" and on_device and group.has_nccl else "staged"


def device_of(device: torch.device) -> Device:
    """Return the link's view of a device."""
    return HostDevice() if device.type == "cpu" else CudaDevice(device)


def connector(
    transport: str,
    device: Device,
    on_device: bool,
    checks: Checks,
    gloo: Callable[[Any, int, int], Any],
    key: bytes = b"",
) -> Connect:
    """Return a function that connects ranks by a transport.

    Args:
        on_device: See :func:`choose_transport`.
        checks: Takes the results of checks of values that are reduced on a device.
        gloo: Called with a store, a rank and the number of ranks, returns their Gloo connections, for payloads in main
            memory.
        key: Key of the messages; see :class:`gradwire.exchange.drivers.transports.notes.Notes`. Empty: they have none.

    Raises:
        IncompatibleError: there is a key, and the transport has no digests.
    """
    if transport == "gloo" or not on_device:
        return partial(GlooTransport, key=key, connected=gloo)
    if key:
        raise IncompatibleError(f"transport={transport!r} has no keyed digests: payloads in main memory have")
    return partial(_over_nccl, device, checks) if transport == "nccl" else partial(_staged, device)


def _staged(device: Device, store: Any, rank: int, world_size: int, timeout: timedelta) -> Transport:
    return StagedTransport(GlooTransport(store, rank, world_size, timeout), device)


def _over_nccl(device: Device, checks: Checks, store: Any, rank: int, world_size: int, timeout: timedelta) -> Transport:
    host = GlooTransport(dist.PrefixStore("host", store), rank, world_size, timeout)
    return NCCLTransport.of(dist.PrefixStore("nccl", store), rank, world_size, timeout, host, device, checks)
