"""Numbers of the format of changes: rows of blocks, symbols of distances, and the sum of words.

``docs/patch-format.md`` states the format in prose.
"""

from __future__ import annotations

RICE, BITMAP, WIDTH, INVERTED = 0, 31, 32, 64
"""Form of a block's positions: Rice codes with r = 0 to 30, bitmap, widths of 0 to 31 bits.

``INVERTED`` is added where the elements that are *not* changed are listed.
"""

ROW = 3
"""Integers of a block's row: form of its positions, number of changes, bytes of its positions."""

EXACT = 64
"""Distances below have a symbol of their own for each sign."""

FIRST_CLASS = 2 * (EXACT - 1)
"""Symbol of the first class of larger distances. There are two classes for each power of two."""

SYMBOLS = FIRST_CLASS + 2 * (64 - 6)
"""Number of symbols: distances have at most 64 bits."""

WIDTHS = (1, 2, 4, 8)
"""Bytes of an element."""

CHECK, WRITE, WRITE_CHECKED = 0, 1, 2
"""What to do with changes: check them, and sum up the whole base; write them; write them, and follow the sum."""

LINE_BYTES = 64
"""Bytes that are compared, summed and written at a time."""

KEY = 0x9E3779B97F4A7C15
FIRST_FACTOR, SECOND_FACTOR = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
FIRST_SHIFT, SECOND_SHIFT, THIRD_SHIFT = 30, 27, 31
"""Constants of the mixing of a word, the output function of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""


def rice_candidates(gaps: int, count: int) -> tuple[int, int]:
    """Return the least and the largest parameter r to compare for ``count`` gaps that sum to ``gaps``.

    Codes are shortest for 2^r near ln 2 times the mean gap (Golomb, IEEE Transactions on Information Theory 12, 1966).
    """
    near = (gaps // count * 45) >> 6
    middle = 0
    while near > 1:
        near >>= 1
        middle += 1
    return max(0, middle - 1), min(30, middle + 1)


def rice_bytes(count: int, quotients: int, r: int) -> int:
    """Return the bytes of Rice codes with parameter r for ``count`` gaps whose quotients sum to ``quotients``.

    The lower parts of all gaps come first, r bits each, so that they are found without reading one after the other; the
    quotients follow, each as so many zeros and a 1.
    """
    return ((count * r + 7) >> 3) + ((count + quotients + 7) >> 3)
