"""The mean for the owner of each shard alone: the first phase of two-shot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradwire.exchange.codecs import CheckedCodec
from gradwire.exchange.deferred_checks import Flag, all_hold, both
from gradwire.exchange.ops import Exchange, Reduce
from gradwire.exchange.protocols.context import Context, Outcome
from gradwire.exchange.protocols.payloads import Section, sized
from gradwire.exchange.protocols.shares import send_shares

__all__ = ["REDUCE_SCATTER", "ShardSections", "owned_means", "reduce_scatter"]

REDUCE_SCATTER = "reduce_scatter"
"""Name of the protocol, for exchanges after which each rank holds the mean of its own shard, and nothing else."""


@dataclass(frozen=True, eq=False)
class ShardSections:
    """What every rank encodes for one of them.

    Attributes:
        sections: Those that hold its shard.
        covered: Where they lie in the flat vector. Shards of neighbours that share a block both cover it.
        owned: The runs that are the rank's own; over all ranks, each element of the chunk once.
    """

    sections: Sequence[Section]
    covered: Sequence[tuple[int, int]]
    owned: Sequence[tuple[int, int]]


def reduce_scatter(
    context: Context, tag: int, shards: Sequence[ShardSections], flat: torch.Tensor
) -> Exchange[Outcome]:
    """Replace this rank's own runs of ``flat`` by the mean over ranks; what else lies there is unspecified afterwards.

    1. Every rank encodes its vector and sends each rank the codes of that rank's shard (all-to-all).
    2. Every rank decodes all ranks' codes of its own shard and adds them up in float32, in the order of ranks.
    3. Ranks tell each other whether the mean is finite: what a method remembers is of all shards.

    The mean of an element is the same bits as by :func:`gradwire.exchange.protocols.all_gather`: shards begin and end
    within what is encoded together, and then both neighbours receive all of it.

    Bytes sent by a rank: (N - 1) (header + codes of a shard), shards as long as the longest, and (N - 1) 12 for the
    last step.
    """
    parts, bodies, finite = yield from owned_means(context, tag, [shard.sections for shard in shards], flat)
    lost = yield Reduce(_lost(finite, flat), "max")

    def sent(out: torch.Tensor, weight: float) -> None:
        room: torch.Tensor | None = None
        for sections, codes, shard in zip(parts, bodies, shards):
            target = out
            if shard.covered != shard.owned:
                # A neighbour's part of a block that both cover is counted with the neighbour.
                target = room = torch.zeros_like(out) if room is None else room
                for begin, end in shard.covered:
                    room[begin:end] = 0.0
            for section, body in zip(sections, codes):
                section.codec.add_own(body, section.summary, weight, target)
            if target is not out:
                for begin, end in shard.owned:
                    out[begin:end].add_(target[begin:end])

    return Outcome(all_hold(lost == 0), sent if context.wants_sent else None)


def _lost(finite: Flag | None, flat: torch.Tensor) -> torch.Tensor:
    """Return 0 for a shard that is finite, else 1, where the gradient lies, also on a rank that has no shard here."""
    if isinstance(finite, torch.Tensor):
        return finite.logical_not().to(torch.float32).view(1)
    return torch.full((1,), float(not finite), device="cpu" if flat.is_meta else flat.device)


def owned_means(
    context: Context, tag: int, shards: Sequence[Sequence[Section]], flat: torch.Tensor
) -> Exchange[tuple[list[Sequence[Section]], list[list[torch.Tensor]], Flag | None]]:
    """Replace what this rank's sections carry of ``flat`` by the mean over ranks.

    Returns:
        All ranks' sections with the summaries that decoders need, what this rank encoded for each rank, and whether
        the mean of its own shard is finite.
    """
    parts, bodies, received = yield from send_shares(context, tag, [sized(s, flat) for s in shards], flat)
    finite: Flag | None = True
    for section, rows in zip(parts[context.rank], received):
        codec = section.codec
        if codec.decode_rows(rows, section.summary, flat) is False and isinstance(codec, CheckedCodec):
            codec.spoil(flat)
            context.warn_here(type(codec).__name__, f"round {context.round}: {codec.unread()}")
        finite = both(finite, codec.is_finite(section.summary, flat))
    return parts, bodies, finite
