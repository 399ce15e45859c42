"""A GPU that is not there: tensors in main memory that obey the rules of a CUDA device, and streams that are late.

What would fail on a GPU, or be right by chance alone, raises here:

- an operation on tensors of the device and of main memory together, or ``numpy()`` of one on the device;
- a read of page-locked memory before the thread has waited for the copy to it: until then it holds other bytes;
- a write to page-locked memory while a copy from it may not have ended;
- work on one stream with what another has written, where neither waited for the other;
- memory that is freed while the stream that it is not of still works with it. PyTorch's allocator gives a block to its
  own stream again at once, unless the use was recorded, or the stream has waited for it. This is told when
  :func:`fake_gpu` ends;
- kernels that are compiled while it is not the current device, as it is not at first.

What makes a thread wait for the device is noted: a value that it reads back (``bool``, ``item``, ``tolist`` ...), and a
copy to the device from memory that is not page-locked, such as that of an index in main memory.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from gradwire.exchange.drivers.devices import Device
from gradwire.kernels import Kernels, get_kernels
from gradwire.kernels.checksum import checksums

WHERE = torch.device("cuda", 0)
READS = {
    "item",
    "tolist",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "cpu",
    "equal",
    "allclose",
    "nonzero",
    "numpy",
}
INDEXING = {"__getitem__", "__setitem__", "index_select"}


class DeviceError(Exception):
    """Something that a GPU would not do, or not in time."""


class DeviceTensor(torch.Tensor):
    """A tensor on the device."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return FakeGPU.now.ruled(func, args, kwargs or {})


def there(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the device with the memory of one in main memory, which the current stream has allocated."""
    made = tensor.detach().as_subclass(DeviceTensor)
    FakeGPU.now.block(made)
    return made


def parameters_of(shapes: Mapping[str, tuple[int, ...]], on_device: bool) -> dict[str, torch.nn.Parameter]:
    """Return parameters of zeros: in main memory, where a link within :func:`fake_gpu` takes them for the device's."""
    return {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}


def here(value: Any) -> Any:
    """Return what lies on the device as tensors in main memory, with the same memory."""
    with torch._C.DisableTorchFunctionSubclass():
        if is_dataclass(value) and not isinstance(value, type):
            return type(value)(*(here(getattr(value, f.name)) for f in fields(value)))
        return value.as_subclass(torch.Tensor) if isinstance(value, DeviceTensor) else value


class _Mode(TorchFunctionMode):
    """The rules for calls without a tensor of the device, such as those that make one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return FakeGPU.now.ruled(func, args, kwargs or {})


class _Mark:
    def __init__(self, gpu: FakeGPU, count: int) -> None:
        self._gpu, self._count = gpu, count

    def synchronize(self) -> None:
        self._gpu.catch_up(self._count)

    def query(self) -> bool:
        return self._gpu._done >= self._count


@dataclass
class _Block:
    """Memory of the device.

    Attributes:
        of: The stream that allocated it, and gets it again when it is freed.
        fresh: The stream that has written it, if the other has not waited for that.
        used: Where the other stream used it last, if its own has not waited for that.
        recorded: Whether the allocator waits for the other stream.
    """

    ref: StorageWeakRef
    of: str
    fresh: str | None = None
    used: str | None = None
    recorded: bool = False


class _Future(torch.futures.Future):  # type: ignore[type-arg]
    """A future whose value is there for streams that wait for it."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__()
        self._gpu = gpu

    def set_result(self, result: Any) -> None:
        if isinstance(result, DeviceTensor) and self._gpu.here.stream == "main" and not self._gpu.here.joined:
            raise DeviceError("a result is set outside of the stream that computes it")
        super().set_result(result)

    def wait(self) -> Any:
        value = super().wait()
        self._gpu.join()
        if isinstance(value, DeviceTensor):
            self._gpu.use(value)
        return value

    def add_done_callback(self, callback: Any) -> None:
        def called(future: Any) -> None:
            with self._gpu.on("main", joined=True):
                self._gpu.join()
                callback(future)

        super().add_done_callback(called)


class _State(threading.local):
    """What holds for one thread: of several, each may be within a call that names another device."""

    stream, joined, exempt, current, to_device = "main", False, False, False, False


class FakeGPU(Device):
    """The device, one at a time in a process.

    Attributes:
        waits_for: Where a thread waited for the device, and on which stream.
        copies: Bytes that were copied, by direction.
        freed_in_use: Blocks that were freed while the other stream worked with them, and where it did.
    """

    name, is_host = str(WHERE), False
    now: FakeGPU

    def __init__(self) -> None:
        FakeGPU.now = self
        self.here = _State()
        self.waits_for: list[tuple[str, str]] = []
        self.copies = {"to the device": 0, "from the device": 0}
        self.waits = 0
        self._lock = threading.RLock()
        self._pending: list[Callable[[], None]] = []
        self._done = 0
        # By the address of a storage, which no other gets while there is a weak reference.
        self._blocks: dict[int, _Block] = {}
        self.freed_in_use: list[str] = []

    # ------------------------------------------------------------------ what a link asks of a device

    def holds(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, DeviceTensor)

    @contextmanager
    def on(self, stream: str, joined: bool = False) -> Iterator[None]:
        before = self.here.stream, self.here.joined
        self.here.stream, self.here.joined = stream, joined
        try:
            with _Mode():
                yield
        finally:
            self.here.stream, self.here.joined = before

    @contextmanager
    def current(self) -> Iterator[None]:
        self.here.current = True
        try:
            yield
        finally:
            self.here.current = False

    def stream(self) -> Any:
        return self.on("link")

    def wait_for_current(self) -> None:
        self.waits += 1
        self._waited(by="link", of="main")

    def join(self) -> None:
        self._waited(by="main", of="link")

    def _waited(self, by: str, of: str) -> None:
        self.look_for_freed()
        with self._lock:
            for block in self._blocks.values():
                block.fresh = None if block.fresh == of else block.fresh
                block.used = None if block.of == by else block.used

    def look_for_freed(self) -> None:
        """Note the memory that was freed too early since one stream has waited for the other."""
        with self._lock:
            for key, block in list(self._blocks.items()):
                if block.ref.expired():
                    del self._blocks[key]
                    if block.used is not None and not block.recorded:
                        self.freed_in_use.append(f"memory of {block.of!r}, used by the other stream in {block.used}")

    def block(self, tensor: torch.Tensor) -> _Block:
        """Return the memory of a tensor, which belongs to the current stream if it is new."""
        with self._lock, torch._C.DisableTorchFunctionSubclass():
            storage = tensor.untyped_storage()
            if storage._cdata not in self._blocks:
                self._blocks[storage._cdata] = _Block(StorageWeakRef(storage), self.here.stream)
            return self._blocks[storage._cdata]

    def use(self, tensor: torch.Tensor) -> None:
        assert isinstance(tensor, DeviceTensor)
        self.block(tensor).recorded = True

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return torch.full(like.shape, 0.0, dtype=like.dtype)

    def copy_async(self, to: torch.Tensor, source: torch.Tensor) -> None:
        arrives = isinstance(to, DeviceTensor)
        assert arrives != isinstance(source, DeviceTensor), "a copy between the device and main memory"
        self._touch([to, source] if arrives else [source], written=[to] if arrives else [])
        a, b = here(to), here(source)
        with self._lock, torch._C.DisableTorchFunctionSubclass():
            self.copies["to the device" if arrives else "from the device"] += b.numel() * b.element_size()
            kept = b.clone()
            if arrives:
                a.copy_(b)

                def ended() -> None:
                    same = torch.equal(kept.view(torch.uint8), b.contiguous().view(torch.uint8))
                    if not same:
                        raise DeviceError("page-locked memory was written to while a copy from it was under way")
            else:
                a.view(torch.uint8).fill_(0xA5)

                def ended() -> None:
                    a.copy_(kept)

            self._pending.append(ended)

    def mark(self) -> _Mark:
        with self._lock:
            return _Mark(self, self._done + len(self._pending))

    def catch_up(self, count: int) -> None:
        with self._lock, torch._C.DisableTorchFunctionSubclass():
            while self._done < count:
                self._pending.pop(0)()
                self._done += 1

    def future(self) -> torch.futures.Future[torch.Tensor]:
        return _Future(self)

    # ------------------------------------------------------------------ its rules

    def ruled(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Carry out a call of PyTorch as it would be with a GPU."""
        name = getattr(func, "__name__", "")
        found: list[torch.Tensor] = []
        tree_map(lambda x: found.append(x) if isinstance(x, torch.Tensor) else None, (args, kwargs))
        ours = [t for t in found if isinstance(t, DeviceTensor)]
        owner = getattr(func, "__self__", None)
        if name == "__get__":
            what = getattr(owner, "__name__", "")
            if ours and what in ("device", "is_cuda", "is_cpu"):
                return {"device": WHERE, "is_cuda": True, "is_cpu": False}[what]
            return self._called(func, args, kwargs, bool(ours))
        made = self._made_there(args, kwargs)
        if ours:
            self._check(name, found, args, kwargs)
            if name == "numpy" and not kwargs.get("force"):
                raise TypeError("can't convert cuda:0 device type tensor to numpy")
            # Single values in main memory are arguments of kernels, but not of these.
            copied = name in ("where", "copy_", "__setitem__") and any(not isinstance(t, DeviceTensor) for t in found)
            leaves = copied or (name in ("to", "copy_") and self._moves(name, args, made))
            if name in READS or leaves or (name in INDEXING and self._index_is_here(args)):
                self._noted()
        if name == "pin_memory":
            kept = self._called(torch.Tensor.clone, args, {}, False)
            kept.page_locked = True
            return kept
        arrives = name in ("to", "tensor", "as_tensor") and made is not None and self.here.to_device and not ours
        locked = bool(found) and getattr(found[0], "page_locked", False)
        if arrives and not (locked and kwargs.get("non_blocking")):
            self._noted()
        if made is not None:
            args, kwargs = made
        leaves = name in ("cpu", "tolist", "item") or (name == "to" and made is not None and not self.here.to_device)
        comes = made is not None and self.here.to_device
        result = self._called(func, args, kwargs, (bool(ours) or comes) and not leaves)
        if leaves and isinstance(result, torch.Tensor):
            with torch._C.DisableTorchFunctionSubclass():
                return here(result).clone()
        writes = name.endswith("_") or name in ("__setitem__",) or "out" in kwargs
        self._touch(ours, written=ours[:1] if writes else [])
        return result

    def _noted(self) -> None:
        self.waits_for.append((self._caller(), self.here.stream))

    @staticmethod
    def _index_is_here(args: Any) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            index = args[1] if isinstance(args[1], tuple) else (args[-1],)
            return isinstance(args[0], DeviceTensor) and any(
                isinstance(i, torch.Tensor) and not isinstance(i, DeviceTensor) and i.dim() > 0 for i in index
            )

    def _made_there(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Replace a device that is named by main memory; None where none is."""
        named: list[torch.device] = []

        def plain(value: Any) -> Any:
            if isinstance(value, torch.device) or (isinstance(value, str) and value in ("cpu", str(WHERE))):
                named.append(torch.device(value))
                return torch.device("cpu") if torch.device(value) == WHERE else value
            return value

        changed = tree_map(plain, (args, kwargs))
        if not named or named[-1].type == "meta":
            return None
        self.here.to_device = named[-1] == WHERE
        return changed  # type: ignore[no-any-return]

    def _moves(self, name: str, args: Any, made: Any) -> bool:
        if name == "copy_":
            return isinstance(args[0], DeviceTensor) != isinstance(args[1], DeviceTensor) and args[1].dim() > 0
        return made is not None and not self.here.to_device

    def _check(self, name: str, found: list[torch.Tensor], args: Any, kwargs: dict[str, Any]) -> None:
        strangers = [t for t in found if not isinstance(t, DeviceTensor)]
        if name in INDEXING and isinstance(args[0], DeviceTensor):
            # An index may lie in main memory: it is copied, and so is one value.
            strangers = [t for t in strangers if t.dtype not in (torch.int64, torch.bool)]
        with torch._C.DisableTorchFunctionSubclass():
            mixed = [tuple(t.shape) for t in strangers if t.dim() > 0]
        if mixed and name not in ("copy_", "to", "as_subclass", "_foreach_copy_", "__set__"):
            raise DeviceError(f"{name} of tensors on {WHERE} and in main memory {mixed}")

    def _touch(self, tensors: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        if self.here.exempt:
            return
        stream = self.here.stream
        other = "link" if stream == "main" else "main"
        with self._lock, torch._C.DisableTorchFunctionSubclass():
            for block in (self.block(t) for t in tensors if t.numel()):
                if block.fresh == other:
                    raise DeviceError(f"the stream {stream!r} works with what {other!r} wrote, without waiting for it")
                if block.of == other:
                    block.used = self._caller()
            for t in written:
                self.block(t).fresh = stream

    def _called(self, func: Any, args: Any, kwargs: dict[str, Any], on_device: bool) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if not on_device:
                return tree_map(lambda x: here(x) if isinstance(x, DeviceTensor) and x.dim() == -1 else x, result)
            return tree_map(self._made_here, result)

    def _made_here(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        made = value.as_subclass(DeviceTensor)
        self.block(made)
        return made

    @staticmethod
    def _caller() -> str:
        frame = sys._getframe()
        while "/gradwire/" not in frame.f_code.co_filename and frame.f_back is not None:
            frame = frame.f_back
        return f"{frame.f_code.co_filename.split('/gradwire/')[-1]}:{frame.f_code.co_name}"


class _OnDevice:
    """The loops of the backend ``cpu`` for tensors of the device, and for no others: as kernels of Triton have it."""

    name, compiles_for, coders = "triton", "", "reference"

    def family(self, name: str) -> Any:
        inner = get_kernels("cpu")._backend.family(name)

        class Family:
            def __getattr__(self, operation: str) -> Any:
                function = getattr(inner, operation)

                def launched(*arguments: Any) -> Any:
                    values = [v for a in arguments for v in (_parts(a) if is_dataclass(a) else [a])]
                    if any(isinstance(v, torch.Tensor) and not isinstance(v, DeviceTensor) for v in values):
                        raise DeviceError(f"the kernel {operation} was given a tensor in main memory")
                    tensors = [v for v in values if isinstance(v, torch.Tensor)]
                    # Which of them it writes is not known: taken to be all.
                    FakeGPU.now._touch(tensors, written=tensors)
                    return function(*map(here, arguments))

                return launched

        return Family()


class _Kernels(Kernels):
    """Kernels that would be compiled for the current device."""

    def warm_up(self, families: Sequence[str] = ()) -> float:
        if not FakeGPU.now.here.current:
            raise DeviceError(f"kernels of {families} are compiled for another device than {WHERE}")
        return 0.0


def _parts(value: Any) -> list[Any]:
    return [getattr(value, f.name) for f in fields(value)]


def device_checksums(heads: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    import numpy as np

    a, b = here(heads), here(rows)
    with torch._C.DisableTorchFunctionSubclass():
        found = torch.from_numpy(checksums(a.numpy().view(np.uint64), b.numpy()).view(np.int64))
    return there(found)


@contextmanager
def fake_gpu() -> Iterator[FakeGPU]:
    """Let links that are built within believe that their parameters lie on a GPU."""
    gpu = FakeGPU()
    kernels = _Kernels(_OnDevice())
    real = get_kernels

    def served(name: str = "auto", threads: int = 1) -> Kernels:
        return kernels if name == "triton" else real(name, threads)

    with (
        mock.patch("gradwire.link.site.one_device", return_value=WHERE),
        mock.patch("gradwire.link.site.device_of", return_value=gpu),
        mock.patch("gradwire.exchange.planning.placement.get_kernels", served),
        mock.patch("gradwire.exchange.planning.planner.get_kernels", served),
        mock.patch("gradwire.exchange.wire.header.device_checksums", device_checksums),
        mock.patch("gradwire.exchange.wire.small_values.device_checksums", device_checksums),
        gpu.on("main"),
    ):
        yield gpu
    gpu.look_for_freed()
    if gpu.freed_in_use:
        raise DeviceError(f"freed too early: {'; '.join(gpu.freed_in_use)}")
