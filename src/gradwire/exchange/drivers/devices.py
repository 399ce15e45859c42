"""The device that a link's gradients lie on: its stream, and the host's part in its order of work.

A link has one stream of its own on a device. What its lanes enqueue there keeps the order in which they do so, and the
training's own streams meet it at two points: the link's stream waits for the one that produced a bucket, and the one
that takes the mean waits for the link's, by the future that holds it. In between, no stream waits for the whole device.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from gradwire.exchange.deferred_checks import Checks, Flag


class Mark(Protocol):
    """A point in a stream's order of work."""

    def synchronize(self) -> None:
        """Block this thread until the device has got there."""

    def query(self) -> bool:
        """Return whether the device has got there."""


class Device(ABC):
    """Where tensors lie, and the stream on which a link works on them.

    Attributes:
        name: As :class:`torch.device` reads it.
        is_host: Whether it is main memory, where nothing is asynchronous.
    """

    name: str
    is_host: bool

    @abstractmethod
    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies on the device, and not in main memory."""

    @abstractmethod
    def stream(self) -> AbstractContextManager[Any]:
        """Return a context in which this thread's work on the device is enqueued on the link's stream."""

    @abstractmethod
    def wait_for_current(self) -> None:
        """Make the link's stream wait for what this thread's current stream has been given so far."""

    @abstractmethod
    def join(self) -> None:
        """Make this thread's current stream wait for what the link's stream has been given so far."""

    @abstractmethod
    def use(self, tensor: torch.Tensor) -> None:
        """Say that the link's stream uses a tensor of another one, whose memory must not serve others before."""

    @abstractmethod
    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised contiguous tensor in page-locked main memory, of the dtype and shape of another."""

    @abstractmethod
    def copy_async(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy between the device and page-locked memory on the current stream."""

    @abstractmethod
    def mark(self) -> Mark:
        """Return the current end of the current stream's work."""

    @abstractmethod
    def future(self) -> torch.futures.Future[torch.Tensor]:
        """Return a future for a tensor on the device.

        Its result is to be set within :meth:`stream`; whoever waits for it makes their stream wait for the link's, and
        blocks no longer than until the result is set.
        """


class _NothingPending:
    """The mark of a place where nothing is pending."""

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
        return torch.empty(like.shape, dtype=like.dtype)

    def copy_async(self, to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source)

    def mark(self) -> Mark:
        return self._passed

    def future(self) -> torch.futures.Future[torch.Tensor]:
        return torch.futures.Future()


class CudaDevice(Device):
    """A CUDA device, with a stream of the link's own.

    Page-locked memory is the caching allocator's of PyTorch: it hands a block out again only after the copies that were
    enqueued with ``non_blocking=True`` have ended, so that buffers may be dropped as soon as a copy is enqueued.

    Args:
        device: With its index.
    """

    is_host = False

    def __init__(self, device: torch.device) -> None:
        self.name, self._device = str(device), device
        self._stream = torch.cuda.Stream(device)

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self._device

    def stream(self) -> AbstractContextManager[Any]:
        # A context for each use: several threads enter it at the same time.
        return torch.cuda.stream(self._stream)

    def wait_for_current(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def use(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._stream)

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def copy_async(self, to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        # A blocking event: a lane's thread that waits sleeps, where it would keep a processor busy otherwise.
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def future(self) -> torch.futures.Future[torch.Tensor]:
        return torch.futures.Future(devices=[self._device])


class LateChecks(Checks):
    """Keeps the results of checks on the device until a :class:`Verdict` takes them.

    A thread that reads a result waits until the device has done all work before it, and meanwhile enqueues none. So
    decoders go on, whatever the bytes are, and :meth:`so_far` says whether what they wrote is a mean.
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
        """Return the results that nobody has taken, each with what explains it, and begin anew."""
        with self._lock:
            made, self._made, self._so_far = self._made, [], True
        return made


class Verdict:
    """What a device has to say of a round: enqueued at the round's end, read when the next one needs to know.

    Args:
        device: On whose current stream the round was worked on.
        finite: Whether the round's means are finite; None where nobody looked.
        checks: Of what arrived since the last verdict; taken.
    """

    def __init__(self, device: Device, finite: Flag | None, checks: LateChecks) -> None:
        self._finite, self._made = finite, checks.take()
        flags = [holds for holds, _ in self._made]
        if isinstance(finite, torch.Tensor):
            flags.append(finite)
        self._read = torch.zeros(0, dtype=torch.bool)
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
            Exception: what explains the first check that failed.
        """
        self._mark.synchronize()
        values = self._read.tolist()
        for holds, (_, explain) in zip(values, self._made):
            if not holds:
                raise explain()
        return bool(values[-1]) if isinstance(self._finite, torch.Tensor) else self._finite is not False
