"""Exchanges of halos: as a step of autograd, and as the generator that sends one worker's rows."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from gradwire.errors import PayloadError
from gradwire.exchange.method import check_seed, is_whole, require
from gradwire.exchange.ops import Exchange
from gradwire.exchange.protocols import Context, alltoallv
from gradwire.graphs.halo_method import ChannelSetting, HaloMethod, RowChannel
from gradwire.graphs.subgraph import Boundary
from gradwire.kernels import Kernels

FORWARD, BACKWARD = 0, 1
"""Directions: rows from their owners, and gradients back to them; the number of the chunk in a payload's header."""

WORDS = ("forward", "backward")

LOSS = 2
"""Number of the chunk in the header of a payload that tells a worker's loss."""

LOSS_BYTES = 8


class HaloExchange(Protocol):
    """Carries the rows of boundaries: a link between processes, or a simulation of several workers."""

    def forward(self, layer: int, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the rows of the halo of each worker of this process, given the own rows of each."""

    def backward(self, layer: int, gradients: Sequence[torch.Tensor], own: Sequence[int]) -> list[torch.Tensor]:
        """Return the sums of other workers' gradients of the own rows, for each worker of this process.

        Args:
            gradients: Gradients of the rows of each worker's halo.
            own: Number of own rows of each worker.
        """


def extended(exchange: HaloExchange | None, layer: int, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the own rows of each worker of this process, followed by those of its halo (collective).

    The gradient of a row of the halo is sent back to the owner by the same exchange, and added there; the backward pass
    is collective, too. Second derivatives are refused by a RuntimeError.

    Args:
        exchange: The exchange; None if one worker has the whole graph, without a halo.
        layer: Number of the layer, the same on all workers.
        rows: Own rows ``[own, width]`` of each worker: of one in a process of a group, of all in a simulation. Rows of
            another type than float32, as under autocast, are exchanged in float32 and returned in their own.
    """
    if exchange is None:
        return list(rows)
    return list(_Extended.apply(exchange, layer, *rows))  # type: ignore[no-untyped-call]


class _Extended(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: HaloExchange, layer: int, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.exchange, ctx.layer, ctx.own = exchange, layer, [len(own) for own in rows]
        halo = exchange.forward(layer, [own.detach().float() for own in rows])
        return tuple(torch.cat([own, other.to(own.dtype)]) for own, other in zip(rows, halo))

    # In a second derivative the gradients of other workers would count as constants.
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        parts = [g.split([own, len(g) - own]) for g, own in zip(gradients, ctx.own)]
        added = ctx.exchange.backward(ctx.layer, [halo.float() for _, halo in parts], ctx.own)
        return (None, None, *(own + more.to(own.dtype) for (own, _), more in zip(parts, added)))


class HaloPlan:
    """Exchanges of one worker of a partitioned graph.

    The channel for worker P's rows at worker Q has the name "layer L, forward, P to Q", that for their gradients "layer
    L, backward, Q to P"; the boundary is "layer L, P to Q" in both directions. Payloads depend on these names and on
    places within the boundary only, so that a simulation and real workers send the same.

    Args:
        method: Method for the rows.
        kernels: Kernels that its operators call.
        boundary: The rows to exchange.
        seed: Seed of random numbers.
        steps: Number of steps of the training; None if unknown.

    Attributes:
        drawn: What channels have drawn for the current step; cleared when that ends.

    Raises:
        HyperparameterError: the seed or the number of steps is not a whole number.
        IncompatibleError: the method needs to know the number of steps, or cannot work with this one.
    """

    def __init__(
        self, method: HaloMethod, kernels: Kernels, boundary: Boundary, *, seed: int = 0, steps: int | None = None
    ) -> None:
        check_seed(seed)
        require(steps is None or is_whole(steps, 0), "steps", f"a number of steps is needed, or None, not {steps!r}")
        method.check_steps(steps)
        self.method, self.boundary = method, boundary
        self._kernels, self._seed, self._steps = kernels, seed, steps
        self._largest = int(boundary.counts.max())
        self._channels: dict[tuple[int, int, int, int, int], RowChannel] = {}
        self.drawn: dict[Hashable, torch.Tensor] = {}

    def forward(self, context: Context, rows: torch.Tensor) -> Exchange[torch.Tensor]:
        """Return the rows of the halo.

        Args:
            context: ``bucket`` is the layer and ``chunk`` :data:`FORWARD`.
            rows: Rows of the own nodes, float32 ``[own, width]``.

        Returns:
            Float32 ``[halo, width]``, in the order of :class:`Subgraph`.
        """
        found = yield from self._swap(context, [rows[index] for index in self.boundary.leaving], rows.shape[1])
        return torch.cat(found)

    def backward(self, context: Context, gradients: torch.Tensor, own: int) -> Exchange[torch.Tensor]:
        """Return the sums of all other workers' gradients of the own rows.

        Args:
            context: ``bucket`` is the layer and ``chunk`` :data:`BACKWARD`.
            gradients: Gradients of the rows of the halo, float32 ``[halo, width]``.
            own: Number of own nodes.

        Returns:
            Float32 ``[own, width]``, added up in the order of workers.
        """
        width = gradients.shape[1]
        found = yield from self._swap(context, gradients.split(self.boundary.arriving), width)
        total = gradients.new_zeros(own, width)
        for index, rows in zip(self.boundary.leaving, found):
            total.index_add_(0, index, rows)
        return total

    def agreed_loss(self, context: Context, loss: float) -> Exchange[float]:
        """Return the sum of all workers' losses, in float64, the same bits on all of them.

        Each worker tells each other one its loss, and all add the losses up in the order of ranks.

        Args:
            context: ``chunk`` is :data:`LOSS`.
            loss: Loss of this worker.
        """
        mine = torch.tensor([loss], dtype=torch.float64, device="cpu")
        if context.world_size == 1:
            return loss
        bodies = [mine.view(torch.uint8) if to != context.rank else None for to in range(context.world_size)]
        came = yield from alltoallv(context, self.method.tag, bodies, LOSS_BYTES)
        total = 0.0
        for rank, body in enumerate(came):
            if rank == context.rank:
                total += loss
            elif body is None or len(body) != LOSS_BYTES:
                raise PayloadError(f"payload from {{sender}}: a loss has {LOSS_BYTES} bytes", rank)
            else:
                total += float(body.view(torch.float64))
        return total

    def _swap(
        self, context: Context, leaving: list[torch.Tensor] | tuple[torch.Tensor, ...], width: int
    ) -> Exchange[list[torch.Tensor]]:
        """Send each worker its rows, and return the received rows by worker."""
        here, others = context.rank, range(context.world_size)
        counts = self.boundary.counts if context.chunk == FORWARD else self.boundary.counts.T
        due: list[int] = counts[:, here].tolist()
        if self.method.silent or not self._largest:
            return [torch.zeros(n, width, dtype=torch.float32, device="cpu") for n in due]
        bodies = [
            self._channel(context, here, to, len(rows), width).encode(context, rows) if len(rows) else None
            for to, rows in zip(others, leaving)
        ]
        room = self._channel(context, -1, -1, self._largest, width).most_bytes(context.round)
        came = yield from alltoallv(context, self.method.tag, bodies, room)
        found = []
        for source, count in enumerate(due):
            body = came[source]
            if not count:
                found.append(torch.zeros(0, width, dtype=torch.float32, device="cpu"))
                continue
            channel = self._channel(context, source, here, count, width)
            data = torch.empty(0, dtype=torch.uint8, device="cpu") if body is None else body
            found.append(channel.decode(context, data))
        context.memory.commit()
        return found

    def _channel(self, context: Context, sender: int, receiver: int, rows: int, width: int) -> RowChannel:
        key = (context.bucket, context.chunk, sender, receiver, width)
        if key not in self._channels:
            owner, user = (sender, receiver) if context.chunk == FORWARD else (receiver, sender)
            self._channels[key] = self.method.channel(
                ChannelSetting(
                    name=f"layer {context.bucket}, {WORDS[context.chunk]}, {sender} to {receiver}",
                    boundary=f"layer {context.bucket}, {owner} to {user}",
                    rows=rows,
                    width=width,
                    seed=self._seed,
                    steps=self._steps,
                    kernels=self._kernels,
                    drawn=self.drawn,
                )
            )
        return self._channels[key]
