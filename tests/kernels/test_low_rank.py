"""Products with thin factors: the bits of the reference, sums in the stated order, orthonormal factors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import BACKENDS, OTHERS, normal

from gradwire.errors import HyperparameterError
from gradwire.kernels import Kernels, MatrixTable, get_kernels

REFERENCE = get_kernels("reference")


def bits(*vectors: torch.Tensor) -> list[list[int]]:
    """Return the bits of vectors, whatever NaNs they hold."""
    return [v.view(torch.int32).tolist() for v in vectors]


def table_of(*shapes: tuple[int, int, int], gap: int = 0) -> MatrixTable:
    """Lay matrices of rows, columns and rank one behind the other, with gaps."""
    offset, at = [], gap
    for rows, columns, _ in shapes:
        offset.append(at)
        at += rows * columns + gap
    return MatrixTable(offset, *map(list, zip(*shapes)))


def one_of_all(kernels: Kernels, x: torch.Tensor, table: MatrixTable, seed: int) -> list[torch.Tensor]:
    """Run every operation once."""
    right, left = normal(table.right_numel, seed + 1), torch.full((table.left_numel,), torch.nan)
    kernels.multiply_right(x, table, right, left)
    basis = kernels.orthonormalise(left, table, "left")
    back = torch.full((table.right_numel,), torch.nan)
    kernels.multiply_left(x, table, basis, back)
    other, product, added = kernels.orthonormalise(back, table, "right"), x.clone(), x.clone()
    kernels.multiply_out(basis, back, table, product)
    kernels.multiply_out(basis, back, table, added, -0.3)
    return [left, basis, back, other, product, added]


SHAPES = st.tuples(st.integers(1, 70), st.integers(1, 70), st.integers(1, 5))


@pytest.mark.parametrize("name", OTHERS)
@settings(max_examples=25)
@given(shapes=st.lists(SHAPES, min_size=1, max_size=4), gap=st.integers(0, 3), seed=st.integers(0, 99))
def test_results_have_the_bits_of_the_reference(
    name: str, shapes: list[tuple[int, int, int]], gap: int, seed: int
) -> None:
    table = table_of(*shapes, gap=gap)
    x = normal(table.extent + gap, seed)
    assert bits(*one_of_all(get_kernels(name), x, table, seed)) == bits(*one_of_all(REFERENCE, x, table, seed))


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("shape", [(600, 40, 2), (3, 5000, 2), (257, 2049, 1), (40, 600, 40)])
def test_panels_tiles_and_long_rows_have_the_bits_of_the_reference(name: str, shape: tuple[int, int, int]) -> None:
    table = table_of((5, 7, 1), shape, gap=1)
    x = normal(table.extent, 3)
    assert bits(*one_of_all(get_kernels(name), x, table, 0)) == bits(*one_of_all(REFERENCE, x, table, 0))


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 3e38, torch.inf, torch.nan])
def test_special_values_go_where_those_of_the_reference_do(name: str, value: float) -> None:
    table = table_of((20, 33, 3), (4, 4, 4))
    x = normal(table.extent, 7)
    x[::5] = value
    for ours, theirs in zip(one_of_all(get_kernels(name), x, table, 1), one_of_all(REFERENCE, x, table, 1)):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert bits(ours.nan_to_num(0.0)) == bits(theirs.nan_to_num(0.0))


@pytest.mark.parametrize("name", OTHERS)
def test_any_number_of_threads_gives_the_same_bits(name: str) -> None:
    table = table_of((700, 300, 2), (300, 3000, 1), (3, 4, 2))
    x = normal(table.extent, 1)
    one, two = (one_of_all(get_kernels(name, threads=n), x, table, 0) for n in (1, 2))
    assert bits(*one) == bits(*two)


@pytest.mark.parametrize("name", BACKENDS)
def test_sums_are_made_in_the_stated_order(name: str) -> None:
    """With 1 lost beside 2^24, each order of addition has a sum of its own."""
    kernels, big = get_kernels(name), 2.0**24
    row = torch.zeros(40)
    # Sum 0 takes column 0, then 16, then 32; sum 8 is added to it before sum 4 is.
    row[0], row[16], row[32], row[8], row[4] = big, 1.0, -big, 3.0, 0.5
    left = torch.empty(1)
    kernels.multiply_right(row, MatrixTable([0], [1], [40], [1]), torch.ones(40), left)
    assert left.tolist() == [3.5]
    column = torch.zeros(600)
    # Rows 0 and 1 are in the first panel, 300 and 301 in the second: a panel is added up by itself.
    column[0], column[1], column[300], column[301] = big, 1.0, 1.0, -big
    right = torch.empty(1)
    kernels.multiply_left(column, MatrixTable([0], [600], [1], [1]), torch.ones(600), right)
    assert right.tolist() == [0.0 + big + (1.0 - big)]


@pytest.mark.parametrize("name", BACKENDS)
def test_a_product_is_added_vector_by_vector(name: str) -> None:
    table = table_of((70, 30, 3), gap=2)
    left, right = normal(table.left_numel, 1), normal(table.right_numel, 2)
    p, q = left.view(3, 70), right.view(3, 30)
    product = p[0][:, None] * q[0] + p[1][:, None] * q[1]
    product = product + p[2][:, None] * q[2]
    x = normal(table.extent + 2, 5)
    for weight, expected in ((None, product), (0.25, x[2:-2].view(70, 30) + 0.25 * product)):
        out = x.clone()
        get_kernels(name).multiply_out(left, right, table, out, weight)
        assert torch.equal(out[2:-2].view(70, 30), expected)
        # What lies around it stays.
        assert torch.equal(out[:2], x[:2])
        assert torch.equal(out[-2:], x[-2:])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("rows", [1, 5, 64, 1000])
def test_vectors_become_orthonormal_and_what_depends_on_others_zero(name: str, rows: int) -> None:
    kernels = get_kernels(name)
    factor = normal(4 * rows, rows).view(4, rows)
    factor[3] = 2 * factor[0] - factor[1]
    found = kernels.orthonormalise(factor.reshape(-1), table_of((rows, 1, 4)), "left").view(4, rows).double()
    kept = min(rows, 3)
    expected = torch.zeros(4, 4, dtype=torch.float64)
    expected[:kept, :kept] = torch.eye(kept)
    # Rounding to float32 is all that is left of errors: half a unit, 6e-8, of elements whose squares sum to one.
    assert torch.allclose(found @ found.T, expected, rtol=0, atol=1e-6)
    assert torch.allclose((found.T @ (found @ factor.double().T)).T, factor.double(), rtol=0, atol=1e-5)
    spoilt = factor.clone()
    spoilt[1, 0] = torch.nan
    # Neither what is done beside it nor what spoils that changes a bit.
    table = table_of((rows + 1, 1, 4), (rows, 1, 4), (rows, 1, 4), (3, 1, 4))
    beside = torch.cat([normal(4 * rows + 4, 9), spoilt.reshape(-1), factor.reshape(-1), normal(12, 8)])
    both = kernels.orthonormalise(beside, table, "left")[4 * rows + 4 : -12].view(2, 4, rows)
    assert bool(both[0, 1].isnan().all())
    assert torch.equal(both[1].double(), found)


@pytest.mark.parametrize("name", BACKENDS)
def test_no_matrices_leave_all_as_it_is(name: str) -> None:
    kernels, table, x, none = get_kernels(name), MatrixTable([], [], [], []), torch.ones(3), torch.empty(0)
    kernels.multiply_right(x, table, none, none)
    kernels.multiply_left(x, table, none, none)
    kernels.multiply_out(none, none, table, x)
    assert kernels.orthonormalise(none, table, "left").numel() == 0
    assert x.tolist() == [1.0, 1.0, 1.0]


def test_vectors_and_tables_that_do_not_fit_are_refused() -> None:
    table = table_of((3, 4, 2))
    x, left, right = torch.zeros(12), torch.zeros(6), torch.zeros(8)
    for bad in ((x[:11], left, right), (x, left[:5], right), (x, left, right[:7]), (x.double(), left, right)):
        with pytest.raises(HyperparameterError, match="is needed"):
            REFERENCE.multiply_left(bad[0], table, bad[1], bad[2])
        with pytest.raises(HyperparameterError, match="is needed"):
            REFERENCE.multiply_right(bad[0], table, bad[2], bad[1])
        with pytest.raises(HyperparameterError, match="is needed"):
            REFERENCE.multiply_out(bad[1], bad[2], table, bad[0])
    for side, wrong in (("left", right), ("right", left)):
        with pytest.raises(HyperparameterError, match="factors is"):
            REFERENCE.orthonormalise(wrong, table, side)
    with pytest.raises(HyperparameterError, match="overlap"):
        MatrixTable([0, 11], [3, 1], [4, 1], [1, 1])
    with pytest.raises(HyperparameterError, match="at least 1"):
        MatrixTable([0], [3], [4], [0])
    with pytest.raises(HyperparameterError, match="pass one"):
        MatrixTable([0], [3, 4], [4], [1])
