"""L-GreCo: what is chosen for each layer, that all ranks choose alike, and what the choice leaves as it is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.exchange.drivers import Meter, dry_run, simulate_ranks
from gradwire.exchange.protocols import Context, Memory
from gradwire.exchange.segments import Parameter, Segment, lay_out
from gradwire.kernels import get_kernels
from plans import make_plan

SIZES = {"wide": 3000, "few": 500, "small": 1600}
SPARSE = (0.01, 0.04, 0.2, 0.5)


def planned(method: gw.Method, segments: Sequence[Segment], workers: int, backend: str = "reference") -> Any:
    return make_plan(
        method, segments, kernels=get_kernels(backend), world_size=workers, collective="all_gather", seed=0,
        chunk_numel=1 << 20,
    )  # fmt: skip


def gradients(workers: int, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    """Layers of unlike lengths and tails, in the order of :data:`SIZES`."""
    generator = torch.Generator().manual_seed(seed)
    parts = [
        torch.randn(workers, SIZES["wide"], generator=generator).mul(1.5).exp(),
        torch.randn(workers, SIZES["few"], generator=generator),
        spread * 0.05 * torch.randn(workers, SIZES["small"], generator=generator),
    ]
    return torch.cat(parts, 1)


def linked(method: gw.Method | str, workers: int = 3, names: tuple[str, ...] = tuple(SIZES), **options: Any) -> Any:
    like = [(name, torch.empty(SIZES[name])) for name in names]
    return gw.SimulatedLink(like, method, workers, min_numel=0, **options)


def chosen(link: gw.SimulatedLink) -> dict[str, float]:
    held = link.state_dict()["global"]
    return {key.removeprefix("dial/"): float(value) for key, value in held.items() if key.startswith("dial/")}


def sparse(every: int = 1, density: float = 0.2, values: tuple[float, ...] = SPARSE) -> gw.LGreCo:
    return gw.LGreCo(compressor=gw.TopK(density=density), field="density", values=values, every=every)


def left_out(vector: torch.Tensor, density: float) -> float:
    """Return the squared norm of all but the largest elements."""
    k = max(1, math.floor(density * len(vector)))
    return float(vector.double().square().sort().values[: len(vector) - k].sum())


def size(density: float, numel: int) -> int:
    segments = lay_out([Parameter("w", (numel,), (1,))])
    codec = gw.TopK(density=density).codec(get_kernels("reference"), segments, 2, 0)
    return codec.payload_bytes(codec.units)


@pytest.mark.parametrize("every", [1, 3])
def test_the_choice_is_the_cheapest_for_what_was_added_up(every: int) -> None:
    """1: of all 64, by errors of each worker's sum of gradients."""
    workers, link, total = 2, linked(sparse(every), 2), torch.zeros(2, sum(SIZES.values()))
    for round in range(every):
        assert chosen(link) == {}
        g = gradients(workers, seed=round)
        total += g
        link.reduce_(g)
    layers = dict(zip(SIZES, total.split(list(SIZES.values()), dim=1)))
    error = {(name, d): sum(left_out(row, d) for row in rows) for name, rows in layers.items() for d in SPARSE}
    budget = sum(error[name, 0.2] for name in SIZES)
    fits = [c for c in itertools.product(SPARSE, repeat=3) if sum(error[key] for key in zip(SIZES, c)) <= budget]
    best = min(fits, key=lambda c: sum(size(d, SIZES[name]) for name, d in zip(SIZES, c)))
    assert best != (0.2, 0.2, 0.2)
    assert chosen(link) == dict(zip(SIZES, best))


def test_fewer_bytes_at_no_more_error() -> None:
    """2: in the rounds that follow; uniform before."""
    method, plain = sparse(every=2), gw.TopK(density=0.2)
    link, other = linked(method), linked(plain)
    sent = []
    for round in range(4):
        g = gradients(3, seed=round)
        before = link.traffic().sent_bytes, other.traffic().sent_bytes
        mean, uniform = link.reduce_(g.clone()), other.reduce_(g.clone())
        sent.append((link.traffic().sent_bytes - before[0], other.traffic().sent_bytes - before[1]))
        if round == 0:
            assert torch.equal(mean, uniform)
            assert sent[0][0] == sent[0][1]
    assert sent[2][0] < sent[2][1]
    assert sent[3][0] < sent[3][1]
    # Of one worker the error of the round of the choice is within the budget exactly, but for roundings in float32.
    alone, uniform_alone = linked(sparse(), 1), linked(plain, 1)
    g = gradients(1)
    off = [(one.reduce_(g.clone()) - g[0]).double().square().sum() for one in (alone, uniform_alone)]
    assert float(off[0]) <= float(off[1]) * (1 + 1e-6)


@pytest.mark.parametrize(
    ("inner", "field", "values"),
    [
        (gw.TopK(density=0.2), "density", SPARSE),
        (gw.QSGD(levels=16), "levels", (2, 4, 64)),
        (gw.QSGDinf(levels=7), "levels", (1, 3, 15)),
        (gw.EDEN(bits=4, block_size=256), "bits", (1, 2, 6)),
        (gw.QSGDMaxNorm(levels=15), "levels", (1, 3, 63)),
        (gw.NUQSGD(levels=5), "levels", (2, 8)),
    ],
    ids=repr,
)
def test_a_layer_has_the_outcome_of_its_operator_alone(inner: gw.Method, field: str, values: tuple[float, ...]) -> None:
    """3: every section is what the operator sends of these layers; and all ranks end with the same bits."""
    method = gw.LGreCo(compressor=inner, field=field, values=values, every=1)
    link, g = linked(method, collective="all_gather"), gradients(3)
    means = dict(zip(SIZES, link.reduce_(g.clone()).split(list(SIZES.values()))))
    choice = chosen(link)
    assert len(set(choice.values())) > 1
    for name, part in zip(SIZES, g.split(list(SIZES.values()), dim=1)):
        operator = method.turned(choice[name])
        like = gw.SimulatedLink([(name, torch.empty(SIZES[name]))], operator, 3, min_numel=0, collective="all_gather")
        assert torch.equal(like.reduce_(part.clone()), means[name])


def test_ranks_choose_alike_whatever_each_of_them_sees() -> None:
    """4: plans that share nothing but what they tell each other."""
    segments = lay_out(Parameter(name, (n,), (1,)) for name, n in SIZES.items())
    method = gw.LGreCo(every=1, values=(1, 3, 15, 31))
    plans = [planned(method, segments, 3) for _ in range(3)]
    memories, g = [Memory() for _ in range(3)], gradients(3)
    # Each has a layer of its own that is large, so that each alone would choose otherwise.
    for row, layer in zip(g, range(3)):
        row.split(list(SIZES.values()))[layer].mul_((10, 300, 1000)[layer])
    alone = []
    for row in g:
        link = linked(method, 1)
        link.reduce_(row[None].clone())
        alone.append(chosen(link))
    contexts = [Context(r, 3, 0, memory=memory) for r, memory in enumerate(memories)]
    simulate_ranks([p.whole(c, row) for p, c, row in zip(plans, contexts, g)], [Meter() for _ in range(3)])
    for memory in memories:
        memory.commit()
    dials = [{k: float(v) for k, v in memory.state()["global"].items()} for memory in memories]
    assert len(dials[0]) == 3
    assert dials[0] == dials[1] == dials[2]
    together = {key.removeprefix("dial/"): dial for key, dial in dials[0].items()}
    assert all(choice != together for choice in alone)
    assert torch.equal(g[0], g[1])
    assert torch.equal(g[0], g[2])


@pytest.mark.parametrize("inner", ["QSGDinf(levels=7)", "EDEN(bits=4, block_size=256)"])
def test_neither_order_nor_chunks_nor_backend_decide(inner: str) -> None:
    """5."""
    field = "levels" if "levels" in inner else "bits"
    method = gw.LGreCo(compressor=gw.method(inner), field=field, values=(1, 3, 6), every=2)
    names = ("small", "wide", "few")
    one = linked(method, backend="reference")
    other = linked(method, names=names, chunk_numel=800, backend="cpu")
    for round in range(4):
        parts = dict(zip(SIZES, gradients(3, seed=round).split(list(SIZES.values()), dim=1)))
        mean = dict(zip(SIZES, one.reduce_(torch.cat(list(parts.values()), 1)).split(list(SIZES.values()))))
        shuffled = other.reduce_(torch.cat([parts[name] for name in names], 1)).split([SIZES[name] for name in names])
        assert all(torch.equal(mean[name], found) for name, found in zip(names, shuffled))
    assert chosen(one) == chosen(other) != {}


@pytest.mark.parametrize("around", ["", "ErrorFeedback", "EF21"])
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_training_is_resumed_with_its_choice_and_what_was_added_up(around: str, cut: int) -> None:
    """6."""
    method = gw.method(f"{around}({sparse(every=2)!r})" if around else sparse(every=2))
    whole, first, second = linked(method), linked(method), linked(method)
    rounds = [gradients(3, seed=s) for s in range(6)]
    wanted = [whole.reduce_(g.clone()) for g in rounds]
    for g in rounds[:cut]:
        first.reduce_(g.clone())
    second.load_state_dict(first.state_dict())
    assert all(torch.equal(second.reduce_(g.clone()), mean) for g, mean in zip(rounds[cut:], wanted[cut:]))
    assert chosen(second) == chosen(whole) != {}


def test_a_round_with_an_infinity_changes_neither_the_choice_nor_the_sum() -> None:
    """7."""
    link = linked(sparse(every=2))
    for seed in range(3):
        link.reduce_(gradients(3, seed=seed))
    before = link.state_dict()
    bad = gradients(3, seed=9)
    bad[1, 7] = math.inf
    assert not bool(torch.isfinite(link.reduce_(bad)).all())
    after = link.state_dict()
    assert chosen(link)
    assert all(
        torch.equal(before[part][key], value) for part in after for key, value in after[part].items() if key != "round"
    )


def test_a_round_of_a_choice_ends_the_sum() -> None:
    link = linked(sparse(every=2), 1)
    for round in range(3):
        g = gradients(1, seed=round)
        link.reduce_(g.clone())
        held = torch.cat([link.state_dict()["rank 0"][f"window/{name}"] for name in SIZES])
        assert torch.equal(held, torch.zeros_like(held) if round == 1 else g[0])


def test_with_error_feedback_nothing_is_lost() -> None:
    """8: what was sent and the residual are the gradient and the residual before, with unlike layers."""
    link, held = linked(gw.ErrorFeedback(compressor=sparse(every=2))), torch.zeros(sum(SIZES.values()))
    for round in range(5):
        g = gradients(3, seed=round)
        mean = link.reduce_(g.clone())
        state = link.state_dict()
        rows = [torch.cat([state[f"rank {r}"][f"residual/{name}"] for name in SIZES]) for r in range(3)]
        residual = torch.stack(rows).mean(0)
        # A sum of three and a few differences of numbers below 2000.
        assert torch.allclose(mean + residual, g.mean(0) + held, rtol=1e-5, atol=2000 * 2**-22)
        held = residual
    assert len(set(chosen(link).values())) > 1


def test_candidates_are_tried_with_draws_of_their_own() -> None:
    """9: else a choice would prefer the candidate that happens to be lucky, and an unbiased operator be biased."""
    method = gw.LGreCo(every=1, values=(1, 3, 15))
    segments = lay_out(Parameter(name, (n,), (1,)) for name, n in SIZES.items())
    plan = planned(method, segments, 1)
    g = gradients(1)
    tried = plan._errors(Context(0, 1, 0, memory=Memory()), g[0].clone())
    names, alike = sorted(SIZES), 0
    for i, operator in enumerate(method.variants):
        mean = linked(operator, 1, collective="all_gather").reduce_(g.clone())
        for name, got, given in zip(SIZES, mean.split(list(SIZES.values())), g[0].split(list(SIZES.values()))):
            found, sent = float(tried[names.index(name), i]), float((got - given).double().square().sum())
            # Of the same law: sums of 500 squares and more, in blocks of unlike scales.
            assert found == pytest.approx(sent, rel=0.5)
            alike += found == pytest.approx(sent, rel=1e-3)
    # Of the same draws all twelve would agree to the last digits of float32; by chance one in forty comes so close.
    assert alike <= 2


def test_gradients_of_a_scaled_loss_are_added_up_unscaled() -> None:
    segments = lay_out([Parameter("w", (400,), (1,))])
    plan = planned(sparse(every=9), segments, 1)
    memory, g = Memory(), torch.randn(400, generator=torch.Generator().manual_seed(0))
    simulate_ranks([plan.whole(Context(0, 1, 0, memory=memory, loss_scale=8.0), 8 * g)], [Meter()])
    memory.commit()
    assert torch.equal(memory.state()["rank"]["window/w"], g)


def test_the_dry_run_counts_the_uniform_value_and_what_is_told_where_it_is() -> None:
    method = sparse(every=2)
    link = linked(method)
    for round in range(4):
        before = link.traffic().sent_bytes
        link.reduce_(gradients(3, seed=round))
        assert link.traffic().sent_bytes - before <= 1.02 * linked_bytes(method, round)
    # Three layers and four candidates, in float64 behind a header of 32 bytes at most, to two others.
    told = linked_bytes(method, 1) - linked_bytes(method, 0)
    assert 2 * 3 * 4 * 8 <= told <= 2 * (3 * 4 * 8 + 32)
    assert linked_bytes(method, 0) == linked_bytes(method, -1) == linked_bytes(method.compressor, 0)


def linked_bytes(method: gw.Method, round: int) -> int:
    segments = lay_out(Parameter(name, (n,), (1,)) for name, n in SIZES.items())
    plan = planned(method, segments, 3, "meta")
    return dry_run(plan, sum(SIZES.values()), 3, round).sent_bytes


def trained_on_real_ranks() -> tuple[dict[str, float | None], list[float]]:
    like = [(name, torch.nn.Parameter(torch.zeros(n))) for name, n in SIZES.items()]
    link, mean = gw.Link(like, sparse(every=2), min_numel=0), []
    for round in range(3):
        row = gradients(3, seed=round)[link.rank]
        for (_, p), part in zip(like, row.split(list(SIZES.values()))):
            p.grad = part.clone()
        link.reduce_()
        mean = torch.cat([p.grad for _, p in like if p.grad is not None]).tolist()
    shown = {name: row.get("dial") for name, row in link.diagnostics()["parameters"].items()}
    link.close()
    return shown, mean


@pytest.mark.ranks
def test_people_see_the_choice_in_force_of_real_ranks(three_ranks: Any) -> None:
    simulated = linked(sparse(every=2))
    for round in range(3):
        mean = simulated.reduce_(gradients(3, seed=round))
    assert three_ranks(trained_on_real_ranks) == [(chosen(simulated), mean.tolist())] * 3


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ("LGreCo(PowerSGD())", "an operator on one vector"),
        ("LGreCo(QSGDinf(blocks='model'))", "blocks of a parameter"),
        ("LGreCo(TernGrad())", "has no field 'levels'"),
        ("LGreCo(CAT(), field='fixed_bytes')", "an operator on one vector"),
        ("LGreCo(SignSGD())", "an operator on one vector"),
        ("LGreCo(values=(7,))", "values has 1 to 255 others than levels=7"),
        ("LGreCo(values=())", "values has 1 to 255 others"),
        ("LGreCo(values=(0, 7))", "QSGDinf: levels"),
        ("LGreCo(values='many')", "values is a tuple of numbers"),
        ("LGreCo(every=0)", "every is a number of rounds"),
        ("LGreCo(EDEN(), field='block_size', values=(256, 512))", "has cut=256, and not 4096"),
        ("ErrorFeedback(LGreCo(QSGD(levels=64), values=(1,)))", "is no contraction"),
        ("DIANA(LGreCo())", "operator on one vector"),
    ],
)
def test_what_cannot_work_is_refused(spec: str, part: str) -> None:
    with pytest.raises(gw.HyperparameterError, match=part):
        gw.method(spec)


def test_declared_is_what_holds_of_the_worst_value() -> None:
    method = gw.LGreCo()
    assert method.traits.unbiased
    assert method.omega == gw.QSGDinf(levels=1).omega
    assert method.traits.worst_step == gw.QSGDinf(levels=1).traits.worst_step
    assert set(method.traits.kernels) == {*gw.QSGDinf().traits.kernels, "moments"}
    assert gw.ErrorFeedback(compressor=sparse()).traits.remembers == ("residual", "window", "dial")
    assert sparse().delta_of(1000) == gw.TopK(density=0.01).delta_of(1000)
    assert gw.LGreCo(values=(31, 3, 3)).values == (3, 31)
