"""Optimizers of stacked replicas, whose arithmetic is that of one optimizer for each: AdamW, Muon, and clipping."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.stacked_gpt import StackedGPT

__all__ = ["Muon", "clip_each_", "optimizers_of", "orthogonalised"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic a s + b s^3 + c s^5 that Muon applies to singular values, five times."""

DECAY, BETAS = 0.1, (0.9, 0.99)
"""nanoGPT's weight decay of matrices, and AdamW's betas for small models of characters."""


def orthogonalised(x: Tensor, steps: int = 5) -> Tensor:
    """Return matrices with the singular vectors of ``x`` and singular values near 1, by Newton and Schulz's iteration.

    Args:
        x: Matrices, ``[..., rows, columns]``; float32 here, where ``torch.optim.Muon`` rounds to bfloat16.
        steps: Number of iterations.
    """
    a, b, c = COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Muon for stacks of matrices: an orthogonalised step of Nesterov momentum.

    ::

        m <- momentum m + (1 - momentum) g        u = (1 - momentum) g + momentum m
        x <- (1 - lr decay) x - lr 0.2 sqrt(max(rows, columns)) orthogonalised(u)

    The factor makes the step's root mean square that of AdamW, so that both have rates of one size
    (``adjust_lr_fn="match_rms_adamw"`` of ``torch.optim.Muon``, whose arithmetic this is, but for bfloat16).

    Args:
        params: Stacks of matrices, ``[replicas, rows, columns]``.
        lr: Learning rate.
        momentum: Momentum of each matrix.
        weight_decay: Decoupled decay.
    """

    def __init__(self, params: Any, lr: float, momentum: float = 0.95, weight_decay: float = DECAY) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step."""
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for x in group["params"]:
                held = self.state[x].setdefault("momentum", torch.zeros_like(x))
                held.lerp_(x.grad, 1 - momentum)
                update = orthogonalised(x.grad.lerp(held, momentum))
                x.mul_(1 - lr * group["weight_decay"])
                x.add_(update, alpha=-lr * 0.2 * max(x.shape[-2:]) ** 0.5)


def optimizers_of(model: StackedGPT, kind: str, lr: float) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a model: "adamw", or "muon" with AdamW for embeddings and norms.

    Matrices decay and vectors do not, as in nanoGPT.
    """
    inner = model.inner_matrices() if kind == "muon" else []
    taken = {id(x) for x in inner}
    rest = [x for x in model.stacks.values() if id(x) not in taken]
    groups = [
        {"params": [x for x in rest if x.dim() == 3], "weight_decay": DECAY},
        {"params": [x for x in rest if x.dim() < 3], "weight_decay": 0.0},
    ]
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=True)]
    return [*found, Muon(inner, lr=lr)] if inner else found


@torch.no_grad()
def clip_each_(stacks: Iterable[Tensor], limit: float) -> None:
    """Scale each replica's gradient to a norm of at most ``limit``, by itself."""
    gradients = [x.grad for x in stacks if x.grad is not None]
    squares = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0)
    factors = (limit / (squares.sqrt() + 1e-6)).clamp(max=1.0)
    for g in gradients:
        g.mul_(factors.view(-1, *[1] * (g.dim() - 1)))
