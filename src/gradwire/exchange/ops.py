"""The collectives that a protocol may yield.

A protocol is a generator: it yields one of these and receives a tensor. It does no input or output itself, so that the
same code runs on a real group, in a simulation and in a dry run (see :mod:`gradwire.exchange.drivers`). Every rank
yields the same kinds of operations, in the same order and with matching sizes. They never depend on values in a tensor,
except for the lengths of rows. A reply may be in a buffer of the driver, and is valid until the protocol returns. An
operation with a ``scope`` is executed in each of its groups separately: "all ranks" then are those of the group, and
only they must yield the same.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch


@dataclass(frozen=True)
class Scope:
    """A division of all ranks into groups, in each of which an operation is executed separately.

    Within an operation of this scope ranks are numbered by their place in the group.

    Attributes:
        name: Name of the groups, for example in byte counts by scope.
        groups: All ranks, each in one group.
        local: True if an operation stays within a machine, so that it need not wait for the network.

    Example:
        >>> nodes = Scope("node", ((0, 1), (2, 3)), local=True)
        >>> nodes.ranks(2), nodes.place(3)
        ((2, 3), (1, 2))
    """

    name: str
    groups: tuple[tuple[int, ...], ...]
    local: bool = False

    def ranks(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of a rank's group."""
        return next(group for group in self.groups if rank in group)

    def place(self, rank: int) -> tuple[int, int]:
        """Return a rank's place in its group, and the number of ranks in it."""
        ranks = self.ranks(rank)
        return ranks.index(rank), len(ranks)


@dataclass(frozen=True, eq=False)
class Reduce:
    """Combine a tensor element by element over all ranks; the reply, read-only, is the result.

    ``value`` may be overwritten.

    ``op`` is "sum", "max" or "min". "max" and "min" do not depend on the order of ranks; "sum" is computed by the
    backend and may round differently at another offset.
    """

    value: torch.Tensor
    op: str
    scope: Scope | None = None


@dataclass(frozen=True, eq=False)
class AllToAll:
    """Send row r of ``send`` (uint8 ``[world_size, bytes]``) to rank r; the reply's row r came from rank r.

    ``recv``, of the same shape, is a buffer that the driver may receive into.

    Rows may be shorter than the buffer: ``lengths`` (int64 ``[world_size]``) then has the number of bytes of row r for
    rank r, 0 for this rank itself, whose row is copied whole. The driver sends the lengths, too, counts their bytes,
    and writes into ``arrived`` (int64 ``[world_size]``) the number of bytes of each row of the reply, 0 for this rank.
    Bytes after them are unspecified.
    """

    send: torch.Tensor
    recv: torch.Tensor
    lengths: torch.Tensor | None = None
    arrived: torch.Tensor | None = None
    scope: Scope | None = None


@dataclass(frozen=True, eq=False)
class AllGather:
    """Send ``send`` (uint8 ``[bytes]``) to every rank; the reply's row r (``[world_size, bytes]``) came from rank r.

    ``recv``, of the reply's shape, is a buffer that the driver may receive into. The reply is read-only.

    ``lengths`` and ``arrived`` are as for :class:`AllToAll`: the same length for every other rank.
    """

    send: torch.Tensor
    recv: torch.Tensor
    lengths: torch.Tensor | None = None
    arrived: torch.Tensor | None = None
    scope: Scope | None = None


@dataclass(frozen=True, eq=False)
class SendRecv:
    """Send ``send`` (uint8 ``[bytes]``) to rank ``to``; the reply has as many bytes, which rank ``source`` sent.

    All ranks yield it at the same time. ``to`` or ``source`` or both may be None, for no peer; without a source
    the reply is ``recv``, which does not change. Peers depend on the ranks alone.

    ``lengths`` and ``arrived`` (int64 ``[1]``) are as for :class:`AllToAll`: the number of bytes, which is sent, too.
    """

    send: torch.Tensor
    recv: torch.Tensor
    to: int | None
    source: int | None
    lengths: torch.Tensor | None = None
    arrived: torch.Tensor | None = None
    scope: Scope | None = None


@dataclass(frozen=True, eq=False)
class Broadcast:
    """Send ``value`` of rank ``root`` to every rank; the reply is ``value``, which all other ranks receive into.

    ``value`` is contiguous, of the same dtype and shape on all ranks; ``root`` is the same on all ranks.

    A vector may be shorter than the buffer: ``length`` (int64 ``[1]``) then is the number of elements of ``value`` that
    the root sends. The driver sends it first, counts its bytes, and writes it into the other ranks' ``length``.
    Elements after them are unspecified.
    """

    value: torch.Tensor
    root: int
    length: torch.Tensor | None = None
    scope: Scope | None = None


Op: TypeAlias = Reduce | AllToAll | AllGather | SendRecv | Broadcast

T = TypeVar("T")
Exchange: TypeAlias = Generator[Op, torch.Tensor, T]
"""A running protocol that will return a ``T``."""
