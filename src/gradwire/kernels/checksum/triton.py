# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Triton kernels of checksums: one program sums a block of a row in sixteen lanes, another joins a row's blocks.

The steps of a lane depend on each other, as on the CPU. Bodies of aligned whole words are loaded word by word, others
byte by byte.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gradwire.kernels.checksum.reference import BLOCK_BYTES, LANES, MULTIPLIER, ROW_BYTES, SEED, START
from gradwire.kernels.triton_core.launch import cdiv, launch

_AHEAD = 8
"""Rows of 128 bytes that are loaded at the same time, since loads do not depend on sums."""


@triton.jit
def _step(sums, words, MULTIPLIER: tl.constexpr):
    mixed = (sums ^ words) * tl.full([1], MULTIPLIER, tl.uint64)
    return mixed ^ (mixed >> 32)


@triton.jit
def _words(body, place, length, lane, WHOLE: tl.constexpr):
    """Load sixteen words from ``place`` on, with zeros past the end."""
    if WHOLE:
        at = place + 8 * lane
        word = tl.load((body + at).to(tl.pointer_type(tl.uint64)), mask=at < length, other=0)
    else:
        octet = tl.arange(0, 8)
        at = place + 8 * lane[:, None] + octet[None, :]
        value = tl.load(body + at, mask=at < length, other=0).to(tl.uint64)
        word = tl.sum(value << (8 * octet[None, :]).to(tl.uint64), axis=1)
    return word


@triton.jit(do_not_specialize=["stride", "length", "blocks"])
def _sum_blocks(
    rows, stride, length, blocks, sums, MULTIPLIER: tl.constexpr, START: tl.constexpr, LANES: tl.constexpr,
    STEP: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    begin = (program % blocks) * BLOCK
    body = rows + (program // blocks) * stride.to(tl.int64)
    end = tl.minimum(begin + BLOCK, length)
    found = tl.full([LANES], START, tl.uint64) * (lane + 1).to(tl.uint64)
    for place in range(begin, end, STEP * AHEAD):
        for row in tl.static_range(AHEAD):
            here = place + STEP * row
            mixed = _step(found, _words(body, here, length, lane, WHOLE), MULTIPLIER)
            found = tl.where(here < end, mixed, found)
    tl.store(sums + program * LANES + lane, found.to(tl.int64, bitcast=True))


@triton.jit(do_not_specialize=["blocks", "words"])
def _join(
    sums, blocks, heads, words, out, MULTIPLIER: tl.constexpr, SEED: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    one = tl.arange(0, 1)
    first = sums + row * blocks * LANES + lane
    found = tl.load(first).to(tl.uint64, bitcast=True)
    for block in range(1, blocks):
        found = _step(found, tl.load(first + block * LANES).to(tl.uint64, bitcast=True), MULTIPLIER)
    check = tl.full([1], SEED, tl.uint64)
    for word in range(words):
        check = _step(check, tl.load(heads + row * words + word + one).to(tl.uint64, bitcast=True), MULTIPLIER)
    for source in tl.static_range(LANES):
        value = tl.sum(tl.where(lane == source, found, tl.zeros_like(found)), axis=0)
        check = _step(check, value, MULTIPLIER)
    tl.store(out + row + one, check.to(tl.int64, bitcast=True))


def row_checksums(heads: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
    """Compute the checksum of each row of bytes with the words of its head.

    Args:
        heads: int64 ``[rows, words]``, contiguous, with the bits of uint64.
        rows: uint8 ``[rows, bytes]``; the bytes of a row are contiguous.
        out: int64 ``[rows]``.
    """
    number, length = rows.shape
    blocks = max(1, cdiv(length, BLOCK_BYTES))
    sums = torch.empty(number * blocks * LANES, dtype=torch.int64, device=rows.device)
    whole = not any(value % 8 for value in (rows.data_ptr(), rows.stride(0), length))
    launch(
        _sum_blocks, number * blocks, rows, rows.stride(0), length, blocks, sums, MULTIPLIER=MULTIPLIER, START=START,
        LANES=LANES, STEP=ROW_BYTES, BLOCK=BLOCK_BYTES, AHEAD=_AHEAD, WHOLE=whole, num_warps=1,
    )  # fmt: skip
    launch(
        _join, number, sums, blocks, heads, heads.shape[1], out, MULTIPLIER=MULTIPLIER, SEED=SEED, LANES=LANES,
        num_warps=1,
    )  # fmt: skip
