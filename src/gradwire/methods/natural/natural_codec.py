"""The codec of signs and exponents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gradwire.exchange.codecs.base import Codec, Draw, Summary
from gradwire.exchange.codecs.dense import NoSummary
from gradwire.exchange.deferred_checks import Flag, all_finite
from gradwire.kernels import Coder, SegmentTable, natural_bytes, natural_sign_bytes

if TYPE_CHECKING:
    from gradwire.kernels import Kernels

__all__ = ["NaturalCodec"]


class NaturalCodec(Codec):
    """Signs and exponents of many segments; a unit is a group of 80 elements. Powers of two add up in float32 only.

    Exponents are the symbols of a coder; signs, which come first, it could not shorten.
    """

    grain = 1

    def __init__(self, kernels: Kernels, table: SegmentTable, world_size: int) -> None:
        self.kernels, self.table, self.world_size = kernels, table, world_size
        self.units = table.groups

    def use_coder(self, coder: Coder) -> None:
        self.coder = coder

    def plain_payload_bytes(self, units: int) -> int:
        return natural_sign_bytes(units)

    def summarise(self, flat: torch.Tensor) -> NoSummary:
        return NoSummary()

    def payload_bytes(self, units: int) -> int:
        return natural_bytes(units)

    def encode(self, flat: torch.Tensor, summary: Summary, draw: Draw, out: torch.Tensor) -> None:
        self.kernels.natural_encode(flat, self.table, draw.round, draw.stream, out)

    def decode_rows(self, rows: torch.Tensor, summary: Summary, flat: torch.Tensor) -> None:
        self.kernels.natural_mean(rows, self.table, 1.0 / self.world_size, flat)

    def add_own(self, data: torch.Tensor, summary: Summary, weight: float, flat: torch.Tensor) -> None:
        self.kernels.natural_mean(data[None], self.table, weight, flat, accumulate=True)

    def is_finite(self, summary: Summary, flat: torch.Tensor) -> Flag:
        # No scale tells, so every element is looked at, once.
        return all_finite(self.kernels.moments(flat, self.table).max_abs)
