"""Moments against float64, and what they do with values that are not numbers."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_cases import BACKENDS, normal, one_segment

from gradwire.kernels import SegmentTable, get_kernels


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("exponent", [-140, -120, -30, 0, 100])
def test_moments_are_right_within_the_truncation(name: str, exponent: int) -> None:
    x = normal(10_001, 1, spread=0.5) * 2.0**exponent
    moments = get_kernels(name).moments(x, one_segment(x.numel()))
    exact = x.double()
    largest = float(x.abs().max())
    # Truncation moves an element by less than 2^-23 of the largest power of two, or 2^-127 where that would be below.
    step = max(2.0 ** (math.floor(math.log2(largest)) - 23), 2.0**-127)
    assert float(moments.max_abs[0]) == largest
    assert abs(float(moments.mean[0]) - float(exact.mean())) <= step
    rms = float((exact**2).mean().sqrt())
    assert abs(float(moments.std[0]) - float(exact.std(unbiased=False))) <= 4 * step * (1 + rms / max(rms, step))


@pytest.mark.parametrize("name", BACKENDS)
def test_constant_and_single_values(name: str) -> None:
    table = SegmentTable([0, 5000, 5001], [5000, 1, 3], [0, 0, 0], [(0, 0)] * 3)
    x = torch.cat([torch.full((5000,), -0.75), torch.tensor([3.0]), torch.tensor([1.0, -1.0, 0.0])])
    moments = get_kernels(name).moments(x, table)
    assert moments.max_abs.tolist() == [0.75, 3.0, 1.0]
    assert moments.mean.tolist() == [-0.75, 3.0, 0.0]
    assert moments.std.tolist() == [0.0, 0.0, math.sqrt(2 / 3)]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 4095, 4096, 8999])
def test_one_bad_value_marks_its_segment_only(name: str, bad: float, place: int) -> None:
    table = SegmentTable([0, 9000], [9000, 100], [0, 0], [(0, 0)] * 2)
    x = normal(9100, 2)
    x[place] = bad
    moments = get_kernels(name).moments(x, table)
    assert float(moments.max_abs[0]) == math.inf
    assert (float(moments.mean[0]), float(moments.std[0])) == (0.0, 0.0)
    assert float(moments.max_abs[1]) == float(x[9000:].abs().max())
    assert float(moments.std[1]) > 0


@pytest.mark.parametrize("name", BACKENDS)
def test_order_within_a_block_does_not_matter(name: str) -> None:
    x = normal(4096, 3, spread=4.0)
    shuffled = x[torch.randperm(4096, generator=torch.Generator().manual_seed(0))]
    a, b = (get_kernels(name).moments(v, one_segment(4096)) for v in (x, shuffled))
    assert torch.equal(a.mean, b.mean)
    assert torch.equal(a.std, b.std)
