"""State of methods that join all compressed parameters, whose vectors are kept by parameter."""

from __future__ import annotations

import torch

import gradwire as gw


def joined_state(link: gw.SimulatedLink, scope: str, kind: str) -> torch.Tensor:
    """Return the vectors of a kind of all compressed parameters, joined in the parameters' order."""
    planner, part = link._planner, link.state_dict()[scope]
    return torch.cat([part[f"{kind}/{name}"] for name in planner.parameters if name not in planner.dense])


def joined_rows(link: gw.SimulatedLink, workers: int, kind: str) -> torch.Tensor:
    """Return the same of all workers, a row each."""
    return torch.stack([joined_state(link, f"rank {rank}", kind) for rank in range(workers)])
