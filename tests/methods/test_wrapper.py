"""What methods around another take over from it, and what they see of its outcome."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

import gradwire as gw
from cases import EVERY
from gradwire.exchange.drivers import Meter, simulate_ranks
from gradwire.exchange.method import Method
from gradwire.exchange.planning import Options, Planner
from gradwire.exchange.protocols import Context, Memory
from gradwire.exchange.protocols.bucket_plan import BucketPlan
from gradwire.exchange.segments import Parameter, lay_out
from gradwire.kernels import get_kernels
from gradwire.methods.wrappers.wrapper import PIECE, pieces
from plans import make_plan

INHERITED = ("whole_step", "joined", "direction", "owns_momentum", "min_numel")


@pytest.mark.parametrize(
    "inner",
    [gw.QSGDinf(block_size=256), gw.QSGDinf(block_size=256, blocks="model"), gw.QSGDMaxNorm(), gw.FP32()],
    ids=repr,
)
def test_what_a_method_around_another_takes_over(inner: Method) -> None:
    around = gw.DIANA(compressor=inner, alpha=0.5)
    assert [getattr(around.traits, name) for name in INHERITED] == [getattr(inner.traits, name) for name in INHERITED]
    assert around.traits.kernels == (*inner.traits.kernels, "shifts")
    assert gw.DQGD(compressor=inner).traits.kernels == inner.traits.kernels
    # A protocol whose error nobody sent is none for what remembers what was sent.
    exact = tuple(c for c in inner.traits.collectives if c != "two_shot" or not inner.traits.re_encoding)
    assert around.traits.collectives == exact
    assert gw.DQGD(compressor=inner).traits.collectives == inner.traits.collectives
    assert around.traits.needs_loss_scale


@pytest.mark.parametrize(
    "method", [gw.ErrorFeedback(gw.RandK()), gw.EF21(gw.FP32()), gw.DIANA(gw.FP32()), gw.DQGD(gw.FP32())], ids=repr
)
def test_what_the_backend_adds_up_is_not_stable_to_the_bit_inside_another_method(method: Method) -> None:
    assert not method.properties.bit_stable
    assert type(method)().properties == type(method).properties
    assert type(method).properties.bit_stable


def test_pieces_cover_runs_once() -> None:
    runs = [(3, 10), (20, 20 + 2 * PIECE), (5 * PIECE, 5 * PIECE + PIECE + 1)]
    found = list(pieces(runs))
    assert [i for a, b in found for i in range(a, b)] == [i for a, b in runs for i in range(a, b)]
    assert max(b - a for a, b in found) == PIECE


def plan_for(method: Method, sizes: tuple[int, ...], **options: int) -> BucketPlan:
    segments = [
        dataclasses.replace(s, dense=s.numel < 100)
        for s in lay_out(Parameter(str(i), (n,), (1,)) for i, n in enumerate(sizes))
    ]
    return make_plan(
        method,
        segments,
        kernels=get_kernels("reference"),
        world_size=2,
        collective=method.traits.collectives[0],
        seed=0,
        **{"chunk_numel": 1 << 20, **options},
    )


CAST = gw.RandK(density=0.1, values=gw.BF16())


@pytest.mark.parametrize("chunk_numel", [160, 1 << 20])
@pytest.mark.parametrize("method", [*EVERY, CAST, gw.ErrorFeedback(compressor=CAST)], ids=repr)
def test_no_two_chunks_compress_one_element(method: Method, chunk_numel: int) -> None:
    """What a wrapper adds to the runs of all chunks it adds once, beside a parameter in float32 as well."""
    like = {"first": torch.empty(20, 30), "small": torch.empty(10), "last": torch.empty(400)}
    planner = Planner(method, like, 2, Options(min_numel=100, chunk_numel=chunk_numel))
    plan = planner.plan(planner.step_order() if method.traits.whole_step else list(like), 0)
    assert len(plan.runs) <= max(1, plan.chunks)
    runs = sorted(run for chunk in plan.runs for run in chunk)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(runs))


def run(plan: BucketPlan, rows: torch.Tensor) -> list[bool | None]:
    memories = [Memory(), Memory()]
    contexts = [Context(rank, 2, 0, memory=memory) for rank, memory in enumerate(memories)]
    outcomes = simulate_ranks([plan.whole(c, row) for c, row in zip(contexts, rows)], [Meter(), Meter()])
    return [outcome.finite for outcome in outcomes]


@pytest.mark.parametrize("place", [0, 399, 405])
@pytest.mark.parametrize(
    "method",
    [
        gw.DIANA(compressor=gw.FP32()),
        gw.EF21(compressor=gw.RandK(density=1.0, rescale=False)),
        gw.ErrorFeedback(compressor=gw.RandK(density=1.0, values=gw.BF16())),
    ],
    ids=repr,
)
def test_an_infinity_in_a_plain_sum_is_seen_by_what_remembers(method: Method, place: int) -> None:
    """Float32 sums are looked at by nobody else. The last ten elements are not compressed."""
    plan = plan_for(method, (400, 10))
    rows = torch.randn(2, 410, generator=torch.Generator().manual_seed(0))
    assert run(plan, rows.clone()) == [True, True]
    rows[1, place] = torch.inf
    assert run(plan, rows) == [False, False]


def test_every_chunk_is_wrapped() -> None:
    """The first round of error feedback leaves behind, in every chunk, what was not sent."""
    method = gw.ErrorFeedback(compressor=gw.QSGDinf(levels=7, block_size=16))
    plan = plan_for(method, (400, 10, 400), chunk_numel=160)
    assert plan.chunks == 6
    memory = Memory()
    flat = torch.randn(810, generator=torch.Generator().manual_seed(0))
    given = flat.clone()
    contexts = [Context(0, 2, 0, memory=memory), Context(1, 2, 0)]
    rows = [flat, torch.zeros(810)]
    simulate_ranks([plan.whole(c, row) for c, row in zip(contexts, rows)], [Meter(), Meter()])
    memory.commit()
    residual = memory.state()["rank"]
    for name, part, mean in (("0", given[:400], flat[:400]), ("2", given[410:], flat[410:])):
        # The other worker has nothing: the mean is half of what this one sent. Two roundings of numbers below 8.
        torch.testing.assert_close(residual[f"residual/{name}"], part - 2 * mean, rtol=0, atol=8 * 2.0**-22)
    assert "residual/1" not in residual
