"""Lengths and codes of the Huffman coder.

Plain integer arithmetic on arrays, so that one source serves the reference as it stands and the compiled backends.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["LENGTH_BYTES", "MAX_LENGTH", "STREAMS", "assign_codes", "choose_lengths", "read_lengths", "write_lengths"]

MAX_LENGTH = 11
STREAMS = 4
LENGTH_BYTES = 128


def choose_lengths(counts: Any, lengths: Any, order: Any, weights: Any, leaves: Any) -> None:
    """Find code ``lengths`` (int64 ``[256]``) of at most 11 that code ``counts`` (int64 ``[256]``) in the fewest bits.

    Package-merge (Larmore and Hirschberg, "A fast algorithm for optimal length-limited Huffman codes", JACM 1990):
    each of 11 lists holds the symbols and, in pairs, the list before; the ``2 m - 2`` lightest of the last list are
    taken, and a symbol's length is how often it is among what was taken. Of equals, the smaller symbol and then the
    single one goes first. At least two counts are positive.

    Args:
        order: scratch, int64 ``[256]``.
        weights: scratch, int64 ``[2, 512]``.
        leaves: scratch, uint8 ``[11, 512]``: which items of each list are single symbols.
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
    """Return each symbol its canonical code (int64 ``[256]``), bits reversed; tell whether the lengths fill the code.

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
    """Read the lengths; tell whether none is too large and there are two at least."""
    used = 0
    for symbol in range(256):
        length = (np.int64(data[at + (symbol >> 1)]) >> (4 * (symbol & 1))) & 15
        if length > MAX_LENGTH:
            return False
        lengths[symbol] = length
        used += 1 if length > 0 else 0
    return used >= 2
