"""The collectives that a protocol may ask for.

A protocol is a generator: it yields one of these and receives a tensor. It does no input or output itself, so the
same code runs on a real group, in a simulation and in a dry run (see :mod:`gradwire.exchange.drivers`). Every rank
yields the same kinds, in the same order, with matching sizes; what is yielded never depends on the values in a tensor,
but for the lengths of rows that say so. An operation with a ``scope`` is carried out in each of its groups by itself:
"all ranks" are then those of the group, and only they need to ask for the same.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch


@dataclass(frozen=True)
class Scope:
    """A division of all ranks into groups, in each of which an operation is carried out by itself.

    Within an operation of this scope ranks are numbered by their place in the group.

    Attributes:
        name: What the groups are, as in a count of bytes by scope.
        groups: All ranks, each in one group.
        local: Whether an operation stays within a machine, so that it need not wait until the network is free.

    Example:
        >>> nodes = Scope("node", ((0, 1), (2, 3)), local=True)
        >>> nodes.ranks(2), nodes.place(3)
        ((2, 3), (1, 2))
    """

    name: str
    groups: tuple[tuple[int, ...], ...]
    local: bool = False

    def ranks(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the group that a rank is in."""
        return next(group for group in self.groups if rank in group)

    def place(self, rank: int) -> tuple[int, int]:
        """Return a rank's place in its group, and how many ranks are in it."""
        ranks = self.ranks(rank)
        return ranks.index(rank), len(ranks)


@dataclass(frozen=True, eq=False)
class Reduce:
    """Combine a tensor element by element over all ranks; the reply, read-only, is the result.

    ``value`` may be overwritten.

    ``op`` is "sum", "max" or "min". "max" and "min" do not depend on the order of ranks; "sum" is the backend's own
    and may round differently at another offset.
    """

    value: torch.Tensor
    op: str
    scope: Scope | None = None


@dataclass(frozen=True, eq=False)
class AllToAll:
    """Send row r of ``send`` (uint8 ``[world_size, bytes]``) to rank r; the reply's row r came from rank r.

    ``recv``, of the same shape, is room that the driver may receive into.

    Rows may be shorter than their room: ``lengths`` (int64 ``[world_size]``) then says how many bytes of row r go to
    rank r, 0 for this rank itself, whose row goes whole. The driver tells the lengths first, counts that, and writes
    into ``arrived`` (int64 ``[world_size]``) how many bytes of each row of the reply came, 0 for this rank. What lies
    behind them is unspecified.

    ``last`` says that no rows worth a turn follow in this protocol: while it decodes, the link is the next one's.
    """

    send: torch.Tensor
    recv: torch.Tensor
    lengths: torch.Tensor | None = None
    arrived: torch.Tensor | None = None
    last: bool = False
    scope: Scope | None = None


@dataclass(frozen=True, eq=False)
class AllGather:
    """Send ``send`` (uint8 ``[bytes]``) to every rank; the reply's row r (``[world_size, bytes]``) came from rank r.

    ``recv``, of the reply's shape, is room that the driver may receive into. The reply is read-only.

    ``lengths``, ``arrived`` and ``last`` are as for :class:`AllToAll`: the same length for every other rank.
    """

    send: torch.Tensor
    recv: torch.Tensor
    lengths: torch.Tensor | None = None
    arrived: torch.Tensor | None = None
    last: bool = False
    scope: Scope | None = None


@dataclass(frozen=True, eq=False)
class SendRecv:
    """Send ``send`` (uint8 ``[bytes]``) to rank ``to`` and receive as much from rank ``source``; the reply is ``recv``.

    All ranks ask at the same time; None stands for nobody, on one side or on both, and what nobody sends leaves
    ``recv`` as it is. Who sends to whom is a function of the ranks alone.

    ``lengths`` and ``arrived`` (int64 ``[1]``) are as for :class:`AllToAll`: the bytes that travel, told first. So is
    ``last``.
    """

    send: torch.Tensor
    recv: torch.Tensor
    to: int | None
    source: int | None
    lengths: torch.Tensor | None = None
    arrived: torch.Tensor | None = None
    last: bool = False
    scope: Scope | None = None


@dataclass(frozen=True, eq=False)
class Broadcast:
    """Send ``value`` of rank ``root`` to every rank; the reply is ``value``, which all other ranks receive into.

    ``value`` is contiguous, of the same dtype and shape on all ranks; ``root`` is a function of what all ranks know.

    Rows may be shorter than their room: ``length`` (int64 ``[1]``) then says how many elements of a vector ``value``
    the root sends. The driver tells it first, counts that, and writes it into the other ranks' ``length``. What lies
    behind them is unspecified. ``last`` is as for :class:`AllToAll`.
    """

    value: torch.Tensor
    root: int
    length: torch.Tensor | None = None
    last: bool = False
    scope: Scope | None = None


Op: TypeAlias = Reduce | AllToAll | AllGather | SendRecv | Broadcast

T = TypeVar("T")
Exchange: TypeAlias = Generator[Op, torch.Tensor, T]
"""A running protocol that will return a ``T``."""
