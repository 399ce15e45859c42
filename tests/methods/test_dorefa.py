"""DoReFa: the paper's formula, what its noise does, its levels and their variance."""

from __future__ import annotations

import math

import pytest
import torch

import gradwire as gw
from gradwire.errors import HyperparameterError
from gradwire.exchange.segments import Parameter, Segment
from gradwire.kernels import get_kernels
from gradwire.kernels.table import GroupIndex
from laws import levels


def papers(v: torch.Tensor, largest: float, sigma: torch.Tensor, bits: int) -> torch.Tensor:
    """Return equation 12 of the paper, float64: f(v) = 2 M (quantise(v / 2 M + 1/2 + sigma / n) - 1/2)."""
    n = 2**bits - 1
    shifted = v.double() / (2 * largest) + 0.5 + sigma / n
    return 2 * largest * (torch.round(n * shifted) / n - 0.5)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_noise_of_one_step_before_rounding_is_stochastic_rounding(bits: int) -> None:
    """From end to end: the two neighbours alone, with the value as their mean; none outside, so that none is clipped.

    Over all the midpoints of ``draws`` parts of the noise, which is exact where values are multiples of such a part.
    """
    n, draws = 2**bits - 1, 64
    sigma = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws - 0.5
    y = torch.arange(n * draws + 1, dtype=torch.float64) / draws
    found = papers((2 * y / n - 1)[:, None], 1.0, sigma, bits)
    place = (found + 1) * n / 2
    # Two dozen roundings of numbers up to 2 n.
    assert float((place - place.round()).abs().max()) < 1e-13
    assert bool(((place.round() >= y.floor()[:, None]) & (place.round() <= y.ceil()[:, None])).all())
    torch.testing.assert_close(place.mean(1), y, rtol=0, atol=1e-13)


@pytest.mark.parametrize("bits", [1, 2, 3, 6, 8])
def test_what_comes_out_is_the_papers_formula_with_the_same_random_numbers(bits: int) -> None:
    """The noise is that of the element's random number, mirrored where the value is negative."""
    size = 4096
    method = gw.DoReFa(bits=bits, block_size=None)
    v = torch.randn(size, generator=torch.Generator().manual_seed(bits))
    segment = Segment(Parameter("0", (size,), (1,)), 0, 0, size)
    table = method.codec(get_kernels("reference"), [segment], 1, 5).table
    where = GroupIndex(table)
    uniform = torch.zeros(size)
    where.write(where.uniform(3, 0).float(), uniform, False)
    # A number passes a step if it is above u of it: the noise is largest where u is 0.
    sigma = (0.5 - uniform.double() / 2**24) * torch.where(torch.signbit(v), -1.0, 1.0)
    largest = float(v.abs().max())
    expected = papers(v, largest, sigma, bits)
    found = gw.simulate(v[None], method, seed=5, round=3).mean.double()
    n = 2**bits - 1
    # float32 rounds thresholds on the scale 2^24 and the value: a few units of 2^-24 of n steps.
    y = n * (v.double() / (2 * largest) + 0.5) + sigma
    sure = ((y - y.floor()) - 0.5).abs() > n * 2.0**-22
    assert float(sure.float().mean()) > 0.99
    # A level is rounded once, and multiplied once.
    torch.testing.assert_close(found[sure], expected[sure], rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("bits", [1, 2, 5, 8])
def test_levels_are_odd_parts_of_the_maximum_and_zero_is_none(bits: int) -> None:
    n = 2**bits - 1
    v = torch.linspace(-1, 1, 4097).repeat(1, 4)
    found = gw.simulate(4.0 * v, gw.DoReFa(bits=bits, block_size=None)).mean / 4
    place = (found.double() + 1) * n / 2
    # A level is rounded to float32.
    assert float((place - place.round()).abs().max()) < n * 2.0**-23
    assert set(place.round().tolist()) == set(range(n + 1))
    assert float(found.abs().min()) == pytest.approx(1 / n, rel=1e-6)
    ends = v[0].abs() == 1
    assert torch.equal(found[ends], v[0, ends]), "the largest are exact"
    on_levels = torch.tensor([[(2.0 * j - n) / n for j in range(n + 1)]])
    assert torch.equal(gw.simulate(on_levels, gw.DoReFa(bits=bits)).mean, on_levels[0])


def test_a_zero_goes_to_either_side_and_a_block_of_zeros_stays() -> None:
    """The least level is M / n, so that a zero beside other values always moves; without other values nothing does."""
    v = torch.zeros(2, 512)
    v[:, 0] = 3.0
    found = torch.stack([gw.simulate(v[:1], gw.DoReFa(bits=2), round=r).mean[1:] for r in range(40)])
    torch.testing.assert_close(found.abs(), torch.ones_like(found))
    # 20,440 fair signs: five deviations of 1/2 over the root of their number.
    assert abs(float((found > 0).float().mean()) - 0.5) < 2.5 / math.sqrt(found.numel())
    assert gw.simulate(torch.zeros(2, 700), gw.DoReFa(bits=2)).mean.tolist() == [0.0] * 700


@pytest.mark.parametrize(("bits", "size"), [(1, 64), (3, 512), (6, 4096)])
def test_the_variance_is_largest_for_one_value_and_zeros(bits: int, size: int) -> None:
    """(d - 1) / n^2, with every draw: each zero is M / n away from either level."""
    n = 2**bits - 1
    method = gw.DoReFa(bits=bits, block_size=size)
    v = torch.zeros(1, size)
    v[0, 5] = -2.0
    error = float((gw.simulate(v, method).mean - v[0]).double().square().sum() / 4)
    assert error == pytest.approx((size - 1) / n**2, rel=1e-5)
    assert method.omega == pytest.approx((size - 1) / n**2)


@pytest.mark.parametrize(("bits", "normal", "heavy"), [(2, 0.814, 19.1), (3, 0.148, 3.42), (4, 0.0322, 0.713)])
def test_against_levels_with_a_zero(bits: int, normal: float, heavy: float) -> None:
    """Blocks of 512: one level more in as many bits is less error of normal values, and more of heavy tails.

    QSGDinf with one value fewer has 1.62, 0.200 and 0.0369 of normal values, and 3.09, 0.763 and 0.229 of these tails.
    """
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(400, 512, generator=draw)
    tails = torch.randn(400, 512, generator=draw) * torch.exp(1.5 * torch.randn(400, 512, generator=draw))
    n = 2**bits - 1
    ours = levels([-1, *range(1, n + 1, 2)], 512, "max")
    theirs = levels(range((n - 1) // 2 + 1), 512, "max")
    for values, expected, better in ((x, normal, True), (tails, heavy, False)):
        square = values.double().square().sum(1)
        without, zero = (float((law(values).sum(1) / square).mean()) for law in (ours, theirs))
        # Blocks differ by less than four times their mean: of 400, by a fifth, where three digits are given.
        assert without == pytest.approx(expected, rel=0.2)
        assert (without < zero) == better
        found = gw.simulate(values.reshape(1, -1), gw.DoReFa(bits=bits)).mean.reshape(400, 512)
        # Rounding is a sum of 204,800 independent errors, the largest of which are a step: a hundredth or less.
        measured = float(((found - values).double().square().sum(1) / square).mean())
        assert measured == pytest.approx(without, rel=0.03)


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ("DoReFa(bits=0)", "1 to 8"),
        ("DoReFa(bits=9)", "1 to 8"),
        ("DoReFa(bits=2.0)", "1 to 8"),
        ("DoReFa(bits=True)", "1 to 8"),
        ("DoReFa(block_size=100)", "multiple of 16"),
        ("DoReFa(blocks='layer')", "'parameter'"),
    ],
)
def test_fields_out_of_range_are_refused(spec: str, part: str) -> None:
    with pytest.raises(HyperparameterError, match=part):
        gw.method(spec)


def test_error_feedback_takes_it_from_two_bits_on() -> None:
    """A step is 2 / n of the maximum: below it from n = 3 on, and twice as much for n = 1."""
    assert [gw.DoReFa(bits=k).traits.worst_step for k in (1, 2, 3)] == [2.0, 2 / 3, 2 / 7]
    gw.ErrorFeedback(compressor=gw.DoReFa(bits=2))
    with pytest.raises(HyperparameterError, match="is no contraction"):
        gw.ErrorFeedback(compressor=gw.DoReFa(bits=1))
