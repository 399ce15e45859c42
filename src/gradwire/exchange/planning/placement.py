"""The placement of kernels: which backend computes the payloads of a link, and on which device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradwire.errors import BackendError, IncompatibleError
from gradwire.exchange.method import Method
from gradwire.kernels import TRITON_FAMILIES, get_kernels

HOST_BACKENDS = ("cpu", "cpu-plain", "reference")


@dataclass(frozen=True)
class Placement:
    """The backend and the device that compute payloads.

    Attributes:
        backend: Backend of the kernels.
        on_device: True if payloads are made on the device; otherwise gradients are copied to main memory, exchanged
            there, and their mean is copied back.
        reason: Reason for the choice, for a link's record.
    """

    backend: str
    on_device: bool
    reason: str


def place_kernels(methods: Sequence[Method], asked: str, device: torch.device) -> Placement:
    """Choose the backend of the kernels for parameters on a device.

    Args:
        methods: The methods that the link may use in any round.
        asked: Name of a backend. "auto" chooses Triton's kernels if they are installed and suffice for all methods,
            else those of the CPU.

    Raises:
        BackendError: Triton's kernels are asked for on a device, but are not installed or do not suffice for a method.
        IncompatibleError: outcomes differ between ranks, which is supported in main memory only.
    """
    if device.type == "cpu":
        return Placement(asked, False, "the parameters are in main memory")
    for method in methods:
        if method.traits.outcomes_differ:
            raise IncompatibleError(
                f"{method!r} keeps parameters of its own on each rank, which is served for parameters in main memory "
                f"alone, and these are on {device}: move the model to the CPU, or use another method"
            )
    if asked in HOST_BACKENDS:
        return Placement(asked, False, f"backend={asked!r} was asked for")
    obstacle = next((found for found in map(_obstacle, methods) if found), None)
    if obstacle is None:
        return Placement("triton", True, "all that the method computes has kernels for the device")
    if asked == "triton":
        raise BackendError(
            f"backend='triton' cannot serve parameters on {device}: {obstacle}. Use backend='auto' or 'cpu', which "
            "copies gradients to main memory and exchanges them there"
        )
    return Placement(asked, False, obstacle)


def _obstacle(method: Method) -> str | None:
    """Return the reason why a method cannot compute on a device, or None."""
    lacking = [family for family in method.traits.kernels if family not in TRITON_FAMILIES]
    if lacking:
        return f"{method.name} needs {', '.join(map(repr, lacking))}, of which Triton has no kernels here"
    if not method.traits.on_device:
        return f"{method.name} computes in main memory between its kernels"
    try:
        if method.traits.kernels:
            get_kernels("triton")
    except BackendError as error:
        return str(error)
    return None
