"""What a data-parallel run must end in, computed in one process without DDP."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import gradwire as gw
from gradwire.exchange.segments import flatten

Loss = Callable[[nn.Module, int, int], torch.Tensor]
"""(module, rank, step) -> loss."""


def digest(module: nn.Module) -> str:
    """Hash the bits of all parameters."""
    parts = b"".join(p.detach().contiguous().view(torch.uint8).numpy().tobytes() for p in module.parameters())
    return hashlib.sha256(parts).hexdigest()[:16]


def simulated_run(
    module: nn.Module,
    loss: Loss,
    method: Any,
    world_size: int,
    steps: int,
    *,
    micro_steps: int = 1,
    skip_non_finite: bool = False,
    learning_rate: float = 0.05,
    number: int = 0,
    **options: Any,
) -> nn.Module:
    """Train by SGD with momentum through :class:`gradwire.SimulatedLink`; ``micro_steps`` losses add up in a step.

    ``number`` is that of the real link: how many others were open when it was attached.
    """
    named = list(module.named_parameters())
    link = gw.SimulatedLink(named, method, world_size, **options)
    link.number.value = number
    optimizer = torch.optim.SGD(module.parameters(), lr=learning_rate)
    for step in range(steps):
        rows, used = [], [False] * len(named)
        for rank in range(world_size):
            optimizer.zero_grad()
            for micro in range(micro_steps):
                loss(module, rank, step * micro_steps + micro).backward()
            used = [u or p.grad is not None for u, (_, p) in zip(used, named)]
            rows.append(flatten([torch.zeros_like(p) if p.grad is None else p.grad for _, p in named]).float())
        link.scatter_(link.reduce_(torch.stack(rows)))
        for was_used, (_, p) in zip(used, named):
            if not was_used:
                p.grad = None
        if skip_non_finite and not all(bool(p.grad.isfinite().all()) for _, p in named if p.grad is not None):
            continue
        optimizer.step()
    return module


def layers(count: int = 6, width: int = 64, seed: int = 0) -> nn.Sequential:
    """Build a chain of linear layers, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    chain = nn.Sequential(*[nn.Linear(width, width) for _ in range(count)])
    with torch.no_grad():
        for p in chain.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * width**-0.5)
    return chain


def batch(rank: int, step: int, shape: Sequence[int] = (8, 64)) -> torch.Tensor:
    """Draw a rank's inputs of a step."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * step + rank))


def square_loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Mean square of the outputs on the rank's own batch."""
    return module(batch(rank, step)).square().mean()
