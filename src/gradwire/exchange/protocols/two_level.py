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
    """Run an exchange without scopes in each group of a scope.

    Args:
        scope: The scope.
        rank: This rank, by its number outside the scope.
        generator: The exchange of this rank's group, which numbers ranks by their places in the group.

    Raises:
        PayloadError: the error of the exchange, with the sender's number outside the scope.
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
    """Checks of payloads in one group, whose later errors name ranks by their numbers outside the scope.

    :func:`within` does the same for errors that are raised at once.

    Args:
        checks: Takes the results.
        ranks: Ranks of the group.
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

    Bytes sent by a rank: (N - 1) (header + 4 bytes per element of a shard), with all shards of the size of the longest.
    """
    world = context.world_size
    yield from owned_means(context, tag, [_values(shard, world) for shard in shards], flat)


def gather_shards(
    context: Context, tag: int, shards: Sequence[Sequence[Segment]], flat: torch.Tensor
) -> Exchange[None]:
    """Gather all ranks' shards of ``flat`` on every rank, in float32.

    Bytes sent by a rank: as in :func:`scatter_shards`.
    """
    # The codec must not average: a single worker sends each shard.
    sections = [_values(shard, 1) for shard in shards]
    mine = sections[context.rank]
    codes = encode(context, mine, flat, [s.codec.units for s in mine], draw_of(context), "told ")
    yield from tell_shares(context, tag, sections, codes, flat)


def agree_on_finite(finite: Flag | None) -> Exchange[bool | None]:
    """Return whether all ranks' shards are finite; None if one was not checked."""
    level = {True: 0.0, None: 1.0, False: 2.0}
    worst = yield Reduce(torch.tensor([level[known(finite)]], dtype=torch.float32, device="cpu"), "max")
    return {found: answer for answer, found in level.items()}[float(worst[0])]


def _values(segments: Sequence[Segment], world_size: int) -> Sequence[Section]:
    return [Section(DenseCodec(segments, world_size), NoSummary())]
