"""An entropy coder on a payload: the same bits out, as few on the wire as their entropy, damage never silent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradwire as gw
from cases import EVERY
from gradwire.errors import HyperparameterError, IncompatibleError, PayloadError
from gradwire.exchange.codecs import Draw
from gradwire.exchange.drivers import Meter, simulate_ranks
from gradwire.exchange.ops import AllGather, AllToAll, Reduce
from gradwire.exchange.planning import planner
from gradwire.exchange.protocols import Context, Memory
from gradwire.exchange.segments import Parameter, Segment, lay_out
from gradwire.exchange.wire import pretend_senders
from gradwire.kernels import CODERS, get_kernels
from plans import make_plan

INNER = [
    "TernGrad()",
    "TernGrad(clip=None)",
    "TernGrad(share_scaler=False)",
    "QSGD()",
    "QSGDinf()",
    "QSGDinf(levels=127)",
    "QSGDinf(levels=1, block_size=64, blocks='model')",
    "NUQSGD(zero=False)",
    "ALQ()",
    "Natural()",
    "EDEN(bits=1, spacing='uniform')",
    "EDEN(bits=0.5)",
    "ErrorFeedback(compressor=TopK(density=0.1))",
    "GTopK(density=0.1)",
    "ErrorFeedback()",
    "ErrorFeedback(compressor=Natural())",
    "DIANA()",
]
SIZES = (3000, 5, 81, 7000, 160)


@pytest.mark.parametrize("coder", ["rans", "huffman"])
@pytest.mark.parametrize("inner", INNER)
def test_the_outcome_is_the_methods_own(inner: str, coder: str) -> None:
    names = [f"p{i}" for i in range(len(SIZES))]
    for world_size in (2, 5):
        links = []
        for spec in (inner, f"Coded(compressor={inner}, coder={coder!r})"):
            like = [(n, torch.empty(k)) for n, k in zip(names, SIZES)]
            links.append(gw.SimulatedLink(like, spec, world_size, min_numel=100, chunk_numel=4000))
        for round in range(3):
            g = torch.randn(world_size, sum(SIZES), generator=torch.Generator().manual_seed(round))
            plain, coded = (link.reduce_(g.clone()) for link in links)
            assert torch.equal(plain, coded)


@pytest.mark.parametrize("levels", [2, 3, 5])
def test_shares_of_shared_levels_are_whole_words_of_the_coders_digits(levels: int) -> None:
    """A word of the coder holds other numbers of digits than a word without it: 3 rather than 13 of base 5."""
    inner = f"QSGDMaxNorm(levels={levels})"
    for world_size in (2, 3):
        for numel in (500, 4097):
            g = torch.randn(world_size, numel, generator=torch.Generator().manual_seed(numel))
            like = [("p", torch.empty(numel))]
            plain, coded = (
                gw.SimulatedLink(like, spec, world_size, min_numel=0, collective="two_shot").reduce_(g.clone())
                for spec in (inner, f"Coded({inner})")
            )
            assert torch.equal(plain, coded), (world_size, numel)


def entropy(probabilities: torch.Tensor) -> float:
    p = probabilities[probabilities > 0].double()
    return float(-(p * p.log2()).sum())


@pytest.mark.parametrize(("clip", "expected"), [(2.5, 1.22), (None, 0.82)])
def test_trits_take_their_entropy(clip: float | None, expected: float) -> None:
    """Two workers gather: a million trits each, every byte counted; within a percent of the empirical entropy."""
    g = torch.randn(2, 1_000_000, generator=torch.Generator().manual_seed(0))
    method = gw.TernGrad(clip=clip, share_scaler=False)
    sent = gw.simulate(g, gw.Coded(compressor=method, coder="rans")).traffic.sent_bytes
    alone = gw.simulate(g[:1], method).mean
    counts = torch.stack([(alone == 0).sum(), (alone > 0).sum(), (alone < 0).sum()])
    bound = entropy(counts / counts.sum())
    assert bound == pytest.approx(expected, abs=0.02)
    assert bound < 8 * sent / 1_000_000 < 1.01 * bound


def test_exponents_take_their_entropy() -> None:
    """And a bit for each sign, which stays as it is."""
    g = torch.randn(2, 1_000_000, generator=torch.Generator().manual_seed(0))
    sent = gw.simulate(g, gw.Coded(compressor=gw.Natural(), coder="rans")).traffic.sent_bytes
    exponents = gw.simulate(g[:1], gw.Natural()).mean.abs().log2().to(torch.int64)
    bound = entropy(exponents.unique(return_counts=True)[1] / 1_000_000)
    assert bound == pytest.approx(2.59, abs=0.02)
    assert 1 + bound < 8 * sent / 1_000_000 < 1 + 1.01 * bound


def test_incompressible_digits_cost_no_more_than_a_header() -> None:
    """Levels hit evenly: 255 code values for a ramp, stored as they are."""
    g = torch.linspace(-1, 1, 100_000).repeat(2, 1)
    method = gw.QSGDinf(levels=127, block_size=None)
    plain, coded = gw.simulate(g, method), gw.simulate(g, gw.Coded(compressor=method))
    assert coded.traffic.sent_bytes <= plain.traffic.sent_bytes + 100


def plan_for(method: gw.Method, collective: str) -> Any:
    parameters = [Parameter(f"p{i}", (n,), (1,)) for i, n in enumerate(SIZES)]
    segments = [Segment(s.parameter, s.offset, s.start, s.numel, s.numel < 100) for s in lay_out(parameters)]
    return make_plan(
        method, segments, kernels=get_kernels("cpu"), world_size=3, collective=collective, seed=0, chunk_numel=1 << 20
    )


def first_rows(generator: Any) -> tuple[Any, torch.Tensor]:
    """Go to the first payload; give the operation and three rows as they would arrive."""
    op = next(generator)
    if isinstance(op, Reduce):
        op = generator.send(op.value)
    assert isinstance(op, AllToAll | AllGather)
    assert op.lengths is not None
    assert int(op.lengths[0]) == 0
    rows = (op.send[0] if isinstance(op, AllToAll) else op.send).expand(3, -1).clone()
    pretend_senders(rows)
    return op, rows


@settings(max_examples=150)
@given(
    st.sampled_from(["two_shot", "all_gather"]),
    st.integers(0, 2),
    st.floats(0, 1),
    st.integers(1, 255),
    st.sampled_from(["flip", "length", "zero"]),
)
def test_damage_is_an_error_and_decodes_nothing(
    collective: str, sender: int, place: float, change: int, kind: str
) -> None:
    """Any byte that was sent, changed in any way, in any section: the round fails, the gradient is untouched."""
    method = gw.Coded(compressor=gw.TernGrad(), coder="rans")
    flat = torch.randn(sum(SIZES), generator=torch.Generator().manual_seed(1))
    before = flat.clone()
    generator = plan_for(method, collective).whole(Context(0, 3, 0), flat)
    _, rows = first_rows(generator)
    length = 32 + int.from_bytes(bytes(rows[sender, 12:16].tolist()), "little")
    if kind == "length":
        damaged = (length - 32 + change) & 0xFFFF
        rows[sender, 12:14] = torch.tensor([damaged & 255, damaged >> 8], dtype=torch.uint8)
    else:
        at = min(int(place * length), length - 1)
        old = int(rows[sender, at])
        rows[sender, at] = 0 if kind == "zero" and old else old ^ change
    with pytest.raises(PayloadError):
        generator.send(rows)
    assert torch.equal(flat, before)


def body_of(collective: str, change: Any) -> str:
    """Change rank 1's payload before it is sealed; return what rank 0 says of it."""
    # Few large values, so that the coded body is far below the most that it may take.
    flat = torch.randn(sum(SIZES), generator=torch.Generator().manual_seed(1)) ** 9
    generator = plan_for(gw.Coded(compressor=gw.TernGrad(clip=None), coder="huffman"), collective).whole(
        Context(0, 3, 0), flat
    )
    op, rows = first_rows(generator)
    length = 32 + int.from_bytes(bytes(rows[1, 12:16].tolist()), "little")
    first = int.from_bytes(bytes(rows[1, 32:36].tolist()), "little")
    room = torch.zeros(3, max(rows.shape[1], length + 64), dtype=torch.uint8)
    room[:, : rows.shape[1]] = rows
    op.arrived[1:] = length
    change(room[1], op.arrived, length, 48 + first)
    pretend_senders(room)
    with pytest.raises(PayloadError) as caught:
        generator.send(room)
    return str(caught.value)


def lengthen(row: torch.Tensor, arrived: torch.Tensor, by: int) -> None:
    size = int.from_bytes(bytes(row[12:16].tolist()), "little") + by
    row[12:16] = torch.frombuffer(bytearray(size.to_bytes(4, "little")), dtype=torch.uint8)
    arrived[1] += by


@pytest.mark.parametrize("collective", ["two_shot", "all_gather"])
def test_a_coded_body_that_no_encoder_writes_is_refused_though_its_checksum_is_right(collective: str) -> None:
    """Zeros behind a section and behind the table, bytes behind the last section, and the length announced before."""

    def behind_a_section(row: torch.Tensor, arrived: torch.Tensor, length: int, end: int) -> None:
        assert end % 16, "nothing lies behind this section: take other sizes"
        row[end] = 1

    def behind_the_table(row: torch.Tensor, arrived: torch.Tensor, length: int, end: int) -> None:
        row[47] = 1

    def trailing(row: torch.Tensor, arrived: torch.Tensor, length: int, end: int) -> None:
        row[length : length + 16] = 0
        lengthen(row, arrived, 16)

    def announced(row: torch.Tensor, arrived: torch.Tensor, length: int, end: int) -> None:
        arrived[1] += 16

    about = "payload from rank 1 for bucket 0, chunk 0, round 0: "
    assert body_of(collective, behind_a_section) == about + "a section is not followed by zeros"
    assert body_of(collective, behind_the_table) == about + "its table of lengths is not followed by zeros"
    assert body_of(collective, trailing) == about + "16 bytes too many"
    assert "bytes came where its header says" in body_of(collective, announced)


def test_bytes_on_the_wire_differ_by_rank_and_are_counted_as_sent() -> None:
    world_size = 3
    plan = plan_for(gw.Coded(compressor=gw.QSGDinf(), coder="rans"), "all_gather")
    meters = [Meter() for _ in range(world_size)]
    rows = torch.randn(world_size, sum(SIZES)) ** torch.tensor([[1], [3], [5]])
    memories = [Memory() for _ in range(world_size)]
    contexts = [Context(r, world_size, 0, memory=m) for r, m in enumerate(memories)]
    simulate_ranks([plan.whole(c, g) for c, g in zip(contexts, rows)], meters)
    sent = [m.sent_bytes for m in meters]
    assert len(set(sent)) == 3
    # What one sends to each of two others, the others receive.
    assert [m.received_bytes for m in meters] == [sum(s for i, s in enumerate(sent) if i != r) // 2 for r in range(3)]


def test_without_a_coder_settled_there_is_no_plan() -> None:
    with pytest.raises(IncompatibleError, match="settle on a coder first, one of rans, huffman"):
        plan_for(gw.Coded(), "two_shot")


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ("Coded(coder='zip')", "one of auto, rans, huffman"),
        ("Coded(compressor=DIANA(compressor=fp32))", "payload is its own"),
        ("Coded(compressor=Coded())", "payload is its own"),
        ("Coded(compressor=2)", "payload is its own"),
    ],
)
def test_what_cannot_be_coded_is_refused(spec: str, part: str) -> None:
    with pytest.raises(HyperparameterError, match=part):
        gw.method(spec)


@pytest.mark.parametrize(
    ("inner", "workers", "remedy"),
    [
        ("QSGDinf(levels=128)", 2, "at most 127 levels"),
        ("QSGD(levels=200)", 2, "at most 127 levels"),
        ("ErrorFeedback(compressor=QSGDinf(levels=128))", 2, "at most 127 levels"),
        ("TernGrad()", 200, "at most 127 workers"),
        ("SignSGD()", 2, "a method of digits, such as TernGrad"),
        ("ScaledSign()", 2, "a method of digits, such as TernGrad"),
    ],
)
def test_digits_beyond_a_byte_are_refused_when_the_link_is_built(inner: str, workers: int, remedy: str) -> None:
    with pytest.raises(IncompatibleError, match=remedy) as caught:
        gw.SimulatedLink([("w", torch.empty(2000))], f"Coded(compressor={inner})", workers)
    assert repr(gw.method(inner)) in str(caught.value)


FLOATS = [
    "PowerSGD()",
    "PowerSGD(values=BF16())",
    "ACPSGD()",
    "SketchedSGD()",
    "SketchedAMSGrad()",
    "AsyncServer(inner=PowerSGD())",
]


@pytest.mark.parametrize("coder", ["auto", "rans"])
@pytest.mark.parametrize("shape", [(40, 50), (2000,)])
@pytest.mark.parametrize("inner", FLOATS)
def test_a_payload_of_floats_is_refused_when_the_link_is_built(inner: str, shape: tuple[int, ...], coder: str) -> None:
    """Whatever the parameters are: also those of which no factors are sent."""
    with pytest.raises(IncompatibleError, match="made of floats, without digits or positions") as caught:
        gw.SimulatedLink([("w", torch.empty(shape))], f"Coded(compressor={inner}, coder={coder!r})", 2)
    assert repr(gw.method(inner)) in str(caught.value)


@pytest.mark.parametrize("coder", ["auto", "rans"])
def test_factors_of_signs_are_refused_before_the_first_round(coder: str) -> None:
    spec = f"Coded(compressor=PowerSGD(values=ScaledSign()), coder={coder!r})"
    with pytest.raises(IncompatibleError, match="no digits that an entropy coder could shorten") as caught:
        gw.SimulatedLink([("w", torch.empty(40, 50))], spec, 2)
    assert repr(gw.method(spec)) in str(caught.value)


def test_the_methods_refused_for_their_floats_are_those_that_give_a_coder_nothing() -> None:
    refused, silent = dict[gw.Method, str](), set[gw.Method]()
    for method in (method for method in EVERY if method.cast_dtype is None):
        try:
            coded = gw.Coded(compressor=method, coder="rans")
            payload = planner._payload(method, get_kernels("reference"))
        except (HyperparameterError, IncompatibleError):
            continue
        if payload is None:
            silent.add(method)
        try:
            gw.SimulatedLink([("w", torch.empty(64, 128))], coded, 2, min_numel=0)
        except IncompatibleError as error:
            refused[method] = str(error)
    assert refused.keys() == silent
    assert all("made of floats" in message for message in refused.values())
    assert {method.name for method in refused} == {"powersgd", "acp_sgd", "sketched_sgd", "sketched_amsgrad"}


@pytest.mark.parametrize("coder", ["auto", "rans", "huffman"])
@pytest.mark.parametrize(
    ("inner", "size"),
    [
        ("PowerSGD(matrix_rank=8, values=QSGDinf(levels=7, block_size=256))", 1024),
        ("ACPSGD(matrix_rank=8, values=QSGDinf(levels=3, block_size=256))", 1024),
        ("LGC(density=0.05, full_rounds=1, training_rounds=1)", 200),
        ("LGC(density=0.05, full_rounds=1, training_rounds=1, instance='parameter_server', innovation=0.02)", 200),
        ("RankCurve(density=0.05, full_rounds=1, training_rounds=1)", 200),
    ],
)
def test_factors_of_digits_and_methods_with_phases_are_coded(inner: str, size: int, coder: str) -> None:
    """Nothing of a vector or of the first phase is coded: bytes are those of the third round."""
    means, sent = [], []
    for spec in (inner, f"Coded(compressor={inner}, coder={coder!r})"):
        link = gw.SimulatedLink([("w", torch.empty(size, size))], spec, 2)
        for round in range(3):
            # The largest elements are in some rows, so that their positions can be coded.
            g = torch.randn(2, size, size, generator=torch.Generator().manual_seed(round))
            before = link.traffic().sent_bytes
            means.append(link.reduce_((g * torch.linspace(0, 1, size)[:, None] ** 8).view(2, -1)).clone())
        sent.append(link.traffic().sent_bytes - before)
    assert all(torch.equal(plain, coded) for plain, coded in zip(means[:3], means[3:]))
    assert sent[1] < sent[0]


@pytest.mark.parametrize("inner", ["LGC()", "LGC(instance='parameter_server')", "RankCurve()"])
def test_a_coder_is_settled_though_the_first_rounds_are_in_float32(inner: str) -> None:
    link = gw.SimulatedLink([("w", torch.empty(100, 100))], f"Coded(compressor={inner})", 2)
    found = link.record()["coder"]
    assert found["chosen"] in CODERS
    assert all(seconds > 0 for seconds in found["encode_decode_s"].values())


def test_a_reader_without_the_coder_refuses_coded_positions() -> None:
    g = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    g[:1500] *= 10
    segments = lay_out([Parameter("w", (20_000,), (1,))])
    plain, coded = (gw.TopK(density=0.1).codec(get_kernels("reference"), segments, 1, 0) for _ in range(2))
    coded.use_coder(get_kernels("reference").coder("huffman"))
    row = torch.zeros(coded.payload_bytes(coded.units), dtype=torch.uint8)
    coded.encode(g, coded.summarise(g), Draw(0, 0), row)
    assert int(row[12]) == 3
    found = torch.empty(20_000)
    coded.decode_rows(row[None], coded.summarise(g), found)
    assert torch.equal(found[found != 0], g[found != 0])
    with pytest.raises(PayloadError, match="of format 3"):
        plain.decode_rows(row[None], plain.summarise(g), found)


def test_what_leaves_nothing_to_code_is_not_refused() -> None:
    link = gw.SimulatedLink([("w", torch.empty(20))], "Coded(compressor=QSGD(levels=200))", 2)
    assert torch.equal(link.reduce_(torch.ones(2, 20)), torch.ones(20))
