"""QSGD, QSGDinf and NUQSGD: what their papers promise, by number of the property in the papers' summaries."""

from __future__ import annotations

import math

import pytest
import torch

import gradwire as gw
from gradwire.compressors import LevelCodec
from gradwire.errors import HyperparameterError
from gradwire.kernels import Grid, get_kernels
from gradwire.segments import Parameter, Segment
from laws import levels


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
    assert simulated_variance(ones, gw.QSGD(levels=s), 60) == pytest.approx(expected, rel=0.1)


# Gaussian blocks, relative variance: QSGD 5 and NUQSGD 9.
GAUSSIAN = [
    (128, gw.QSGDinf(levels=1, block_size=128), 1.25),
    (128, gw.QSGDinf(levels=3, block_size=128), 0.149),
    (128, gw.QSGDinf(levels=7, block_size=128), 0.027),
    (512, gw.QSGDinf(levels=1), 1.61),
    (512, gw.QSGDinf(levels=3), 0.200),
    (512, gw.QSGDinf(levels=7), 0.037),
    (8192, gw.QSGDinf(levels=1, block_size=8192), 2.16),
    (8192, gw.QSGDinf(levels=3, block_size=8192), 0.291),
    (8192, gw.QSGDinf(levels=7, block_size=8192), 0.054),
    (128, gw.QSGD(levels=1, block_size=128), 8.05),
    (128, gw.QSGD(levels=3, block_size=128), 2.02),
    (128, gw.QSGD(levels=7, block_size=128), 0.43),
    (512, gw.QSGD(levels=1), 17.1),
    (512, gw.QSGD(levels=3), 5.03),
    (512, gw.QSGD(levels=7), 1.58),
    (8192, gw.QSGD(levels=7, block_size=8192), 9.3),
    (128, gw.NUQSGD(levels=3, block_size=128), 1.27),
    (512, gw.NUQSGD(levels=3), 3.5),
    (8192, gw.NUQSGD(levels=3, block_size=8192), 17),
    (128, gw.NUQSGD(levels=4, zero=False, block_size=128), 1.30),
    (512, gw.NUQSGD(levels=4, zero=False), 7.0),
    (8192, gw.NUQSGD(levels=4, zero=False, block_size=8192), 127),
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


def test_nuqsgd_bound_and_exact_powers() -> None:
    """NUQSGD 3 and 6; 7: one level is QSGD with one level."""
    generator = torch.Generator().manual_seed(4)
    for s in (1, 2, 3, 5):
        for size in (16, 128, 2048):
            x = size / 4 ** (s - 1)
            bound = 1 / 8 + 2 * x / 9 if x < 81 / 16 else math.sqrt(x) - 1
            rows = [torch.randn(size, generator=generator) for _ in range(5)]
            rows += [torch.ones(size), torch.rand(size, generator=generator) ** 8]
            law = levels([0, *(2.0**j for j in range(s))], size, "l2")
            assert all(float(law(v[None]).sum() / v.square().sum()) <= bound + 1e-6 for v in rows)
    exact = torch.tensor([[2.0**-j for j in range(6)] + [0.0, -0.125]])
    for round in range(10):
        found = gw.simulate(exact, gw.NUQSGD(levels=6, norm="max"), round=round).mean
        assert torch.equal(found, exact[0])
    g = torch.randn(1, 2000, generator=generator)
    assert float(levels([0, 1], 512, "l2")(g).sum()) == pytest.approx(float(levels(range(2), 512, "l2")(g).sum()))


@pytest.mark.parametrize(
    ("method", "vectors"),
    [
        (gw.QSGDinf(levels=7, block_size=256), 400),
        (gw.QSGDinf(levels=1, block_size=64), 400),
        (gw.QSGD(levels=16, block_size=512), 400),
        (gw.QSGD(levels=30, block_size=256), 400),
        (gw.NUQSGD(levels=7, block_size=512), 400),
    ],
    ids=repr,
)
def test_the_worst_error_is_no_less_than_any_found(method: gw.Method, vectors: int) -> None:
    """Searched where it is suspected: one large value, or none, and all others alike."""
    bound = method.worst_error
    assert bound is not None
    size, found = method.block_size, 0.0
    s = method.levels
    ends = [0, *(2.0**j for j in range(s))] if isinstance(method, gw.NUQSGD) else range(s + 1)
    law = levels(ends, size, getattr(method, "norm", "l2"))
    for a in torch.logspace(-6, 0, vectors).tolist():
        for count in (1, size // 16, size // 4, size - 1):
            v = torch.zeros(1, size)
            v[0, 1 : 1 + count] = a
            v[0, 0] = 1.0
            found = max(
                found, float(law(v).sum() / v.square().sum()), float(law(v[:, 1:]).sum() / v[:, 1:].square().sum())
            )
    assert 0.6 * bound <= found <= bound * (1 + 1e-6)


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
