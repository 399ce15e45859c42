"""Shifts on a device: operations of PyTorch, of which each reads and writes its tensors once.

An operation on tensors of several types computes in the widest one, as the definitions do, and rounds to its output's.
"""

from __future__ import annotations

import torch


def subtract_shift(x: torch.Tensor, shift: torch.Tensor, scale: float) -> None:
    torch.sub(x, shift, alpha=scale, out=x)


def step_shift(shift: torch.Tensor, x: torch.Tensor, rate: float, out: torch.Tensor) -> None:
    torch.add(shift, x, alpha=rate, out=out)


def step_mean_shift(shift: torch.Tensor, x: torch.Tensor, rate: float, scale: float, out: torch.Tensor) -> None:
    step_shift(shift, x, rate, out)
    torch.add(x, shift, alpha=scale, out=x)
