"""Small numbers that all ranks agree on by their minimum, a bit for each step above zero."""

from __future__ import annotations

import numpy as np
import torch

from gradwire.exchange.codecs.base import Draw, SummableCodec, Summary
from gradwire.exchange.codecs.dense import NoSummary
from gradwire.exchange.deferred_checks import Flag
from gradwire.exchange.wire import ALIGNMENT

__all__ = ["MinimumCodec"]

_UNIT = 8 * ALIGNMENT


class MinimumCodec(SummableCodec):
    """A vector (uint8) of whole numbers from 0 to ``planes``, replaced by its minimum over ranks.

    Bit j of an element says whether it is above j, so that the minimum is a bitwise "and", free of order. A unit is 128
    elements: sixteen bytes a plane.
    """

    grain = 1

    def __init__(self, numel: int, planes: int) -> None:
        self.numel, self.planes = numel, planes
        self.units = -(-numel // _UNIT)

    def summarise(self, flat: torch.Tensor) -> NoSummary:
        return NoSummary()

    def payload_bytes(self, units: int) -> int:
        return ALIGNMENT * self.planes * units

    def mean_bytes(self, units: int) -> int:
        return self.payload_bytes(units)

    def encode(self, flat: torch.Tensor, summary: Summary, draw: Draw, out: torch.Tensor) -> None:
        bits = np.zeros((self.planes, self.units * _UNIT), np.bool_)
        for plane in range(self.planes):
            np.greater(flat.numpy(), plane, out=bits[plane, : self.numel])
        packed = np.packbits(bits, axis=1, bitorder="little").reshape(self.planes, self.units, ALIGNMENT)
        octets = np.ascontiguousarray(packed.transpose(1, 0, 2)).reshape(-1)
        out[: self.payload_bytes(self.units)].copy_(torch.from_numpy(octets))

    def reduce(self, rows: torch.Tensor, begin: int, out: torch.Tensor) -> None:
        out.copy_(rows[0])
        for row in rows[1:]:
            out.bitwise_and_(row)

    def decode_mean(self, data: torch.Tensor, summary: Summary, begin: int, end: int, flat: torch.Tensor) -> None:
        octets = data[: self.payload_bytes(end - begin)].numpy().reshape(-1, self.planes, ALIGNMENT)
        bits = np.unpackbits(octets, axis=2, bitorder="little")
        part = flat[begin * _UNIT : min(end * _UNIT, self.numel)]
        count = bits if self.planes == 1 else np.add.reduce(bits, 1, dtype=np.uint8)
        part.copy_(torch.from_numpy(count.reshape(-1)[: part.numel()]))

    def decode_rows(self, rows: torch.Tensor, summary: Summary, flat: torch.Tensor) -> None:
        total = torch.empty(rows.shape[1], dtype=torch.uint8)
        self.reduce(rows, 0, total)
        self.decode_mean(total, summary, 0, self.units, flat)

    def add_own(self, data: torch.Tensor, summary: Summary, weight: float, flat: torch.Tensor) -> None:
        own = torch.empty(self.numel, dtype=torch.uint8)
        self.decode_mean(data, summary, 0, self.units, own)
        flat.add_(own, alpha=weight)

    def is_finite(self, summary: Summary, flat: torch.Tensor) -> Flag:
        return True
