"""Rotations of blocks: orthogonal, undone by the way back, and the same bits from every backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import BACKENDS, OTHERS, normal

from gradwire.errors import HyperparameterError
from gradwire.kernels import Grid, RotationTable, digit_layout, get_kernels, packed_groups
from gradwire.kernels.packing.layout import unpack_digits

REFERENCE = get_kernels("reference")
LIGHT = settings(max_examples=25)


def one_parameter(numel: int, size: int, key: tuple[int, int] = (11, 22)) -> RotationTable:
    """A single whole parameter."""
    return RotationTable([0], [numel], [0], [key], size)


@st.composite
def rotations(draw: st.DrawFn) -> RotationTable:
    """Up to 6 segments of 0 to 300 or a few thousand elements, with gaps, anywhere in their parameters."""
    size = 2 ** draw(st.integers(8, 13))
    sizes = draw(st.lists(st.one_of(st.integers(0, 300), st.integers(4000, 9000)), max_size=6))
    gaps = draw(st.lists(st.integers(0, 7), min_size=len(sizes), max_size=len(sizes)))
    starts = draw(st.lists(st.integers(0, 2**16), min_size=len(sizes), max_size=len(sizes)))
    word = st.integers(0, 2**32 - 1)
    keys = draw(st.lists(st.tuples(word, word), min_size=len(sizes), max_size=len(sizes)))
    offsets, at = [], 0
    for numel, gap in zip(sizes, gaps):
        offsets.append(at + gap)
        at += gap + numel
    return RotationTable(offsets, sizes, [size * start for start in starts], keys, size)


@pytest.mark.parametrize("name", OTHERS)
@LIGHT
@given(
    table=rotations(),
    seed=st.integers(0, 99),
    shift=st.integers(0, 17),
    round=st.integers(0, 2**64 - 1),
    stream=st.integers(0, 2**32 - 1),
    levels=st.integers(1, 9),
    zero=st.booleans(),
    threads=st.integers(1, 2),
)
def test_every_backend_gives_the_bits_of_the_reference(
    name: str,
    table: RotationTable,
    seed: int,
    shift: int,
    round: int,
    stream: int,
    levels: int,
    zero: bool,
    threads: int,
) -> None:
    kernels, x = get_kernels(name, threads), normal(table.extent + 3, seed, shift, spread=3.0)
    factor = torch.rand(table.blocks, generator=torch.Generator().manual_seed(seed))
    factor[::3] = 0.0
    a, b = torch.full((table.coordinates,), torch.nan), torch.full((table.coordinates + shift,), torch.nan)[shift:]
    REFERENCE.rotate(x, table, factor, round, stream, a)
    kernels.rotate(x, table, factor, round, stream, b)
    assert torch.equal(a.view(torch.int32), b.contiguous().view(torch.int32))
    grid = Grid.nearest([0.1 * 2**j for j in range(levels)], zero=zero)
    layout = digit_layout(grid.base)
    size = packed_groups(-(-table.coordinates // 80), layout)
    words, others = (torch.full((size + shift,), 255, dtype=torch.uint8)[shift:] for _ in range(2))
    kept = REFERENCE.encode_rotated(x, table, factor, grid, layout, round, stream, words)
    assert torch.equal(kept, kernels.encode_rotated(x, table, factor, grid, layout, round, stream, others))
    assert torch.equal(words, others)
    factor[::5], factor[1::5] = torch.inf, -2.5
    for accumulate in (False, True):
        one, other = (normal(table.extent + 3, 1, shift) for _ in range(2))
        before = one.clone()
        REFERENCE.rotate_back(a.clone(), table, factor, round, stream, one, accumulate)
        kernels.rotate_back(b.clone(), table, factor, round, stream, other, accumulate)
        assert torch.equal(one, other)
        REFERENCE.decode_rotated(words, table, factor, grid, layout, round, stream, one, accumulate)
        kernels.decode_rotated(words, table, factor, grid, layout, round, stream, other, accumulate)
        assert torch.equal(one, other)
        touched = torch.zeros(len(one), dtype=torch.bool)
        for offset, numel in zip(table.columns.offset, table.columns.numel):
            touched[offset : offset + numel] = True
        assert torch.equal(other[~touched], before[~touched])


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("levels", range(1, 10))
@pytest.mark.parametrize("name", BACKENDS)
def test_coordinates_between_two_levels_take_the_smaller(name: str, levels: int, zero: bool) -> None:
    """All coordinates of a block that has one element are that element but for their signs."""
    magnitudes = [0.3 * 1.7**j for j in range(levels)]
    grid, kernels = Grid.nearest(magnitudes, zero=zero), get_kernels(name)
    border = torch.from_numpy(grid.edge.copy()) / 2.0**24
    infinite = torch.tensor([torch.inf])
    values = torch.cat([torch.nextafter(border, -infinite), border, torch.nextafter(border, infinite), infinite])
    positive = torch.from_numpy(grid.values.copy())[grid.positive :]
    steps = torch.arange(grid.steps)
    level = positive[torch.cat([steps, steps, steps + 1, torch.tensor([grid.steps])])]
    table, x = one_parameter(256 * len(values), 256), torch.zeros(256 * len(values))
    x[::256] = values
    layout = digit_layout(grid.base)
    words = torch.zeros(packed_groups(-(-table.coordinates // 80), layout), dtype=torch.uint8)
    ones = torch.ones(table.blocks)
    kept = kernels.encode_rotated(x, table, ones, grid, layout, 3, 4, words)
    assert kept.tolist() == pytest.approx((256 * values * level).tolist(), rel=1e-5)
    digits = unpack_digits(words, layout, -(-table.coordinates // 80)).reshape(-1)[: table.coordinates]
    found = torch.from_numpy(grid.values.copy())[digits].abs().reshape(-1, 256)
    assert torch.equal(found, level[:, None].expand(-1, 256))


@pytest.mark.parametrize("size", [256, 512, 4096, 32768])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_rotation_keeps_lengths_and_is_undone(name: str, size: int) -> None:
    """In exact arithmetic both are equations; each of log2(b) additions may round by half a unit of the last place."""
    kernels, table = get_kernels(name), one_parameter(3 * size + 100, size)
    x, z = normal(table.extent, 5), torch.empty(table.coordinates)
    ones = torch.ones(table.blocks)
    kernels.rotate(x, table, ones, 1, 2, z)
    for block, (first, last) in enumerate(zip(table.place, table.place[1:])):
        part = x[block * size : (block + 1) * size].double()
        steps = np.log2(last - first)
        assert float(z[first:last].double().norm() ** 2 / (last - first)) == pytest.approx(
            float(part.norm() ** 2), rel=steps * 2.0**-23
        )
    back = torch.empty_like(x)
    kernels.rotate_back(z, table, 1 / torch.from_numpy(table.sizes).float(), 1, 2, back)
    for block in range(table.blocks):
        part, again = (v[block * size : (block + 1) * size].double() for v in (x, back))
        # Two transforms; errors of the coordinates are spread evenly over the elements.
        assert float((again - part).abs().max()) <= 2 * np.log2(size) * 2.0**-24 * float(part.norm()) / 8


@pytest.mark.parametrize("name", BACKENDS)
def test_a_transform_is_the_matrix_of_hadamard_after_random_signs(name: str) -> None:
    kernels, size = get_kernels(name), 256
    table, hadamard = one_parameter(size, size), np.ones((1, 1))
    while len(hadamard) < size:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    rows = []
    for element in range(size):
        x, z = torch.zeros(size), torch.empty(size)
        x[element] = 1.0
        kernels.rotate(x, table, torch.ones(1), 3, 4, z)
        rows.append(z.numpy())
    signs = np.array(rows)[:, 0]
    assert set(signs.tolist()) == {-1.0, 1.0}
    assert np.array_equal(np.array(rows), signs[:, None] * hadamard)


def test_how_a_parameter_is_cut_does_not_matter() -> None:
    x = normal(5 * 512 * 3 + 77, 4)
    cuts = [(0, 2560), (2560, 2560), (5120, 2560 + 77)]
    begins, lengths = zip(*cuts)
    one, three = one_parameter(len(x), 512), RotationTable(begins, lengths, begins, [(11, 22)] * 3, 512)
    assert (one.blocks, one.coordinates) == (three.blocks, three.coordinates) == (16, 15 * 512 + 256)
    found = []
    for t in (one, three):
        z = torch.empty(t.coordinates)
        get_kernels("auto").rotate(x, t, torch.ones(t.blocks), 5, 6, z)
        found.append(z)
    assert torch.equal(*found)


def test_signs_are_fair_and_differ_by_round_stream_and_parameter() -> None:
    """Each of 2^18 signs is a fair coin: sums stay within five deviations, as do products of two draws."""
    numel, drawn = 1 << 18, []
    for key, round, stream in (((1, 2), 0, 0), ((1, 2), 1, 0), ((1, 2), 0, 1), ((1, 3), 0, 0)):
        table = one_parameter(numel, 256, key)
        # Its inverse finds the signs: where all coordinates but the first are zero, all elements have one magnitude.
        z, signs = torch.zeros(numel), torch.empty(numel)
        z[::256] = 1.0
        get_kernels("auto").rotate_back(z, table, torch.ones(table.blocks), round, stream, signs)
        drawn.append(signs)
    assert all(set(s.unique().tolist()) == {-1.0, 1.0} for s in drawn)
    limit = 5 * len(drawn[0]) ** 0.5
    assert all(abs(float(s.sum())) < limit for s in drawn)
    assert all(abs(float((drawn[0] * s).sum())) < limit for s in drawn[1:])
    assert all(abs(float((drawn[0][lag:] * drawn[0][:-lag]).sum())) < limit for lag in (1, 2, 4, 32, 128))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_factor_of_zero_hides_what_is_not_finite(name: str) -> None:
    table, z = one_parameter(768, 256), torch.empty(768)
    x = torch.ones(768)
    x[3], x[400] = torch.nan, torch.inf
    get_kernels(name).rotate(x, table, torch.tensor([0.0, 0.0, 1.0]), 0, 0, z)
    assert bool((z[:512] == 0).all())
    assert float(z[512:].abs().max()) > 0


@pytest.mark.parametrize("size", [0, 64, 255, 384, 65536])
def test_blocks_that_are_no_powers_of_two_are_refused(size: int) -> None:
    with pytest.raises(HyperparameterError, match="a power of two from 256 to 32768"):
        one_parameter(100, size)


def test_segments_off_the_grid_and_random_levels_are_refused() -> None:
    with pytest.raises(HyperparameterError, match="off its parameter's grid of blocks of 512"):
        RotationTable([0], [100], [80], [(1, 2)], 512)
    table, kernels = one_parameter(256, 256), get_kernels("reference")
    for grid in (Grid.even(3), Grid.ordered((-1, 0.1, 1))):
        words = torch.empty(packed_groups(4, digit_layout(grid.base)), dtype=torch.uint8)
        with pytest.raises(HyperparameterError, match="does not round to the nearest"):
            kernels.encode_rotated(torch.zeros(256), table, torch.ones(1), grid, digit_layout(grid.base), 0, 0, words)
    with pytest.raises(HyperparameterError, match="cannot hold the 4 levels"):
        kernels.decode_rotated(
            torch.zeros(64, dtype=torch.uint8), table, torch.ones(1), Grid.nearest((1.0, 2.0)), digit_layout(3), 0, 0,
            torch.zeros(256),
        )  # fmt: skip
    with pytest.raises(HyperparameterError, match=r"contiguous vector of torch\.float32 with 256 elements"):
        kernels.rotate(torch.zeros(256), table, torch.ones(1), 0, 0, torch.zeros(255))
    with pytest.raises(HyperparameterError, match="ascend strictly"):
        Grid.nearest((1.0, 1.0))
