"""Casts start on the thread that brings the bucket and end on the backend's: means, layouts and failures."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.exchange.planning import Options, Planner
from gradwire.link.bucket_exchange import SMALL_BYTES
from oracle import layers, square_loss
from ranks import fresh_ranks, wait_until_watched

pytestmark = pytest.mark.ranks

NUMEL = 5000


def sent_of(dtype: torch.dtype) -> list[tuple[int, int]]:
    """Return the bytes that one round of each method sends on this rank, and those that its planner counts."""
    found = []
    for spec in ("fp32", "bf16", "terngrad"):
        parameter = nn.Parameter(torch.zeros(NUMEL, dtype=dtype))
        link = gw.Link([("w", parameter)], spec, min_numel=0)
        parameter.grad = torch.ones(NUMEL, dtype=dtype)
        link.reduce_()
        planner = Planner(gw.method(spec), {"w": parameter}, 3, Options(min_numel=0))
        found.append((link.traffic().sent_bytes, planner.sent_bytes(["w"])))
        link.close()
    return found


@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 2), (torch.float64, 8)])
def test_the_planner_counts_the_dtype_that_is_sent(three_ranks: Any, dtype: torch.dtype, width: int) -> None:
    for rows in three_ranks(sent_of, dtype):
        assert all(sent == counted for sent, counted in rows)
        assert rows[0][0] == pytest.approx(4 * width * NUMEL / 3, abs=1), "fp32 keeps the dtype, as DDP does"
        assert rows[1][0] == pytest.approx(4 * 2 * NUMEL / 3, abs=1)


SMALL_BUCKETS_MB = 0.0163
FINE = 98307.0
"""Three times an odd number of sixteen bits: float32 keeps it, bfloat16 rounds it."""
ROUNDED = {"fp32": FINE, "bf16": 98304.0}


class Told(nn.Module):
    """Parameters whose gradients the test chooses: multiples of three, so that the mean of three ranks is exact."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.ParameterList([nn.Parameter(torch.zeros(50)) for _ in range(3)])
        self.large = nn.ParameterList([nn.Parameter(torch.zeros(64, 64)) for _ in range(3)])
        self.wide = nn.Parameter(torch.zeros(160, 160))

    def forward(self, factors: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([(p * f).sum() for p, f in zip(self.parameters(), factors)]).sum()


def factors_of(rank: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [3 * torch.randint(-20, 21, p.shape, generator=generator).float() for p in Told().parameters()]


def run_told(method: str, options: dict[str, Any], cap_mb: float) -> str:
    """Exchange known gradients; say where the mean is not the exact one."""
    import torch.distributed as dist

    module = Told()
    ddp = DistributedDataParallel(module, bucket_cap_mb=cap_mb)
    link = gw.attach(ddp, method, **options)
    for step in range(4):
        module.zero_grad()
        ddp(factors_of(dist.get_rank(), step)).backward()
        exact = [torch.stack(parts).mean(0) for parts in zip(*[factors_of(r, step) for r in range(3)])]
        for (name, p), mean in zip(module.named_parameters(), exact):
            if p.grad is None or not torch.equal(p.grad, mean):
                return f"step {step}: {name}"
    link.close()
    return ""


@pytest.mark.parametrize("method", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("options", "cap_mb"),
    [
        ({}, SMALL_BUCKETS_MB),
        ({"lanes": 1}, 25),
        ({"lanes": 4, "min_numel": 1024}, SMALL_BUCKETS_MB),
        # Many values that are left alone go by a ring, few by one message.
        ({"exclude": ("wide", "large.1")}, 25),
        ({"exclude": ("*",)}, SMALL_BUCKETS_MB),
        ({"check": True}, SMALL_BUCKETS_MB),
        ({"warmup_steps": 2}, SMALL_BUCKETS_MB),
    ],
    ids=["small buckets", "one lane", "small ones dense", "a dense matrix", "all dense", "checked", "warm-up"],
)
def test_the_mean_is_exact(three_ranks: Any, method: str, options: dict[str, Any], cap_mb: float) -> None:
    assert three_ranks(run_told, method, options, cap_mb) == [""] * 3


def run_fine(method: str, min_numel: int | None) -> tuple[list[float], list[float]]:
    """Exchange one value that sixteen bits cannot hold, from a large and from a small parameter."""
    module = Told()
    ddp = DistributedDataParallel(module)
    link = gw.attach(ddp, method, min_numel=min_numel)
    ddp([torch.full_like(p, FINE) for p in module.parameters()]).backward()
    found = [p.grad.unique().tolist() for p in (module.large[0], module.small[0]) if p.grad is not None]
    link.close()
    return found[0], found[1]


@pytest.mark.parametrize("method", list(ROUNDED))
def test_small_parameters_are_cast_unless_they_are_to_be_kept(three_ranks: Any, method: str) -> None:
    assert three_ranks(run_fine, method, None) == [([ROUNDED[method]], [ROUNDED[method]])] * 3
    assert three_ranks(run_fine, method, 1024) == [([ROUNDED[method]], [FINE])] * 3


def lanes_used(numel: int) -> list[int]:
    """Exchange two buckets of ``numel`` elements; return the bytes that each lane has sent for them."""
    parameters = [nn.Parameter(torch.zeros(numel)) for _ in range(2)]
    link = gw.Link(parameters, "fp32", lanes=2)
    before = [lane.meter.sent_bytes for lane in link._runtime.lanes]
    started = [link.exchange(i, [str(i)], torch.ones(numel), i == 1) for i in range(2)]
    assert all(bool((future.wait() == 1).all()) for future in started)
    sent = [lane.meter.sent_bytes - b for lane, b in zip(link._runtime.lanes, before)]
    link.close()
    return sent


def test_small_buckets_share_a_lane(three_ranks: Any) -> None:
    small = SMALL_BYTES // 4
    for sent in three_ranks(lanes_used, small):
        assert sent[0] >= 2 * small * 4
        assert sent[1] == 0
    for sent in three_ranks(lanes_used, small + 1):
        assert sent[0] == sent[1] > small


def run_until(method: str, what: str) -> tuple[str, str]:
    """Train; at step 3 rank 1 does something bad. Give the error's kind and sentence."""
    import torch.distributed as dist

    from gradwire.exchange.protocols import bucket_plan as plan

    rank = dist.get_rank()
    ddp = DistributedDataParallel(layers(6), bucket_cap_mb=SMALL_BUCKETS_MB)
    link = gw.attach(ddp, method)
    wait_until_watched()
    whole = plan.CastPlan.run

    def before_wire(self: Any, context: Any, flat: Any, prepared: Any) -> Any:
        raise KeyError("boom")
        yield

    def after_wire(self: Any, context: Any, flat: Any, prepared: Any) -> Any:
        yield from whole(self, context, flat, prepared)
        raise KeyError("boom")

    for step in range(30):
        loss = square_loss(ddp, rank, step)
        if step == 3 and rank == 1:
            if what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            plan.CastPlan.run = before_wire if what == "before" else after_wire  # type: ignore[method-assign]
        try:
            loss.backward()
        except (RuntimeError, gw.GradwireError):
            again = ""
            try:
                square_loss(ddp, rank, step).backward()
            except (RuntimeError, gw.GradwireError) as error:
                again = str(error)
            return type(link.error).__name__, f"{link.error} | again: {bool(again)}"
    return "none", ""


@pytest.mark.parametrize(("method", "what"), [("fp32", "before"), ("fp16", "before"), ("bf16", "after")])
def test_a_rank_that_fails_in_a_cast_tells_the_others(method: str, what: str) -> None:
    with fresh_ranks(3, group_timeout_s=600) as ranks:
        ranks.start(run_until, method, what)
        # Long before the group's timeout, although rank 1 lives on.
        answers = ranks.collect(60)
    for rank, (kind, value) in enumerate(answers):
        assert kind == "ok", value
        error, sentence = value
        assert error == "ExchangeError"
        assert "rank 1 failed at bucket" in sentence
        assert "KeyError: 'boom'" in sentence
        assert sentence.startswith("rank 1 failed" if rank == 1 else f"rank {rank} could not go on at bucket")
        assert "again: True" in sentence


def test_a_rank_that_is_killed_in_a_cast_is_named_with_the_bucket() -> None:
    with fresh_ranks(3, group_timeout_s=10) as ranks:
        ranks.start(run_until, "fp16", "killed")
        answers = ranks.collect(40)
    assert answers[1] == ("gone", -signal.SIGKILL)
    for kind, value in (answers[0], answers[2]):
        assert kind == "ok", value
        error, sentence = value
        assert error == "ExchangeError"
        assert "rank 1 ended without a word" in sentence
        assert "round 3" in sentence
        assert "again: True" in sentence
