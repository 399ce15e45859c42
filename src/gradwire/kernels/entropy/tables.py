"""Tables of the coders: rANS frequencies and Huffman code lengths, how they are chosen, written and read.

The functions do plain integer arithmetic on arrays, so that the reference calls them as they are, and the compiled
backends compile them. Of the indices of frequencies, 0 to 255 are symbols, 256 is the escape.
"""

from __future__ import annotations

from typing import Any

import numpy as np

SCALE_BITS = 12
SCALE = 1 << SCALE_BITS
ESCAPE = 256

BITMAP_BYTES = 32


def sample_step(symbols: int) -> int:
    """Return the step between counted rows of 128 symbols: 1 below 2^17 symbols, 16 from 2^20 on.

    With at least 2^16 samples, the errors of 256 frequencies cost about 256 / (2 ln 2 * 2^16) = 0.003 bits for each
    symbol. Symbols that are not in the sample are escaped.
    """
    return min(16, max(1, symbols >> 16))


def choose_frequencies(counts: Any, frequencies: Any) -> None:
    """Turn ``counts`` (int64 ``[256]``) into ``frequencies`` (int64 ``[257]``) that sum to 4096.

    A symbol rarer than 1 in 8192 is not listed (frequency 0), since a slot for it would cost the others more than its
    escapes do. With ``C_k`` the sum of counts of the listed symbols up to the k-th, and of all other symbols last, the
    k-th frequency is ``max(1, floor(4096 C_k / C) - floor(4096 C_{k-1} / C))``. The excess that ``max`` causes is
    taken from the largest frequency, a sixteenth of it at a time.
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
    """Write the bitmap and the half bytes to ``out[at:]``; return their end, or -1 if ``out`` is too short."""
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
    """Invert :func:`write_frequencies` for ``data[at:stop]``; return whether it is valid and ends at ``stop``."""
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


MAX_LENGTH = 11
STREAMS = 4
LENGTH_BYTES = 128


def choose_lengths(counts: Any, lengths: Any, order: Any, weights: Any, leaves: Any) -> None:
    """Find code ``lengths`` (int64 ``[256]``) of at most 11 that code ``counts`` (int64 ``[256]``) in the fewest bits.

    Package-merge (Larmore and Hirschberg, "A fast algorithm for optimal length-limited Huffman codes", JACM 1990):
    each of 11 lists holds the symbols and pairs of items of the list before. The ``2 m - 2`` lightest items of the last
    list are taken, and the length of a symbol is the number of times that they contain it. Of equal weights, the
    smaller symbol comes first, and a single symbol before a pair. At least two counts are positive.

    Args:
        order: Scratch memory, int64 ``[256]``.
        weights: Scratch memory, int64 ``[2, 512]``.
        leaves: Scratch memory, uint8 ``[11, 512]``: marks items that are single symbols, for each list.
    """
    used = 0
    for symbol in range(256):
        lengths[symbol] = 0
        if counts[symbol] > 0:
            place = used
            while place > 0 and counts[order[place - 1]] > counts[symbol]:
                order[place] = order[place - 1]
                place -= 1
            order[place] = symbol
            used += 1
    size = 0
    for level in range(MAX_LENGTH):
        now, before = weights[level & 1], weights[1 - (level & 1)]
        single, pair, place = 0, 0, 0
        while single < used or 2 * pair + 1 < size:
            packed = before[2 * pair] + before[2 * pair + 1] if 2 * pair + 1 < size else -1
            if single < used and (packed < 0 or counts[order[single]] <= packed):
                now[place] = counts[order[single]]
                leaves[level, place] = 1
                single += 1
            else:
                now[place] = packed
                leaves[level, place] = 0
                pair += 1
            place += 1
        size = place
    wanted = 2 * used - 2
    for down in range(MAX_LENGTH):
        level = MAX_LENGTH - 1 - down
        single = 0
        for place in range(wanted):
            if leaves[level, place] != 0:
                lengths[order[single]] += 1
                single += 1
        wanted = 2 * (wanted - single)


def assign_codes(lengths: Any, codes: Any) -> bool:
    """Write each symbol's canonical code (int64 ``[256]``), bits reversed; return whether the code is complete.

    Example:
        >>> lengths, codes = np.zeros(256, np.int64), np.zeros(256, np.int64)
        >>> lengths[:3] = (2, 1, 2)
        >>> assign_codes(lengths, codes), [format(code, "02b") for code in codes[:3]]
        (True, ['01', '00', '11'])
    """
    code = 0
    for length in range(1, MAX_LENGTH + 1):
        code <<= 1
        for symbol in range(256):
            if lengths[symbol] == length:
                turned = 0
                for bit in range(length):
                    turned |= ((code >> bit) & 1) << (length - 1 - bit)
                codes[symbol] = turned
                code += 1
    return code == 1 << MAX_LENGTH


def write_lengths(lengths: Any, out: Any, at: int) -> None:
    """Write the lengths as half bytes."""
    for octet in range(LENGTH_BYTES):
        out[at + octet] = lengths[2 * octet] | lengths[2 * octet + 1] << 4


def read_lengths(data: Any, at: int, lengths: Any) -> bool:
    """Read the lengths; return whether none is too large and at least two are not zero."""
    used = 0
    for symbol in range(256):
        length = (np.int64(data[at + (symbol >> 1)]) >> (4 * (symbol & 1))) & 15
        if length > MAX_LENGTH:
            return False
        lengths[symbol] = length
        used += 1 if length > 0 else 0
    return used >= 2
