"""The exchange of a halo within a forward and a backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

__all__ = ["HaloExchange", "extended"]


class HaloExchange(Protocol):
    """What carries the rows of a boundary: a link between processes, or a simulation of several workers."""

    def forward(self, layer: int, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the halo's rows of each worker of this process, given the own rows of each."""

    def backward(self, layer: int, gradients: Sequence[torch.Tensor], own: Sequence[int]) -> list[torch.Tensor]:
        """Return what other workers' gradients add to those of the own rows, by worker of this process.

        Args:
            gradients: Of the halo's rows of each worker.
            own: Number of own rows of each worker.
        """


def extended(exchange: HaloExchange | None, layer: int, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the own rows of each worker of this process with those of its halo below them.

    The gradient of a row of the halo goes back to the owner, by the same exchange, and is added there. To be called on
    all workers alike, since it is collective, as its backward pass is.

    Args:
        exchange: None where one worker has the whole graph: there is no halo.
        layer: Number of the layer, the same on all workers.
        rows: Float32 ``[own, width]`` of each worker: one of them in a process of a group, all in a simulation.
    """
    if exchange is None:
        return list(rows)
    return list(_Extended.apply(exchange, layer, *rows))  # type: ignore[no-untyped-call]


class _Extended(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: HaloExchange, layer: int, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.exchange, ctx.layer, ctx.own = exchange, layer, [len(own) for own in rows]
        halo = exchange.forward(layer, [own.detach() for own in rows])
        return tuple(torch.cat(pair) for pair in zip(rows, halo))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        parts = [g.split([own, len(g) - own]) for g, own in zip(gradients, ctx.own)]
        added = ctx.exchange.backward(ctx.layer, [halo for _, halo in parts], ctx.own)
        return (None, None, *(own + more for (own, _), more in zip(parts, added)))
