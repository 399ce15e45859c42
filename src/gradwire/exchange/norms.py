"""Sums over long vectors, in float64.

PyTorch's norms and products of float32 vectors on the CPU add up in float32 from the first element to the last. For a
vector of 10^8 equal elements the norm is 2 % too small.
"""

from __future__ import annotations

import math

import torch

PIECE = 1 << 18
"""Elements on the CPU that are converted to float64 at a time, so that they stay in the cache."""

DEVICE_PIECE = 1 << 24
"""The same on another device, where each piece costs calls."""


def dot(x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the inner product of two vectors of one length.

    Example:
        >>> dot(torch.ones(3), torch.arange(3.0))
        3.0
    """
    size = PIECE if x.device.type == "cpu" else DEVICE_PIECE
    pieces = [a.double().dot(b.double()) for a, b in zip(x.reshape(-1).split(size), y.reshape(-1).split(size))]
    return float(torch.stack(pieces).sum())


def norm(x: torch.Tensor) -> float:
    """Return the Euclidean norm of a tensor.

    Example:
        >>> norm(torch.tensor([3.0, 4.0]))
        5.0
    """
    return math.sqrt(dot(x, x))
