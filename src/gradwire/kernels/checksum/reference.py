"""The reference of the checksum that docs/wire-format.md defines: constants, and a slow, clear implementation.

A step is a bijection of 64 bits (an odd product, then the upper half folded into the lower). So bodies of equal length
that differ in one word always have different sums; others have equal sums by chance, or by a few patterns. Blocks do
not depend on each other, so that a GPU can process them in parallel.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]


Words: TypeAlias = npt.NDArray[np.uint64]


LANES = 16


ROW_BYTES = 8 * LANES


BLOCK_BYTES = 1 << 14


MULTIPLIER = 0x9FB21C651E98DF25


START = 0x9E3779B97F4A7C15


SEED = 0xC2B2AE3D27D4EB4F


_MASK = 2**64 - 1


def reference_check(head: bytes, body: Bytes) -> int:
    """Return the checksum of a header, a multiple of 8 bytes, and a body.

    Example:
        >>> hex(reference_check(bytes(16), np.zeros(0, np.uint8)))
        '0xdd01590485810f26'
    """
    sums = _block_sums(body[:BLOCK_BYTES])
    for begin in range(BLOCK_BYTES, len(body), BLOCK_BYTES):
        sums = _step(sums, _block_sums(body[begin : begin + BLOCK_BYTES]))
    check = SEED
    for value in (*np.frombuffer(head, "<u8").tolist(), *sums.tolist()):
        check = (check ^ value) * MULTIPLIER & _MASK
        check ^= check >> 32
    return check


def _block_sums(block: Bytes) -> Words:
    rows = np.zeros((-(-len(block) // ROW_BYTES), LANES), "<u8")
    rows.reshape(-1).view(np.uint8)[: len(block)] = block
    sums = np.array([START * (lane + 1) & _MASK for lane in range(LANES)], np.uint64)
    for row in rows.astype(np.uint64):
        sums = _step(sums, row)
    return sums


def _step(sums: Words, words: Words) -> Words:
    mixed = (sums ^ words) * np.uint64(MULTIPLIER)
    return mixed ^ mixed >> np.uint64(32)
