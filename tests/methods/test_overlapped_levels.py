"""ALQ and AMQ with overlap: levels that a round's gradients make serve from the next round on."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.exchange.drivers import LocalProfiler, Meter, dry_run, simulate_ranks
from gradwire.exchange.planning import Options, Planner
from gradwire.exchange.protocols import Context, Memory
from gradwire.exchange.protocols.bucket_plan import SectionPlan
from gradwire.exchange.segments import Parameter, lay_out
from gradwire.exchange.wire import HEADER_BYTES, padded
from gradwire.kernels import get_kernels
from gradwire.methods.levels.level_compressor import LevelCodec
from gradwire.methods.levels.level_fitting import powers
from gradwire.methods.levels.level_statistics import BINS, Histograms, Normals
from gradwire.methods.wrappers.wrapper import WrappedPlan
from plans import make_plan

SIZES = {"a": 2000, "b": 700, "c": 3300}
METHODS = [gw.ALQ, gw.ALQN, gw.AMQ, gw.AMQN]


def overlapped(kind: type[gw.ALQ] = gw.ALQ, **fields: Any) -> gw.ALQ:
    return kind(**{"blocks": "parameter", "block_size": 512, "updates": (0, 2), "overlap": True, **fields})


def before_use(method: gw.ALQ) -> gw.ALQ:
    """Return the method that fits levels before it uses them."""
    return gw.method(repr(method).replace("overlap=True", "overlap=False"))  # type: ignore[return-value]


def gradients(seed: int, workers: int = 3) -> torch.Tensor:
    drawn = torch.randn(workers, sum(SIZES.values()), generator=torch.Generator().manual_seed(seed))
    scale = torch.cat([torch.full((numel,), 3.0**i) for i, numel in enumerate(SIZES.values())])
    return drawn ** (3 + 2 * (seed % 3)) * scale


def simulated(method: gw.Method, workers: int = 3) -> gw.SimulatedLink:
    return gw.SimulatedLink([(name, torch.empty(n)) for name, n in SIZES.items()], method, workers, min_numel=0)


def levels_of(link: gw.SimulatedLink | gw.Link) -> torch.Tensor:
    return link.state_dict()["global"]["levels"]


@pytest.mark.parametrize("model", ["normal", "histogram"])
@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)
def test_levels_of_a_round_serve_from_the_next_on(kind: type[gw.ALQ], model: str) -> None:
    """They are those that the method without overlap fits to the same gradients, and then the outcomes are the same."""
    method = overlapped(kind, model=model, norm="max")
    late, early = simulated(method), simulated(before_use(method))
    means = [[link.reduce_(gradients(0)).clone() for link in (late, early)]]
    assert not torch.equal(*means[0])
    if model == "normal":
        assert torch.equal(levels_of(late), levels_of(early))
    # Weights of 50 binary digits, rounded once more where parameters are joined: no level moves by more than its steps.
    torch.testing.assert_close(levels_of(late), levels_of(early), rtol=0, atol=1e-5)
    early.load_state_dict(late.state_dict())
    assert torch.equal(late.reduce_(gradients(1)), early.reduce_(gradients(1)))
    held = levels_of(late)
    following = [link.reduce_(gradients(2)).clone() for link in (late, early)]
    assert not torch.equal(*following), "round 2 is an update: one uses what it fits, the other what there was"
    assert not torch.equal(levels_of(late), held)
    torch.testing.assert_close(levels_of(late), levels_of(early), rtol=0, atol=1e-5)


def test_the_first_round_is_rounded_to_halves_of_halves() -> None:
    method = overlapped(norm="max", block_size=None)
    mean = simulated(method, workers=1).reduce_(gradients(0, workers=1))
    for part, g in zip(mean.split([*SIZES.values()]), gradients(0, workers=1)[0].split([*SIZES.values()])):
        ratios = (part / g.abs().max()).unique()
        assert set(ratios.tolist()) <= set(powers(0.5, 8))
        assert len(ratios) > 4


def test_what_overlapping_needs() -> None:
    assert gw.ALQ().traits.whole_step
    assert not overlapped().traits.whole_step
    assert not overlapped().traits.joined
    with pytest.raises(gw.HyperparameterError, match="use blocks='parameter'"):
        gw.ALQ(overlap=True)
    with pytest.raises(gw.HyperparameterError, match="True or False"):
        gw.ALQ(overlap=1, blocks="parameter")  # type: ignore[arg-type]


@pytest.mark.parametrize("model", ["normal", "histogram"])
def test_a_round_that_is_skipped_leaves_the_levels_and_sends_no_statistics(model: str) -> None:
    link = simulated(overlapped(model=model, updates=(0, 1)))
    bad = gradients(0)
    bad[2, 100] = torch.inf
    link.reduce_(bad)
    assert "levels" not in link.state_dict()["global"]
    without = link.traffic().sent_bytes
    link.reduce_(gradients(1))
    sent = link.traffic().sent_bytes - without
    levels = levels_of(link)
    link.reduce_(gradients(2))
    assert torch.equal(levels_of(link), levels)
    assert link.traffic().sent_bytes - without - sent == without < sent
    bad = gradients(3)
    bad[0, 0] = torch.nan
    link.round = 0
    link.reduce_(bad)
    assert torch.equal(levels_of(link), levels)
    # What the skipped rounds had noted is in no later fit.
    fresh = simulated(overlapped(model=model, updates=(0, 1)))
    fresh.round = 1
    fresh.reduce_(gradients(1))
    assert torch.equal(levels_of(fresh), levels)


@pytest.mark.parametrize("coder", ["rans", "huffman"])
def test_an_entropy_coder_changes_nothing(coder: str) -> None:
    plain, coded = simulated(overlapped()), simulated(gw.Coded(compressor=overlapped(), coder=coder))
    for round in range(3):
        assert torch.equal(plain.reduce_(gradients(round)), coded.reduce_(gradients(round)))
        assert torch.equal(levels_of(plain), levels_of(coded))


def test_a_plan_around_finishes_what_is_within() -> None:
    inner = plan_of(overlapped(), "cpu")
    outer = WrappedPlan(inner, lay_out([Parameter("a", (2000,), (1,))]))
    contexts = [Context(r, 3, 0, memory=Memory()) for r in range(3)]
    rows = gradients(0)
    simulate_ranks([outer.whole(c, row) for c, row in zip(contexts, rows)], [Meter()] * 3)
    assert outer.finishes
    assert not WrappedPlan(plan_of(before_use(overlapped()), "cpu"), []).finishes
    simulate_ranks([outer.finish(c) for c in contexts], [Meter()] * 3)
    contexts[2].memory.commit()
    assert len(contexts[2].memory.state()["global"]["levels"]) == 8


def plan_of(method: gw.Method, kernels: str, names: tuple[str, ...] = ("a", "b", "c")) -> Any:
    return make_plan(
        method, lay_out([Parameter(name, (SIZES[name],), (1,)) for name in names]), kernels=get_kernels(kernels),
        world_size=3, collective="all_gather", seed=0, chunk_numel=1 << 20,
    )  # fmt: skip


@pytest.mark.parametrize("model", ["normal", "histogram"])
@pytest.mark.parametrize("kept", [3, 350])
def test_the_dry_run_counts_the_end_of_a_round(model: str, kept: int) -> None:
    """To the byte, in the rounds of the schedule and between them."""
    method = overlapped(model=model, kept=kept, bits=4)
    link, counted = simulated(method), []
    for round in range(4):
        before = link.traffic()
        link.reduce_(gradients(round))
        after = link.traffic()
        counted.append((after.sent_bytes - before.sent_bytes, after.received_bytes - before.received_bytes))
    dry = [dry_run(plan_of(method, "meta"), 6000, 3, round) for round in range(4)]
    assert counted == [(m.sent_bytes, m.received_bytes) for m in dry]
    told = 8 * (BINS + 1) if model == "histogram" else 12 * min(kept, 4 + 2 + 7)
    assert counted[0][0] - counted[1][0] == 2 * (HEADER_BYTES + padded(told) + HEADER_BYTES + 8 * 16)
    planner = Planner(method, {name: torch.empty(n) for name, n in SIZES.items()}, 3, Options(min_numel=0))
    assert planner.sent_bytes(list(SIZES)) == counted[1][0], "a usual round is one between updates"


def test_any_plan_of_the_round_may_finish_it() -> None:
    """Buckets of one parameter each, in any order, and the last or the first of them at the end.

    All blocks have the same norm, so that the order decides which three are kept.
    """
    method, found = overlapped(norm="max", kept=3), []
    for order, last in ((("a", "b", "c"), "c"), (("c", "a", "b"), "c"), (("b", "c", "a"), "b")):
        memories, g = [Memory() for _ in range(3)], gradients(0).clamp(-1, 1)
        contexts = [Context(r, 3, 0, memory=m) for r, m in enumerate(memories)]
        plans = {name: plan_of(method, "cpu", (name,)) for name in order}
        parts = dict(zip(SIZES, g.split([*SIZES.values()], dim=1)))
        for name in order:
            rows = [row.clone() for row in parts[name]]
            simulate_ranks([plans[name].whole(c, row) for c, row in zip(contexts, rows)], [Meter()] * 3)
        simulate_ranks([plans[last].finish(c) for c in contexts], [Meter()] * 3)
        for memory in memories:
            memory.commit()
        assert all(
            torch.equal(m.state()["global"]["levels"], memories[0].state()["global"]["levels"]) for m in memories
        )
        found.append(memories[0].state()["global"]["levels"])
    link = simulated(method)
    link.reduce_(gradients(0).clamp(-1, 1))
    assert all(torch.equal(levels, levels_of(link)) for levels in found)


def test_a_rank_of_a_node_without_a_shard_of_the_last_bucket_fits_those_of_the_others() -> None:
    like = {"whole": torch.empty(2000), "one": torch.empty(1)}
    planner = Planner(gw.Hierarchical(compressor=overlapped(), node_size=2), like, 4, Options(min_numel=0))
    memories = [Memory() for _ in range(4)]
    contexts = [Context(r, 4, 0, memory=m) for r, m in enumerate(memories)]
    for name, values in like.items():
        plan = planner.plan([name], 0)
        rows = torch.randn(4, values.numel(), generator=torch.Generator().manual_seed(5))
        simulate_ranks([plan.whole(c, row) for c, row in zip(contexts, rows)], [Meter(r) for r in range(4)])
    simulate_ranks([plan.finish(c) for c in contexts], [Meter(r) for r in range(4)])
    for memory in memories:
        memory.commit()
    assert all(memory.value("levels") is not None for memory in memories)


@pytest.mark.parametrize("weighted", [False, True])
def test_joined_counts_are_those_of_all_values(weighted: bool) -> None:
    plan, g = plan_of(before_use(overlapped(norm="max")), "cpu"), gradients(0)[0]
    assert isinstance(plan, SectionPlan)
    codec = plan.codec
    assert isinstance(codec, LevelCodec)
    summary = codec.summarise(g)
    cuts = codec.blocks.first.tolist()
    for statistics in (Histograms(weighted), Normals(weighted, 5)):
        whole = statistics.joined([statistics.part(codec, summary, g, slice(0, codec.blocks.blocks))])
        parts = [statistics.part(codec, summary, g, slice(a, b)) for a, b in itertools.pairwise(cuts)]
        joined = statistics.joined(parts)
        assert joined.shape == whole.shape == statistics.room(codec.blocks.blocks).shape
        if isinstance(statistics, Normals):
            assert torch.equal(joined, whole)
            continue
        assert torch.equal(joined[-1], whole[-1]), "the unit is that of all values"
        # Each value's weight, and each part's sum in a bin, is rounded once: 6000 halves, and three.
        assert int((joined[:-1] - whole[:-1]).abs().max()) <= 3003
        assert int(whole[:-1].sum()) > 1e12


def test_the_profile_plays_the_end_of_a_round() -> None:
    """With levels in memory, no later round measures anything for a fit."""
    profiler = LocalProfiler(plan_of(overlapped(updates=(0,)), "cpu"), gradients(0)[0], 3)
    profiler.play()
    assert len(profiler._memory.state()["global"]["levels"]) == 8
    kinds = [[stage.kind for stage in job] for job in profiler.play()]
    assert kinds == [[""], ["all_gather", ""]]


def trained(method: str, chunk: int, lanes: int, stop: int | None) -> tuple[list[torch.Tensor], torch.Tensor, int]:
    """Exchange five rounds on real ranks; where ``stop`` says so, by a second link that takes over the state."""
    import torch.distributed as dist

    rank, parameters = dist.get_rank(), {name: torch.zeros(n, requires_grad=True) for name, n in SIZES.items()}

    def attached() -> gw.Link:
        return gw.Link(parameters.items(), method, min_numel=0, chunk_numel=chunk, lanes=lanes, check=lanes == 3)

    link, means, sent = attached(), [], 0
    for round in range(5):
        if round == stop:
            state, sent = link.state_dict(), link.traffic().sent_bytes
            link.close()
            link = attached()
            link.load_state_dict(state)
        for parameter, part in zip(parameters.values(), gradients(round)[rank].split([*SIZES.values()])):
            parameter.grad = part.clone()
        link.reduce_()
        means.append(torch.cat([p.grad for p in parameters.values() if p.grad is not None]).clone())
    levels, sent = levels_of(link), sent + link.traffic().sent_bytes
    link.close()
    return means, levels, sent


@pytest.mark.ranks
@pytest.mark.parametrize("model", ["normal", "histogram"])
def test_any_layout_on_real_ranks_gives_the_bits_of_the_simulation(three_ranks: Any, model: str) -> None:
    """One bucket or many, one lane or three, and a second link that continues after an update."""
    method = overlapped(model=model)
    link = simulated(method)
    expected = [link.reduce_(gradients(round)).clone() for round in range(5)]
    for chunk, lanes, stop in ((1 << 23, 1, None), (80, 3, None), (160, 2, 3), (1 << 23, 1, 1)):
        for means, levels, sent in three_ranks(trained, repr(method), chunk, lanes, stop):
            assert all(torch.equal(mean, wanted) for mean, wanted in zip(means, expected))
            assert torch.equal(levels, levels_of(link))
            if chunk > 80 * 4 and stop is None:
                assert sent == link.traffic().sent_bytes


def slow_fit() -> tuple[bool, bool, list[float]]:
    """Let rank 0 fit only when this rank's optimizer could step: what waits for the fit before would wait for ever."""
    import threading

    import torch.distributed as dist

    released, began = threading.Event(), threading.Event()
    real = gw.ALQ.fit

    def fit(self: gw.ALQ, *arguments: Any) -> list[float]:
        began.set()
        if not released.wait(30):
            raise TimeoutError("nobody went on")
        return real(self, *arguments)

    gw.ALQ.fit = fit  # type: ignore[method-assign]
    try:
        parameter = torch.zeros(4000, requires_grad=True)
        link = gw.Link([("w", parameter)], overlapped(updates=(0,)), min_numel=0)
        parameter.grad = gradients(0)[dist.get_rank(), :4000].clone()
        link.reduce_()
        waits = dist.get_rank() != 0 or (began.wait(30) and not link._round._finishing.done)
        released.set()
        held = levels_of(link).tolist()
        link.reduce_()
        link.close()
        return bool(waits), link._round._finishing.done, held
    finally:
        gw.ALQ.fit = real  # type: ignore[method-assign]


@pytest.mark.ranks
def test_levels_are_fitted_while_the_training_goes_on(three_ranks: Any) -> None:
    found = three_ranks(slow_fit)
    assert all(waits and settled for waits, settled, _ in found)
    assert found[0][2] == found[1][2] == found[2][2]


def failing_end() -> tuple[str, str, int]:
    """Let rank 1 fail at the end of the first round."""
    import torch.distributed as dist

    real = Normals.joined

    def joined(self: Normals, parts: Any) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise ValueError("there are no statistics")
        return real(self, parts)

    Normals.joined = joined  # type: ignore[method-assign]
    try:
        parameter = torch.zeros(4000, requires_grad=True)
        link = gw.Link([("w", parameter)], overlapped(), min_numel=0)
        parameter.grad = torch.ones(4000)
        link.reduce_()
        rounds = link.state_dict()["global"]["round"]
        try:
            link.reduce_()
        except gw.GradwireError as error:
            return str(error), str(link.error), int(rounds)
        finally:
            link.close()
        return "", "", -1
    finally:
        Normals.joined = real  # type: ignore[method-assign]


@pytest.mark.ranks
def test_a_failure_at_the_end_of_a_round_is_told_in_the_next(three_ranks: Any) -> None:
    for raised, kept, rounds in three_ranks(failing_end):
        assert raised == kept
        assert "rank 1" in raised
        assert "the end of round 0" in raised
        assert "there are no statistics" in raised
        assert rounds == 1
