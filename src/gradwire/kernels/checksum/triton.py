# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Checksums as Triton computes them: a program a row, whose sixteen sums are lanes of one tile.

The words of a lane depend on each other, as they do on the CPU, so that a row takes as many steps as it has words of a
lane; rows run side by side. Octets are loaded one by one: neither bodies nor their lengths are aligned.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gradwire.kernels.checksum.reference import LANES, MULTIPLIER, ROW_BYTES, SEED, START
from gradwire.kernels.triton_core.launch import launch

__all__ = ["row_checksums"]


@triton.jit(do_not_specialize=["stride", "length", "words"])
def _checksums(
    rows, stride, length, heads, words, out,
    MULTIPLIER: tl.constexpr, START: tl.constexpr, SEED: tl.constexpr, LANES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    octet = tl.arange(0, 8)
    one = tl.arange(0, 1)
    multiplier = tl.full([LANES], MULTIPLIER, tl.uint64)
    factor = tl.full([1], MULTIPLIER, tl.uint64)
    sums = tl.full([LANES], START, tl.uint64) * (lane + 1).to(tl.uint64)
    body = rows + row * stride.to(tl.int64)
    for at in range(0, length, STEP):
        place = at + 8 * lane[:, None] + octet[None, :]
        value = tl.load(body + place, mask=place < length, other=0).to(tl.uint64)
        sums = (sums ^ tl.sum(value << (8 * octet[None, :]).to(tl.uint64), axis=1)) * multiplier
        sums ^= sums >> 32
    check = tl.full([1], SEED, tl.uint64)
    for word in range(words):
        value = tl.load(heads + row * words + word + one).to(tl.uint64, bitcast=True)
        check = (check ^ value) * factor
        check ^= check >> 32
    for source in tl.static_range(LANES):
        check = (check ^ tl.sum(tl.where(lane == source, sums, tl.zeros_like(sums)), axis=0)) * factor
        check ^= check >> 32
    tl.store(out + row + one, check.to(tl.int64, bitcast=True))


def row_checksums(heads: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
    """Compute the checksum of each row of bytes with the words of its head.

    Args:
        heads: int64 ``[rows, words]``, contiguous, with the bits of uint64.
        rows: uint8 ``[rows, bytes]``; the bytes of a row are neighbours in memory.
        out: int64 ``[rows]``.
    """
    launch(
        _checksums, len(rows), rows, rows.stride(0), rows.shape[1], heads, heads.shape[1], out,
        MULTIPLIER=MULTIPLIER, START=START, SEED=SEED, LANES=LANES, STEP=ROW_BYTES, num_warps=1,
    )  # fmt: skip
