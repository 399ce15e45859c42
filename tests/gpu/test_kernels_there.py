"""Triton's kernels on a GPU give the bits of the reference."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import test_triton
import torch
from test_checksum import LENGTHS
from test_triton import PARITIES, name_of

from gradwire.kernels import (
    Grid,
    Kernels,
    RotationTable,
    SegmentTable,
    digit_layout,
    get_kernels,
    packed_bytes,
    packed_groups,
)
from gradwire.kernels.backends import reference
from gradwire.kernels.checksum import checksums
from gradwire.kernels.checksum.operations import device_checksums
from gradwire.kernels.rotation.blocks import LEAST_BLOCK, MOST_BLOCK
from gradwire.kernels.triton_core.backend import SERVED, TritonBackend

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("family", SERVED)
def test_the_self_test_of_a_family_passes(family: str) -> None:
    assert TritonBackend(reference()).difference(family, GPU) is None


@pytest.mark.parametrize("parity", PARITIES, ids=name_of)
def test_what_holds_for_other_backends_holds_on_a_gpu(kernels: Kernels, parity: Callable[[str], None]) -> None:
    parity("triton")


def test_rotations_have_the_bits_of_the_reference(kernels: Kernels) -> None:
    test_triton.test_rotations_have_the_bits_of_the_reference(kernels=kernels)


def test_special_values_have_the_bits_of_the_reference(kernels: Kernels) -> None:
    test_triton.test_special_values_have_the_bits_of_the_reference(kernels)


def test_inverses_of_unusual_scales_have_the_bits_of_the_reference(kernels: Kernels) -> None:
    test_triton.test_inverses_of_unusual_scales_have_the_bits_of_the_reference(kernels)


@pytest.mark.parametrize("size", [1 << power for power in range(LEAST_BLOCK.bit_length() - 1, MOST_BLOCK.bit_length())])
def test_blocks_of_every_size_are_rotated(kernels: Kernels, size: int) -> None:
    table = RotationTable([0], [3 * size - 5], [0], [(1, 2)], size)
    x = torch.randn(table.extent, generator=torch.Generator().manual_seed(size))
    factor, grid = torch.rand(table.blocks) + 0.5, Grid.nearest([0.1 * j * j for j in range(1, 9)])
    layout = digit_layout(grid.base)
    found = []
    for chosen in (get_kernels("cpu"), kernels):
        z, back, decoded = torch.zeros(table.coordinates), torch.ones(len(x)), torch.ones(len(x))
        words = torch.zeros(packed_groups(-(-table.coordinates // 80), layout), dtype=torch.uint8)
        chosen.rotate(x, table, factor, 3, 4, z)
        sums = chosen.encode_rotated(x, table, factor, grid, layout, 3, 4, words)
        rotated = z.clone()
        chosen.rotate_back(z, table, factor, 3, 4, back, True)
        chosen.decode_rotated(words, table, factor, grid, layout, 3, 4, decoded, True)
        found.append((rotated, sums, words, back, decoded))
    assert all(torch.equal(one, other) for one, other in zip(*found))


@pytest.mark.parametrize("length", LENGTHS)
def test_checksums_have_the_bits_of_the_reference(length: int) -> None:
    draw = np.random.default_rng(length)
    rows = draw.integers(0, 256, (3, length + 8), np.uint8)
    heads = draw.integers(0, 2**64, (3, 3), np.uint64)
    words = torch.from_numpy(heads.view(np.int64)).to(GPU)
    for begin in (0, 5, 8):
        found = device_checksums(words, torch.from_numpy(rows).to(GPU)[:, begin:])
        assert found.cpu().numpy().view(np.uint64).tolist() == checksums(heads, rows[:, begin:]).tolist()


def test_places_beyond_2_to_the_31_are_reached() -> None:
    """Two segments, the second of them behind 2^31 elements, against that segment alone."""
    behind, numel = (1 << 31) + 4096, 100_003
    if torch.cuda.mem_get_info()[0] < 6 * behind:
        pytest.skip("needs 13 GB of the GPU's memory")
    kernels = Kernels(TritonBackend(reference()))
    both = SegmentTable([0, behind], [behind, numel], [0, 0], [(1, 2), (3, 4)])
    alone = SegmentTable([0], [numel], [0], [(3, 4)])
    x = torch.zeros(behind + numel, device=GPU)
    tail = x[behind:]
    tail.copy_(torch.randn(numel, generator=torch.Generator().manual_seed(0)))
    one, other = kernels.moments(x, both), kernels.moments(tail, alone)
    for name in ("max_abs", "mean", "std", "norm"):
        assert torch.equal(getattr(one, name)[1:], getattr(other, name))
    limits, limit = torch.cat([torch.ones_like(other.max_abs), other.max_abs]), other.max_abs
    begin, end = both.groups - alone.groups, both.groups
    trits = [torch.zeros(16 * alone.groups, dtype=torch.uint8, device=GPU) for _ in range(2)]
    signs = [torch.zeros(10 * alone.groups, dtype=torch.uint8, device=GPU) for _ in range(2)]
    kernels.ternary_encode(x, both, limits, kernels.inverse_scale(limits), 5, 6, begin, end, trits[0])
    kernels.ternary_encode(tail, alone, limit, kernels.inverse_scale(limit), 5, 6, 0, alone.groups, trits[1])
    kernels.sign_encode(x, both, begin, end, signs[0])
    kernels.sign_encode(tail, alone, 0, alone.groups, signs[1])
    assert torch.equal(*trits)
    assert torch.equal(*signs)
    words = torch.zeros(packed_bytes(80 * alone.groups, 1), dtype=torch.uint8, device=GPU)
    kernels.ternary_sum(trits[0].view(1, -1), words)
    expected = torch.zeros(numel, device=GPU)
    kernels.decode(words, 1, alone, limit, 0, alone.groups, expected)
    kernels.decode(words, 1, both, limits, begin, end, x)
    assert torch.equal(tail, expected)
    assert int(expected.count_nonzero()) > 0
