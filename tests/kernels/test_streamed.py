"""What is written past the caches, as only large calls do, for every alignment of the output."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradwire.kernels import Grid, RotationTable, SegmentTable, digit_layout, get_kernels, packed_bytes, packed_groups

SIZES = (37, 80 * 4200 + 13, 1279, 1280, 80 * 17, 5000, 1, 80 * 33 + 79)


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("backend", ["cpu", "cpu-plain"])
def test_that_streamed_decoding_has_the_same_bits_at_any_alignment(backend: str, world_size: int) -> None:
    offset = np.concatenate([[1], 1 + np.cumsum(np.array(SIZES[:-1]) + 1)])
    table = SegmentTable(offset, np.array(SIZES), np.zeros(len(SIZES)), [(1, 2)] * len(SIZES))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 243, (world_size, 16 * table.groups), dtype=torch.uint8, generator=generator)
    words = torch.zeros(packed_bytes(80 * table.groups, world_size), dtype=torch.uint8)
    reference, kernels = get_kernels("reference"), get_kernels(backend)
    reference.ternary_sum(rows, words)
    scale = torch.rand(len(table), generator=generator)
    expected = torch.full((table.extent + 1,), 7.0)
    reference.decode(words, world_size, table, scale, 0, table.groups, expected)
    for shift in range(16):
        # What lies between segments and after them stays 7.
        x = torch.full((table.extent + 1 + shift,), 7.0)
        kernels.decode(words, world_size, table, scale, 0, table.groups, x[shift:])
        assert torch.equal(x[shift:], expected)
        assert bool((x[:shift] == 7.0).all())


@pytest.mark.parametrize("size", [256, 512, 4096, 8192, 32768])
@pytest.mark.parametrize("backend", ["cpu", "cpu-plain"])
def test_that_streamed_rotations_have_the_same_bits_at_any_alignment(backend: str, size: int) -> None:
    numel = (80 * 4200, 37, 5000)
    table = RotationTable([3, 80 * 4200 + 8, 80 * 4200 + 50], numel, [0] * 3, [(1, 2), (3, 4), (5, 6)], size)
    reference, kernels = get_kernels("reference"), get_kernels(backend)
    source, factor = torch.randn(table.extent + 16), torch.rand(table.blocks)
    z, back, decoded = (
        torch.empty(table.coordinates),
        torch.full((table.extent,), 7.0),
        torch.full((table.extent,), 7.0),
    )
    reference.rotate(source, table, factor, 1, 2, z)
    reference.rotate_back(z.clone(), table, factor, 1, 2, back)
    grid = Grid.nearest((0.5, 1.5))
    layout = digit_layout(grid.base)
    words = torch.zeros(packed_groups(-(-table.coordinates // 80), layout), dtype=torch.uint8)
    reference.encode_rotated(source, table, factor, grid, layout, 1, 2, words)
    reference.decode_rotated(words, table, factor, grid, layout, 1, 2, decoded)
    # Coordinates begin with a whole cache line at shift 0, and so does the first segment, at 3, at shift 13.
    for shift in (0, 1, 13):
        room = torch.full((table.coordinates + 32,), 7.0)
        kernels.rotate(source, table, factor, 1, 2, room[shift : shift + table.coordinates])
        assert torch.equal(room[shift : shift + table.coordinates], z)
        assert bool((room[:shift] == 7.0).all() and (room[shift + table.coordinates :] == 7.0).all())
        for expected, work in (
            (back, lambda x: kernels.rotate_back(z.clone(), table, factor, 1, 2, x)),
            (decoded, lambda x: kernels.decode_rotated(words, table, factor, grid, layout, 1, 2, x)),
        ):
            x = torch.full((table.extent + shift,), 7.0)
            work(x[shift:])
            assert torch.equal(x[shift:], expected)
            assert bool((x[:shift] == 7.0).all())
