"""ATOMO and Spectral ATOMO, by number of the property in the paper's summary (docs/properties.md)."""

from __future__ import annotations

import math

import pytest
import torch

import gradwire as gw
from gradwire.errors import HyperparameterError
from gradwire.exchange.segments import Parameter, lay_out
from gradwire.kernels import get_kernels
from gradwire.methods.atoms import spectral_atomo
from gradwire.methods.atoms.atom_codec import probabilities
from gradwire.methods.atoms.spectral_atomo import PairsAndRows, _start


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def heavy(*shape: int, seed: int = 0) -> torch.Tensor:
    return gaussian(*shape, seed=seed) * (2 * gaussian(*shape, seed=seed + 1)).exp()


def variance(x: torch.Tensor, p: torch.Tensor) -> float:
    """Sum of x^2 (1/p - 1) over what may be kept."""
    alive = x != 0
    return float((x[alive].double().square() * (1 / p[alive] - 1)).sum())


def rounds(x: torch.Tensor, method: gw.Method, number: int) -> torch.Tensor:
    link = gw.SimulatedLink([("w", torch.empty(x.shape))], method, 1, min_numel=0)
    return torch.stack([link.reduce_(x.reshape(1, -1).clone()).reshape(x.shape) for _ in range(number)])


@pytest.mark.parametrize("budget", [1.0, 2.5, 5.0, 7.9, 8.0, 100.0])
@pytest.mark.parametrize("seed", range(4))
def test_probabilities_spend_the_budget_in_the_order_of_magnitudes(budget: float, seed: int) -> None:
    """4: sum p = min(s, atoms that are not zero), p follows |x|, and scale changes nothing."""
    x = heavy(20, seed=seed)
    x[3:8] = 0.0
    p = probabilities(x, budget)
    assert float(p.sum()) == pytest.approx(min(budget, 15))
    assert bool((p[x == 0] == 0).all())
    order = x.abs().argsort()
    assert bool((p[order].diff() >= -1e-12).all())
    assert float(p.max()) <= 1
    assert torch.allclose(probabilities(-8 * x, budget), p)


def best(x: torch.Tensor, budget: float) -> float:
    """The least variance, by Lagrange's condition p = min(1, |x| / c) and bisection for c."""
    low, high = 1e-12, float(x.abs().sum())
    for _ in range(200):
        c = (low * high) ** 0.5
        low, high = (c, high) if float((x.abs().double() / c).clamp(max=1).sum()) > budget else (low, c)
    return variance(x, (x.abs().double() / high).clamp(max=1))


@pytest.mark.parametrize("seed", range(6))
def test_no_other_probabilities_have_less_variance(seed: int) -> None:
    """3: equal to an independent solver; changes that keep the sum make it worse; so does cutting off once."""
    x, budget = heavy(8, seed=seed), 5.0
    p = probabilities(x, budget)
    least = variance(x, p)
    assert least == pytest.approx(best(x, budget), rel=1e-9)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(50):
        change = torch.randn(8, generator=generator, dtype=torch.float64) * 1e-3
        change[p >= 1] = 0
        change -= change.sum() / (p < 1).sum() * (p < 1)
        assert variance(x, p + change) > least - 1e-12
    once = (budget * x.abs().double() / x.abs().double().sum()).clamp(max=1)
    assert float(once.sum()) <= budget
    assert variance(x, once) >= least


def test_the_example_of_eight_atoms() -> None:
    """3: one cut-off spends 3.2 of a budget of 5, and its variance is more than twice the least."""
    x = torch.tensor([9.0, 4.0, 1.5, 1.0, 0.8, 0.5, 0.3, 0.2])
    p = probabilities(x, 5.0)
    once = (5 * x.double() / x.double().sum()).clamp(max=1)
    assert float(once.sum()) < 3.5
    assert variance(x, once) > 2 * variance(x, p)


def test_drawing_again_where_nothing_was_kept_would_make_the_estimate_larger() -> None:
    """3: of 5, 3, 2, 1 and one atom, by one over the chance that something is kept."""
    p = probabilities(torch.tensor([5.0, 3.0, 2.0, 1.0]), 1.0)
    assert 1 / (1 - float((1 - p).prod())) == pytest.approx(1.42, abs=0.005)


@pytest.mark.parametrize("density", [0.02, 0.1, 0.5])
def test_elements_have_the_mean_and_the_variance_that_is_said(density: float) -> None:
    """1, 2, 9: over 600 rounds; the floor of descent with a constant step is a multiple of this variance."""
    x = heavy(200, seed=10)
    found = rounds(x, gw.ATOMO(density=density), 600).double()
    p = probabilities(x, 200 * density)
    deviation = (x.double().square() * (1 / p - 1) / 600).sqrt()
    usual = (p * 600 > 30) & (p < 1)
    z = (found.mean(0) - x)[usual] / deviation[usual]
    assert float(z.abs().max()) < 4.5
    assert torch.equal(found[:, p >= 1], x[p >= 1].double().expand(600, -1))
    noise, wanted = float((found - x).square().sum(1).mean()), variance(x, p)
    assert noise == pytest.approx(wanted, rel=0.15)
    kept = (found != 0).sum(1).double()
    assert float(kept.mean()) == pytest.approx(200 * density, abs=4.5 * (200 * density / 600) ** 0.5)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_norm_makes_it_terngrad_or_qsgd_to_the_bit(workers: int) -> None:
    """5."""
    g = heavy(workers, 3000, seed=11)
    for norm, other in (
        ("max", gw.TernGrad(clip=None, share_scaler=False)),
        ("l2", gw.QSGD(levels=1, block_size=None)),
    ):
        found = gw.simulate(g, gw.ATOMO(norm=norm), seed=3, round=4)
        same = gw.simulate(g, other, seed=3, round=4)
        assert torch.equal(found.mean, same.mean)
        if workers > 1:
            assert found.traffic.sent_bytes < same.traffic.sent_bytes
        s = float(g[0].abs().sum()) / float(g[0].norm() if norm == "l2" else g[0].abs().max())
        p = probabilities(g[0], s)
        assert float(p.max()) <= 1 + 1e-6
        assert torch.allclose(p, g[0].abs().double() / (float(g[0].abs().sum()) / s), rtol=1e-5)


@pytest.mark.parametrize("norm", [None, "l2", "max"])
def test_the_declared_variance_is_not_exceeded(norm: str | None) -> None:
    method = gw.ATOMO(density=0.05, norm=norm)
    for x in (torch.ones(400), gaussian(400), heavy(400), torch.eye(400)[0] * 20 + 1):
        c = {None: 0.0, "l2": float(x.norm()), "max": float(x.abs().max())}[norm]
        p = probabilities(x, 20.0) if norm is None else x.abs().double() / c
        bound = method.omega_of(400)
        assert bound is not None
        assert variance(x, p) <= bound * float(x.double().square().sum()) * (1 + 1e-9)


def test_a_budget_that_covers_all_is_exact() -> None:
    x = torch.zeros(2, 500)
    x[:, ::25] = heavy(2, 20, seed=12)
    assert torch.allclose(gw.simulate(x, gw.ATOMO(density=0.05)).mean, x.mean(0))
    assert torch.equal(gw.simulate(x[:1], gw.ATOMO(density=1.0)).mean, x[0])


def test_matrices_have_the_mean_and_the_variance_that_is_said() -> None:
    """1, 2: of singular pairs, over 500 rounds."""
    x = heavy(12, 9, seed=13)
    found = rounds(x, gw.SpectralATOMO(budget=3.0), 500).double()
    values = torch.linalg.svdvals(x)
    p = probabilities(values, 3.0)
    wanted = variance(values, p)
    assert float((found - x).square().sum((1, 2)).mean()) == pytest.approx(wanted, rel=0.15)
    assert float((found.mean(0) - x).norm()) < 1.6 * (wanted / 500) ** 0.5
    pairs = torch.linalg.matrix_rank(found.float(), rtol=1e-4).double()
    assert float(pairs.mean()) == pytest.approx(3.0, abs=0.3)


def test_spectral_sampling_pays_where_the_nuclear_norm_is_small() -> None:
    """6: at one number of atoms less variance exactly where |X|_* <= |X|_1,1 (both balanced)."""
    low = torch.outer(gaussian(40, seed=14), gaussian(30, seed=15)) + 0.01 * gaussian(40, 30, seed=16)
    sparse = torch.eye(40, 30)
    for x in (low, sparse, gaussian(40, 30, seed=17)):
        values, flat, s = torch.linalg.svdvals(x), x.flatten(), 1.0
        spectral, element = variance(values, probabilities(values, s)), variance(flat, probabilities(flat, s))
        assert (spectral <= element * (1 + 1e-6)) == bool(values.sum() <= x.abs().sum() * (1 + 1e-6))


def test_a_rank_within_the_budget_is_exact() -> None:
    """7."""
    one = torch.outer(gaussian(50, seed=18), gaussian(20, seed=19))
    found = gw.simulate([{"w": one, "b": gaussian(30, seed=20)}], gw.SpectralATOMO(budget=1.0)).mean
    assert torch.allclose(found["w"], one, atol=1e-5)
    assert torch.allclose(found["b"], gaussian(30, seed=20), atol=1e-5)
    x = gaussian(8, 6, seed=21)
    assert torch.allclose(gw.simulate([{"w": x}], gw.SpectralATOMO(budget=6.0)).mean["w"], x, atol=1e-5)


@pytest.mark.parametrize("drawn", [0, (1 << 24) - 1])
@pytest.mark.parametrize(("shape", "pairs"), [((60, 100), None), ((500, 300), None), ((300, 500), 16)])
def test_a_rank_within_the_budget_is_exact_for_every_draw(
    shape: tuple[int, int], pairs: int | None, drawn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Singular values that are rounding errors must neither be kept nor push others out."""
    monkeypatch.setattr(spectral_atomo, "_drawn", lambda count, key, draw: torch.full((count,), drawn))
    x = torch.zeros(shape)
    for i, size in enumerate((1.0, 0.1, 0.01)):
        x += size * torch.outer(gaussian(shape[0], seed=30 + i), gaussian(shape[1], seed=40 + i))
    found = gw.simulate([{"w": x}], gw.SpectralATOMO(budget=3.0, pairs=pairs)).mean["w"]
    assert float((found - x).norm() / x.norm()) < 1e-5


def test_rotations_of_a_matrix_rotate_the_estimate() -> None:
    """8: the same draws keep the same pairs, which have been rotated."""
    x, q = gaussian(10, 7, seed=22), torch.linalg.qr(gaussian(10, 10, seed=23))[0]
    method = gw.SpectralATOMO(budget=2.0)
    for round in range(5):
        plain = gw.simulate([{"w": x}], method, round=round).mean["w"]
        turned = gw.simulate([{"w": q @ x}], method, round=round).mean["w"]
        assert torch.allclose(turned, q @ plain, atol=1e-4)


def test_bytes_of_pairs_are_those_of_their_vectors() -> None:
    x = gaussian(2, 64, 48, seed=24)
    traffic = gw.simulate([{"w": x[0]}, {"w": x[1]}], gw.SpectralATOMO(budget=4.0)).traffic
    pairs = (traffic.sent_bytes - 100) / (4 * (64 + 48))
    assert 0 < pairs <= 4 + 4 * math.sqrt(4)


LARGE = [(90, 200), (200, 90), (120, 120)]


@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_leading_pairs_and_the_rows_of_what_they_leave_add_up_to_the_matrix(shape: tuple[int, int]) -> None:
    x = gaussian(*shape, seed=3) + 4 * torch.outer(gaussian(shape[0], seed=4), gaussian(shape[1], seed=5))
    atoms = PairsAndRows(x, _start(min(shape), 4, (7, 8)))
    assert len(atoms.sizes) == 4 + min(shape)
    left, right = atoms.vectors(torch.arange(len(atoms.sizes)))
    assert torch.allclose((left * atoms.sizes[:, None]).t() @ right, x, atol=1e-4)
    for vectors in (left, right):
        assert torch.allclose(vectors.norm(dim=1), torch.ones(len(vectors)), atol=1e-5)
    # The leading pair stands far out, so that two iterations find it.
    assert float(atoms.sizes[0]) == pytest.approx(float(torch.linalg.matrix_norm(x, 2)), rel=1e-4)
    some = torch.tensor([0, 3, 4, len(atoms.sizes) - 1])
    assert all(torch.equal(a, b[some]) for a, b in zip(atoms.vectors(some), (left, right)))


@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_a_large_matrix_has_the_mean_and_the_variance_of_its_atoms(shape: tuple[int, int]) -> None:
    method, count = gw.SpectralATOMO(budget=3.0, pairs=4), 400
    x = gaussian(*shape, seed=6) + 2 * torch.outer(gaussian(shape[0], seed=7), gaussian(shape[1], seed=8))
    found = rounds(x, method, count).double().reshape(count, *shape)
    error = (found - x).square().sum((1, 2))
    (segment,) = lay_out([Parameter("w", shape, (shape[1], 1))])
    codec = method.codec(get_kernels(), [segment], 1, 0)
    (start,) = codec._starts
    assert start is not None
    sizes = PairsAndRows(x, start).sizes
    wanted = variance(sizes, probabilities(sizes, 3.0))
    assert float(error.mean()) == pytest.approx(wanted, rel=5 * float(error.std()) / wanted / count**0.5)
    assert float((found.mean(0) - x).square().sum()) < 1.5 * wanted / count
    # What a subspace costs: all pairs of singular vectors have the least variance.
    whole = torch.linalg.svdvals(x)
    least = variance(whole, probabilities(whole, 3.0))
    assert least < wanted < 1.5 * least


def test_a_large_matrix_of_low_rank_is_exact() -> None:
    x = sum(torch.outer(gaussian(150, seed=s), gaussian(100, seed=s + 10)) for s in range(3))
    found = gw.simulate([{"w": x}], gw.SpectralATOMO(budget=3.0, pairs=8)).mean["w"]  # type: ignore[dict-item]
    assert torch.allclose(found, x, atol=1e-4)


def test_the_paper_decomposes_matrices_of_any_size() -> None:
    (segment,) = lay_out([Parameter("w", (200, 200), (200, 1))])
    for method, starts in ((gw.SpectralATOMO.paper(), 0), (gw.SpectralATOMO(), 1)):
        codec = method.codec(get_kernels(), [segment], 1, 0)
        assert sum(start is not None for start in codec._starts) == starts


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize("method", [gw.ATOMO(), gw.ATOMO(norm="l2"), gw.SpectralATOMO()], ids=repr)
def test_what_is_not_finite_is_seen(method: gw.Method, bad: float) -> None:
    x = gaussian(3, 20, 30, seed=25)
    x[1, 4, 5] = bad
    found = gw.simulate([{"w": row} for row in x], method).mean["w"]
    assert not bool(torch.isfinite(found[4, 5]))


@pytest.mark.parametrize("size", [1e36, 3e38])
def test_values_too_large_to_be_sent_over_their_probability_are_infinite(size: float) -> None:
    found = gw.simulate(torch.full((3, 10_000), size), gw.ATOMO(density=0.001)).mean
    assert bool(torch.isinf(found).any())


@pytest.mark.parametrize("pairs", [None, 4])
@pytest.mark.parametrize("exponent", [-140, -90, 60, 110])
def test_matrices_of_any_size_have_the_same_atoms(exponent: int, pairs: int | None) -> None:
    x, method = gaussian(2, 60, 50, seed=26), gw.SpectralATOMO(budget=2.0, pairs=pairs)
    x = x.where(x.abs() > 2.0**-3, 0.0)
    found, scaled = (gw.simulate([{"w": row} for row in rows], method).mean["w"] for rows in (x, x * 2.0**exponent))
    if exponent < -126:
        assert bool(torch.isfinite(scaled).all()), "the elements themselves are rounded"
    else:
        assert torch.equal(scaled, found * 2.0**exponent)


def test_fields_are_checked() -> None:
    for make in (
        lambda: gw.ATOMO(density=0.0),
        lambda: gw.ATOMO(norm="l1"),
        lambda: gw.SpectralATOMO(budget=0.5),
        lambda: gw.SpectralATOMO(budget="3"),
        lambda: gw.SpectralATOMO(pairs=0),
        lambda: gw.SpectralATOMO(pairs=2.5),
        lambda: gw.ErrorFeedback(compressor=gw.ATOMO()),
        lambda: gw.ErrorFeedback(compressor=gw.SpectralATOMO()),
    ):
        with pytest.raises(HyperparameterError):
            make()
