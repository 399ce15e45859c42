"""The fewest bytes within a budget of error, against every choice there is."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.methods.wrappers.l_greco import fewest_bytes

Table = list[list[int]]


def best(sizes: Table, errors: Sequence[Sequence[float]], budget: Fraction) -> int | None:
    """Return the fewest bytes of all choices with no more error than that; None where none has so little."""
    found = [
        sum(row[c] for row, c in zip(sizes, choice))
        for choice in itertools.product(range(len(sizes[0])), repeat=len(sizes))
        if sum(Fraction(row[c]) for row, c in zip(errors, choice)) <= budget
    ]
    return min(found, default=None)


def table(layers: int, candidates: int, most: int) -> st.SearchStrategy[Table]:
    row = st.lists(st.integers(0, most), min_size=candidates, max_size=candidates)
    return st.lists(row, min_size=layers, max_size=layers)


@st.composite
def problems(draw: st.DrawFn, most_error: int) -> tuple[Table, list[list[float]], int]:
    layers, candidates = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    sizes = draw(table(layers, candidates, 30))
    errors = [[float(e) for e in row] for row in draw(table(layers, candidates, most_error))]
    return sizes, errors, draw(st.integers(0, candidates - 1))


def bytes_and_error(sizes: Table, errors: Sequence[Sequence[float]], choice: Sequence[int]) -> tuple[int, Fraction]:
    found = [sum(row[c] for row, c in zip(sizes, choice)), sum(Fraction(row[c]) for row, c in zip(errors, choice))]
    return int(found[0]), Fraction(found[1])


@settings(max_examples=200)
@given(problems(40))
def test_with_whole_parts_it_is_the_best_of_all_choices(problem: tuple[Table, list[list[float]], int]) -> None:
    """Errors that are whole parts of the budget are not rounded: as many parts as the budget has units."""
    sizes, errors, uniform = problem
    _, budget = bytes_and_error(sizes, errors, [uniform] * len(sizes))
    found, error = bytes_and_error(sizes, errors, fewest_bytes(sizes, errors, uniform, max(1, int(budget))))
    assert error <= budget
    assert found == best(sizes, errors, budget)


@settings(max_examples=200)
@given(problems(10**6), st.integers(20, 300))
def test_what_rounding_may_miss_is_bounded(problem: tuple[Table, list[list[float]], int], parts: int) -> None:
    """Never beyond the budget, and no worse than the best that leaves a part free for each layer."""
    sizes, errors, uniform = problem
    plain, budget = bytes_and_error(sizes, errors, [uniform] * len(sizes))
    found, error = bytes_and_error(sizes, errors, fewest_bytes(sizes, errors, uniform, parts))
    assert error <= budget
    assert found <= plain
    less = best(sizes, errors, budget * (1 - Fraction(len(sizes), parts)))
    assert less is None or found <= less


def test_the_uniform_choice_stays_where_nothing_is_saved() -> None:
    assert fewest_bytes([[5, 5], [7, 7]], [[0.0, 1.0], [0.0, 1.0]], 1) == [1, 1]
    assert fewest_bytes([], [], 0) == []
    # Without any error of the uniform choice only exact candidates remain.
    assert fewest_bytes([[9, 3, 1], [9, 3, 1]], [[0.0, 0.0, 1e-300], [0.0, 2.0, 0.0]], 0) == [1, 2]


def test_a_thousand_layers_take_a_moment_and_equal_layers_trade_fairly() -> None:
    """Half of them are worth a hundred times as much error as the others: these pay with bytes."""
    sizes = [[1, 2, 4, 8]] * 1000
    errors = [[w * e for e in (64.0, 16.0, 4.0, 1.0)] for w in [100.0] * 500 + [1.0] * 500]
    found, error = bytes_and_error(sizes, errors, choice := fewest_bytes(sizes, errors, 2))
    assert error <= 4 * 101 * 500
    # A byte saved with a small one costs a few units, and one spent on a large one gains hundreds.
    assert found < 4000
    assert choice.count(0) > 400
    assert all(c < 2 for c in choice[500:])
