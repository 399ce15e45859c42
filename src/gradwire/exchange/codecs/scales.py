"""Scales that can be divided by."""

from __future__ import annotations

import torch

__all__ = ["SMALLEST_SCALE", "usable"]

SMALLEST_SCALE = 2.0**-100
"""A non-zero scale is at least this, so that its reciprocal times 2^24 is finite. A larger scale stays unbiased."""


def usable(scale: torch.Tensor) -> torch.Tensor:
    """Raise what is above zero to :data:`SMALLEST_SCALE`."""
    return torch.where(scale > 0, scale.clamp(min=SMALLEST_SCALE), scale)
