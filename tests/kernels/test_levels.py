"""Rounding to levels: the same bits from every backend, exact on levels, safe on bytes that no encoder writes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import COMPILED, normal, tables, unaligned_bytes

from gradwire.errors import HyperparameterError
from gradwire.kernels import (
    WHOLE,
    BlockTable,
    Grid,
    SegmentTable,
    digit_layout,
    get_kernels,
    inverse_scale,
    packed_groups,
)

REFERENCE = get_kernels("reference")
LIGHT = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
GRIDS = [
    Grid.even(1),
    Grid.even(7),
    Grid.even(127),
    Grid.even(2000),
    Grid.symmetric((0.25, 0.5, 1)),
    Grid.symmetric((0.25, 0.5, 1), zero=False),
    Grid.symmetric([2.0**-j for j in range(30, -1, -1)]),
    Grid.ordered((-1, -0.3, -0.1, 0.01, 0.1, 0.4, 0.6, 1)),
    Grid.ordered((-1, 1)),
]


@pytest.mark.parametrize("name", COMPILED)
@LIGHT
@given(
    table=tables(),
    grid=st.sampled_from(GRIDS),
    block_size=st.sampled_from([16, 64, 112, 512, WHOLE]),
    seed=st.integers(0, 99),
    shift=st.integers(0, 17),
    round=st.integers(0, 2**64 - 1),
    stream=st.integers(0, 2**32 - 1),
)
def test_every_backend_gives_the_bits_of_the_reference(
    name: str, table: SegmentTable, grid: Grid, block_size: int, seed: int, shift: int, round: int, stream: int
) -> None:
    x = normal(table.extent + 3, seed, shift)
    blocks, layout = BlockTable(table, block_size), digit_layout(grid.base)
    scale = REFERENCE.moments(x, blocks.runs()).max_abs.clamp(min=2.0**-100)
    scale[::7] = torch.inf
    expected = torch.zeros(packed_groups(table.groups, layout), dtype=torch.uint8)
    got = unaligned_bytes(expected.numel(), shift)
    REFERENCE.quantise(x, blocks, inverse_scale(scale), grid, layout, round, stream, expected)
    get_kernels(name).quantise(x, blocks, inverse_scale(scale), grid, layout, round, stream, got)
    assert torch.equal(expected, got)
    for accumulate in (False, True):
        a, b = (normal(table.extent + 3, 1, shift) for _ in range(2))
        REFERENCE.dequantise(expected, blocks, scale, grid, layout, a, accumulate)
        get_kernels(name).dequantise(got, blocks, scale, grid, layout, b, accumulate)
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["reference", *COMPILED])
@LIGHT
@given(table=tables(), grid=st.sampled_from(GRIDS), seed=st.integers(0, 99))
def test_bytes_that_no_encoder_writes_decode_to_levels(name: str, table: SegmentTable, grid: Grid, seed: int) -> None:
    blocks, layout = BlockTable(table, 64), digit_layout(grid.base)
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, 256, (packed_groups(table.groups, layout),), generator=generator).to(torch.uint8)
    x = torch.full((table.extent,), 7.0)
    get_kernels(name).dequantise(words, blocks, torch.ones(blocks.blocks), grid, layout, x)
    inside = torch.zeros(table.extent, dtype=torch.bool)
    for offset, numel in zip(table.offset, table.numel):
        inside[offset : offset + numel] = True
    assert bool((x[~inside] == 7).all())
    assert bool(torch.isin(x[inside], torch.from_numpy(grid.values.copy())).all())


@pytest.mark.parametrize("grid", GRIDS, ids=repr)
def test_a_value_on_a_level_stays_there(grid: Grid) -> None:
    """Scale 1 and levels times it are exact in float32, so no draw may move them."""
    levels = torch.from_numpy(grid.values.copy())
    x = levels.repeat(2000 // len(levels) + 1)
    table = SegmentTable([0], [x.numel()], [0], [(3, 4)])
    blocks, layout = BlockTable(table, WHOLE), digit_layout(grid.base)
    if grid.uniform:
        # j / s times s is not always j in float32: only what is exact is promised, and the ends.
        steps = grid.steps
        exact = ((levels * steps) == (levels * steps).round()).repeat(2000 // len(levels) + 1)
    else:
        exact = torch.ones(x.numel(), dtype=torch.bool)
    words = torch.empty(packed_groups(table.groups, layout), dtype=torch.uint8)
    for round in range(20):
        REFERENCE.quantise(x, blocks, torch.tensor([2.0**24]), grid, layout, round, 0, words)
        back = torch.zeros(x.numel())
        REFERENCE.dequantise(words, blocks, torch.ones(1), grid, layout, back)
        assert torch.equal(back[exact], x[exact])
        assert float((back - x).abs().max()) <= float(np.diff(grid.values).max()) * 1.0001


def test_thresholds_never_reach_the_end_of_their_interval() -> None:
    for grid in GRIDS:
        top = grid.edge + np.float32(2**24 - 1) * grid.gap
        values = np.float32(2**24) * (grid.values if grid.signed else grid.values[-grid.steps :])
        assert (top < values[-grid.steps :]).all()


def test_levels_that_make_no_sense_are_refused() -> None:
    for wrong in ((), (0.5,), (0.5, 0.5, 1), (0.0, 1), (1, 0.5), (0.9, 0.95)):
        with pytest.raises(HyperparameterError, match="levels"):
            Grid.symmetric(wrong)
    for wrong in ((-1, 0, 0, 1), (-0.5, 1), (-1, 0.5), (1,)):
        with pytest.raises(HyperparameterError, match="levels"):
            Grid.ordered(wrong)
    with pytest.raises(HyperparameterError, match="multiple of 16"):
        BlockTable(SegmentTable([0], [80], [0], [(0, 0)]), 24)
    table = SegmentTable([0], [80], [0], [(0, 0)])
    grid, words = Grid.even(3), torch.empty(80, dtype=torch.uint8)
    for name in ("reference", *COMPILED):
        with pytest.raises(HyperparameterError, match="words"):
            get_kernels(name).quantise(
                torch.ones(80), BlockTable(table, 16), torch.ones(5), grid, digit_layout(7), 0, 0, words[:-1]
            )
        with pytest.raises(HyperparameterError, match="scale"):
            get_kernels(name).dequantise(
                words[:64], BlockTable(table, 16), torch.ones(4), grid, digit_layout(7), torch.ones(80)
            )


def test_blocks_are_anchored_to_the_parameter() -> None:
    table = SegmentTable([0, 300], [250, 100], [0, 240], [(1, 2), (1, 2)])
    blocks = BlockTable(table, 112)
    assert blocks.first.tolist() == [0, 3, 5]
    runs = blocks.runs()
    # The second segment is elements 240 .. 340 of its parameter: the ends of blocks 2 and 3.
    assert runs.offset.tolist() == [0, 112, 224, 300, 396]
    assert runs.numel.tolist() == [112, 112, 26, 96, 4]
