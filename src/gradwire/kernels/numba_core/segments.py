# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""The walk over the groups of segments, and what a body needs to know of where it stands."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

__all__ = ["Noise", "Piece", "RandomStream", "draw_of", "find_segment", "next_piece", "noise_at"]


class RandomStream(NamedTuple):
    """Which random words are drawn: see :mod:`gradwire.kernels.philox`."""

    round: np.uint64
    stream: np.uint32


class Noise(NamedTuple):
    """What the random words of a piece are computed from; ``block`` is that of its first lane."""

    key0: np.uint32
    key1: np.uint32
    round: np.uint64
    stream: np.uint32
    block: int


class Piece(NamedTuple):
    """Neighbouring groups of one segment, from the one asked for up to ``stop``.

    ``within`` elements of the segment lie before them; the first of their ``numel`` elements is ``x[at]``.
    """

    segment: int
    stop: int
    within: int
    at: int
    numel: int


def draw_of(round: int, stream: int) -> RandomStream:
    """Return a draw in the types that compiled code expects."""
    return RandomStream(np.uint64(round), np.uint32(stream))


@njit(nogil=True)
def find_segment(table, group):
    """Return the segment that a group lies in, or one before it without groups between."""
    low, high = 0, max(1, table.offset.size)
    while high - low > 1:
        middle = (low + high) // 2
        if table.first_group[middle] <= group:
            low = middle
        else:
            high = middle
    return low


@njit(nogil=True)
def next_piece(table, segment, group, end):
    """Return the piece that begins at ``group``, which lies in ``segment`` or after it, up to group ``end``."""
    while table.first_group[segment + 1] <= group:
        segment += 1
    within = 80 * (group - table.first_group[segment])
    stop = min(end, table.first_group[segment + 1])
    count = min(80 * (stop - group), table.numel[segment] - within)
    return Piece(segment, stop, within, table.offset[segment] + within, count)


@njit(nogil=True)
def noise_at(table, piece, draw):
    """Return what the random words of a piece are computed from."""
    segment = piece.segment
    block = (table.start[segment] + piece.within) // 80 * 16
    return Noise(table.key[segment, 0], table.key[segment, 1], draw.round, draw.stream, block)
