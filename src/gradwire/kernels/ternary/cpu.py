"""Moments and trits by Numba, in the two variants of :mod:`gradwire.kernels.cpu`."""

from __future__ import annotations

import numpy as np
import torch

from gradwire.kernels.base import Moments, check_decode, check_encode, check_moments, check_pack, check_sum
from gradwire.kernels.numba_core.compiled import Compiled, segment_of
from gradwire.kernels.packing.divisions import divisions
from gradwire.kernels.packing.layout import DigitLayout
from gradwire.kernels.table import SegmentTable
from gradwire.kernels.ternary import loops

__all__ = ["CpuTernary"]


class CpuTernary(Compiled):
    """See :class:`gradwire.kernels.base.Kernels` for what each method computes."""

    def moments(self, x: torch.Tensor, table: SegmentTable) -> Moments:
        check_moments(x, table)
        variant, size = self._variant("moments"), len(table)
        max_abs = np.empty(size, np.float32)
        mean, std, norm = (np.empty(size) for _ in range(3))
        values = x.detach().numpy()

        def work(first: int, last: int) -> None:
            loops.moments_range(
                variant, values, table.offset, table.numel, first, last, max_abs, mean, std, norm, np.empty(3)
            )

        # Blocks of a segment are added up in order.
        self._split_segments(table, work)
        return Moments(*(torch.from_numpy(column) for column in (max_abs, mean, std, norm)))

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
        check_encode(x, table, limit, inverse, round, stream, begin, end, out)
        variant, values, bytes_ = self._variant("ternary"), x.detach().numpy(), out.numpy()
        bounds = limit.detach().numpy(), inverse.detach().numpy()

        def work(first: int, last: int) -> None:
            loops.encode_range(
                variant, values, table.offset, table.numel, table.start, table.key, table.first_group, *bounds,
                np.uint64(round), np.uint32(stream), begin + first, begin + last, segment_of(table, begin + first),
                bytes_[16 * first : 16 * last],
            )  # fmt: skip

        self._split(end - begin, 1, 80, work)

    def ternary_sum(self, rows: torch.Tensor, out: torch.Tensor, layout: DigitLayout | None = None) -> None:
        layout = check_sum(rows, out, layout)
        number, length = rows.shape
        if length == 0:
            return
        stride = rows.stride(0) if number > 1 else length
        flat = rows.as_strided(((number - 1) * stride + length,), (1,)).numpy()
        variant, target = self._variant("ternary"), out.numpy()

        def work(begin: int, end: int) -> None:
            loops.sum_range(
                variant,
                flat,
                stride,
                number,
                begin,
                end,
                layout.base,
                layout.digits,
                layout.word_bytes,
                target,
            )

        self._split(length, 16 * layout.digits, 5 * number, work)

    def pack(self, values: torch.Tensor, world_size: int, out: torch.Tensor) -> None:
        layout = check_pack(values, world_size, out)
        loops.pack_run(
            self._variant("ternary"), values.numpy(), layout.base, layout.digits, layout.word_bytes, out.numpy()
        )

    def unpack(self, words: torch.Tensor, world_size: int, out: torch.Tensor) -> None:
        layout = check_pack(out, world_size, words)
        reciprocal, _ = divisions(layout)
        loops.unpack_run(
            self._variant("ternary"),
            words.numpy(),
            layout.base,
            layout.digits,
            layout.word_bytes,
            reciprocal,
            out.numpy(),
        )

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
        layout = check_decode(words, world_size, table, scale, begin, end, x, layout)
        variant, (wide, narrow) = self._variant("ternary"), divisions(layout)
        packed, factors, target = words.numpy(), scale.detach().numpy(), x.detach().numpy()

        def work(first: int, last: int) -> None:
            loops.decode_range(
                variant, packed, layout.base, layout.digits, layout.word_bytes, wide, narrow, table.offset,
                table.numel, table.first_group, factors, begin + first, begin + last, first,
                segment_of(table, begin + first), target, accumulate,
            )  # fmt: skip

        self._split(end - begin, layout.digits, 80, work)
