# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Triton kernels of moments: sums of each block in integers, then of each segment, block after block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gradwire.kernels.moments.operations import Moments
from gradwire.kernels.table import SegmentTable
from gradwire.kernels.triton_core.device_tables import numel_of
from gradwire.kernels.triton_core.integers import MOMENTS, add_blocks, block_integers, largest_bits
from gradwire.kernels.triton_core.launch import cdiv, launch

_TILE = 128


@triton.jit(do_not_specialize=["segments"])
def _finish(sums, bits, numel, segments, max_abs, mean, std, norm, TILE: tl.constexpr):
    segment = tl.program_id(0) * TILE + tl.arange(0, TILE)
    known = segment < segments
    largest = tl.load(bits + segment, mask=known, other=0)
    finite = largest < 0x7F800000
    # Triton rounds divisions and roots of float64 correctly, but not those of float32.
    number = tl.maximum(tl.load(numel + segment, mask=known, other=1), 1).to(tl.float64)
    square = tl.load(sums + segments + segment, mask=known, other=0.0)
    first = tl.load(sums + segment, mask=known, other=0.0) / number
    variance = square / number - first * first
    variance = tl.where(variance > 0.0, variance, 0.0)
    tl.store(max_abs + segment, tl.where(finite, largest, 0x7F800000).to(tl.float32, bitcast=True), mask=known)
    tl.store(mean + segment, tl.where(finite, first, 0.0), mask=known)
    tl.store(std + segment, tl.where(finite, tl.sqrt(variance), 0.0), mask=known)
    tl.store(norm + segment, tl.where(finite, tl.sqrt(square), 0.0), mask=known)


def moments(x: torch.Tensor, table: SegmentTable, out: Moments) -> None:
    largest, first, second, _ = block_integers(x, table, MOMENTS)
    sums = add_blocks(table, largest, first, second, MOMENTS)
    launch(
        _finish, cdiv(len(table), _TILE), sums, largest_bits(largest, table), numel_of(table, x.device), len(table),
        out.max_abs, out.mean, out.std, out.norm, TILE=_TILE,
    )  # fmt: skip
