"""A real GPU in the place of the one that is not there, and Triton's kernels on it for tensors in main memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from gradwire.exchange.drivers.devices import CudaDevice
from gradwire.kernels.families import triton_module

GPU = torch.device("cuda", 0)


class CopiedThere:
    """A backend of Triton's kernels that copies tensors to the GPU and back, with their strides and offsets.

    So addresses are aligned there as they are in main memory.
    """

    name, compiles_for, coders = "triton", "", "reference"

    def family(self, name: str) -> Any:
        module = triton_module(name)

        class Family:
            def __getattr__(self, operation: str) -> Callable[..., None]:
                function = getattr(module, operation)

                def copied(*arguments: Any) -> None:
                    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
                    function(*(_there(value, moved) for value in arguments))
                    for octets, copy in moved.values():
                        octets.copy_(copy)

                return copied

        return Family()

    def warm_up(self, name: str) -> None:
        """Compile nothing ahead: each function is compiled when it is called."""

    def measure(self, name: str) -> None:
        """Measure nothing: there is one variant."""


def _there(value: Any, moved: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        if any(isinstance(part, torch.Tensor) for part in parts.values()):
            return type(value)(**{name: _there(part, moved) for name, part in parts.items()})
        return value
    if not isinstance(value, torch.Tensor):
        return value
    storage = value.untyped_storage()
    if storage.data_ptr() not in moved:
        octets = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
        moved[storage.data_ptr()] = octets, octets.to(GPU)
    copy = moved[storage.data_ptr()][1].untyped_storage()
    place = value.storage_offset(), value.size(), value.stride()
    return torch.empty(0, dtype=value.dtype, device=GPU).set_(copy, *place)  # type: ignore[call-overload]


class RealGPU(CudaDevice):
    """The device of links within :func:`real_gpu`, which counts the bytes that they copy, as ``fake_gpu.FakeGPU``."""

    def __init__(self) -> None:
        super().__init__(GPU)
        self.copies = {"to the device": 0, "from the device": 0}
        self.waits_for: list[tuple[str, str]] = []
        self.waits = 0

    def copy_async(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self.copies["to the device" if to.is_cuda else "from the device"] += source.numel() * source.element_size()
        super().copy_async(to, source)


@contextmanager
def real_gpu() -> Iterator[RealGPU]:
    gpu = RealGPU()
    with mock.patch("gradwire.link.site.device_of", return_value=gpu):
        yield gpu


def there(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(GPU)


def here(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def parameters_of(shapes: Mapping[str, tuple[int, ...]], on_device: bool) -> dict[str, torch.nn.Parameter]:
    where = GPU if on_device else torch.device("cpu")
    return {name: torch.nn.Parameter(torch.zeros(shape, device=where)) for name, shape in shapes.items()}


INSTEAD = {"fake_gpu": real_gpu, "there": there, "here": here, "parameters_of": parameters_of}
"""What stands in ``test_devices`` for what is not there."""


def on_the_gpu(name: str, *arguments: Any) -> Any:
    """Run a function of ``test_devices`` in this process, with the real GPU."""
    import test_devices

    with mock.patch.multiple(test_devices, **INSTEAD):
        return getattr(test_devices, name)(*arguments)


class OnTheGPU:
    """Ranks that run functions of ``test_devices`` with the real GPU."""

    def __init__(self, ranks: Any) -> None:
        self._ranks = ranks

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        found: list[Any] = self._ranks(on_the_gpu, function.__name__, *arguments)
        return found


def join_by_nccl() -> None:
    """Replace this rank's default group by one that has NCCL for tensors on the GPU."""
    rank, n = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    os.environ |= {"NCCL_HOSTID": f"host of rank {rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    torch.cuda.set_device(GPU)
    store = dist.PrefixStore("with nccl", store)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=n)
