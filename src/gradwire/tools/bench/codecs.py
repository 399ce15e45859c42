"""Rows of the kernel benchmark for coders, rotations, selection, low-rank products, and whole methods."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch

from gradwire.exchange.drivers import LocalProfiler
from gradwire.exchange.planning import Options, Planner
from gradwire.kernels import (
    GROUP_SIZE,
    Grid,
    Kernels,
    MatrixTable,
    RotationTable,
    SegmentTable,
    digit_layout,
    index_bytes,
    inverse_scale,
    packed_groups,
)
from gradwire.kernels.entropy import CODERS
from gradwire.kernels.entropy.select import SAMPLE, select, variant_calls
from gradwire.methods.registry import METHODS
from gradwire.tools.bench.timing import Bench

CODER_GOALS = {"rans encode": 0.20, "rans decode": 0.15, "huffman encode": 0.25, "huffman decode": 0.28}
ROTATION_GOALS = {"rotate": 1.0, "encode rotated, 4 bits": 1.6}
SPARSE_GOALS = {
    "select 0.001": 0.70,
    "select 0.01": 0.75,
    "select 0.1": 1.3,
    **{f"{format} {way}": 0.3 for format in ("bitmap", "rice", "width") for way in ("encode", "decode")},
}
"""Times as shares of a memcpy that are aimed at."""

SLOW_ELEMENTS = 100_000
"""Most elements for the reference, which is written to be read."""

ROTATED_BLOCK = 4096
BITS = (1, 2, 4)
DENSITIES = (0.001, 0.01, 0.1)
BLOCK, KEPT = 4096, 64
RANK = 2

WORKERS = 4
MLP = ((10,), (10, 2048), (2048,), (2048, 2048), (2048,), (2048, 2048), (2048,), (2048, 784))
"""Shapes of the step benchmark's MLP, last layer first."""


def trits_of_a_gaussian(kernels: Kernels, elements: int, clip: float | None) -> torch.Tensor:
    """Encode a Gaussian, clipped at ``clip`` standard deviations or scaled by its maximum, five trits a byte."""
    x = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    table = SegmentTable([0], [elements], [0], [(1, 2)])
    moments = kernels.moments(x, table)
    limit = moments.max_abs if clip is None else torch.minimum(moments.max_abs, (clip * moments.std).float())
    out = torch.empty(16 * table.groups, dtype=torch.uint8)
    kernels.ternary_encode(x, table, limit, inverse_scale(limit), 1, 0, 0, table.groups, out)
    return out


def bench_coders(bench: Bench, kernels: Kernels, elements: int) -> None:
    """Time encoder and decoder of every coder with the backend of ``kernels``; elements are trits."""
    if kernels.name == "meta":
        return
    elements = min(elements, SLOW_ELEMENTS) if kernels.name == "reference" else elements
    for layout, clip in (("clip 2.5", 2.5), ("clip none", None)):
        symbols = trits_of_a_gaussian(kernels, elements // GROUP_SIZE * GROUP_SIZE, clip)
        for name in CODERS:
            coder = kernels.coder(name)
            room, back = torch.zeros(coder.bound(len(symbols)), dtype=torch.uint8), torch.zeros_like(symbols)
            section = room[: coder.encode(symbols, room)].clone()
            inner = max(1, 2_000_000 // elements)
            bench.run(f"{name} encode", layout, 5 * len(symbols), partial(coder.encode, symbols, room), inner)
            bench.run(f"{name} decode", layout, 5 * len(symbols), partial(coder.decode, section, back), inner)


def bench_coder_choices(bench: Bench) -> None:
    """Time every variant of the coders' parts on the input by which "auto" chooses, and mark the chosen one."""
    for name in CODERS:
        for part, call_of in variant_calls(name).items():
            for variant, call in call_of.items():
                bench.run(f"{name} {part} of 64 KiB", variant, 5 * SAMPLE, call, inner=20)
                bench.rows[-1]["chosen"] = variant == getattr(select(name).variants, part)


def bench_rotations(bench: Bench, kernels: Kernels, elements: int) -> None:
    """Time rotations of blocks and back, and encoder and decoder of as many levels as fit some numbers of bits."""
    if kernels.name == "meta":
        return
    elements = min(elements, SLOW_ELEMENTS) if kernels.name == "reference" else elements
    x = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    table = RotationTable([0], [elements], [0], [(1, 2)], ROTATED_BLOCK)
    factor, z, out = (
        torch.full((table.blocks,), ROTATED_BLOCK**-0.5),
        torch.empty(table.coordinates),
        torch.zeros(elements),
    )
    run = partial(bench.run, layout=f"blocks of {ROTATED_BLOCK}", elements=elements)
    run("rotate", work=partial(kernels.rotate, x, table, factor, 1, 0, z))
    # The function overwrites its coordinates, and repeated calls on anything but zeros would end in infinities.
    z.zero_()
    run("rotate back", work=partial(kernels.rotate_back, z, table, factor, 1, 0, out))
    run("rotate back, added", work=partial(kernels.rotate_back, z, table, factor, 1, 0, out, True))
    for bits in BITS:
        # The values of the levels do not change the time.
        grid = Grid.nearest([(j + 0.5) / bits for j in range(2 ** (bits - 1))])
        layout = digit_layout(grid.base)
        words = torch.zeros(packed_groups(-(-table.coordinates // 80), layout), dtype=torch.uint8)
        name = f"rotated, {bits} bit{'s' if bits > 1 else ''}"
        run(f"encode {name}", work=partial(kernels.encode_rotated, x, table, factor, grid, layout, 1, 0, words))
        run(f"decode {name}", work=partial(kernels.decode_rotated, words, table, factor, grid, layout, 1, 0, out))


def bench_sparse(bench: Bench, kernels: Kernels, elements: int) -> None:
    """Time the selection of the largest elements and ``torch.topk``, and encoder and decoder of positions."""
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
    """Time products of a square matrix with factors of rank 2, and PyTorch's own."""
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


def bench_methods(bench: Bench, kernels: Kernels, elements: int) -> None:
    """Time the local work of a step by each method's defaults: statistics, encoder, reduction, decoder and memory.

    The parameters are those of an MLP of 10 M elements, cut to ``elements``; small ones are left out. Transfers are not
    included, but work on peers' payloads is: three of them where all are gathered.
    """
    if kernels.name == "meta":
        return
    most = min(elements, SLOW_ELEMENTS) if kernels.name == "reference" else elements
    share = min(1.0, most / sum(map(math.prod, MLP)))
    # Each parameter keeps the same share of its rows, the first ones.
    shapes = [(int(share * rows), *rest) for rows, *rest in MLP]
    shapes = [shape for shape in shapes if math.prod(shape) >= 1024]
    parameters = {f"p{i}": torch.empty(shape, device="meta") for i, shape in enumerate(shapes)}
    flat = torch.randn(sum(map(math.prod, shapes)), generator=torch.Generator().manual_seed(0))
    # On two levels (sharded) the work is that of the inner method.
    for method in (method for method in (kind() for kind in METHODS) if not method.traits.sharded):
        planner = Planner(method, parameters, WORKERS, Options(backend=kernels.name))
        planner.compile()
        rehearsal = LocalProfiler(planner.plan(planner.step_order(), 0), flat, WORKERS)
        rehearsal.play()
        bench.take(f"step of {method.name}", "mlp", flat.numel(), partial(_seconds, rehearsal))


def _seconds(rehearsal: LocalProfiler) -> float:
    return sum(stage.work_s for job in rehearsal.play() for stage in job)
