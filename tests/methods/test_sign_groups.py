"""Signs with one scale for a group of filters: what they take, and what they lose as groups grow."""

from __future__ import annotations

import itertools

import pytest
import torch

import gradwire as gw

FILTER = 320
"""Weights of a filter: signs travel 80 to ten bytes, and blocks are multiples of 16."""

FILTERS = 64


def filters(kind: str, seed: int) -> torch.Tensor:
    """Return weights ``[FILTERS, FILTER]`` whose filters are of one size, of many, or all but empty."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(FILTERS, FILTER, generator=generator)
    if kind == "unlike":
        x *= torch.logspace(-3, 3, FILTERS)[torch.randperm(FILTERS, generator=generator), None]
    if kind == "sparse":
        x *= torch.rand(FILTERS, FILTER, generator=generator) < 0.05
    return x


def error(x: torch.Tensor, group: int) -> float:
    """Return |W - alpha sign(W)|^2 with one alpha for each ``group`` filters."""
    found = gw.simulate(x.reshape(1, -1), gw.ScaledSign(block_size=group * FILTER)).mean
    return float((found.double() - x.double().reshape(-1)).square().sum())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["alike", "unlike", "sparse"])
def test_the_error_never_falls_when_groups_grow(kind: str, seed: int) -> None:
    x = filters(kind, seed)
    errors = [error(x, group) for group in (1, 2, 4, 8, 16, 32, 64)]
    assert all(b >= a * (1 - 1e-5) for a, b in itertools.pairwise(errors))
    # The bound is not met because nothing changes: unlike filters lose by a joint scale.
    if kind == "unlike":
        assert errors[-1] > 1.5 * errors[0]


@pytest.mark.parametrize("kind", ["alike", "unlike", "sparse"])
def test_a_group_of_one_filter_is_the_binary_weight_scheme(kind: str) -> None:
    """Which has for each filter the mean magnitude of its weights, and sign(0) = +1."""
    x = filters(kind, 0)
    signs = torch.where(x < 0, -1.0, 1.0)
    wanted = x.abs().mean(1, keepdim=True) * signs
    found = gw.simulate(x.reshape(1, -1), gw.ScaledSign(block_size=FILTER)).mean.view_as(x)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("group", [1, 2, 8, 64])
def test_a_group_takes_a_bit_a_weight_and_one_scale(group: int) -> None:
    """G n + 32 bits for G filters of n weights, G (n + 32) if each has its scale; beside what one message costs."""

    def sent_bits(count: int, block: int) -> int:
        link = gw.SimulatedLink([("w", torch.empty(count))], gw.ScaledSign(block_size=block), 2, min_numel=0)
        link.reduce_(torch.randn(2, count, generator=torch.Generator().manual_seed(0)))
        return 8 * link.traffic().sent_bytes

    length = group * FILTER
    # Eight groups beside sixteen: messages cost the same, and their parts are multiples of 16 bytes, so not padded.
    grouped = sent_bits(16 * length, length) - sent_bits(8 * length, length)
    single = sent_bits(16 * length, FILTER) - sent_bits(8 * length, FILTER)
    assert grouped == 8 * (group * FILTER + 32)
    assert single == 8 * group * (FILTER + 32)
