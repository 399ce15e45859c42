"""CDFGNN: sends the rows that have changed enough since they were last sent."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch

from gradwire.errors import PayloadError
from gradwire.exchange.method import Method, is_number, require
from gradwire.exchange.protocols import Context, Memory
from gradwire.exchange.segments import Parameter, Segment
from gradwire.graphs.halo_method import ChannelSetting, HaloMethod, RowChannel, checked_operator
from gradwire.methods.casts.cast import FP32
from gradwire.methods.gossip.vector_coder import VectorCoder

SENT, RECEIVED = "sent", "received"
"""Kinds of memory: a channel's cached rows at the sender and at the receiver."""

LOSSES = "losses"
"""Name of the value that all workers remember alike: the first and the least loss, float64 ``[2]``."""


@dataclass(frozen=True, kw_only=True)
class CDFGNN(HaloMethod):
    r"""A cache of the rows at both ends: a row h is sent only if it differs enough from the receiver's copy.

    With eps = ``tolerance`` and the cached row q, zeros at first, of a node in one layer and direction::

        |h - q| > eps |h|:    Q(h) is sent, and takes the place of q at both ends
        else:                 the receiver goes on with q

    The sender decides, and tells the receiver by a bit for each row. It caches the decoded row, not h, so that both
    caches hold the same bits after every step, and ``|used - h| <= max(eps |h|, |Q(h) - h|)``. Activations and
    gradients have separate caches. A row that does not decode to finite numbers reaches the receiver and is kept in
    neither cache. Norms are computed in float64.

    With ``tolerance=0`` and ``values=FP32()`` this is full communication. If rows no longer change, such as at a
    learning rate of 0, only the bits are sent after the first step, as long as the error of Q is within the tolerance:
    a row whose quantised copy is further away is sent again in every step.

    With ``adaptive`` the tolerance of step t, counted from 0, falls with the loss L, the sum of the workers' losses
    given to ``next_round``::

        eps_0 = tolerance          eps_t = tolerance max(min(L_0, ..., L_{t-1}), 0) / L_0

    so that rows are coarse while much is to be learned, and the error vanishes as the loss does. It never rises: a loss
    that old rows have made worse does not make them older still. Losses that are not finite are passed over; without a
    positive first loss the tolerance stays. Workers tell each other their losses in float64 and add them up in the
    order of ranks; additions, a product and a quotient round alike everywhere, so that all have the same tolerance in
    every step. The losses that it depends on, the first and the least, are in the state under ``global``.

    The published system adapts eps as well. Its abstract, which is all that was accessible, does not say how: the rule
    is ours. So is the criterion. That system also partitions the graph by cutting vertices instead of edges, for a
    hierarchy of networks; this is not implemented here.

    Args:
        tolerance: eps, at least 0 and below 1. With 1 the initial zeros would be close enough to every row.
        adaptive: Whether eps falls with the loss; the training then gives its loss to ``next_round``.
        values: Q, any operator that :class:`Halo` takes; the rows that are sent to one worker are one vector. With
            ``QSGDinf(block_size=width)``, of a width that is a multiple of 16, each row has a scale.

    Raises:
        HyperparameterError: ``tolerance`` is out of range.
        IncompatibleError: one sender and one receiver cannot use ``values``.

    Wire: a bit a row, the lowest of a byte first, and the section of the operator for the rows that are sent, where
    there are any. With ``adaptive`` a worker also sends a payload of 8 bytes a step to each other one. ``gauges``:
    "refreshed", the share of the rows that are sent.

    Reference: S. Zhang, Z. Jiang, H. You, "CDFGNN: a Systematic Design of Cache-based Distributed Full-Batch Graph
    Neural Network Training with Communication Reduction", 2024.

    Example:
        >>> CDFGNN(tolerance=0.05)
        CDFGNN(tolerance=0.05, adaptive=False, values=FP32())
    """

    tolerance: float = 0.1
    adaptive: bool = False
    values: Method = field(default_factory=FP32)

    name: ClassVar[str] = "cdfgnn"
    tag: ClassVar[int] = 102
    gauges: ClassVar[tuple[str, ...]] = ("refreshed",)

    def __post_init__(self) -> None:
        fits = is_number(self.tolerance, least=0, below=1)
        require(fits, "CDFGNN", f"tolerance is at least 0 and below 1, not {self.tolerance!r}")
        is_flag = isinstance(self.adaptive, bool)
        require(is_flag, "CDFGNN", f"adaptive is True or False, not {self.adaptive!r}")
        checked_operator("CDFGNN", self.values)

    @property
    def kernels(self) -> tuple[str, ...]:
        """Families of kernels that the operator for the values calls."""
        return self.values.traits.kernels

    @property
    def follows_loss(self) -> bool:
        return self.adaptive

    def follow(self, memory: Memory, loss: float) -> None:
        if not math.isfinite(loss):
            return
        held = memory.value(LOSSES)
        first, least = (loss, loss) if held is None else held.tolist()
        memory.stage_value(LOSSES, torch.tensor([first, min(least, loss)], dtype=torch.float64, device="cpu"))

    def tolerance_of(self, memory: Memory) -> float:
        """Return eps of the step that follows the losses in a worker's memory."""
        held = memory.value(LOSSES) if self.adaptive else None
        if held is None:
            return self.tolerance
        first, least = held.tolist()
        return self.tolerance * (max(least, 0.0) / first) if first > 0 else self.tolerance

    def channel(self, setting: ChannelSetting) -> RowChannel:
        return _Cached(self, setting)


class _Cached(RowChannel):
    """Sends bits that say which rows follow, and these rows as one vector."""

    def __init__(self, method: CDFGNN, setting: ChannelSetting) -> None:
        self._method, self._rows, self._width = method, setting.rows, setting.width
        self._segments = [Segment(Parameter(setting.name, self._shape, (self._width, 1)), 0, 0, self._numel)]
        self._coder = VectorCoder(method.values, setting.kernels, setting.name, setting.seed)
        self._bit_bytes = -(-self._rows // 8)

    @property
    def _shape(self) -> tuple[int, int]:
        return self._rows, self._width

    @property
    def _numel(self) -> int:
        return self._rows * self._width

    def most_bytes(self, round: int) -> int:
        return self._bit_bytes + self._coder.most_bytes(self._numel)

    def encode(self, context: Context, rows: torch.Tensor) -> torch.Tensor:
        cache = context.memory.read(SENT, self._segments).view(self._shape)
        norm = rows.double().norm(dim=1)
        change = (rows.double() - cache).norm(dim=1)
        tolerance = self._method.tolerance_of(context.memory)
        # Not "change > ...": a NaN is sent, too, and so is an infinity, which is within any share of itself.
        sent = ~(change <= tolerance * norm) | ~torch.isfinite(norm)
        values = self._coder.encode(rows[sent].reshape(-1), context.round)
        self._keep(context, SENT, cache, sent, self._decoded(values, sent, context.round))
        context.gauge("refreshed", float(sent.sum()), self._rows)
        bits = torch.from_numpy(np.packbits(sent.numpy(), bitorder="little"))
        return torch.cat([bits, values])

    def decode(self, context: Context, data: torch.Tensor) -> torch.Tensor:
        if len(data) < self._bit_bytes:
            raise PayloadError(f"{len(data)} bytes, of which {self._bit_bytes} say which of {self._rows} rows are sent")
        bits = np.unpackbits(data[: self._bit_bytes].numpy(), bitorder="little")
        if bits[self._rows :].any():
            raise PayloadError(f"rows are marked as sent beyond the {self._rows} that there are")
        sent = torch.from_numpy(bits[: self._rows].astype(np.bool_))
        found = self._decoded(data[self._bit_bytes :].clone(), sent, context.round)
        cache = context.memory.read(RECEIVED, self._segments).view(self._shape)
        rows = cache.clone()
        rows[sent] = found
        self._keep(context, RECEIVED, cache, sent, found)
        return rows

    def _decoded(self, values: torch.Tensor, sent: torch.Tensor, round: int) -> torch.Tensor:
        count = int(sent.sum())
        if not count and len(values):
            raise PayloadError(f"{len(values)} bytes of values, but no row is marked as sent")
        return self._coder.decode(values, count * self._width, round).view(count, self._width)

    def _keep(self, context: Context, kind: str, cache: torch.Tensor, sent: torch.Tensor, found: torch.Tensor) -> None:
        staged = context.memory.stage(kind, self._segments).view(self._shape)
        finite = torch.isfinite(found).all(1)
        staged.copy_(cache)
        staged[torch.nonzero(sent).flatten()[finite]] = found[finite]
