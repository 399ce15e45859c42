"""Small messages of the driver that change on the way, on real ranks: named, on whichever rank sees them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradwire as gw

pytestmark = pytest.mark.ranks

SIZE = 2000


def refusal_of(method: str, name: str, second: int, bits: int, liar: int = 1) -> tuple[str, str]:
    """Exchange two rounds, and damage what one rank sends by that call of a function of the transport's module."""
    from gradwire.exchange.drivers.transports import base, notes

    module = base if name == "with_checksum" else notes
    parameter = torch.nn.Parameter(torch.zeros(SIZE))
    link = gw.Link([("w", parameter)], method, min_numel=0)
    real, calls = getattr(module, name), [0]

    def damaged(*arguments: Any) -> torch.Tensor:
        message: torch.Tensor = real(*arguments)
        calls[0] += 1
        if calls[0] == second:
            # The first byte of a scale, or of the length of rank 0's row.
            message.view(-1)[0] ^= bits
        return message

    found = "nothing was refused"
    if link.rank == liar:
        setattr(module, name, damaged)
    try:
        for round in range(3):
            parameter.grad = torch.randn(SIZE, generator=torch.Generator().manual_seed(10 * round + link.rank))
            link.reduce_()
    except gw.GradwireError as error:
        found = f"{type(error).__name__}: {error}"
    finally:
        setattr(module, name, real)
        link.close()
    return found, type(link.error).__name__


def test_scales_that_change_on_the_way_are_an_error_that_names_sender_bucket_and_round(three_ranks: Any) -> None:
    for found, _ in three_ranks(refusal_of, "terngrad", "with_checksum", 2, 1):
        assert found.startswith("PayloadError: rank ")
        assert "bucket 0" in found
        assert "round 1: " in found
        assert "values for a maximum from rank 1: its checksum differs" in found


def test_announced_lengths_that_change_on_the_way_are_an_error(three_ranks: Any) -> None:
    (found, _), *others = three_ranks(refusal_of, "Coded(compressor=QSGDinf())", "announce", 2, 16)
    assert found.startswith("PayloadError: rank 0, bucket 0")
    assert "round 1: rank 1 announced a row of" in found
    # Theirs arrived as it was; they learn of rank 0's failure in the next round at the latest.
    assert all("nothing was refused" not in sentence for sentence, _ in others)


def test_a_length_that_changes_inside_a_group_is_told_by_the_senders_own_number(four_ranks: Any) -> None:
    spec = "Hierarchical(Coded(compressor=QSGDinf()), groups=((0, 2), (1, 3)))"
    _, _, (found, _), _ = four_ranks(refusal_of, spec, "announce", 2, 16, 3)
    assert "rank 3 announced a row of" in found
