"""The driver for simulated ranks: N generators in one process advance in lockstep, without threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, cast

import torch

from gradwire.errors import ExchangeError
from gradwire.exchange.drivers.traffic import Meter
from gradwire.exchange.ops import AllGather, AllToAll, Broadcast, Exchange, Op, Reduce, SendRecv

T = TypeVar("T")


def simulate_ranks(generators: Sequence[Exchange[T]], meters: Sequence[Meter], *, leader_only: bool = False) -> list[T]:
    """Run one generator for each rank to its end, and return their results.

    Sums are added in the order of ranks. If all ranks receive the same, they share one reply: replies are read-only.

    Args:
        generators: The generators, by rank.
        meters: Count each rank's bytes.
        leader_only: See :func:`in_lockstep`.

    Raises:
        ExchangeError: ranks yielded different operations, which on a real group would hang or corrupt data.
    """
    world_size = len(generators)

    def execute(ranks: Sequence[int], ops: Sequence[Op]) -> list[torch.Tensor]:
        replies = executed(ops)
        for rank, op in zip(ranks, ops):
            meters[rank].count(op, world_size)
        return replies

    return in_lockstep(generators, execute, leader_only=leader_only)


Execute = Callable[[Sequence[int], Sequence[Op]], Sequence[torch.Tensor]]
"""Takes the ranks of a group and the operation that each has yielded, and returns their replies."""


def in_lockstep(generators: Sequence[Exchange[T]], execute: Execute, *, leader_only: bool = False) -> list[T]:
    """Run one generator for each rank to its end, executing each operation of a group at once; return their results.

    Ranks advance together; an operation with a scope is executed as soon as all ranks of one of its groups have yielded
    it. With ``leader_only``, stop when rank 0 has ended, and return its result only: after the last exchange the others
    would repeat its decoding N - 1 times.

    Raises:
        ExchangeError: ranks yielded different operations, which on a real group would hang or corrupt data.
    """
    world_size = len(generators)
    results: list[T | None] = [None] * world_size
    replies: list[torch.Tensor | None] = [None] * world_size
    asked: list[Op | None] = [None] * world_size
    left = set(range(world_size))
    while True:
        for rank in sorted(left):
            if asked[rank] is None:
                reply = replies[rank]
                try:
                    asked[rank] = next(generators[rank]) if reply is None else generators[rank].send(reply)
                except StopIteration as stop:
                    results[rank] = stop.value
                    left.discard(rank)
                    if leader_only and rank == 0:
                        return [stop.value]
        if not left:
            return results  # type: ignore[return-value]
        ready = list(_ready(asked, world_size))
        if not ready:
            names = [_name(op) for op in asked if op is not None]
            raise ExchangeError(f"simulated ranks asked for different operations: {names}")
        for ranks, ops in ready:
            for rank, reply in zip(ranks, execute(ranks, ops)):
                replies[rank], asked[rank] = reply, None


def _ready(asked: Sequence[Op | None], world_size: int) -> Iterator[tuple[Sequence[int], list[Op]]]:
    """Yield the groups of ranks whose ranks have all yielded the same operation, and these operations."""
    seen = set[int]()
    for rank, op in enumerate(asked):
        if op is None or rank in seen:
            continue
        ranks = range(world_size) if op.scope is None else op.scope.ranks(rank)
        ops = [other for other in (asked[r] for r in ranks) if other is not None]
        if len(ops) == len(ranks) and len({(type(op), op.scope, _shape(op)) for op in ops}) == 1:
            seen.update(ranks)
            yield ranks, ops


def _shape(op: Op) -> tuple[object, ...]:
    if isinstance(op, Reduce):
        return (op.op, op.value.dtype, *op.value.shape)
    if isinstance(op, Broadcast):
        return (op.root, op.value.dtype, *op.value.shape)
    return tuple(op.send.shape)


def _name(op: Op) -> str:
    return f"{type(op).__name__}{list(_shape(op))}" + ("" if op.scope is None else f" ({op.scope.name})")


def executed(ops: Sequence[Op]) -> list[torch.Tensor]:
    """Execute the operation that each rank of a group has yielded, by rank, and return their replies."""
    first = ops[0]
    if isinstance(first, Reduce):
        total = first.value.clone()
        for op in ops[1:]:
            _combine(first.op, total, cast(Reduce, op).value)
        return [total] * len(ops)
    if isinstance(first, AllToAll):
        exchanges = [cast(AllToAll, op) for op in ops]
        for receiver, op in enumerate(exchanges):
            torch.stack([other.send[receiver] for other in exchanges], out=op.recv)
            _tell(op, receiver, exchanges)
        return [op.recv for op in exchanges]
    if isinstance(first, SendRecv):
        pairs = [cast(SendRecv, op) for op in ops]
        for receiver, pair in enumerate(pairs):
            if pair.source is not None:
                _receive(pair, receiver, pairs[pair.source])
        return [pair.recv for pair in pairs]
    if isinstance(first, Broadcast):
        return _broadcast([cast(Broadcast, op) for op in ops], first.root)
    gathers = [cast(AllGather, op) for op in ops]
    for receiver, gather in enumerate(gathers):
        _tell(gather, receiver, gathers)
    shared = torch.stack([op.send for op in gathers], out=first.recv)
    return [shared] * len(ops)


def _broadcast(ops: Sequence[Broadcast], root: int) -> list[torch.Tensor]:
    source = ops[root]
    count = source.value.numel() if source.length is None else int(source.length)
    for rank, op in enumerate(ops):
        if rank != root:
            op.value.view(-1)[:count].copy_(source.value.view(-1)[:count])
        if op.length is not None:
            op.length.fill_(count)
    return [op.value for op in ops]


def _receive(op: SendRecv, receiver: int, source: SendRecv) -> None:
    if source.to != receiver:
        raise ExchangeError(f"simulated rank {receiver} waits for rank {op.source}, which sends to {source.to}")
    count = op.recv.numel() if source.lengths is None else int(source.lengths)
    op.recv[:count].copy_(source.send[:count])
    if op.arrived is not None:
        op.arrived.fill_(count)


def _tell(op: AllToAll | AllGather, receiver: int, others: Sequence[AllToAll | AllGather]) -> None:
    if op.arrived is not None:
        told = [0 if other.lengths is None else int(other.lengths[receiver]) for other in others]
        op.arrived.copy_(torch.tensor(told, device="cpu"))


def _combine(op: str, total: torch.Tensor, value: torch.Tensor) -> None:
    if op == "sum":
        total.add_(value)
    elif op == "max":
        torch.maximum(total, value, out=total)
    else:
        torch.minimum(total, value, out=total)
