"""A reduce-scatter gives every rank its rows of what an all-gather gives to all, bit for bit, and sends less."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import gradwire as gw
from contributions import contributed
from gradwire.exchange.drivers import Meter, dry_run, simulate_ranks
from gradwire.exchange.planning import Options, Planner
from gradwire.exchange.protocols import Context, Memory, Outcome
from gradwire.exchange.protocols.division import row_shards
from gradwire.exchange.segments import Parameter, lay_out, rows_of_rank
from gradwire.kernels import get_kernels

SHAPES = {"a": (37, 61), "b": (5,), "c": (3, 700), "d": (2200,), "e": (1, 1500), "f": (64, 64)}
"""Rows that no number of ranks divides, fewer rows than ranks, and a parameter that travels in float32."""

SPECS = [
    "terngrad",
    "TernGrad(clip=None)",
    "qsgd",
    "QSGDinf(block_size=None)",
    "EDEN(bits=4, block_size=256)",
    "EDEN(bits=4)",
    "quic_fl",
    "natural",
    "scaledsign",
    "TopK(density=0.05)",
    "lattice",
    "Coded(compressor=TernGrad(), coder='huffman')",
]


def gradients(world_size: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [{n: torch.randn(s, generator=generator) for n, s in SHAPES.items()} for _ in range(world_size)]


def flatten(gradient: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([g.reshape(-1) for g in gradient.values()])


def own_runs(rank: int, world_size: int) -> list[tuple[int, int]]:
    found, at = [], 0
    for name, shape in SHAPES.items():
        p = Parameter.of(name, torch.empty(shape))
        begin, end = rows_of_rank(p, rank, world_size)
        found.append((at + begin, at + end))
        at += p.numel
    return found


def gathered(spec: str, workers: Sequence[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, Any]:
    """Return the mean over workers by an all-gather, and what it leaves."""
    link = gw.SimulatedLink(list(workers[0].items()), spec, len(workers), collective="all_gather")
    return link.reduce_(torch.stack([flatten(worker) for worker in workers])), link.state_dict()


def scatter(
    spec: str, workers: Sequence[dict[str, torch.Tensor]], memories: Sequence[Memory] | None = None, **options: Any
) -> tuple[list[torch.Tensor], list[Outcome], list[Meter]]:
    """Return what each rank's vector holds afterwards, its outcome, and its bytes."""
    world_size = len(workers)
    given = Options(collective="reduce_scatter", **options)
    planner = Planner(gw.method(spec), workers[0], world_size, given)
    plan = planner.plan(list(SHAPES), 0)
    flats = [flatten(worker) for worker in workers]
    kept = memories or [Memory() for _ in workers]
    contexts = [Context(r, world_size, 0, memory=kept[r]) for r in range(world_size)]
    meters = [Meter(r) for r in range(world_size)]
    outcomes = simulate_ranks([plan.whole(c, f) for c, f in zip(contexts, flats)], meters)
    for memory in kept:
        memory.commit()
    return flats, outcomes, meters


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("spec", SPECS)
def test_each_rank_has_its_rows_of_the_gathered_mean(spec: str, world_size: int) -> None:
    workers = gradients(world_size)
    whole, _ = gathered(spec, workers)
    flats, outcomes, _ = scatter(spec, workers)
    for rank, flat in enumerate(flats):
        for begin, end in own_runs(rank, world_size):
            assert torch.equal(flat[begin:end], whole[begin:end]), (rank, begin)
    assert all(outcome.finite for outcome in outcomes)


@pytest.mark.parametrize("spec", ["EDEN(bits=4)", "qsgd", "terngrad"])
def test_chunks_change_no_bit(spec: str) -> None:
    workers = gradients(3)
    whole, cut = scatter(spec, workers)[0], scatter(spec, workers, chunk_numel=800)[0]
    for rank in range(3):
        for begin, end in own_runs(rank, 3):
            assert torch.equal(whole[rank][begin:end], cut[rank][begin:end])


@pytest.mark.parametrize("spec", ["errorfeedback", "ErrorFeedback(TopK(density=0.05))", "ef_signsgd", "onebit"])
def test_residuals_are_those_of_the_gathered_exchange(spec: str) -> None:
    """Blocks that two shards share are encoded for both owners, and count once in what was sent."""
    workers, memories = gradients(4), [Memory() for _ in range(4)]
    _, state = gathered(spec, workers)
    scatter(spec, workers, memories)
    for rank, memory in enumerate(memories):
        kept = memory.state()["rank"]
        assert any(key.startswith("residual/") for key in kept)
        for key, value in kept.items():
            assert torch.equal(value, state[f"rank {rank}"][key]), key


@pytest.mark.parametrize("spec", [*SPECS, "fp32", "bf16", "errorfeedback"])
def test_each_rank_has_its_rows_of_the_mean_of_what_ranks_say_they_sent(spec: str) -> None:
    workers = gradients(4)
    plan = Planner(gw.method(spec), workers[0], 4, Options(collective="reduce_scatter", chunk_numel=800)).plan(
        [*SHAPES], 0
    )
    flats = torch.stack([flatten(worker) for worker in workers])
    mean = contributed(plan, flats, [Memory() for _ in workers]).mean(0)
    for rank, flat in enumerate(flats):
        for begin, end in own_runs(rank, 4):
            # Sums of four values below eight in float32; the mean of casts is rounded to eight bits once more.
            assert torch.allclose(flat[begin:end], mean[begin:end], rtol=0, atol=2**-6 if spec == "bf16" else 1e-5)


@pytest.mark.parametrize("spec", SPECS)
def test_the_dry_run_counts_what_is_sent(spec: str) -> None:
    workers = gradients(4)
    *_, meters = scatter(spec, workers)
    planner = Planner(gw.method(spec), workers[0], 4, Options(collective="reduce_scatter"))
    counted = planner.counted(list(SHAPES)).sent_bytes
    variable = "Coded" in spec or "TopK" in spec
    for meter in meters:
        assert meter.sent_bytes <= counted if variable else meter.sent_bytes == counted


def test_what_is_saved_depends_on_what_is_encoded_together() -> None:
    """Small blocks of a small parameter belong to one owner, large ones to several; what chooses among all, to all."""
    like = {"w": torch.randn(64, 40)}

    def sent(spec: str, collective: str) -> int:
        return Planner(gw.method(spec), like, 4, Options(collective=collective)).counted(["w"]).sent_bytes

    small, large = (f"EDEN(bits=4, block_size={size})" for size in (256, 4096))
    assert sent(small, "reduce_scatter") < 0.5 * sent(large, "reduce_scatter")
    few = "TopK(density=0.05)"
    assert 0 <= sent(few, "reduce_scatter") - sent(few, "all_gather") <= 3 * 12


def test_it_sends_less_than_half_of_what_a_mean_for_all_takes() -> None:
    """Large blocks of large parameters: the way up of two-shot alone, and what shards have in common."""
    workers = [{"w": torch.randn(512, 512, generator=torch.Generator().manual_seed(r))} for r in range(4)]
    bytes_of = {}
    for collective in ("reduce_scatter", "two_shot"):
        planner = Planner(gw.method("EDEN(bits=4)"), workers[0], 4, Options(collective=collective))
        bytes_of[collective] = planner.counted(["w"]).sent_bytes
    assert bytes_of["reduce_scatter"] <= 0.51 * bytes_of["two_shot"]


@pytest.mark.parametrize("spec", ["fp32", "bf16", "fp16"])
def test_casts_are_added_up_in_float32(spec: str) -> None:
    workers = gradients(4)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[spec]
    total = sum(flatten(w).to(dtype).float() * 0.25 for w in workers)
    flats, _, meters = scatter(spec, workers)
    for rank, flat in enumerate(flats):
        for begin, end in own_runs(rank, 4):
            assert torch.equal(flat[begin:end], total[begin:end].to(dtype).float())  # type: ignore[index]
    longest = max(sum(end - begin for begin, end in own_runs(rank, 4)) for rank in range(4))
    # Shards of a parameter begin and end at a multiple of 80. Sixteen values are a unit; beside them a header, and what
    # tells whether the mean is finite.
    wide = 0 if spec == "fp32" else 2 * 79 * len(SHAPES)
    assert 0 < meters[0].sent_bytes - 3 * longest * dtype.itemsize <= 3 * ((15 + wide) * dtype.itemsize + 64 + 12)


def test_warm_up_travels_in_float32() -> None:
    workers = gradients(3)
    dense, exact = scatter("terngrad", workers, warmup_steps=1)[0], scatter("fp32", workers)[0]
    for rank in range(3):
        for begin, end in own_runs(rank, 3):
            assert torch.equal(dense[rank][begin:end], exact[rank][begin:end])


@pytest.mark.parametrize("spec", ["terngrad", "qsgd", "EDEN(bits=4, block_size=256)", "bf16", "errorfeedback"])
@pytest.mark.parametrize("where", [("a", 0, 1), ("c", 2, 699), ("b", 4, 0)])
def test_what_is_not_finite_on_one_shard_is_told_to_all(spec: str, where: tuple[str, int, int]) -> None:
    workers = gradients(4)
    name, row, column = where
    workers[2][name].view(SHAPES[name][0], -1)[row, column] = torch.inf
    flats, outcomes, _ = scatter(spec, workers)
    assert [outcome.finite for outcome in outcomes] == [False] * 4
    owner = next(r for r in range(4) if _owns(name, row, r))
    assert not all(bool(torch.isfinite(flats[owner][a:b]).all()) for a, b in own_runs(owner, 4))


def _owns(name: str, row: int, rank: int) -> bool:
    p = Parameter.of(name, torch.empty(SHAPES[name]))
    begin, end = rows_of_rank(p, rank, 4)
    return begin <= row * (p.numel // SHAPES[name][0]) < end


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_rows_are_those_of_chunks(ranks: int) -> None:
    for name, shape in SHAPES.items():
        p = Parameter.of(name, torch.empty(shape))
        chunks = torch.arange(p.numel).view(shape).chunk(ranks)
        for rank in range(ranks):
            begin, end = rows_of_rank(p, rank, ranks)
            expected = chunks[rank].reshape(-1).tolist() if rank < len(chunks) else []
            assert list(range(begin, end)) == expected, (name, rank)


@pytest.mark.parametrize("grain", [1, 80, 512])
def test_shards_cover_their_rows_and_end_on_the_grain(grain: int) -> None:
    segments = lay_out(Parameter.of(n, torch.empty(s)) for n, s in SHAPES.items())
    for rank, pieces in enumerate(row_shards([(s, (0, i)) for i, s in enumerate(segments)], 4, grain)):
        for piece, (_, index) in pieces:
            whole = segments[index]
            begin, end = rows_of_rank(piece.parameter, rank, 4)
            assert piece.start <= begin
            assert end <= piece.start + piece.numel
            assert begin - piece.start < grain
            assert piece.start % grain == 0
            assert (piece.start + piece.numel) % grain == 0 or piece.numel + piece.start == whole.numel
            assert piece.offset - whole.offset == piece.start


def test_what_cannot_be_scattered_is_refused_by_name() -> None:
    parameters = gradients(1)[0]
    for spec in ("diana", "ef21", "powersgd", "signum", "alq", "cat", "diloco", "rotated", "randk"):
        with pytest.raises(gw.IncompatibleError, match="cannot travel by a reduce-scatter"):
            Planner(gw.method(spec), parameters, 4, Options(collective="reduce_scatter"))
    with pytest.raises(gw.IncompatibleError, match="check=True"):
        Planner(gw.method("qsgd"), parameters, 4, Options(collective="reduce_scatter", check=True))
    with pytest.raises(gw.IncompatibleError, match="a simulation needs all of it"):
        gw.SimulatedLink([("w", torch.zeros(10))], "qsgd", 2, collective="reduce_scatter")


@pytest.mark.repository
def test_the_page_names_each_method_that_can_be_scattered_and_each_that_cannot() -> None:
    page = (Path(__file__).parents[2] / "docs" / "fsdp.md").read_text()
    rows = [re.search(rf"^\| {head} \| (.*) \|$", page, re.MULTILINE) for head in ("methods", "refused.*?")]
    served, refused = (set(re.findall(r"`(\w+)`", row[1])) for row in rows if row is not None)
    traits = {name: gw.method(name).traits for name in gw.methods()}
    assert served == {name for name, its in traits.items() if its.scatters}
    others = {name for name, its in traits.items() if its.whole_step or its.local_steps}
    assert refused == traits.keys() - served - others


def test_kernels_of_size_alone_serve_the_plan() -> None:
    """What refuses a method before a step has neither data nor kernels."""
    planner = Planner(gw.method("qsgd"), gradients(1)[0], 4, Options(collective="reduce_scatter"))
    planner.check()
    plan = planner._build(tuple(SHAPES), False, "reduce_scatter", get_kernels("meta"))
    assert dry_run(plan, sum(p.numel for p in planner.parameters.values()), 4).sent_bytes > 0
