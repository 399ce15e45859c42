"""Votes: the majority's sign, of gradients or of momenta, and who takes part."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import gradwire as gw
from gradwire.errors import HyperparameterError
from gradwire.exchange.codecs import Draw
from gradwire.exchange.segments import Parameter, lay_out
from gradwire.kernels import SegmentTable, get_kernels
from gradwire.methods.signs.signsgd import zero_throughout


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("collective", ["two_shot", "all_gather"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 8])
def test_the_vote_is_the_sign_of_the_sum_of_signs(world_size: int, collective: str) -> None:
    g = randn(world_size, 3001)
    g[:, 10], g[:, 11] = 0.0, -0.0
    link = gw.SimulatedLink([("w", torch.empty(3001))], "signsgd", world_size, collective=collective)
    total = torch.where(g >= 0, 1, -1).sum(0)
    assert torch.equal(link.reduce_(g.clone()), torch.where(total >= 0, 1.0, -1.0))
    if world_size % 2:
        assert bool((total != 0).all())  # property 4: an odd number of workers has no ties


@pytest.mark.parametrize("collective", ["two_shot", "all_gather"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_a_worker_without_a_gradient_does_not_vote(world_size: int, collective: str) -> None:
    """Any number of them, in any parameter, wherever shares and chunks are cut; a zero among others is still +1."""
    sizes = {"a": 1, "b": 700, "c": 79, "d": 2500}
    like = [(name, torch.empty(n)) for name, n in sizes.items()]
    for silent in range(world_size + 1):
        g = randn(world_size, sum(sizes.values()), seed=silent)
        g[:, 5], g[0, 10] = 0.0, 0.0
        expected, at = [], 0
        for k, n in enumerate(sizes.values()):
            ranks = [(k + i) % world_size for i in range(silent)]
            g[ranks, at : at + n] = 0.0
            part = g[[r for r in range(world_size) if r not in ranks], at : at + n]
            total = torch.where(part >= 0, 1, -1).sum(0)
            expected.append(torch.where(total >= 0, 1.0, -1.0) if len(part) else torch.zeros(n))
            at += n
        for chunk_numel in (80, 1000, 1 << 20):
            link = gw.SimulatedLink(like, "signsgd", world_size, chunk_numel=chunk_numel, collective=collective)
            assert torch.equal(link.reduce_(g.clone()), torch.cat(expected))


def test_a_worker_without_a_gradient_contributes_nothing() -> None:
    g = torch.ones(2, 2000)
    g[1] = 0.0
    link = gw.SimulatedLink([("w", torch.empty(2000))], gw.Signum(momentum=0.5), 2)
    assert torch.equal(link.reduce_(g.clone()), torch.ones(2000))
    # Its momentum keeps its signs while it decays, and would vote so for good.
    assert torch.equal(link.reduce_(-g.flip(0)), -torch.ones(2000))
    assert float(link.state_dict()["rank 0"]["momentum/w"][0]) == 0.25


def test_replies_that_all_ranks_share_are_left_as_they_are() -> None:
    """Bits that stand in for a rank that does not vote are this rank's own business."""
    codec = gw.SignSGD().codec(get_kernels("reference"), lay_out([Parameter.of("w", torch.empty(300))]), 3, 0)
    rows = torch.zeros(3, codec.payload_bytes(codec.units), dtype=torch.uint8)
    for g, row in zip((torch.zeros(300), -torch.ones(300), -torch.ones(300)), rows):
        codec.encode(g, codec.summarise(g), Draw(0, 0), row)
    before, mean = rows.clone(), torch.empty(300)
    codec.decode_rows(rows, codec.summarise(mean.fill_(1)), mean)
    assert torch.equal(mean, -torch.ones(300))
    assert torch.equal(rows, before)


def test_a_gradient_is_none_where_it_is_zero_throughout() -> None:
    flat = torch.zeros(200_000)
    flat[[150, 199_999]] = torch.tensor([1e-45, torch.nan])
    table = SegmentTable([0, 100, 200, 199_000], [100, 100, 0, 1000], [0] * 4, [(0, 0)] * 4)
    kernels = get_kernels("cpu")
    assert zero_throughout(kernels, flat, table).tolist() == [True, False, True, False]
    assert zero_throughout(kernels, torch.empty(0), SegmentTable([0], [0], [0], [(0, 0)])).tolist() == [False]


def test_scale_changes_nothing_and_a_minority_cannot_overturn() -> None:
    """Property 4."""
    g = randn(5, 2000)
    vote = gw.simulate(g, "signsgd").mean
    assert torch.equal(gw.simulate(g * torch.tensor([[3.0], [1e-8], [70.0], [0.5], [2.0]]), "signsgd").mean, vote)
    honest = randn(1, 2000, seed=1).expand(3, 2000)
    liars = torch.cat([honest, -100 * honest[:1], randn(1, 2000, seed=2)])
    assert torch.equal(gw.simulate(liars, "signsgd").mean, honest[0].sign())


@pytest.mark.parametrize("ratio", [0.25, 0.5, 1.0, 1.5, 3.0])
def test_probability_of_a_wrong_sign(ratio: float) -> None:
    """Property 2: below the bound for unimodal symmetric noise, and below one half, alone and in a vote of five."""
    numel = 40_000
    bound = 2 / (9 * ratio**2) if ratio > 2 / math.sqrt(3) else 0.5 - ratio / (2 * math.sqrt(3))
    wide = math.sqrt(3) / ratio  # a uniform of deviation 1 / ratio about 1, and a normal one
    noises = [
        randn(5, numel) / ratio,
        (torch.rand(5, numel, generator=torch.Generator().manual_seed(3)) * 2 - 1) * wide,
    ]
    for noise in noises:
        g = 1 + noise
        alone = float((gw.simulate(g[:1], "signsgd").mean < 0).double().mean())
        voted = float((gw.simulate(g, "signsgd").mean < 0).double().mean())
        # Five deviations of a frequency among that many.
        assert alone <= bound + 5 * math.sqrt(bound / numel)
        assert alone < min(1 / ratio, 0.5)
        assert voted <= alone
        assert voted < alone or alone == 0


def test_momentum_is_voted_on_and_kept() -> None:
    link = gw.SimulatedLink([("w", torch.empty(500))], gw.Signum(momentum=0.75), 3)
    v = torch.zeros(3, 500)
    for round in range(5):
        g = randn(3, 500, seed=round)
        v = 0.75 * v + 0.25 * g
        assert torch.equal(link.reduce_(g.clone()), torch.where(v >= 0, 1, -1).sum(0).sign().float())
        held = torch.stack([link.state_dict()[f"rank {r}"]["momentum/w"] for r in range(3)])
        assert torch.equal(held, v)
    link.reduce_(torch.full((3, 500), torch.nan))
    assert torch.equal(torch.stack([link.state_dict()[f"rank {r}"]["momentum/w"] for r in range(3)]), v)


def test_momentum_that_makes_no_sense_is_refused() -> None:
    for wrong in (-0.1, 1, 1.5, math.nan, "0.9", True, None):
        with pytest.raises(HyperparameterError, match="momentum"):
            gw.Signum(momentum=wrong)
    with pytest.raises(HyperparameterError, match="direction"):
        gw.Auto(candidates=("fp32", "signsgd"))
    with pytest.raises(HyperparameterError, match="block_size"):
        gw.ScaledSign(block_size=20)


def test_small_parameters_are_voted_on_too() -> None:
    """Their float32 mean would take steps of another size."""
    like = [("w", torch.empty(2000)), ("bias", torch.empty(10))]
    mean = gw.SimulatedLink(like, "signsgd", 3).reduce_(randn(3, 2010))
    assert set(mean.tolist()) == {-1.0, 1.0}


@pytest.mark.parametrize("collective", ["two_shot", "all_gather"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_on_one_rank_is_so_on_all_in_every_chunk(bad: float, collective: str) -> None:
    """And in its own parameter only, whatever the chunks."""
    like = [("a", torch.empty(900)), ("b", torch.empty(1500)), ("c", torch.empty(700))]
    for at, name in ((0, slice(0, 900)), (900, slice(900, 2400)), (2399, slice(900, 2400)), (3099, slice(2400, 3100))):
        for chunk_numel in (80, 1000, 1 << 20):
            g = randn(3, 3100)
            g[1, at] = bad
            link = gw.SimulatedLink(like, "signsgd", 3, chunk_numel=chunk_numel, collective=collective)
            lost = ~torch.isfinite(link.reduce_(g))
            assert bool(lost[name].all())
            assert int(lost.sum()) == name.stop - name.start


@pytest.mark.parametrize("method", [gw.SignSGD(), gw.Signum()], ids=repr)
def test_the_loss_scale_divides_out(method: gw.Method, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the scaler divides by afterwards; momentum is kept without it, though it changes."""
    plain, scaled = (gw.SimulatedLink([("w", torch.empty(300))], method, 3) for _ in range(2))
    context = scaled._context
    for round, scale in enumerate((1024.0, 1024.0, 2.0)):
        monkeypatch.setattr(scaled, "_context", lambda r, c, s=scale: dataclasses.replace(context(r, c), loss_scale=s))
        g = randn(3, 300, seed=round)
        assert torch.equal(scaled.reduce_(g * scale), plain.reduce_(g) * scale)
    state, other = plain.state_dict(), scaled.state_dict()
    assert all(torch.equal(value, other["rank 1"][key]) for key, value in state["rank 1"].items())
