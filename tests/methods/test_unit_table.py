"""Units of vectors that are longer than int32 reaches: arithmetic of places, without the vectors."""

from __future__ import annotations

import pytest
import torch

from gradwire.exchange.segments import Parameter, Segment
from gradwire.methods.sparse.sparse_values import REACH, UnitTable

HEIGHT = 3 * REACH // 64
LARGE, SMALL = Parameter("large", (HEIGHT, 64), (64, 1)), Parameter("small", (1000,), (1,))


def everywhere(table: UnitTable, chosen: torch.Tensor) -> list[int]:
    """Return the places by the addresses that kernels are given."""
    found = [0] * len(table.places(chosen))
    for run, index, origin in table.addresses(chosen):
        assert index.dtype == torch.int32
        found[run] = (index.long() + origin).tolist()
    return found


def test_rows_of_a_parameter_beyond_int32_are_found() -> None:
    table = UnitTable([Segment(LARGE, 0, 0, LARGE.numel)], [64])
    rows = [0, REACH // 64 - 1, REACH // 64, HEIGHT - 1]
    places = [64 * row + i for row in rows for i in range(64)]
    chosen = torch.tensor(rows, dtype=torch.int32)
    assert table.places(chosen).tolist() == places
    assert everywhere(table, chosen) == places
    assert len(list(table.addresses(chosen))) == 3


@pytest.mark.parametrize("offset", [0, REACH - 100, 2 * REACH])
def test_a_parameter_far_behind_in_the_vector_is_found(offset: int) -> None:
    table = UnitTable([Segment(SMALL, offset, 0, 1000)], [1])
    chosen = torch.tensor([0, 99, 100, 999], dtype=torch.int32)
    assert table.places(chosen).tolist() == [offset, offset + 99, offset + 100, offset + 999]
    assert everywhere(table, chosen) == table.places(chosen).tolist()


def test_parameters_with_a_gap_between_them_are_found() -> None:
    table = UnitTable([Segment(SMALL, 0, 0, 1000), Segment(SMALL, 2 * REACH, 0, 1000)], [1, 1])
    chosen = torch.tensor([0, 999, 1005], dtype=torch.int32)
    assert everywhere(table, chosen) == [0, 999, 2 * REACH + 5]
    assert everywhere(table, chosen[:0]) == []
