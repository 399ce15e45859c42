"""EDEN and DRIVE, by number of the property in the paper's summary (docs/methods.md)."""

from __future__ import annotations

import math

import pytest
import torch

import gradwire as gw
from gradwire.compressors.normal_levels import DISTORTION, NORMAL_LEVELS, lloyd_max

NUMEL = 1 << 16


def vector(kind: str, *shape: int, seed: int = 0) -> torch.Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return x.exp() if kind == "lognormal" else x


def linked(g: torch.Tensor, method: gw.Method, **options: object) -> gw.SimulatedLink:
    return gw.SimulatedLink([("0", torch.empty(g.shape[1]))], method, len(g), min_numel=0, **options)  # type: ignore[arg-type]


def vnmse(g: torch.Tensor, method: gw.Method, rounds: int = 2, **options: object) -> float:
    """E |mean of estimates - mean|^2 over the mean of |g_i|^2."""
    link, error = linked(g, method, **options), 0.0
    for _ in range(rounds):
        found = link.reduce_(g.clone())
        error += float((found.double() - g.double().mean(0)).square().sum()) / rounds
    return error / float(g.double().square().sum(1).mean())


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5])
def test_levels_are_the_fixed_points_of_lloyd_and_max(bits: int) -> None:
    magnitudes, distortion = lloyd_max(2 ** (bits - 1))
    assert NORMAL_LEVELS[bits] == pytest.approx(magnitudes, rel=1e-8)
    assert DISTORTION[bits] == pytest.approx(distortion, rel=1e-7)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("kind", ["normal", "lognormal"])
def test_the_error_is_that_of_the_levels_whatever_the_vector(kind: str, bits: int) -> None:
    """3: D / (1 - D) within 3 %, on heavy tails too."""
    wanted = DISTORTION[bits] / (1 - DISTORTION[bits])
    assert vnmse(vector(kind, 1, NUMEL), gw.EDEN(bits=bits)) == pytest.approx(wanted, rel=0.03)


def test_drive_is_eden_with_one_bit() -> None:
    """Both scales: the unbiased one, to the bit, and that of the least error."""
    g = vector("lognormal", 3, 5000)
    assert torch.equal(gw.simulate(g, gw.DRIVE()).mean, gw.simulate(g, gw.EDEN(bits=1)).mean)
    one = vector("normal", 1, NUMEL)
    assert vnmse(one, gw.DRIVE()) == pytest.approx(math.pi / 2 - 1, rel=0.03)
    assert vnmse(one, gw.DRIVE(least_error=True)) == pytest.approx(1 - 2 / math.pi, rel=0.03)


def bias_and_noise(x: torch.Tensor, method: gw.Method, rounds: int) -> tuple[float, float]:
    """The squared distances from x of the mean over rounds and, in the middle, of a round."""
    total, noise, link = torch.zeros(x.shape[1]).double(), 0.0, linked(x, method)
    for _ in range(rounds):
        found = link.reduce_(x.clone()).double()
        total += found
        noise += float((found - x[0]).square().sum()) / rounds
    return float((total / rounds - x[0].double()).square().sum()), noise


@pytest.mark.parametrize("kind", ["normal", "constant"])
@pytest.mark.parametrize("bits", [1, 3])
def test_the_mean_over_rounds_is_the_vector(kind: str, bits: int) -> None:
    """2: nothing is left of the error but what so many independent ones leave."""
    x = vector("normal", 1, 256) if kind == "normal" else torch.full((1, 256), 0.3)
    bias, noise = bias_and_noise(x, gw.EDEN(bits=bits, block_size=256), 400)
    # Errors have at least dozens of independent directions: twice what is expected is five deviations off.
    assert 0 < bias < 2 * noise / 400


def test_a_few_elements_that_dominate_a_block_leave_a_bias() -> None:
    """2: what the signs and one transform leave: they rotate neither one element nor two into normal coordinates.

    One is exact in every round. Of two, the coordinates are +-(a + b) and +-(a - b), whose signs are those of a alone:
    one bit makes (a^2 + b^2) / a of a and nothing of b, always.
    """
    x = torch.zeros(1, 256)
    x[0, 5] = 2.0
    bias, noise = bias_and_noise(x, gw.EDEN(bits=1, block_size=256), 10)
    assert max(bias, noise) < 1e-10
    x[0, 200] = 1.0
    found = gw.simulate(x, gw.EDEN(bits=1, block_size=256)).mean
    assert found[[5, 200]].tolist() == pytest.approx([2.5, 0.0], abs=1e-6)
    bias, noise = bias_and_noise(x, gw.EDEN(bits=1, block_size=256), 10)
    assert bias == pytest.approx(noise) == pytest.approx(0.25 + 1.0, rel=1e-5)
    # Heavy tails: a few elements of a short block dominate; in blocks of the default's size they do so less.
    for size, most in ((256, 0.06), (4096, 0.01)):
        bias, noise = bias_and_noise(vector("lognormal", 1, 4096), gw.EDEN(bits=1, block_size=size), 200)
        assert bias < most * noise


def test_errors_of_workers_are_independent() -> None:
    """6: ten workers, lognormal, one bit: (pi / 2 - 1) / 10."""
    g = vector("lognormal", 10, NUMEL)
    assert vnmse(g, gw.EDEN(bits=1), collective="all_gather") == pytest.approx((math.pi / 2 - 1) / 10, rel=0.03)


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("method", [gw.EDEN(bits=2), gw.DRIVE(), gw.EDEN(block_size=256)], ids=repr)
def test_an_owner_who_encodes_the_mean_adds_one_error(method: gw.Method, world_size: int) -> None:
    """By two-shot: the workers' errors, and that of encoding what they add up to."""
    g = vector("lognormal", world_size, NUMEL)
    bits = getattr(method, "bits", 1)
    e = DISTORTION[bits] / (1 - DISTORTION[bits])
    up, mean = e / world_size, float(g.double().mean(0).square().sum() / g.double().square().sum(1).mean())
    wanted = up + e * (mean + up)
    # Blocks of 256 are further from normal.
    assert vnmse(g, method, collective="two_shot") == pytest.approx(wanted, rel=0.03 if e > 0.1 else 0.12)


@pytest.mark.parametrize("collective", ["all_gather", "two_shot"])
def test_chunks_do_not_decide_a_bit(collective: str) -> None:
    g = vector("lognormal", 3, 50_000)
    shapes = {"a": 30_000, "b": 1025, "c": 18_000, "d": 975}
    parameters = [(name, torch.zeros(n)) for name, n in shapes.items()]
    found = []
    for chunk_numel in (1 << 20, 25_000, 1):
        link = gw.SimulatedLink(
            parameters, gw.EDEN(bits=2), 3, collective=collective, chunk_numel=chunk_numel, min_numel=1000
        )
        found.append(link.reduce_(g.clone()))
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_both_directions_are_narrow_whatever_the_workers() -> None:
    """4 bits each way, a float32 a block, rounded up to whole words, headers, and shares of whole blocks."""
    numel = 1 << 20
    for world_size in (3, 8):
        sent = gw.simulate(torch.ones(world_size, numel), gw.EDEN()).traffic.sent_bytes
        least = 2 * (world_size - 1) / world_size * numel * (4 + 32 / 4096) / 8
        assert least <= sent <= 1.01 * least + 2 * (world_size - 1) * (4 * 4096 / 8 + 200)


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, 1e-20, 1e37])
def test_the_ends_of_the_range(value: float) -> None:
    """7: a norm below 2^-100 counts as zero, and nothing overflows that need not."""
    g = torch.full((2, 4096), value)
    found = gw.simulate(g, gw.EDEN(bits=4)).mean
    if value < 1e-36:
        assert bool((found == 0).all())
    else:
        # Sixty-four times the value, the norm of a block, is beyond float32.
        assert float((found.double() / value - 1).square().mean()) < 0.02


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 0}, "bits is 1 to 6"),
        ({"bits": 7}, "bits is 1 to 6"),
        ({"bits": 2.5}, "bits is 1 to 6"),
        ({"block_size": 100}, "a power of two from 256 to 32768"),
        ({"block_size": 128}, "a power of two from 256 to 32768"),
    ],
)
def test_fields_out_of_range_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(gw.HyperparameterError, match=message):
        gw.EDEN(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["normal", "one hot", "two hot"])
def test_the_least_error_contracts_every_vector(kind: str) -> None:
    """|C(x) - x|^2 <= (1 - 1 / b) |x|^2 in every draw, b the coordinates of the longest block."""
    method, numel = gw.DRIVE(least_error=True, block_size=512), 700
    assert (method.delta_of(100), method.delta_of(300), method.delta_of(None)) == (1 / 256, 1 / 512, 1 / 512)
    assert gw.DRIVE().delta_of(numel) is None
    x = vector("normal", 1, numel) if kind == "normal" else torch.zeros(1, numel)
    if kind != "normal":
        x[0, 3], x[0, 400] = 2.0, 1.0 if kind == "two hot" else 0.0
    link, size = linked(x, method), float(x.double().square().sum())
    for _ in range(10):
        left = float((link.reduce_(x.clone()).double() - x[0]).square().sum())
        assert left <= (1 - 1 / 512) * size * (1 + 1e-5)
        assert left > 0.2 * size if kind == "normal" else left < 0.8 * size
