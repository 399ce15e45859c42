"""Digits with random integers that the receiver shares: the same bits from every backend, and what they stand for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import BACKENDS, OTHERS, normal, tables, unaligned_bytes

from gradwire.errors import HyperparameterError
from gradwire.kernels import BlockTable, SegmentTable, SharedRandomGrid, digit_layout, get_kernels, packed_groups

REFERENCE = get_kernels("reference")


def grid_of(base: int, integers: int, reach: float = 2.0) -> SharedRandomGrid:
    """Return points that lie the closer the nearer they are to the middle, and any values."""
    count = (base - 1) * integers
    points = np.linspace(-1, 1, count + 1)
    values = np.sin(np.arange(float(integers * base))).reshape(integers, base)
    return SharedRandomGrid((reach * (points + points**3) / 2).tolist(), values)


def integers_of(grid: SharedRandomGrid, places: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, grid.integers, (places,), generator=generator).to(torch.uint8)


@pytest.mark.parametrize("name", OTHERS)
@settings(max_examples=25)
@given(
    table=tables(),
    shape=st.sampled_from([(2, 32), (4, 16), (16, 8), (3, 1), (7, 2), (2, 1)]),
    block_size=st.sampled_from([16, 112, 512, 4096]),
    seed=st.integers(0, 99),
    shift=st.integers(0, 17),
    round=st.integers(0, 2**64 - 1),
    stream=st.integers(0, 2**32 - 1),
)
def test_every_backend_gives_the_bits_of_the_reference(
    name: str, table: SegmentTable, shape: tuple[int, int], block_size: int, seed: int, shift: int, round: int,
    stream: int,
) -> None:  # fmt: skip
    grid, x = grid_of(*shape), normal(table.extent + 3, seed, shift)
    blocks, layout, integers = BlockTable(table, block_size), digit_layout(grid.base), integers_of(grid, block_size)
    expected = torch.zeros(packed_groups(table.groups, layout), dtype=torch.uint8)
    found = unaligned_bytes(len(expected), shift)
    for kernels, out in ((REFERENCE, expected), (get_kernels(name), found)):
        kernels.quantise_shared(x, blocks, grid, integers, layout, round, stream, out)
    assert torch.equal(expected, found)
    scale = normal(blocks.blocks, seed)
    scale[::7] = torch.inf
    hostile = torch.randint(0, 256, found.shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    for words in (found, hostile):
        one, other = (normal(table.extent + 3, 1, shift) for _ in range(2))
        REFERENCE.add_shared(words, blocks, scale, grid, integers, layout, one)
        get_kernels(name).add_shared(words, blocks, scale, grid, integers, layout, other)
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", BACKENDS)
def test_points_become_the_digits_of_their_integers(name: str) -> None:
    """A value on a point stays there: digits are floor((g + h) / H), and what lies beyond counts as the end."""
    kernels, grid = get_kernels(name), grid_of(4, 8, reach=1.0)
    points = torch.from_numpy(grid.points.values.copy())
    g = torch.arange(25).repeat(8)
    x, size = points[g], 256
    x[g == 0] -= 7.0
    x[g == 24] *= 1e30
    table = SegmentTable([0], [len(x)], [0], [(3, 4)])
    blocks, layout, h = BlockTable(table, size), digit_layout(4), integers_of(grid, size)
    words, total = torch.zeros(packed_groups(table.groups, layout), dtype=torch.uint8), torch.full((len(x),), 100.0)
    kernels.quantise_shared(x, blocks, grid, h, layout, 1, 2, words)
    kernels.add_shared(words, blocks, torch.tensor([2.0]), grid, h, layout, total)
    own = h[: len(x)].long()
    assert torch.equal(total, 100 + torch.from_numpy(grid.values.copy())[own, (g + own) // 8] * 2)


@pytest.mark.parametrize("name", BACKENDS)
def test_what_fills_up_a_group_is_a_fair_coin(name: str) -> None:
    """Of 6000 digits past the ends of segments each is the middle or one less; half of them, within five deviations."""
    kernels, grid, many = get_kernels(name), grid_of(4, 8), 100
    table = SegmentTable(np.arange(many) * 20, [20] * many, [0] * many, [(1, k) for k in range(many)])
    layout, h = digit_layout(4), integers_of(grid, 256)
    words = torch.zeros(packed_groups(table.groups, layout), dtype=torch.uint8)
    kernels.quantise_shared(torch.ones(20 * many), BlockTable(table, 256), grid, h, layout, 1, 2, words)
    # Each as a segment of its own, whose digits are read with the values -1 to 2 and h = 0.
    whole = BlockTable(SegmentTable([0], [80 * many], [0], [(0, 0)]), 256)
    plain = SharedRandomGrid([-1.0, -0.5, 0.0, 1.0], np.array([[-1.0, 0.0, 1.0, 2.0]]))
    found, none = torch.zeros(80 * many), torch.zeros(256, dtype=torch.uint8)
    kernels.add_shared(words, whole, torch.ones(whole.blocks), plain, none, layout, found)
    after = found.view(many, 80)[:, 20:]
    assert set(after.unique().tolist()) == {0.0, 1.0}
    assert abs(float(after.sum()) - 3000) < 5 * 6000**0.5 / 2


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(HyperparameterError, match="3 integers: a power of two up to 256"):
        SharedRandomGrid([-1.0, 0, 0.5, 1], np.zeros((3, 2)))
    with pytest.raises(HyperparameterError, match="4 points do not make 2 digits with 4 integers"):
        SharedRandomGrid([-1.0, 0, 0.5, 1], np.zeros((4, 2)))
    with pytest.raises(HyperparameterError, match="levels ascend strictly"):
        SharedRandomGrid([-1.0, 0, 2.0], np.zeros((2, 2)))
    grid, table = grid_of(2, 4), BlockTable(SegmentTable([0], [80], [0], [(0, 0)]), 16)
    words, layout = torch.zeros(16, dtype=torch.uint8), digit_layout(2)
    for wrong, message in ((torch.full((16,), 4), "an integer is 4"), (torch.zeros(15), "integers is")):
        with pytest.raises(HyperparameterError, match=message):
            REFERENCE.quantise_shared(torch.ones(80), table, grid, wrong.to(torch.uint8), layout, 0, 0, words)
    with pytest.raises(HyperparameterError, match="digits of base 3 cannot hold the 2 levels"):
        REFERENCE.add_shared(
            words, table, torch.ones(5), grid, torch.zeros(16, dtype=torch.uint8), digit_layout(3), torch.ones(80)
        )
