# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Triton kernels of moments: sums of each block in integers, then of each segment, block after block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gradwire.kernels.moments.operations import Moments
from gradwire.kernels.table import SegmentTable
from gradwire.kernels.triton_core.device_tables import blocks_of, numel_of
from gradwire.kernels.triton_core.integers import AHEAD, MOMENTS, block_sums, sums_of_blocks
from gradwire.kernels.triton_core.launch import cdiv, launch

_TILE = 128


@triton.jit
def _finish(begins, largest, first, second, numel, max_abs, mean, std, norm, TILE: tl.constexpr, AHEAD: tl.constexpr):
    segment = tl.program_id(0)
    total, square, bits = sums_of_blocks(begins, largest, first, second, segment, TILE, AHEAD)
    here = segment + tl.arange(0, 1)
    finite = bits < 0x7F800000
    # Triton rounds divisions and roots of float64 correctly, but not those of float32.
    number = tl.maximum(tl.load(numel + here), 1).to(tl.float64)
    middle = total / number
    variance = square / number - middle * middle
    variance = tl.where(variance > 0.0, variance, 0.0)
    tl.store(max_abs + here, tl.where(finite, bits, 0x7F800000).to(tl.float32, bitcast=True))
    tl.store(mean + here, tl.where(finite, middle, 0.0))
    tl.store(std + here, tl.where(finite, tl.sqrt(variance), 0.0))
    tl.store(norm + here, tl.where(finite, tl.sqrt(square), 0.0))


def moments(x: torch.Tensor, table: SegmentTable, out: Moments) -> None:
    largest, first, second, _ = block_sums(x, table, MOMENTS)
    launch(
        _finish, len(table), blocks_of(table, x.device).first, largest, first, second, numel_of(table, x.device),
        out.max_abs, out.mean, out.std, out.norm, TILE=_TILE, AHEAD=AHEAD, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["number"])
def _inverse(scale, out, number, TILE: tl.constexpr):
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    value = tl.load(scale + place, mask=place < number, other=0.0)
    usable = (value >= 7.888609052210118e-31) & (value < float("inf"))
    found = (16777216.0 / tl.where(usable, value, 1.0).to(tl.float64)).to(tl.float32)
    short = (value * found < 16777216.0).to(tl.int32)
    found = (found.to(tl.int32, bitcast=True) + short).to(tl.float32, bitcast=True)
    tl.store(out + place, tl.where(usable, found, 0.0), mask=place < number)


def inverse(scale: torch.Tensor, out: torch.Tensor) -> None:
    launch(_inverse, cdiv(len(scale), _TILE), scale, out, len(scale), TILE=_TILE)
