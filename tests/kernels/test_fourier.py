"""Fourier transforms: the bits of the reference, the numbers of a library, and undone by the way back."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import BACKENDS, OTHERS, normal

from gradwire.errors import HyperparameterError
from gradwire.kernels import FourierTable, block_sizes, get_kernels

REFERENCE = get_kernels("reference")
SIZES = [2**k for k in range(16)]


@st.composite
def fourier_tables(draw: st.DrawFn) -> FourierTable:
    """Up to 6 parameters of 0 to 300 or a few thousand elements, with gaps."""
    size = 2 ** draw(st.integers(8, 13))
    sizes = draw(st.lists(st.one_of(st.integers(0, 300), st.integers(4000, 9000)), max_size=6))
    gaps = draw(st.lists(st.integers(0, 7), min_size=len(sizes), max_size=len(sizes)))
    offsets, at = [], 0
    for numel, gap in zip(sizes, gaps):
        offsets.append(at + gap)
        at += gap + numel
    return FourierTable(offsets, sizes, size)


def one_block(size: int) -> FourierTable:
    return FourierTable([0], [size], max(size, 256))


def transformed(name: str, x: torch.Tensor, table: FourierTable) -> torch.Tensor:
    z = torch.full((table.coordinates,), torch.nan)
    get_kernels(name).fourier(x, table, z)
    return z


def tolerance(size: int) -> float:
    """Bound the relative error of a block's norm.

    Each of log2(b) steps multiplies by roots that are off by u = 2^-24 at most, with products and sums of errors u: at
    most u + 4 sqrt(2) u (Higham, "Accuracy and Stability of Numerical Algorithms", theorem 24.2); that which separates
    the two halves has another sum before it: all at most 8 u.
    """
    return 8 * max(1, size.bit_length() - 1) * 2.0**-24


@pytest.mark.parametrize("name", OTHERS)
@settings(max_examples=25)
@given(table=fourier_tables(), seed=st.integers(0, 99), shift=st.integers(0, 17))
def test_every_backend_gives_the_bits_of_the_reference(name: str, table: FourierTable, seed: int, shift: int) -> None:
    x = normal(table.extent + 3, seed, shift, spread=3.0)
    expected, found = torch.full((table.coordinates,), torch.nan), torch.full((table.coordinates + shift,), torch.nan)
    REFERENCE.fourier(x, table, expected)
    get_kernels(name).fourier(x, table, found[shift:])
    assert torch.equal(expected.view(torch.int32), found[shift:].view(torch.int32))
    for accumulate in (False, True):
        before = normal(table.extent + 3, 1, shift)
        one, other = before.clone(), before.clone()
        REFERENCE.inverse_fourier(expected, table, one, accumulate)
        get_kernels(name).inverse_fourier(found[shift:], table, other, accumulate)
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))
        touched = torch.zeros(len(x), dtype=torch.bool)
        for offset, numel in zip(table.columns.offset, table.columns.numel):
            touched[offset : offset + numel] = True
        assert torch.equal(other[~touched], before[~touched])


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("size", [8192, 16384, 32768])
def test_long_blocks_have_the_bits_of_the_reference(name: str, size: int) -> None:
    table = FourierTable([1], [size + size // 2 + 5], size)
    x = normal(table.extent, 2)
    z, other, back = transformed(name, x, table), transformed("reference", x, table), x.clone()
    assert torch.equal(z, other)
    get_kernels(name).inverse_fourier(z, table, x)
    REFERENCE.inverse_fourier(z, table, back)
    assert torch.equal(x, back)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 3e38, torch.inf, torch.nan])
def test_special_values_go_where_those_of_the_reference_do(name: str, value: float) -> None:
    table = FourierTable([0], [300], 256)
    x = normal(300, 7)
    x[::5] = value
    ours, theirs = transformed(name, x, table), transformed("reference", x, table)
    back, other = x.clone(), x.clone()
    get_kernels(name).inverse_fourier(ours, table, back)
    REFERENCE.inverse_fourier(theirs, table, other)
    for a, b in ((ours, theirs), (back, other)):
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.nan_to_num(0.0).view(torch.int32), b.nan_to_num(0.0).view(torch.int32))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("size", SIZES)
def test_coefficients_are_those_of_a_library(name: str, size: int) -> None:
    x = normal(size, size)
    z, wanted = transformed(name, x, one_block(size)), torch.fft.rfft(x.double(), norm="forward")
    real = wanted.real[[0]] if size == 1 else wanted.real[[0, -1]]
    pairs = torch.view_as_real(wanted[1:-1]).reshape(-1)
    error = (z - torch.cat([real, pairs])).norm() / torch.cat([real, pairs]).norm()
    assert float(error) <= tolerance(size)
    # Parseval: every pair stands for two frequencies.
    energy = size * (z[: len(real)].double().square().sum() + 2 * z[len(real) :].double().square().sum())
    assert float(energy) == pytest.approx(float(x.double().square().sum()), rel=2.1 * tolerance(size))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("size", SIZES)
def test_the_way_back_undoes_it(name: str, size: int) -> None:
    """And is that of a library for coefficients that no transform has made."""
    kernels, table, x, back = get_kernels(name), one_block(size), normal(size, size), torch.empty(size)
    kernels.inverse_fourier(transformed(name, x, table), table, back)
    assert float((back - x).norm()) <= 2.1 * tolerance(size) * float(x.norm())
    z = normal(size, size + 1)
    kernels.inverse_fourier(z, table, back)
    if size == 1:
        assert torch.equal(back, z)
        return
    spectrum = torch.cat([z[:1].double(), torch.view_as_complex(z[2:].double().reshape(-1, 2)), z[1:2].double()])
    wanted = torch.fft.irfft(spectrum, size, norm="forward")
    assert float((back - wanted).norm()) <= tolerance(size) * float(wanted.norm())


@pytest.mark.parametrize("name", BACKENDS)
def test_a_cosine_has_one_coefficient(name: str) -> None:
    """Where it lies says how coefficients are ordered: real ones first, then pairs, in the order of frequencies."""
    table, angle = FourierTable([0], [256 + 64], 256), 2 * torch.pi * torch.arange(256.0).double() / 256
    for frequency in (1, 5, 127):
        x = torch.cat([torch.cos(frequency * angle + 0.5), torch.zeros(64).double()]).float()
        z = transformed(name, x, table)
        wanted = torch.zeros(table.coordinates)
        place = 4 + 2 * (frequency - 1)
        wanted[place], wanted[place + 1] = 0.5 * np.cos(0.5), 0.5 * np.sin(0.5)
        assert float((z - wanted).norm()) <= tolerance(256) * float(wanted.norm()) + 2.0**-24
    z = transformed(name, torch.cat([torch.zeros(256), torch.ones(64)]), table)
    assert z.nonzero().flatten().tolist() == [2]
    assert float(z[2]) == 1.0


def test_blocks_do_not_depend_on_what_lies_around_them() -> None:
    x = normal(4096 + 700, 4)
    both, alone = FourierTable([0, 4096], [4096, 700], 512), FourierTable([3], [700], 512)
    shifted = torch.cat([torch.ones(3), x[4096:]])
    assert torch.equal(transformed("auto", x, both)[4096:], transformed("auto", shifted, alone))


@pytest.mark.parametrize("name", OTHERS)
def test_any_number_of_threads_gives_the_same_bits(name: str) -> None:
    table = FourierTable([0], [200_000], 1024)
    x, z, back = normal(200_000, 5), torch.empty(200_000), torch.empty(200_000)
    other = transformed(name, x, table)
    get_kernels(name, threads=3).fourier(x, table, z)
    assert torch.equal(z, other)
    get_kernels(name, threads=3).inverse_fourier(z, table, back)
    get_kernels(name).inverse_fourier(z, table, x)
    assert torch.equal(x, back)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("size", [2, 8, 64, 4096])
def test_a_block_that_is_not_finite_has_no_finite_coefficient_and_no_other_block_suffers(
    name: str, bad: float, size: int
) -> None:
    table = FourierTable([0], [2 * 4096 + size], 4096)
    x = normal(table.extent, 6)
    x[8192 + size // 2] = bad
    z, back = transformed(name, x, table), torch.zeros_like(x)
    spoilt = torch.zeros(table.coordinates, dtype=torch.bool)
    real, pair = int(table.columns.real[-1]), int(table.columns.pair[-1])
    spoilt[real : real + 2] = spoilt[pair : pair + size - 2] = True
    assert torch.equal(~torch.isfinite(z), spoilt)
    get_kernels(name).inverse_fourier(z, table, back)
    assert torch.equal(torch.isfinite(back), torch.arange(len(x)) < 8192)


def test_roots_are_those_of_unity_and_the_same_bits_on_every_machine() -> None:
    """To half a unit of the last place, but for what float64 leaves; the digest is that of any correct machine."""
    columns = FourierTable([0], [1], 32768).columns
    for h in (1, 2, 8, 1024, 16384):
        angle = np.pi * np.arange(h) / h
        assert np.abs(columns.cos[h : 2 * h] - np.cos(angle)).max() <= 2.0**-25 * (1 + 1e-6)
        assert np.abs(columns.sin[h : 2 * h] - np.sin(angle)).max() <= 2.0**-25 * (1 + 1e-6)
        if h > 1:
            assert (columns.cos[h + h // 2], columns.sin[h + h // 2]) == (0.0, 1.0)
    small = FourierTable([0], [1], 256).columns
    assert np.array_equal(small.cos, columns.cos[:256])
    assert np.array_equal(small.sin, columns.sin[:256])
    digest = hashlib.sha256(columns.cos.tobytes() + columns.sin.tobytes()).hexdigest()
    assert digest[:16] == "f98e83ffa764e100"


@given(numel=st.integers(0, 10**6), size=st.integers(8, 15))
def test_blocks_are_powers_of_two_that_make_up_the_parameter(numel: int, size: int) -> None:
    sizes = block_sizes(numel, 2**size)
    assert sum(sizes) == numel
    assert all(b & (b - 1) == 0 and b <= 2**size for b in sizes)
    short = [b for b in sizes if b < 2**size]
    assert short == sorted(set(short), reverse=True)
    assert sizes == sorted(sizes, reverse=True)


def test_what_does_not_fit_is_refused() -> None:
    for size in (128, 300, 65536):
        with pytest.raises(HyperparameterError, match="power of two"):
            FourierTable([0], [300], size)
    with pytest.raises(HyperparameterError):
        FourierTable([0, 10], [300, 4], 256)
    table = FourierTable([0], [300], 256)
    for x, z in ((torch.zeros(299), torch.zeros(300)), (torch.zeros(300), torch.zeros(299))):
        with pytest.raises(HyperparameterError):
            REFERENCE.fourier(x, table, z)
        with pytest.raises(HyperparameterError):
            REFERENCE.inverse_fourier(z, table, x)
