"""Count sketches: the bits of the reference, and the laws of their estimates."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import BACKENDS, OTHERS, derived_tolerance, normal, one_segment, tables

from gradwire.errors import HyperparameterError
from gradwire.kernels import Kernels, SegmentTable, get_kernels
from gradwire.kernels.philox import uniform_integers
from gradwire.seeds import SHARED

REFERENCE = get_kernels("reference")
ROWS = st.sampled_from([1, 3, 5, 7, 9])
COLUMNS = st.sampled_from([1, 2, 13, 1000, 1 << 16])


def sketched(kernels: Kernels, x: torch.Tensor, table: SegmentTable, rows: int, columns: int) -> torch.Tensor:
    out = torch.full((rows * columns,), torch.nan)
    kernels.sketch(x, table, rows, columns, SHARED, out)
    return out


def estimated(kernels: Kernels, sums: torch.Tensor, table: SegmentTable, rows: int, columns: int) -> torch.Tensor:
    out = torch.full((table.extent,), torch.nan)
    kernels.unsketch(sums, table, rows, columns, SHARED, out)
    return out


@pytest.mark.parametrize("name", OTHERS)
@settings(max_examples=15)
@given(table=tables(), rows=ROWS, columns=COLUMNS, seed=st.integers(0, 99), shift=st.integers(0, 17))
def test_sums_and_estimates_have_the_bits_of_the_reference(
    name: str, table: SegmentTable, rows: int, columns: int, seed: int, shift: int
) -> None:
    x = normal(table.extent + 3, seed, shift)
    sums = sketched(REFERENCE, x, table, rows, columns)
    found = sketched(get_kernels(name), x, table, rows, columns)
    assert torch.equal(found.view(torch.int32), sums.view(torch.int32))
    estimates, ours = x.clone(), x.clone()
    REFERENCE.unsketch(sums, table, rows, columns, SHARED, estimates)
    get_kernels(name).unsketch(sums, table, rows, columns, SHARED, ours)
    # What lies between segments stays.
    assert torch.equal(ours.view(torch.int32), estimates.view(torch.int32))


@pytest.mark.parametrize("name", OTHERS)
def test_any_number_of_threads_gives_the_same_bits(name: str) -> None:
    x, table = normal(300_007, 1), one_segment(300_007)
    one, two = get_kernels(name), get_kernels(name, threads=2)
    sums = sketched(one, x, table, 5, 999)
    assert torch.equal(sketched(two, x, table, 5, 999), sums)
    assert torch.equal(estimated(two, sums, table, 5, 999), estimated(one, sums, table, 5, 999))


@pytest.mark.parametrize("name", BACKENDS)
def test_hashes_are_those_of_the_page(name: str) -> None:
    """The row takes the round's place; the lower 23 bits are the column's, the highest is the sign."""
    table, columns = SegmentTable([0, 90], [90, 7], [0, 160], [(5, 6), (7, 8)]), 1000
    for row in range(3):
        for key, first, at, numel in (((5, 6), 0, 0, 90), ((7, 8), 2, 90, 7)):
            group = torch.arange(first, first + 2)
            drawn = uniform_integers(group, torch.tensor(key).expand(2, 2), row, SHARED).reshape(-1)[:numel]
            for e, word in enumerate(drawn.tolist()):
                x = torch.zeros(97)
                x[at + e] = 1.0
                sums = sketched(get_kernels(name), x, table, 3, columns).view(3, columns)[row]
                assert sums.nonzero().flatten().tolist() == [(word % 2**23) * columns // 2**23]
                assert float(sums.sum()) == (-1.0 if word >= 2**23 else 1.0)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_sketch_is_linear(name: str) -> None:
    """Exactly where sums are: of integers below 2^24."""
    table, kernels = SegmentTable([0, 500], [500, 437], [80, 0], [(1, 2), (3, 4)]), get_kernels(name)
    a, b = ((40 * normal(937, seed)).round() for seed in (1, 2))
    both = sketched(kernels, a + b, table, 5, 61)
    assert torch.equal(sketched(kernels, a, table, 5, 61) + sketched(kernels, b, table, 5, 61), both)
    assert torch.equal(sketched(kernels, -3 * a, table, 5, 61), -3 * sketched(kernels, a, table, 5, 61))


def test_estimates_are_unbiased_with_the_variance_of_what_else_is_there() -> None:
    """(|x|^2 - x_i^2) / columns, over draws of the hashes; the median of rows is unbiased, too, and varies less."""
    draws, columns, kernels = 4000, 25, get_kernels("cpu")
    x = normal(240, 3)
    found = torch.empty(2, draws, 240)
    for draw in range(draws):
        table = one_segment(240, (draw, 77))
        for out, rows in zip(found, (1, 5)):
            kernels.unsketch(sketched(kernels, x, table, rows, columns), table, rows, columns, SHARED, out[draw])
    errors = (found - x).double()
    for e in (0, 17, 200, int(x.abs().argmax())):
        variance = float(x.double().square().sum() - x[e].double() ** 2) / columns
        single, median = errors[0, :, e], errors[1, :, e]
        assert abs(float(single.mean())) < derived_tolerance(variance, draws)
        squares = single.square()
        assert abs(float(squares.mean()) - variance) < derived_tolerance(float(squares.var()), draws)
        assert abs(float(median.mean())) < derived_tolerance(float(median.var()), draws)
        assert float(median.square().mean()) < 0.7 * variance


def test_few_elements_are_recovered_exactly() -> None:
    """Each of 20 collides in a row with chance 19 / 10^5: three rows of five never do here."""
    x, table = torch.zeros(50_000), one_segment(50_000)
    x[::2500] = normal(20, 4)
    estimates = estimated(REFERENCE, sketched(REFERENCE, x, table, 5, 100_000), table, 5, 100_000)
    assert torch.equal(estimates[::2500], x[::2500])


@pytest.mark.parametrize(("rows", "ways"), [(1, 1), (3, 3), (5, 10), (9, 126)])
def test_large_errors_become_rare_with_the_rows(rows: int, ways: int) -> None:
    """By Chebyshev, one row errs by three standard deviations with chance 1/9; so must half of the rows, rounded up."""
    x, table, columns = normal(100_000, 5), one_segment(100_000), 500
    estimates = estimated(
        get_kernels("cpu"), sketched(get_kernels("cpu"), x, table, rows, columns), table, rows, columns
    )
    deviation = float(x.norm()) / math.sqrt(columns)
    far = float(((estimates - x).abs() > 3 * deviation).double().mean())
    assert far <= ways * (1 / 9) ** ((rows + 1) // 2)


@pytest.mark.parametrize("name", BACKENDS)
def test_what_is_not_finite_is_in_every_row(name: str) -> None:
    for bad in (math.inf, -math.inf, math.nan):
        x = normal(500, 6)
        x[123] = bad
        sums = sketched(get_kernels(name), x, one_segment(500), 5, 40).view(5, 40)
        assert (~torch.isfinite(sums)).sum(1).tolist() == [1] * 5


@pytest.mark.parametrize("name", BACKENDS)
def test_nothing_at_all_has_a_sketch_of_zeros(name: str) -> None:
    table = SegmentTable([0], [0], [0], [(1, 2)])
    assert bool((sketched(get_kernels(name), torch.empty(0), table, 3, 10) == 0).all())
    get_kernels(name).unsketch(torch.zeros(30), table, 3, 10, SHARED, torch.empty(0))


@pytest.mark.parametrize(
    ("rows", "columns", "message"),
    [(2, 5, "odd number"), (0, 5, "odd number"), (33, 5, "odd number"), (3, 0, "columns"), (3, 2**23 + 1, "columns")],
)
def test_sizes_out_of_range_are_refused(rows: int, columns: int, message: str) -> None:
    for call in (REFERENCE.sketch, REFERENCE.unsketch):
        with pytest.raises(HyperparameterError, match=message):
            call(torch.zeros(100), one_segment(100), rows, columns, SHARED, torch.zeros(100))
    with pytest.raises(HyperparameterError, match="out is"):
        REFERENCE.sketch(torch.zeros(100), one_segment(100), 3, 5, SHARED, torch.zeros(14))
    with pytest.raises(HyperparameterError, match="x is"):
        REFERENCE.unsketch(torch.zeros(15), one_segment(100), 3, 5, SHARED, torch.zeros(99))
