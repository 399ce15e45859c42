"""Where the payloads of a link are made: on the device of its parameters, or in main memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradwire.errors import BackendError, IncompatibleError
from gradwire.exchange.method import Method
from gradwire.kernels import TRITON_FAMILIES

__all__ = ["Placement", "place_kernels"]

HOST_BACKENDS = ("cpu", "cpu-plain", "reference")


@dataclass(frozen=True)
class Placement:
    """Who computes, and where.

    Attributes:
        backend: Of the kernels.
        on_device: Whether payloads are made on the device; otherwise gradients are copied to main memory, exchanged
            there, and their mean is copied back.
        reason: Why, in words for a run's record.
    """

    backend: str
    on_device: bool
    reason: str


def place_kernels(methods: Sequence[Method], asked: str, device: torch.device) -> Placement:
    """Choose the backend of the kernels for parameters on a device.

    Args:
        methods: That the link may use, in any of its rounds.
        asked: A backend by name. "auto" stands for Triton's kernels where all methods can do with them, else for those
            of the CPU.

    Raises:
        BackendError: Triton's kernels are asked for on a device, and a method cannot do with them.
        IncompatibleError: outcomes differ by rank, which is served in main memory alone.
    """
    if device.type == "cpu":
        return Placement(asked, False, "the parameters are in main memory")
    for method in methods:
        if method.outcomes_differ:
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
    """Explain what keeps a method from computing on a device; None where nothing does."""
    lacking = [family for family in method.kernels if family not in TRITON_FAMILIES]
    if lacking:
        return f"{method.name} needs {', '.join(map(repr, lacking))}, of which Triton has no kernels here"
    return None if method.on_device else f"{method.name} computes in main memory between its kernels"
