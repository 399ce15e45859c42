"""ATOMO on frequencies, by number of the property in the paper's summary (docs/properties.md)."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.datasets import load_digits

import gradwire as gw
from gradwire.errors import HyperparameterError
from gradwire.exchange.segments import Parameter, lay_out
from gradwire.kernels import block_sizes, get_kernels
from gradwire.methods.atoms.atom_codec import probabilities
from gradwire.methods.atoms.fourier_atomo import FourierAtomCodec
from gradwire.methods.sparse.sparse_codec import SparseSummary

ROUNDING = 2.0**-24


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def heavy(*shape: int, seed: int = 0) -> torch.Tensor:
    return gaussian(*shape, seed=seed) * (2 * gaussian(*shape, seed=seed + 1)).exp()


def walk(numel: int, seed: int = 0) -> torch.Tensor:
    return gaussian(numel, seed=seed).cumsum(0)


def unitary(x: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return lambda e^(i phase) of all atoms of rows of vectors: of a library's transform, in float64."""
    found = []
    for part in x.double().split(block_sizes(x.shape[-1], block_size), -1):
        b = part.shape[-1]
        spectrum = torch.fft.rfft(part, norm="ortho")
        spectrum[..., 1 : (b + 1) // 2] *= math.sqrt(2)
        found.append(spectrum)
    return torch.cat(found, -1)


def variance(size: torch.Tensor, p: torch.Tensor) -> float:
    """Sum of lambda^2 (1 / p - 1) over what may be kept."""
    return float((size.square() * (1 / p - 1))[size > 0].sum())


def omega(size: torch.Tensor, density: float) -> float:
    """The variance over the squared norm, with a share of atoms of such sizes."""
    size = size.abs().double()
    return variance(size, probabilities(size, max(1.0, density * len(size)))) / float(size.square().sum())


def rounds(x: torch.Tensor, method: gw.Method, number: int) -> torch.Tensor:
    """Return what is drawn for a vector, of several parameters in each round, which draw for themselves."""
    copies = 8
    link = gw.SimulatedLink([(str(i), torch.empty(x.shape)) for i in range(copies)], method, 1, min_numel=0)
    same = x.repeat(copies)[None]
    return torch.cat([link.reduce_(same.clone()).view(copies, -1) for _ in range(number // copies)])


def rounding(numel: int) -> float:
    """Bound what both transforms round, relative to the vector (see the tests of the kernels)."""
    return 2.1 * 8 * max(1, numel.bit_length() - 1) * ROUNDING


@pytest.mark.parametrize("density", [0.03, 0.15, 0.5])
def test_frequencies_have_the_chances_the_mean_and_the_variance_that_are_said(density: float) -> None:
    """1, 2, 4: blocks of 256, 256, 64, 32 and 4, all with one c, drawn 800 times."""
    x, number = walk(612, seed=1) + 3 * gaussian(612, seed=2), 800
    found = unitary(rounds(x, gw.FourierATOMO(density=density, block_size=256), number), 256)
    wanted = unitary(x, 256)
    size = wanted.abs()
    assert len(size) == 129 + 129 + 33 + 17 + 3
    s = density * len(size)
    p = probabilities(size, s)
    # What is not kept is rounding.
    kept = found.abs() > 1e-4 * size.max()
    assert bool((size / p > 1e-3 * size.max()).all())
    # Chances within 4.8 deviations: of three hundred, beyond that with a chance of 5e-4; 2^-24 is a draw's grain.
    deviation = (p * (1 - p) / number).sqrt()
    assert bool(((kept.double().mean(0) - p).abs() <= 4.8 * deviation + 1 / number * (p < 1) + ROUNDING).all())
    spent = (p * (1 - p)).sum().sqrt() / math.sqrt(number)
    assert float(kept.sum(1).double().mean()) == pytest.approx(s, abs=4.8 * float(spent))
    # What is kept is lambda / p, phase included.
    noise = rounding(256) * float(x.norm()) / density
    assert bool(((found - wanted / p).abs()[kept] <= noise).all())
    usual = (p * number > 30) & (p < 1)
    z = (found.mean(0) - wanted).abs()[usual] / (size * (1 / p - 1).sqrt() / math.sqrt(number))[usual]
    assert float(z.max()) < 4.8
    # The squared error of a round is a sum of independent lambda^2 (t / p - 1)^2.
    fourth = (size**4 * ((1 - p) ** 4 / p**3 + (1 - p) - (1 / p - 1).square())).sum()
    error = float((found - wanted).abs().square().sum(1).mean())
    assert error == pytest.approx(variance(size, p), abs=4.8 * math.sqrt(fourth / number) + noise**2)


@pytest.mark.parametrize("size", [256, 4096])
def test_a_cosine_takes_one_atom(size: int) -> None:
    """3: with a budget of one atom a block of one frequency is exact, but for rounding."""
    method = gw.FourierATOMO(density=1 / (size // 2 + 1), block_size=size)
    for frequency in (0, 1, 5, size // 2 - 1, size // 2):
        angle = 2 * math.pi * frequency * torch.arange(float(size)).double() / size
        x = torch.cos(angle + (0.0 if frequency in (0, size // 2) else 0.7)).float()
        mean = gw.simulate(x[None], method).mean
        # What rounds to other frequencies is drawn with one c, their sum: at most sqrt(atoms) times its norm.
        limit = (1 + math.sqrt(size // 2 + 1)) * rounding(size) * float(x.norm())
        assert float((mean - x).norm()) <= limit


def test_a_few_frequencies_are_exact_within_the_budget() -> None:
    """3: those of several blocks together."""
    t = torch.arange(4096.0).double() * 2 * math.pi / 1024
    x = (torch.cos(3 * t) + 4 * torch.sin(7 * t) - 2).float()
    mean = gw.simulate(x[None], gw.FourierATOMO(density=13 / (4 * 513), block_size=1024)).mean
    assert float((mean - x).norm()) <= (1 + math.sqrt(4 * 513)) * rounding(1024) * float(x.norm())


@pytest.mark.parametrize("numel", [1, 2, 3, 255, 300, 5000])
def test_with_all_atoms_nothing_is_lost(numel: int) -> None:
    """3: but for rounding; and lambda is an orthonormal basis' (Parseval)."""
    x = heavy(2, numel, seed=3)
    mean = gw.simulate(x, gw.FourierATOMO(density=1.0)).mean
    limit = rounding(4096) * float(x.double().norm())
    assert float((mean - x.mean(0)).norm()) <= limit
    assert float(unitary(x, 4096).abs().square().sum()) == pytest.approx(float(x.double().square().sum()), rel=1e-12)


@pytest.mark.parametrize("block_size", [256, 4096])
def test_the_declared_variance_is_not_exceeded(block_size: int) -> None:
    """5: and reached by a single element, whose frequencies are all alike but for the two real ones."""
    method = gw.FourierATOMO(density=0.05, block_size=block_size)
    for x in (torch.eye(4096)[1], torch.eye(20)[1], gaussian(4096), heavy(4096), walk(4096), torch.eye(3000)[0] + 0.01):
        bound = method.omega_of(len(x))
        assert bound is not None
        found = omega(unitary(x, block_size), 0.05)
        assert found <= bound * (1 + 1e-9)
        if block_size == len(x) and x[1] == 1:
            assert found > 0.99 * bound


def test_frequencies_pay_for_smooth_vectors_and_elements_for_spikes() -> None:
    """6: omega with a twentieth of the atoms, and so of the numbers: the figures of docs/methods/atoms.md."""
    for x, *figures in (
        (walk(4096, seed=4), 0.024, 0.010, 16.3),
        (gaussian(4096, seed=5), 14.6, 14.4, 11.6),
        (heavy(4096, seed=6), 15.0, 11.3, 0.23),
    ):
        found = omega(unitary(x, 4096), 0.05), omega(unitary(x, 256), 0.05), omega(x, 0.05)
        assert found == pytest.approx(figures, rel=0.03)


def test_gradients_of_a_perceptron_are_no_smooth_vectors() -> None:
    """6: of both matrices of a network on images of digits."""
    digits = load_digits()
    images, labels = torch.tensor(digits.data[:256]).float() / 16, torch.tensor(digits.target[:256])
    weights = [(0.1 * gaussian(*shape, seed=7)).requires_grad_() for shape in ((256, 64), (256, 256), (10, 256))]
    hidden = torch.relu(torch.relu(images @ weights[0].T) @ weights[1].T)
    torch.nn.functional.cross_entropy(hidden @ weights[2].T, labels).backward()
    ratios = []
    for weight in weights[:2]:
        g = weight.grad.flatten()
        ratios.append(omega(unitary(g, 4096), 0.05) / omega(g, 0.05))
    # The sums of a library, which may round otherwise elsewhere.
    assert ratios == pytest.approx([1.51, 2.88], rel=0.02)


def test_bytes_are_those_of_two_numbers_an_atom() -> None:
    """And positions of half as many places as elements."""
    x = gaussian(2, 1 << 16, seed=8)
    traffic = gw.simulate(x, gw.FourierATOMO(density=0.05)).traffic
    atoms_sent = 0.05 * 16 * 2049
    # Header, head, and Rice's codes, which come within a tenth of a bit of the entropy of 5.73 bits.
    assert traffic.sent_bytes == pytest.approx(48 + atoms_sent * (8 + 5.8 / 8), abs=4.8 * 9 * atoms_sent**0.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_spoils_its_block(bad: float) -> None:
    x = gaussian(3, 1000, seed=9)
    x[1, 600] = bad
    mean = gw.simulate(x, gw.FourierATOMO(density=0.1, block_size=256)).mean
    assert torch.equal(torch.isfinite(mean), (torch.arange(1000) < 512) | (torch.arange(1000) >= 768))


def test_large_elements_do_not_overflow_and_sums_that_do_are_seen() -> None:
    """Near the largest float32 sizes stay finite; where a mean of finite coefficients does not, all ranks know."""
    for x in (torch.full((1, 512), 3e38), 3e38 * torch.eye(512)[:1]):
        found = gw.simulate(x, gw.FourierATOMO(density=1.0)).mean
        assert torch.allclose(found, x[0], atol=1e33)
    codec = FourierAtomCodec(get_kernels(), lay_out([Parameter("w", (512,), (1,))]), 1, 0, density=1.0, block_size=256)
    flat = torch.zeros(512)
    assert codec.is_finite(SparseSummary(), flat)
    flat[300] = torch.inf
    assert not codec.is_finite(SparseSummary(), flat)


def test_shifts_learn_what_each_rank_sent() -> None:
    """With all atoms the variance is zero, and a worker's shift becomes its gradient at once, but for rounding."""
    x = gaussian(2, 700, seed=10)
    state = gw.simulate(x, gw.DIANA(compressor=gw.FourierATOMO(density=1.0))).state
    for rank, row in enumerate(x):
        shift = state[f"rank {rank}"]["shift/0"]
        assert float((shift - row).norm()) <= rounding(4096) * float(row.norm())


def test_fields_are_checked() -> None:
    for make in (
        lambda: gw.FourierATOMO(density=0.0),
        lambda: gw.FourierATOMO(block_size=128),
        lambda: gw.FourierATOMO(block_size=5000),
        lambda: gw.ErrorFeedback(compressor=gw.FourierATOMO()),
    ):
        with pytest.raises(HyperparameterError):
            make()
