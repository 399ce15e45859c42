"""QSGD, QSGDinf and NUQSGD: what their papers promise, by number of the property in the papers' summaries."""

from __future__ import annotations

import math

import pytest
import torch

import gradwire as gw
from gradwire.errors import HyperparameterError
from gradwire.exchange.segments import Parameter, Segment
from gradwire.kernels import Grid, get_kernels
from gradwire.kernels.entropy import elias_bits
from gradwire.methods.levels.level_compressor import LevelCodec
from laws import levels, natural


def simulated_variance(g: torch.Tensor, method: gw.Method, rounds: int) -> float:
    """Mean of |Q(v) - v|^2 / |v|^2 over rounds and rows."""
    total = 0.0
    for round in range(rounds):
        for row in g:
            total += float((gw.simulate(row[None], method, round=round).mean - row).square().sum() / row.square().sum())
    return total / rounds / len(g)


@pytest.mark.parametrize(("s", "expected"), [(1, 21.63), (4, 4.66), (16, 0.414)])
def test_all_ones(s: int, expected: float) -> None:
    """QSGD 4: relative variance of the all-ones vector of 512 values."""
    ones = torch.ones(1, 512)
    assert float(levels(range(s + 1), 512, "l2")(ones).sum() / 512) == pytest.approx(expected, rel=1e-3)
    # 512 independent Bernoulli variables, 60 draws: the mean square has a relative deviation of about 1 %.
    assert simulated_variance(ones, gw.QSGD(levels=s), 60) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(("s", "size"), [(1, 16), (1, 4096), (4, 256), (16, 256), (32, 1024), (64, 4096)])
def test_the_papers_bounds_of_the_variance(s: int, size: int) -> None:
    """QSGD 2 and 3: min(d / s^2, sqrt(d) / s), and d / 4 s^2, of |v|^2; so at most |v|^2 from s = sqrt(d) on."""
    bound = min(size / s**2, math.sqrt(size) / s)
    method = gw.QSGD(levels=s, block_size=size)
    assert method.omega is not None
    assert method.omega <= bound
    assert method.omega <= size / (4 * s * s)
    if s == 1:
        # |Q|^2 is |v|_1 |v|_2 in the mean: sqrt(d) |v|^2 where all magnitudes are equal, as here.
        ones = torch.ones(1, size * max(1, 8192 // size))
        second = [float(gw.simulate(ones, method, round=r).mean.square().mean()) for r in range(20)]
        # 8192 and more Bernoulli variables of sqrt(d) in 20 rounds.
        tolerance = 5 * size**0.25 / math.sqrt(20 * ones.numel())
        assert sum(second) / 20 == pytest.approx(math.sqrt(size), rel=tolerance)
    if s * s >= size:
        assert bound <= 1
    # Nothing that comes out exceeds the norm, and no sign changes.
    g = torch.randn(1, size, generator=torch.Generator().manual_seed(s))
    mean = gw.simulate(g, method).mean
    assert float(mean.abs().max()) <= float(g.norm()) * (1 + 2**-22)
    assert bool((mean * g[0] >= 0).all())


def test_sparse_codes_take_the_square_roots_bits_and_dense_ones_more_than_was_said() -> None:
    """QSGD 3: few bits at s = 1 (theorem 3.2). The 2.8 n + 32 of corollary 3.3, s = sqrt(n), is no bound."""
    generator = torch.Generator().manual_seed(0)
    for size, s in ((1024, 1), (16384, 1), (4096, 16)):
        g = torch.randn(1, size, generator=generator)
        bits = sum(elias_bits(levels_of(g, s, size, round), "sparse") for round in range(4)) / 4
        filled = s * (s + math.sqrt(size))
        assert 0 < bits <= (3 + 1.5 * math.log2(2 * (s * s + size) / filled)) * filled
    ones, g = torch.ones(1, 4096), torch.randn(1, 4096, generator=generator)
    # Every level of the all-ones vector is 1: three bits of Elias(2), and a sign.
    assert elias_bits(levels_of(ones, 64, 4096, 0), "dense") == 4 * 4096
    assert elias_bits(levels_of(g, 64, 4096, 0), "dense") > 2.8 * 4096 + 32


def levels_of(g: torch.Tensor, s: int, size: int, round: int) -> torch.Tensor:
    found = gw.simulate(g, gw.QSGD(levels=s, block_size=size), round=round).mean
    return (found * s / g.norm()).round().int()


# Gaussian blocks, relative variance: QSGD 5 and NUQSGD 9.
GAUSSIAN = [
    (128, gw.QSGDinf(levels=1, block_size=128), 1.25),
    (128, gw.QSGDinf(levels=3, block_size=128), 0.149),
    (128, gw.QSGDinf(levels=7, block_size=128), 0.027),
    (512, gw.QSGDinf(levels=1), 1.61),
    (512, gw.QSGDinf(levels=3), 0.200),
    (512, gw.QSGDinf(levels=7), 0.037),
    (1024, gw.QSGDinf(levels=1, block_size=1024), 1.74),
    (1024, gw.QSGDinf(levels=3, block_size=1024), 0.220),
    (1024, gw.QSGDinf(levels=7, block_size=1024), 0.040),
    (8192, gw.QSGDinf(levels=1, block_size=8192), 2.16),
    (8192, gw.QSGDinf(levels=3, block_size=8192), 0.291),
    (8192, gw.QSGDinf(levels=7, block_size=8192), 0.054),
    (128, gw.QSGD(levels=1, block_size=128), 8.05),
    (128, gw.QSGD(levels=3, block_size=128), 2.02),
    (128, gw.QSGD(levels=7, block_size=128), 0.43),
    (512, gw.QSGD(levels=1), 17.1),
    (512, gw.QSGD(levels=3), 5.03),
    (512, gw.QSGD(levels=7), 1.58),
    (1024, gw.QSGD(levels=1, block_size=1024), 24.5),
    (1024, gw.QSGD(levels=3, block_size=1024), 7.5),
    (1024, gw.QSGD(levels=7, block_size=1024), 2.65),
    (8192, gw.QSGD(levels=1, block_size=8192), 71),
    (8192, gw.QSGD(levels=3, block_size=8192), 23),
    (8192, gw.QSGD(levels=7, block_size=8192), 9.3),
    (128, gw.NUQSGD(levels=3, block_size=128), 1.27),
    (512, gw.NUQSGD(levels=3), 3.5),
    (1024, gw.NUQSGD(levels=3, block_size=1024), 5.4),
    (8192, gw.NUQSGD(levels=3, block_size=8192), 17),
    (16384, gw.NUQSGD(levels=3, block_size=16384), 24.5),
    (128, gw.NUQSGD(levels=4, zero=False, block_size=128), 1.30),
    (512, gw.NUQSGD(levels=4, zero=False), 7.0),
    (1024, gw.NUQSGD(levels=4, zero=False, block_size=1024), 15.0),
    (8192, gw.NUQSGD(levels=4, zero=False, block_size=8192), 127),
    (16384, gw.NUQSGD(levels=4, zero=False, block_size=16384), 255),
    (16384, gw.QSGDinf(levels=3, block_size=16384), 0.315),
]


@pytest.mark.parametrize(("size", "method", "expected"), GAUSSIAN, ids=repr)
def test_gaussian_blocks(size: int, method: gw.Method, expected: float) -> None:
    """The table, to 3 %: half of that is its own rounding to two or three digits."""
    count = max(40, 400_000 // size)
    g = torch.randn(1, size * count, generator=torch.Generator().manual_seed(size))
    g = torch.nn.functional.normalize(g.view(count, size), dim=1).reshape(1, -1)
    rounds = 4 if expected < 3 else 12
    assert simulated_variance(g, method, rounds) == pytest.approx(expected, rel=0.035 if expected < 100 else 0.05)


def test_few_values_are_not_zero() -> None:
    """QSGD 2: E |Q(v)|_0 <= s (s + sqrt(n))."""
    g = torch.randn(1, 4096, generator=torch.Generator().manual_seed(0))
    for s in (1, 4, 16):
        counts = [
            int(gw.simulate(g, gw.QSGD(levels=s, block_size=4096), round=r).mean.count_nonzero()) for r in range(20)
        ]
        assert sum(counts) / 20 <= s * (s + 64)
        assert sum(counts) > 0


@pytest.mark.parametrize("s", [1, 3, 7, 64])
def test_qsgdinf_keeps_the_largest_signs_and_range(s: int) -> None:
    """QSGD 6: the largest magnitude of a block is exact, signs stay, nothing exceeds the scale."""
    g = torch.randn(1, 5120, generator=torch.Generator().manual_seed(s))
    mean = gw.simulate(g, gw.QSGDinf(levels=s)).mean.view(-1, 512)
    rows = g.view(-1, 512)
    at = rows.abs().argmax(1, keepdim=True)
    assert torch.equal(mean.gather(1, at), rows.gather(1, at))
    assert bool((mean * rows >= 0).all())
    assert bool((mean.abs() <= rows.abs().amax(1, keepdim=True)).all())


def test_one_level_is_terngrad_in_law() -> None:
    """QSGD 6: the same variance as TernGrad, unclipped, each worker with its own scaler."""
    g = torch.randn(1, 3000, generator=torch.Generator().manual_seed(1))
    ours = simulated_variance(g, gw.QSGDinf(levels=1, block_size=None), 60)
    theirs = simulated_variance(g, gw.TernGrad(clip=None, share_scaler=False), 60)
    assert ours == pytest.approx(theirs, rel=0.02)


def test_idempotent_on_its_own_grid_and_scales_with_its_input() -> None:
    """QSGD 7: with levels and scale exact in float32, the same for every draw."""
    g = torch.randn(1, 512, generator=torch.Generator().manual_seed(2))
    g[0, 0] = 8.0
    method = gw.QSGDinf(levels=8)
    once = gw.simulate(g, method, round=1).mean[None]
    for round in range(10):
        assert torch.equal(gw.simulate(once, method, round=round).mean, once[0])
    for c in (0.25, 4.0, 1024.0):
        assert torch.equal(gw.simulate(c * g, method, round=1).mean, c * once[0])
    # Any other factor rounds |v| / R anew, by parts of 2^-23: a draw in a million falls in between.
    x = torch.randn(1, 51200, generator=torch.Generator().manual_seed(3))
    other, first = gw.simulate(3.7 * x, gw.QSGD(levels=8)).mean, gw.simulate(x, gw.QSGD(levels=8)).mean
    assert int(((other - 3.7 * first).abs() > 1e-5 * first.abs()).sum()) <= 3


@pytest.mark.parametrize("method", [gw.QSGD(), gw.QSGDinf(), gw.NUQSGD()], ids=repr)
def test_one_value_is_exact(method: gw.Method) -> None:
    """QSGD 8."""
    assert float(gw.simulate(torch.tensor([[-0.3]]), method).mean) == pytest.approx(-0.3, rel=1e-7)


def test_the_mean_of_workers_divides_the_variance() -> None:
    """QSGD 10: K workers with the same vector."""
    g = torch.randn(1, 51200, generator=torch.Generator().manual_seed(3))
    one = simulated_variance(g, gw.QSGDinf(levels=1), 5)
    for k in (4, 16):
        found = gw.simulate(g.repeat(k, 1), gw.QSGDinf(levels=1)).mean
        assert float((found - g[0]).square().sum() / g.square().sum()) == pytest.approx(one / k, rel=0.05)


def nuqsgd_bound(s: int, size: int) -> float:
    """The sharp bound for s levels of a block of d: x = d / 4^(s-1)."""
    x = size / 4 ** (s - 1)
    return 1 / 8 + 2 * x / 9 if x < 81 / 16 else math.sqrt(x) - 1


def equal_and_one(size: int, a: float, count: int) -> torch.Tensor:
    """One value of 1, ``count`` of a, zeros."""
    v = torch.zeros(1, size)
    v[0, 0], v[0, 1 : 1 + count] = 1.0, a
    return v


def test_nuqsgd_bound() -> None:
    """NUQSGD 3: no vector is above it, some come near, it is what the method declares; the paper's own is too low."""
    generator = torch.Generator().manual_seed(4)
    for s in (1, 2, 3, 5):
        for size in (16, 128, 2048):
            bound = nuqsgd_bound(s, size)
            declared = gw.NUQSGD(levels=s, block_size=size).omega
            # The bound lets values be split; among many that makes no difference.
            assert 0.9 * bound <= declared <= bound * (1 + 1e-12)
            assert size < 2048 or declared >= 0.998 * bound
            rows = [torch.randn(size, generator=generator) for _ in range(5)]
            rows += [torch.ones(size), torch.rand(size, generator=generator) ** 8]
            law = levels([0, *(2.0**j for j in range(s))], size, "l2")
            assert all(float(law(v[None]).sum() / v.square().sum()) <= declared + 1e-6 for v in rows)
    # The published form, 1/8 + x/4 for x < 2 and else sqrt(x) - 7/8, at d = 512 and x = 2 (levels=5).
    law, worst = levels([0, 1, 2, 4, 8, 16], 512, "l2"), 0.0
    for count in range(11, 512, 50):
        for a in torch.linspace(0.02, 1.0, 50).tolist():
            v = equal_and_one(512, a, count)
            worst = max(worst, float(law(v).sum() / v.square().sum()))
    assert math.sqrt(2) - 7 / 8 < 0.55 < worst <= nuqsgd_bound(5, 512)


def test_each_interval_of_nuqsgd_is_natural_compressions() -> None:
    """NUQSGD 4 and 6: variance (h - r)(r - l) <= r^2 / 8, an eighth at 4/3 of a power; signs, zeros and powers stay."""
    exact = torch.tensor([[2.0**-j for j in range(6)] + [0.0, -0.125]])
    for round in range(10):
        found = gw.simulate(exact, gw.NUQSGD(levels=6, norm="max"), round=round).mean
        assert torch.equal(found, exact[0])
    for k in (1, 2, 5):
        v = torch.full((1, 6000), -4 / 3 * 2.0**-k)
        v[0, 0] = 1.0
        found = gw.simulate(v, gw.NUQSGD(levels=6, norm="max", block_size=None)).mean[1:] * 2.0**k
        assert set(found.tolist()) == {-1.0, -2.0}
        # Bernoulli variables with p = 1/3: five deviations of the mean of 5999 squares of relative errors.
        assert float((found * 0.75 + 1).square().mean()) == pytest.approx(1 / 8, rel=5 * 0.71 / math.sqrt(5999))
    r = torch.logspace(-5, 0, 4001, base=2.0, dtype=torch.float64)[None].float()
    r[0, -1] = 1.0
    law = levels([0, *(2.0**j for j in range(6))], None, "max")(r)
    assert torch.allclose(law, natural(r), atol=1e-12)
    assert bool((law <= r.double().square() / 8 + 1e-12).all())


@pytest.mark.parametrize("s", [1, 2, 4])
def test_few_values_of_nuqsgd_are_not_zero(s: int) -> None:
    """NUQSGD 5: E |Q(v)|_0 <= 4^(s-1) + 2^(s-1) sqrt(d), and what its law says."""
    g = torch.randn(1, 4096, generator=torch.Generator().manual_seed(0))
    method = gw.NUQSGD(levels=s, block_size=4096)
    counts = [int(gw.simulate(g, method, round=r).mean.count_nonzero()) for r in range(20)]
    expected = float((g.double().abs() / g.double().norm() * 2 ** (s - 1)).clamp(max=1).sum())
    # A sum of independent Bernoulli variables, over 20 rounds.
    assert sum(counts) / 20 == pytest.approx(expected, abs=5 * math.sqrt(expected / 20))
    assert expected <= 4 ** (s - 1) + 2 ** (s - 1) * 64


@pytest.mark.parametrize("zero", [True, False])
def test_one_level_of_nuqsgd_is_qsgd(zero: bool) -> None:
    """NUQSGD 7: levels 0 and 1, the same draws; without the zero the two ends are left, in the mean the same."""
    g = torch.randn(1, 2048, generator=torch.Generator().manual_seed(5))
    ours, theirs = gw.NUQSGD(levels=1, zero=zero), gw.QSGD(levels=1)
    for round in range(5):
        found, expected = (gw.simulate(g, m, round=round).mean for m in (ours, theirs))
        assert torch.equal(found, expected) == zero
        assert (int(found.count_nonzero()) == 2048) != zero


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ("QSGD(levels=0)", "1 to 32767"),
        ("QSGD(levels=2.5)", "1 to 32767"),
        ("QSGD(block_size=100)", "multiple of 16"),
        ("QSGD(block_size=0)", "multiple of 16"),
        ("QSGDinf(blocks='layer')", "'parameter'"),
        ("NUQSGD(levels=101)", "1 to 100"),
        ("NUQSGD(norm='l1')", "'l2' or 'max'"),
        ("NUQSGD(zero=1)", "True or False"),
    ],
)
def test_fields_out_of_range_are_refused(spec: str, part: str) -> None:
    with pytest.raises(HyperparameterError, match=part):
        gw.method(spec)


def test_blocks_of_the_model_cross_parameters() -> None:
    """A block that holds the end of one parameter and the start of the next has one scale, the larger."""
    workers = [{"a": torch.full((20,), 0.5), "small": torch.ones(3), "b": torch.full((76,), 4.0)}]
    link = gw.SimulatedLink(workers[0].items(), gw.QSGDinf(levels=1, block_size=32, blocks="model"), 1, min_numel=10)
    mean = link.reduce_(torch.cat(list(workers[0].values()))[None].clone())
    a, small, b = mean.split([20, 3, 76])
    assert set(a.tolist()) == {0.0, 4.0}
    assert torch.equal(small, torch.ones(3))
    assert torch.equal(b, torch.full((76,), 4.0))
    link = gw.SimulatedLink(workers[0].items(), gw.QSGDinf(levels=1, block_size=32), 1, min_numel=10)
    mean = link.reduce_(torch.cat(list(workers[0].values()))[None].clone())
    assert torch.equal(mean[:20], torch.full((20,), 0.5))


@pytest.mark.parametrize("block_size", [64, None])
def test_a_sum_of_magnitudes_as_a_scale(block_size: int | None) -> None:
    """The same bits from every backend and at any place in a vector; right to 24 bits, never below the largest."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(10_000, generator=generator) * torch.exp(3 * torch.randn(10_000, generator=generator))
    x[64:128], x[128:192] = 0.0, 1e38
    x[192:256] = 1e-42
    whole, found = Parameter("w", (10_000,), (1,)), []
    for backend in ("reference", "cpu", "cpu-plain"):
        for offset in (0, 3):
            codec = LevelCodec(
                get_kernels(backend), [Segment(whole, offset, 0, 10_000)], 2, 0, grid=Grid.even(1), norm="l1",
                block_size=block_size,
            )  # fmt: skip
            found.append(codec.summarise(torch.cat([torch.full((offset,), torch.nan), x])).scale)
    assert all(torch.equal(found[0], other) for other in found)
    largest = torch.finfo(torch.float32).max
    for scale, block in zip(found[0].tolist(), x.split(block_size or len(x))):
        top, exact = float(block.abs().max()), float(block.double().abs().sum())
        # Every magnitude may lose a unit, 2^-23 of the power of two below the largest; then float32 rounds.
        assert scale <= max(min(exact, largest) * (1 + 2**-24), 2.0**-100)
        assert scale >= min(exact - len(block) * top * 2**-23, largest) * (1 - 2**-24)
        assert scale >= top
    spoilt = x.clone()
    spoilt[300] = torch.nan
    summary = codec.summarise(torch.cat([torch.zeros(3), spoilt]))
    assert int(torch.isinf(summary.scale).sum()) == 1
