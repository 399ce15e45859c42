# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Philox in compiled code: the words of one block in plain Numba, and of 16 blocks in explicit vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit

from gradwire.kernels.numba_core.vectors import I32, I64, Emitter, vector
from gradwire.kernels.philox import KEY_STEPS, MULTIPLIERS, ROUNDS

# Numba widens 32-bit arithmetic to 64 bits, so every step is cast back.
_u32, _u64 = np.uint32, np.uint64
_MASK, _HALF = _u64(0xFFFFFFFF), _u64(32)
_M0, _M1 = _u64(MULTIPLIERS[0]), _u64(MULTIPLIERS[1])
_W0, _W1 = _u32(KEY_STEPS[0]), _u32(KEY_STEPS[1])


@njit(nogil=True)
def plain_five_words(noise, lane):
    """Return the words of five planes of a lane: four of Philox, and one made of their spare low bytes."""
    c0, c1 = _u64(noise.block + lane) & _MASK, noise.round & _MASK
    c2, c3 = noise.round >> _HALF, _u64(noise.stream)
    k0, k1 = noise.key0, noise.key1
    for _ in range(ROUNDS):
        p0, p1 = _u64(c0 * _M0), _u64(c2 * _M1)
        c0, c1 = _u64((p1 >> _HALF) ^ c1 ^ _u64(k0)), _u64(p1 & _MASK)
        c2, c3 = _u64((p0 >> _HALF) ^ c3 ^ _u64(k1)), _u64(p0 & _MASK)
        k0, k1 = _u32(k0 + _W0), _u32(k1 + _W1)
    spare = (c0 & _u64(255)) << _u64(24) | (c1 & _u64(255)) << _u64(16) | (c2 & _u64(255)) << _u64(8)
    return c0, c1, c2, c3, spare


_LOW = 0xFFFFFFFF
_EVEN = [lane for pair in range(8) for lane in (2 * pair, 16 + 2 * pair)]
_ODD = [lane + 1 for lane in _EVEN]


def five_words(e: Emitter, words: list[Any]) -> list[Any]:
    """Return the words of a group's five planes: four of Philox, and one made of their spare low bytes."""
    b = e.b
    keep = lambda mask, first, second: b.or_(  # noqa: E731
        b.and_(first, e.constant(mask)), b.and_(second, e.constant(mask ^ _LOW))
    )
    spare = keep(
        0xFFFF0000,
        keep(0xFF000000, e.shift_left(words[0], 24), e.shift_left(words[1], 16)),
        e.shift_left(words[2], 8),
    )
    return [*words, spare]


class PhiloxVectors:
    """Philox4x32-7 on 16 blocks at once, for blocks of one parameter, round and stream from ``noise.block`` on.

    A state word is in the lower half of 64-bit lanes, as the CPU's 32 x 32 -> 64 bit product needs it; upper halves are
    arbitrary. Even blocks form one register of 8 lanes, odd blocks another; after the last round one shuffle of both
    puts the blocks in order. In rounds 0 and 1 half of the state is uniform, and computed in scalars.
    """

    def __init__(self, e: Emitter, noise: Any) -> None:
        b, self.e, self._block = e.b, e, noise.block
        key, round, stream = (noise.key0, noise.key1), noise.round, noise.stream
        word = lambda value: ir.Constant(I64, value)  # noqa: E731
        low = lambda value: b.and_(value, word(_LOW))  # noqa: E731
        keys = [
            [b.add(key[side], ir.Constant(I32, (KEY_STEPS[side] * turn) & _LOW)) for side in (0, 1)]
            for turn in range(ROUNDS)
        ]
        self.keys = [[b.bitcast(e.splat(k), vector(I64, 8)) for k in pair] for pair in keys]
        wide = [[b.zext(k, I64) for k in pair] for pair in keys]
        splat = lambda value: e.splat(value, 8)  # noqa: E731
        stream = b.zext(stream, I64)
        # Round 0: counter = (block, low, high, stream); all but the block is uniform.
        p1 = b.mul(b.lshr(round, word(32)), word(MULTIPLIERS[1]))
        c0, c1 = b.xor(b.xor(b.lshr(p1, word(32)), low(round)), wide[0][0]), low(p1)
        self.first = splat(b.xor(stream, wide[0][1]))  # c2 of round 1 = high(p0) ^ this
        # Round 1: c0 and c1 are uniform, c2 and c3 = low(p0) are not.
        p0 = b.mul(c0, word(MULTIPLIERS[0]))
        self.second = splat(b.xor(c1, wide[1][0]))  # c0 of round 2 = high(p1) ^ this
        self.third = splat(b.xor(b.lshr(p0, word(32)), wide[1][1]))  # c2 of round 2 = c3 ^ this
        # Round 2: c3 = low(p0) of round 1 is still uniform.
        self.fourth = splat(b.xor(low(p0), wide[2][1]))
        self.factors = [e.constant(m, I64, 8) for m in MULTIPLIERS]

    def products(self) -> list[Any]:
        """Return the first product of the first 16 blocks: of even blocks, of odd blocks."""
        b, e = self.e.b, self.e
        lanes = [e.constants(range(half, 16, 2), I64) for half in (0, 1)]
        return [self._product(b.add(e.splat(self._block, 8), lane), 0) for lane in lanes]

    def advance(self, products: list[Any], blocks: int) -> list[Any]:
        """Advance by a number of blocks; nothing wraps, since a parameter has at most 2^32 blocks."""
        return [self.e.b.add(p, self.e.constant(MULTIPLIERS[0] * blocks, I64, 8)) for p in products]

    def _product(self, state: Any, side: int) -> Any:
        b = self.e.b
        return b.mul(b.and_(state, self.e.constant(_LOW, I64, 8)), self.factors[side])

    def _high(self, product: Any) -> Any:
        return self.e.shift_right(product, 32)

    def words(self, products: list[Any]) -> list[list[Any]]:
        """Return the four output words of ``len(products) / 2`` groups, each a vector of 16 blocks in order.

        All groups go through a round together, so that their instructions interleave.
        """
        b = self.e.b
        c2 = [b.xor(self._high(p), self.first) for p in products]
        p1 = [self._product(c, 1) for c in c2]
        state = [(b.xor(self._high(q), self.second), q, b.xor(p, self.third), None) for p, q in zip(products, p1)]
        for turn in range(2, ROUNDS - 1):
            pairs = [(self._product(c[0], 0), self._product(c[2], 1)) for c in state]
            k0, k1 = self.keys[turn]
            state = [
                (
                    b.xor(b.xor(self._high(q), c[1]), k0),
                    q,
                    b.xor(self._high(p), self.fourth) if turn == 2 else b.xor(b.xor(self._high(p), c[3]), k1),
                    p,
                )
                for c, (p, q) in zip(state, pairs)
            ]
        return [self._last(state[i], state[i + 1]) for i in range(0, len(state), 2)]

    def _last(self, even: Any, odd: Any) -> list[Any]:
        b, e = self.e.b, self.e
        flat = vector(I32, 16)
        join = lambda first, second, lanes: e.shuffle(b.bitcast(first, flat), b.bitcast(second, flat), lanes)  # noqa: E731
        k0, k1 = (b.bitcast(key, flat) for key in self.keys[ROUNDS - 1])
        p0, q0 = (self._product(c[0], 0) for c in (even, odd))
        p1, q1 = (self._product(c[2], 1) for c in (even, odd))
        return [
            b.xor(b.xor(join(p1, q1, _ODD), join(even[1], odd[1], _EVEN)), k0),
            join(p1, q1, _EVEN),
            b.xor(b.xor(join(p0, q0, _ODD), join(even[3], odd[3], _EVEN)), k1),
            join(p0, q0, _EVEN),
        ]
