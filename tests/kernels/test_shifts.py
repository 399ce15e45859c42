"""Differences to shifts, and steps of shifts."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire import HyperparameterError
from gradwire.kernels import get_kernels
from tests.kernels.kernel_cases import BACKENDS, OTHERS, normal

REFERENCE = get_kernels("reference")
TYPES = (torch.float64, torch.float32)


def special(x: torch.Tensor) -> torch.Tensor:
    """Put infinities, NaN, zeros and a denormal number among the values."""
    for place, value in enumerate((torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e-42)):
        x[7 * place + 3 : 7 * place + 4] = value
    return x


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@settings(max_examples=25)
@given(
    numel=st.one_of(st.integers(0, 70), st.integers(1000, 5000)),
    seed=st.integers(0, 99),
    shift=st.integers(0, 17),
    rate=st.floats(2.0**-20, 1.0),
    scale=st.sampled_from([1.0, 65536.0, 3.0]),
)
def test_every_backend_gives_the_bits_of_the_reference(
    name: str, dtype: torch.dtype, numel: int, seed: int, shift: int, rate: float, scale: float
) -> None:
    results = []
    for kernels in (REFERENCE, get_kernels(name)):
        x, held = special(normal(numel, seed, shift)), special(normal(numel, seed + 1, shift).flip(0)).to(dtype)
        difference, mean = x.clone(), x.clone()
        own, following = torch.empty_like(held), torch.empty_like(held)
        kernels.subtract_shift(difference, held, scale)
        kernels.step_shift(held, x, rate, own)
        kernels.step_mean_shift(held, mean, rate, scale, following)
        results.append((difference, own, mean, following))
    for expected, found in zip(*results):
        assert torch.equal(expected.nan_to_num(7.0, 8.0, 9.0), found.nan_to_num(7.0, 8.0, 9.0))
        assert torch.equal(torch.signbit(expected), torch.signbit(found)) or bool(expected.isnan().any())


@pytest.mark.parametrize("name", BACKENDS)
def test_a_step_is_rounded_once(name: str) -> None:
    """In exact arithmetic: no number of the shifts' type is nearer to shift + rate x, and x - shift is rounded last."""
    kernels, rate = get_kernels(name), 0.3
    x, held = normal(50, 0), normal(50, 1).double() / 3
    out, mean, difference = torch.empty_like(held), x.clone(), x.clone()
    kernels.step_mean_shift(held, mean, rate, 1.0, out)
    kernels.subtract_shift(difference, held, 1.0)
    for value, before, after in zip(x.tolist(), held.tolist(), out.tolist()):
        assert after == float(Fraction(before) + Fraction(rate) * Fraction(value))
    assert torch.equal(mean, (x.double() + held).float())
    assert torch.equal(difference, (x.double() - held).float())


def test_what_does_not_fit_is_refused() -> None:
    x = torch.ones(8)
    with pytest.raises(HyperparameterError, match="shifts are float64 or float32"):
        REFERENCE.subtract_shift(x, torch.ones(8).half(), 1.0)
    with pytest.raises(HyperparameterError, match="shift is"):
        REFERENCE.subtract_shift(x, torch.ones(7), 1.0)
    with pytest.raises(HyperparameterError, match="x is"):
        REFERENCE.step_shift(torch.ones(8), x.double(), 1.0, x)
    with pytest.raises(HyperparameterError, match="out is"):
        REFERENCE.step_shift(torch.ones(8).double(), x, 1.0, x)
