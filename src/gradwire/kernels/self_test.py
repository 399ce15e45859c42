"""A small case for each family of kernels, which compiles all of its functions and compares backends."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import torch

from gradwire.kernels.fourier.blocks import FourierTable
from gradwire.kernels.indices.formats import index_bytes
from gradwire.kernels.lattice.operations import dither_shifts
from gradwire.kernels.levels.grid import BlockTable, Grid
from gradwire.kernels.levels.operations import packed_groups, summed
from gradwire.kernels.levels.shared_random import SharedRandomGrid
from gradwire.kernels.low_rank.operations import MatrixTable
from gradwire.kernels.natural.operations import natural_bytes
from gradwire.kernels.operations import Operations
from gradwire.kernels.packing.layout import digit_layout, packed_bytes
from gradwire.kernels.patches.formats import CHECK, WRITE, WRITE_CHECKED
from gradwire.kernels.rotation.blocks import RotationTable
from gradwire.kernels.signs.operations import RunTable
from gradwire.kernels.table import SIGN_BYTES, SegmentTable

NUMEL = 287
"""Elements of the smallest case."""

_ROUND = 7


@cache
def _case(size: int) -> tuple[torch.Tensor, SegmentTable]:
    """Return ``NUMEL * size`` elements in two segments; both end within a group, one begins within its parameter."""
    x = torch.sin(torch.arange(300.0 * size, dtype=torch.float32, device="cpu") * 1.7)
    return x, SegmentTable([1, 10 + 250 * size], [250 * size, 37 * size], [80, 0], [(1, 2), (3, 4)])


def _moments(kernels: Operations, size: int = 1) -> list[torch.Tensor]:
    moments = kernels.moments(*_case(size))
    # Beside ordinary scales those that have no inverse.
    scale = torch.tensor([0.9, 1 / 3, 3e38, 2.0**-100, 0.0, math.inf, math.nan], dtype=torch.float32, device="cpu")
    return [moments.max_abs, moments.mean, moments.std, moments.norm, kernels.inverse_scale(scale)]


def _ternary(kernels: Operations, size: int = 1) -> list[torch.Tensor]:
    x, table = _case(size)
    limit, inverse = x.new_tensor([0.9, 0.5]), x.new_full((2,), 2.0**24)
    rows = torch.empty(4, 16 * table.groups, dtype=torch.uint8, device="cpu")
    for rank, row in enumerate(rows):
        kernels.ternary_encode(x, table, limit, inverse, _ROUND, rank, 0, table.groups, row)
    results = [rows]
    for world_size in (1, 2, 4):
        words = torch.empty(packed_bytes(80 * table.groups, world_size), dtype=torch.uint8, device="cpu")
        kernels.ternary_sum(rows[:world_size], words)
        decoded = x.clone()
        kernels.decode(words, world_size, table, limit, 0, table.groups, decoded, accumulate=world_size == 1)
        results += [words, decoded]
    return results


def _levels(kernels: Operations, size: int = 1) -> list[torch.Tensor]:
    x, table = _case(size)
    blocks, results = BlockTable(table, 48 if size == 1 else 512), []
    scale = torch.linspace(0.4, 1.1, blocks.blocks, dtype=torch.float32, device="cpu")
    many = Grid.symmetric([2.0**-j for j in range(9, -1, -1)])
    for turn, grid in enumerate((Grid.even(1), Grid.even(4), Grid.even(3), Grid.ordered((-1, 0.1, 1)), many)):
        layout = digit_layout(grid.base)
        rows = torch.empty(2, packed_groups(table.groups, layout), dtype=torch.uint8, device="cpu")
        for rank, row in enumerate(rows):
            kernels.quantise(x, blocks, 2.0**24 / scale, grid, layout, _ROUND, rank, row)
        decoded = x.clone()
        kernels.dequantise(rows[0], blocks, scale, grid, layout, decoded, accumulate=turn % 2 == 1)
        sums = torch.empty(packed_groups(table.groups, summed(layout, 2)), dtype=torch.uint8, device="cpu")
        kernels.sum_digits(rows, table.groups, layout, sums)
        both = x.clone()
        kernels.dequantise(rows, blocks, torch.stack([scale, -scale]), grid, layout, both, accumulate=turn % 2 == 0)
        results += [rows, decoded, sums, both]
    shared = SharedRandomGrid([(j - 8) / 7.0 for j in range(17)], np.sin(np.arange(24.0)).reshape(8, 3))
    integers, layout = torch.arange(blocks.block_size, dtype=torch.uint8, device="cpu") * 5 % 8, digit_layout(3)
    words, total = torch.empty(packed_groups(table.groups, layout), dtype=torch.uint8, device="cpu"), x.clone()
    kernels.quantise_shared(x, blocks, shared, integers, layout, _ROUND, 0, words)
    kernels.add_shared(words, blocks, scale, shared, integers, layout, total)
    return [*results, words, total]


def _natural(kernels: Operations, size: int = 1) -> list[torch.Tensor]:
    x, table = _case(size)
    rows, decoded = torch.empty(3, natural_bytes(table.groups), dtype=torch.uint8, device="cpu"), x.clone()
    for rank, row in enumerate(rows):
        kernels.natural_encode(x, table, _ROUND, rank, row)
    kernels.natural_mean(rows, table, 1 / 3, decoded)
    kernels.natural_mean(rows[:1], table, 0.5, decoded, accumulate=True)
    return [rows, decoded]


def _lattice(kernels: Operations, size: int = 1) -> list[torch.Tensor]:
    x, table = _case(size)
    side, shifts, results = torch.tensor([0.3, 0.2], dtype=torch.float32, device="cpu"), dither_shifts(3), []
    for colours in (8, 16):
        rows = torch.empty(3, packed_groups(table.groups, digit_layout(colours)), dtype=torch.uint8, device="cpu")
        checks = [
            kernels.lattice_encode(x + 0.1 * rank, table, 1 / side, colours, _ROUND, 1, shifts[rank], row)
            for rank, row in enumerate(rows)
        ]
        decoded = x.clone()
        for accumulate in (False, True):
            checks.append(
                kernels.lattice_mean(rows, table, 1 / side, side, colours, _ROUND, 1, shifts, x, decoded, accumulate)
            )
        results += [rows, decoded, torch.cat(checks)]
    return results


def _signs(kernels: Operations, size: int = 1) -> list[torch.Tensor]:
    x, table = _case(size)
    sums, runs = kernels.sign_sums(x, table), RunTable(table, 37 * size)
    rows = torch.empty(3, SIGN_BYTES * table.groups, dtype=torch.uint8, device="cpu")
    for shift, row in enumerate(rows):
        kernels.sign_encode(x.roll(shift), table, 0, table.groups, row)
    values = torch.arange(6.0 * runs.runs, dtype=torch.float32, device="cpu").reshape(2, 3, runs.runs)
    voted = torch.empty_like(rows[0])
    kernels.sign_vote(rows, voted)
    decoded = x.clone()
    for accumulate in (False, True):
        kernels.sign_decode(rows, runs, values[0], values[1], 0, table.groups, decoded, accumulate)
    return [kernels.finite(x, table), sums.above, sums.below, sums.count, rows, voted, decoded]


def _rotation(kernels: Operations, size: int = 1) -> list[torch.Tensor]:
    (x, table), block, results = _case(size), 256 if size == 1 else 4096, []
    blocks = RotationTable(table.offset, table.numel, [3 * block, 0], table.key, block)
    factor = torch.linspace(0.0, 2.0, blocks.blocks, dtype=torch.float32, device="cpu")
    z = x.new_empty(blocks.coordinates)
    # The last one has two digits a byte, which a loop of its own packs.
    eight = (0.1, 0.4, 0.7, 1.0, 1.4, 1.8, 2.3, 3.0)
    for stream, levels in enumerate(((0.5, 1.5), (0.5, 1.5, 4.0, 8.0), (0.8,), eight)):
        kernels.rotate(x, blocks, factor, _ROUND, stream, z)
        grid = Grid.nearest(levels)
        layout = digit_layout(grid.base)
        words = torch.empty(packed_groups(-(-blocks.coordinates // 80), layout), dtype=torch.uint8, device="cpu")
        kept = kernels.encode_rotated(x, blocks, factor, grid, layout, _ROUND, stream, words)
        decoded = x.clone()
        results += [z.clone(), kept, words, decoded]
        kernels.rotate_back(z, blocks, kept, _ROUND, stream, decoded, accumulate=stream == 1)
        kernels.decode_rotated(words, blocks, kept, grid, layout, _ROUND, stream, decoded, accumulate=stream != 1)
    return results


def _selection(kernels: Operations, size: int = 1) -> list[torch.Tensor]:
    x, table = _case(size)
    results = []
    for share in (0.01, 0.1):
        counts = torch.tensor([int(share * n) for n in table.numel.tolist()], device="cpu")
        index = torch.zeros(int(counts.sum()), dtype=torch.int32, device="cpu")
        kernels.select_largest(x, table, counts, index)
        above = torch.zeros_like(index)
        found = kernels.select_above(x, table, x.new_tensor([0.9, 0.99]), counts, above)
        results += [index, above, found]
    # Most values are one of a few, so that more of them equal the threshold than are taken.
    rounded, half = (2 * x).round(), torch.from_numpy(table.numel // 2)
    index = torch.zeros(int(half.sum()), dtype=torch.int32, device="cpu")
    kernels.select_largest(rounded, table, half, index)
    start = x.new_tensor([0.1, 0.9], dtype=torch.float64)
    excess = kernels.excess_sums(x, table, x.new_tensor([0.2, 0.9]), start)
    return [*results, index, excess.count, excess.total, excess.squares]


def _indices(kernels: Operations, size: int = 1) -> list[torch.Tensor]:
    numel, results = NUMEL * size, []
    # The gaps between positions are 0 to 19, 9.5 on average.
    gaps = torch.arange(numel // 11, device="cpu") * 37 % 20
    index = ((gaps + 1).cumsum(0) - 1).to(torch.int32)
    numel = max(numel, int(index[-1]) + 1)
    statistics = kernels.gap_statistics(index, numel)
    results.append(torch.tensor([statistics.largest, *statistics.shifted], device="cpu"))
    for format, parameter in (("bitmap", 0), ("rice", 0), ("rice", 3), ("width", 5)):
        packed = torch.zeros(index_bytes(statistics, format, parameter), dtype=torch.uint8, device="cpu")
        kernels.encode_indices(index, numel, format, parameter, packed)
        back = torch.zeros_like(index)
        kernels.decode_indices(packed, format, parameter, len(index), numel, back)
        results += [packed, back]
    added = torch.cos(torch.arange(float(numel) + 3, dtype=torch.float32, device="cpu"))
    kernels.add_at(added, index, 3, torch.sin(index.to(torch.float32) * 0.7), 1 / 3)
    return [*results, added]


def _sketch(kernels: Operations, size: int = 1) -> list[torch.Tensor]:
    (x, table), results = _case(size), []
    for rows, columns in ((1, 7), (5, 40 * size)):
        sums, estimates = torch.empty(rows * columns, dtype=torch.float32, device="cpu"), x.clone()
        kernels.sketch(x, table, rows, columns, 9, sums)
        kernels.unsketch(sums, table, rows, columns, 9, estimates)
        results += [sums, estimates]
    return results


def _low_rank(kernels: Operations, size: int = 1) -> list[torch.Tensor]:
    x, rank = _case(size)[0], 3 if size == 1 else 2
    wide = 37 if size == 1 else 512
    shapes = [(NUMEL * size // (2 * wide), wide), (13, 8)]
    (rows, columns), small = shapes
    offset, ranks = [1, 2 + rows * columns], [min(rank, rows, columns), 2]
    table = MatrixTable(offset, [rows, small[0]], [columns, small[1]], ranks)
    right = torch.cos(torch.arange(float(table.right_numel), dtype=torch.float32, device="cpu"))
    left = x.new_empty(table.left_numel)
    kernels.multiply_right(x, table, right, left)
    basis = kernels.orthonormalise(left, table, "left")
    kernels.multiply_left(x, table, basis, right)
    product = x.clone()
    kernels.multiply_out(basis, right, table, product)
    results = [left, basis, right.clone(), product.clone(), kernels.orthonormalise(right, table, "right")]
    kernels.multiply_out(basis, right, table, product, -0.5)
    return [*results, product]


def _fourier(kernels: Operations, size: int = 1) -> list[torch.Tensor]:
    x, table = _case(size)
    blocks = FourierTable(table.offset, table.numel, 256 if size == 1 else 4096)
    z, back = torch.empty(blocks.coordinates, dtype=torch.float32, device="cpu"), x.clone()
    kernels.fourier(x, blocks, z)
    kernels.inverse_fourier(z, blocks, back)
    added = back.clone()
    kernels.inverse_fourier(z, blocks, added, accumulate=True)
    return [z, back, added]


def _shifts(kernels: Operations, size: int = 1) -> list[torch.Tensor]:
    x, results = _case(size)[0], list[torch.Tensor]()
    for dtype in (torch.float64, torch.float32):
        # A product with a power of two is exact, so that a CPU without fused multiply-add agrees, too.
        shift, difference, mean = torch.sin(x.to(dtype)), x.clone(), x.clone()
        own, following = torch.empty_like(shift), torch.empty_like(shift)
        kernels.subtract_shift(difference, shift, 2.0)
        kernels.step_shift(shift, x, 0.25, own)
        kernels.step_mean_shift(shift, mean, 0.25, 2.0, following)
        results += [difference, own, mean, following]
    return results


def _patches(kernels: Operations, size: int = 1) -> list[torch.Tensor]:
    x, results, cursor = _case(size)[0], list[torch.Tensor](), torch.zeros(5, dtype=torch.int64, device="cpu")
    old = x.to(torch.bfloat16).view(torch.uint8)[: 2 * NUMEL * size & ~3]
    # Most elements keep their value, some move by one unit in the last place, and a few far.
    step = torch.zeros(len(old), dtype=torch.uint8, device="cpu")
    step[::94], step[7::1000] = 1, 255
    new, block = old ^ step, 64 if size == 1 else 1 << 17
    positions, symbols, extra = (
        torch.zeros(numel, dtype=torch.uint8, device="cpu") for numel in (len(old), len(old), 2 * len(old) + 64)
    )
    for width, floating in ((2, True), (4, True), (1, False)):
        rows = torch.zeros(-(-len(old) // (width * block)), 3, dtype=torch.int64, device="cpu")
        cursor.zero_()
        kernels.find_changes(old, new, width, floating, block, 5, rows, positions, symbols, extra, cursor)
        used = cursor.tolist()
        packed = [positions[: used[1]], symbols[: used[0]], extra[: -(-used[2] // 8)]]
        results += [cursor.clone(), rows, *(part.clone() for part in packed)]
        for mode in (CHECK, WRITE, WRITE_CHECKED):
            base = old.clone()
            cursor.zero_()
            kernels.apply_changes(base, width, floating, block, 5, rows, packed[0], packed[1], packed[2], cursor, mode)
            results += [base, cursor.clone()]
    return [*results, torch.tensor([kernels.word_sum(old, 5) >> 1, kernels.word_sum(new) >> 1], device="cpu")]


def _planes(kernels: Operations, size: int = 1) -> list[torch.Tensor]:
    data, results = _case(size)[0].view(torch.uint8)[: 4 * NUMEL * size & ~7], list[torch.Tensor]()
    for width in (1, 2, 4, 8):
        for floating in (False, True):
            planes, back = data.new_empty(width, len(data) // width), torch.empty_like(data)
            kernels.split_planes(data, width, floating, planes)
            kernels.join_planes(planes, width, floating, back)
            results += [planes, back]
    return results


SELF_TESTS: dict[str, Callable[..., list[torch.Tensor]]] = {
    "moments": _moments,
    "ternary": _ternary,
    "levels": _levels,
    "natural": _natural,
    "lattice": _lattice,
    "signs": _signs,
    "rotation": _rotation,
    "selection": _selection,
    "indices": _indices,
    "sketch": _sketch,
    "low_rank": _low_rank,
    "fourier": _fourier,
    "shifts": _shifts,
    "patches": _patches,
    "planes": _planes,
}
"""Self tests by family: each runs all operations on ``NUMEL * size`` elements, ``size`` being an optional argument."""


def agree(family: str, first: Operations, second: Operations) -> bool:
    """Return whether two backends give the same bits in the self test of a family."""
    return all(torch.equal(a, b) for a, b in zip(*(SELF_TESTS[family](kernels) for kernels in (first, second))))
