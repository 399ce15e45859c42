"""Rows of the kernel benchmark for sparse methods and methods of a low rank."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch

from gradwire.kernels import Kernels, MatrixTable, SegmentTable, index_bytes
from gradwire.tools.bench.timing import Bench

__all__ = ["SPARSE_GOALS", "bench_low_rank", "bench_sparse"]

SPARSE_GOALS = {
    "select 0.001": 0.70,
    "select 0.01": 0.75,
    "select 0.1": 1.3,
    **{f"{format} {way}": 0.3 for format in ("bitmap", "rice", "width") for way in ("encode", "decode")},
}

DENSITIES = (0.001, 0.01, 0.1)
BLOCK, KEPT = 4096, 64
RANK = 2
SLOW_ELEMENTS = 100_000  # for the reference, which is there to be read


def bench_sparse(bench: Bench, kernels: Kernels, elements: int) -> None:
    """Time the selection of the largest elements beside ``torch.topk``, and encoder and decoder of their positions."""
    if kernels.name == "meta":
        return
    elements = min(elements, SLOW_ELEMENTS) if kernels.name == "reference" else elements
    x = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    x *= torch.exp(0.5 * torch.randn(elements, generator=torch.Generator().manual_seed(1)))
    whole = SegmentTable([0], [elements], [0], [(1, 2)])
    for density in DENSITIES:
        count = max(1, int(density * elements))
        index, counts = torch.zeros(count, dtype=torch.int32), torch.tensor([count])
        select = partial(kernels.select_largest, x, whole, counts, index)
        bench.run(f"select {density:g}", "one", elements, select)
        bench.run(f"torch.topk {density:g}", "one", elements, partial(_topk, x, count))
        threshold = x[index.long()].abs().amin()[None]
        above = partial(kernels.select_above, x, whole, threshold, counts, index)
        bench.run(f"select above, {density:g}", "one", elements, above)
        if density == 0.01:
            _bench_formats(bench, kernels, index, elements)
    blocks = elements // BLOCK
    if blocks:
        nothing = np.zeros(blocks, np.int64)
        table = SegmentTable(np.arange(blocks) * BLOCK, nothing + BLOCK, nothing, np.zeros((blocks, 2), np.uint32))
        index, counts = torch.zeros(KEPT * blocks, dtype=torch.int32), torch.full((blocks,), KEPT)
        select = partial(kernels.select_largest, x, table, counts, index)
        bench.run(f"select {KEPT} of {BLOCK}", "blocks", BLOCK * blocks, select)


def _topk(x: torch.Tensor, count: int) -> torch.Tensor:
    return torch.topk(x.abs(), count, sorted=False).indices


def _bench_formats(bench: Bench, kernels: Kernels, index: torch.Tensor, numel: int) -> None:
    statistics = kernels.gap_statistics(index, numel)
    bench.run("gap statistics", "density 0.01", numel, partial(kernels.gap_statistics, index, numel))
    back = torch.zeros_like(index)
    rice = min(range(31), key=lambda r: index_bytes(statistics, "rice", r))
    for format, parameter in (("bitmap", 0), ("rice", rice), ("width", statistics.largest.bit_length())):
        packed = torch.zeros(index_bytes(statistics, format, parameter), dtype=torch.uint8)
        encode = partial(kernels.encode_indices, index, numel, format, parameter, packed)
        bench.run(f"{format} encode", "density 0.01", numel, encode)
        decode = partial(kernels.decode_indices, packed, format, parameter, len(index), numel, back)
        bench.run(f"{format} decode", "density 0.01", numel, decode)


def bench_low_rank(bench: Bench, kernels: Kernels, elements: int) -> None:
    """Time products of one square matrix and factors of rank 2 beside those of the library."""
    side = math.isqrt(min(elements, SLOW_ELEMENTS) if kernels.name == "reference" else elements)
    if kernels.name == "meta" or not side:
        return
    case, numel = f"{side} x {side}", side * side
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    table = MatrixTable([0], [side], [side], [RANK])
    left, right = torch.ones(RANK * side), torch.ones(RANK * side)
    bench.run("matrix by right factor", case, numel, partial(kernels.multiply_right, x, table, right, left))
    bench.run("left factor by matrix", case, numel, partial(kernels.multiply_left, x, table, left, right))
    matrix, p, q = x.view(side, side), left.view(RANK, side), right.view(RANK, side)
    bench.run("torch.mm, right factor", case, numel, partial(torch.mm, q, matrix.t(), out=p))
    bench.run("torch.mm, left factor", case, numel, partial(torch.mm, p, matrix, out=q))
    left.fill_(1.0)
    right.fill_(1.0)
    out = torch.empty(numel)
    bench.run("product of factors", case, numel, partial(kernels.multiply_out, left, right, table, out))
    bench.run("product of factors, added", case, numel, partial(kernels.multiply_out, left, right, table, out, -1.0))
    bench.run("orthonormal vectors", case, RANK * side, partial(kernels.orthonormalise, left, table, "left"))
