"""Digits to words and back, in plain PyTorch."""

from __future__ import annotations

import torch

from gradwire.kernels.packing.layout import DigitLayout
from gradwire.kernels.table import LANES

__all__ = ["pack_words", "unpack_words"]


def pack_words(values: torch.Tensor, layout: DigitLayout, out: torch.Tensor) -> None:
    """Pack int64 values in ``[0, base)`` into bytes; see :class:`DigitLayout`."""
    padded = torch.full((layout.blocks(values.numel()) * layout.values_per_block,), layout.base // 2)
    padded[: values.numel()] = values
    powers = torch.tensor([layout.base**p for p in range(layout.digits)])
    words = (padded.reshape(-1, layout.digits, LANES) * powers[:, None]).sum(1)
    octets = words.reshape(-1, 1) >> (8 * torch.arange(layout.word_bytes)) & 255
    out.copy_(octets.reshape(-1))


def unpack_words(words: torch.Tensor, layout: DigitLayout) -> torch.Tensor:
    """Undo :func:`pack_words`, padding included."""
    octets = words.to(torch.int64).reshape(-1, layout.word_bytes)
    integers = (octets << (8 * torch.arange(layout.word_bytes))).sum(1)
    powers = torch.tensor([layout.base**p for p in range(layout.digits)])
    quotient = integers.reshape(-1, 1, LANES) // powers[:, None]
    return torch.cat([quotient[:, :-1] % layout.base, quotient[:, -1:]], dim=1).reshape(-1)
