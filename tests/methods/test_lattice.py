"""Lattice mean estimation, by number of the property in the paper's summary (docs/methods/lattice.md)."""

from __future__ import annotations

import logging
import math

import pytest
import torch

import gradwire as gw
from gradwire.exchange.codecs import Draw
from gradwire.exchange.drivers.simulation import simulate_ranks
from gradwire.exchange.drivers.traffic import Meter
from gradwire.exchange.protocols import Context, Outcome, Section, all_gather
from gradwire.exchange.segments import Parameter, lay_out
from gradwire.kernels import get_kernels


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(world_size: int, numel: int, y: float, size: float, seed: int = 0) -> torch.Tensor:
    """Vectors of that size, each two at most ``y`` apart in every element."""
    generator = torch.Generator().manual_seed(seed)
    common = size * torch.randn(numel, generator=generator)
    return common + y * (torch.rand(world_size, numel, generator=generator) * 0.99)


@pytest.mark.parametrize("q", [4, 8, 16, 256])
def test_the_error_follows_the_distance_not_the_size(q: int) -> None:
    """1: uniform in [-s/2, s/2] with s = 2y / (q - 1): a mean square of y^2 / (3 (q - 1)^2) for inputs of any size."""
    y = 0.5
    x = close(1, 4096, y, 1.0).repeat(2, 1)
    x[1] += y * 0.7
    side = 2 * y / (q - 1)
    errors = []
    for shift in (0.0, 64.0):
        found = gw.simulate(x + shift, gw.Lattice(colours=q, distance=y)).mean
        error = found - (x + shift).mean(0)
        assert float(error.abs().max()) <= side / 2 * 1.001 + 2e-5
        errors.append(float(error.square().mean()))
    # Two dithers half a side apart, of vectors 0.7 y apart: between s^2 / 48 and s^2 / 12.
    assert side**2 / 12 / 4 * 0.9 < errors[0] < side**2 / 12 * 1.1
    # A side is stretched by 2^-20 of the size: 89 sides apart at q = 256, the phase between the two moves by 0.01.
    assert errors[1] == pytest.approx(errors[0], rel=0.1)
    alone = gw.simulate(x[:1], gw.Lattice(colours=q, distance=y)).mean - x[0]
    # 4096 squares of uniform variables: a relative deviation of 1.4 %.
    assert float(alone.square().mean()) == pytest.approx(y**2 / (3 * (q - 1) ** 2), rel=0.06)
    assert float(alone.abs().max()) == pytest.approx(side / 2, rel=0.01)


def test_translation_changes_nothing_where_qsgd_suffers() -> None:
    """2: the same bits but for float32's rounding of the larger inputs: shifts by whole sides."""
    x = close(3, 2000, 0.05, 0.1)
    lattice, qsgd = gw.Lattice(colours=16, distance=0.06), gw.QSGDinf(levels=7)
    noise = {}
    for shift in (0.0, 32.0):
        for method in (lattice, qsgd):
            mean = gw.simulate(x + shift, method).mean.double()
            noise[method, shift] = float((mean - (x + shift).double().mean(0)).square().sum())
    assert noise[lattice, 32.0] == pytest.approx(noise[lattice, 0.0], rel=0.1)
    assert noise[qsgd, 32.0] > 100 * noise[qsgd, 0.0]
    assert noise[lattice, 32.0] < 1e-3 * noise[qsgd, 32.0]


@pytest.mark.parametrize("far", [1.3, 2.0, 40.0])
def test_workers_too_far_apart_are_noticed_by_all(far: float) -> None:
    """3: one element of one worker beyond the reach of another: the round is not finite, on every rank alike."""
    y = 0.1
    x = close(4, 1000, y, 1.0)
    assert bool(torch.isfinite(gw.simulate(x, gw.Lattice(distance=y)).mean).all())
    x[2, 345] += far * y * 16 / 15 + y
    assert bool((gw.simulate(x, gw.Lattice(distance=y)).mean == torch.inf).all())
    # With no distance given nothing can be too far.
    assert bool(torch.isfinite(gw.simulate(x, gw.Lattice()).mean).all())


def test_a_link_warns_once_of_workers_too_far_apart(caplog: pytest.LogCaptureFixture) -> None:
    """3: with what to change; not of a gradient that is not finite, which no distance would mend."""
    caplog.set_level(logging.WARNING, "gradwire")
    parameters = [("first", torch.empty(300)), ("second", torch.empty(200))]
    link = gw.SimulatedLink(parameters, gw.Lattice(distance=0.1), 3, min_numel=0, chunk_numel=300)
    for round, (far, spoilt) in enumerate([(0.0, False), (0.0, True), (5.0, False), (5.0, False)]):
        x = close(3, 500, 0.1, 1.0)
        x[1, 7] += far
        x[2, 400] += far
        if spoilt:
            x[0, 3] = torch.nan
        mean = link.reduce_(x)
        assert bool(torch.isfinite(mean).all()) == (round == 0)
        assert len(caplog.records) == (round > 1)
    text = caplog.records[0].getMessage()
    for part in ("round 2", "'first'", "distance=0.1", "larger distance", "distance=None", "GradScaler"):
        assert part in text


def test_memories_keep_their_state_when_workers_are_too_far_apart() -> None:
    """3: the outcome says so, for whoever remembers something."""
    segments = lay_out([Parameter("w", (500,), (1,))])
    method = gw.Lattice(distance=0.1)
    codec = method.codec(get_kernels("reference"), segments, 2, 0)
    for far, finite in ((0.0, True), (9.0, False)):
        x = close(2, 500, 0.1, 1.0)
        x[1, 7] += far
        largest = codec.summarise(x.abs().amax(0))
        runs = [all_gather(Context(r, 2, 0), 25, [Section(codec, largest)], x[r]) for r in range(2)]
        outcomes: list[Outcome] = simulate_ranks(runs, [Meter(), Meter()])
        assert [o.finite for o in outcomes] == [finite, finite]
        assert torch.equal(x[0], x[1])


@pytest.mark.parametrize("distance", [None, 0.1])
def test_every_rank_ends_in_the_same_bits_and_knows_what_it_sent(distance: float | None) -> None:
    """4: any reference within y finds the identical points; what the ranks say they sent adds up to N means."""
    segments = lay_out([Parameter("a", (500,), (1,)), Parameter("b", (77,), (1,))])
    codec = gw.Lattice(distance=distance).codec(get_kernels("cpu"), segments, 3, 0)
    x = close(3, 577, 0.1, 1.0)
    before = x.clone()
    largest = codec.summarise(x.abs().amax(0))
    runs = [all_gather(Context(r, 3, 5, wants_sent=True), 25, [Section(codec, largest)], x[r]) for r in range(3)]
    outcomes = simulate_ranks(runs, [Meter() for _ in range(3)])
    assert torch.equal(x[0], x[1])
    assert torch.equal(x[0], x[2])
    total = torch.zeros(577)
    for rank, outcome in enumerate(outcomes):
        own = torch.zeros(577)
        assert outcome.sent is not None
        outcome.sent(own, 1.0)
        side = 2 * (distance or 2 * float(before.abs().max())) / 15
        assert 0.8 * side / 2 < float((own - before[rank]).abs().max()) <= side / 2 * 1.001
        total += own / 3
    # Float32 rounding of sums of three values up to four.
    assert torch.allclose(total, x[0], atol=2e-6)


def test_what_was_sent_cannot_be_told_without_the_vector() -> None:
    codec = gw.Lattice().codec(get_kernels("reference"), lay_out([Parameter("a", (80,), (1,))]), 1, 0)
    x, row = torch.ones(80), torch.empty(codec.payload_bytes(1), dtype=torch.uint8)
    summary = codec.summarise(x)
    codec.encode(x, summary, Draw(0, 0), row)
    with pytest.raises(TypeError, match="remembered"):
        codec.add_own(row, summary, 1.0, x)
    with pytest.raises(TypeError, match="before it has encoded"):
        codec.decode_rows(row[None], summary, x)


@pytest.mark.parametrize("colours", [16, 32768])
def test_large_inputs_keep_float32_resolution(colours: int) -> None:
    """6: numbers of points stay below 2^23; a distance that float32 cannot tell at that size is no failure."""
    x = close(3, 1000, 1e-6, 1000.0)
    found = gw.simulate(x, gw.Lattice(distance=1e-6, colours=colours)).mean
    largest = float(x.abs().max())
    assert bool(torch.isfinite(found).all())
    # A side is at least 2^-22 of the largest magnitude; half of it, and the rounding of the sum of three.
    assert float((found.double() - x.double().mean(0)).abs().max()) <= largest * (2.0**-23 + 2.0**-22)


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_equal_vectors_cancel_their_errors(world_size: int) -> None:
    """Dithers r / N apart: the mean of N equal vectors errs by s / (2 N) at most."""
    x = gaussian(1, 3000).repeat(world_size, 1)
    mean = gw.simulate(x, gw.Lattice(colours=16, distance=0.3)).mean
    side = 2 * 0.3 / 15
    assert float((mean - x[0]).abs().max()) <= side / 2 / world_size * 1.01 + 1e-6
    assert float((mean - x[0]).square().mean()) == pytest.approx(side**2 / 12 / world_size**2, rel=0.1)


def test_an_infinity_reaches_everybody_and_only_its_parameter() -> None:
    workers = [{"a": gaussian(200, seed=r), "b": gaussian(200, seed=r + 9)} for r in range(3)]
    workers[1]["a"][7] = torch.nan
    for distance in (None, 50.0):
        mean = gw.simulate(workers, gw.Lattice(distance=distance)).mean
        assert bool((mean["a"] == torch.inf).all())
        assert bool(torch.isfinite(mean["b"]).all())


def test_it_is_the_better_the_closer_workers_are() -> None:
    """The method's point, on gradients: against QSGDinf at as many bits, with a distance that fits."""
    x = close(4, 5120, 0.01, 1.0)
    errors = {}
    for method in (gw.Lattice(colours=16, distance=0.01), gw.QSGDinf(levels=7)):
        errors[method.name] = float((gw.simulate(x, method).mean - x.mean(0)).norm())
    # QSGDinf's step is a seventh of a block's maximum, about 0.45; the lattice's is 0.0013.
    assert errors["lattice"] < errors["qsgdinf"] / 100
    assert math.isfinite(errors["qsgdinf"])


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ("Lattice(colours=2)", "power of two"),
        ("Lattice(colours=12)", "power of two"),
        ("Lattice(colours=16.0)", "power of two"),
        ("Lattice(distance=0)", "positive number"),
        ("Lattice(distance=-1.0)", "positive number"),
        ("Lattice(distance=1e999)", "positive number"),
        ("ErrorFeedback(compressor=Lattice())", "no contraction"),
    ],
)
def test_fields_out_of_range_are_refused(spec: str, part: str) -> None:
    with pytest.raises(gw.HyperparameterError, match=part):
        gw.method(spec)
