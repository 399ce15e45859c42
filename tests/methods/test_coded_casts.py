"""Casts behind a coder: every bit of what is cast arrives, and the mean is one that we add up ourselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.errors import HyperparameterError
from gradwire.exchange.codecs import Draw, NoSummary
from gradwire.exchange.segments import Parameter, Segment, lay_out
from gradwire.kernels.entropy import entropy_bits
from gradwire.methods.casts.cast import CastCodec
from ranks import fresh_ranks

CASTS = [gw.FP32(), gw.FP16(), gw.BF16()]
SMALLEST = {"fp32": 2.0**-125, "fp16": 2.0**-13, "bf16": 2.0**-125}
"""Magnitudes from here on have halves that the type holds."""

SIZES = (3000, 5, 81, 7000, 160)


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def coded(cast: gw.Method, coder: str = "rans") -> gw.Coded:
    return gw.Coded(compressor=cast, coder=coder)


def link_of(method: gw.Method, workers: int, **options: Any) -> gw.SimulatedLink:
    like = [(f"p{i}", torch.empty(n)) for i, n in enumerate(SIZES)]
    return gw.SimulatedLink(like, method, workers, **options)


def cast_mean(g: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    weight = torch.tensor(1 / len(g))
    total = g[0].to(dtype).float() * weight
    for row in g[1:]:
        total = total + row.to(dtype).float() * weight
    return total.to(dtype).float()


@pytest.mark.parametrize("cast", CASTS, ids=repr)
def test_every_value_of_the_type_comes_back_bit_for_bit(cast: gw.FP32) -> None:
    """All of two bytes, and 2^20 of four; of those that are no number, that they are none."""
    if cast.dtype.itemsize == 2:
        patterns = torch.arange(-(2**15), 2**15).to(torch.int16)
    else:
        patterns = torch.randint(-(2**31), 2**31, (2**20,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    values = patterns.view(cast.dtype)
    flat = torch.cat([torch.full((3,), 7.0), values.float(), torch.full((2,), 7.0)])
    parameter = Parameter("w", (len(values),), (1,))
    codec = CastCodec([Segment(parameter, 3, 0, 100), Segment(parameter, 103, 100, len(values) - 100)], 1, cast.dtype)
    assert codec.runs == [(3, len(values))]
    codes = torch.full((1, codec.payload_bytes(codec.units)), 255, dtype=torch.uint8)
    codec.encode(flat, NoSummary(), Draw(0, 0), codes[0])
    back, own = torch.full_like(flat, 7.0), torch.zeros_like(flat)
    codec.decode_rows(codes, NoSummary(), back)
    codec.add_own(codes[0], NoSummary(), 2.0, own)
    number = ~values.isnan()
    found = back[3:-2]
    assert torch.equal(found.view(torch.int32)[number], values.float().view(torch.int32)[number])
    assert bool(found[~number].isnan().all())
    assert torch.equal(own[3:-2][number], 2 * values.float()[number])
    assert back[[0, 1, 2, -2, -1]].tolist() == [7.0] * 5
    assert not codec.is_finite(NoSummary(), back)
    assert codec.is_finite(NoSummary(), torch.ones_like(back))


def test_a_payload_is_mantissas_and_signs_and_then_exponents() -> None:
    """By hand: -1.5 is sign 1, exponent 127, mantissa 0.5 of two; the docs' example of the wire format."""
    expected = {
        torch.bfloat16: ([0x81], 127),
        torch.float16: ([0x01], 0x7C),
        torch.float32: ([0x01, 0x00, 0x80], 127),
    }
    for dtype, (plain, symbol) in expected.items():
        codec = CastCodec(lay_out([Parameter("w", (2,), (1,))]), 1, dtype)
        out = torch.full((codec.payload_bytes(codec.units),), 255, dtype=torch.uint8)
        codec.encode(torch.tensor([-1.5, 0.0]), NoSummary(), Draw(0, 0), out)
        width = dtype.itemsize
        assert codec.plain_payload_bytes(codec.units) == 16 * (width - 1)
        assert out[: width - 1].tolist() == plain
        assert out[16 * (width - 1)] == symbol
        assert int(out.int().sum()) == sum(plain) + symbol, "all else is zero"


@pytest.mark.parametrize("collective", ["two_shot", "all_gather"])
@pytest.mark.parametrize("cast", CASTS, ids=repr)
def test_the_outcome_is_the_cast_mean_of_casts(cast: gw.FP32, collective: str) -> None:
    """Whatever protocol carries it, whatever the chunks and the coder, for any number of workers."""
    for workers in (1, 2, 3, 5, 8):
        g = randn(workers, workers, sum(SIZES)) * torch.exp(2 * randn(9, sum(SIZES)))
        for coder, chunk_numel in (("rans", 1 << 20), ("huffman", 4000)):
            link = link_of(coded(cast, coder), workers, collective=collective, chunk_numel=chunk_numel)
            assert torch.equal(link.reduce_(g.clone()), cast_mean(g, cast.dtype))


@pytest.mark.parametrize("cast", CASTS, ids=repr)
def test_two_workers_get_the_bits_of_the_plain_cast(cast: gw.FP32) -> None:
    """One sum of two halves, which are exact: float32 holds more than twice the bits, so rounding twice is as once.

    Two bfloat16 values that float32 cannot add exactly differ by 2^16 at least, and the smaller then decides nothing.
    Halves of the smallest values are rounded by the type, by half of its smallest step at most each, and the sum by
    another half step: an element is two steps apart at most.
    """
    g = randn(0, 2, sum(SIZES)) * torch.exp2(torch.randint(-12, 12, (2, sum(SIZES))))
    large = torch.where(g.abs() < SMALLEST[cast.name], SMALLEST[cast.name], g)
    plain, ours = (gw.simulate(large, method).mean for method in (cast, coded(cast)))
    assert torch.equal(plain, ours)
    step = torch.finfo(cast.dtype).smallest_normal * torch.finfo(cast.dtype).eps
    tiny = randn(1, 2, sum(SIZES)) * SMALLEST[cast.name] / 8
    plain, ours = (gw.simulate(tiny, method).mean for method in (cast, coded(cast)))
    apart = (plain.double() - ours.double()).abs()
    assert float(apart.max()) <= 2 * step
    # Plain float32 halves in the type of the sum.
    assert (float(apart.max()) > 0) == (cast.name != "fp32")


def exchanged(specs: list[str]) -> list[torch.Tensor]:
    means = []
    for spec in specs:
        parameter = torch.nn.Parameter(torch.zeros(4000))
        link = gw.Link([("w", parameter)], spec)
        parameter.grad = randn(link.rank, 4000)
        link.reduce_()
        link.close()
        means.append(parameter.grad)
    return means


@pytest.mark.ranks
def test_two_ranks_get_the_bits_of_the_backends_sum() -> None:
    """Gaussian values, of which a few are so small that their halves lose a bit of float16."""
    g = torch.stack([randn(0, 4000), randn(1, 4000)])
    specs = [repr(method) for cast in CASTS for method in (cast, coded(cast))]
    with fresh_ranks(2, 60) as ranks:
        for found in ranks(exchanged, specs):
            for cast, plain, ours in zip(CASTS, found[::2], found[1::2]):
                assert torch.equal(ours, cast_mean(g, cast.dtype))
                large = (g.abs() >= SMALLEST[cast.name]).all(0)
                assert float(large.float().mean()) > 0.99
                assert torch.equal(ours[large], plain[large])


@pytest.mark.parametrize("cast", CASTS, ids=repr)
def test_the_error_does_not_grow_with_the_workers(cast: gw.FP32) -> None:
    """Each value is rounded once by the type and the mean once more; float32 adds N + 2 roundings of 2^-24."""
    unit = torch.finfo(cast.dtype).eps / 2
    for workers in (2, 3, 64):
        g = randn(workers, workers, 4000) + 1
        exact, magnitude = g.double().mean(0), g.double().abs().mean(0)
        error = (gw.simulate(g, coded(cast)).mean.double() - exact).abs()
        allowed = (2 * unit + unit**2 + (workers + 2) * 2**-24) * magnitude
        # Values of float16 below its smallest normal number are rounded to whole smallest steps.
        smallest = torch.finfo(cast.dtype).smallest_normal * torch.finfo(cast.dtype).eps
        assert bool((error <= allowed + smallest).all())


@pytest.mark.parametrize("cast", CASTS, ids=repr)
def test_exponents_take_their_entropy_and_all_else_what_it_is(cast: gw.FP32) -> None:
    """Two workers gather a million values each, every byte counted; the coder within a percent of the entropy."""
    g = randn(0, 2, 1_000_000)
    sent = 8 * gw.simulate(g, coded(cast)).traffic.sent_bytes / 1_000_000
    words = g[0].to(cast.dtype).view(torch.int16 if cast.dtype.itemsize == 2 else torch.int32).long()
    width = 8 * cast.dtype.itemsize
    # A sign in front, then the byte.
    symbols = ((words >> (width - 9)) & 255).to(torch.uint8)
    bound = entropy_bits(symbols) / 1_000_000
    # Exponents of a Gaussian; float16 has three more bits in that byte, which are nearly even.
    assert bound == pytest.approx(5.5 if cast.name == "fp16" else 2.6, abs=0.1)
    assert width - 8 + bound < sent < width - 8 + 1.01 * bound


def test_in_warm_up_casts_travel_whole() -> None:
    for collective in ("two_shot", "all_gather"):
        link = link_of(coded(gw.BF16()), 3, collective=collective, warmup_steps=1)
        g = randn(0, 3, sum(SIZES))
        assert torch.equal(link.reduce_(g.clone()), cast_mean(g, torch.float32))
        assert torch.equal(link.reduce_(g.clone()), cast_mean(g, torch.bfloat16))


def test_what_is_excluded_stays_in_float32() -> None:
    g = randn(0, 3, sum(SIZES))
    mean = link_of(coded(gw.BF16()), 3, exclude=["p0"]).reduce_(g.clone())
    assert torch.equal(mean[:3000], cast_mean(g, torch.float32)[:3000])
    assert torch.equal(mean[3000:], cast_mean(g, torch.bfloat16)[3000:])


def test_what_a_coded_cast_declares() -> None:
    for cast in CASTS:
        method = coded(cast)
        assert method.properties.bit_stable
        assert not cast.properties.bit_stable
        assert (method.traits.collectives, method.traits.min_numel) == (("two_shot", "all_gather"), 0)
        assert (method.traits.unbiased, method.omega, method.delta) == (cast.traits.unbiased, cast.omega, cast.delta)
        assert gw.method(repr(method)) == method
    tags = [cast.tag for cast in CASTS]
    assert len(set(tags)) == 3
    with pytest.raises(HyperparameterError, match="payload is its own"):
        gw.method("Coded(compressor=Coded(compressor=bf16))")
    with pytest.raises(gw.GradwireError, match="all_reduce"):
        link_of(coded(gw.BF16()), 2, collective="all_reduce")
