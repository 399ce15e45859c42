"""Random permutations and subsets that all ranks compute identically, without storing a permutation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from gradwire.kernels.philox import philox
from gradwire.seeds import SHARED

TURNS = 6
"""Turns of the network. After four, neighbours share a part too often: by six deviations in 4000 draws."""

TILE = 1 << 16
"""Places computed at once, so that temporaries stay in the cache."""

LARGE = 1 << 12
"""Number of places from which a parameter is computed separately, with scalars instead of vectors of its constants."""

_WORD = 0xFFFFFFFF

Integers: TypeAlias = npt.NDArray[np.int64]


class FeistelPermutation:
    """A fresh permutation of each parameter's elements in every cycle, cut into ``parts`` parts of nearly equal size.

    Part t of n elements has the elements at places ``floor(t n / parts) .. floor((t + 1) n / parts)`` of the
    permutation. It fills the first of ``ceil(n / parts)`` slots; at most one slot is empty.

    The permutation is a Feistel network on pairs (l, r) with ``place = l b + r``, a = ceil(sqrt(n)), b = ceil(n / a)::

        even turns:  l <- (l + F(r)) mod a          F(v) = floor(mix((k v + m) mod 2^32) a / 2^32)
        odd turns:   r <- (r + F(l)) mod b          F(v) = floor(mix((k v + m) mod 2^32) b / 2^32)

    (mix is the finaliser of MurmurHash3), applied again while l b + r >= n, which happens for one in sqrt(n) or fewer.
    So the element at any place is computed without the others: a part takes time and memory of its own size, no rank
    stores anything, and nothing depends on the layout. For turn i, k and m are words 2 (i mod 2) and 2 (i mod 2) + 1 of
    Philox block i div 2 with the parameter's key, the cycle in place of the round, and a stream, by default the shared
    one; the lowest bit of k is set.

    Args:
        numel: Number of elements of each parameter, above 0 and below 2^40.
        key: Philox key of each parameter.
        parts: Number of parts of a cycle.
        slots: Number of elements of each parameter that :meth:`first` returns, if there are no parts.

    Reference: J. Black, P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, sections 4 and 5.

    Example:
        >>> shuffle = FeistelPermutation([10], [(1, 2)], parts=3)
        >>> sorted(int(i) for part in range(3) for i in shuffle.part(0, part)[0][:3 + (part == 2)])
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    def __init__(
        self, numel: Sequence[int], key: Sequence[tuple[int, int]], parts: int = 1, slots: Sequence[int] | None = None
    ) -> None:
        self.numel, self.parts = [int(n) for n in numel], parts
        self.slots = [-(-n // parts) for n in self.numel] if slots is None else list(slots)
        self._key = torch.tensor(list(key), dtype=torch.int64, device="cpu").reshape(-1, 2)
        self._drawn: tuple[tuple[int, int], npt.NDArray[np.uint32]] | None = None
        rows = [math.isqrt(n - 1) + 1 for n in self.numel]
        columns = [-(-n // r) for n, r in zip(self.numel, rows)]
        self._shape = np.array([self.numel, rows, columns], np.int64).reshape(3, -1)
        self._slot = np.cumsum([0, *self.slots], dtype=np.int64)[:-1]
        self._together, self._alone = _batches(self.slots)

    def part(self, cycle: int, part: int) -> tuple[Integers, Integers | None]:
        """Return the elements of one part, parameter after parameter, each counted within its parameter.

        Returns:
            An element for each slot, int64 ``[sum of slots]``, and the filled slots, ascending, or None for all. The
            element of an empty slot has no meaning.
        """
        begin = part * self._shape[0] // self.parts
        count = (part + 1) * self._shape[0] // self.parts - begin
        elements = self._elements(self._words(cycle, SHARED), begin, count)
        filled = int(count.sum())
        if filled == len(elements):
            return elements, None
        return elements, np.arange(filled) + np.repeat(self._slot - (np.cumsum(count) - count), count)

    def first(self, cycle: int, stream: int) -> Integers:
        """Return the elements at the first places, an element for each slot, each counted within its parameter."""
        count = np.array(self.slots, np.int64)
        return self._elements(self._words(cycle, stream), np.zeros_like(count), count)

    def _elements(self, words: npt.NDArray[np.uint32], begin: Integers, count: Integers) -> Integers:
        """Return the elements at ``count`` places from ``begin`` on, from the first slot of each parameter on."""
        elements = np.zeros(sum(self.slots), np.int64)
        for owners in self._together:
            some = count[owners]
            owner, each = np.repeat(owners, some), np.arange(some.sum()) - np.repeat(np.cumsum(some) - some, some)
            elements[self._slot[owner] + each] = _permute(begin[owner] + each, owner, self._shape, words)
        for i in self._alone:
            slot, first, end = int(self._slot[i]), int(begin[i]), int(begin[i] + count[i])
            for at in range(first, end, TILE):
                place = np.arange(at, min(end, at + TILE))
                elements[slot + at - first :][: len(place)] = _permute(place, i, self._shape, words)
        return elements

    def _words(self, cycle: int, stream: int) -> npt.NDArray[np.uint32]:
        """Draw the words of all turns, ``[TURNS, 2, parameters]``, once a cycle."""
        known = self._drawn
        if known is not None and known[0] == (cycle, stream):
            return known[1]
        block = torch.arange(TURNS // 2, device="cpu")[None, :].expand(len(self._key), -1)
        low, high, last = (torch.full_like(block, word & _WORD) for word in (cycle, cycle >> 32, stream))
        drawn = philox((block, low, high, last), (self._key[:, :1], self._key[:, 1:]))
        words = torch.stack(drawn, dim=2).reshape(-1, TURNS, 2).permute(1, 2, 0).numpy().astype(np.uint32)
        words[:, 0] |= np.uint32(1)
        self._drawn = (cycle, stream), words
        return words


def _batches(slots: Sequence[int]) -> tuple[list[Integers], list[int]]:
    """Return the parameters to compute together, at most a tile at a time, and those to compute alone."""
    together: list[list[int]] = []
    alone, room = [], 0
    for i, count in enumerate(slots):
        if count >= LARGE:
            alone.append(i)
            continue
        if count > room:
            together.append([])
            room = TILE
        together[-1].append(i)
        room -= count
    return [np.array(batch, np.int64) for batch in together], alone


def _permute(place: Integers, owner: Integers | int, shape: Integers, words: npt.NDArray[np.uint32]) -> Integers:
    """Return the elements at some places in the permutations of the owning parameters, or of one parameter."""
    found = _network(place, owner, shape, words)
    numel = shape[0, owner]
    while len(beyond := np.flatnonzero(found >= numel)):
        whose = owner if isinstance(owner, int) else owner[beyond]
        found[beyond] = _network(found[beyond], whose, shape, words)
    return found


def _network(place: Integers, owner: Integers | int, shape: Integers, words: npt.NDArray[np.uint32]) -> Integers:
    """Permute numbers below rows times columns, with the shape and the words of each place's owner."""
    _, rows, columns = shape[:, owner]
    high = place // columns
    left, right = high.astype(np.uint32), (place - high * columns).astype(np.uint32)
    mixed, other, wide = np.empty_like(left), np.empty_like(left), np.empty(len(left), np.uint64)
    for turn, (factor, shift) in enumerate(words[:, :, owner]):
        source, target, size = (left, right, columns) if turn % 2 else (right, left, rows)
        np.multiply(source, factor, out=mixed)
        mixed += shift
        for down, multiplier in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
            mixed ^= np.right_shift(mixed, np.uint32(down), out=other)
            mixed *= np.uint32(multiplier)
        np.multiply(mixed, size.astype(np.uint64), out=wide)
        wide >>= np.uint64(32)
        np.copyto(mixed, wide, casting="unsafe")
        target += mixed
        # The difference of a number below the size wraps around to a larger one.
        np.minimum(target, np.subtract(target, size.astype(np.uint32), out=other), out=target)
    permuted: Integers = left.astype(np.int64) * columns + right
    return permuted


class RandomElements:
    """Draws k elements of each parameter, anew in every round, for a stream.

    They are those at the first k places of a :class:`FeistelPermutation`, a uniform choice without replacement; or a
    run of consecutive elements with a uniform start, which wraps at the end: for d elements the start is
    ``floor(w d / 2^64)``, w the words 0 (low) and 1 of Philox block 0.

    Args:
        numel: Number of elements of each parameter.
        key: Philox key of each parameter.
        counts: k of each parameter.
        contiguous: True for a run.
    """

    def __init__(
        self, numel: Sequence[int], key: Sequence[tuple[int, int]], counts: Sequence[int], contiguous: bool
    ) -> None:
        self.slots = list(counts)
        self._shuffle = None if contiguous else FeistelPermutation(numel, key, slots=counts)
        self._numel = list(numel)
        self._key = torch.tensor(list(key), dtype=torch.int64, device="cpu").reshape(-1, 2)

    def draw(self, round: int, stream: int) -> npt.NDArray[np.int64]:
        """Return the elements, parameter after parameter, each counted within its parameter."""
        if self._shuffle is not None:
            return self._shuffle.first(round, stream)
        zero = torch.zeros(len(self._key), dtype=torch.int64, device="cpu")
        early, late, last = (torch.full_like(zero, word & _WORD) for word in (round, round >> 32, stream))
        words = philox((zero, early, late, last), (self._key[:, 0], self._key[:, 1]))
        low, high = words[0].tolist(), words[1].tolist()
        runs = [
            ((((h << 32) | w) * d >> 64) + np.arange(k)) % d for w, h, d, k in zip(low, high, self._numel, self.slots)
        ]
        return np.concatenate([np.zeros(0, np.int64), *runs]).astype(np.int64)
