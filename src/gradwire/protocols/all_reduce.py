"""The backend's own float sum: identity and casts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradwire.ops import Exchange, Reduce
from gradwire.protocols.context import Context, Outcome
from gradwire.segments import Segment

__all__ = ["all_reduce"]


def all_reduce(
    context: Context, flat: torch.Tensor, dtype: torch.dtype, segments: Sequence[Segment]
) -> Exchange[Outcome]:
    """Replace ``flat`` by the mean over ranks, summed by the backend.

    Where ``dtype`` is the vector's own, the whole vector goes at once and in place, as in DDP. Otherwise dense segments
    go in float32 in a reduction of their own.

    Bytes sent by a rank: 2 (N - 1) / N times the payload (ring).
    """
    original = flat.clone() if context.wants_sent else None
    if flat.dtype == dtype or not any(s.dense for s in segments):
        yield from _reduce_part(context, flat, dtype)
    else:
        for dense, kind in ((False, dtype), (True, torch.float32)):
            runs = [flat[s.offset : s.offset + s.numel] for s in segments if s.dense is dense]
            if runs:
                part = torch.cat(runs)
                yield from _reduce_part(context, part, kind)
                torch._foreach_copy_(runs, list(part.split([r.numel() for r in runs])))
    if original is None:
        return Outcome()

    def sent(out: torch.Tensor) -> None:
        out.copy_(original)
        for segment in segments:
            if not segment.dense:
                run = out[segment.offset : segment.offset + segment.numel]
                run.copy_(run.to(dtype))

    return Outcome(sent=sent)


def _reduce_part(context: Context, part: torch.Tensor, dtype: torch.dtype) -> Exchange[None]:
    if part.dtype == dtype:
        part.mul_(1.0 / context.world_size)
        reply = yield Reduce(part, "sum")
    else:
        room = context.workspace.get(f"cast to {dtype}", part.numel() * dtype.itemsize).view(dtype)
        reply = yield Reduce(room.copy_(part).div_(context.world_size), "sum")
    if reply is not part:
        part.copy_(reply)
