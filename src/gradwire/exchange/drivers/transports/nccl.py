"""The transport over NCCL, for tensors on CUDA devices."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradwire.exchange.deferred_checks import AT_ONCE, Checks
from gradwire.exchange.drivers.devices import Device
from gradwire.exchange.drivers.tables import announce, announced
from gradwire.exchange.drivers.traffic import LENGTH_BYTES, gathers, large
from gradwire.exchange.drivers.transports.base import Transport, Turn, reduce_by_gather
from gradwire.exchange.ops import AllGather, AllToAll, Broadcast, Op, Reduce, SendRecv


class NCCLTransport(Transport):
    """Enqueues operations on the current stream without waiting for them.

    ``Work.wait`` of NCCL makes the current stream wait, not the thread, so that work enqueued afterwards may use a
    reply. All payloads are bytes, since NCCL supports neither int16 nor uint16. Tensors of an operation in main memory,
    such as lengths and single flags, are sent by ``host``.

    An operation that fails on the device does not raise here: PyTorch's watchdog ends the process after the timeout.

    Args:
        backend: A ``torch.distributed.ProcessGroupNCCL`` of these ranks alone.
        host: A transport between the same ranks, for tensors in main memory.
        device: Device of the payloads.
        checks: Takes the results of checks of values that are reduced.
    """

    def __init__(self, backend: Any, host: Transport, device: Device, checks: Checks = AT_ONCE) -> None:
        self._backend, self._host, self._device, self._checks = backend, host, device, checks
        self.rank, self.world_size = host.rank, host.world_size
        self._reductions = 0

    @classmethod
    def of(
        cls, store: Any, rank: int, world_size: int, timeout: timedelta, host: Transport, device: Device, checks: Checks
    ) -> NCCLTransport:
        """Connect ranks, which must all call it at the same time."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        backend = dist.ProcessGroupNCCL(store, rank, world_size, options)
        # Otherwise the first operation would connect, in which some ranks may have nothing to do.
        backend.eager_connect_single_device(torch.device(device.name))
        return cls(backend, host, device, checks)

    def execute(self, op: Op, turn: Turn, job: str | None = None) -> torch.Tensor:
        if not self._device.holds(op.value if isinstance(op, (Reduce, Broadcast)) else op.send):
            return self._host.execute(op, turn, job)
        if large(op):
            # Operations of all lanes queue up on one stream, in the order in which they are enqueued.
            with turn():
                pass
        if isinstance(op, Reduce):
            return self._reduce(op)
        if isinstance(op, Broadcast):
            return self._broadcast(op)
        if isinstance(op, SendRecv):
            return self._swap(op)
        if op.lengths is not None:
            return self._of_lengths(op, op.lengths)
        if isinstance(op, AllToAll):
            self._backend.alltoall_base(op.recv, op.send, [], []).wait()
        else:
            self._gather(op.send, op.recv)
        return op.recv

    def end_job(self) -> None:
        self._host.end_job()

    def close(self, broken: bool) -> None:
        # If other ranks are gone, waiting for pending operations would never end.
        self._backend.abort() if broken else self._backend.shutdown()

    def _gather(self, send: torch.Tensor, recv: torch.Tensor) -> torch.Tensor:
        self._backend._allgather_base(recv.view(-1), send).wait()
        return recv

    def _reduce(self, op: Reduce) -> torch.Tensor:
        if gathers(op):
            self._reductions += 1
            return reduce_by_gather(op, self.rank, self.world_size, self._reductions, self._gather, self._checks)
        options: Any = dist.AllreduceOptions()
        options.reduceOp = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op.op]
        self._backend.allreduce([op.value], options).wait()
        return op.value

    def _tell(self, op: AllToAll | AllGather, lengths: torch.Tensor) -> torch.Tensor:
        """Send lengths, which are in main memory, and return those received."""
        received = torch.empty((self.world_size, LENGTH_BYTES), dtype=torch.uint8, device="cpu")
        received = self._host.execute(AllToAll(announce(lengths), received), nullcontext)
        return announced(received, self.rank, op.recv.view(self.world_size, -1).shape[1])

    def _of_lengths(self, op: AllToAll | AllGather, lengths: torch.Tensor) -> torch.Tensor:
        n, rank, told = self.world_size, self.rank, self._tell(op, lengths)
        if op.arrived is not None:
            op.arrived.copy_(told)
        rows, slots = op.send if isinstance(op, AllToAll) else op.send.expand(n, -1), op.recv.view(n, -1)
        slots[rank].copy_(rows[rank])
        others = [other for other in range(n) if other != rank]
        self._pairs(
            ((rows[to][: int(lengths[to])], to) for to in others),
            ((slots[source, : int(told[source])], source) for source in others),
        )
        return op.recv

    def _pairs(self, sends: Iterable[tuple[torch.Tensor, int]], receives: Iterable[tuple[torch.Tensor, int]]) -> None:
        """Send and receive between pairs of ranks as one operation: separately they would wait for each other."""
        leaving, arriving = ([(t, peer) for t, peer in some if t.numel()] for some in (sends, receives))
        if not leaving and not arriving:
            return
        self._backend._start_coalescing()
        for tensor, to in leaving:
            self._backend.send([tensor], to, 0)
        for tensor, source in arriving:
            self._backend.recv([tensor], source, 0)
        self._backend._end_coalescing().wait()

    def _swap(self, op: SendRecv) -> torch.Tensor:
        sent, room = op.send, op.recv
        if op.lengths is not None and op.arrived is not None:
            told = torch.zeros(LENGTH_BYTES, dtype=torch.uint8, device="cpu")
            told = self._host.execute(SendRecv(announce(op.lengths)[0], told, op.to, op.source), nullcontext)
            if op.source is not None:
                op.arrived.copy_(announced(told.view(1, -1), -1, op.recv.numel(), op.source))
            sent, room = op.send[: int(op.lengths)], op.recv[: int(op.arrived)]
        self._pairs(
            [] if op.to is None else [(sent, op.to)],
            [] if op.source is None else [(room, op.source)],
        )
        return op.recv

    def _broadcast(self, op: Broadcast) -> torch.Tensor:
        row = op.value
        if op.length is not None:
            told = announce(op.length)
            self._host.execute(Broadcast(told, op.root), nullcontext)
            if self.rank != op.root:
                op.length.copy_(announced(told, -1, row.numel(), op.root))
            row = row[: int(op.length)]
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = op.root, 0
        self._backend.broadcast([row], options).wait()
        return op.value
