"""The reference of the coders in NumPy and Python integers: slow and clear; it defines the bytes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gradwire.kernels.checksum.reference import reference_check
from gradwire.kernels.entropy import tables as huffman
from gradwire.kernels.entropy import tables as tables
from gradwire.kernels.entropy.base import Body, Bytes
from gradwire.kernels.entropy.tables import ESCAPE, SCALE, SCALE_BITS

Integers = npt.NDArray[np.int64]

LANES = 128
LOW = 1 << 16
STATE_BYTES = 4 * LANES
FIXED_BYTES = 8 + tables.BITMAP_BYTES + STATE_BYTES


class ReferenceRans:
    """Interleaved rANS (Duda, "Asymmetric numeral systems", arXiv:1311.2540), 128 lanes for each row."""

    coder = "rans"
    backend = "reference"
    variants = None

    def check(self, head: bytes, body: Bytes) -> int:
        return reference_check(head, body)

    def encode(self, symbols: Bytes, room: Bytes) -> int:
        rows = symbols[: len(symbols) // LANES * LANES].reshape(-1, LANES)
        if len(room) < FIXED_BYTES or not len(rows):
            return -1
        step, frequencies = tables.sample_step(len(symbols)), np.zeros(257, np.int64)
        tables.choose_frequencies(np.bincount(rows[::step].reshape(-1), minlength=256), frequencies)
        end = tables.write_frequencies(frequencies, room, 8)
        if end < 0:
            return -1
        unlisted = frequencies[:256] == 0
        owner = np.where(unlisted, ESCAPE, np.arange(256))
        start = _starts(frequencies)
        states, size = np.full(LANES, LOW, np.int64), end
        pieces: list[npt.NDArray[np.uint16]] = []
        for row in rows[::-1]:
            if size + 2 * LANES + 32 > len(room):
                return -1
            f = frequencies[owner[row]]
            full = states >= f << (32 - SCALE_BITS)
            pieces.append((states[full] & 0xFFFF).astype("<u2"))
            size += 2 * len(pieces[-1])
            states = np.where(full, states >> 16, states)
            states = (states // f << SCALE_BITS) + states % f + start[owner[row]]
        words, coded = np.concatenate(pieces).view(np.uint8), states.astype("<u4").view(np.uint8)
        escaped = rows[unlisted[rows]]
        body = np.concatenate([words, coded, escaped, symbols[rows.size :]])
        if end + len(body) >= len(room):
            return -1
        room[:8] = np.array([len(escaped), end - 8 - tables.BITMAP_BYTES], "<u4").view(np.uint8)
        room[end : end + len(body)] = body
        return end + len(body)

    def decode(self, body: Bytes, out: Bytes) -> int:
        rows = out[: len(out) // LANES * LANES].reshape(-1, LANES)
        if len(body) < FIXED_BYTES or not len(rows):
            return 1
        escapes, table_bytes = (int(value) for value in body[:8].view("<u4"))
        begin = 8 + tables.BITMAP_BYTES + table_bytes
        rest = len(out) - rows.size
        stop = len(body) - rest - escapes - STATE_BYTES
        if begin > stop or (stop - begin) % 2:
            return 3
        frequencies = np.zeros(257, np.int64)
        if not tables.read_frequencies(body, 8, begin, frequencies):
            return 2
        owner, start = _owners(frequencies), _starts(frequencies)
        words = body[begin:stop].copy().view("<u2")
        states = body[stop : stop + STATE_BYTES].copy().view("<u4").astype(np.int64)
        side = body[stop + STATE_BYTES : stop + STATE_BYTES + escapes]
        left, used = len(words), 0
        for row in rows:
            slot = states & (SCALE - 1)
            found = owner[slot]
            states = frequencies[found] * (states >> SCALE_BITS) + slot - start[found]
            low = states < LOW
            count = int(low.sum())
            if count > left:
                return 4
            states[low] = states[low] << 16 | words[left - count : left]
            left -= count
            escaped = found == ESCAPE
            count = int(escaped.sum())
            if used + count > len(side):
                return 4
            row[:] = np.where(escaped, 0, found)
            row[escaped] = side[used : used + count]
            used += count
        out[rows.size :] = body[len(body) - rest :]
        return 0 if left == 0 and used == len(side) and bool((states == LOW).all()) else 4


def _in_order(frequencies: Integers) -> Integers:
    return np.concatenate([frequencies[ESCAPE:], frequencies[:ESCAPE]])


def _starts(frequencies: Integers) -> Integers:
    """Return the first slot of each symbol and, at 256, of the escape, whose slots precede all others."""
    before = np.cumsum(_in_order(frequencies)) - _in_order(frequencies)
    return np.concatenate([before[1:], before[:1]])


def _owners(frequencies: Integers) -> Integers:
    """Return the symbol or escape that owns each slot."""
    return np.repeat(np.concatenate([[ESCAPE], np.arange(ESCAPE)]), _in_order(frequencies))


class ReferenceHuffman:
    """Canonical Huffman codes of at most 11 bits, four streams."""

    coder = "huffman"
    backend = "reference"
    variants = None

    def check(self, head: bytes, body: Bytes) -> int:
        return reference_check(head, body)

    def encode(self, symbols: Bytes, room: Bytes) -> int:
        each = len(symbols) // huffman.STREAMS
        counts = np.bincount(symbols[: huffman.STREAMS * each], minlength=256).astype(np.int64)
        if (counts > 0).sum() < 2:
            return -1
        size, code = np.zeros(256, np.int64), np.zeros(256, np.int64)
        scratch = np.zeros(256, np.int64), np.zeros((2, 512), np.int64), np.zeros((huffman.MAX_LENGTH, 512), np.uint8)
        huffman.choose_lengths(counts, size, *scratch)
        huffman.assign_codes(size, code)
        text = ["" if not bits else format(int(c), f"0{bits}b")[::-1] for c, bits in zip(code, size)]
        streams = [
            np.packbits(np.array(list("".join(text[s] for s in part)), np.uint8), bitorder="little")
            for part in symbols[: huffman.STREAMS * each].reshape(huffman.STREAMS, each)
        ]
        table = np.zeros(huffman.LENGTH_BYTES, np.uint8)
        huffman.write_lengths(size, table, 0)
        ends = np.array([len(stream) for stream in streams], "<u4").view(np.uint8)
        rest = symbols[huffman.STREAMS * each :]
        body = np.concatenate([table, ends, *streams, np.zeros(8, np.uint8), rest])
        if len(body) >= len(room):
            return -1
        room[: len(body)] = body
        return len(body)

    def decode(self, body: Bytes, out: Bytes) -> int:
        at, each = huffman.LENGTH_BYTES + 4 * huffman.STREAMS, len(out) // huffman.STREAMS
        rest = len(out) - huffman.STREAMS * each
        if len(body) < at + 8 + rest:
            return 1
        size, code = np.zeros(256, np.int64), np.zeros(256, np.int64)
        if not huffman.read_lengths(body, 0, size) or not huffman.assign_codes(size, code):
            return 2
        ends = [int(value) for value in body[huffman.LENGTH_BYTES : at].view("<u4")]
        if at + sum(ends) + 8 + rest != len(body) or body[at + sum(ends) : at + sum(ends) + 8].any():
            return 3
        symbol_of = {(int(bits), int(c)): s for s, (c, bits) in enumerate(zip(code, size)) if bits}
        for stream, length in enumerate(ends):
            bits = np.unpackbits(body[at : at + length], bitorder="little")
            place = 0
            for index in range(stream * each, stream * each + each):
                value = found = 0
                while (found, value) not in symbol_of:
                    if place == len(bits):
                        return 4
                    value |= int(bits[place]) << found
                    found, place = found + 1, place + 1
                out[index] = symbol_of[found, value]
            if -(-place // 8) != length or bits[place:].any():
                return 4
            at += length
        out[huffman.STREAMS * each :] = body[len(body) - rest :]
        return 0


def reference_body(coder: str) -> Body:
    """Return the reference's body of a coder."""
    return ReferenceRans() if coder == "rans" else ReferenceHuffman()
