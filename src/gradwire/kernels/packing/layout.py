"""Layouts of base-B digits in words, 16 words side by side; packing and unpacking in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from gradwire.errors import HyperparameterError
from gradwire.kernels.table import GROUP_SIZE, LANES

MAX_WORLD_SIZE = 32767
"""Largest number of trits in a sum: a sum of N trits, shifted by N, is stored in 16 bits."""

_WORD_BYTES = (1, 2, 4)


@dataclass(frozen=True)
class DigitLayout:
    """A layout of integers in ``[0, base)``: ``digits`` of them in a little-endian word of ``word_bytes`` bytes.

    Value ``i`` of a run is in block ``i // (16 * digits)``. With ``r = i % (16 * digits)`` it is digit ``r // 16`` of
    the block's word ``r % 16``:

        word[16 * block + lane] = sum over p of v[16 * digits * block + 16 * p + lane] * base^p

    so that one vector instruction packs 16 neighbours. With 5 digits a block is a group of 80 elements. The last block
    is filled up with the value ``base // 2``, which is zero after the shift.

    Example:
        Two trit sums per byte would fit in base 9 (81 <= 256), but five in two bytes take 3.2 bits rather than 4:

        >>> layout = digit_layout(9)
        >>> layout.word_bytes, layout.digits, layout.bits_per_value
        (2, 5, 3.2)
        >>> layout.packed_bytes(80), layout.packed_bytes(81)
        (32, 64)
    """

    base: int
    word_bytes: int
    digits: int

    @property
    def values_per_block(self) -> int:
        """Values in a block of 16 words."""
        return LANES * self.digits

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of 16 words."""
        return LANES * self.word_bytes

    @property
    def bits_per_value(self) -> float:
        """Bits of a value, without the padding of the last block."""
        return 8 * self.word_bytes / self.digits

    def blocks(self, values: int) -> int:
        """Blocks that hold a run of ``values``."""
        return -(-values // self.values_per_block)

    def packed_bytes(self, values: int) -> int:
        """Return the exact number of bytes of a run of ``values``."""
        return self.blocks(values) * self.block_bytes


def _digits(base: int, word_bytes: int) -> int:
    digits = 0
    while base ** (digits + 1) <= 256**word_bytes:
        digits += 1
    return digits


@cache
def digit_layout(base: int) -> DigitLayout:
    """Return the layout in words of 1, 2 or 4 bytes with the fewest bits per digit; of equals, the smallest word.

    Words of 8 bytes would save at most 4 % (base 5: 27 digits at 2.37 bits, against 13 in 4 bytes at 2.46) but need a
    64 x 64 bit high product for each digit, which vector units lack.

    Example:
        >>> [(l.word_bytes, l.digits) for l in map(digit_layout, (3, 5, 7, 9, 11, 255))]
        [(1, 5), (4, 13), (4, 11), (2, 5), (4, 9), (1, 1)]
    """
    if not 2 <= base <= 2 * MAX_WORLD_SIZE + 1:
        raise HyperparameterError(f"base {base} is outside 2..{2 * MAX_WORLD_SIZE + 1}: sums are kept in 16 bits")
    fitting = [DigitLayout(base, width, _digits(base, width)) for width in _WORD_BYTES if _digits(base, width)]
    return min(fitting, key=lambda layout: (layout.bits_per_value, layout.word_bytes))


def byte_layout(base: int) -> DigitLayout:
    """Return the layout of as many digits as fit a byte, whose statistics an entropy coder of bytes can use.

    Example:
        >>> [byte_layout(base).digits for base in (3, 9, 15, 17, 255)]
        [5, 2, 2, 1, 1]
    """
    if not 2 <= base <= 256:
        raise HyperparameterError(f"base {base}: a coder of bytes needs digits that a byte holds, 2 to 256 values")
    return DigitLayout(base, 1, _digits(base, 1))


def sum_layout(world_size: int) -> DigitLayout:
    """Return the layout of sums of ``world_size`` trits: base ``2 * world_size + 1``."""
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise HyperparameterError(f"world_size {world_size} is outside 1..{MAX_WORLD_SIZE}: sums are kept in 16 bits")
    return digit_layout(2 * world_size + 1)


def packed_bytes(values: int, world_size: int) -> int:
    """Return the exact number of bytes of ``values`` sums of ``world_size`` trits.

    Example:
        >>> packed_bytes(800, world_size=1), packed_bytes(800, world_size=4)
        (160, 320)
    """
    return sum_layout(world_size).packed_bytes(values)


def pack_digits(values: torch.Tensor, layout: DigitLayout, out: torch.Tensor) -> None:
    """Pack int64 values in ``[0, base)`` into bytes; see :class:`DigitLayout`."""
    length = layout.blocks(values.numel()) * layout.values_per_block
    padded = torch.full((length,), layout.base // 2, dtype=torch.int64, device="cpu")
    padded[: values.numel()] = values
    words = (padded.reshape(-1, layout.digits, LANES) * _powers(layout)).sum(1)
    octets = words.reshape(-1, 1) >> (8 * torch.arange(layout.word_bytes, device="cpu")) & 255
    out.copy_(octets.reshape(-1))


def unpack_digits(words: torch.Tensor, layout: DigitLayout, groups: int, clamp: bool = True) -> torch.Tensor:
    """Invert :func:`pack_digits`: return the digits of whole groups, int64 ``[groups, 80]``.

    In a word that :func:`pack_digits` does not write, the highest digit may exceed ``base - 1``; ``clamp`` reduces it
    to that.
    """
    octets = words.to(torch.int64).reshape(-1, layout.word_bytes)
    integers = (octets << (8 * torch.arange(layout.word_bytes, device="cpu"))).sum(1)
    quotient = integers.reshape(-1, 1, LANES) // _powers(layout)
    digits = torch.cat([quotient[:, :-1] % layout.base, quotient[:, -1:]], dim=1).reshape(-1)
    digits = digits[: GROUP_SIZE * groups].reshape(groups, GROUP_SIZE)
    return digits.clamp(max=layout.base - 1) if clamp else digits


def _powers(layout: DigitLayout) -> torch.Tensor:
    return torch.tensor([layout.base**p for p in range(layout.digits)], device="cpu")[:, None]
