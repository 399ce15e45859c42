"""Sums of packed digits: exact, the same from every backend, safe on bytes that no encoder writes."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import BACKENDS, OTHERS, normal, tables, unaligned_bytes

from gradwire.errors import HyperparameterError
from gradwire.kernels import BlockTable, Grid, SegmentTable, digit_layout, get_kernels, packed_groups, summed
from gradwire.kernels.packing.layout import pack_digits, unpack_digits

REFERENCE = get_kernels("reference")
LIGHT = settings(max_examples=25)


@pytest.mark.parametrize("name", BACKENDS)
@LIGHT
@given(
    base=st.sampled_from([2, 3, 5, 7, 15, 16, 31, 255, 256, 257, 511]),
    number=st.integers(1, 9),
    groups=st.integers(0, 200),
    seed=st.integers(0, 99),
)
def test_sums_are_exact(name: str, base: int, number: int, groups: int, seed: int) -> None:
    layout, generator = digit_layout(base), torch.Generator().manual_seed(seed)
    digits = torch.randint(0, base, (number, 80 * groups), generator=generator)
    rows = torch.zeros(number, packed_groups(groups, layout) + 3, dtype=torch.uint8)[:, 3:]
    for row, values in zip(rows, digits):
        pack_digits(values, layout, row)
    down = summed(layout, number)
    out = unaligned_bytes(packed_groups(groups, down), seed % 5)
    get_kernels(name).sum_digits(rows, groups, layout, out)
    assert torch.equal(unpack_digits(out, down, groups).reshape(-1), digits.sum(0))


@pytest.mark.parametrize("name", OTHERS)
@LIGHT
@given(base=st.sampled_from([3, 7, 15, 31, 257]), number=st.integers(1, 5), seed=st.integers(0, 99))
def test_any_bytes_give_the_bits_of_the_reference(name: str, base: int, number: int, seed: int) -> None:
    layout, groups = digit_layout(base), 97
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 256, (number, packed_groups(groups, layout)), generator=generator).to(torch.uint8)
    outs = [torch.empty(packed_groups(groups, summed(layout, number)), dtype=torch.uint8) for _ in range(2)]
    for kernels, out in zip((REFERENCE, get_kernels(name)), outs):
        kernels.sum_digits(rows, groups, layout, out)
    assert torch.equal(*outs)


@pytest.mark.parametrize("name", BACKENDS)
@LIGHT
@given(table=tables(), parts=st.integers(1, 5), levels=st.sampled_from([1, 7, 31, 300]), seed=st.integers(0, 99))
def test_groups_decode_in_parts(name: str, table: SegmentTable, parts: int, levels: int, seed: int) -> None:
    """A shard decodes by itself to what it is in the whole, also in the middle of a block."""
    grid, blocks = Grid.even(levels), BlockTable(table, 112)
    layout = digit_layout(grid.base)
    whole = torch.randint(0, 256, (packed_groups(table.groups, layout),), dtype=torch.uint8)
    scale = normal(blocks.blocks, seed).abs()
    expected, got = torch.zeros(2, table.extent)
    REFERENCE.dequantise(whole, blocks, scale, grid, layout, expected)
    # Multiples of as many groups as a word has digits are whole blocks of words.
    cuts = [table.groups * part // parts // layout.digits * layout.digits for part in range(parts)] + [table.groups]
    for begin, end in itertools.pairwise(cuts):
        first = layout.packed_bytes(80 * begin)
        words = whole[first : first + packed_groups(end - begin, layout)]
        get_kernels(name).dequantise(words, blocks, scale, grid, layout, got, begin=begin, end=end)
    assert torch.equal(expected, got)


@pytest.mark.parametrize("name", BACKENDS)
def test_sums_that_do_not_fit_are_refused(name: str) -> None:
    kernels, layout = get_kernels(name), digit_layout(65535)
    rows = torch.zeros(2, packed_groups(1, layout), dtype=torch.uint8)
    with pytest.raises(HyperparameterError, match="base 131069"):
        kernels.sum_digits(rows, 1, layout, rows[0])
    with pytest.raises(HyperparameterError, match="rows is"):
        kernels.sum_digits(rows, 2, layout, rows[0])
    with pytest.raises(HyperparameterError, match="out is"):
        kernels.sum_digits(rows[:1], 1, layout, rows[0, 1:])
    table = SegmentTable([0], [80], [0], [(0, 0)])
    with pytest.raises(HyperparameterError, match=r"groups 0\.\.2"):
        kernels.dequantise(
            rows[0], BlockTable(table, 80), torch.ones(1), Grid.even(1), digit_layout(3), torch.ones(80), end=2
        )
