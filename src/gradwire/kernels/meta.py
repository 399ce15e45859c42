"""A backend that computes nothing: for dry runs on sizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradwire.kernels.base import Moments
from gradwire.kernels.entropy.base import Coder
from gradwire.kernels.entropy.dispatch import get_coder
from gradwire.kernels.families import FAMILIES, known_families
from gradwire.kernels.levels import BlockTable, Grid, summed
from gradwire.kernels.packing.layout import DigitLayout, sum_layout
from gradwire.kernels.signs import RunTable, SignSums
from gradwire.kernels.table import SegmentTable

__all__ = ["MetaKernels"]


class MetaKernels:
    """Accepts tensors on the ``meta`` device (or any other) and leaves every output as it is."""

    name = "meta"

    def moments(self, x: torch.Tensor, table: SegmentTable) -> Moments:
        size = len(table)
        return Moments(
            torch.empty(size, dtype=torch.float32, device="meta"),
            *(torch.empty(size, dtype=torch.float64, device="meta") for _ in range(3)),
        )

    def ternary_encode(
        self,
        x: torch.Tensor,
        table: SegmentTable,
        limit: torch.Tensor,
        inverse: torch.Tensor,
        round: int,
        stream: int,
        begin: int,
        end: int,
        out: torch.Tensor,
    ) -> None:
        pass

    def ternary_sum(self, rows: torch.Tensor, out: torch.Tensor, layout: DigitLayout | None = None) -> None:
        sum_layout(rows.shape[0])

    def pack(self, values: torch.Tensor, world_size: int, out: torch.Tensor) -> None:
        sum_layout(world_size)

    def unpack(self, words: torch.Tensor, world_size: int, out: torch.Tensor) -> None:
        sum_layout(world_size)

    def decode(
        self,
        words: torch.Tensor,
        world_size: int,
        table: SegmentTable,
        scale: torch.Tensor,
        begin: int,
        end: int,
        x: torch.Tensor,
        accumulate: bool = False,
        layout: DigitLayout | None = None,
    ) -> None:
        sum_layout(world_size)

    def quantise(
        self,
        x: torch.Tensor,
        blocks: BlockTable,
        inverse: torch.Tensor,
        grid: Grid,
        layout: DigitLayout,
        round: int,
        stream: int,
        out: torch.Tensor,
    ) -> None:
        pass

    def dequantise(
        self,
        words: torch.Tensor,
        blocks: BlockTable,
        scale: torch.Tensor,
        grid: Grid,
        layout: DigitLayout,
        x: torch.Tensor,
        accumulate: bool = False,
        begin: int = 0,
        end: int | None = None,
    ) -> None:
        pass

    def coder(self, name: str) -> Coder:
        return get_coder(name, "reference")

    def sum_digits(self, rows: torch.Tensor, groups: int, layout: DigitLayout, out: torch.Tensor) -> None:
        summed(layout, rows.shape[0])

    def natural_encode(self, x: torch.Tensor, table: SegmentTable, round: int, stream: int, out: torch.Tensor) -> None:
        pass

    def natural_mean(
        self, rows: torch.Tensor, table: SegmentTable, weight: float, x: torch.Tensor, accumulate: bool = False
    ) -> None:
        pass

    def lattice_encode(
        self,
        x: torch.Tensor,
        table: SegmentTable,
        inverse: torch.Tensor,
        colours: int,
        round: int,
        stream: int,
        shift: int,
        out: torch.Tensor,
    ) -> int:
        return 0

    def lattice_mean(
        self,
        rows: torch.Tensor,
        table: SegmentTable,
        inverse: torch.Tensor,
        scale: torch.Tensor,
        colours: int,
        round: int,
        stream: int,
        shifts: Sequence[int],
        own: torch.Tensor,
        x: torch.Tensor,
        accumulate: bool = False,
    ) -> list[int]:
        return [0] * len(shifts)

    def finite(self, x: torch.Tensor, table: SegmentTable) -> torch.Tensor:
        return torch.empty(len(table), dtype=torch.bool, device="meta")

    def sign_sums(self, x: torch.Tensor, table: SegmentTable) -> SignSums:
        above, below = (torch.empty(len(table), dtype=torch.float64, device="meta") for _ in range(2))
        return SignSums(above, below, torch.empty(len(table), dtype=torch.int64, device="meta"))

    def sign_encode(self, x: torch.Tensor, table: SegmentTable, begin: int, end: int, out: torch.Tensor) -> None:
        pass

    def sign_vote(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        pass

    def sign_decode(
        self,
        rows: torch.Tensor,
        runs: RunTable,
        above: torch.Tensor,
        below: torch.Tensor,
        begin: int,
        end: int,
        x: torch.Tensor,
        accumulate: bool = False,
    ) -> None:
        pass

    def warm_up(self, families: Sequence[str] = FAMILIES) -> float:
        known_families(families)
        return 0.0
