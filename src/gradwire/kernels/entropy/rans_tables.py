"""Frequencies of the rANS coder: how they are chosen, written and read.

Plain integer arithmetic on arrays, so that one source serves the reference as it stands and the compiled backends.
Indices: 0 to 255 are symbols, 256 is the escape.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = [
    "ESCAPE",
    "SCALE",
    "SCALE_BITS",
    "choose_frequencies",
    "read_frequencies",
    "sample_step",
    "write_frequencies",
]

SCALE_BITS = 12
SCALE = 1 << SCALE_BITS
ESCAPE = 256

BITMAP_BYTES = 32


def sample_step(symbols: int) -> int:
    """Of how many rows of 128 symbols one is counted: 1 below 2^17 symbols, 16 from 2^20 on.

    From 2^16 samples the 256 frequencies are off by so little that coding by them costs some 256 / (2 ln 2 * 2^16)
    = 0.003 bits a symbol; what the sample lacks is escaped.
    """
    return min(16, max(1, symbols >> 16))


def choose_frequencies(counts: Any, frequencies: Any) -> None:
    """Turn ``counts`` (int64 ``[256]``) into ``frequencies`` (int64 ``[257]``) that sum to 4096.

    A symbol rarer than 1 in 8192 is not listed (frequency 0): its own slot would take more from the others than its
    escapes cost. With ``C_k`` the counts of the listed symbols up to the k-th, then of all others together, the k-th
    frequency is ``max(1, floor(4096 C_k / C) - floor(4096 C_{k-1} / C))``; what the ``max`` gave too much is taken
    from the largest, a sixteenth of it at a time.
    """
    total, rare, unlisted = 0, 0, 0
    for symbol in range(256):
        total += counts[symbol]
    for symbol in range(256):
        frequencies[symbol] = 1
        if counts[symbol] * (2 * SCALE) < total or counts[symbol] == 0:
            frequencies[symbol] = 0
            rare += counts[symbol]
            unlisted += 1
    frequencies[ESCAPE] = 1 if unlisted > 0 else 0
    running, given, excess = 0, 0, -SCALE
    for index in range(257):
        if frequencies[index] > 0:
            running += rare if index == ESCAPE else counts[min(index, 255)]
            upto = running * SCALE // total
            frequencies[index] = max(1, upto - given)
            excess += frequencies[index]
            given = upto
    while excess > 0:
        largest = 0
        for index in range(257):
            if frequencies[index] > frequencies[largest]:
                largest = index
        part = min(excess, max(1, frequencies[largest] >> 4))
        frequencies[largest] -= part
        excess -= part


def write_frequencies(frequencies: Any, out: Any, at: int) -> int:
    """Write the bitmap and the half bytes to ``out[at:]``; return the end, or -1 where ``out`` has no room."""
    if at + BITMAP_BYTES + 514 > len(out):
        return -1
    for octet in range(BITMAP_BYTES):
        bits = 0
        for bit in range(8):
            if frequencies[8 * octet + bit] > 0:
                bits |= 1 << bit
        out[at + octet] = bits
    at += BITMAP_BYTES
    half = 0
    for turn in range(257):
        rest = frequencies[ESCAPE if turn == 0 else turn - 1] - 1
        while rest >= 0:
            nibble = rest & 7
            rest >>= 3
            if rest > 0:
                nibble |= 8
            else:
                rest = -1
            if half == 0:
                out[at] = nibble
            else:
                out[at] |= np.uint8(nibble << 4)
                at += 1
            half = 1 - half
    return at + half


def read_frequencies(data: Any, at: int, stop: int, frequencies: Any) -> bool:
    """Read what :func:`write_frequencies` wrote to ``data[at:stop]``; tell whether it is valid and ends there."""
    if stop - at < BITMAP_BYTES:
        return False
    listed = 0
    for symbol in range(256):
        frequencies[symbol] = (np.int64(data[at + (symbol >> 3)]) >> (symbol & 7)) & 1
        listed += frequencies[symbol]
    frequencies[ESCAPE] = 1 if listed < 256 else 0
    half, end, total = 2 * (at + BITMAP_BYTES), 2 * stop, np.int64(0)
    for turn in range(257):
        index = ESCAPE if turn == 0 else turn - 1
        if frequencies[index] == 0:
            continue
        value, shift = np.int64(0), 0
        while True:
            if half >= end or shift > 9:
                return False
            nibble = (np.int64(data[half >> 1]) >> (4 * (half & 1))) & 15
            half += 1
            value |= (nibble & 7) << shift
            if nibble < 8:
                if nibble == 0 and shift > 0:
                    return False
                break
            shift += 3
        frequencies[index] = value + 1
        total += value + 1
        if value + 1 >= SCALE:
            return False
    if half & 1:
        if np.int64(data[half >> 1]) >> 4 != 0:
            return False
        half += 1
    return half == end and total == SCALE
