"""Every backend gives the bits of the reference, and touches nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import BACKENDS, COMPILED, OTHERS, normal, one_segment, packed_sums, tables, unaligned_bytes

from gradwire.kernels import FAMILIES, SegmentTable, get_kernels, inverse_scale, packed_bytes, self_test
from gradwire.kernels.numba_core import compiled

Work = Callable[[int, int], None]
REFERENCE = get_kernels("reference")
LIGHT = settings(max_examples=25)


@pytest.mark.parametrize("name", OTHERS)
@LIGHT
@given(table=tables(), seed=st.integers(0, 99), shift=st.integers(0, 17))
def test_moments_have_the_bits_of_the_reference(name: str, table: SegmentTable, seed: int, shift: int) -> None:
    x = normal(table.extent + 3, seed, shift, spread=3.0)
    expected, got = REFERENCE.moments(x, table), get_kernels(name).moments(x, table)
    assert torch.equal(expected.max_abs, got.max_abs)
    assert torch.equal(expected.mean, got.mean)
    assert torch.equal(expected.std, got.std)


@pytest.mark.parametrize("name", OTHERS)
@LIGHT
@given(
    table=tables(),
    seed=st.integers(0, 99),
    shift=st.integers(0, 17),
    round=st.integers(0, 2**64 - 1),
    stream=st.integers(0, 2**32 - 1),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_encode_has_the_bits_of_the_reference(
    name: str, table: SegmentTable, seed: int, shift: int, round: int, stream: int, cut: tuple[float, float]
) -> None:
    x = normal(table.extent + 3, seed, shift)
    scale = REFERENCE.moments(x, table).max_abs.clamp(min=2.0**-100)
    limit, inverse = scale * 0.4, inverse_scale(scale)
    begin, end = sorted(int(part * table.groups) for part in cut)
    expected = torch.zeros(16 * (end - begin), dtype=torch.uint8)
    got = unaligned_bytes(expected.numel(), shift)
    REFERENCE.ternary_encode(x, table, limit, inverse, round, stream, begin, end, expected)
    get_kernels(name).ternary_encode(x, table, limit, inverse, round, stream, begin, end, got)
    assert torch.equal(expected, got)
    assert bool((expected < 243).all())


@pytest.mark.parametrize("name", OTHERS)
@LIGHT
@given(
    table=tables(),
    world_size=st.sampled_from([1, 2, 3, 4, 5, 8, 127, 300]),
    shift=st.integers(0, 17),
    accumulate=st.booleans(),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_decode_has_the_bits_of_the_reference_and_leaves_gaps_alone(
    name: str, table: SegmentTable, world_size: int, shift: int, accumulate: bool, cut: tuple[float, float]
) -> None:
    begin, end = sorted(int(part * table.groups) for part in cut)
    generator = torch.Generator().manual_seed(shift)
    n = 80 * (end - begin)
    values = torch.randint(-world_size, world_size + 1, (n,), generator=generator)
    words = unaligned_bytes(packed_bytes(n, world_size), shift)
    words.copy_(packed_sums(values, world_size))
    scale = torch.rand(len(table), generator=generator)
    scale[::5] = torch.inf
    before = normal(table.extent + 30, 1, shift)
    expected, got = before.clone(), normal(table.extent + 30, 1, shift)
    REFERENCE.decode(words, world_size, table, scale, begin, end, expected, accumulate)
    get_kernels(name).decode(words, world_size, table, scale, begin, end, got, accumulate)
    assert torch.equal(expected, got)
    # Independent of the reference: elements of no segment, or of other groups, are what they were.
    touched = torch.zeros(before.numel(), dtype=torch.bool)
    for s in range(len(table)):
        first = table.first_group[s]
        low, high = max(begin - first, 0) * 80, min(max(end - first, 0) * 80, int(table.numel[s]))
        touched[table.offset[s] + low : table.offset[s] + max(high, low)] = True
    assert torch.equal(got[~touched], before[~touched])


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("elements", [2_200_000])
def test_large_outputs_have_the_bits_of_the_reference(name: str, elements: int) -> None:
    table = SegmentTable([5, 2_000_013], [2_000_001, elements - 2_000_001], [0, 80], [(1, 2), (3, 4)])
    scale, n = torch.tensor([0.3, 7.0]), 80 * table.groups
    for world_size in (2, 4):
        words = packed_sums(torch.arange(n) % (2 * world_size + 1) - world_size, world_size)
        expected, got = torch.ones(table.extent + 9), torch.ones(table.extent + 9)
        REFERENCE.decode(words, world_size, table, scale, 0, table.groups, expected)
        get_kernels(name).decode(words, world_size, table, scale, 0, table.groups, got)
        assert torch.equal(expected, got)


@pytest.mark.parametrize("name", BACKENDS)
def test_pieces_make_the_whole(name: str) -> None:
    kernels, table = get_kernels(name), SegmentTable([0, 901], [900, 333], [0, 800], [(1, 2), (3, 4)])
    x, one = normal(table.extent, 3), torch.ones(2)
    whole = torch.empty(16 * table.groups, dtype=torch.uint8)
    kernels.ternary_encode(x, table, one, one * 2.0**24, 5, 6, 0, table.groups, whole)
    cuts = [0, 1, 2, 7, 12, 13, table.groups]
    pieces, decoded = [], torch.zeros(table.extent)
    for begin, end in itertools.pairwise(cuts):
        piece = torch.empty(16 * (end - begin), dtype=torch.uint8)
        kernels.ternary_encode(x, table, one, one * 2.0**24, 5, 6, begin, end, piece)
        kernels.decode(piece, 1, table, one, begin, end, decoded)
        pieces.append(piece)
    assert torch.equal(torch.cat(pieces), whole)
    expected = torch.zeros(table.extent)
    kernels.decode(whole, 1, table, one, 0, table.groups, expected)
    assert torch.equal(decoded, expected)


@pytest.mark.parametrize("name", BACKENDS)
def test_how_a_parameter_is_cut_into_segments_does_not_matter(name: str) -> None:
    kernels, x = get_kernels(name), normal(1000, 4)
    payloads = []
    for table in (one_segment(1000), SegmentTable([0, 480], [480, 520], [0, 480], [(11, 22), (11, 22)])):
        one, payload = torch.ones(len(table)), torch.empty(16 * 13, dtype=torch.uint8)
        kernels.ternary_encode(x, table, one, one * 2.0**24, 5, 6, 0, 13, payload)
        payloads.append(payload)
    assert torch.equal(*payloads)


@pytest.mark.parametrize("name", COMPILED)
def test_two_threads_give_the_same_bits(name: str) -> None:
    one, two = get_kernels(name), get_kernels(name, threads=2)
    assert one is not two
    table = SegmentTable([0, 200_000], [199_990, 150_001], [0, 0], [(1, 2), (3, 4)])
    x, results = normal(table.extent, 5), []
    for kernels in (one, two):
        moments = kernels.moments(x, table)
        rows = torch.empty(5, 16 * table.groups, dtype=torch.uint8)
        for rank in range(5):
            inverse = inverse_scale(moments.max_abs)
            kernels.ternary_encode(x, table, moments.max_abs, inverse, 1, rank, 0, table.groups, rows[rank])
        results += [moments.max_abs, moments.mean, moments.std, rows]
        for world_size in (2, 4, 5):
            words = torch.empty(packed_bytes(80 * table.groups, world_size), dtype=torch.uint8)
            kernels.ternary_sum(rows[:world_size], words)
            out = torch.zeros(table.extent)
            kernels.decode(words, world_size, table, moments.max_abs, 0, table.groups, out)
            results += [words, out]
    half = len(results) // 2
    assert all(torch.equal(a, b) for a, b in zip(results[:half], results[half:]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", COMPILED)
def test_threads_change_no_bit_of_any_family(name: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial of each family, cut even where the parts are too small to pay."""
    expected = self_test.SELF_TESTS[family](get_kernels("reference"))
    monkeypatch.setattr(compiled, "_MIN_PART", 100)
    parts = []
    split = compiled.Compiled.split

    def counted(self: compiled.Compiled, size: int, unit: int, unit_elements: int, work: Work) -> None:
        calls: list[None] = []
        split(self, size, unit, unit_elements, lambda a, b: (calls.append(None), work(a, b))[1])
        parts.append(len(calls))

    monkeypatch.setattr(compiled.Compiled, "split", counted)
    got = self_test.SELF_TESTS[family](get_kernels(name, threads=2))
    assert len(expected) == len(got)
    assert all(torch.equal(a, b) for a, b in zip(expected, got))
    assert max(parts) == 2


@pytest.mark.parametrize("name", [*BACKENDS, "meta"])
def test_empty_everything(name: str) -> None:
    kernels = get_kernels(name)
    nothing, no_bytes = torch.empty(0), torch.empty(0, dtype=torch.uint8)
    for table in (SegmentTable([], [], [], []), SegmentTable([0, 0], [0, 0], [0, 80], [(1, 2), (3, 4)])):
        size = len(table)
        moments = kernels.moments(nothing, table)
        assert moments.max_abs.shape == moments.mean.shape == moments.std.shape == (size,)
        if name != "meta":
            assert moments.max_abs.tolist() == moments.std.tolist() == [0.0] * size
        kernels.ternary_encode(nothing, table, torch.ones(size), torch.ones(size), 0, 0, 0, 0, no_bytes)
        kernels.decode(no_bytes, 3, table, torch.ones(size), 0, 0, nothing)
    kernels.ternary_sum(torch.empty(3, 0, dtype=torch.uint8), no_bytes)


@pytest.mark.parametrize("name", OTHERS)
def test_bytes_that_no_encoder_writes_stay_in_bounds(name: str) -> None:
    rows = torch.arange(243, 256, dtype=torch.uint8).repeat(16)[:192].repeat(2, 1)
    words, table = torch.empty(packed_bytes(960, 2), dtype=torch.uint8), one_segment(960)
    get_kernels(name).ternary_sum(rows, words)
    out = torch.zeros(960 + 80)
    get_kernels(name).decode(rows[0], 1, table, torch.ones(1), 0, 12, out)
    assert torch.equal(out[960:], torch.zeros(80))
    assert float(out.abs().max()) <= 2.0
