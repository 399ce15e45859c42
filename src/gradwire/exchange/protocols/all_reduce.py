"""Float means: by the backend's own sum, for fp32 and casts, or by a gather, for a few values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gradwire.exchange.ops import AllGather, AllToAll, Exchange, Reduce
from gradwire.exchange.protocols.context import Context, Outcome
from gradwire.exchange.protocols.payloads import laid_out
from gradwire.exchange.segments import Segment
from gradwire.exchange.wire import EVERYONE, Rows, padded


def all_reduce(
    context: Context, flat: torch.Tensor, dtype: torch.dtype, segments: Sequence[Segment] | None
) -> Exchange[Outcome]:
    """Replace ``flat``, or some segments of it, by the mean over ranks, summed by the backend in one collective.

    A whole vector whose dtype is ``dtype`` is reduced in place, as in DDP.

    Bytes sent by a rank: 2 (N - 1) / N times the payload (ring).
    """
    runs = [flat] if segments is None else [flat[s.offset : s.offset + s.numel] for s in segments]
    part = flat if segments is None else torch.cat(runs)
    original = part.to(dtype, copy=True) if context.wants_sent else None
    if part.dtype == dtype:
        part.mul_(1.0 / context.world_size)
        reply = yield Reduce(part, "sum")
    else:
        room = context.workspace.get(f"cast to {dtype}", part.numel() * dtype.itemsize).view(dtype)
        reply = yield Reduce(room.copy_(part).div_(context.world_size), "sum")
    if reply is not part:
        part.copy_(reply)
    if part is not flat:
        torch._foreach_copy_(runs, list(part.split([r.numel() for r in runs])))
    if original is None:
        return Outcome(unchecked=runs)

    return Outcome(sent=_add(original, segments), unchecked=runs)


def gathered_mean(context: Context, tag: int, flat: torch.Tensor, segments: Sequence[Segment]) -> Exchange[Outcome]:
    """Replace some segments by the mean over ranks, for which every rank adds all ranks' values in the order of ranks.

    Values of sixteen bits are added in float32, since their sum may be beyond their range though the mean is not. Where
    a sum is beyond float32, shares of the values are added instead, as an all-reduce does. It takes one message, while
    a ring takes 2 (N - 1) dependent ones: use it for values too few to fill the network.

    Bytes sent by a rank: (N - 1) (header + values).
    """
    runs = [flat[s.offset : s.offset + s.numel] for s in segments]
    part = torch.cat(runs)
    original = part.clone() if context.wants_sent else None
    world, size = context.world_size, part.numel() * part.element_size()
    layout = laid_out(Rows([padded(size)], checks=context.checks), flat)
    head = layout.header(tag=tag, round=context.round, bucket=context.bucket, chunk=context.chunk)
    values = context.workspace.get("values", world, padded(size))
    values[:, :size].view(part.dtype).copy_(part.expand(world, -1))
    send = context.workspace.get("values, sent", world, layout.row_bytes)
    layout.write(send, head, [values], context.rank, range(world))
    received = yield AllToAll(send, context.workspace.get("values, received", world, layout.row_bytes))
    (rows,) = layout.read(received, head, context.rank)
    rows = rows[:, :size].view(part.dtype)
    total = rows[0].to(torch.promote_types(part.dtype, torch.float32), copy=True)
    for row in rows[1:]:
        total.add_(row)
    total.mul_(1.0 / world)
    lost = ~total.isfinite()
    # Reading it would wait for a device.
    if not lost.is_cpu or bool(lost.any()):
        total = torch.where(lost, _sum_of_shares(rows, total.dtype), total)
    mean = total.to(part.dtype)
    torch._foreach_copy_(runs, list(mean.split([r.numel() for r in runs])))
    if original is None:
        return Outcome(unchecked=runs)

    return Outcome(sent=_add(original, segments), unchecked=runs)


def _sum_of_shares(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the mean of rows, each divided before it is added."""
    total = rows[0].to(dtype) * (1.0 / len(rows))
    for row in rows[1:]:
        total.add_(row.to(dtype), alpha=1.0 / len(rows))
    return total


def gathered_values(context: Context, tag: int, values: torch.Tensor) -> Exchange[torch.Tensor]:
    """Return every rank's values, ``[world_size, *values.shape]``, for statistics beside the gradient.

    ``context.exchange`` distinguishes several exchanges of one chunk.

    Bytes sent by a rank: (N - 1) (header + values, rounded up to 16 bytes).
    """
    mine = values.contiguous().view(torch.uint8).reshape(1, -1)
    size = mine.shape[1]
    layout = laid_out(Rows([padded(size)], checks=context.checks), values)
    head = layout.header(
        tag=tag, round=context.round, bucket=context.bucket, chunk=context.chunk, exchange=context.exchange
    )
    body = mine.new_zeros((1, padded(size)))
    body[:, :size] = mine
    send = mine.new_empty((1, layout.row_bytes))
    layout.write(send, head, [body], context.rank, [EVERYONE])
    received = yield AllGather(send[0], send.new_empty((context.world_size, layout.row_bytes)))
    (rows,) = layout.read(received, head, EVERYONE)
    return rows[:, :size].clone().view(values.dtype).reshape(context.world_size, *values.shape)


def _add(original: torch.Tensor, segments: Sequence[Segment] | None) -> Callable[[torch.Tensor, float], None]:
    def sent(out: torch.Tensor, weight: float) -> None:
        targets = [out] if segments is None else [out[s.offset : s.offset + s.numel] for s in segments]
        for target, part in zip(targets, original.split([t.numel() for t in targets])):
            target.add_(part.to(target.dtype), alpha=weight)

    return sent
