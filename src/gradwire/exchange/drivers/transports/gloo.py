"""The transport over Gloo, for tensors in main memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradwire.exchange.drivers.tables import announce, announced
from gradwire.exchange.drivers.traffic import LENGTH_BYTES, gathers, large
from gradwire.exchange.drivers.transports.base import Transport, reduce_by_gather
from gradwire.exchange.ops import AllGather, AllToAll, Broadcast, Op, Reduce, SendRecv

MOST_TAGS = 1 << 20


def _options(op: Any) -> Any:
    made = dist.AllreduceOptions()
    made.reduceOp = op
    return made


_REDUCES: dict[str, Any] = {
    "sum": _options(dist.ReduceOp.SUM),
    "max": _options(dist.ReduceOp.MAX),
    "min": _options(dist.ReduceOp.MIN),
}


class GlooTransport(Transport):
    """Executes operations over Gloo, on a backend object and not a group of ``torch.distributed.new_group``.

    The names of such groups depend on the number of groups that a rank has made before: two ranks with different
    histories would wait for each other forever.

    Args:
        store: Store for these connections alone; the same on all ranks.
        rank: This rank.
        world_size: Number of ranks.
        timeout: Timeout of each collective.
    """

    def __init__(self, store: Any, rank: int, world_size: int, timeout: timedelta) -> None:
        self._backend: Any = dist.ProcessGroupGloo(store, rank, world_size, timeout)
        self.rank, self.world_size = rank, world_size
        self._exchanges = self._reductions = 0
        self._outbox = torch.empty(0, dtype=torch.uint8)

    def close(self, broken: bool) -> None:
        self._backend = None

    def start(self, op: Op) -> tuple[torch.futures.Future[Any], torch.Tensor]:
        if isinstance(op, AllToAll):
            return self._backend.alltoall_base(op.recv, op.send, [], []).get_future(), op.recv
        if isinstance(op, Reduce) and not gathers(op):
            return self._start_reduce(op), op.value
        return super().start(op)

    def _start_reduce(self, op: Reduce) -> torch.futures.Future[Any]:
        return self._backend.allreduce([op.value], _REDUCES[op.op]).get_future()  # type: ignore[no-any-return]

    def execute(self, op: Op, wait_for_turn: Callable[[], None]) -> torch.Tensor:
        if isinstance(op, SendRecv):
            return self._swap(op, wait_for_turn)
        if isinstance(op, Broadcast):
            return self._broadcast(op, wait_for_turn)
        if isinstance(op, Reduce):
            if gathers(op):
                self._reductions += 1
                return reduce_by_gather(op, self.rank, self.world_size, self._reductions, self._gather)
            self._start_reduce(op).wait()
            return op.value
        if op.lengths is not None:
            return self._of_lengths(op, op.lengths, wait_for_turn)
        if large(op):
            wait_for_turn()
            rows = op.send if isinstance(op, AllToAll) else [op.send] * self.world_size
            self._send_rows(rows, op.recv.view(self.world_size, -1), in_turn=True)
            return op.recv
        return self._all_to_all(op.send, op.recv) if isinstance(op, AllToAll) else self._gather(op.send, op.recv)

    def _gather(self, send: torch.Tensor, recv: torch.Tensor) -> torch.Tensor:
        # As an all-to-all of equal rows: the same bytes as a ring, in one step instead of N - 1. On Gloo with four
        # ranks on two cores, 1 MB a rank: all_gather_into_tensor 6.9 ms, this 2.0 ms. The copies use a buffer that is
        # kept: new pages for them took four times as long as all the rest.
        size = send.numel() * send.element_size() * self.world_size
        if self._outbox.numel() < size:
            self._outbox = torch.empty(size, dtype=torch.uint8)
        rows = self._outbox[:size].view(send.dtype).view(self.world_size, -1)
        return self._all_to_all(rows.copy_(send.expand_as(rows)), recv)

    def _all_to_all(self, send: torch.Tensor, recv: torch.Tensor) -> torch.Tensor:
        self._backend.alltoall_base(recv, send, [], []).wait()
        return recv

    def _of_lengths(
        self, op: AllToAll | AllGather, lengths: torch.Tensor, wait_for_turn: Callable[[], None]
    ) -> torch.Tensor:
        """Send lengths, then rows of these lengths: one at a time if the buffer is large, else all at once."""
        n, rank = self.world_size, self.rank
        received = torch.empty((n, LENGTH_BYTES), dtype=torch.uint8)
        if large(op):
            wait_for_turn()
        self._all_to_all(announce(lengths), received)
        slots = op.recv.view(n, -1)
        told = announced(received, rank, slots.shape[1])
        if op.arrived is not None:
            op.arrived.copy_(told)
        rows = op.send if isinstance(op, AllToAll) else [op.send] * n
        leaving = [rows[to] if to == rank else rows[to][: int(lengths[to])] for to in range(n)]
        arriving = [slots[source] if source == rank else slots[source, : int(told[source])] for source in range(n)]
        self._send_rows(leaving, arriving, in_turn=large(op))
        return op.recv

    def _send_rows(
        self,
        leaving: Sequence[torch.Tensor] | torch.Tensor,
        arriving: Sequence[torch.Tensor] | torch.Tensor,
        in_turn: bool,
    ) -> None:
        """Send row i to rank i, and receive row i from it; this rank's own row is copied.

        In turn: in N - 1 rounds, to the rank ``round`` places after this one, and from the one as many places before. A
        row is sent when the one before has been sent. So each network link carries about one row at a time, while in an
        all-to-all N - 1 senders congest every receiver. Every receive is posted at the beginning: Gloo sends no row
        before its receiver has requested it, and a later request waits behind the rows in this rank's own queue. Four
        hosts at 100 Mbit/s, 400 kB a row, on a machine with other work to do: 1.19 times the bytes over the bandwidth,
        1.27 if each receive is posted in its round, an all-to-all 1.4 to 1.7; at 1 Gbit/s 1.5 and 1.9.
        """
        backend, n, rank = self._backend, self.world_size, self.rank
        self._exchanges = (self._exchanges + 1) % MOST_TAGS
        sources = [(rank - places) % n for places in range(1, n)]
        asked = [backend.recv([arriving[source]], source, self._exchanges) for source in sources]
        sent = []
        for places in range(1, n):
            to = (rank + places) % n
            work = backend.send([leaving[to]], to, self._exchanges)
            if places == 1:
                arriving[rank].copy_(leaving[rank])
            if in_turn:
                work.wait()
            else:
                sent.append(work)
        for work in (*sent, *asked):
            work.wait()

    def _swap(self, op: SendRecv, wait_for_turn: Callable[[], None]) -> torch.Tensor:
        """Send to one rank and receive from one: first lengths, if the operation has them, then the rows."""
        if large(op):
            wait_for_turn()
        self._exchanges = (self._exchanges + 1) % MOST_TAGS
        if op.lengths is None or op.arrived is None:
            self._send_and_receive(op, op.send, op.recv)
            return op.recv
        received = torch.zeros((1, LENGTH_BYTES), dtype=torch.uint8)
        self._send_and_receive(op, announce(op.lengths), received)
        if op.source is not None:
            op.arrived.copy_(announced(received, -1, op.recv.numel(), op.source))
        self._send_and_receive(op, op.send[: int(op.lengths)], op.recv[: int(op.arrived)])
        return op.recv

    def _send_and_receive(self, op: SendRecv, leaving: torch.Tensor, arriving: torch.Tensor) -> None:
        # No nested functions: the frames of an error would hold their cells, and with them the connections.
        asked = None if op.source is None else self._backend.recv([arriving], op.source, self._exchanges)
        sent = None if op.to is None else self._backend.send([leaving], op.to, self._exchanges)
        for work in (sent, asked):
            if work is not None:
                work.wait()

    def _broadcast(self, op: Broadcast, wait_for_turn: Callable[[], None]) -> torch.Tensor:
        """Send a value along Gloo's binomial tree: first its length, if the operation has one."""
        if large(op):
            wait_for_turn()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = op.root, 0
        row = op.value
        if op.length is not None:
            told = announce(op.length)
            self._backend.broadcast([told], options).wait()
            if self.rank != op.root:
                op.length.copy_(announced(told, -1, row.numel(), op.root))
            row = row[: int(op.length)]
        self._backend.broadcast([row], options).wait()
        return op.value
