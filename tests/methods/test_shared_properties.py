"""What every method promises, over every row of the case table."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradwire as gw
from cases import ALL, ALL_CASES, COMPRESSORS, TABLE, Case, adds_up

MEANS = [case for case in ALL_CASES if not case.direction]


def crossed(cases: list[Case], all_rows: tuple[int, ...], first_rows: tuple[int, ...]) -> list[tuple[Case, int]]:
    """Cross all cases with some world sizes, the first of each method with others, too: settings change no shares."""
    return [
        *((case, world_size) for case in cases for world_size in all_rows),
        *((case, world_size) for case in cases if is_first(case) for world_size in first_rows),
    ]


def widening(cases: list[Case]) -> list[Case]:
    """Choose those whose codes add up, so that digits widen with the workers: no votes, and no sums of float32."""
    return [
        case
        for case in cases
        if case.method.traits.collectives[0] == "two_shot"
        and case.vectors
        and not (case.method.traits.re_encoding or case.direction or "sketched" in case.method.name)
    ]


def is_first(case: Case) -> bool:
    return case is TABLE[case.method.name][0]


def gradients(world_size: int, numel: int, seed: int = 0, tail: float = 0.5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(world_size, numel, generator=generator)
    return g * torch.exp(tail * torch.randn(world_size, numel, generator=generator))


# Bytes of all settings at 64 workers are measured below.
@pytest.mark.parametrize(
    ("case", "world_size"),
    crossed(MEANS, (3, 8), (1, 2, 17)) + [(case, 64) for case in widening(MEANS) if is_first(case)],
    ids=repr,
)
def test_error_is_what_is_declared(case: Case, world_size: int) -> None:
    """Above a floor as well as below a ceiling, so that a method which does nothing fails."""
    g = gradients(world_size, 5000)
    if case.variance is None:
        found = gw.simulate(g, case.method)
        error = float((found.mean - g.mean(0)).norm() / g.mean(0).norm())
        assert error <= case.error * math.sqrt(world_size)
        plain = isinstance(getattr(case.method, "inner", case.method), gw.FP32)
        assert error > 0 or plain or not case.vectors
        return
    law = case.noise(g)
    # As many draws as leave a method without any error outside.
    draws = math.ceil((5 * spread(g, case) / 0.8) ** 2)
    copies = copies_of(case, draws)
    rounds = -(-draws // copies)
    draws = rounds * copies
    target, noise = case.target(g).double().mean(0), 0.0
    for mean in means(g, case, rounds, copies):
        noise += float((mean - target).square().sum()) / draws
    assert noise == pytest.approx(float(law.sum()), rel=5 * spread(g, case) / math.sqrt(draws) + 0.02)


def copies_of(case: Case, draws: int) -> int:
    """Return how many parameters may have the same gradients: each draws for itself, unless blocks cross them."""
    return 1 if case.method.traits.joined or case.memory else min(8, draws)


def means(g: torch.Tensor, case: Case, rounds: int, copies: int) -> Iterator[torch.Tensor]:
    """Yield the means of the same gradients, drawn anew in each round and parameter, in float64 ``[copies, numel]``."""
    world_size, numel = g.shape
    like = [(str(i), torch.empty(numel)) for i in range(copies)]
    link = gw.SimulatedLink(like, case.method, world_size, min_numel=0)
    for round in range(rounds):
        # To make a link takes longer than an exchange, and is needed where a round leaves something to the next.
        one = gw.simulate(g, case.method, round=round).mean if case.memory else link.reduce_(g.repeat(1, copies))
        yield one.double().view(copies, numel)


def spread(g: torch.Tensor, case: Case) -> float:
    """Bound the relative deviation of the squared error of one draw.

    A worker's error of an element lies within one step, the largest of which is the scale; a variable with variance v
    within a width w has a fourth moment of at most v w^2. So the squared error has a deviation of at most
    sqrt(sum v w^2), with w^2 <= the largest squared scale; steps near the bulk are shorter by far.
    """
    law = case.variance(g) / g.shape[0] ** 2
    width = g.abs().max(dim=1, keepdim=True).values.double() / g.shape[0]
    return float((law * width.square()).sum().sqrt() / law.sum()) + 2 * float(law.square().sum().sqrt() / law.sum())


@pytest.mark.parametrize("case", [c for c in MEANS if c.unbiased and not c.memory], ids=repr)
def test_unbiased(case: Case) -> None:
    """The mean over rounds tends to the (clipped) mean; tolerance from the variance and the number of draws."""
    world_size, numel, draws = 3, 400, 160
    g = gradients(world_size, numel)
    copies, total = copies_of(case, draws), torch.zeros(numel, dtype=torch.float64)
    for mean in means(g, case, draws // copies, copies):
        total += mean.sum(0)
    target, deviation = case.target(g).double().mean(0), (case.noise(g) / draws).sqrt()
    error = total / draws - target
    z = error / deviation.clamp(min=1e-7)
    if case.variance is None:
        assert float(z.abs().max()) < 4.8
        return
    # A mean that is too short or too long shows in the sum of all errors along it long before it shows in an element:
    # one normal variable, beyond 4.8 with probability 2e-6.
    assert float((error * target).sum().abs() / (deviation * target).square().sum().sqrt()) < 4.8
    # A step that is passed once in a thousand draws is no normal variable: judge elements where draws p (1 - p), summed
    # over the workers' chances p, is sixteen or more, if a step is as long as the largest value.
    usual = deviation * world_size > 4 / draws * g.abs().amax().double()
    # 400 standard normal values: the largest beyond 4.8 has probability 6e-4, the mean of squares is 1 +- 0.07.
    assert float(z[usual].abs().max() if bool(usual.any()) else 0) < 4.8
    assert 0.7 < float(z.square().mean()) < 1.35


# Where ties and halves are, and where there are neither.
@pytest.mark.parametrize("world_size", [4, 5])
@pytest.mark.parametrize("case", [c for c in ALL_CASES if c.symmetric], ids=repr)
def test_symmetric_under_a_change_of_sign(case: Case, world_size: int) -> None:
    g = gradients(world_size, 777)
    assert torch.equal(gw.simulate(-g, case.method).mean, -gw.simulate(g, case.method).mean)


def mean_of(rows: torch.Tensor, method: gw.Method, seed: int, round: int) -> torch.Tensor:
    """Return the mean in a round, of methods that learn from rounds before it after these."""
    if not isinstance(method, gw.LGC):
        return gw.simulate(rows, method, seed=seed, round=round).mean
    link = gw.SimulatedLink([("", torch.empty(rows.shape[1:]))], method, len(rows), seed=seed, min_numel=0)
    link.round = round - method.training_rounds
    for _ in range(method.training_rounds):
        link.reduce_(rows.flatten(1).clone())
    return link.reduce_(rows.flatten(1).clone())


@pytest.mark.parametrize("method", ALL, ids=repr)
def test_same_seed_and_round_same_bits(method: gw.Method) -> None:
    g = gradients(4, 3000).view(4, 60, 50)
    one = mean_of(g, method, 5, 9)
    assert torch.equal(one, mean_of(g, method, 5, 9))
    stream = method.properties.stream
    while stream == "the compressor's":
        method = method.inner if isinstance(method, gw.AsyncServer) else method.compressor  # type: ignore[attr-defined]
        stream = method.properties.stream
    if stream != "none":
        assert not torch.equal(one, mean_of(g, method, 6, 9))
        later = mean_of(g, method, 5, 10)
        assert torch.equal(one, later) == ("the same in all rounds" in stream)


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize("method", ALL, ids=repr)
def test_what_is_not_finite_on_one_worker_is_seen_by_all_and_leaves_no_trace(method: gw.Method, bad: float) -> None:
    """Never a finite number in its place; another parameter's mean is sound; and so is the round after."""
    before = gw.simulate([{"a": row[:300], "b": row[300:]} for row in gradients(3, 700)], method).state
    g = gradients(3, 700, seed=1)
    spoilt = g.clone()
    spoilt[1, 377] = bad

    def exchange(rows: torch.Tensor, state: dict[str, dict[str, torch.Tensor]]) -> gw.Simulation:
        return gw.simulate([{"a": row[:300], "b": row[300:]} for row in rows], method, state=state)

    found = exchange(spoilt, before)
    assert not bool(torch.isfinite(found.mean["b"][77]))
    # Blocks that cross parameters, and masks of a whole bucket, lose more than the one.
    if not method.traits.joined and method.name not in ("multiscale", "lattice"):
        assert bool(torch.isfinite(found.mean["a"]).all())
    later = {**found.state, "global": {**found.state["global"], "round": before["global"]["round"]}}
    after, expected = exchange(g, later).mean, exchange(g, before).mean
    assert all(torch.equal(after[name], expected[name]) for name in "ab")
    assert all(bool(torch.isfinite(mean).all()) for mean in after.values())


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("case", [c for c in ALL_CASES if not c.direction], ids=repr)
def test_edges(case: Case, world_size: int) -> None:
    method = case.method
    # A single worker has no share of its own to begin or to end.
    for numel in (0, 1, 79, 80, 81, 4095, 4097) if world_size > 1 else (0, 1, 81, 4097):
        zero, constant = torch.zeros(world_size, numel), torch.full((world_size, numel), 0.25)
        assert torch.equal(gw.simulate(zero, method).mean, zero[0])
        if case.constants:
            # Every entry is at the scale.
            assert torch.equal(gw.simulate(constant, method).mean, constant[0])
    tiny = torch.full((world_size, 100), 1e-42)
    assert bool(torch.isfinite(gw.simulate(tiny, method).mean).all())
    # Of sums over rounds the range ends at 2^40; see link/test_spikes.py.
    largest = 2.0**40 if adds_up(method) else 1e36 if case.amplifies else 1e38
    huge = torch.full((world_size, 100), largest)
    if method.name != "fp16":
        assert bool(torch.isfinite(gw.simulate(huge, method).mean).all())
    shapes = [{"a": torch.ones(3, 5), "b": torch.ones(()), "c": torch.ones(2, 0)} for _ in range(world_size)]
    mean = gw.simulate(shapes, method).mean
    assert {n: tuple(t.shape) for n, t in mean.items()} == {"a": (3, 5), "b": (), "c": (2, 0)}
    if case.constants:
        assert torch.equal(mean["a"], torch.ones(3, 5))


def test_simulate_takes_any_memory_order_and_refuses_other_shapes() -> None:
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    workers = [{"w": x.to(memory_format=torch.channels_last)}, {"w": x}]
    assert torch.equal(gw.simulate(workers, "fp32").mean["w"], x)
    gaps = torch.arange(60.0).view(6, 10).t()[:5]
    assert torch.equal(gw.simulate([{"w": gaps}, {"w": gaps}], "fp32").mean["w"], gaps)
    with pytest.raises(gw.IncompatibleError, match="different shapes"):
        gw.simulate([{"w": torch.ones(2, 3)}, {"w": torch.ones(3, 2)}], "fp32")
    with pytest.raises(gw.HyperparameterError, match="unknown option 'lane'"):
        gw.SimulatedLink([("w", x)], "fp32", 2, lane=3)


@pytest.mark.parametrize("method", ALL, ids=repr)
def test_half_precision_input(method: gw.Method) -> None:
    g = gradients(3, 500, tail=0).bfloat16()
    workers = [{"w": row} for row in g]
    mean = gw.simulate(workers, method).mean["w"]
    assert mean.dtype == torch.bfloat16
    assert float((mean.float() - g.float().mean(0)).norm()) < 3 * float(g.float().norm())


@settings(max_examples=30)
@pytest.mark.timeout(600)  # as many examples as methods
@given(
    st.sampled_from([m for m in COMPRESSORS if not hasattr(m, "fit")]),
    st.lists(st.integers(1, 700), min_size=1, max_size=5),
    st.integers(1, 6),
    st.permutations(range(5)),
    st.integers(1, 500),
    st.sampled_from(["reference", "cpu", "cpu-plain"]),
)
def test_bit_stable_methods_do_not_depend_on_layout(
    method: gw.Method, sizes: list[int], world_size: int, order: list[int], chunk_numel: int, backend: str
) -> None:
    """Parameters in another order, other chunks, another backend: the same bits for each parameter."""
    generator = torch.Generator().manual_seed(sum(sizes))
    grads = [{f"p{i}": torch.randn(n, generator=generator) for i, n in enumerate(sizes)} for _ in range(world_size)]

    def exchange(names: list[str], **options: object) -> dict[str, torch.Tensor]:
        like = [(n, torch.empty_like(grads[0][n], requires_grad=True)) for n in names]
        link = gw.SimulatedLink(like, method, world_size, min_numel=100, **options)
        mean = link.reduce_(torch.stack([torch.cat([g[n] for n in names]) for g in grads]))
        return dict(zip(names, mean.split([grads[0][n].numel() for n in names])))

    names = list(grads[0])
    # Where blocks cross parameters, their order is part of what is computed.
    shuffled = names if method.traits.joined else [names[i] for i in order if i < len(names)]
    first = exchange(names, backend="reference")
    second = exchange(shuffled, chunk_numel=chunk_numel, backend=backend)
    for name in names:
        assert torch.equal(first[name], second[name])


@pytest.mark.parametrize(
    ("case", "world_size"),
    crossed([c for c in ALL_CASES if not c.coded], (2, 4), (8,))
    + [(case, 64) for case in widening(ALL_CASES) if not case.coded],
    ids=repr,
)
def test_declared_bits(case: Case, world_size: int) -> None:
    """Measured bytes against the formula of the method, on a million elements, headers included."""
    # Among many ranks whole shares of every codec, and enough for headers to be less than a twentieth.
    few = 122_880 * max(1, math.ceil(8 / case.bits(world_size)))
    numel, slack = 1_000_000 if world_size < 64 else few, 0.0
    if case.cycle > 1:
        numel = {4: min(case.cycle, 16) * 1_000_000, 64: 983_040}.get(world_size, numel)
        # Little is sent: to each rank two headers, and two shares that are rounded up by at most seven groups of 80
        # elements, with 16/3 bits or 16.
        slack = (world_size - 1) * (2 * 16 + 560 * (16 / 3 + 16) / 8)
    # Each way a share is rounded up to whole blocks.
    slack += 2 * (world_size - 1) * case.grain * case.method.properties.bits_per_element / 8
    link, g = gw.SimulatedLink([("0", torch.empty(numel))], case.method, world_size, min_numel=0), torch.empty(0)
    # What a method with a memory exchanges once, at the start, is no part of a step's bytes.
    rounds, sent = 1 if case.method.properties.state == "none" else 2, 0
    for _ in range(rounds):
        g = torch.ones(world_size, numel, out=g)
        link.reduce_(g)
        sent = link.traffic().sent_bytes - sent
    expected = case.bits(world_size) * numel / 8
    assert sent == pytest.approx(expected, rel=0, abs=slack + expected * (0.01 if world_size < 64 else 0.05))
    assert link.traffic().received_bytes == link.traffic().sent_bytes
    assert link.traffic().elements == rounds * numel
    if world_size == 4 and case.vectors and is_first(case):
        scale = 32 / (8 * numel * 3 / 4)
        bits = case.method.properties.bits_per_element
        assert sent * scale == pytest.approx(bits, rel=0, abs=slack * scale + 0.01 * bits)
