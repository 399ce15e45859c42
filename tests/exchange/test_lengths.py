"""Lengths that ranks announce before rows that differ in length: read as written, or refused."""

from __future__ import annotations

import pytest
import torch

from gradwire.errors import PayloadError
from gradwire.exchange.drivers.tables import announce, announced

LENGTHS = torch.tensor([[0, 7, 64], [1, 0, 3], [2, 5, 0]])
"""Row r: what rank r announces to each of three."""


def received(rank: int) -> torch.Tensor:
    """Return what reaches a rank: of every rank its own row's part."""
    return torch.stack([announce(row).view(3, -1)[rank] for row in LENGTHS])


@pytest.mark.parametrize("rank", range(3))
def test_what_was_announced_is_read_and_a_ranks_own_row_is_none(rank: int) -> None:
    assert announced(received(rank), rank, 64).tolist() == LENGTHS[:, rank].tolist()


def test_more_than_fits_is_refused() -> None:
    assert announced(received(2), 2, 64).tolist() == [64, 3, 0]
    with pytest.raises(PayloadError, match="rank 0 announced a row of 64 bytes"):
        announced(received(2), 2, 63)


@pytest.mark.parametrize("bit", range(64))
def test_any_bit_that_changes_is_seen(bit: int) -> None:
    told = received(0)
    told[1, bit // 8] ^= 1 << bit % 8
    with pytest.raises(PayloadError, match="rank 1 announced a row of"):
        announced(told, 0, 1 << 40)
    own = received(1)
    own[1, bit // 8] ^= 1 << bit % 8
    assert announced(own, 1, 64).tolist() == LENGTHS[:, 1].tolist(), "a rank tells itself nothing"
