"""The staged transport: Gloo on copies in page-locked memory, for tensors on a device."""

from __future__ import annotations

from dataclasses import replace

import torch

from gradwire.exchange.drivers.devices import Device
from gradwire.exchange.drivers.transports.base import Transport, Turn
from gradwire.exchange.ops import Broadcast, Op, Reduce, SendRecv


class StagedTransport(Transport):
    """Copies payloads from the device to main memory, and replies back.

    A copy is enqueued on the current stream, after the kernels that compute the payload. The lane's thread waits for
    that copy only, not for the device, and Gloo sends from the page-locked buffer. The copy of the reply is enqueued
    without waiting, since the decoder's kernels follow on the same stream. Tensors of an operation that are already in
    main memory, such as lengths, are not copied.

    Args:
        inner: A transport for tensors in main memory.
        device: Device of the payloads.
    """

    def __init__(self, inner: Transport, device: Device) -> None:
        self._inner, self._device = inner, device
        self.rank, self.world_size = inner.rank, inner.world_size

    def execute(self, op: Op, turn: Turn, job: str | None = None) -> torch.Tensor:
        if isinstance(op, (Reduce, Broadcast)):
            if not self._device.holds(op.value):
                return self._inner.execute(op, turn, job)
            here = self._fetched(op.value)
            return self._returned(op.value, self._inner.execute(replace(op, value=here), turn, job))
        if not self._device.holds(op.send):
            return self._inner.execute(op, turn, job)
        here, room = self._fetched(op.send), self._device.pinned(op.recv)
        # Without the job's name: a reply elsewhere than in page-locked memory could not be copied without waiting.
        reply = self._inner.execute(replace(op, send=here, recv=room), turn)
        # Without a sender, the receive buffer does not change.
        is_due = not isinstance(op, SendRecv) or op.source is not None
        return self._returned(op.recv, reply) if is_due else op.recv

    @property
    def awaited(self) -> object:  # type: ignore[override]
        return self._inner.awaited

    def end_job(self) -> None:
        self._inner.end_job()

    def abort(self) -> None:
        self._inner.abort()

    def close(self, broken: bool) -> None:
        self._inner.close(broken)

    def _fetched(self, there: torch.Tensor) -> torch.Tensor:
        here = self._device.pinned(there)
        self._device.copy_async(here, there)
        self._device.mark().synchronize()
        return here

    def _returned(self, there: torch.Tensor, reply: torch.Tensor) -> torch.Tensor:
        self._device.copy_async(there, reply)
        return there
