"""The interface of transports, which execute the operations of protocols between ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch

from gradwire.exchange.deferred_checks import AT_ONCE, Checks
from gradwire.exchange.ops import Op, Reduce
from gradwire.exchange.wire import checked_values, with_checksum

Turn: TypeAlias = Callable[[], AbstractContextManager[object]]
"""Waits, when it is entered, until it is this job's turn to send."""


class Transport(ABC):
    """The connections of one lane among some ranks.

    All these ranks execute the same operations in the same order, which the lane determines; a transport knows neither
    methods nor buckets.

    Attributes:
        rank: This rank among them.
        world_size: Number of these ranks.
        awaited: What a thread waits for at the moment; None while it does not wait.
        keyed_bytes: Bytes of the digest under a key beside each message; 0: messages have none.
        starts: True if :meth:`start` serves; False if every operation needs the thread of the lane.
    """

    rank: int
    world_size: int
    awaited: object = None
    keyed_bytes: int = 0
    starts: bool = False

    @abstractmethod
    def execute(self, op: Op, turn: Turn, job: str | None = None) -> torch.Tensor:
        """Execute an operation, and return the reply, which is valid until :meth:`end_job`.

        Args:
            turn: Returns a context in which rows that are long enough to fill the network are sent, and nothing else is
                waited for.
            job: Name of the job, the same on all these ranks. Jobs of a name have much the same operations in every
                round, so that a transport can prepare for the next one. None: it does not recur, and the reply is in
                the operation's own buffer.

        Raises:
            RuntimeError: the connection broke, or another rank executed another operation.
        """

    def start(self, op: Op) -> tuple[torch.futures.Future[Any], torch.Tensor]:
        """Start an operation without waiting, and return a future of its end, and the reply.

        Raises:
            TypeError: the operation needs buffers of the transport, and so the thread of its lane.
        """
        raise TypeError(f"{type(op).__name__}: this operation needs buffers of the lane, and so its thread")

    @abstractmethod
    def end_job(self) -> None:
        """Prepare for the next job of the name, now that this one's replies are no longer used."""

    def abort(self) -> None:
        """Break the connections from another thread, so that an operation that waits for a message raises.

        Raises:
            TypeError: these connections cannot be broken so.
        """
        raise TypeError(f"{type(self).__name__} cannot be broken from another thread")

    @abstractmethod
    def close(self, broken: bool) -> None:
        """End the connections; if they are ``broken``, without waiting for pending operations.

        They end now, even if the traceback of an error still holds this object.
        """


def reduce_by_gather(
    op: Reduce,
    rank: int,
    world_size: int,
    number: int,
    gather: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    checks: Checks = AT_ONCE,
) -> torch.Tensor:
    """Reduce a few values: gather them with a checksum, and reduce them on every rank.

    Args:
        op: A maximum or a minimum.
        rank: This rank.
        world_size: Number of ranks.
        number: Number of the reduction, which identifies it: all ranks run the same jobs in the same order.
        gather: ``gather(send, recv)`` sends a vector to all ranks, and returns ``recv`` with a row of each.
        checks: Takes the results of checks of values on a device.
    """
    mine = with_checksum(op.value, rank, number)
    received = gather(mine, mine.new_empty((world_size, mine.numel())))
    rows = checked_values(received, op.value.dtype, f"values for a {op.op}imum", number, checks=checks)
    return (rows.amax(0) if op.op == "max" else rows.amin(0)).view(op.value.shape)
