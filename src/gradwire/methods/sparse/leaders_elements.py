"""The largest elements of one worker's vector, which it tells all others."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from gradwire.errors import PayloadError
from gradwire.exchange.codecs import Draw
from gradwire.exchange.ops import Exchange
from gradwire.exchange.protocols import Context, broadcast
from gradwire.exchange.protocols.bucket_plan import PlanSetting
from gradwire.exchange.segments import divide
from gradwire.exchange.wire import Packing, Whole, padded
from gradwire.methods.sparse.sparse_codec import LargestRule, SparseCodec, SparseSummary
from gradwire.methods.sparse.sparse_values import NoValues
from gradwire.methods.sparse.units import UnitTable

__all__ = ["FIFTH_EXCHANGE", "LeadersElements"]

Integers: TypeAlias = npt.NDArray[np.int64]

FIFTH_EXCHANGE = 4
"""Number of the exchange of positions: means and what precedes them have the numbers before."""


class LeadersElements:
    """Of each compressed parameter the elements of the largest magnitude of one worker's vector, the same for all.

    They are told in the shortest format of positions, and in the leader's order where that matters: behind the
    positions, for each of them, ascending, its place in that order within its parameter, in as many bits as the places
    of that parameter take, from the lowest of each byte up.

    Args:
        setting: Of the bucket; its backend serves the families "selection" and "indices".
        density: Share of each parameter.
        ordered: Whether elements come in descending order of the leader's values, within each parameter, rather than
            ascending by position.

    Attributes:
        counts: Elements of each parameter.
        numel: Of all of them.
        codec: Writes and reads positions alone.
    """

    def __init__(self, setting: PlanSetting, density: float, *, ordered: bool = False) -> None:
        light = divide(setting.segments)[0]
        units = UnitTable(light, [1] * len(light))
        rule = LargestRule(density)
        self.codec = SparseCodec(setting.kernels, units, 1, rule=rule, block=None, values=NoValues())
        if setting.coder is not None:
            self.codec.use_coder(setting.coder)
        self.counts: list[int] = rule.most(self.codec.blocks).tolist()
        self.numel = sum(self.counts)
        self._ordered = ordered
        self._width = [max(0, (n - 1).bit_length()) for n in self.counts]
        self._order_bytes = -(-sum(n * w for n, w in zip(self.counts, self._width)) // 8) if ordered else 0
        self._ends = list(accumulate(self.counts, initial=0))

    @property
    def packings(self) -> list[Packing]:
        """How positions, and their order where it is told, travel."""
        order: list[Packing] = [Whole(padded(self._order_bytes))] if self._ordered else []
        return [self.codec.packing(self.codec.units), *order]

    def write(self, flat: torch.Tensor, room: torch.Tensor) -> list[torch.Tensor]:
        """Choose elements of ``flat``, and return what tells them, the first part in ``room``."""
        self.codec.encode(flat, SparseSummary(), Draw(0, 0), room)
        if not self._ordered:
            return [room]
        chosen = self.codec.read(room)[0]
        values, place = flat[self.codec.table.places(chosen)], torch.empty(self.numel, dtype=torch.int64)
        for a, b in pairwise(self._ends):
            order = torch.sort(values[a:b], descending=True, stable=True).indices
            place[a:b][order] = torch.arange(b - a)
        owner, bit = self._bits()
        packed = np.packbits((place.numpy()[owner] >> bit & 1).astype(np.uint8), bitorder="little")
        out = torch.zeros(padded(self._order_bytes), dtype=torch.uint8)
        out[: len(packed)] = torch.from_numpy(packed)
        return [room, out]

    def read(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Return the places in the bucket of the elements that are told, in their order, int64.

        Raises:
            PayloadError: the order names an element twice, or there are not as many as there must be.
        """
        chosen, _ = self.codec.read(parts[0])
        if list(self.codec.table.counts(chosen)) != self.counts:
            raise PayloadError(f"positions of {len(chosen)} elements are told, where {self.numel} are needed")
        places = self.codec.table.places(chosen).long()
        if not self._ordered:
            return places
        owner, bit = self._bits()
        bits = np.unpackbits(parts[1].numpy(), count=len(owner), bitorder="little").astype(np.int64)
        place = np.zeros(self.numel, np.int64)
        np.add.at(place, owner, bits << bit)
        place += np.repeat(self._ends[:-1], self.counts)
        if not np.array_equal(np.sort(place), np.arange(self.numel)):
            raise PayloadError("the order of elements names one of them twice")
        ordered = torch.empty_like(places)
        ordered[torch.from_numpy(place)] = places
        return ordered

    def run(self, context: Context, tag: int, flat: torch.Tensor, root: int) -> Exchange[torch.Tensor]:
        """Return the places in the bucket of the largest elements of rank ``root``'s ``flat``, on every rank.

        Bytes sent by a rank: header + positions, and their order where it is told, as often as a broadcast says.
        """
        if not self.numel:
            return torch.empty(0, dtype=torch.int64)
        space, bodies = context.workspace.part("leader"), None
        if context.rank == root and not flat.is_meta:
            bodies = self.write(flat, space.get("positions", self.codec.payload_bytes(self.codec.units)))
        context = replace(context, workspace=space, exchange=FIFTH_EXCHANGE)
        parts = yield from broadcast(context, tag, self.packings, bodies, root)
        return torch.empty(0, dtype=torch.int64) if flat.is_meta else self.read(parts)

    def _bits(self) -> tuple[Integers, Integers]:
        """Return of each bit of the order whose element's it is, and its place in that number."""
        width = np.repeat(self._width, self.counts)
        owner = np.repeat(np.arange(self.numel), width)
        return owner, np.arange(len(owner)) - np.repeat(np.cumsum(width) - width, width)
