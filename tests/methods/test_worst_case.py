"""The declared variance constants are suprema: no vector found exceeds them, and one comes within a thousandth."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import gradwire as gw
from laws import levels

NORMS = {"max": math.inf, "l2": 2, "l1": 1}


def magnitudes(method: gw.Method) -> tuple[list[float], str]:
    """Return the levels of a method, ascending to 1 (the least negative where there is no zero), and its norm."""
    if isinstance(method, gw.PQuantisation):
        return [0.0, 1.0], method.norm
    if isinstance(method, gw.DoReFa):
        n = 2**method.bits - 1
        return [j / n for j in (-1, *range(1, n + 1, 2))], "max"
    if isinstance(method, gw.QSGD | gw.QSGDinf):
        return [j / method.levels for j in range(method.levels + 1)], method.norm
    powers = [2.0 ** (j - method.levels) for j in range(1, method.levels + 1)]
    return [0.0 if getattr(method, "zero", True) else -powers[0], *powers], method.norm


def ratio(v: torch.Tensor, method: gw.Method) -> torch.Tensor:
    """Return the relative variance of rounding each row, float64, differentiable."""
    ends, norm = magnitudes(method)
    edges = torch.tensor(ends, dtype=torch.float64)
    scale = torch.linalg.vector_norm(v, NORMS[norm], dim=1, keepdim=True)
    y = v.abs() / scale
    upper = torch.searchsorted(edges, y.detach(), right=True).clamp(1, len(edges) - 1)
    error = (edges[upper] - y) * (y - edges[upper - 1])
    return error.sum(1) / y.square().sum(1)


def ascended(method: gw.Method, size: int) -> float:
    """Return the largest ratio that gradient ascent reaches from vectors of many shapes."""
    generator = torch.Generator().manual_seed(size)
    normal = torch.randn(40, size, generator=generator, dtype=torch.float64)
    spread = torch.linspace(0.0, 4.0, 40, dtype=torch.float64)[:, None]
    logarithms = (spread * normal - 3 * torch.rand(40, 1, generator=generator, dtype=torch.float64)).requires_grad_()
    with torch.no_grad():
        # One large value among small ones, as a maximum makes them.
        logarithms[::2, 0] = 3.0
    optimizer, largest = torch.optim.Adam([logarithms], lr=0.05), 0.0
    for _ in range(100):
        found = ratio(logarithms.exp(), method)
        largest = max(largest, float(found.detach().max()))
        optimizer.zero_grad()
        (-found.sum()).backward()
        optimizer.step()
    return largest


def climbed(method: gw.Method, size: int) -> float:
    """Return the largest ratio that moving one or two values to another interval, or along theirs, reaches."""
    ends, norm = magnitudes(method)
    if norm == "max":
        # One value at the maximum, all others alike: what separability makes of it.
        a = torch.cat([torch.linspace(0, 1, 20_001, dtype=torch.float64), torch.logspace(-9, 0, 20_001).double()])
        v = torch.stack([torch.ones_like(a), a], 1)
        y = v[:, 1].contiguous()
        edges = torch.tensor(ends, dtype=torch.float64)
        upper = torch.searchsorted(edges, y, right=True).clamp(1, len(edges) - 1)
        error = (edges[upper] - y) * (y - edges[upper - 1])
        return float(((size - 1) * error / (1 + (size - 1) * y.square())).max())
    middles = [max((low + high) / 2, 0.0) for low, high in itertools.pairwise(ends)]

    def at(counts: list[int]) -> float:
        values = [m for m, count in zip(middles, counts) for _ in range(count)]
        v = torch.tensor([values], dtype=torch.float64)
        return float(ratio(v, method)) if float(v.max()) > 0 else 0.0

    largest = 0.0
    for start in {0, len(middles) - 1}:
        counts = [size if k == start else 0 for k in range(len(middles))]
        here = at(counts)
        while True:
            moves = []
            for a, b in itertools.permutations(range(len(middles)), 2):
                for step in {1, 2, max(1, size // 8)}:
                    if counts[a] >= step:
                        moves.append([c + step * ((k == b) - (k == a)) for k, c in enumerate(counts)])
            best = max(moves, key=at, default=counts)
            if not moves or at(best) <= here:
                break
            counts, here = best, at(best)
        largest = max(largest, here)
    return largest


METHODS = [
    *(gw.QSGDinf(levels=s, block_size=d) for s, d in ((1, 16), (1, 64), (3, 512), (7, 256), (31, 64), (127, 512))),
    *(gw.QSGD(levels=s, block_size=d) for s, d in ((1, 16), (2, 64), (3, 16), (5, 16), (6, 128), (16, 512))),
    *(gw.NUQSGD(levels=s, block_size=d) for s, d in ((1, 32), (2, 16), (3, 16), (4, 48), (5, 512), (7, 512))),
    *(gw.NUQSGD(levels=s, block_size=d, zero=False) for s, d in ((1, 16), (2, 16), (4, 48), (6, 512))),
    *(
        gw.NUQSGD(levels=s, block_size=d, norm="max", zero=z)
        for s, d, z in ((4, 64, True), (6, 16, True), (4, 64, False))
    ),
    gw.NaturalDithering(levels=5, block_size=512),
    gw.NaturalDithering(levels=3, norm="max", block_size=64),
    *(gw.DoReFa(bits=k, block_size=d) for k, d in ((1, 16), (2, 64), (3, 512), (6, 512))),
    *(gw.PQuantisation(p=p, block_size=48) for p in (1, 2, "inf")),
]


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_no_vector_exceeds_the_constant_and_one_comes_within_a_thousandth(method: gw.Method) -> None:
    omega, size = method.omega, method.block_size
    assert omega is not None
    found = max(ascended(method, size), climbed(method, size))
    assert found <= omega * (1 + 1e-12)
    assert found >= omega * (1 - 1e-3)


def partitions(ends: list[float], size: int) -> float:
    """Return the largest ratio over all choices of an interval for every value, for the Euclidean norm."""
    largest = 0.0
    for chosen in itertools.combinations_with_replacement(list(itertools.pairwise(ends)), size):
        middles = sum(((low + high) / 2) ** 2 for low, high in chosen)
        errors = sum((high - low) ** 2 / 4 for low, high in chosen)
        largest = max(largest, errors - (math.sqrt(middles) - 1) ** 2)
    return largest


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13])
def test_every_choice_of_intervals_was_considered(size: int) -> None:
    """Exhaustive, for lengths that blocks have at the end of a parameter, too."""
    tried = 0
    for s in range(1, 8):
        for method in (
            gw.QSGD(levels=s, block_size=None),
            gw.NUQSGD(levels=s, block_size=None),
            gw.NUQSGD(levels=s, block_size=None, zero=False),
        ):
            ends, _ = magnitudes(method)
            if math.comb(len(ends) - 2 + size, size) <= 3000:
                assert method.omega_of(size) == pytest.approx(partitions(ends, size), abs=1e-12)
                tried += 1
    assert tried >= 6


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_shorter_block_has_no_larger_constant(method: gw.Method) -> None:
    """So that the constant of a full block holds for the last one of a parameter."""
    found = [method.omega_of(numel) for numel in range(1, method.block_size + 1)]
    assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(found))
    assert found[-1] == method.omega == method.omega_of(10 * method.block_size)
    if getattr(method, "zero", True) or method.norm == "l2":
        assert found[0] == pytest.approx(0, abs=1e-15)


def test_the_same_operator_has_the_same_constant() -> None:
    """The same bits under two names: error feedback takes both."""
    g = torch.randn(2, 2048, generator=torch.Generator().manual_seed(0))
    for norm in ("l2", "max"):
        pair = [kind(levels=5, norm=norm, block_size=512) for kind in (gw.NUQSGD, gw.NaturalDithering)]
        assert torch.equal(*(gw.simulate(g, method).mean for method in pair))
        assert pair[0].omega == pair[1].omega < 1
        for method in pair:
            gw.ErrorFeedback(compressor=method)
    assert gw.NUQSGD(levels=5).omega == pytest.approx(0.56696, abs=1e-5)
    assert gw.QSGD(levels=2, block_size=64).omega == gw.NUQSGD(levels=2, block_size=64).omega
    assert gw.QSGD(levels=1, block_size=64).omega == gw.PQuantisation(p=2).omega


@pytest.mark.parametrize(("s", "size", "omega"), [(31, 64, 0.016129), (127, 512, 0.0078588), (1, 64, 3.5)])
def test_many_levels_of_a_maximum_have_a_small_constant(s: int, size: int, omega: float) -> None:
    """And DIANA's shifts learn as fast as that allows."""
    method = gw.QSGDinf(levels=s, block_size=size)
    assert method.omega == pytest.approx(omega, rel=1e-4)
    assert gw.DIANA(compressor=method).rate == 1 / (1 + method.omega)


def test_the_law_of_the_tests_agrees() -> None:
    """The worst vector of QSGDinf, through the law that the simulation is held against, and through the simulation."""
    method = gw.QSGDinf(levels=3, block_size=64)
    v = torch.full((1, 64), (math.sqrt(9 + 63) - 3) / 63)
    v[0, 0] = 1.0
    law = float(levels(range(4), 64, "max")(v).sum() / v.square().sum())
    assert law == pytest.approx(method.omega, rel=1e-6)
    link = gw.SimulatedLink([("0", v[0])], method, 1, min_numel=0)
    draws = [float((link.reduce_(v.clone()) - v).square().sum() / v.square().sum()) for _ in range(400)]
    mean = sum(draws) / len(draws)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in draws)) / len(draws)
    assert abs(mean - method.omega) < 5 * deviation
