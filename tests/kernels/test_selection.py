"""Selected positions against a sort of the bits, from every backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import BACKENDS, OTHERS, normal, one_segment, tables

from gradwire.errors import HyperparameterError
from gradwire.kernels import SegmentTable, get_kernels

NAMES = BACKENDS
KINDS = ("normal", "few values", "equal", "zeros", "sorted", "reversed", "not finite", "sparse", "denormal")
LIGHT = settings(max_examples=25)


def values_of(kind: str, numel: int, seed: int = 0) -> torch.Tensor:
    """Return values in an order, or with ties, that a selection may stumble over."""
    x = normal(numel, seed)
    if kind == "few values":
        return x.sign() * (x.abs() * 2).round().clamp(max=4.0)
    if kind in ("equal", "zeros"):
        return x.sign() * (0.75 if kind == "equal" else 0.0)
    if kind in ("sorted", "reversed"):
        return x.abs().sort(descending=kind == "reversed").values
    if kind == "not finite":
        x[torch.rand(numel, generator=torch.Generator().manual_seed(seed)) < 0.05] = torch.inf
        x[::7] = torch.nan
        return x
    if kind == "sparse":
        return x * (torch.rand(numel, generator=torch.Generator().manual_seed(seed)) < 0.02)
    return x * 2.0**-130 if kind == "denormal" else x


def orders(x: torch.Tensor, table: SegmentTable) -> list[np.ndarray]:
    """Sort each segment by magnitude, as integers, and then by position."""
    bits = x.numpy().view(np.int32) & 0x7FFFFFFF
    return [np.lexsort((np.arange(n), -bits[a : a + n].astype(np.int64))) for a, n in zip(table.offset, table.numel)]


def first(sorted_segments: list[np.ndarray], counts: list[int]) -> list[int]:
    """Return the first positions of each sorted segment, ascending."""
    return [i for order, count in zip(sorted_segments, counts) for i in np.sort(order[:count]).tolist()]


def largest(x: torch.Tensor, table: SegmentTable, counts: list[int]) -> list[int]:
    return first(orders(x, table), counts)


def select(name: str, x: torch.Tensor, table: SegmentTable, counts: list[int], shift: int = 0) -> list[int]:
    """Select into the middle of a larger tensor, and check that the rest of it is left alone."""
    room = torch.full((sum(counts) + shift + 40,), -7, dtype=torch.int32)
    index = room[shift : shift + sum(counts)]
    get_kernels(name).select_largest(x, table, torch.tensor(counts, dtype=torch.int64), index)
    assert bool((room[:shift] == -7).all())
    assert bool((room[shift + sum(counts) :] == -7).all())
    return index.tolist()


@pytest.mark.parametrize("name", NAMES)
@LIGHT
@given(
    table=tables(),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 99),
    shift=st.integers(0, 17),
    shares=st.lists(st.sampled_from([0.0, 0.01, 0.05, 0.3, 0.9, 1.0]), min_size=12, max_size=12),
)
def test_the_largest_are_those_of_a_sort(
    name: str, table: SegmentTable, kind: str, seed: int, shift: int, shares: list[float]
) -> None:
    x = values_of(kind, table.extent + 20, seed)[shift:]
    counts = [int(share * n) for share, n in zip(shares, table.numel.tolist())]
    assert select(name, x, table, counts, shift) == largest(x, table, counts)


@pytest.mark.parametrize("name", NAMES)
def test_ties_go_to_the_lowest_positions_and_signs_do_not_count(name: str) -> None:
    x = torch.tensor([1.0, -2.0, 2.0, 0.0, -0.0, 2.0, -1.0, torch.inf, -torch.nan, -torch.inf])
    expected = {0: [], 1: [8], 2: [7, 8], 4: [1, 7, 8, 9], 5: [1, 2, 7, 8, 9], 7: [0, 1, 2, 5, 7, 8, 9]}
    for count, positions in expected.items():
        assert select(name, x, one_segment(10), [count]) == positions
    assert select(name, x, one_segment(10), [9]) == [0, 1, 2, 3, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("name", NAMES)
@LIGHT
@given(
    table=tables(),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 99),
    shift=st.integers(0, 17),
    threshold=st.sampled_from([0.0, -0.0, 1e-40, 0.3, 0.75, 2.0, torch.inf]),
    limit=st.sampled_from([0, 1, 17, 300, 10_000]),
)
def test_positions_above_a_threshold_ascend_up_to_the_limit(
    name: str, table: SegmentTable, kind: str, seed: int, shift: int, threshold: float, limit: int
) -> None:
    x = values_of(kind, table.extent + 20, seed)[shift:]
    # Every third segment has a limit of its own.
    limits = torch.tensor([limit if s % 3 else s for s in range(len(table))], dtype=torch.int64)
    thresholds = torch.full((len(table),), threshold)
    index = torch.full((int(limits.sum()),), -7, dtype=torch.int32)
    found = get_kernels(name).select_above(x, table, thresholds, limits, index)
    bits = x.numpy().view(np.int32) & 0x7FFFFFFF
    least = int(np.float32(abs(threshold)).view(np.int32))
    expected: list[int] = []
    for s, (a, n) in enumerate(zip(table.offset, table.numel)):
        positions = np.flatnonzero(bits[a : a + n] >= least).tolist()
        assert int(found[s]) == len(positions)
        own = positions[: int(limits[s])]
        expected += own + [-7] * (int(limits[s]) - len(own))
    assert index.tolist() == expected


def sampled_places(numel: int) -> torch.Tensor:
    """Mark what the compiled loops take as their sample of a long segment."""
    chunks = min(2**13, numel // 256)
    marks = torch.zeros(numel, dtype=torch.bool)
    for chunk in range(chunks):
        place = chunk * (numel - 32) // (chunks - 1)
        marks[place : place + 32] = True
    return marks


def hidden(numel: int, number: int, among_sampled: bool, begin: int = 0) -> torch.Tensor:
    """Return values of which ``number``, from ``begin`` on, are far larger: none of them sampled, or all."""
    x = normal(numel, 3)
    places = (sampled_places(numel) == among_sampled).nonzero()[:, 0]
    places = places[places >= begin]
    chosen = places[torch.randperm(len(places), generator=torch.Generator().manual_seed(1))[:number]]
    x[chosen] = 1000.0 + torch.rand(number, generator=torch.Generator().manual_seed(2))
    return x


LONG = 1_000_003
ORDERS = {
    **{kind: lambda kind=kind: values_of(kind, LONG, 1) for kind in KINDS},
    # More than expected reach the lower bound; as many as wanted are above the upper one; and nearly as many.
    "many hidden": lambda: hidden(LONG, 200_000, False),
    "enough hidden": lambda: hidden(LONG, 10_000, False),
    "some hidden": lambda: hidden(LONG, 700, False),
    # Behind the last place where the room for candidates is looked at.
    "some hidden at the end": lambda: hidden(LONG, 700, False, LONG - 1500),
    "few hidden": lambda: hidden(LONG, 40, False),
    "all sampled": lambda: hidden(LONG, 100_000, True),
    "some sampled": lambda: hidden(LONG, 1500, True),
    "in rows": lambda: values_of("normal", LONG) * (torch.arange(LONG) // 512 % 40 == 0),
    "at the end": lambda: torch.cat([values_of("normal", LONG - 12_000), 50 + torch.rand(12_000)]),
    "in steps": lambda: (torch.arange(LONG) % 5).float(),
}


@pytest.mark.parametrize("order", ORDERS)
def test_long_segments_are_selected_from_exactly_whatever_their_order(order: str) -> None:
    """Also where the sample misleads: by values that lie between its places or only there, by ties and by order."""
    x, table = ORDERS[order](), SegmentTable([0], [LONG], [0], [(1, 2)])
    sorted_segments = orders(x, table)
    for count in (1, 1000, 10_000, 99_991, 500_000, LONG - 1):
        expected = first(sorted_segments, [count])
        for name in OTHERS:
            assert select(name, x, table, [count], shift=3) == expected


@pytest.mark.parametrize("name", OTHERS)
def test_more_candidates_than_there_is_room_for_take_two_passes(name: str) -> None:
    """Of five million elements those between two bounds are collected first, and what reaches the threshold next."""
    numel, count = 5_000_011, 1_100_003
    table, rounded = one_segment(numel), (torch.arange(numel) * 7919 % 1001).float()
    for x in (normal(numel, 5), rounded, hidden(numel, 1_200_000, False), hidden(numel, 250_000, True)):
        bits = x.numpy().view(np.int32) & 0x7FFFFFFF
        index = torch.empty(count, dtype=torch.int32)
        get_kernels(name).select_largest(x, table, torch.tensor([count]), index)
        found = index.numpy()
        assert bool((np.diff(found) > 0).all())
        threshold = np.partition(bits, numel - count)[numel - count]
        above = np.flatnonzero(bits > threshold)
        # All above the threshold, and the first of those at it.
        ties = np.flatnonzero(bits == threshold)[: count - len(above)]
        assert np.array_equal(found, np.sort(np.concatenate([above, ties])))


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("size", [4096, 300])
def test_blocks_are_selected_from_one_by_one(name: str, size: int) -> None:
    number = 200
    table = SegmentTable(np.arange(number) * size, [size] * number, [0] * number, [(1, 2)] * number)
    for kind in KINDS:
        x = values_of(kind, number * size)
        sorted_segments = orders(x, table)
        for count in (1, 64, size // 3, size - 1):
            assert select(name, x, table, [count] * number) == first(sorted_segments, [count] * number)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_selection_cannot_do_is_refused(name: str) -> None:
    kernels, table, x = get_kernels(name), SegmentTable([0, 5], [5, 4], [0, 0], [(0, 0)] * 2), torch.ones(9)

    def counted(*counts: int) -> torch.Tensor:
        return torch.tensor(counts, dtype=torch.int64)

    room, thresholds = torch.zeros(4, dtype=torch.int32), torch.ones(2)
    with pytest.raises(HyperparameterError, match=r"counts\[1\] is 5: segment 1 has 4 elements"):
        kernels.select_largest(x, table, counted(0, 5), room)
    with pytest.raises(HyperparameterError, match=r"counts\[0\] is -1"):
        kernels.select_largest(x, table, counted(-1, 5), room)
    with pytest.raises(HyperparameterError, match=r"index is .* 5 elements"):
        kernels.select_largest(x, table, counted(1, 4), room)
    for wrong in (x[:8], x.double()):
        with pytest.raises(HyperparameterError, match="x is"):
            kernels.select_largest(wrong, table, counted(1, 3), room)
        with pytest.raises(HyperparameterError, match="x is"):
            kernels.select_above(wrong, table, thresholds, counted(1, 3), room)
    for wrong in (torch.tensor([1.0, -1.0]), torch.tensor([torch.nan, 1.0])):
        with pytest.raises(HyperparameterError, match="magnitudes of at least zero"):
            kernels.select_above(x, table, wrong, counted(1, 3), room)
    with pytest.raises(HyperparameterError, match="limit holds -2"):
        kernels.select_above(x, table, thresholds, counted(6, -2), room)
    with pytest.raises(HyperparameterError, match="index is"):
        kernels.select_above(x, table, thresholds, counted(1, 2), room)


@pytest.mark.parametrize("name", [*NAMES, "meta"])
def test_nothing_is_selected_from_nothing(name: str) -> None:
    kernels, none = get_kernels(name), torch.empty(0, dtype=torch.int32)
    for table in (SegmentTable([], [], [], []), SegmentTable([0, 0], [0, 0], [0, 80], [(1, 2), (3, 4)])):
        counts = torch.zeros(len(table), dtype=torch.int64)
        kernels.select_largest(torch.empty(0), table, counts, none)
        found = kernels.select_above(torch.empty(0), table, torch.ones(len(table)), counts, none)
        assert found.tolist() == [0] * len(table)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
@LIGHT
@given(table=tables(), seed=st.integers(0, 99))
def test_what_is_above_a_threshold_is_counted_and_added_up(
    name: str, kind: str, table: SegmentTable, seed: int
) -> None:
    x = values_of(kind, table.extent, seed)
    threshold = torch.rand(len(table), generator=torch.Generator().manual_seed(seed))
    base = threshold.double() * (seed % 3) / 2
    found = get_kernels(name).excess_sums(x, table, threshold, base)
    same = get_kernels("reference").excess_sums(x, table, threshold, base)
    for one, other in zip((found.count, found.total, found.squares), (same.count, same.total, same.squares)):
        assert torch.equal(one.nan_to_num(-1.0), other.nan_to_num(-1.0))
    for s, (a, n) in enumerate(zip(table.offset.tolist(), table.numel.tolist())):
        magnitudes = x[a : a + n].abs().double()
        above = magnitudes[~(magnitudes <= threshold[s])] - base[s]
        assert int(found.count[s]) == len(above)
        if kind != "not finite":
            assert float(found.total[s]) == pytest.approx(float(above.sum()), rel=1e-12, abs=1e-300)
            assert float(found.squares[s]) == pytest.approx(float(above.square().sum()), rel=1e-12, abs=1e-300)
        elif bool((~magnitudes.isfinite()).any()):
            assert not bool(found.total[s].isfinite())


def test_a_threshold_that_is_none_is_refused() -> None:
    nothing = torch.zeros(1, dtype=torch.float64)
    for wrong in (-1.0, float("nan")):
        with pytest.raises(HyperparameterError, match="at least zero"):
            get_kernels().excess_sums(torch.zeros(3), one_segment(3), torch.tensor([wrong]), nothing)
