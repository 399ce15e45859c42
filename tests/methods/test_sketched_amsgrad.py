"""SketchedAMSGrad, by number of the property in the paper's summary (docs/properties.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from contributions import told
from gradwire.exchange.drivers import Meter, simulate_ranks
from gradwire.exchange.protocols import Context, Memory
from gradwire.exchange.protocols.bucket_plan import BucketPlan
from gradwire.exchange.segments import Parameter, lay_out
from gradwire.kernels import SegmentTable, get_kernels
from gradwire.seeds import SHARED, parameter_key
from joined import joined_rows, joined_state
from oracle import digest, layers, square_loss
from plans import make_plan
from ranks import Ranks

REFERENCE = get_kernels("reference")
U = 2.0**-24


def drawn(workers: int, numel: int, seed: int = 0) -> torch.Tensor:
    """Unlike elements, of workers that have something in common."""
    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(numel, generator=generator) + torch.randn(workers, numel, generator=generator)
    return g * torch.randn(numel, generator=generator).exp()


def link(method: gw.Method, numel: int, workers: int, **options: object) -> gw.SimulatedLink:
    return gw.SimulatedLink([("w", torch.empty(numel))], method, workers, min_numel=0, **options)  # type: ignore[arg-type]


def held(link: gw.SimulatedLink, workers: int, kind: str) -> torch.Tensor:
    """Return what workers keep of all compressed parameters, zeros at first."""
    return joined_rows(link, workers, kind)


def root(link: gw.SimulatedLink) -> torch.Tensor:
    """Return the roots of the largest second moments, by the method's own arithmetic."""
    return (joined_state(link, "replicated", "highest_second_moment") + link.method.eps).sqrt()  # type: ignore[attr-defined]


def largest(x: torch.Tensor, k: int) -> torch.Tensor:
    return torch.sort(x.abs(), descending=True, stable=True).indices[:k].sort().values


@pytest.mark.parametrize("workers", [1, 3, 4])
@pytest.mark.parametrize("warmup_steps", [0, 4])
@pytest.mark.parametrize("eps", [1e-8, 0.01])
def test_with_all_elements_it_is_amsgrad_on_the_mean_gradient(workers: int, warmup_steps: int, eps: float) -> None:
    """7: also of parameters that travel in float32, and through rounds of warm-up."""
    method = gw.SketchedAMSGrad(density=1.0, candidates=1, columns=7, eps=eps)
    parameters = [("a", torch.empty(300)), ("b", torch.empty(40)), ("c", torch.empty(200))]
    ours = gw.SimulatedLink(parameters, method, workers, min_numel=100, warmup_steps=warmup_steps)
    m, error_m, scale_m, error_v = (torch.zeros(540, dtype=torch.float64) for _ in range(4))
    v, w, error_w = torch.full_like(m, eps), torch.full_like(m, eps), torch.zeros_like(m)
    for seed in range(12):
        gradients = drawn(workers, 540, seed)
        found = ours.reduce_(gradients.clone()).double()
        g, scale = gradients.double().mean(0), gradients.abs().double().mean(0)
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g.square()
        w = torch.maximum(w, v)
        # Of each worker a product and a sum are rounded, then as many products and sums as there are workers; of the
        # moment, what is kept, which lies within w of zero, and the mean gradient twice over.
        scale_m = 0.9 * scale_m + 0.1 * scale
        error_m = 0.9 * error_m + 3 * U * scale_m
        error_v = 0.999 * error_v + 0.001 * 2 * g.abs() * (workers + 2) * U * scale + 2 * U * w
        error_w = torch.maximum(error_w, error_v)
        error = (error_m + (workers + 1) * U * scale_m + m.abs() * (error_w / (2 * w) + 4 * U)) / w.sqrt()
        assert bool(((found - m / w.sqrt()).abs() <= 1.01 * error).all())
    assert float(error.max()) < 1e-4


def rounds(
    gradients: Sequence[torch.Tensor], rates: Sequence[float], method: gw.SketchedAMSGrad, seed: int = 0
) -> list[torch.Tensor]:
    """The method's formulas on one vector, in float32 with moments in float64."""
    workers, numel = gradients[0].shape
    table = SegmentTable([0], [numel], [0], [parameter_key(seed, "(model)", "sketch")])
    k, size = method.kept(numel), (method.rows, method.columns_of(numel))
    m, e = torch.zeros(workers, numel), torch.zeros(workers, numel)
    v, w = (torch.full((numel,), method.eps, dtype=torch.float64) for _ in range(2))
    found, last = [], rates[0]
    for g, rate in zip(gradients, rates):
        m = method.beta1 * m + (1 - method.beta1) * g
        p = m + last / rate * e
        tables = torch.empty(workers, size[0] * size[1])
        for row, out in zip(p, tables):
            REFERENCE.sketch(row, table, *size, SHARED, out)
        estimates = torch.empty(numel)
        REFERENCE.unsketch(tables.mean(0), table, *size, SHARED, estimates)
        asked = largest(estimates / w.sqrt(), min(numel, method.candidates * k))
        v[asked] = method.beta2 * v[asked] + (1 - method.beta2) * g[:, asked].double().mean(0).square()
        w = torch.maximum(w, v)
        steps = p[:, asked].mean(0) / w[asked].sqrt().float()
        kept = largest(steps, k)
        found.append(torch.zeros(numel).index_copy(0, asked[kept], steps[kept]))
        p[:, asked[kept]] = 0
        e, last = p, rate
    return found


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("eps", [0.03, 1.0])
def test_rounds_are_those_of_the_formulas(workers: int, eps: float) -> None:
    """Of a power of two of workers, so that dividing before or after a sum is the same.

    And with an eps that counts: without, the first steps of all elements are the same but for rounding.
    """
    method = gw.SketchedAMSGrad(beta1=0.5, beta2=0.75, eps=eps, rows=3, columns=200, density=0.01)
    gradients, rates = [drawn(workers, 2000, seed) for seed in range(8)], [0.5, 0.5, 0.25, 0.2, 0.2, 0.4, 0.1, 0.05]
    w = torch.nn.Parameter(torch.empty(2000))
    optimizer = torch.optim.SGD([w], lr=0.1)
    ours = gw.SimulatedLink([("w", w)], method, workers, optimizer=optimizer)
    for expected, g, rate in zip(rounds(gradients, rates, method), gradients, rates):
        optimizer.param_groups[0]["lr"] = rate
        found = ours.reduce_(g.clone())
        assert torch.equal(found != 0, expected != 0)
        assert torch.allclose(found, expected, rtol=1e-5)


def grouped(numel: Mapping[str, int]) -> tuple[dict[str, torch.nn.Parameter], torch.optim.SGD]:
    """Return parameters with a group each."""
    named = {name: torch.nn.Parameter(torch.zeros(n)) for name, n in numel.items()}
    return named, torch.optim.SGD([{"params": [p]} for p in named.values()], lr=0.1)


SCHEDULE = [(0.5, 0.1), (0.25, 0.1), (0.25, 0.0), (0.0, 0.0), (0.75, 0.3), (0.0, 0.01), (0.003, 0.02), (1.0, 0.1)]


@pytest.mark.parametrize("workers", [1, 3])
def test_the_virtual_iterate_takes_the_steps_of_the_whole_momentum(workers: int) -> None:
    """8: with second moments at rest, at any learning rates, of one element of twenty a round."""
    method = gw.SketchedAMSGrad(eps=1e4, density=0.05, columns=40)
    named, optimizer = grouped({"a": 300, "b": 100})
    ours = gw.SimulatedLink(named.items(), method, workers, optimizer=optimizer, min_numel=0)
    sizes, last = [300, 100], [0.0, 0.0]

    def spread(rates: Sequence[float]) -> torch.Tensor:
        return torch.cat([torch.full((n,), rate, dtype=torch.float64) for n, rate in zip(sizes, rates)])

    x, e = torch.zeros(400, dtype=torch.float64), torch.zeros(workers, 400, dtype=torch.float64)
    moved = 0
    for seed, rates in enumerate(SCHEDULE):
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate
        y = x - spread(last) * e.mean(0) / 100
        waiting = spread(last) * e.abs().mean(0) / 100
        outcome = ours.reduce_(drawn(workers, 400, seed)).double()
        x = x - spread(rates) * outcome
        last = [rate or before for rate, before in zip(rates, last)]
        e, m = held(ours, workers, "residual").double(), held(ours, workers, "momentum").double()
        assert bool((root(ours) == 100).all())
        # The ratio and its product, a sum, then of the workers' values as many products and sums as there are of them,
        # a root and a quotient.
        tolerance = (workers + 7) * U * (spread(rates) * m.abs().mean(0) / 100 + waiting)
        after = x - spread(last) * e.mean(0) / 100
        assert bool(((after - y + spread(rates) * m.mean(0) / 100).abs() <= tolerance).all())
        moved += int((outcome != 0).sum())
        assert bool((outcome[spread(rates) == 0] == 0).all())
    assert moved == 7 * 20


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_nothing_is_lost(workers: int) -> None:
    """Steps times the roots of moments are exact means; what was sent is gone from all workers, and nothing else."""
    ours = link(gw.SketchedAMSGrad(density=0.01, columns=60, eps=1e-3), 3000, workers)
    residual = torch.zeros(workers, 3000)
    for seed in range(6):
        steps = ours.reduce_(drawn(workers, 3000, seed))
        vectors = residual + held(ours, workers, "momentum")
        after, sent = held(ours, workers, "residual"), steps != 0
        assert int(sent.sum()) == 30
        assert torch.equal(after[:, ~sent], vectors[:, ~sent])
        assert bool((after[:, sent] == 0).all())
        exact, scale = vectors.double().mean(0), vectors.abs().double().mean(0)
        delivered = (steps.double() * root(ours).double())[sent]
        assert bool(((delivered - exact[sent]).abs() <= (workers + 2) * U * scale[sent]).all())
        residual = after


def test_moments_of_elements_that_are_rarely_seen_are_not_biased_low() -> None:
    """Equal gradients of 40 elements, of which 2 are seen a round: their moments end where those seen always would."""
    method = gw.SketchedAMSGrad(beta1=0.0, beta2=0.5, eps=0.01, density=0.05, candidates=1, columns=4000)
    ours, seen = link(method, 40, 1), torch.zeros(40)
    for _ in range(240):
        seen += ours.reduce_(torch.full((1, 40), 2.0)) != 0
    assert int(seen.min()) >= 10
    # 4 - 3.99 / 2^n after n times; counted as zero in between, of rounds in twenty, they would be about 2.
    assert torch.allclose(root(ours), (4 - 3.99 * 0.5**seen).sqrt(), rtol=1e-5)


def descend(printed: bool, rounds: int = 400) -> float:
    """Minimise |x|^2 / 2 in float64, two of ten elements a round; return how far from the minimum it ends.

    Args:
        printed: Take the step itself out of the residual, rather than what it delivers.
    """
    x, m, e = torch.linspace(0.02, 0.2, 10, dtype=torch.float64), *torch.zeros(2, 10, dtype=torch.float64)
    w = v = torch.full((10,), 1e-4, dtype=torch.float64)
    for _ in range(rounds):
        m = 0.9 * m + 0.1 * x
        p = m + e
        v = 0.999 * v + 0.001 * x.square()
        w = torch.maximum(w, v)
        kept = largest(p / w.sqrt(), 2)
        step = torch.zeros_like(p).index_copy(0, kept, (p / w.sqrt())[kept])
        e = p - step * (1.0 if printed else w.sqrt())
        x = x - 0.0005 * step
    return float(x.norm())


def test_a_residual_in_the_unit_of_the_step_finds_no_minimum() -> None:
    """Steps are longer than what they deliver by 1 / sqrt(w): taken out of the residual, they come back."""
    start = float(torch.linspace(0.02, 0.2, 10).norm())
    assert descend(printed=False) < 0.01 * start
    assert descend(printed=True) > 0.5 * start


@pytest.mark.timeout(600)
def test_a_quadratic_of_unlike_workers_is_solved() -> None:
    """Two elements of 200 a round, at falling learning rates."""
    centres = torch.randn(4, 200, generator=torch.Generator().manual_seed(8))
    x = torch.nn.Parameter(torch.zeros(200))
    optimizer = torch.optim.SGD([x], lr=0.1)
    method = gw.SketchedAMSGrad(density=0.01, columns=50, eps=0.1)
    ours = gw.SimulatedLink([("x", x)], method, 4, optimizer=optimizer, min_numel=0)
    for step in range(300):
        optimizer.param_groups[0]["lr"] = 0.4 / (step + 80)
        ours.scatter_(ours.reduce_(x.detach() - centres))
        optimizer.step()
    assert float((x.detach() - centres.mean(0)).norm()) < 0.2 * float(centres.mean(0).norm())


def plan(**options: Any) -> BucketPlan:
    """Plan a bucket in which segments that are not compressed lie between others."""
    parameters = [Parameter(str(i), (n,), (1,)) for i, n in enumerate((300, 60, 500, 40))]
    segments = [replace(s, dense=s.numel < 100) for s in lay_out(parameters)]
    method = gw.SketchedAMSGrad(**{"columns": 1 << 20, "density": 0.02, "candidates": 1, **options})
    return make_plan(
        method, segments, kernels=REFERENCE, world_size=2, collective="two_shot", seed=0, chunk_numel=1 << 20
    )


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_what_a_rank_sent_is_told_in_the_unit_of_its_momentum(scale: float) -> None:
    """Also around segments that are not compressed, whose gradients are told; of a scaled loss, scaled."""
    ours, memories = plan(eps=1.0), [Memory(), Memory()]
    light = torch.tensor([*range(300), *range(360, 860)])
    for round in range(2):
        g = scale * drawn(2, 900, round)
        rows, target = g.clone(), g.clone()
        contexts = [Context(r, 2, round, memory=memory, loss_scale=scale) for r, memory in enumerate(memories)]
        outcomes = simulate_ranks(
            [ours.run(replace(c, wants_sent=True), row, None) for c, row in zip(contexts, rows)], [Meter(), Meter()]
        )
        sent = torch.stack([told(outcome, 900) for outcome in outcomes])
        for context, row in zip(contexts, target):
            ours.target_(context, row)
        assert torch.equal(rows[0], rows[1])
        for memory in memories:
            memory.commit()
        state = memories[0].state()["replicated"]
        w = 1 + torch.cat([state[f"highest_second_moment/{i}"] for i in range(4)])
        assert torch.allclose((sent.mean(0) / w.sqrt())[light], rows[0][light], rtol=1e-5)
        dense = torch.ones(900, dtype=torch.bool).index_fill(0, light, False)
        assert torch.equal(sent[:, dense], g[:, dense])
        m = [torch.cat([memory.state()["rank"][f"momentum/{i}"] for i in (0, 2)]) for memory in memories]
        assert torch.equal(target[:, light], scale * torch.stack(m))
        assert torch.equal(target[:, dense], g[:, dense])
        assert int((rows[0][light] != 0).sum()) == 16


def test_a_scaled_loss_gives_the_scaled_outcome_and_the_same_memory() -> None:
    """By a power of two, bit for bit."""
    found = []
    for scale in (1.0, 1024.0):
        ours, memories, told = plan(), [Memory(), Memory()], list[torch.Tensor]()
        for round in range(3):
            rows = drawn(2, 900, round) * scale
            contexts = [Context(r, 2, round, memory=memory, loss_scale=scale) for r, memory in enumerate(memories)]
            simulate_ranks([ours.whole(c, row) for c, row in zip(contexts, rows)], [Meter(), Meter()])
            for memory in memories:
                memory.commit()
            told.append(rows[0] / scale)
        state = memories[1].state()
        found.append([*told, *(value for part in state.values() for value in part.values())])
    assert all(torch.equal(a, b) for a, b in zip(*found))
    # Outcomes; momentum and residual of two parameters; a momentum of the mean of two others; two moments of all.
    assert len(found[0]) == len(found[1]) == 3 + 2 * 2 + 2 + 2 * 4


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [377, 930, 1010])
def test_a_round_that_is_not_finite_changes_nothing(bad: float, place: int) -> None:
    """Also of a parameter whose learning rate is 0, and of one that travels in float32."""
    method = gw.SketchedAMSGrad(density=0.02, beta2=0.5)

    def build() -> tuple[gw.SimulatedLink, torch.optim.SGD]:
        named, optimizer = grouped({"a": 900, "b": 100, "c": 20})
        return gw.SimulatedLink(named.items(), method, 3, optimizer=optimizer, min_numel=50), optimizer

    (ours, stepping), (other, beside) = build(), build()
    for seed in range(3):
        for optimizer in (stepping, beside):
            optimizer.param_groups[1]["lr"] = 0.1 * (seed == 0)
        assert torch.equal(ours.reduce_(drawn(3, 1020, seed)), other.reduce_(drawn(3, 1020, seed)))
        spoilt = drawn(3, 1020, 50 + seed)
        spoilt[1, place] = bad
        stepping.param_groups[0]["lr"] = 0.7
        assert float(ours.reduce_(spoilt)[place]) == math.inf
        stepping.param_groups[0]["lr"] = 0.1
        states = [
            {f"{scope}/{key}": value for scope, part in one.state_dict().items() for key, value in part.items()}
            for one in (ours, other)
        ]
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0] if key != "global/round")


def test_a_resumed_run_ends_in_the_same_bits() -> None:
    """Though the learning rate has changed since the round that the state is of."""
    method = gw.SketchedAMSGrad(density=0.02)
    built = []
    for _ in range(3):
        named, optimizer = grouped({"a": 600, "b": 400})
        built.append((gw.SimulatedLink(named.items(), method, 3, optimizer=optimizer, min_numel=0), optimizer))

    def go(which: int, seed: int, rate: float) -> torch.Tensor:
        ours, optimizer = built[which]
        optimizer.param_groups[1]["lr"] = rate
        return ours.reduce_(drawn(3, 1000, seed)).clone()

    for seed in range(3):
        go(0, seed, 0.1)
    state = built[0][0].state_dict()
    built[1][0].load_state_dict(state)
    del state["global"]["learning_rate/b"]
    built[2][0].load_state_dict(state)
    for seed in range(3, 6):
        expected = go(0, seed, 0.01)
        assert torch.equal(go(1, seed, 0.01), expected)
        assert not torch.equal(go(2, seed, 0.01), expected), "the rate is part of the state"


@pytest.mark.parametrize("warmup_steps", [1, 3])
def test_a_warm_up_sends_float32_once_and_hands_its_momentum_on(warmup_steps: int) -> None:
    """Nor does it matter whether a checkpoint lies between, or how many workers go on from it."""
    method = gw.SketchedAMSGrad(density=0.01, columns=50)
    ours = link(method, 4000, 4, warmup_steps=warmup_steps, collective="two_shot")
    for seed in range(warmup_steps):
        ours.reduce_(drawn(4, 4000, seed))
        assert ours.traffic().sent_bytes == (seed + 1) * 2 * 3 * (32 + 4 * 1000)
    state = ours.state_dict()
    assert int(state["global"]["warm_up"]) == 1
    momentum = state["replicated"]["mean_momentum/w"]
    few = link(method, 4000, 1, warmup_steps=warmup_steps)
    few.load_state_dict({"rank 0": {}, "global": state["global"], "replicated": state["replicated"]})
    g = drawn(1, 4000, 9)
    for one, workers in ((ours, 4), (few, 1)):
        one.reduce_(g.expand(workers, -1).clone())
        assert torch.allclose(held(one, workers, "momentum"), 0.9 * momentum + 0.1 * g, rtol=1e-6, atol=1e-7)
        after = one.state_dict()
        assert int(after["global"]["warm_up"]) == 0
        assert not bool(after["replicated"]["mean_momentum/w"].any())


def schedule(optimizer: torch.optim.SGD, step: int) -> None:
    for i, group in enumerate(optimizer.param_groups):
        group["lr"] = 0.002 * 0.5**step * (1 + i) * (step != 3)


def built(rank_seed: int) -> tuple[torch.nn.Sequential, torch.optim.SGD]:
    module = layers(3, seed=rank_seed)
    weights = [p for p in module.parameters() if p.dim() > 1]
    biases = [p for p in module.parameters() if p.dim() < 2]
    return module, torch.optim.SGD([{"params": weights}, {"params": biases}], lr=0.1)


METHOD = "SketchedAMSGrad(density=0.01, beta2=0.9)"


def train(folder: str) -> tuple[str, str]:
    """Train under DDP with a schedule in one go, and with a checkpoint in the middle."""
    digests = []
    for stops in ((), (4,)):
        module, optimizer = built(0)
        ddp = DistributedDataParallel(module, bucket_cap_mb=0.02)
        link = gw.attach(ddp, METHOD, optimizer=optimizer, check=True)
        for step in range(7):
            if step in stops:
                gw.save(link, folder)
                link.close()
                kept, (module, optimizer) = module.state_dict(), built(9)
                module.load_state_dict(kept)
                ddp = DistributedDataParallel(module)
                link = gw.attach(ddp, METHOD, optimizer=optimizer)
                gw.load(link, folder)
            schedule(optimizer, step)
            optimizer.zero_grad()
            square_loss(ddp, link.rank, step).backward()
            optimizer.step()
        link.close()
        digests.append(digest(module))
    return digests[0], digests[1]


@pytest.mark.ranks
def test_real_ranks_with_a_schedule_are_the_simulation(three_ranks: Ranks, tmp_path: Path) -> None:
    """With a rate of its own for the biases, which travel in float32, and one round at none."""
    found = three_ranks(train, str(tmp_path))
    module, optimizer = built(0)
    ours = gw.SimulatedLink(module.named_parameters(), METHOD, 3, optimizer=optimizer)
    for step in range(7):
        schedule(optimizer, step)
        rows = []
        for rank in range(3):
            optimizer.zero_grad()
            square_loss(module, rank, step).backward()
            rows.append(torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None]))
        ours.scatter_(ours.reduce_(torch.stack(rows)))
        optimizer.step()
    assert found == [(digest(module),) * 2] * 3


def test_only_plain_sgd_of_all_parameters_steps_by_it(caplog: pytest.LogCaptureFixture) -> None:
    named, optimizer = grouped({"a": 10, "b": 10})
    method = gw.SketchedAMSGrad.paper()
    for wrong, words in (
        (torch.optim.Adam(named.values()), r"use torch\.optim\.SGD without momentum"),
        (gw.ProximalSGD(named.values(), lr=0.1, prox=gw.L1(strength=0.1)), r"use torch\.optim\.SGD without momentum"),
        (torch.optim.SGD(named.values(), lr=0.1, momentum=0.9), "momentum=0"),
        (torch.optim.SGD([named["a"]], lr=0.1), "does not step 'b'"),
    ):
        with pytest.raises(gw.IncompatibleError, match=words):
            gw.SimulatedLink(named.items(), method, 2, optimizer=wrong)
    gw.SimulatedLink(named.items(), method, 2, optimizer=optimizer)
    assert method.caution(optimizer, named) is None
    assert "optimizer=" in (method.caution(None, named) or "")


@pytest.mark.parametrize("workers", [2, 3, 8])
@pytest.mark.parametrize("beside", [0, 50])
def test_bytes_are_those_of_the_sums_and_of_two_values_a_candidate(workers: int, beside: int) -> None:
    rows, columns, numel, candidates = 3, 101, 5000, 4 * 50
    parameters = [("w", torch.empty(numel)), ("b", torch.empty(beside))][: 2 if beside else 1]
    method = gw.SketchedAMSGrad(rows=rows, columns=columns, density=0.01)
    ours = gw.SimulatedLink(parameters, method, workers, min_numel=100, collective="two_shot")
    ours.reduce_(drawn(workers, numel + beside))
    # Both ways a header, and shares of four floats each, to every other rank.
    shares = [math.ceil(math.ceil(floats / 4) / workers) for floats in (rows * columns, 2 * candidates + beside)]
    assert ours.traffic().sent_bytes == sum(2 * (workers - 1) * (32 + 16 * share) for share in shares)


@pytest.mark.parametrize(
    "fields",
    [{"beta1": 1.0}, {"beta1": -0.1}, {"beta2": 1.0}, {"beta2": "0.9"}, {"eps": 0.0}, {"eps": math.inf},
     {"eps": math.nan}, {"rows": 4}, {"columns": 0}, {"density": 0}, {"candidates": 0}],
)  # fmt: skip
def test_fields_out_of_range_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(gw.HyperparameterError, match=next(iter(fields))):
        gw.SketchedAMSGrad(**fields)  # type: ignore[arg-type]
