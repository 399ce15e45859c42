"""Exchanges on two levels: exact inside a node, by another protocol between nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from gradwire.errors import PayloadError
from gradwire.exchange.codecs import DenseCodec, NoSummary
from gradwire.exchange.deferred_checks import Checks, Flag, known
from gradwire.exchange.ops import Exchange, Reduce, Scope
from gradwire.exchange.protocols.context import Context
from gradwire.exchange.protocols.payloads import Section, draw_of, encode
from gradwire.exchange.protocols.shares import owned_means, tell_shares
from gradwire.exchange.segments import Segment

T = TypeVar("T")


def within(scope: Scope, rank: int, generator: Exchange[T]) -> Exchange[T]:
    """Run an exchange of one group, which knows no scopes, as one of each group of a scope.

    Args:
        scope: Whose groups exchange.
        rank: This rank, by its number outside of the scope.
        generator: The exchange of this rank's group, which numbers ranks by their places in the group.

    Raises:
        PayloadError: what the exchange raises, with the sender's number outside of the scope.
    """
    try:
        op = next(generator)
        while True:
            op = generator.send((yield replace(op, scope=scope)))
    except PayloadError as error:
        raise error.numbered(scope.ranks(rank)) from None
    except StopIteration as stop:
        result: T = stop.value
        return result


class ScopeChecks(Checks):
    """Checks of what ranks of one group sent, whose late errors name ranks by their numbers outside of the scope.

    Errors that are raised at once pass through :func:`within`, which numbers them.

    Args:
        checks: Told the results.
        ranks: Of the group.
    """

    def __init__(self, checks: Checks, ranks: Sequence[int]) -> None:
        self._checks, self._ranks = checks, ranks

    def require(self, holds: Flag, explain: Callable[[], Exception]) -> None:
        late = False

        def explained() -> Exception:
            error = explain()
            return error.numbered(self._ranks) if late and isinstance(error, PayloadError) else error

        self._checks.require(holds, explained)
        late = True

    def so_far(self) -> Flag:
        return self._checks.so_far()


def scatter_shards(
    context: Context, tag: int, shards: Sequence[Sequence[Segment]], flat: torch.Tensor
) -> Exchange[None]:
    """Replace this rank's shard of ``flat`` by its mean over ranks, in float32 and in the order of ranks.

    Bytes sent by a rank: (N - 1) (header + 4 bytes an element of a shard), shards as long as the longest.
    """
    world = context.world_size
    yield from owned_means(context, tag, [_values(shard, world) for shard in shards], flat)


def gather_shards(
    context: Context, tag: int, shards: Sequence[Sequence[Segment]], flat: torch.Tensor
) -> Exchange[None]:
    """Give every rank every other's shard of ``flat``, as it is.

    Bytes sent by a rank: as :func:`scatter_shards`.
    """
    # One who tells values is the only worker of them.
    sections = [_values(shard, 1) for shard in shards]
    mine = sections[context.rank]
    codes = encode(context, mine, flat, [s.codec.units for s in mine], draw_of(context), "told ")
    yield from tell_shares(context, tag, sections, codes, flat)


def agree_on_finite(finite: Flag | None) -> Exchange[bool | None]:
    """Return whether all ranks' shards are finite; None where one is not and nobody looked at another."""
    level = {True: 0.0, None: 1.0, False: 2.0}
    worst = yield Reduce(torch.tensor([level[known(finite)]]), "max")
    return {found: answer for answer, found in level.items()}[float(worst[0])]


def _values(segments: Sequence[Segment], world_size: int) -> Sequence[Section]:
    return [Section(DenseCodec(segments, world_size), NoSummary())]
