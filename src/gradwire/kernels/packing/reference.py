"""Digits to words and back, in plain PyTorch: what every other backend must equal, bit for bit."""

from __future__ import annotations

import torch

from gradwire.kernels.packing.layout import DigitLayout
from gradwire.kernels.table import GROUP_SIZE, LANES

__all__ = ["pack_digits", "unpack_digits"]


def pack_digits(values: torch.Tensor, layout: DigitLayout, out: torch.Tensor) -> None:
    """Pack int64 values in ``[0, base)`` into bytes; see :class:`DigitLayout`."""
    padded = torch.full((layout.blocks(values.numel()) * layout.values_per_block,), layout.base // 2)
    padded[: values.numel()] = values
    words = (padded.reshape(-1, layout.digits, LANES) * _powers(layout)).sum(1)
    octets = words.reshape(-1, 1) >> (8 * torch.arange(layout.word_bytes)) & 255
    out.copy_(octets.reshape(-1))


def unpack_digits(words: torch.Tensor, layout: DigitLayout, groups: int, clamp: bool = True) -> torch.Tensor:
    """Invert :func:`pack_digits`: return the digits of whole groups, int64 ``[groups, 80]``.

    The highest digit of a word that :func:`pack_digits` does not write is taken for the largest if ``clamp``, else for
    what it is.
    """
    octets = words.to(torch.int64).reshape(-1, layout.word_bytes)
    integers = (octets << (8 * torch.arange(layout.word_bytes))).sum(1)
    quotient = integers.reshape(-1, 1, LANES) // _powers(layout)
    digits = torch.cat([quotient[:, :-1] % layout.base, quotient[:, -1:]], dim=1).reshape(-1)
    digits = digits[: GROUP_SIZE * groups].reshape(groups, GROUP_SIZE)
    return digits.clamp(max=layout.base - 1) if clamp else digits


def _powers(layout: DigitLayout) -> torch.Tensor:
    return torch.tensor([layout.base**p for p in range(layout.digits)])[:, None]
