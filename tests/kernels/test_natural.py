"""Rounding to powers of two: the same bits from every backend, for every kind of float."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import BACKENDS, OTHERS, normal, tables, unaligned_bytes

from gradwire.errors import HyperparameterError
from gradwire.kernels import SegmentTable, get_kernels, natural_bytes

REFERENCE = get_kernels("reference")
LIGHT = settings(max_examples=25)
MAX = torch.finfo(torch.float32).max
ODD = [0.0, -0.0, 1e-45, -1e-40, 1.17e-38, 2.0**-126, 1.0, -1.5, 2.0**127, -MAX, MAX, torch.inf, -torch.inf, torch.nan]


@pytest.mark.parametrize("name", OTHERS)
@LIGHT
@given(
    table=tables(),
    number=st.integers(1, 5),
    seed=st.integers(0, 99),
    shift=st.integers(0, 17),
    round=st.integers(0, 2**64 - 1),
    stream=st.integers(0, 2**32 - 1),
)
def test_every_backend_gives_the_bits_of_the_reference(
    name: str, table: SegmentTable, number: int, seed: int, shift: int, round: int, stream: int
) -> None:
    x = normal(table.extent + 3, seed, shift, spread=30.0)
    x[::7] = torch.tensor(ODD).repeat(x.numel() // len(ODD) + 1)[: x[::7].numel()]
    size = natural_bytes(table.groups)
    rows, other = (torch.full((number, size + shift), 255, dtype=torch.uint8)[:, shift:] for _ in range(2))
    for rank in range(number):
        REFERENCE.natural_encode(x, table, round, (stream + rank) % 2**32, rows[rank])
        get_kernels(name).natural_encode(x, table, round, (stream + rank) % 2**32, other[rank])
    assert torch.equal(rows, other)
    for accumulate in (False, True):
        a, b = (normal(table.extent + 3, 1, shift) for _ in range(2))
        REFERENCE.natural_mean(rows, table, 1 / number, a, accumulate)
        get_kernels(name).natural_mean(rows, table, 1 / number, b, accumulate)
        assert torch.equal(a, b)
        assert bool((a == torch.inf).any()) == bool(torch.isinf(a).any())


@pytest.mark.parametrize("name", BACKENDS)
def test_any_bytes_decode_to_powers_of_two(name: str) -> None:
    table = SegmentTable([3], [500], [80], [(1, 2)])
    row = torch.randint(0, 256, (1, natural_bytes(7)), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    x, expected = torch.full((510,), 7.0), torch.full((510,), 7.0)
    get_kernels(name).natural_mean(row, table, 1.0, x)
    REFERENCE.natural_mean(row, table, 1.0, expected)
    assert torch.equal(x, expected)
    inside = x[3:503]
    assert bool((x[:3] == 7).all() & (x[503:] == 7).all())
    assert bool((torch.frexp(inside[torch.isfinite(inside) & (inside != 0)]).mantissa.abs() == 0.5).all())


@pytest.mark.parametrize("name", BACKENDS)
def test_buffers_of_another_size_are_refused(name: str) -> None:
    table, kernels = SegmentTable([0], [81], [0], [(1, 2)]), get_kernels(name)
    good = unaligned_bytes(natural_bytes(2))
    assert natural_bytes(2) == 160 + 32
    with pytest.raises(HyperparameterError, match="at least 81"):
        kernels.natural_encode(torch.ones(80), table, 0, 0, good)
    with pytest.raises(HyperparameterError, match="192 elements"):
        kernels.natural_encode(torch.ones(81), table, 0, 0, good[1:])
    with pytest.raises(HyperparameterError, match="rows of 192"):
        kernels.natural_mean(good[None, 1:], table, 1.0, torch.ones(81))
