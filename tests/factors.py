"""Links that exchange one matrix by a method of a low rank."""

from __future__ import annotations

import torch

import gradwire as gw

ROWS, COLUMNS = 40, 30


def workers(count: int, seed: int = 0, rows: int = ROWS, columns: int = COLUMNS) -> torch.Tensor:
    return torch.randn(count, rows, columns, generator=torch.Generator().manual_seed(seed))


def link(
    count: int, method: gw.Method, rows: int = ROWS, columns: int = COLUMNS, **options: object
) -> gw.SimulatedLink:
    return gw.SimulatedLink([("w", torch.empty(rows, columns))], method, count, min_numel=0, **options)  # type: ignore[arg-type]


def step(link: gw.SimulatedLink, g: torch.Tensor) -> torch.Tensor:
    return link.reduce_(g.reshape(len(g), -1).clone()).view(g.shape[1:])


def held(link: gw.SimulatedLink) -> torch.Tensor:
    """Return the workers' residuals."""
    state = link.state_dict()
    return torch.stack([state[f"rank {r}"]["residual/w"].view(ROWS, COLUMNS) for r in range(link.world_size)])
