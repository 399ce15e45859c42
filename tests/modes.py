"""Modes of DDP, and a run of one of them on a real rank."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from oracle import digest, layers, square_loss

SMALL_BUCKETS_MB = 0.0163  # just above one 64x64 layer
STEPS = 6


def train(
    module: nn.Module, ddp: nn.Module, loss: Any, rank: int, steps: int, micro_steps: int = 1, start: int = 0
) -> list[int]:
    """The loop of :func:`oracle.simulated_run`, on a real rank."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for step in range(start, start + steps):
        optimizer.zero_grad()
        for micro in range(micro_steps):
            last = micro == micro_steps - 1
            with contextlib.nullcontext() if last else ddp.no_sync():  # type: ignore[operator]
                loss(ddp, rank, step * micro_steps + micro).backward()
        optimizer.step()
    return []


def run_mode(
    method: str, ddp_options: dict[str, Any], options: dict[str, Any], micro_steps: int, steps: int = STEPS
) -> tuple[str, Any]:
    """Train on this rank in one mode; give the digest and the link's record."""
    import torch.distributed as dist

    module = layers()
    ddp = DistributedDataParallel(module, **ddp_options)
    link = gw.attach(ddp, method, **options)
    train(module, ddp, square_loss, dist.get_rank(), steps, micro_steps)
    record = link.record()
    link.close()
    return digest(module), record


MODES = {
    "one bucket": ({}, {}, 1),
    "buckets rebuilt": ({"bucket_cap_mb": SMALL_BUCKETS_MB}, {}, 1),
    "middling buckets": ({"bucket_cap_mb": 0.05}, {}, 1),
    "gradient_as_bucket_view": ({"bucket_cap_mb": SMALL_BUCKETS_MB, "gradient_as_bucket_view": True}, {}, 1),
    "static_graph": ({"bucket_cap_mb": SMALL_BUCKETS_MB, "static_graph": True}, {}, 1),
    "find_unused_parameters": ({"bucket_cap_mb": SMALL_BUCKETS_MB, "find_unused_parameters": True}, {}, 1),
    "no_sync": ({"bucket_cap_mb": SMALL_BUCKETS_MB}, {}, 3),
    "four lanes, small chunks": ({"bucket_cap_mb": 0.05}, {"lanes": 4, "chunk_numel": 2000}, 1),
    "one lane": ({"bucket_cap_mb": 0.05}, {"lanes": 1}, 1),
    "checked": ({"bucket_cap_mb": 0.05}, {"check": True}, 1),
    "all_gather": ({}, {"collective": "all_gather"}, 1),
    "two_shot": ({"bucket_cap_mb": 0.05}, {"collective": "two_shot", "chunk_numel": 1000}, 1),
    "reference kernels": ({}, {"backend": "reference"}, 1),
}
