"""The Numba backend, in two variants: explicit vectors (``cpu``) and plain loops (``cpu-plain``)."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from gradwire.errors import BackendError
from gradwire.kernels.base import Moments, check_decode, check_encode, check_moments, check_pack, check_sum
from gradwire.kernels.coders.base import Coder
from gradwire.kernels.coders.dispatch import get_coder
from gradwire.kernels.digits import DigitLayout, digit_layout, packed_bytes
from gradwire.kernels.divisions import divisions
from gradwire.kernels.levels import BlockTable, Grid
from gradwire.kernels.natural import natural_bytes
from gradwire.kernels.signs.base import SIGN_BYTES, RunTable
from gradwire.kernels.table import SegmentTable

try:
    from gradwire.kernels import cpu_drivers
    from gradwire.kernels.lattice.cpu import CpuLattice
    from gradwire.kernels.levels.cpu import CpuLevels
    from gradwire.kernels.natural.cpu import CpuNatural
    from gradwire.kernels.signs.cpu import CpuSigns
except ImportError as error:
    raise BackendError(f"kernel backend 'cpu' needs numba ({error}): pip install 'numba>=0.61'") from error

__all__ = ["CpuKernels"]

_MIN_PART = 1 << 16  # elements below which a second thread costs more than it saves


class CpuKernels(CpuLevels, CpuNatural, CpuLattice, CpuSigns):
    """See :class:`gradwire.kernels.base.Kernels` for what each method computes.

    Args:
        vectors: explicit vectors rather than plain loops.
        threads: how many threads share a call; the result has the same bits for any number.
    """

    def __init__(self, vectors: bool = True, threads: int = 1) -> None:
        self.name = "cpu" if vectors else "cpu-plain"
        self._variant = True if vectors else None
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "gradwire-kernels") if threads > 1 else None

    def _split(self, size: int, unit: int, unit_elements: int, work: Callable[[int, int], None]) -> None:
        """Run ``work(begin, end)`` over ``0 .. size``, cut at multiples of ``unit``, on the threads."""
        parts = 1 if self._pool is None else max(1, min(self._threads, size * unit_elements // _MIN_PART))
        if parts == 1 or self._pool is None:
            work(0, size)
            return
        cuts = [size * part // parts // unit * unit for part in range(parts)] + [size]
        for future in [self._pool.submit(work, a, b) for a, b in itertools.pairwise(cuts)]:
            future.result()

    def moments(self, x: torch.Tensor, table: SegmentTable) -> Moments:
        check_moments(x, table)
        size = len(table)
        max_abs = np.empty(size, np.float32)
        mean, std, norm = (np.empty(size) for _ in range(3))
        values = x.detach().numpy()

        def work(begin: int, end: int) -> None:
            # A segment is one thread's, since its blocks are added up in order; cut by elements, not by segments.
            first, last = (int(np.searchsorted(table.first_group, group)) for group in (begin, end))
            last = size if end == table.groups else last
            cpu_drivers.moments_range(
                self._variant, values, table.offset, table.numel, first, last, max_abs, mean, std, norm, np.empty(3)
            )

        self._split(table.groups, 1, 80, work)
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
        values, bytes_, bounds = (
            x.detach().numpy(),
            out.numpy(),
            (limit.detach().numpy(), inverse.detach().numpy()),
        )

        def work(first: int, last: int) -> None:
            cpu_drivers.encode_range(
                self._variant, values, table.offset, table.numel, table.start, table.key, table.first_group, *bounds,
                np.uint64(round), np.uint32(stream), begin + first, begin + last, _segment_of(table, begin + first),
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
        target = out.numpy()

        def work(begin: int, end: int) -> None:
            cpu_drivers.sum_range(
                self._variant,
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
        cpu_drivers.pack_run(self._variant, values.numpy(), layout.base, layout.digits, layout.word_bytes, out.numpy())

    def unpack(self, words: torch.Tensor, world_size: int, out: torch.Tensor) -> None:
        layout = check_pack(out, world_size, words)
        reciprocal, _ = divisions(layout)
        cpu_drivers.unpack_run(
            self._variant,
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
        wide, narrow = divisions(layout)
        packed, factors, target = words.numpy(), scale.detach().numpy(), x.detach().numpy()

        def work(first: int, last: int) -> None:
            cpu_drivers.decode_range(
                self._variant, packed, layout.base, layout.digits, layout.word_bytes, wide, narrow, table.offset,
                table.numel, table.first_group, factors, begin + first, begin + last, first,
                _segment_of(table, begin + first), target, accumulate,
            )  # fmt: skip

        self._split(end - begin, layout.digits, 80, work)

    def coder(self, name: str) -> Coder:
        return get_coder(name, "auto" if self._variant else "cpu-plain")

    def warm_up(self) -> float:
        """Compile every driver, or load it from Numba's cache; return the seconds that took."""
        began = time.perf_counter()
        table = SegmentTable([0], [96], [0], [(1, 2)])
        x, one = torch.linspace(-1, 1, 96), torch.ones(1)
        payload = torch.empty(2, 32, dtype=torch.uint8)
        words = torch.empty(packed_bytes(160, 2), dtype=torch.uint8)
        integers = torch.empty(160, dtype=torch.int32)
        self.moments(x, table)
        for row in payload:
            self.ternary_encode(x, table, one, one * 2.0**24, 0, 0, 0, 2, row)
        self.ternary_sum(payload, words)
        self.decode(words, 2, table, one, 0, 2, x)
        self.unpack(words, 2, integers)
        self.pack(integers, 2, words)
        blocks = BlockTable(table, 16)
        scales = torch.ones(blocks.blocks)
        for grid in (Grid.even(3), Grid.ordered((-1, 0.1, 1))):
            layout = digit_layout(grid.base)
            codes = torch.empty(layout.packed_bytes(160), dtype=torch.uint8)
            self.quantise(x, blocks, scales * 2.0**24, grid, layout, 0, 0, codes)
            self.dequantise(codes, blocks, scales, grid, layout, x)
            self.sum_digits(codes[None], 2, layout, codes)
        codes = torch.empty(natural_bytes(table.groups), dtype=torch.uint8)
        self.natural_encode(x, table, 0, 0, codes)
        self.natural_mean(codes[None], table, 1.0, x)
        codes = torch.empty(80, dtype=torch.uint8)
        self.lattice_encode(x, table, one, 16, 0, 0, 0, codes)
        self.lattice_mean(codes[None], table, one, one, 16, 0, 0, [0], x, x)
        runs, values = RunTable(table, 48), torch.ones(2, 2)
        bits = torch.empty(2, SIGN_BYTES * table.groups, dtype=torch.uint8)
        self.finite(x, table)
        self.sign_sums(x, table)
        for row in bits:
            self.sign_encode(x, table, 0, table.groups, row)
        self.sign_decode(bits, runs, values, values, 0, table.groups, x)
        self.sign_vote(bits, bits[0])
        return time.perf_counter() - began


def _segment_of(table: SegmentTable, group: int) -> int:
    """Find the segment of a group, or any valid start for the search of a group past the last."""
    return max(0, int(np.searchsorted(table.first_group, group, side="right")) - 1) if group < table.groups else 0
