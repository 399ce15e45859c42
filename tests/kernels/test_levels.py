"""Rounding to levels: the same bits from every backend, exact on levels, safe on bytes that no encoder writes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import COMPILED, OTHERS, normal, tables, unaligned_bytes

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
LIGHT = settings(max_examples=25)
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
    # Of so many steps a value's own is looked up: signed, with a zero, and without one.
    Grid.ordered(np.sin(np.linspace(-np.pi / 2, np.pi / 2, 32)).tolist()),
    Grid.symmetric(np.sqrt(np.linspace(0, 1, 41)[1:]).tolist()),
    Grid.symmetric((np.linspace(0.1, 1, 30) ** 2).tolist(), zero=False),
]


@pytest.mark.parametrize("name", OTHERS)
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
        rows, scales = torch.stack([expected, expected.flip(0), expected]), torch.stack([scale, -scale, scale / 3])
        apart = torch.cat([rows, rows[:, :16]], 1)[:, : len(expected)]
        for number, (row, factors) in enumerate(zip(rows, scales)):
            REFERENCE.dequantise(row, blocks, factors, grid, layout, a, accumulate or number > 0)
        get_kernels(name).dequantise(apart, blocks, scales, grid, layout, b, accumulate)
        assert torch.equal(a.nan_to_num(7.0, 8.0, 9.0), b.nan_to_num(7.0, 8.0, 9.0))


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


def rounded(x: torch.Tensor, grid: Grid, round: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Round the values of one block, over that scale, to levels and back."""
    table = SegmentTable([0], [x.numel()], [0], [(3, 4)])
    blocks, layout = BlockTable(table, WHOLE), digit_layout(grid.base)
    words, back = torch.empty(packed_groups(table.groups, layout), dtype=torch.uint8), torch.zeros(x.numel())
    kernels = get_kernels("cpu")
    kernels.quantise(x, blocks, inverse_scale(torch.tensor([scale])), grid, layout, round, 0, words)
    kernels.dequantise(words, blocks, torch.tensor([scale]), grid, layout, back)
    return back


@pytest.mark.parametrize("seed", range(4))
def test_any_levels_are_unbiased_and_may_change_signs_only_without_a_zero(seed: int) -> None:
    """ALQ and AMQ 1: any level set, ends exact; next to zero a grid without one has either sign."""
    generator = torch.Generator().manual_seed(seed)
    inner = torch.rand(6, generator=generator).sort().values.double().tolist()
    for grid, zero in (
        (Grid.ordered([-1.0, *sorted([-inner[0], -inner[3], *inner[1:3], inner[5]]), 1.0]), False),
        (Grid.symmetric([*inner, 1.0]), True),
        (Grid.symmetric([*inner, 1.0], zero=False), False),
    ):
        values = torch.tensor([-1.0, -0.9, -0.3, -0.5 * inner[0], 0.0, 0.4 * inner[0], 0.2, 0.77, 1.0])
        draws = 8000
        found = rounded(values.repeat_interleave(draws), grid).view(9, draws).double()
        assert bool((found[0] == -1).all() & (found[8] == 1).all())
        # Neighbouring levels h > r > l: the variance of a draw is (h - r)(r - l), and (gap / 2)^2 at most.
        gap = float(np.diff(grid.values).max())
        assert float((found.mean(1) - values).abs().max()) <= 5 * gap / 2 / draws**0.5
        changed = (found * values[:, None] < 0).any(1)
        assert bool(changed[[3, 5]].all()) == (not zero)
        assert bool((found[4] == 0).all()) == zero


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("grid", GRIDS[-3:], ids=repr)
def test_a_step_that_is_looked_up_is_the_one_that_comparisons_find(name: str, grid: Grid) -> None:
    """At each end of a step and next to it, beyond all steps, and for what is no number."""
    assert grid.columns.cells.last > 0
    ends = torch.from_numpy(np.concatenate([grid.edge, -grid.edge])) / 2**24
    beside = [torch.nextafter(ends, torch.full_like(ends, side)) for side in (-9.0, 9.0)]
    odd = torch.tensor([2.0, -2.0, 1e30, -1e30, torch.inf, -torch.inf, torch.nan, 0.0, -0.0])
    x = torch.cat([ends, *beside, odd])
    table = SegmentTable([0], [len(x)], [0], [(3, 4)])
    blocks, layout = BlockTable(table, WHOLE), digit_layout(grid.base)
    for round in range(5):
        words, others = torch.zeros(2, packed_groups(table.groups, layout), dtype=torch.uint8)
        for kernels, out in ((REFERENCE, words), (get_kernels(name), others)):
            kernels.quantise(x, blocks, torch.tensor([2.0**24]), grid, layout, round, 0, out)
        assert torch.equal(words, others)


def test_even_levels_one_by_one_are_qsgds() -> None:
    """ALQ and AMQ 6: a grid of single levels that are evenly spaced is the law of QSGD; the same bits above zero."""
    x = torch.rand(40_000, generator=torch.Generator().manual_seed(0))
    for s in (1, 3, 8):
        single, even = Grid.ordered(np.linspace(-1, 1, 2 * s + 1).tolist()), Grid.even(s)
        ours, theirs = rounded(x, single), rounded(x, even)
        # A threshold of one is rounded to 2^-24 otherwise than the other's.
        assert int(((ours - theirs).abs() > 1e-6).sum()) <= 2
        ours, theirs = rounded(-x, single), rounded(-x, even)
        assert float((ours + x).square().mean()) == pytest.approx(float((theirs + x).square().mean()), rel=0.03)
        assert abs(float((ours + x).mean())) <= 5 / (2 * s) / 200


def test_one_level_is_terngrads_trit() -> None:
    """QSGD 6, DIANA 6: with the same scale and the same random numbers the same trits, bit for bit."""
    x = normal(40_000, 1)
    scale = x.abs().max()
    table, kernels = SegmentTable([0], [x.numel()], [0], [(3, 4)]), get_kernels("cpu")
    trits = torch.empty(16 * table.groups, dtype=torch.uint8)
    kernels.ternary_encode(
        x, table, torch.tensor([torch.inf]), inverse_scale(scale[None]), 7, 0, 0, table.groups, trits
    )
    theirs = torch.zeros_like(x)
    words = torch.empty(packed_groups(table.groups, digit_layout(3)), dtype=torch.uint8)
    kernels.ternary_sum(trits[None], words)
    kernels.decode(words, 1, table, scale[None], 0, table.groups, theirs)
    ours = rounded(x, Grid.even(1), 7, float(scale))
    assert torch.equal(ours, theirs)
    assert set((ours / scale).tolist()) == {-1.0, 0.0, 1.0}


@pytest.mark.parametrize(
    ("size", "largest", "norm"),
    [(128, 0.109, 1.89), (512, 0.147, 9.45), (1024, 0.161, 19.9), (8192, 0.214, 166), (16384, 0.231, None)],
)
def test_even_points_without_a_zero_on_gaussian_blocks(size: int, largest: float, norm: float | None) -> None:
    """QSGD 5, NUQSGD 9, ALQ and AMQ 8, the columns of programs that have eight points and no zero."""
    grid = Grid.symmetric((1 / 7, 3 / 7, 5 / 7, 1), zero=False)
    rows = torch.randn(max(24, 200_000 // size), size, generator=torch.Generator().manual_seed(size))
    for expected, scales in ((largest, rows.abs().amax(1)), (norm, rows.norm(dim=1))):
        if expected is not None:
            found = [rounded(row, grid, k, float(s)) for k, (row, s) in enumerate(zip(rows, scales))]
            errors = [float((q - row).square().sum() / row.square().sum()) for q, row in zip(found, rows)]
            # Scales of blocks differ by a tenth: in the mean over 24 and more, and two digits of the table, 4 %.
            assert sum(errors) / len(errors) == pytest.approx(expected, rel=0.04)


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
        with pytest.raises(HyperparameterError, match="out is"):
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


def test_scales_that_are_not_contiguous_are_refused() -> None:
    """Vector bodies read their rows one behind the other."""
    table, grid = BlockTable(SegmentTable([0], [320], [0], [(1, 2)]), 80), Grid.even(2)
    layout = digit_layout(grid.base)
    words = torch.zeros((2, layout.packed_bytes(320)), dtype=torch.uint8)
    x, scale = torch.zeros(320), torch.ones((4, 2)).t()
    with pytest.raises(HyperparameterError, match=r"scale is .* a contiguous matrix"):
        get_kernels("cpu").dequantise(words, table, scale, grid, layout, x)
