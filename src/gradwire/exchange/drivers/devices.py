"""The device of a link's gradients, its stream, and checks that are read from it later.

A link has one stream of its own on a device, on which its lanes enqueue work in order. The training's streams
synchronise with it at two points: the link's stream waits for the stream that produced a bucket, and the stream that
uses the mean waits for the link's, by the future of the mean. No stream waits for the whole device in between.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from gradwire.exchange.deferred_checks import Checks, Flag


class Mark(Protocol):
    """A point in a stream's order of work."""

    def synchronize(self) -> None:
        """Block this thread until the device has reached the mark."""

    def query(self) -> bool:
        """Return whether the device has reached the mark."""


class Device(ABC):
    """The device of tensors, and the stream on which a link works on them.

    Attributes:
        name: Name for :class:`torch.device`.
        is_host: True for main memory, where nothing is asynchronous.
    """

    name: str
    is_host: bool

    @abstractmethod
    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on the device, and not in main memory."""

    def current(self) -> AbstractContextManager[Any]:
        """Return a context in which the device is PyTorch's current one, for which kernels are compiled."""
        return nullcontext()

    @abstractmethod
    def stream(self) -> AbstractContextManager[Any]:
        """Return a context in which this thread's work on the device is enqueued on the link's stream."""

    @abstractmethod
    def wait_for_current(self) -> None:
        """Make the link's stream wait for the work enqueued on this thread's current stream so far."""

    @abstractmethod
    def join(self) -> None:
        """Make this thread's current stream wait for the work enqueued on the link's stream so far."""

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Return a context like :meth:`stream` whose work comes in the order of this thread's current stream.

        It follows the work enqueued there so far, and what is enqueued there next follows it. So memory of either
        stream may be freed within, and what is allocated within belongs to the link's.
        """
        self.wait_for_current()
        try:
            with self.stream():
                yield
        finally:
            self.join()

    @abstractmethod
    def use(self, tensor: torch.Tensor) -> None:
        """Record that the link's stream uses a tensor of another stream, so that its memory is not reused before."""

    @abstractmethod
    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised contiguous tensor in page-locked main memory, of the dtype and shape of another."""

    @abstractmethod
    def copy_async(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy between the device and page-locked memory on the current stream."""

    @abstractmethod
    def mark(self) -> Mark:
        """Return a mark at the current end of the current stream's work."""

    @abstractmethod
    def future(self) -> torch.futures.Future[torch.Tensor]:
        """Return a future for a tensor on the device.

        Set its result within :meth:`stream`. A thread that waits for it blocks only until the result is set, and its
        current stream then waits for the link's.
        """


class _NothingPending:
    """A mark that is always reached."""

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class HostDevice(Device):
    """Main memory: every operation has ended when it returns."""

    name, is_host = "cpu", True

    def __init__(self) -> None:
        self._no_stream, self._passed = nullcontext(), _NothingPending()

    def holds(self, tensor: torch.Tensor) -> bool:
        return False

    def stream(self) -> AbstractContextManager[Any]:
        return self._no_stream

    def wait_for_current(self) -> None:
        pass

    def join(self) -> None:
        pass

    def use(self, tensor: torch.Tensor) -> None:
        pass

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")

    def copy_async(self, to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source)

    def mark(self) -> Mark:
        return self._passed

    def future(self) -> torch.futures.Future[torch.Tensor]:
        return torch.futures.Future()


class CudaDevice(Device):
    """A CUDA device, with a stream of the link's own.

    Page-locked memory comes from PyTorch's caching allocator, which reuses a block only after the copies that were
    enqueued with ``non_blocking=True`` have ended. So buffers may be dropped once a copy is enqueued.

    Args:
        device: The device, with its index.
    """

    is_host = False

    def __init__(self, device: torch.device) -> None:
        self.name, self._device = str(device), device
        self._stream = torch.cuda.Stream(device)

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self._device

    def current(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self._device)

    def stream(self) -> AbstractContextManager[Any]:
        # Return a new context each time, since several threads enter it at the same time.
        return torch.cuda.stream(self._stream)

    def wait_for_current(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def use(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._stream)

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True, device="cpu")

    def copy_async(self, to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        # With a blocking event a waiting lane sleeps instead of keeping a core busy.
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def future(self) -> torch.futures.Future[torch.Tensor]:
        return torch.futures.Future(devices=[self._device])


class LateChecks(Checks):
    """Keeps the results of checks on the device until a :class:`Verdict` takes them.

    A thread that reads a result waits until the device has done all work before it, and enqueues none meanwhile. So
    decoders continue with any bytes, and :meth:`so_far` returns whether their output is a mean.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: list[tuple[torch.Tensor, Callable[[], Exception]]] = []
        self._so_far: Flag = True

    def require(self, holds: Flag, explain: Callable[[], Exception]) -> None:
        if not isinstance(holds, torch.Tensor):
            super().require(holds, explain)
            return
        with self._lock:
            self._made.append((holds, explain))
            self._so_far = self._so_far & holds

    def so_far(self) -> Flag:
        with self._lock:
            return self._so_far

    def take(self) -> list[tuple[torch.Tensor, Callable[[], Exception]]]:
        """Return the results since the last call, each with the function that explains it, and drop them."""
        with self._lock:
            made, self._made, self._so_far = self._made, [], True
        return made


class Verdict:
    """The results of a round's checks on a device: enqueued at the round's end, read when the next round needs them.

    Args:
        device: The device, on whose current stream the round's work was enqueued.
        finite: True if the round's means are finite; None if that was not checked.
        checks: Checks of payloads, whose results are taken.
    """

    def __init__(self, device: Device, finite: Flag | None, checks: LateChecks) -> None:
        self._finite, self._made = finite, checks.take()
        flags = [holds for holds, _ in self._made]
        if isinstance(finite, torch.Tensor):
            flags.append(finite)
        self._read = torch.zeros(0, dtype=torch.bool, device="cpu")
        if flags:
            together = torch.stack(flags)
            self._read = device.pinned(together)
            device.copy_async(self._read, together)
        self._mark = device.mark()

    def reached(self) -> bool:
        """Return whether the device has ended the round, so that :meth:`read` would not wait."""
        return self._mark.query()

    def read(self) -> bool:
        """Wait until the device has ended the round; return False if a mean was not finite.

        Raises:
            Exception: the explanation of the first check that failed.
        """
        self._mark.synchronize()
        values = self._read.tolist()
        for holds, (_, explain) in zip(values, self._made):
            if not holds:
                raise explain()
        return bool(values[-1]) if isinstance(self._finite, torch.Tensor) else self._finite is not False
