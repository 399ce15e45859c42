"""CDFGNN: sends the rows that have changed enough since they were last sent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch

from gradwire.errors import PayloadError
from gradwire.exchange.method import Method, is_number, require
from gradwire.exchange.protocols import Context
from gradwire.exchange.segments import Parameter, Segment
from gradwire.graphs.halo_method import ChannelSetting, HaloMethod, RowChannel, checked_operator
from gradwire.methods.casts.cast import FP32
from gradwire.methods.gossip.vector_coder import VectorCoder

SENT, RECEIVED = "sent", "received"
"""Kinds of memory: a channel's cached rows at the sender and at the receiver."""


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

    The published system also adapts eps during the training, by a rule that is not published, and partitions the graph
    by cutting vertices instead of edges, for a hierarchy of networks. Neither is implemented here.

    Args:
        tolerance: eps, at least 0 and below 1. With 1 the initial zeros would be close enough to every row.
        values: Q, any operator that :class:`Halo` takes; the rows that are sent to one worker are one vector. With
            ``QSGDinf(block_size=width)``, of a width that is a multiple of 16, each row has a scale.

    Raises:
        HyperparameterError: ``tolerance`` is out of range.
        IncompatibleError: one sender and one receiver cannot use ``values``.

    Wire: a bit a row, the lowest of a byte first, and the section of the operator for the rows that are sent, where
    there are any. ``gauges``: "refreshed", the share of the rows that are sent.

    Reference: S. Zhang, Z. Jiang, H. You, "CDFGNN: a Systematic Design of Cache-based Distributed Full-Batch Graph
    Neural Network Training with Communication Reduction", 2024.

    Example:
        >>> CDFGNN(tolerance=0.05)
        CDFGNN(tolerance=0.05, values=FP32())
    """

    tolerance: float = 0.1
    values: Method = field(default_factory=FP32)

    name: ClassVar[str] = "cdfgnn"
    tag: ClassVar[int] = 102
    gauges: ClassVar[tuple[str, ...]] = ("refreshed",)

    def __post_init__(self) -> None:
        fits = is_number(self.tolerance, least=0, below=1)
        require(fits, "CDFGNN", f"tolerance is at least 0 and below 1, not {self.tolerance!r}")
        checked_operator("CDFGNN", self.values)

    @property
    def kernels(self) -> tuple[str, ...]:
        """Families of kernels that the operator for the values calls."""
        return self.values.traits.kernels

    def channel(self, setting: ChannelSetting) -> RowChannel:
        return _Cached(self, setting)


class _Cached(RowChannel):
    """Sends bits that say which rows follow, and these rows as one vector."""

    def __init__(self, method: CDFGNN, setting: ChannelSetting) -> None:
        self._tolerance, self._rows, self._width = method.tolerance, setting.rows, setting.width
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
        # Not "change > ...": a NaN is sent, too, and so is an infinity, which is within any share of itself.
        sent = ~(change <= self._tolerance * norm) | ~torch.isfinite(norm)
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
