"""Decoding past the caches, which only large calls do, for every alignment of the output."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradwire.kernels import SegmentTable, get_kernels, packed_bytes

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
