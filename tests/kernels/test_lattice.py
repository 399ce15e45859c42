"""Lattices: the same bits from every backend, decoded back from any reference near enough."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import BACKENDS, OTHERS, normal, one_segment, tables

from gradwire.errors import HyperparameterError
from gradwire.kernels import SegmentTable, digit_layout, dither_shifts, get_kernels, packed_groups

REFERENCE = get_kernels("reference")
LIGHT = settings(max_examples=20)


@pytest.mark.parametrize("name", OTHERS)
@LIGHT
@given(
    table=tables(),
    number=st.integers(1, 4),
    colours=st.sampled_from([4, 8, 16, 256, 4096, 32768]),
    seed=st.integers(0, 99),
    shift=st.integers(0, 17),
    round=st.integers(0, 2**64 - 1),
    stream=st.integers(0, 2**32 - 1),
)
def test_every_backend_gives_the_bits_of_the_reference(
    name: str, table: SegmentTable, number: int, colours: int, seed: int, shift: int, round: int, stream: int
) -> None:
    x = normal(table.extent + 3, seed, shift)
    x[::97], x[5::97], x[9::97] = torch.nan, 1e30, -torch.inf
    inverse = normal(len(table), seed).abs()
    inverse[::3] = 0
    scale = torch.where(inverse > 0, 1 / inverse.clamp(min=1e-6), torch.inf)
    size, shifts = packed_groups(table.groups, digit_layout(colours)), dither_shifts(number)
    rows, other = (torch.full((number, size + shift), 255, dtype=torch.uint8)[:, shift:] for _ in range(2))
    checks = [REFERENCE.lattice_encode(x, table, inverse, colours, round, stream, s, r) for s, r in zip(shifts, rows)]
    kernels = get_kernels(name)
    found = [kernels.lattice_encode(x, table, inverse, colours, round, stream, s, r) for s, r in zip(shifts, other)]
    assert torch.equal(torch.cat(found), torch.cat(checks))
    assert torch.equal(rows, other)
    # Any bytes are colours.
    rows[:, ::5] = torch.randint(0, 256, rows[:, ::5].shape, generator=torch.Generator().manual_seed(seed)).byte()
    for accumulate in (False, True):
        a, b = (normal(table.extent + 3, 1, shift) for _ in range(2))
        arguments = (rows, table, inverse, scale, colours, round, stream, shifts)
        expected = REFERENCE.lattice_mean(*arguments, x, a, accumulate)
        assert torch.equal(expected, kernels.lattice_mean(*arguments, x, b, accumulate))
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", BACKENDS)
def test_points_come_back_next_to_any_reference_within_reach(name: str) -> None:
    """|k - t| < q / 2 at the receiver; the check tells the rest, and the vector may be decoded in place."""
    kernels, table = get_kernels(name), one_segment(1000)
    one, row = torch.ones(1), torch.empty(1, packed_groups(13, digit_layout(16)), dtype=torch.uint8)
    x = 50 * torch.randn(1000, generator=torch.Generator().manual_seed(0))
    check = kernels.lattice_encode(x, table, one, 16, 3, 4, 5, row[0])
    exact = torch.zeros(1000)
    assert kernels.lattice_mean(row, table, one, one, 16, 3, 4, [5], x, exact) == check
    # Rounded to the nearest point: half a side at most, and the sum k + theta has float32's resolution at 256.
    assert 0.4 < float((exact - x).abs().max()) <= 0.5 + 2**-15
    for far in (-7.49, 7.49):
        near = x + far
        assert kernels.lattice_mean(row, table, one, one, 16, 3, 4, [5], near, near) == check
        assert torch.equal(near, exact)
    wrong = x.clone()
    wrong[123] += 9
    assert kernels.lattice_mean(row, table, one, one, 16, 3, 4, [5], wrong, wrong) != check
    assert float((wrong - exact).abs().max()) == 16


def test_what_makes_no_sense_is_refused() -> None:
    table, one = one_segment(80), torch.ones(1)
    for name in BACKENDS:
        kernels = get_kernels(name)
        for colours in (1, 3, 1 << 16):
            with pytest.raises(HyperparameterError, match="power of two"):
                kernels.lattice_encode(torch.ones(80), table, one, colours, 0, 0, 0, torch.empty(48, dtype=torch.uint8))
        with pytest.raises(HyperparameterError, match=r"out is .* with 48 elements"):
            kernels.lattice_encode(torch.ones(80), table, one, 16, 0, 0, 0, torch.empty(40, dtype=torch.uint8))
    assert dither_shifts(4) == [0, 1 << 22, 1 << 23, 3 << 22]
