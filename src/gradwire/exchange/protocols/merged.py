"""Payloads of shares that their owners merge, so that what a rank sends does not grow with the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from gradwire.exchange.codecs import LeftOut, unread
from gradwire.exchange.ops import Exchange
from gradwire.exchange.protocols.context import Context, Outcome
from gradwire.exchange.protocols.payloads import draw_of, mergeable, outcome, sized
from gradwire.exchange.protocols.shares import Share, send_shares, tell_shares
from gradwire.seeds import OWNER

__all__ = ["two_shot_merged"]


def two_shot_merged(context: Context, tag: int, shares: Sequence[Share], flat: torch.Tensor) -> Exchange[Outcome]:
    """Replace ``flat`` by what is left of the mean over ranks when the owner of each share merges all ranks' payloads.

    1. Every rank encodes each share by itself and sends it to its owner (all-to-all).
    2. Every rank merges the payloads of its own share, in the order of ranks, to one of the same kind and size, from
       the owner's stream.
    3. Every rank sends that to all (all-gather), and decodes all shares.

    What a merge leaves out counts as not sent by the owner, so that the outcome is the mean of what ranks sent.

    Bytes sent by a rank: (N - 1) times header and codes of a share, twice, each with its length before it where that
    varies: less than two payloads however many ranks there are, in two messages that wait for each other, where
    :func:`gradwire.exchange.protocols.tree` sends log2(N) payloads in as many.
    """
    space = context.workspace
    ups, bodies, parts = yield from send_shares(context, tag, [sized(share.up, flat) for share in shares], flat)
    merged, left_out = list[torch.Tensor](), list[LeftOut]()
    draw = replace(draw_of(context), stream=OWNER, gauge=unread)
    for i, (section, rows) in enumerate(zip(ups[context.rank], parts)):
        codec = mergeable(section.codec)
        merged.append(space.get(f"merged {i}", codec.payload_bytes(codec.units)))
        rest = codec.merge(rows.unbind(), draw, merged[-1])
        if rest is not None:
            left_out.append(rest)
    yield from tell_shares(context, tag, ups, merged, flat)
    found = outcome(context, [s for part in ups for s in part], [b for part in bodies for b in part], flat)
    encoded = found.sent
    if encoded is None:
        return found

    def sent(out: torch.Tensor, weight: float) -> None:
        encoded(out, weight)
        for rest in left_out:
            rest(out, -weight)

    return replace(found, sent=sent)
