"""Signs: scaled ones and two means a column, with and without what they leave out; layouts, of votes too."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import gradwire as gw

METHODS = [
    gw.SignSGD(),
    gw.Signum(),
    gw.ScaledSign(),
    gw.ScaledSign(block_size=48),
    gw.EFSignSGD(),
    gw.EFSignSGD(block_size=48, momentum=0.5),
    gw.OneBit(),
    gw.OneBit(block_size=48, momentum=0.5),
]
FED_BACK = [gw.EFSignSGD(), gw.EFSignSGD(block_size=64), gw.OneBit(), gw.OneBit(block_size=64)]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def residual(link: gw.SimulatedLink, rank: int = 0) -> torch.Tensor:
    return link.state_dict()[f"rank {rank}"]["residual/w"]


def one_round(p: torch.Tensor, method: gw.Method | str) -> torch.Tensor:
    """Return what the operator makes of one worker's vector: no residual precedes it."""
    return gw.simulate([{"w": p}], method).mean["w"]


# Scaled signs.


def test_scaled_sign_is_the_best_multiple_and_a_contraction() -> None:
    """Property 6."""
    for seed, power in ((0, 1), (1, 3), (2, 7)):
        p = randn(4000, seed=seed) ** power
        d, q = p.double(), one_round(p, "scaledsign").double()
        phi = float(d.abs().sum() ** 2 / (4000 * d.square().sum()))
        # The mean magnitude is truncated and rounded by parts of 2^-23 of the largest, on 4000 elements.
        slack = float(2.0**-20 * d.abs().max() / d.abs().mean())
        assert float((d - q).square().sum() / d.square().sum()) == pytest.approx(1 - phi, abs=slack)
        assert 1 / 4000 <= phi <= 1
        for factor in (0.99, 1.01):
            assert (d - q).norm() < (d - factor * q).norm()
    p = randn(200_000)
    error = float((p - one_round(p, "scaledsign")).square().sum() / p.square().sum())
    assert error == pytest.approx(1 - 2 / math.pi, abs=5 / math.sqrt(200_000))


@pytest.mark.parametrize("method", [gw.ScaledSign(), gw.ScaledSign(block_size=64)], ids=repr)
def test_the_declared_contraction_holds_for_the_worst_vector(method: gw.ScaledSign) -> None:
    """A single value in d is the worst: exactly 1 - 1/d."""
    p = torch.zeros(64)
    p[17] = 4.0
    error = float((p - one_round(p, method)).square().sum() / p.square().sum())
    assert error == pytest.approx(1 - 1 / 64)
    assert error <= 1 - method.delta < 1
    assert gw.ScaledSign(block_size=64).delta == method.delta_of(64) == 1 / 64


def test_equal_magnitudes_come_back_exactly() -> None:
    """Property 10, for magnitudes that are no short binary fractions."""
    for magnitude in (0.1, 1 / 3, 1e-30, 1e12):
        p = magnitude * torch.where(randn(5003) >= 0, 1.0, -1.0)
        assert torch.equal(one_round(p, "ef_signsgd"), p)


# Two means a column.


def columns(p: torch.Tensor, q: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(a.double(), b.double()) for a, b in zip(p.reshape(len(p), -1), q.reshape(len(q), -1))]


@pytest.mark.parametrize("shape", [(7, 33), (3, 400), (5, 3, 3, 3), (2, 81)])
def test_values_are_the_means_of_the_sides(shape: tuple[int, ...]) -> None:
    """Properties 1 and 2."""
    p = randn(*shape) + 0.2
    for a, b in columns(p, one_round(p, "onebit")):
        for side in (a >= 0, a < 0):
            if bool(side.any()):
                # Float32 sums of up to 400 values of about 1, and one rounding of the mean.
                assert b[side].tolist() == pytest.approx([float(a[side].mean())] * int(side.sum()), rel=1e-6)
                assert float((a - b)[side].sum()) == pytest.approx(0, abs=1e-6 * len(a))
        assert float(b.square().sum() + (a - b).square().sum()) == pytest.approx(float(a.square().sum()), rel=1e-6)
        scaled = a.abs().mean() * a.sign()
        assert (a - b).norm() <= (a - scaled).norm() * (1 + 1e-6)


def test_opposite_means_are_a_scaled_sign_and_the_worst_column_is_no_total_loss() -> None:
    """Property 2."""
    half = randn(1, 300).abs()
    p = torch.cat([half, -half], 1)
    assert torch.allclose(one_round(p, "onebit"), one_round(p, "scaledsign"), rtol=1e-6, atol=0)
    # One positive value among m: its side's mean is a part of m of it.
    single = torch.zeros(3, 64)
    single[:, 5] = 4.0
    error = float((single - one_round(single, "onebit")).square().sum() / single.square().sum())
    assert error == pytest.approx(1 - 1 / 64)


def test_a_gaussian_column_loses_one_minus_two_over_pi() -> None:
    """Property 2."""
    p = randn(4, 50_000)
    error = float((p - one_round(p, "onebit")).square().sum() / p.square().sum())
    assert error == pytest.approx(1 - 2 / math.pi, abs=5 / math.sqrt(200_000))


def test_two_values_of_opposite_sign_and_zero_are_exact() -> None:
    """Property 3; an empty side is zero."""
    p = torch.where(randn(6, 50) >= 0, 0.3, -0.7)
    p[2], p[3], p[4] = 0.0, 1.7, -0.1
    assert torch.equal(one_round(p, "onebit"), p)


def test_a_vector_is_one_column_and_memory_order_decides() -> None:
    p = randn(100)
    assert len(set(one_round(p, "onebit").tolist())) == 2
    w = randn(4, 3, 5, 5)
    apart = one_round(w.to(memory_format=torch.channels_last), "onebit")
    assert torch.equal(apart, one_round(w, "onebit"))


def test_blocks_take_the_place_of_columns() -> None:
    """Two means a block, counted from the parameter's first element; the last block is shorter."""
    p = randn(7, 33) + 0.2
    found = one_round(p, gw.OneBit(block_size=32)).flatten()
    blocks = [one_round(part, "onebit") for part in p.flatten().split(32)]
    assert torch.equal(found, torch.cat(blocks))
    assert not torch.equal(found, one_round(p, "onebit").flatten())


def test_a_vector_longer_than_its_blocks_costs_two_values_a_block() -> None:
    """1 + 64/m bits of payload, to N - 1 workers: 2 + 128/m for four on the scale of an all-reduce, headers aside."""
    numel, m = 80 * 4096, 64
    for method, column in ((gw.OneBit(block_size=m), numel), (gw.OneBit(), m)):
        like = [("w", torch.empty(numel // column, column))]
        link = gw.SimulatedLink(like, method, 4)
        link.reduce_(torch.zeros(4, numel))
        # One header for each of three messages.
        assert link.traffic().bits_per_element == pytest.approx(2 + 128 / m, abs=8 * 64 * 3 / numel)


def test_a_block_size_is_written_in_two_ways_and_read_as_one() -> None:
    short, long = gw.EFSignSGD(block_size=64), gw.EFSignSGD(compressor=gw.ScaledSign(block_size=64))
    assert short == long == gw.method("EFSignSGD(ScaledSign(block_size=64))") == gw.method(repr(long))
    assert "block_size=64" in repr(long)
    around = gw.ErrorFeedback(compressor=gw.ScaledSign(block_size=64))
    g = randn(2, 500)
    ours, theirs = gw.simulate(g, short), gw.simulate(g, around)
    assert torch.equal(ours.mean, theirs.mean)
    assert ours.traffic == theirs.traffic


@pytest.mark.parametrize("block_size", [None, 128])
def test_replacing_the_block_size_replaces_the_compressor(block_size: int | None) -> None:
    method = replace(gw.EFSignSGD(block_size=64, momentum=0.5), block_size=block_size)
    assert method == gw.EFSignSGD(block_size=block_size, momentum=0.5)
    assert method.compressor == gw.ScaledSign(block_size=block_size)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("EFSignSGD(block_size=24)", "EFSignSGD: block_size is a multiple of 16"),
        ("OneBit(block_size=0)", "OneBit: block_size is a multiple of 16"),
        ("EFSignSGD(compressor=ScaledSign(block_size=32), block_size=64)", "differ: leave compressor out"),
        ("EFSignSGD(QSGDinf())", "use ErrorFeedback for another"),
    ],
)
def test_blocks_that_make_no_sense_are_refused(spec: str, told: str) -> None:
    with pytest.raises(gw.HyperparameterError, match=told):
        gw.method(spec)


# Error feedback.


@pytest.mark.parametrize("method", FED_BACK, ids=repr)
def test_nothing_is_lost(method: gw.Method) -> None:
    """signSGD property 7, 1-bit property 4: sums of outcomes are sums of gradients less the last residuals."""
    link = gw.SimulatedLink([("w", torch.empty(30, 40))], method, 3)
    total, sent = torch.zeros(1200), torch.zeros(1200)
    for round in range(20):
        g = randn(3, 1200, seed=round)
        total += g.mean(0)
        sent += link.reduce_(g)
    left = torch.stack([residual(link, r) for r in range(3)]).mean(0)
    # Twenty float32 additions of values of about five, on three workers.
    assert torch.allclose(sent, total - left, atol=3e-5)
    assert float(left.norm()) > 1


@pytest.mark.parametrize("method", FED_BACK, ids=repr)
def test_residuals_stay_bounded(method: gw.Method) -> None:
    """1-bit property 5, signSGD property 8, with the contraction that each round really had."""
    link = gw.SimulatedLink([("w", torch.empty(16, 64))], method, 1)
    before, worst, largest, squares = torch.zeros(1024), 0.0, 0.0, 0.0
    for round in range(150):
        g = torch.nn.functional.normalize(randn(1, 1024, seed=round))
        p = g[0] + before
        link.reduce_(g)
        before = residual(link)
        worst = max(worst, float(before.square().sum() / p.square().sum()))
        largest = max(largest, float(before.norm()))
        squares = max(squares, float(before.square().sum()))
    assert 0 < worst < 1
    assert largest <= math.sqrt(worst) / (1 - math.sqrt(worst))
    assert squares <= 4 * worst / (1 - worst) ** 2


def descend(method: str, gradient: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, lr: float,
            steps: int) -> list[torch.Tensor]:  # fmt: skip
    """Return the points of four workers' descent, the start first."""
    link, points = gw.SimulatedLink([("w", torch.empty_like(x))], method, 4, min_numel=0), [x]
    for _ in range(steps):
        points.append(points[-1] - lr * link.reduce_(gradient(points[-1])))
    return points


def test_skewed_noise_takes_signs_uphill_and_error_feedback_down() -> None:
    """Property 5: f(x) = 4.1 sum x on [-1, 1]^20 with gradients 50 (one in ten) and -1; the minimum is at -1."""
    steps, generator = 600, torch.Generator().manual_seed(0)
    g = torch.where(torch.rand(steps, 20, generator=generator) < 0.1, 50.0, -1.0)

    def run(method: str, lr: float) -> float:
        link = gw.SimulatedLink([("w", torch.empty(20))], method, 1, min_numel=0)
        x, tail = torch.zeros(20), []
        for step in range(steps):
            x = (x - lr * link.reduce_(g[step : step + 1].clone())).clamp(-1, 1)
            tail.append(float(x.mean()))
        return sum(tail[-100:]) / 100

    assert run("signsgd", 0.01) > 0.8
    assert run("ef_signsgd", 0.002) < -0.8
    assert run("onebit", 0.002) < -0.8


def quadratic(workers: int, spread: float = 0.0, d: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    """Curvatures from 1/4 to 1, and each worker's optimum, of mean zero."""
    centres = spread * randn(workers, d)
    return torch.logspace(math.log10(1 / 4), 0, d), centres - centres.mean(0)


def alike(x: torch.Tensor) -> torch.Tensor:
    """Return gradients that all vanish at the optimum."""
    return (quadratic(4)[0] * x).expand(4, -1).clone()


@pytest.mark.parametrize("method", ["ef_signsgd", "onebit"])
def test_error_feedback_converges_linearly(method: str) -> None:
    """Property 9, 1-bit property 7: all local gradients vanish at the optimum."""
    points = descend(method, alike, randn(40, seed=5), 0.1, 400)
    start, some, more = (float(points[step].norm()) for step in (0, 100, 400))
    assert some < 0.1 * start
    assert more < 1e-3 * some


def test_signs_oscillate() -> None:
    """Property 9 without feedback, on the same problem."""
    start, step = randn(40, seed=5), 0.02
    # Steps to walk there, and as many again.
    stalled = descend("signsgd", alike, start, step, 2 * math.ceil(float(start.abs().max()) / step))[-1]
    # Every element jumps to and fro across zero, by less than a step and on the whole by about half of one.
    assert float(stalled.abs().max()) <= step * (1 + 1e-4)
    assert float(stalled.norm()) > 0.1 * step * math.sqrt(40)


@pytest.mark.parametrize("method", ["ef_signsgd", "onebit"])
def test_different_workers_reach_a_plateau_that_falls_with_the_step(method: str) -> None:
    """Squared distance falls about as the square of the learning rate: fivefold smaller, at least tenfold lower."""
    # From the optimum: after 8 / lr steps the squared distance lacks exp(-2 h 8) = e^-4 of its plateau at the least
    # curvature, h = 1/4.
    high, low = (
        float(descend(method, unlike, torch.zeros(40), lr, round(8 / lr))[-1].square().sum()) for lr in (0.2, 0.04)
    )
    assert 0 < low < high / 10


def unlike(x: torch.Tensor) -> torch.Tensor:
    """Return gradients of workers whose optima differ; their mean vanishes at zero."""
    h, centres = quadratic(4, spread=1.0)
    return h * (x - centres)


def test_without_feedback_different_workers_end_elsewhere() -> None:
    """1-bit property 6: the same problem, the same steps, the error stays."""
    steps, lr = 250, 0.04
    fed = descend("onebit", unlike, torch.zeros(40), lr, steps)[-1]
    for memoryless in ("scaledsign", "signsgd", "onebit"):
        link, x = gw.SimulatedLink([("w", torch.zeros(40))], memoryless, 4, min_numel=0), torch.zeros(40)
        for _ in range(steps):
            # No state is handed on.
            x = x - lr * (gw.simulate(unlike(x), "onebit").mean if memoryless == "onebit" else link.reduce_(unlike(x)))
        assert float(x.square().sum()) > 100 * float(fed.square().sum())


# Layouts.


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize(("order", "chunk_numel"), [((2, 0, 1, 3), 160), ((3, 2, 1, 0), 1000), ((0, 1, 2, 3), 80)])
def test_layout_and_backend_change_no_bit(method: gw.Method, order: tuple[int, ...], chunk_numel: int) -> None:
    """Parameters with columns that no group fits, over two rounds, so that memory counts."""
    shapes = {"a": (7, 33), "b": (301,), "c": (5, 3, 3, 3), "d": (2, 900)}
    names = list(shapes)

    def run(names: list[str], **options: object) -> dict[str, torch.Tensor]:
        like = [(n, torch.empty(shapes[n])) for n in names]
        link = gw.SimulatedLink(like, method, 3, min_numel=100, **options)
        for round in range(2):
            parts = {n: randn(3, math.prod(shapes[n]), seed=10 * round + "abcd".index(n)) for n in names}
            mean = link.reduce_(torch.cat([parts[n] for n in names], 1))
        return dict(zip(names, mean.split([math.prod(shapes[n]) for n in names])))

    first = run(names, backend="reference")
    for backend in ("cpu", "cpu-plain"):
        second = run([names[i] for i in order], chunk_numel=chunk_numel, backend=backend)
        assert all(torch.equal(first[n], second[n]) for n in names)
