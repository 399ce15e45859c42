"""The codec of trits: groups of eighty elements in sixteen bytes, and their integer sums over workers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.codecs.base import Constant, Draw, SummableCodec, Summary, usable
from gradwire.exchange.deferred_checks import Flag, all_finite
from gradwire.exchange.wire import ALIGNMENT, padded
from gradwire.kernels import Coder, DigitLayout, SegmentTable, byte_layout, digit_layout

if TYPE_CHECKING:
    from gradwire.kernels import Kernels


@dataclass(frozen=True)
class TernarySummary:
    """Scalers s and clipping thresholds of the segments, float32 ``[segments]`` each."""

    shared: torch.Tensor | None
    scale: torch.Tensor
    limit: torch.Tensor

    def select(self, index: Constant, shared: torch.Tensor | None) -> TernarySummary:
        scale = self.scale if shared is None else shared
        here = index.on(scale.device)
        return TernarySummary(self.shared, scale[here], self.limit[here])


class TernaryCodec(SummableCodec):
    """Codec of trits, with one scaler a segment; a unit is a group of 80 elements in sixteen bytes.

    Without shared scalers a payload consists of the float32 scalers, padded to sixteen bytes, and all trits, and only
    :meth:`decode_rows` decodes it.

    Args:
        clip: Clipping threshold in units of ``clip_by``, or None for no clipping.
        clip_by: "rms" or "std".
        shared: True if all workers use the largest scaler.
    """

    def __init__(
        self, kernels: Kernels, table: SegmentTable, world_size: int, *, clip: float | None, clip_by: str, shared: bool
    ) -> None:
        self.kernels, self.table, self.world_size = kernels, table, world_size
        self.clip, self.clip_by, self.shared = clip, clip_by, shared
        # Float64, so that a vector of equal entries has them as its root mean square once rounded to float32.
        self._root_numel = Constant(torch.from_numpy(table.numel.copy()).to(torch.float64).clamp(min=1).sqrt())
        self._first = Constant(table.offset[table.numel > 0])
        self.units = table.groups
        self._lay_out(digit_layout(2 * world_size + 1))
        self.side_bytes = 0 if self.shared else padded(4 * len(table.numel))

    def _lay_out(self, sums: DigitLayout) -> None:
        self.sums = sums
        self.grain = sums.digits // math.gcd(5, sums.digits)

    def use_coder(self, coder: Coder) -> None:
        self.coder = coder
        if self.shared:
            if self.world_size > 127:
                raise IncompatibleError(
                    f"sums over {self.world_size} workers do not fit the bytes that a coder takes: use at most 127 "
                    "workers, share_scaler=False, or no coder"
                )
            self._lay_out(byte_layout(2 * self.world_size + 1))

    def plain_payload_bytes(self, units: int) -> int:
        return self.side_bytes

    def plain_mean_bytes(self, units: int) -> int:
        return 0

    def summarise(self, flat: torch.Tensor) -> TernarySummary:
        moments = self.kernels.moments(flat, self.table)
        scale = moments.max_abs
        limit = torch.full_like(scale, math.inf)
        if self.clip is not None:
            sigma = moments.std if self.clip_by == "std" else moments.norm / self._root_numel.on(flat.device)
            limit = (sigma * self.clip).to(torch.float32)
            # A vector of equal entries has no deviation, and squares of subnormal numbers may be lost: clipping either
            # to zero would lose its gradient for good.
            limit = torch.where(limit > 0, limit, math.inf)
            scale = torch.where(torch.isfinite(scale), torch.minimum(scale, limit), scale)
        scale = usable(scale)
        return TernarySummary(scale if self.shared else None, scale, limit)

    def payload_bytes(self, units: int) -> int:
        return self.side_bytes + ALIGNMENT * units

    def mean_bytes(self, units: int) -> int:
        return self.sums.packed_bytes(80 * units)

    def encode(self, flat: torch.Tensor, summary: Summary, draw: Draw, out: torch.Tensor) -> None:
        ours = ternary(summary)
        if self.side_bytes:
            told = self.told(ours)
            out[: 4 * len(told)].view(torch.float32).copy_(told)
        inverse = self.kernels.inverse_scale(ours.scale)
        body = out[self.side_bytes : self.side_bytes + ALIGNMENT * self.units]
        self.kernels.ternary_encode(flat, self.table, ours.limit, inverse, draw.round, draw.stream, 0, self.units, body)

    def told(self, summary: TernarySummary) -> torch.Tensor:
        """Return the scalers that a payload begins with, if it has any: those of its codes."""
        return summary.scale

    def reduce(self, rows: torch.Tensor, begin: int, out: torch.Tensor) -> None:
        self.kernels.ternary_sum(rows, out, self.sums)

    def decode_mean(self, data: torch.Tensor, summary: Summary, begin: int, end: int, flat: torch.Tensor) -> None:
        scale = ternary(summary).scale * torch.tensor(1.0 / self.world_size, dtype=torch.float32, device="cpu")
        words = data[: self.mean_bytes(end - begin)]
        self.kernels.decode(words, self.world_size, self.table, scale, begin, end, flat, layout=self.sums)

    def decode_rows(self, rows: torch.Tensor, summary: Summary, flat: torch.Tensor) -> None:
        if self.shared:
            total = torch.empty(self.mean_bytes(self.units), dtype=torch.uint8, device=rows.device)
            self.kernels.ternary_sum(rows, total, self.sums)
            self.decode_mean(total, summary, 0, self.units, flat)
            return
        weight = torch.tensor(1.0 / self.world_size, dtype=torch.float32, device="cpu")
        for sender, row in enumerate(rows):
            scale = row[: 4 * len(self.table.numel)].view(torch.float32) * weight
            self._decode_one(row[self.side_bytes :], scale, flat, accumulate=sender > 0)

    def add_own(self, data: torch.Tensor, summary: Summary, weight: float, flat: torch.Tensor) -> None:
        scale = ternary(summary).scale * torch.tensor(weight, dtype=torch.float32, device="cpu")
        self._decode_one(data[self.side_bytes :], scale, flat, accumulate=True)

    def is_finite(self, summary: Summary, flat: torch.Tensor) -> Flag:
        if self.shared:
            return all_finite(ternary(summary).scale)
        return self.starts_finite(flat)

    def starts_finite(self, flat: torch.Tensor) -> Flag:
        """Return whether the first element of each segment is finite: a mean is +inf in whole segments."""
        return all_finite(flat[self._first.on(flat.device)])

    def _decode_one(self, trits: torch.Tensor, scale: torch.Tensor, flat: torch.Tensor, accumulate: bool) -> None:
        body = trits[: ALIGNMENT * self.units]
        self.kernels.decode(body, 1, self.table, scale, 0, self.units, flat, accumulate)


def ternary(summary: Summary) -> TernarySummary:
    """Return a summary of this family.

    Raises:
        TypeError: it is one of another codec.
    """
    if not isinstance(summary, TernarySummary):
        raise TypeError(f"a ternary codec cannot use a {type(summary).__name__}")
    return summary
