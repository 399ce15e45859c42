"""Protocols on plain kernels: shares cover all units, exchanges are told apart, warm-up travels whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.exchange.drivers import Meter, dry_run, simulate_ranks
from gradwire.exchange.method import Method
from gradwire.exchange.ops import AllGather, AllToAll
from gradwire.exchange.protocols import Context
from gradwire.exchange.protocols.bucket_plan import BucketPlan
from gradwire.exchange.protocols.division import join
from gradwire.exchange.segments import Parameter, lay_out
from gradwire.kernels import get_kernels
from plans import make_plan

SIZES = (7, 2161, 81)
"""Thirty groups to compress: more than two shares of the thirteen that a word of two workers' sums asks for."""


def plan_for(
    method: Method, world_size: int, collective: str, backend: str = "reference", **options: Any
) -> BucketPlan:
    segments = [
        replace(s, dense=s.numel < 50) for s in lay_out(Parameter(str(i), (n,), (1,)) for i, n in enumerate(SIZES))
    ]
    defaults = {"seed": 0, "chunk_numel": 1 << 20}
    kernels = get_kernels(backend)
    return make_plan(
        method, segments, kernels=kernels, world_size=world_size, collective=collective, **{**defaults, **options}
    )


def rows_of(world_size: int) -> torch.Tensor:
    """Return vectors on TernGrad's grid: each comes back exactly."""
    draw = torch.Generator().manual_seed(world_size)
    return 4.0 * torch.randint(-1, 2, (world_size, sum(SIZES)), generator=draw).float()


@pytest.mark.parametrize("chunk_numel", [80, 240, 1 << 20])
@pytest.mark.parametrize("collective", ["two_shot", "all_gather"])
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_every_element_comes_back_on_every_rank(world_size: int, collective: str, chunk_numel: int) -> None:
    plan = plan_for(gw.TernGrad(clip=None), world_size, collective, chunk_numel=chunk_numel)
    given = rows_of(world_size)
    rows, meters = given.clone(), [Meter() for _ in range(world_size)]
    simulate_ranks([plan.whole(Context(r, world_size, 0), row) for r, row in enumerate(rows)], meters)
    # Sums of whole numbers by float32(1 / N), and float32 values each weighed before: N roundings of numbers up to 4.
    for row in rows:
        torch.testing.assert_close(row, given.mean(0), rtol=0, atol=world_size * 4 * 2.0**-23)
    assert all(torch.equal(row, rows[0]) for row in rows)


def test_the_exchanges_of_a_chunk_are_numbered() -> None:
    """A shard's sum cannot be taken for a payload on its way to a shard, nor the other way round."""
    plan = plan_for(gw.TernGrad(clip=None), 2, "two_shot")
    numbers: list[list[int]] = []

    def noted(rank: int, flat: torch.Tensor) -> Any:
        generator, reply = plan.whole(Context(rank, 2, 0), flat), None
        while True:
            try:
                op = next(generator) if reply is None else generator.send(reply)
            except StopIteration as stop:
                return stop.value
            if isinstance(op, AllToAll | AllGather) and rank == 0:
                payload = op.send[1] if isinstance(op, AllToAll) else op.send
                # Sender, receiver and number of the exchange.
                numbers.append([int.from_bytes(bytes(payload[at : at + 2].tolist()), "little") for at in (16, 18, 20)])
            reply = yield op

    simulate_ranks([noted(rank, row) for rank, row in enumerate(rows_of(2))], [Meter(), Meter()])
    assert numbers == [[0, 1, 0], [0, 0xFFFF, 1]]


@pytest.mark.parametrize(
    ("method", "collective"),
    [(gw.BF16(), "all_reduce"), (gw.TernGrad(), "two_shot"), (gw.QSGD(), "all_gather"), (gw.SignSGD(), "two_shot")],
)
def test_in_warm_up_everything_travels_in_float32(method: Method, collective: str) -> None:
    numel, world_size = sum(SIZES), 4
    plan = plan_for(method, world_size, collective, "meta", warm_up=True)
    sent = dry_run(plan, numel, world_size).sent_bytes
    ring = round(2 * 4 * numel * 3 / 4)
    least = {"all_reduce": ring, "two_shot": ring, "all_gather": 4 * numel * 3}[collective]
    # Beside the values at most headers of 32 bytes, and shares rounded up to 16 bytes, to each of three others, twice.
    assert least <= sent <= least + 2 * 3 * (32 + 16)
    assert dry_run(plan_for(method, world_size, collective, "meta"), numel, world_size).sent_bytes < 0.75 * sent


def test_neighbours_are_joined_and_gaps_are_not() -> None:
    assert join([(0, 3), (3, 5), (6, 8), (8, 8), (8, 9)]) == [(0, 5), (6, 9)]
    assert join([]) == []
    assert join([(2, 4)]) == [(2, 4)]
