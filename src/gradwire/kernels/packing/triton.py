# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Triton kernels that pack digits into words, unpack and add them; see :class:`DigitLayout`.

A row is 16 neighbouring values. Words are read and written whole if they are aligned, else byte by byte.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gradwire.kernels.packing.layout import DigitLayout
from gradwire.kernels.table import GROUP_SIZE, LANES
from gradwire.kernels.triton_core.device_tables import powers_of
from gradwire.kernels.triton_core.launch import cdiv, launch, tile

_TILE = 32


def aligned(data: torch.Tensor, layout: DigitLayout) -> bool:
    """Return whether words are aligned to their size, in each row of a matrix."""
    starts = [data.data_ptr(), data.stride(0)] if data.ndim == 2 else [data.data_ptr()]
    return all(start % layout.word_bytes == 0 for start in starts)


@triton.jit
def load_word(words, index, mask, BYTES: tl.constexpr, WHOLE: tl.constexpr):
    """Load words of ``BYTES`` bytes as uint32; zero where the mask is not set."""
    if BYTES == 1:
        word = tl.load(words + index, mask=mask, other=0).to(tl.uint32)
    elif WHOLE:
        if BYTES == 2:
            word = tl.load(words.to(tl.pointer_type(tl.uint16)) + index, mask=mask, other=0).to(tl.uint32)
        else:
            word = tl.load(words.to(tl.pointer_type(tl.uint32)) + index, mask=mask, other=0)
    else:
        word = tl.load(words + index * BYTES, mask=mask, other=0).to(tl.uint32)
        for octet in tl.static_range(1, BYTES):
            part = tl.load(words + index * BYTES + octet, mask=mask, other=0).to(tl.uint32)
            word = word | (part << (8 * octet))
    return word


@triton.jit
def store_word(words, index, word, mask, BYTES: tl.constexpr, WHOLE: tl.constexpr):
    """Store words of ``BYTES`` bytes."""
    if BYTES == 1:
        tl.store(words + index, word.to(tl.uint8), mask=mask)
    elif WHOLE:
        if BYTES == 2:
            tl.store(words.to(tl.pointer_type(tl.uint16)) + index, word.to(tl.uint16), mask=mask)
        else:
            tl.store(words.to(tl.pointer_type(tl.uint32)) + index, word, mask=mask)
    else:
        for octet in tl.static_range(BYTES):
            tl.store(words + index * BYTES + octet, (word >> (8 * octet)).to(tl.uint8), mask=mask)


@triton.jit
def digit(
    words, block, lane, mask, powers, PLACE: tl.constexpr, ROWS: tl.constexpr, BASE: tl.constexpr, DIGITS: tl.constexpr,
    BYTES: tl.constexpr, WHOLE: tl.constexpr, CLAMP: tl.constexpr,
):  # fmt: skip
    """Return the digits of the rows ``ROWS * block + PLACE``, int32.

    The highest digit of a word is not reduced modulo the base, but clamped if ``CLAMP``. If ``ROWS`` is a multiple of
    ``DIGITS``, all divisors are compile-time constants.
    """
    if ROWS % DIGITS == 0:
        place = PLACE % DIGITS
        index = block.to(tl.int64) * (ROWS // DIGITS) + PLACE // DIGITS
        quotient = load_word(words, index * 16 + lane, mask, BYTES, WHOLE) // (BASE ** (PLACE % DIGITS))
    else:
        row = block * ROWS + PLACE
        place = row % DIGITS
        word = load_word(words, (row // DIGITS).to(tl.int64) * 16 + lane, mask, BYTES, WHOLE)
        quotient = word // tl.load(powers + place).to(tl.uint32)
    highest = quotient
    if CLAMP:
        highest = tl.minimum(quotient, BASE - 1)
    return tl.where(place == DIGITS - 1, highest, quotient % BASE).to(tl.int32)


@triton.jit(do_not_specialize=["rows", "blocks"])
def _pack(
    values, rows, out, blocks, BASE: tl.constexpr, DIGITS: tl.constexpr, BYTES: tl.constexpr, WHOLE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    lane = tl.arange(0, 16)[None, :]
    word = tl.zeros([TILE, 16], tl.uint32)
    for place in tl.static_range(DIGITS):
        row = block * DIGITS + place
        mask = (row < rows) & (lane < 16)
        value = tl.load(values + row.to(tl.int64) * 16 + lane, mask=mask, other=BASE // 2)
        word += value.to(tl.uint32) * (BASE**place)
    store_word(out, block.to(tl.int64) * 16 + lane, word, (block < blocks) & (lane < 16), BYTES, WHOLE)


def pack_digits(values: torch.Tensor, layout: DigitLayout, out: torch.Tensor) -> None:
    """Pack whole rows of uint16 values into bytes."""
    blocks = layout.blocks(values.numel())
    launch(
        _pack, cdiv(blocks, tile(_TILE)), values, values.numel() // LANES, out, blocks,
        BASE=layout.base, DIGITS=layout.digits, BYTES=layout.word_bytes, WHOLE=aligned(out, layout), TILE=tile(_TILE),
    )  # fmt: skip


@triton.jit(do_not_specialize=["number", "stride", "rows", "blocks"])
def _sum(
    words, number, stride, rows, powers, out, blocks,
    BASE: tl.constexpr, DIGITS: tl.constexpr, BYTES: tl.constexpr, WHOLE: tl.constexpr, CLAMP: tl.constexpr,
    OUT_BASE: tl.constexpr, OUT_DIGITS: tl.constexpr, OUT_BYTES: tl.constexpr, OUT_WHOLE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    lane = tl.arange(0, 16)[None, :]
    step = stride.to(tl.int64)
    word = tl.zeros([TILE, 16], tl.uint32)
    for place in tl.static_range(OUT_DIGITS):
        row = block * OUT_DIGITS + place
        mask = (row < rows) & (lane < 16)
        total = tl.zeros([TILE, 16], tl.int32)
        for source in range(number):
            total += digit(
                words + source * step, block, lane, mask, powers, place, OUT_DIGITS, BASE, DIGITS, BYTES, WHOLE, CLAMP
            )
        word += tl.where(mask, total, OUT_BASE // 2).to(tl.uint32) * (OUT_BASE**place)
    store_word(out, block.to(tl.int64) * 16 + lane, word, (block < blocks) & (lane < 16), OUT_BYTES, OUT_WHOLE)


def sum_rows(
    rows: torch.Tensor, groups: int, layout: DigitLayout, down: DigitLayout, out: torch.Tensor, clamp: bool
) -> None:  # fmt: skip
    """Add rows of packed digits, digit by digit, and pack the sums; ``clamp`` as for :func:`digit`."""
    blocks = down.blocks(GROUP_SIZE * groups)
    launch(
        _sum, cdiv(blocks, tile(_TILE)), rows, rows.shape[0], rows.stride(0), GROUP_SIZE // LANES * groups,
        powers_of(layout, rows.device), out, blocks,
        BASE=layout.base, DIGITS=layout.digits, BYTES=layout.word_bytes, WHOLE=aligned(rows, layout), CLAMP=clamp,
        OUT_BASE=down.base, OUT_DIGITS=down.digits, OUT_BYTES=down.word_bytes, OUT_WHOLE=aligned(out, down),
        TILE=tile(_TILE),
    )  # fmt: skip
