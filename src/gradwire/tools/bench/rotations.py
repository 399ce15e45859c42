"""Rows of the kernel benchmark for rotated blocks."""

from __future__ import annotations

from functools import partial

import torch

from gradwire.kernels import Grid, Kernels, RotationTable, digit_layout, packed_groups
from gradwire.tools.bench.timing import Bench

__all__ = ["ROTATION_GOALS", "bench_rotations"]

ROTATION_GOALS = {"rotate": 1.0, "encode rotated, 4 bits": 1.6}

BLOCK = 4096
BITS = (1, 2, 4)
SLOW_ELEMENTS = 100_000  # for the reference, which is there to be read


def bench_rotations(bench: Bench, kernels: Kernels, elements: int) -> None:
    """Time rotations of blocks and back, and encoder and decoder of as many levels as fit some numbers of bits."""
    if kernels.name == "meta":
        return
    elements = min(elements, SLOW_ELEMENTS) if kernels.name == "reference" else elements
    x = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    table = RotationTable([0], [elements], [0], [(1, 2)], BLOCK)
    factor, z, out = torch.full((table.blocks,), BLOCK**-0.5), torch.empty(table.coordinates), torch.zeros(elements)
    run = partial(bench.run, layout=f"blocks of {BLOCK}", elements=elements)
    run("rotate", work=partial(kernels.rotate, x, table, factor, 1, 0, z))
    # Of zeros: it leaves its coordinates spoilt, and many turns on others would end in infinities.
    z.zero_()
    run("rotate back", work=partial(kernels.rotate_back, z, table, factor, 1, 0, out))
    run("rotate back, added", work=partial(kernels.rotate_back, z, table, factor, 1, 0, out, True))
    for bits in BITS:
        # What they are does not change the time.
        grid = Grid.nearest([(j + 0.5) / bits for j in range(2 ** (bits - 1))])
        layout = digit_layout(grid.base)
        words = torch.zeros(packed_groups(-(-table.coordinates // 80), layout), dtype=torch.uint8)
        name = f"rotated, {bits} bit{'s' if bits > 1 else ''}"
        run(f"encode {name}", work=partial(kernels.encode_rotated, x, table, factor, grid, layout, 1, 0, words))
        run(f"decode {name}", work=partial(kernels.decode_rotated, words, table, factor, grid, layout, 1, 0, out))
