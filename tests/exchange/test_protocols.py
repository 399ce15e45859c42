"""Protocols without a group: exact bytes, exact order, hostile payloads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import gradwire as gw
from cases import ALL, ALL_CASES, COMPRESSORS
from contributions import contributed
from gradwire.exchange.drivers import Meter, dry_run, simulate_ranks
from gradwire.exchange.ops import AllGather, AllToAll, Reduce
from gradwire.exchange.protocols import Context, Memory
from gradwire.exchange.protocols.division import cut
from gradwire.exchange.segments import Parameter, Segment, flat_view, lay_out
from gradwire.exchange.wire import HEADER_BYTES, pretend_senders
from gradwire.kernels import get_kernels
from plans import make_plan

SHAPES = ((3000,), (5,), (81,), (70, 100), (160,))
SIZES = tuple(math.prod(shape) for shape in SHAPES)


def plan_segments() -> list[Segment]:
    parameters = [Parameter.of(f"p{i}", torch.empty(shape)) for i, shape in enumerate(SHAPES)]
    return [Segment(s.parameter, s.offset, s.start, s.numel, s.numel < 100) for s in lay_out(parameters)]


def plan_for(method: gw.Method, world_size: int, collective: str, backend: str = "cpu", **options: Any) -> Any:
    if method.traits.open_coders:
        method = method.with_coder(method.traits.open_coders[0])
    segments = plan_segments()
    defaults: dict[str, Any] = {"seed": 0, "chunk_numel": 1 << 20}
    kernels = get_kernels(backend)
    return make_plan(
        method, segments, kernels=kernels, world_size=world_size, collective=collective, **(defaults | options)
    )


# A pair, odd numbers of workers and even ones, several chunks and one: each chunk is divided as if it were alone. Sums
# of more workers are counted in test_declared_bits. In rounds of warm-up all methods send float32.
VARYING = [case.method for case in ALL_CASES if case.coded]

SETTINGS = [(2, 3000, False), (5, 3000, False), (4, 1 << 20, False), (3, 3000, True)]


@pytest.mark.parametrize(("world_size", "chunk_numel", "warm_up"), SETTINGS)
@pytest.mark.parametrize(("method", "collective"), [(m, c) for m in ALL for c in m.traits.collectives], ids=repr)
def test_the_dry_run_is_exact(
    method: gw.Method, collective: str, world_size: int, chunk_numel: int, warm_up: bool
) -> None:
    options = {"chunk_numel": chunk_numel, "warm_up": warm_up}
    sized = plan_for(method, world_size, collective, "meta", **options)
    # Ranks differ in what they send of a broadcast, and along a tree.
    predicted = [dry_run(sized, sum(SIZES), world_size, round=1, rank=rank) for rank in range(world_size)]
    plan = plan_for(method, world_size, collective, **options)
    memories = [Memory() for _ in range(world_size)]
    # Twice with a memory: what is exchanged once, at the start, is no part of a usual round.
    for round in (0, 1) if method.properties.state != "none" else (1,):
        meters = [Meter(rank) for rank in range(world_size)]
        rows = torch.randn(world_size, sum(SIZES), generator=torch.Generator().manual_seed(round))
        contexts = [Context(r, world_size, round, memory=memory) for r, memory in enumerate(memories)]
        simulate_ranks([plan.whole(c, g) for c, g in zip(contexts, rows)], meters)
        for memory in memories:
            memory.commit()
    if method in VARYING and not warm_up:
        # Of lengths that depend on the data it counts the most that there may be.
        assert all(m.sent_bytes <= p.sent_bytes for m, p in zip(meters, predicted))
    else:
        assert [m.sent_bytes for m in meters] == [p.sent_bytes for p in predicted]
        assert [m.received_bytes for m in meters] == [p.received_bytes for p in predicted]
    assert all(torch.equal(rows[0], row) for row in rows)


@pytest.mark.parametrize("chunk_numel", [1 << 20, 1000])
@pytest.mark.parametrize(("method", "collective"), [(m, c) for m in ALL for c in m.traits.collectives], ids=repr)
def test_the_outcome_is_the_mean_of_what_ranks_say_they_sent(
    method: gw.Method, collective: str, chunk_numel: int
) -> None:
    """Also of dense segments, of a scaled loss, and in rounds that remember others; diagnostics and error feedback rest
    on it.

    But for the error of an owner who encodes the mean once more, which is nobody's, and for directions.
    """
    plan, scale = plan_for(method, 3, collective, chunk_numel=chunk_numel), 4.0
    memories, dense = [Memory() for _ in range(3)], torch.zeros(sum(SIZES), dtype=torch.bool)
    for segment in plan_segments():
        dense[segment.offset : segment.offset + segment.numel] = segment.dense
    for round in range(3 if method.properties.state != "none" else 1):
        g = scale * torch.randn(3, sum(SIZES), generator=torch.Generator().manual_seed(1 + round))
        rows = g.clone()
        sent = contributed(plan, rows, memories, round, scale)
        if method.traits.direction:
            continue
        # Sums of a few values in float32; casts sum in their own type: two roundings of sums up to four in 8 or 11
        # bits. Coded ones round the mean once more.
        inner = method.compressor if isinstance(method, gw.Coded) else method
        precision = scale * {"bf16": 2**-5, "fp16": 2**-8}.get(inner.name, 1e-5)
        # A selection that is fed back is what a rank had to send, not what its code or a curve is read as.
        selection = isinstance(method, gw.LGC | gw.RankCurve) and method.feedback == "selection" and round > 0
        if not (selection or (method.traits.re_encoding and collective == "two_shot")):
            assert torch.allclose(sent.mean(0), rows[0], rtol=1e-5, atol=precision), round
        if round == 0:
            # Of a momentum that starts from zero, Nesterov's form looks ahead.
            factor = 1 + method.momentum if isinstance(method, gw.DGC) and method.nesterov else 1.0
            assert torch.allclose(sent[:, dense], factor * g[:, dense], rtol=0, atol=precision)


@pytest.mark.parametrize("collective", ["two_shot", "all_gather"])
def test_dense_segments_are_the_mean_in_the_order_of_ranks(collective: str) -> None:
    g = torch.randn(3, sum(SIZES), generator=torch.Generator().manual_seed(1))
    rows = g.clone()
    plan = plan_for(gw.TernGrad(), 3, collective)
    simulate_ranks([plan.whole(Context(r, 3, 0), row) for r, row in enumerate(rows)], [Meter()] * 3)
    third = torch.tensor(1 / 3)
    expected = (g[0] * third + g[1] * third) + g[2] * third
    assert torch.equal(rows[0][3000:3086], expected[3000:3086])
    assert not torch.equal(rows[0][:3000], expected[:3000])


@pytest.mark.parametrize("method", COMPRESSORS, ids=repr)
def test_another_protocol_gives_the_same_bits(method: gw.Method) -> None:
    """But where a method names a usual one, because they differ: there every rank still has the same bits."""
    found = []
    for collective in method.traits.collectives:
        rows = torch.randn(4, sum(SIZES), generator=torch.Generator().manual_seed(2))
        plan = plan_for(method, 4, collective, chunk_numel=1000)
        simulate_ranks([plan.whole(Context(r, 4, 3), row) for r, row in enumerate(rows)], [Meter()] * 4)
        found.append(rows[0].clone())
        assert all(torch.equal(rows[0], row) for row in rows)
    assert all(torch.equal(found[0], f) for f in found[1:]) == (method.usual_collective(4) is None)


def test_auto_takes_the_fewest_bytes() -> None:
    for world_size in (2, 3, 4, 8):
        like = [("w", torch.empty(50_000, requires_grad=True))]
        sent = {}
        for collective in ("auto", "two_shot", "all_gather"):
            link = gw.SimulatedLink(like, "terngrad", world_size, collective=collective)
            link.reduce_(torch.ones(world_size, 50_000))
            sent[collective] = link.traffic().sent_bytes
        assert sent["auto"] == min(sent["two_shot"], sent["all_gather"])
        assert (sent["two_shot"] < sent["all_gather"]) == (world_size > 2)


@pytest.mark.parametrize(
    "spec",
    ["terngrad", "TernGrad(share_scaler=False)", "signsgd", "QSGDMaxNorm(levels=1)", "MultiScale(levels=(1, 2))"],
)
def test_integers_add_up_in_a_width_that_fits_or_are_refused_when_attached(spec: str) -> None:
    """At any number of workers: exact at 300 (beyond a byte), planned for up to 32767, refused with the limit above."""
    method = gw.method(spec)
    if spec != "TernGrad(share_scaler=False)":
        g = torch.ones(300, 200)
        g[:140, ::2] = -1.0
        total = g.sum(0) if not method.traits.direction else 300 * g.sum(0).sign()
        for collective in method.traits.collectives:
            link = gw.SimulatedLink([("w", torch.empty(200))], method, 300, collective=collective, min_numel=0)
            assert torch.equal((link.reduce_(g.clone()) * 300).round(), total)
    for collective in method.traits.collectives:
        plan_for(method, 32767, collective, "meta")
        with pytest.raises(gw.IncompatibleError, match=r"32768 workers .*need more than 16 bits.*at most"):
            plan_for(method, 32768, collective, "meta")


# ---------------------------------------------------------------------- hostile payloads


def from_its_like(op: Any) -> torch.Tensor:
    """Return what would arrive at rank 0 of three if the others sent what it sends itself."""
    rows = (op.send[0] if isinstance(op, AllToAll) else op.send).expand(3, -1).clone()
    pretend_senders(rows)
    return rows


@pytest.mark.parametrize("collective", ["two_shot", "all_gather"])
@pytest.mark.parametrize("damage", ["header", "round", "version", "short", "long", "body", "swapped", "zeros"])
def test_a_damaged_payload_is_an_error_and_decodes_nothing(collective: str, damage: str) -> None:
    plan = plan_for(gw.TernGrad(), 3, collective)
    flat = torch.randn(sum(SIZES))
    before = flat.clone()
    generator = plan.whole(Context(0, 3, 0), flat)
    op = next(generator)
    assert isinstance(op, Reduce)
    rows = from_its_like(generator.send(op.value))
    if damage == "header":
        rows[1, 0] ^= 0xFF
    elif damage == "round":
        rows[2, 4] += 1
    elif damage == "version":
        rows[1, 2] = 99
    elif damage == "short":
        rows = rows[:, :-16]
    elif damage == "long":
        rows = torch.cat([rows, rows], dim=1)
    elif damage == "body":
        rows[1, 40] ^= 1
    elif damage == "swapped":
        rows = rows[[0, 2, 1]]
    else:
        rows.zero_()
    with pytest.raises(gw.PayloadError, match="bucket 0, chunk 0, round 0"):
        generator.send(rows)
    assert torch.equal(flat, before)


def test_bytes_that_no_encoder_writes_stay_in_bounds() -> None:
    """A body of 0xFF, sealed as it is: values are unspecified, memory is safe, other parameters intact."""
    plan = plan_for(gw.TernGrad(), 3, "two_shot")
    flat = torch.randn(sum(SIZES))
    generator = plan.whole(Context(0, 3, 0), flat)
    rows = from_its_like(generator.send(next(generator).value))
    rows[:, HEADER_BYTES : HEADER_BYTES + 64] = 0xFF
    pretend_senders(rows)
    op = generator.send(rows)
    assert isinstance(op, AllGather)
    gathered = from_its_like(op)
    gathered[:, HEADER_BYTES : HEADER_BYTES + 64] = 0xFF
    pretend_senders(gathered)
    with pytest.raises(StopIteration):
        generator.send(gathered)
    assert bool(torch.isfinite(flat).all())


def test_ranks_that_disagree_are_an_error_in_simulation() -> None:
    def one() -> Any:
        yield Reduce(torch.ones(3), "sum")

    def other() -> Any:
        yield Reduce(torch.ones(4), "sum")

    def none() -> Any:
        return
        yield

    for pair in ((one, other), (one, none)):
        with pytest.raises(gw.ExchangeError, match="different operations"):
            simulate_ranks([f() for f in pair], [Meter(), Meter()])


# ---------------------------------------------------------------------- cutting


@pytest.mark.parametrize("chunk_numel", [1, 80, 81, 1000, 5000, 1 << 20])
def test_cut_covers_every_element_once(chunk_numel: int) -> None:
    segments = lay_out(Parameter(f"p{i}", (n,), (1,)) for i, n in enumerate(SIZES))
    chunks = cut(segments, chunk_numel, 80)
    seen = []
    for chunk in chunks:
        assert chunk
        assert sum(p.numel for p, _ in chunk) <= max(80, -(-chunk_numel // 80) * 80)
        for piece, whole in chunk:
            assert piece.start % 80 == 0
            assert piece.offset - piece.start == whole.offset
            seen += range(piece.offset, piece.offset + piece.numel)
    assert seen == list(range(sum(SIZES)))


def test_flat_view_is_memory_order() -> None:
    t = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    assert torch.equal(flat_view(t), t.permute(0, 2, 3, 1).reshape(-1))
    assert flat_view(t).data_ptr() == t.data_ptr()
    assert flat_view(t[:, :2]).numel() == 200
    assert flat_view(torch.tensor(3.0)).shape == (1,)
