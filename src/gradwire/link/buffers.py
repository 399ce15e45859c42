"""Means over ranks of a module's buffers, as of the statistics of batch normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from gradwire.exchange.drivers import Meter, simulate_ranks
from gradwire.exchange.ops import Broadcast, Exchange, Reduce
from gradwire.exchange.protocols import Context, Workspace
from gradwire.exchange.segments import flat_view
from gradwire.link.global_parameters import mean_over_ranks
from gradwire.link.handshake import digest
from gradwire.link.selection.control_channel import ControlChannel

FEW = 1 << 12
"""Number of elements up to which the mean of a buffer is computed in float64, of values that all ranks send to all."""


def mean_of_finite(rows: torch.Tensor) -> torch.Tensor:
    """Return the mean over ranks of values that are finite, and what rank 0 has where no rank's is.

    A rank whose steps are lost because a value was not finite so leaves the others' buffers as they are.

    Args:
        rows: float64 ``[ranks, n]``.
    """
    finite = rows.isfinite()
    if bool(finite.all()):
        return rows.mean(0)
    mean = rows.where(finite, 0.0).sum(0) / finite.sum(0)
    return mean.where(finite.any(0), rows[0])


def mean_of_finite_over_ranks(context: Context, flat: torch.Tensor) -> Exchange[None]:
    """Replace a float32 vector by what :func:`mean_of_finite` returns, added in float32 in the order of ranks.

    Ranks tell each other which values are finite only if one of them has others.
    """
    finite = flat.isfinite()
    odd = torch.tensor([not bool(finite.all())], dtype=torch.float32, device="cpu")
    if not bool((yield Reduce(odd, "max"))[0]):
        yield from mean_over_ranks(context, flat)
        return
    own, share = flat.clone(), finite.to(torch.float32)
    flat.masked_fill_(~finite, 0.0)
    yield from mean_over_ranks(context, flat)
    # A mean has two phases, each of which is an exchange of its own.
    yield from mean_over_ranks(replace(context, exchange=context.exchange + 2, workspace=Workspace()), share)
    flat.div_(share)
    nowhere = share == 0
    if bool(nowhere.any()):
        flat[nowhere] = yield Broadcast(own[nowhere], 0)


def means_over_channel(
    buffers: Sequence[torch.Tensor], channel: ControlChannel, context: Context, device: torch.device
) -> list[torch.Tensor]:
    """Return the mean over ranks of each buffer's finite values, flat in memory order (collective call).

    Args:
        buffers: The buffers of this rank.
        channel: Channel to the other ranks.
        context: The place of this rank among them.
        device: Device of vectors that the channel carries.
    """
    found = [flat_view(b.detach()) for b in buffers]
    if not found:
        return []
    # A mask or a table, which may be large, is the same everywhere.
    digests = channel.gather([digest(x) for x in found])
    apart = [i for i, of_ranks in enumerate(zip(*digests)) if len(set(of_ranks)) > 1]
    few = [i for i in apart if found[i].numel() <= FEW]
    if few:
        own = torch.cat([found[i].to(torch.float32) for i in few])
        rows = torch.tensor(channel.gather(own.tolist()), dtype=torch.float64, device="cpu")
        for i, part in zip(few, mean_of_finite(rows).split([found[i].numel() for i in few])):
            found[i] = part
    for i in apart:
        if i not in few:
            found[i] = found[i].to(device, torch.float32, copy=True)
            within = replace(context, bucket=i, workspace=Workspace())
            channel.run(mean_of_finite_over_ranks(within, found[i]), "the mean of buffers")
    return found


def mean_of_simulated(buffers: Sequence[torch.Tensor], context: Context) -> torch.Tensor:
    """Return the mean of one buffer of each simulated worker, as :func:`means_over_channel` does.

    Args:
        buffers: The buffer of each worker.
        context: The place of the first worker.
    """
    found = [flat_view(b.detach()) for b in buffers]
    if len({digest(x) for x in found}) == 1:
        return found[0].clone()
    if found[0].numel() <= FEW:
        return mean_of_finite(torch.stack([x.to(torch.float64) for x in found]))
    rows = [x.to(torch.float32, copy=True) for x in found]
    contexts = [replace(context, rank=rank, workspace=Workspace()) for rank in range(len(rows))]
    simulate_ranks([mean_of_finite_over_ranks(*pair) for pair in zip(contexts, rows)], [Meter() for _ in rows])
    return rows[0]
