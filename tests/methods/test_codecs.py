"""Codecs alone: the mean over ranks, what a rank contributed, and what they refuse."""

from __future__ import annotations

import pytest
import torch

import gradwire as gw
from gradwire.exchange.codecs import Codec, Constant, DenseCodec, Draw, NoSummary, SummableCodec, check_workers
from gradwire.exchange.codecs.base import usable
from gradwire.exchange.segments import Parameter, Segment, lay_out
from gradwire.kernels import MAX_WORLD_SIZE, get_kernels, inverse_scale

KERNELS = get_kernels("reference")
N = 3


def segments(*sizes: int) -> tuple[Segment, ...]:
    return lay_out(Parameter(str(i), (n,), (1,)) for i, n in enumerate(sizes))


def encoded(codec: Codec, rows: torch.Tensor, units: int | None = None) -> torch.Tensor:
    """Return every rank's codes, each by its own summary."""
    out = torch.zeros(len(rows), codec.payload_bytes(codec.units if units is None else units), dtype=torch.uint8)
    for rank, (row, codes) in enumerate(zip(rows, out)):
        codec.encode(row, codec.summarise(row), Draw(0, rank), codes)
    return out


def test_float32_is_the_weighted_sum_in_the_order_of_ranks() -> None:
    """Seven values are two units of four; neighbours and gaps alike."""
    places = [Segment(Parameter("a", (4,), (1,)), 0, 0, 4), Segment(Parameter("b", (3,), (1,)), 6, 0, 3)]
    codec = DenseCodec(places, N)
    assert codec.units == 2
    # Magnitudes so unlike that the order of the sum decides its bits.
    rows = torch.tensor([[1e8], [1.0], [-0.99e8]]) * torch.arange(1.0, 10.0)
    weight = torch.tensor(1 / 3)
    expected = ((rows[0] * weight) + rows[1] * weight) + rows[2] * weight
    assert not torch.equal(expected, ((rows[2] * weight) + rows[0] * weight) + rows[1] * weight)
    out = torch.full((9,), 7.0)
    codec.decode_rows(encoded(codec, rows), NoSummary(), out)
    expected[4:6] = 7.0
    assert torch.equal(out, expected), "what lies between is left alone"


def test_float32_travels_by_shares_in_the_same_bits() -> None:
    codec = DenseCodec(segments(7), N)
    rows = torch.randn(N, 7, generator=torch.Generator().manual_seed(0))
    whole, shared = torch.empty(7), torch.empty(7)
    codes = encoded(codec, rows)
    codec.decode_rows(codes, NoSummary(), whole)
    for begin in range(2):
        part = torch.empty(codec.mean_bytes(1), dtype=torch.uint8)
        codec.reduce(codes[:, 16 * begin : 16 * (begin + 1)], begin, part)
        codec.decode_mean(part, NoSummary(), begin, begin + 1, shared)
    assert torch.equal(whole, shared)


def test_a_narrow_mean_is_rounded_at_the_workers_and_once_more() -> None:
    """Nine values of bfloat16 are two units of eight, and the same bits by shares; two ranks' can be merged."""
    codec = DenseCodec(segments(9), N, torch.bfloat16)
    assert (codec.units, codec.payload_bytes(2), codec.mean_bytes(2)) == (2, 32, 32)
    rows = torch.randn(N, 9, generator=torch.Generator().manual_seed(0))
    products = (rows * torch.tensor(1 / 3)).bfloat16().float()
    expected = ((products[0] + products[1]) + products[2]).bfloat16().float()
    out, shared, codes = torch.empty(9), torch.empty(9), encoded(codec, rows)
    codec.decode_rows(codes, NoSummary(), out)
    assert torch.equal(out, expected)
    for begin in range(2):
        part = torch.empty(codec.mean_bytes(1), dtype=torch.uint8)
        codec.reduce(codes[:, 16 * begin : 16 * (begin + 1)], begin, part)
        codec.decode_mean(part, NoSummary(), begin, begin + 1, shared)
    assert torch.equal(shared, expected)
    own = torch.zeros(9)
    codec.add_own(codes[1], NoSummary(), 1.0, own)
    assert torch.allclose(own, 3 * products[1], rtol=1e-6, atol=0)
    merged, both = torch.empty(9), torch.empty_like(codes[0])
    codec.merge([codes[0], codes[1]], Draw(0, 0), both)
    codec.decode_mean(both, NoSummary(), 0, codec.units, merged)
    assert torch.equal(merged, (products[0] + products[1]).bfloat16().float())


def test_a_rank_knows_what_it_contributed_in_float32() -> None:
    codec = DenseCodec(segments(5), 4)
    row = torch.tensor([[1.0, -2.0, 4.0, 0.5, 8.0]])
    out = torch.ones(5)
    codec.add_own(encoded(codec, row)[0], NoSummary(), -0.5, out)
    assert torch.equal(out, 1 - 0.5 * row[0])


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_mean_that_is_not_finite_is_seen(bad: float) -> None:
    codec = DenseCodec(segments(3, 4), 2)
    flat = torch.zeros(7)
    assert codec.is_finite(NoSummary(), flat)
    flat[6] = bad
    assert not codec.is_finite(NoSummary(), flat)


def test_tiny_scales_can_be_divided_by() -> None:
    tiny = torch.tensor([0.0, 1e-45, 1e-38, 2.0**-100, 1.0, torch.inf])
    found = usable(tiny)
    assert found.tolist() == [0.0, 2.0**-100, 2.0**-100, 2.0**-100, 1.0, torch.inf]
    assert bool(torch.isfinite(inverse_scale(found[1:-1])).all())


GRID = torch.tensor([[4.0, -2.0, 0.0, 1.0] * 20, [8.0, 2.0, -4.0, 0.0] * 20, [0.0] * 80])
"""Values on a grid of eighths of 8 or quarters of 4: they come back exactly."""


@pytest.mark.parametrize("method", [gw.QSGDinf(levels=8, block_size=None), gw.NUQSGD(levels=4, norm="max")])
def test_the_mean_of_levels_is_over_all_ranks(method: gw.Compressor) -> None:
    codec = method.codec(KERNELS, segments(80), N, 0)
    out = torch.full((80,), 5.0)
    codec.decode_rows(encoded(codec, GRID), codec.summarise(GRID[0]), out)
    # Three products by a third, each rounded, of sums below 12.
    torch.testing.assert_close(out, GRID.mean(0), rtol=0, atol=12 * 2.0**-22)


def test_shared_levels_are_averaged() -> None:
    codec = gw.QSGDMaxNorm(levels=8).codec(KERNELS, segments(80), N, 0)
    assert isinstance(codec, SummableCodec)
    summary = codec.summarise(GRID[0])
    assert summary.shared is not None
    largest = torch.stack([codec.summarise(row).shared for row in GRID]).amax(0)  # type: ignore[arg-type, misc]
    ours = summary.select(Constant(torch.tensor([0])), largest)
    out = torch.zeros(N, codec.payload_bytes(codec.units), dtype=torch.uint8)
    for rank, (row, codes) in enumerate(zip(GRID, out)):
        codec.encode(row, ours, Draw(0, rank), codes)
    mean = torch.full((80,), 5.0)
    codec.decode_rows(out, ours, mean)
    torch.testing.assert_close(mean, GRID.mean(0), rtol=0, atol=12 * 2.0**-22)


@pytest.mark.parametrize(
    "method", [gw.QSGDinf(levels=8, block_size=None), gw.TernGrad(clip=None), gw.ScaledSign(), gw.Natural()]
)
def test_a_rank_adds_what_it_contributed_by_its_weight(method: gw.Compressor) -> None:
    """Magnitudes of 4 or 0, and of 4 alone for signs, come back exactly."""
    row = torch.tensor([4.0, -4.0, 4.0, 4.0] * 20)
    codec = method.codec(KERNELS, segments(80), N, 0)
    codes, summary = encoded(codec, row[None])[0], codec.summarise(row)
    ours = codec.remember(summary.select(Constant(torch.tensor([0])), summary.shared), row, Draw(0, 0), True)
    out = torch.ones(80)
    codec.add_own(codes, ours, 0.25, out)
    assert torch.equal(out, 1 + 0.25 * row)


def test_integers_of_too_many_workers_are_refused() -> None:
    check_workers("x", MAX_WORLD_SIZE)
    with pytest.raises(gw.IncompatibleError, match=f"use at most {MAX_WORLD_SIZE} workers"):
        check_workers("x", MAX_WORLD_SIZE + 1)
    with pytest.raises(gw.IncompatibleError, match="use at most levels=8191"):
        gw.QSGDMaxNorm(levels=8192).codec(KERNELS, segments(80), 4, 0)
    gw.QSGDMaxNorm(levels=8191).codec(KERNELS, segments(80), 4, 0)
