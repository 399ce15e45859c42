"""EDEN and DRIVE, by number of the property in the paper's summary (docs/methods/rotations.md)."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.exchange.codecs import Draw
from gradwire.exchange.segments import Parameter, lay_out
from gradwire.kernels import digit_layout, get_kernels
from gradwire.methods.rotations.normal_levels import (
    DISTORTION,
    NORMAL_LEVELS,
    UNIFORM_STEP,
    level_count,
    lloyd_max,
    uniform_levels,
    uniform_step,
)
from gradwire.methods.rotations.rotated_blocks import RotatedSampleCodec

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


def relative_error(count: int) -> float:
    """D / (1 - D) of that many levels."""
    return DISTORTION[count] / (1 - DISTORTION[count])


@pytest.mark.parametrize("count", [n for n in NORMAL_LEVELS if n < 40])
def test_levels_are_the_fixed_points_of_lloyd_and_max(count: int) -> None:
    magnitudes, distortion = lloyd_max(count)
    assert NORMAL_LEVELS[count] == pytest.approx(magnitudes, rel=1e-8)
    assert DISTORTION[count] == pytest.approx(distortion, rel=1e-7)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 1.6, 2.5, 2.7, 3.2, 4.6, 5.34])
@pytest.mark.parametrize("kind", ["normal", "lognormal"])
def test_the_error_is_that_of_the_levels_whatever_the_vector(kind: str, bits: float) -> None:
    """3: D / (1 - D) within 3 %, on heavy tails too."""
    wanted = relative_error(level_count(bits))
    assert vnmse(vector(kind, 1, NUMEL), gw.EDEN(bits=bits)) == pytest.approx(wanted, rel=0.03)


@pytest.mark.parametrize("bits", [0.1, 0.3, 0.9])
@pytest.mark.parametrize("kind", ["normal", "lognormal"])
def test_below_one_bit_the_error_is_that_of_sampled_signs(kind: str, bits: float) -> None:
    """9: pi / (2 bits) - 1 of k signs a block, and 1 + 3 (pi / 2 - 1) / k of its first part, k = 410 at least.

    A block's scale is b / k over a mean of k magnitudes, whose relative variance is (pi / 2 - 1) / k: E 1 / mean^2 is
    larger than 1 / (E mean)^2 by three times that.
    """
    blocks, rounds = NUMEL / 4096, 4
    mean_square = math.pi / (2 * bits) * (1 + 3 * (math.pi / 2 - 1) / (4096 * bits))
    # Of each block's 1 / mean^2 the relative deviation is twice that of the mean: five of so many blocks and rounds.
    noise = 5 * mean_square * 2 * math.sqrt((math.pi / 2 - 1) / (4096 * bits) / (blocks * rounds))
    assert vnmse(vector(kind, 1, NUMEL), gw.EDEN(bits=bits), rounds) == pytest.approx(mean_square - 1, abs=noise)


def test_levels_that_are_no_power_of_two_have_less_error_than_two_powers_side_by_side() -> None:
    """9: at the bits that packed digits take, a part of the coordinates with more levels and the rest with fewer."""
    rate = {count: digit_layout(count).bits_per_value for count in NORMAL_LEVELS}
    powers = [count for count in NORMAL_LEVELS if count & (count - 1) == 0]
    for count in set(NORMAL_LEVELS) - set(powers):
        mixed = []
        for fewer, more in itertools.combinations(powers, 2):
            share = (rate[count] - rate[fewer]) / (rate[more] - rate[fewer])
            if 0 <= share <= 1:
                mixed.append((1 - share) * DISTORTION[fewer] + share * DISTORTION[more])
        assert DISTORTION[count] < 0.95 * min(mixed)


@pytest.mark.parametrize("bits", UNIFORM_STEP)
def test_evenly_spaced_levels_have_the_entropy_and_a_quarter_of_a_bit_less_than_is_possible(bits: float) -> None:
    """10: of a normal value no code of R bits leaves less than 2^(-2R); fine levels leave pi e / 6 times that."""
    entropy, distortion = uniform_levels(UNIFORM_STEP[bits])
    assert entropy == pytest.approx(bits, abs=1e-8)
    # Levels end at 5, beyond which lies 1e-6 of the square: half a percent of what 6 bits leave.
    assert 1 < distortion * 4**bits < math.pi * math.e / 6 * (1 + 1e-6 * 4**bits)
    between = bits * 1.03
    if between < 6:
        assert uniform_levels(uniform_step(between))[0] == pytest.approx(between, abs=0.01)


@pytest.mark.parametrize("bits", [0.25, 0.5, 1, 1.7, 3, 5])
@pytest.mark.parametrize("kind", ["normal", "lognormal"])
def test_a_coder_makes_the_entropy_of_evenly_spaced_levels(kind: str, bits: float) -> None:
    """10: the error and the bytes of the step, 1.54 dB from the bound and the coder's and scales' bytes."""
    step = uniform_step(bits)
    entropy, distortion = uniform_levels(step)
    method = gw.Coded(compressor=gw.EDEN(bits=bits, spacing="uniform"), coder="rans")
    x = vector(kind, 1, NUMEL)
    # Most of a large step's values are zero: at 0.25 bits 2300 of 65536 are not, in each of four rounds.
    assert vnmse(x, method, 4) == pytest.approx(distortion / (1 - distortion), rel=0.05 if bits < 1 else 0.03)
    sent = 8 * gw.simulate(x.repeat(2, 1), method).traffic.sent_bytes / NUMEL
    # Of each payload: scales 32 / 4096, a table of frequencies of at most 512 bytes, 128 lanes' last words, headers.
    assert entropy < sent < entropy + 32 / 4096 + 8 * (512 + 128 * 4 + 128) / NUMEL


def test_a_block_that_is_rounded_to_zero_throughout_is_stretched() -> None:
    """All coordinates of one element are +-1, below half of a large step: the estimate is exact nevertheless."""
    x = torch.zeros(2, 600)
    x[:, 5], x[0, 300:] = 2.0, torch.randn(300, generator=torch.Generator().manual_seed(0))
    found = gw.simulate(x, gw.EDEN(bits=0.25, block_size=256, spacing="uniform"))
    assert found.mean[:256].tolist() == pytest.approx(x[0, :256].tolist(), abs=1e-6)
    assert bool(found.mean[300:].isfinite().all())
    assert bool((found.mean[300:] != 0).any())


@pytest.mark.parametrize("kind", ["normal", "constant"])
@pytest.mark.parametrize("fields", [{"bits": 0.3}, {"bits": 0.5, "spacing": "uniform"}], ids=repr)
def test_few_bits_have_the_vector_as_their_mean(kind: str, fields: dict[str, Any]) -> None:
    """2, 9, 10: as for whole bits, over other places in each round."""
    x = vector("normal", 1, 256) if kind == "normal" else torch.full((1, 256), 0.3)
    bias, noise = bias_and_noise(x, gw.EDEN(block_size=256, **fields), 800)
    # As above; and on one block of 256 coordinates the scale errs by a tenth, which does not shift the mean along x.
    assert 0 < bias < 2 * noise / 800


def test_other_coordinates_are_sent_in_every_round() -> None:
    """9: sixteen of 256, whatever the share; the estimate lies in their span, which is another one for each worker."""
    x, method = vector("normal", 1, 256), gw.EDEN(bits=0.01, block_size=256)
    link = linked(x, method)
    found = [link.reduce_(x.clone()).double() for _ in range(3)]
    kernels = get_kernels("reference")
    codec = method.codec(kernels, lay_out([Parameter("0", (256,), (1,))]), 1, 0)
    for round, estimate in enumerate(found):
        z = torch.empty(256)
        kernels.rotate(estimate.float(), codec.blocks, torch.ones(1), round, 0, z)
        assert int((z.abs() > 1e-3 * z.abs().max()).sum()) == 16
        assert float(estimate @ x[0].double()) == pytest.approx(float(x.double().square().sum()), rel=1e-5)
    assert isinstance(codec, RotatedSampleCodec)
    places = [codec.sampled(Draw(round, stream)).tolist() for round, stream in ((0, 0), (1, 0), (0, 1))]
    assert len({tuple(sorted(p)) for p in places}) == 3
    assert all(len(set(p)) == 16 for p in places)


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
@pytest.mark.parametrize(
    "method", [gw.EDEN(bits=2), gw.EDEN(bits=1.6), gw.EDEN(bits=0.5), gw.DRIVE(), gw.EDEN(block_size=256)], ids=repr
)
def test_an_owner_who_encodes_the_mean_adds_one_error(method: gw.Method, world_size: int) -> None:
    """By two-shot: the workers' errors, and that of encoding what they add up to."""
    g = vector("lognormal", world_size, NUMEL)
    bits = getattr(method, "bits", 1)
    e = relative_error(level_count(bits)) if bits >= 1 else math.pi / (2 * bits) - 1
    up, mean = e / world_size, float(g.double().mean(0).square().sum() / g.double().square().sum(1).mean())
    wanted = up + e * (mean + up)
    # Blocks of 256 are further from normal.
    assert vnmse(g, method, collective="two_shot") == pytest.approx(wanted, rel=0.03 if e > 0.1 else 0.12)


@pytest.mark.parametrize("method", [gw.EDEN(bits=2), gw.EDEN(bits=0.2), gw.EDEN(bits=1, spacing="uniform")], ids=repr)
@pytest.mark.parametrize("collective", ["all_gather", "two_shot"])
def test_chunks_do_not_decide_a_bit(collective: str, method: gw.EDEN) -> None:
    g = vector("lognormal", 3, 50_000)
    shapes = {"a": 30_000, "b": 1025, "c": 18_000, "d": 975}
    parameters = [(name, torch.zeros(n)) for name, n in shapes.items()]
    found = []
    for chunk_numel in (1 << 20, 25_000, 1):
        link = gw.SimulatedLink(parameters, method, 3, collective=collective, chunk_numel=chunk_numel, min_numel=1000)
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
        ({"bits": 0}, "bits is above 0 to 6"),
        ({"bits": 7}, "bits is above 0 to 6"),
        ({"bits": True}, "bits is above 0 to 6"),
        ({"bits": 1.5}, "no more than the 2 levels of bits=1"),
        ({"bits": 4.5}, "no more than the 16 levels of bits=4"),
        ({"bits": 0.1, "spacing": "uniform"}, "0.125 or more"),
        ({"spacing": "even"}, "'lloyd_max' or 'uniform'"),
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
