"""Values as integers: how sums are made free of order."""

from __future__ import annotations

import torch

from gradwire.kernels.table import BLOCK_SIZE

__all__ = ["integer_blocks"]

_INFINITY_BITS = 0x7F800000
_MIN_EXPONENT = -104  # 2^(23 + 104) is the largest power of two in float32


def integer_blocks(x: torch.Tensor) -> tuple[list[int], torch.Tensor] | None:
    """Cut a vector in blocks of 4096 and turn each into integers ``trunc(x * 2^(23-e))``, e its largest exponent.

    Returns:
        The exponents (at least -104) and the integers, int64 ``[blocks, 4096]`` with zeros at the end; None where a
        value is not finite.
    """
    blocks = torch.zeros(-(-x.numel() // BLOCK_SIZE) * BLOCK_SIZE)
    blocks[: x.numel()] = x
    blocks = blocks.reshape(-1, BLOCK_SIZE)
    if not x.numel():
        return [], blocks.to(torch.int64)
    bits = (blocks.view(torch.int32) & 0x7FFFFFFF).amax(1)
    if int(bits.max()) >= _INFINITY_BITS:
        return None
    exponent = ((bits >> 23) - 127).clamp(min=_MIN_EXPONENT)
    # Exact in float64: powers of two and 24-bit significands.
    integers = torch.ldexp(blocks.to(torch.float64), 23 - exponent[:, None]).trunc().to(torch.int64)
    return exponent.tolist(), integers
