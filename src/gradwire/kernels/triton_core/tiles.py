# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""The tile of a program: some groups of 80 elements by the 16 lanes of a group."""

from __future__ import annotations

import triton
import triton.language as tl

from gradwire.kernels.triton_core.philox import philox

__all__ = ["elements_of", "words_of"]


@triton.jit
def elements_of(at, room, begin, end, TILE: tl.constexpr):
    """Return what a program's tile holds of the groups ``begin .. end``.

    ``[TILE, 1]`` each: the numbers of the groups, whether there are such, where their first elements lie and how many
    they have; and the lanes, ``[1, 16]``.
    """
    group = begin + tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    known = group < end
    place = tl.load(at + group, mask=known, other=0)
    last = tl.load(room + group, mask=known, other=0)
    return group, known, place, last, tl.arange(0, 16)[None, :]


@triton.jit
def words_of(number, segment, key, group, known, lane, low, high, stream):
    """Return the segments of a tile's groups, ``[TILE, 1]``, and the four random words of each lane of each group."""
    own = tl.load(segment + group, mask=known, other=0)
    block = tl.load(number + group, mask=known, other=0) * 16 + lane
    w0, w1, w2, w3 = philox(block, low, high, stream, tl.load(key + 2 * own), tl.load(key + 2 * own + 1))
    return own, w0, w1, w2, w3
