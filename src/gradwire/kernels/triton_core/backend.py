"""The backend ``triton``, whose families are compared with the reference on each device before their first use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from typing import Any

import torch

from gradwire.errors import BackendError
from gradwire.kernels.api import Backend, Kernels
from gradwire.kernels.compiling import compiling
from gradwire.kernels.families import triton_module
from gradwire.kernels.front import Family
from gradwire.kernels.moments.operations import Moments
from gradwire.kernels.self_test import agree
from gradwire.kernels.signs.operations import SignSums

SERVED = ("moments", "ternary", "levels", "natural", "signs", "rotation", "selection", "shifts")
"""Families that have Triton kernels."""


class TritonBackend:
    """The backend ``triton``, with one module for each family.

    Tensors are on a CUDA device, or in CPU memory if ``TRITON_INTERPRET=1`` was set before Triton was imported. Before
    its first use on a device, a family runs its self test there, which must give the bits of the reference. A family
    without Triton kernels is refused, and so is one whose bits differ: no other backend takes its place.

    Args:
        reference: The backend that defines the bits.

    Raises:
        BackendError: Triton is not installed, or there is neither a CUDA device nor the interpreter.
    """

    name, coders = "triton", "auto"

    def __init__(self, reference: Backend) -> None:
        try:
            launch = import_module("gradwire.kernels.triton_core.launch")
        except ImportError as error:
            raise BackendError(
                f"kernel backend 'triton' needs triton ({error}): pip install 'gradwire[triton]'"
            ) from error
        if launch.MIXED:
            raise BackendError("TRITON_INTERPRET was changed after triton was imported: set it before Python starts")
        self.interpreted: bool = launch.INTERPRETED
        if not self.interpreted and not torch.cuda.is_available():
            raise BackendError(
                f"kernel backend 'triton' needs a CUDA device, and PyTorch {torch.__version__} finds none: use "
                "backend='auto', or set TRITON_INTERPRET=1 before Python starts to run its kernels in Triton's "
                "interpreter, on tensors in CPU memory"
            )
        self._reference = Kernels(reference)
        self._verified = set[tuple[str, torch.device]]()
        self._families = dict[str, Family]()
        self._lock = threading.Lock()

    def family(self, name: str) -> Family:
        if name not in SERVED:
            raise BackendError(
                f"kernel backend 'triton' has no kernels of the family {name!r}, only of {', '.join(SERVED)}: use "
                "another backend for a method that needs it"
            )
        if name not in self._families:
            self._families[name] = _Verified(self, name, triton_module(name))
        return self._families[name]

    def warm_up(self, name: str) -> None:
        """Compile a family for the current device, and compare it with the reference there.

        Raises:
            BackendError: its kernels cannot run there, or give other bits.
        """
        self.family(name)
        self.verify(name, self._here())

    @property
    def compiles_for(self) -> str:
        """Triton, and the name of the current device."""
        return f"triton {device_name(self._here())}"

    def _here(self) -> torch.device:
        return torch.device("cpu") if self.interpreted else torch.device("cuda", torch.cuda.current_device())

    def measure(self, name: str) -> None:
        """Measure nothing: there is one variant."""

    def verify(self, family: str, device: torch.device) -> None:
        """Compare a family with the reference on a device, unless that was done before.

        Raises:
            BackendError: the family's kernels cannot run on tensors of the device, or give other bits.
        """
        if (family, device) in self._verified:
            return
        if (device.type == "cpu") != self.interpreted or device.type not in ("cpu", "cuda"):
            where = "in CPU memory, where TRITON_INTERPRET=1 is set" if self.interpreted else "on a CUDA device"
            raise BackendError(f"kernel backend 'triton' computes on tensors {where}, not on {device.type!r} tensors")
        with self._lock:
            if (family, device) in self._verified:
                return
            with compiling():
                reason = self.difference(family, device)
            if reason is not None:
                raise BackendError(
                    f"kernel backend 'triton' does not serve the family {family!r} on {device_name(device)}: {reason}; "
                    "use another backend, and please report it"
                )
            self._verified.add((family, device))

    def difference(self, family: str, device: torch.device) -> str | None:
        """Return how a family's self test on a device fails, or None if it passes."""
        module = triton_module(family)
        try:
            if agree(family, Kernels(_OnDevice(module, device)), self._reference):
                return None
            return "its results differ from those of 'reference'"
        except Exception as error:  # a compiler may raise any type for an unknown device
            return f"{type(error).__name__}: {error}"


class _Verified:
    """The functions of a family, each of which first verifies the family on the device of its tensors."""

    def __init__(self, backend: TritonBackend, name: str, module: Family) -> None:
        self._backend, self._name, self._module = backend, name, module

    def __getattr__(self, operation: str) -> Callable[..., None]:
        function, backend, name = getattr(self._module, operation), self._backend, self._name

        def verified(first: torch.Tensor, *arguments: object) -> None:
            backend.verify(name, first.device)
            function(first, *arguments)

        setattr(self, operation, verified)
        return verified


class _OnDevice:
    """A backend of one module, whose functions get copies on a device of tensors in CPU memory."""

    name, compiles_for, coders = "triton", "", "reference"

    def __init__(self, module: Family, device: torch.device) -> None:
        self._module, self._device = module, device

    def family(self, name: str) -> Family:
        return self

    def warm_up(self, name: str) -> None:
        """Compile nothing ahead: each function is compiled when it is called."""

    def measure(self, name: str) -> None:
        """Measure nothing: there is one variant."""

    def __getattr__(self, operation: str) -> Callable[..., None]:
        function = getattr(self._module, operation)

        def copied(*arguments: Any) -> None:
            pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

            def there(value: Any) -> Any:
                if isinstance(value, torch.Tensor):
                    pairs.append((value, value.to(self._device)))
                    return pairs[-1][1]
                if isinstance(value, (Moments, SignSums)):
                    return type(value)(*(there(getattr(value, field.name)) for field in fields(value)))
                return value

            function(*[there(argument) for argument in arguments])
            for here, moved in pairs:
                if moved is not here:
                    here.copy_(moved)

        return copied


def device_name(device: torch.device) -> str:
    """Return the name of a device for messages."""
    if device.type != "cuda":
        return "Triton's interpreter"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
