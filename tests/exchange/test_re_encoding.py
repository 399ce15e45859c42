"""Two-shot where codes do not add up: the owner of a share encodes the mean once more."""

from __future__ import annotations

import pytest
import torch

import gradwire as gw
from gradwire.exchange.drivers import Meter, simulate_ranks
from gradwire.exchange.protocols import Context
from gradwire.exchange.protocols.division import even_shares
from gradwire.exchange.segments import Parameter, Segment
from gradwire.kernels import get_kernels
from plans import make_plan

METHODS = (
    *("EDEN(bits=2)", "EDEN(bits=0.5)", "QSGDinf(block_size=64)", "QSGD(block_size=512)", "NUQSGD(blocks='model')"),
    *("Natural()", "ALQ(updates=(0,), block_size=512)", "ALQN(updates=(0,), block_size=64, blocks='parameter')"),
    *("AMQ(updates=(0,), block_size=512)", "AMQN(updates=(0,), blocks='parameter', block_size=512, overlap=True)"),
)


def gradients(world_size: int, numel: int) -> torch.Tensor:
    return torch.randn(world_size, numel, generator=torch.Generator().manual_seed(world_size))


@pytest.mark.parametrize("spec", METHODS)
def test_traffic_does_not_grow_with_the_workers(spec: str) -> None:
    numel, sent = 1 << 19, {}
    for collective in ("all_gather", "two_shot"):
        for world_size in (4, 16):
            link = gw.SimulatedLink([("a", torch.empty(numel))], spec, world_size, collective=collective)
            # Levels are fitted in the first round, if they are.
            for _ in range(2 if link.method.properties.state != "none" else 1):
                before = link.traffic().sent_bytes
                link.reduce_(torch.ones(world_size, numel))
            sent[collective, world_size] = link.traffic().sent_bytes - before
    assert sent["all_gather", 16] > 4.9 * sent["all_gather", 4]
    # (N - 1) / N of a payload twice, but for headers, and shares of whole blocks.
    assert sent["two_shot", 16] < 1.3 * sent["two_shot", 4]


@pytest.mark.parametrize("spec", METHODS)
def test_the_mean_has_the_error_of_one_more_encoding(spec: str) -> None:
    """The squared error is that of gathering, and that of one worker who encodes what was gathered."""
    numel, rounds = 81_920, 4
    g = gradients(3, numel)
    mean = g.double().mean(0)
    gathers, shoots = (
        gw.SimulatedLink([("a", torch.empty(numel))], spec, 3, collective=c) for c in ("all_gather", "two_shot")
    )
    encodes = gw.SimulatedLink([("a", torch.empty(numel))], spec, 1, collective="all_gather", seed=1)
    gathered = shot = encoded = 0.0
    # Levels that are fitted, in the first round or behind it, are those of the workers' vectors for the owner, too.
    for link in (gathers, shoots):
        link.reduce_(g.clone())
    encodes.load_state_dict({**encodes.state_dict(), "global": gathers.state_dict()["global"]})
    for _ in range(rounds):
        estimate = gathers.reduce_(g.clone())
        gathered += float((estimate.double() - mean).square().sum())
        encoded += float((encodes.reduce_(estimate[None].clone()).double() - estimate).square().sum())
        shot += float((shoots.reduce_(g.clone()).double() - mean).square().sum())
    # Each is a sum of over 300 000 errors.
    assert shot == pytest.approx(gathered + encoded, rel=0.03)


def test_an_owner_of_all_encodes_what_lies_on_its_grid_without_an_error() -> None:
    """Levels of the largest value: one worker's estimate is on the grid of its own largest value."""
    g = gradients(1, 4000)
    found = [
        gw.SimulatedLink([("a", torch.empty(4000))], "QSGDinf()", 1, collective=c).reduce_(g.clone())
        for c in ("all_gather", "two_shot")
    ]
    assert torch.allclose(*found, rtol=1e-6, atol=0)


@pytest.mark.parametrize("spec", METHODS)
def test_all_ranks_end_with_the_same_bits_and_others_stay_exact(spec: str) -> None:
    numel, world_size = 9000, 3
    segments = [
        Segment(Parameter("a", (8000,), (1,)), 0, 0, 8000),
        Segment(Parameter("b", (1000,), (1,)), 8000, 0, 1000, dense=True),
    ]
    plan = make_plan(
        gw.method(spec), segments, kernels=get_kernels("auto"), world_size=world_size, collective="two_shot", seed=0,
        chunk_numel=4096,
    )  # fmt: skip
    g = gradients(world_size, numel)
    rows = g.clone()
    simulate_ranks([plan.whole(Context(r, world_size, 0), row) for r, row in enumerate(rows)], [Meter()] * world_size)
    assert all(torch.equal(rows[0], row) for row in rows)
    third = torch.tensor(1 / 3)
    assert torch.equal(rows[0][8000:], g[0][8000:] * third + g[1][8000:] * third + g[2][8000:] * third)


def test_blocks_as_long_as_a_parameter_are_gathered() -> None:
    assert gw.QSGD(block_size=None).traits.collectives == ("all_gather",)
    with pytest.raises(gw.IncompatibleError, match="cannot travel by two_shot"):
        gw.SimulatedLink([("a", torch.empty(9000))], "QSGD(block_size=None)", 4, collective="two_shot")


@pytest.mark.parametrize("spec", METHODS)
def test_chunks_do_not_decide_a_bit(spec: str) -> None:
    """Blocks stay whole in every share."""
    g, found = gradients(3, 24_000), []
    for chunk_numel in (1, 5000, 1 << 20):
        parameters = [("a", torch.empty(18_000)), ("b", torch.empty(6000))]
        link = gw.SimulatedLink(parameters, spec, 3, collective="two_shot", chunk_numel=chunk_numel)
        found.append(link.reduce_(g.clone()))
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_by_default_the_number_of_workers_alone_decides() -> None:
    for world_size, expected in ((2, "all_gather"), (3, "two_shot")):
        for spec in ("eden", "natural"):
            for numel in (100, 100_000):
                link = gw.SimulatedLink([("a", torch.empty(numel))], spec, world_size, min_numel=0)
                link.reduce_(torch.ones(world_size, numel))
                assert set(link.record()["collectives"]) == {expected}
    link = gw.SimulatedLink([("a", torch.empty(9000))], "qsgd", 4)
    link.reduce_(torch.ones(4, 9000))
    assert set(link.record()["collectives"]) == {"all_gather"}


@pytest.mark.parametrize("spec", ["Natural()", "QSGD(block_size=512)", "ALQ(updates=(0,), block_size=512)"])
def test_the_mean_stays_unbiased_and_within_the_bound_of_two_operators(spec: str) -> None:
    """E|C(mean_i C(x_i)) - mean|^2 <= w |mean|^2 + (1 + w) w sum_i |x_i|^2 / N^2; no w is stated of fitted levels.

    The mean over T rounds then has that squared error over T, a sum of errors of 4096 elements.
    """
    numel, rounds, workers = 4096, 400, 4
    g = gradients(workers, numel) + 0.5
    mean, draws, square = g.double().mean(0), torch.zeros(numel, dtype=torch.float64), 0.0
    link = gw.SimulatedLink([("a", torch.empty(numel))], spec, workers, min_numel=0, collective="two_shot")
    for _ in range(rounds):
        found = link.reduce_(g.clone()).double()
        draws += found / rounds
        square += float((found - mean).square().sum()) / rounds
    w = link.method.omega
    if w is not None:
        assert square <= w * float(mean.square().sum()) + (1 + w) * w * float(g.double().square().sum()) / workers**2
    assert float((draws - mean).square().sum()) == pytest.approx(square / rounds, rel=0.25)


def test_shifts_would_drift_where_owners_encode_the_mean_again() -> None:
    """Constant, unlike gradients: the naive composition ends beside their mean, and DIANA by a gather on it.

    e = h - mean h_i is a sum of the owners' errors, which go to zero with the differences, so that it stays.
    """
    numel, workers, q = 640, 3, gw.QSGDinf(levels=3, block_size=64)
    g, alpha = gradients(workers, numel), 1 / (1 + q.omega)
    own, common = torch.zeros(workers, numel), torch.zeros(numel)
    outcome = torch.zeros(numel)
    *senders, owner = (gw.SimulatedLink([("a", outcome)], q, 1, seed=seed, min_numel=0) for seed in range(workers + 1))
    for _ in range(300):
        sent = torch.stack([sender.reduce_(row[None].clone()) for sender, row in zip(senders, g - own)])
        applied = owner.reduce_(sent.mean(0, keepdim=True))
        outcome = common + applied
        own, common = own + alpha * sent, common + alpha * applied
    assert float((own - g).norm()) < 1e-4 * float(g.norm())
    drift = float((outcome - g.mean(0)).norm() / g.mean(0).norm())
    assert drift == pytest.approx(float((common - own.mean(0)).norm() / g.mean(0).norm()), rel=1e-2)
    assert drift > 0.05
    link = gw.SimulatedLink([("a", torch.empty(numel))], gw.DIANA(compressor=q), workers, min_numel=0)
    for _ in range(300):
        found = link.reduce_(g.clone())
    assert float((found - g.mean(0)).norm()) < 1e-4 * float(g.norm())


@pytest.mark.parametrize("method", [gw.DIANA(), gw.EF21(compressor=gw.QSGDinf(levels=7, block_size=64))], ids=repr)
def test_shifts_say_why_they_refuse_it(method: gw.Method) -> None:
    with pytest.raises(gw.IncompatibleError, match="the mean of all shifts would drift"):
        gw.SimulatedLink([("a", torch.empty(9000))], method, 4, collective="two_shot")


@pytest.mark.parametrize("method", [gw.DIANA(), gw.ErrorFeedback()], ids=repr)
def test_what_remembers_differences_refuses_an_owners_error(method: gw.Method) -> None:
    assert method.compressor.traits.collectives == ("all_gather", "two_shot")  # type: ignore[attr-defined]
    assert method.traits.collectives == ("all_gather",)
    with pytest.raises(gw.IncompatibleError, match="cannot travel by two_shot"):
        gw.SimulatedLink([("a", torch.empty(9000))], method, 4, collective="two_shot")


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("grain", [1, 80, 4096])
def test_shares_are_whole_grains_and_about_equal(ranks: int, grain: int) -> None:
    pieces, at = [], 0
    for number, (start, numel) in enumerate(((0, 10_000), (4096 * 80, 4096), (0, 3), (0, 70_001))):
        pieces.append((Segment(Parameter(str(number), (numel,), (1,)), at, start, numel), number))
        at += numel
    shares = even_shares(pieces, ranks, grain)
    assert len(shares) == ranks
    told = [(piece.offset, piece.numel) for share in shares for piece, _ in share]
    # One after the other, without gaps.
    assert [offset for offset, _ in told] == [sum(n for _, n in told[:i]) for i in range(len(told))]
    assert sum(n for _, n in told) == at
    for share in shares:
        assert sum(piece.numel for piece, _ in share) <= -(-at // ranks) + grain
        for piece, number in share:
            whole = pieces[number][0]
            assert (piece.start - whole.start) == piece.offset - whole.offset
            assert (piece.start - whole.start) % grain == 0
