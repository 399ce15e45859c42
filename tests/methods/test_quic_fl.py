"""QUIC-FL: its tables, its error, and that no block has a bias."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

import gradwire as gw
from gradwire.exchange.codecs import Draw
from gradwire.exchange.segments import Parameter, lay_out
from gradwire.kernels import get_kernels
from gradwire.methods.rotations.bounded_levels import (
    ERROR,
    FIRST,
    LIMIT,
    POINTS,
    SHARED_VALUES,
    WIDTH,
    BoundedSupportCodec,
    error_of,
    first_values,
    points_of,
    solve,
)

PUBLISHED = {1: 1.48, 2: 0.215, 3: 0.0431, 4: 0.0097}
"""Errors of the authors' tables for normal coordinates."""


def codec_of(method: gw.QUICFL, numel: int) -> BoundedSupportCodec:
    segments = lay_out([Parameter("w", (numel,), (1,))])
    return method.codec(get_kernels("reference"), segments, 1, 0)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_tables_are_the_solvers(bits: int) -> None:
    assert POINTS[bits] == pytest.approx(points_of(bits, WIDTH[bits], LIMIT), rel=1e-8)
    assert FIRST[bits] == pytest.approx(first_values(bits, list(POINTS[bits])), rel=1e-8)
    width, error = solve(bits)
    # The error is flat at its least: a width rounded to three places has that error still.
    assert WIDTH[bits] == pytest.approx(width, abs=2e-3)
    assert ERROR[bits] == pytest.approx(error_of(bits, list(POINTS[bits])), rel=1e-8)
    assert ERROR[bits] == pytest.approx(error, rel=1e-5)
    assert all(error_of(bits, points_of(bits, WIDTH[bits] + d, LIMIT)) > error for d in (-0.05, 0.05))


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_the_mean_of_what_a_point_stands_for_is_the_point(bits: int) -> None:
    """Whatever the values of normal variables say: so the estimate has no bias for any block."""
    values, count = codec_of(gw.QUICFL(bits=bits), 256).grid.values.astype(np.float64), SHARED_VALUES[bits]
    above = np.array(POINTS[bits])
    points = np.concatenate([-above[::-1], [0.0], above])
    for g, point in enumerate(points):
        digits = [(g + h) // count for h in range(count)]
        # Values of float32, the largest of which is below 64, and first values of nine digits.
        assert float(values[range(count), digits].mean()) == pytest.approx(float(point), abs=64 * 2**-24)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("tail", [False, True])
def test_the_error_is_the_published_one_whatever_the_vector(bits: int, tail: bool) -> None:
    """4: within 5 % of the authors', or better; and within 3 % of what the tables promise."""
    g = torch.randn(1, 1 << 17, generator=torch.Generator().manual_seed(0))
    g = g.exp() if tail else g
    method = gw.QUICFL(bits=bits)
    error = sum(float((gw.simulate(g, method, round=r).mean - g[0]).double().square().sum()) for r in range(2)) / 2
    error /= float(g.double().square().sum())
    assert error == pytest.approx(ERROR[bits], rel=0.03)
    assert error < 1.05 * PUBLISHED[bits]


@pytest.mark.parametrize(("bits", "clients", "trials"), [(1, 10, 2), (4, 10, 2)])
def test_the_authors_test_of_a_mean(bits: int, clients: int, trials: int) -> None:
    """8: lognormal vectors of 2^19 elements, ten clients: the error of one over the clients."""
    generator, total = torch.Generator().manual_seed(0), 0.0
    for trial in range(trials):
        g = torch.randn(clients, 1 << 19, generator=generator).exp()
        mean = gw.simulate(g, gw.QUICFL(bits=bits), round=trial).mean.double()
        total += float((mean - g.double().mean(0)).square().sum() / g.double().square().sum(1).mean()) / trials
    assert total < 1.05 * PUBLISHED[bits] / clients
    assert total == pytest.approx(ERROR[bits] / clients, rel=0.03)


def blocks() -> dict[str, torch.Tensor]:
    """Return blocks that are far from normal when they are rotated by signs and one transform."""
    one, two, ramp = torch.zeros(256), torch.zeros(256), torch.arange(256.0) - 100
    one[17] = 3.0
    two[3], two[90] = 2.0, 1.0
    return {"one": one, "two": two, "constant": torch.ones(256), "ramp": ramp, "half": torch.cat([ramp[:100], one])}


@pytest.mark.parametrize("bits", [1, 3])
@pytest.mark.parametrize("kind", ["one", "two", "constant", "ramp", "half"])
def test_no_block_has_a_bias(kind: str, bits: int) -> None:
    """4: per element, over rounds and parameters, each with draws of its own; 4.8 standard errors of what was drawn."""
    x, draws, copies = blocks()[kind], 500, 10
    like = [(str(i), x) for i in range(copies)]
    ours = gw.SimulatedLink(like, gw.QUICFL(bits=bits, block_size=256), 1, min_numel=0)
    same = x.repeat(copies)[None]
    found = torch.cat([ours.reduce_(same.clone()).double().view(copies, -1) for _ in range(draws // copies)])
    deviation = found.std(0) / draws**0.5
    assert float(((found.mean(0) - x) / deviation.clamp(min=1e-6)).abs().max()) < 4.8


def test_exact_coordinates_are_exact_and_too_many_stretch_their_block() -> None:
    codec = codec_of(gw.QUICFL(bits=1, block_size=1024), 2 * 1024)
    z = torch.randn(2 * 1024, generator=torch.Generator().manual_seed(0)).clamp(-2, 2)
    # There is room for four of 1024: three in the first block, and six in the second.
    large = {5: 4.0, 700: -9.0, 1000: 3.5, 1030: 8.0, 1040: -7.0, 1050: 6.0, 1060: 5.0, 1070: 4.5, 2000: 4.0}
    for place, value in large.items():
        z[place] = value
    before, out = z.clone(), torch.zeros(codec.payload_bytes(codec.units), dtype=torch.uint8)
    stretch = codec._exact_coordinates(z, out)
    assert stretch.tolist() == pytest.approx([1.0, 4.5 / LIMIT])
    assert torch.equal(z[:1024], before[:1024])
    assert int((z[1024:].abs() > LIMIT * (1 + 1e-6)).sum()) == 4
    values = out[codec._values_at : codec._places_at].view(torch.float32)
    places = out[codec._places_at : codec.side_bytes].view(torch.int16)
    assert values[:4].tolist() == [4.0, -9.0, 3.5, 0.0]
    assert places[:8].tolist() == [5, 700, 1000, -1, 6, 16, 26, 36]
    assert torch.allclose(values[4:8] * stretch[1].float(), before[[1030, 1040, 1050, 1060]])


def test_what_is_exact_does_not_depend_on_other_blocks() -> None:
    """A coordinate just beyond the limit, beside a block that has too many large ones."""
    codec = codec_of(gw.QUICFL(bits=1, block_size=1024), 2 * 1024)
    just = float(np.nextafter(np.float32(LIMIT), np.float32(9)))
    for large in (0, 9):
        z, out = torch.zeros(2 * 1024), torch.zeros(codec.payload_bytes(codec.units), dtype=torch.uint8)
        z[5] = just
        z[1030 : 1030 + large] = 2.0 * LIMIT
        codec._exact_coordinates(z, out)
        assert out[codec._values_at : codec._places_at].view(torch.float32)[:4].tolist() == [just, 0, 0, 0]
        # Divided, those that are equal are at the limit, and clamped.
        assert int((z.abs() > codec.limit).sum()) == 1


def test_a_place_beyond_its_block_is_not_used() -> None:
    method, x = gw.QUICFL(block_size=256), torch.ones(300)
    codec = codec_of(method, 300)
    out = torch.zeros(codec.payload_bytes(codec.units), dtype=torch.uint8)
    summary = codec.remember(codec.summarise(x), x, Draw(0, 0), False)
    codec.encode(x, summary, Draw(0, 0), out)
    found = []
    for place in (-1, 256, 300, 32767):
        hostile = out.clone()
        hostile[codec._values_at : codec._places_at].view(torch.float32).fill_(1e30)
        hostile[codec._places_at : codec.side_bytes].view(torch.int16).fill_(place)
        found.append(torch.empty(300))
        codec.decode_rows(hostile[None], summary, found[-1])
    assert all(torch.equal(found[0], f) for f in found)
    # A block's estimate is no longer than its exact length and an error of a hundredth of its square.
    assert float(found[0].norm()) < 1.5 * float(x.norm())


SIZES = {"a": 10_000, "b": 256, "c": 700, "d": 48 * 256, "e": 300}
"""Whole blocks and parts of one, and coordinates that do not fill groups of 80."""


def uneven(workers: int) -> torch.Tensor:
    """Return cubes of evenly spread values; of the last three parameters one is zero, one has an infinity.

    One has ten equal elements of 256, so far apart that many coordinates of a block are alike: some blocks have more
    large ones than there is room for. All are computed in integers and products, hence the same on every machine.
    """
    numel = sum(SIZES.values())
    number = torch.arange(workers * numel).reshape(workers, numel) * 2654435761 % 2**24
    x = (number.to(torch.float32) - 2.0**23) / 2.0**23
    x = x * x * x
    places = dict(zip(SIZES, x.split(list(SIZES.values()), 1)))
    places["c"].zero_()
    places["d"].view(workers, 48, 16, 16).zero_()[:, :, :10, 0] = 1.0
    places["e"][0, 5] = torch.inf
    return x


@pytest.mark.parametrize(
    ("fields", "payload", "mean"),
    [
        ({"bits": 1}, "8d68f39f3115e94e", "c728ebf03260883a"),
        ({"bits": 2, "block_size": 512}, "be8be8601587a662", "661d5caeec8eadb3"),
        ({"bits": 3, "block_size": 256}, "7c3a1976d6ea775a", "4f9e3f180a8e1652"),
        ({"bits": 4}, "8b59472bdd43ab8b", "f1203b4d87100770"),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_payloads_and_means_are_the_bits_that_they_always_were(
    backend: str, fields: dict[str, int], payload: str, mean: str
) -> None:
    def digest(found: torch.Tensor) -> str:
        return hashlib.sha256(found.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]

    method, x = gw.QUICFL(**fields), uneven(3)
    segments = lay_out([Parameter(name, (numel,), (1,)) for name, numel in SIZES.items()])
    codec, draw = method.codec(get_kernels(backend), segments, 3, 5), Draw(7, 2)
    out = torch.zeros(codec.payload_bytes(codec.units), dtype=torch.uint8)
    codec.encode(x[0], codec.remember(codec.summarise(x[0]), x[0], draw, False), draw, out)
    assert digest(out) == payload
    ours = gw.SimulatedLink([(n, torch.empty(s)) for n, s in SIZES.items()], method, 3, min_numel=0, backend=backend)
    assert digest(ours.reduce_(x)) == mean


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 0}, "bits is 1 to 4"),
        ({"bits": 5}, "bits is 1 to 4"),
        ({"bits": True}, "bits is 1 to 4"),
        ({"block_size": 128}, "power of two from 256"),
    ],
)
def test_fields_out_of_range_are_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(gw.HyperparameterError, match=message):
        gw.QUICFL(**fields)


@pytest.mark.parametrize("method", [gw.QUICFL(bits=3), gw.QUICFL(bits=1, block_size=256), gw.Rotated()], ids=repr)
def test_pieces_of_long_parameters_have_the_bits_of_the_whole(method: gw.Method) -> None:
    """A piece begins with a whole block, and with a whole group of the kernels."""
    sizes, generator = {"a": 50_000, "b": 700, "c": 30, "d": 9000}, torch.Generator().manual_seed(1)
    g = {name: torch.randn(3, numel, generator=generator) for name, numel in sizes.items()}

    def exchange(names: str, **options: object) -> dict[str, torch.Tensor]:
        like = [(name, torch.empty(sizes[name])) for name in names]
        ours = gw.SimulatedLink(like, method, 3, min_numel=100, **options)  # type: ignore[arg-type]
        mean = ours.reduce_(torch.cat([g[name] for name in names], 1))
        return dict(zip(names, mean.split([sizes[name] for name in names])))

    whole = exchange("abcd", backend="reference")
    for names, options in (("dcba", {"chunk_numel": 500}), ("badc", {"chunk_numel": 30_000})):
        found = exchange(names, **options)
        assert all(torch.equal(found[name], whole[name]) for name in sizes)
