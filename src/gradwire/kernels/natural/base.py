"""What every backend offers for powers of two, and the checks that all of them make before memory is touched."""

from __future__ import annotations

from typing import Protocol

import torch

from gradwire.errors import HyperparameterError
from gradwire.kernels.table import GROUP_SIZE, LANES, SegmentTable

__all__ = ["SIGN_BYTES", "NaturalKernels", "check_natural", "check_natural_mean", "natural_bytes", "natural_sign_bytes"]

SIGN_BYTES = GROUP_SIZE // 8
"""Bytes of the signs of a group."""


class NaturalKernels(Protocol):
    """Random rounding to the powers of two next to a value, and the mean of such values."""

    def natural_encode(self, x: torch.Tensor, table: SegmentTable, round: int, stream: int, out: torch.Tensor) -> None:
        """Round all groups of ``x`` (float32) to powers of two and write them to ``out`` (uint8).

        With ``bits`` the 31 bits of |x| and ``u`` the upper 23 bits of the element's 24-bit uniform integer::

            exponent = min((bits + u) >> 23, 254), or 255 where x is an infinity or NaN

        ``out`` has :func:`natural_bytes` bytes: first the signs, a bit an element in the order of groups, the first the
        lowest of its byte, padded to sixteen bytes (:func:`natural_sign_bytes`), then the exponents, a byte an element.
        Elements past a segment's end count as zero.
        """
        ...

    def natural_mean(
        self, rows: torch.Tensor, table: SegmentTable, weight: float, x: torch.Tensor, accumulate: bool = False
    ) -> None:
        """Write the sum over rows, in their order, of ``float32(weight) * value`` into ``x``, or add it.

        ``rows`` are uint8 ``[N, natural_bytes(groups)]``, any distance apart. A value is ``+-2^(exponent - 127)``, zero
        for exponent 0 and +inf, whatever its sign and the weight's, for 255.
        """
        ...


def natural_sign_bytes(groups: int) -> int:
    """Bytes of the signs of that many groups, padded to sixteen."""
    return -(-SIGN_BYTES * groups // LANES) * LANES


def natural_bytes(groups: int) -> int:
    """Bytes of that many groups: nine bits an element, padded to sixteen bytes."""
    return natural_sign_bytes(groups) + GROUP_SIZE * groups


def check_natural(x: torch.Tensor, table: SegmentTable, out: torch.Tensor | None, round: int, stream: int) -> None:
    """Check the arguments of :meth:`NaturalKernels.natural_encode`."""
    size = natural_bytes(table.groups)
    if x.dtype != torch.float32 or x.ndim != 1 or not x.is_contiguous() or x.numel() < table.extent:
        raise HyperparameterError(
            f"x is {x.dtype} of shape {tuple(x.shape)}: a contiguous vector of float32 with at least {table.extent} "
            "elements is needed"
        )
    if out is not None and (out.dtype != torch.uint8 or out.shape != (size,) or not out.is_contiguous()):
        raise HyperparameterError(
            f"out is {out.dtype} of shape {tuple(out.shape)}: a contiguous vector of uint8 with {size} elements is "
            "needed"
        )
    if not (0 <= round < 2**64 and 0 <= stream < 2**32):
        raise HyperparameterError(f"round {round} or stream {stream} is outside its 64 or 32 bits")


def check_natural_mean(rows: torch.Tensor, table: SegmentTable, x: torch.Tensor) -> None:
    """Check the arguments of :meth:`NaturalKernels.natural_mean`."""
    size = natural_bytes(table.groups)
    check_natural(x, table, None, 0, 0)
    fits = rows.dtype == torch.uint8 and rows.ndim == 2 and rows.shape[0] > 0 and rows.shape[1] == size
    if not fits or rows.stride(0) < 0 or (size > 1 and rows.stride(1) != 1):
        raise HyperparameterError(
            f"rows is {rows.dtype} of shape {tuple(rows.shape)} and stride {rows.stride()}: uint8 rows of {size} "
            "neighbouring bytes are needed"
        )
