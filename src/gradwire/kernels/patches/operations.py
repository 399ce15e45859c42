"""Changes between two states of memory, and the sum of words: checked operations, defined with NumPy and PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gradwire.errors import HyperparameterError, PayloadError
from gradwire.kernels.front import Front, check_matrix, check_vector
from gradwire.kernels.indices.operations import decode_indices, encode_indices
from gradwire.kernels.patches import formats
from gradwire.kernels.patches.formats import (
    BITMAP,
    CHECK,
    EXACT,
    FIRST_CLASS,
    INVERTED,
    KEY,
    RICE,
    ROW,
    SYMBOLS,
    WIDTH,
    WIDTHS,
    WRITE,
    WRITE_CHECKED,
    rice_bytes,
    rice_candidates,
)

FAULTS = {
    1: "a row of a block has an unknown form, or more changes than the block has elements",
    2: "positions of changes are not what an encoder writes",
    3: "there are fewer symbols than changes",
    4: "a symbol stands for a distance that the type does not have",
    5: "there are fewer extra bits than the symbols announce",
}
"""Why changes are refused, by the number that a backend returns."""

MAX_BLOCK = 1 << 24
"""Elements of a block at most."""


class PatchOperations(Front):
    """The operations of the family ``patches``, on the bytes of one tensor or of a run of its blocks.

    Elements have ``width`` bytes, little endian, and are cut into blocks of ``block`` elements, a multiple of 8. If
    ``floating``, an element is a sign and a magnitude, as IEEE 754 numbers are; else it is an integer. Its *ordered*
    integer is itself, with all bits but the sign inverted where the sign of a ``floating`` element is set. The distance
    of two elements is the difference of their ordered integers modulo 2^bits, in units in the last place.

    Changes are described by four arrays:

    - ``rows`` (int64 ``[blocks, 3]``): for each block the form of its positions, the number of its changes and the
      bytes of its positions. The form is 0 to 30 for Rice codes with this parameter r, or a format of the family
      ``indices``: 31 ``bitmap``, from 32 on ``width``. With 64 added, positions are those of the elements that are
      *not* changed.
    - ``positions`` (uint8): the packed positions within each block, block after block. In Rice codes the r lowest bits
      of all gaps come first, then, in a byte of their own, the other bits of each as so many zeros and a 1.
    - ``symbols`` (uint8): a symbol for each change. A distance ``d``, ``|d| < 64``, has the symbol
      ``2 (|d| - 1) + (d < 0)``. A larger one, of which bit ``e`` is the highest, has ``126 + 2 (e - 6) + h`` with
      ``h`` the bit below.
    - ``extra`` (uint8): for each larger distance ``e`` bits, the lowest first: one that is set if ``d < 0``, and the
      ``e - 1`` lowest bits of ``|d|``.

    The sum of words is ``sum over j of mix(w_j + (j + 1) K) mod 2^64`` over the words ``w_j`` of 8 bytes, with zeros
    behind the last byte, where ``mix`` is the output function of SplitMix64. Sums of parts add up, and the sum after a
    change follows from the words that change.

    ``cursor`` (int64 ``[5]``) holds the symbols, bytes of positions and extra bits used so far, the change of the sum
    of words, and the sum of words before; an operation continues from there, so that tensors can share the arrays.
    """

    def word_sum(self, data: torch.Tensor, first_word: int = 0) -> int:
        """Return the sum of words of ``data`` (uint8), whose first word has the number ``first_word``."""
        check_vector("data", data, torch.uint8, data.numel())
        total = torch.zeros(1, dtype=torch.int64, device="cpu")
        family = self._serve("patches")
        if data.numel():
            family.word_sum(data, first_word, total)
        return int(total) % 2**64

    def find_changes(
        self, old: torch.Tensor, new: torch.Tensor, width: int, floating: bool, block: int, first_word: int,
        rows: torch.Tensor, positions: torch.Tensor, symbols: torch.Tensor, extra: torch.Tensor, cursor: torch.Tensor,
        advance: bool = False,
    ) -> None:  # fmt: skip
        """Describe how ``new`` differs from ``old`` (uint8, equally long); write over ``old`` if ``advance``.

        Args:
            first_word: Number of the first word of ``old`` within its tensor.

        Raises:
            HyperparameterError: an array has another type, or is too short for any changes.
        """
        blocks = _check(old, width, block, rows, cursor)
        check_vector("new", new, torch.uint8, old.numel())
        numel = old.numel() // width
        used = cursor.tolist()
        needed = ("symbols", symbols, used[0] + numel), ("positions", positions, used[1] + numel // 8 + blocks + 8)
        for name, array, least in (*needed, ("extra", extra, used[2] // 8 + numel * width + 16)):
            check_vector(name, array, torch.uint8, least, at_least=True)
        family = self._serve("patches")
        if blocks:
            family.find_changes(
                old, new, width, floating, block, first_word, rows, positions, symbols, extra, cursor, advance
            )

    def apply_changes(
        self, base: torch.Tensor, width: int, floating: bool, block: int, first_word: int, rows: torch.Tensor,
        positions: torch.Tensor, symbols: torch.Tensor, extra: torch.Tensor, cursor: torch.Tensor, mode: int,
    ) -> None:  # fmt: skip
        """Check changes of ``base`` (uint8), or write them.

        Args:
            mode: ``CHECK`` adds to ``cursor`` the sum of words of the base, and by how much the changes change it;
                ``WRITE`` writes; ``WRITE_CHECKED`` writes, and adds by how much the changes change the sum.

        ``rows`` and the arrays may hold anything: nothing outside of them is read, and nothing outside of ``base`` is
        written. Bytes behind the used ones are not looked at: the caller compares ``cursor`` with what there is.

        Raises:
            PayloadError: the arrays do not describe changes of such a base. If ``mode`` writes, it has been changed in
                part.
        """
        blocks = _check(base, width, block, rows, cursor)
        for name, array in (("positions", positions), ("symbols", symbols), ("extra", extra)):
            check_vector(name, array, torch.uint8, array.numel())
        if min(cursor.tolist()[:3]) < 0:
            raise HyperparameterError(f"cursor {cursor.tolist()}: places are not negative")
        fault = torch.zeros(1, dtype=torch.int64, device="cpu")
        family = self._serve("patches")
        if blocks:
            family.apply_changes(
                base, width, floating, block, first_word, rows, positions, symbols, extra, cursor, mode, fault
            )
        if int(fault):
            raise PayloadError(f"changes are refused: {FAULTS[int(fault)]}")


def _check(data: torch.Tensor, width: int, block: int, rows: torch.Tensor, cursor: torch.Tensor) -> int:
    """Return the number of blocks of ``data``."""
    check_vector("data", data, torch.uint8, data.numel())
    check_vector("cursor", cursor, torch.int64, 5)
    if width not in WIDTHS or not 8 <= block <= MAX_BLOCK or block % 8:
        raise HyperparameterError(
            f"width {width}, block {block}: a width is one of {WIDTHS}, a block a multiple of 8 up to {MAX_BLOCK}"
        )
    if data.numel() % width:
        raise HyperparameterError(f"{data.numel()} bytes are not whole elements of {width} bytes")
    blocks = -(-data.numel() // (width * block))
    check_matrix("rows", rows, torch.int64, (blocks, ROW))
    return blocks


def word_sum(data: torch.Tensor, first_word: int, total: torch.Tensor) -> None:
    total[0] = _signed(_sum(data.numpy(), first_word))


def find_changes(
    old: torch.Tensor, new: torch.Tensor, width: int, floating: bool, block: int, first_word: int, rows: torch.Tensor,
    positions: torch.Tensor, symbols: torch.Tensor, extra: torch.Tensor, cursor: torch.Tensor, advance: bool,
) -> None:  # fmt: skip
    at_symbol, at_position, at_bit, change, _ = cursor.tolist()
    change += _sum(new.numpy(), first_word) - _sum(old.numpy(), first_word)
    for number, (begin, stop) in enumerate(_blocks(old, width, block)):
        before, after = (_elements(data.numpy()[begin:stop], width) for data in (old, new))
        index, numel = np.flatnonzero(before != after), len(before)
        inverted = 2 * len(index) > numel
        listed = np.flatnonzero(before == after) if inverted else index
        form, size = _pack(listed, numel, positions[at_position:])
        rows[number] = torch.tensor([form + (INVERTED if inverted else 0), len(index), size], device="cpu")
        at_position += size
        for place in index.tolist():
            distance = _distance(int(before[place]), int(after[place]), 8 * width, floating)
            magnitude, negative = abs(distance), int(distance < 0)
            if magnitude < EXACT:
                symbols[at_symbol] = 2 * (magnitude - 1) + negative
            else:
                top = magnitude.bit_length() - 1
                symbols[at_symbol] = FIRST_CLASS + 2 * (top - 6) + (magnitude >> (top - 1) & 1)
                value = (magnitude % 2 ** (top - 1)) << 1 | negative
                _write_bits(extra, at_bit, value, top)
                at_bit += top
            at_symbol += 1
    if advance:
        old.copy_(new)
    cursor[:4] = torch.tensor([at_symbol, at_position, at_bit, _signed(change)], device="cpu")


def apply_changes(
    base: torch.Tensor, width: int, floating: bool, block: int, first_word: int, rows: torch.Tensor,
    positions: torch.Tensor, symbols: torch.Tensor, extra: torch.Tensor, cursor: torch.Tensor, mode: int,
    fault: torch.Tensor,
) -> None:  # fmt: skip
    at_symbol, at_position, at_bit, change, total = cursor.tolist()
    result, bits = base.clone(), 8 * width
    for number, (begin, stop) in enumerate(_blocks(base, width, block)):
        form, count, size = rows[number].tolist()
        elements = _elements(result.numpy()[begin:stop], width)
        numel = len(elements)
        if not 0 <= form < 2 * INVERTED or not 0 <= count <= numel:
            fault[0] = 1
            return
        if not 0 <= size <= positions.numel() - at_position:
            fault[0] = 2
            return
        if count > symbols.numel() - at_symbol:
            fault[0] = 3
            return
        found = _unpack(form, positions[at_position : at_position + size], count, numel)
        if found is None:
            fault[0] = 2
            return
        at_position += size
        for place in found:
            symbol = int(symbols[at_symbol])
            at_symbol += 1
            if symbol < FIRST_CLASS:
                magnitude, negative = (symbol >> 1) + 1, symbol & 1
            else:
                top = 6 + (symbol - FIRST_CLASS >> 1)
                if symbol >= SYMBOLS or top >= bits:
                    fault[0] = 4
                    return
                if top > 8 * extra.numel() - at_bit:
                    fault[0] = 5
                    return
                value = _read_bits(extra, at_bit, top)
                at_bit += top
                magnitude, negative = (2 + (symbol & 1)) << (top - 1) | value >> 1, value & 1
            moved = _ordered(int(elements[place]), bits, floating) + (-magnitude if negative else magnitude)
            elements[place] = _ordered(moved % 2**bits, bits, floating)
    if mode != WRITE:
        before = _sum(base.numpy(), first_word)
        change += _sum(result.numpy(), first_word) - before
        total += before if mode == CHECK else 0
    if mode in (WRITE, WRITE_CHECKED):
        base.copy_(result)
    cursor.copy_(torch.tensor([at_symbol, at_position, at_bit, _signed(change), _signed(total)], device="cpu"))


def _signed(value: int) -> int:
    """Return the int64 with the 64 lowest bits of an integer."""
    return (value + 2**63) % 2**64 - 2**63


def _sum(octets: npt.NDArray[np.uint8], first_word: int) -> int:
    words = np.zeros(-(-len(octets) // 8), np.uint64)
    words.view(np.uint8)[: len(octets)] = octets
    numbers = np.arange(len(words), dtype=np.uint64) + np.uint64(first_word + 1)
    mixed = words + numbers * np.uint64(KEY)
    for shift, factor in (
        (formats.FIRST_SHIFT, formats.FIRST_FACTOR),
        (formats.SECOND_SHIFT, formats.SECOND_FACTOR),
    ):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    total: np.uint64 = (mixed ^ (mixed >> np.uint64(formats.THIRD_SHIFT))).sum(dtype=np.uint64)
    return int(total)


def _blocks(data: torch.Tensor, width: int, block: int) -> list[tuple[int, int]]:
    step, size = width * block, data.numel()
    return [(begin, min(begin + step, size)) for begin in range(0, size, step)]


def _elements(octets: npt.NDArray[np.uint8], width: int) -> npt.NDArray[Any]:
    return octets.view(f"<u{width}")


def _ordered(value: int, bits: int, floating: bool) -> int:
    """Map the bits of an element to an integer that ascends with its value, or back."""
    return value ^ (2 ** (bits - 1) - 1) if floating and value >> (bits - 1) else value


def _distance(before: int, after: int, bits: int, floating: bool) -> int:
    difference = (_ordered(after, bits, floating) - _ordered(before, bits, floating)) % (1 << bits)
    return difference - (1 << bits) if difference >> (bits - 1) else difference


def _pack(listed: npt.NDArray[np.int64], numel: int, out: torch.Tensor) -> tuple[int, int]:
    """Write positions in the smallest of the forms that an encoder compares; return the form and its bytes."""
    count = len(listed)
    if not count:
        return RICE, 0
    gaps = np.diff(listed, prepend=-1) - 1
    least, most = rice_candidates(int(gaps.sum()), count)
    bits = int(gaps.max()).bit_length()
    sizes = [(-(-numel // 8), BITMAP)]
    sizes += [(rice_bytes(count, int((gaps >> r).sum()), r), r) for r in range(least, most + 1)]
    sizes.append((-(-count * bits // 8), WIDTH + bits))
    size, form = min(sizes, key=lambda choice: choice[0])
    if form < BITMAP:
        packed = _pack_rice(gaps, form)
        out[: len(packed)] = torch.from_numpy(packed)
        return form, len(packed)
    written = torch.zeros(1, dtype=torch.int64, device="cpu")
    name, parameter = ("bitmap", 0) if form == BITMAP else ("width", bits)
    encode_indices(torch.from_numpy(listed.astype(np.int32)), numel, name, parameter, out[:size], written)
    return form, int(written)


def _pack_rice(gaps: npt.NDArray[np.int64], r: int) -> npt.NDArray[np.uint8]:
    """Return the lower parts of gaps, and their quotients."""
    lower = gaps[:, None] >> np.arange(r) & 1
    quotients = np.zeros(len(gaps) + int((gaps >> r).sum()), np.uint8)
    quotients[np.cumsum((gaps >> r) + 1) - 1] = 1
    return np.concatenate([np.packbits(part.astype(np.uint8), bitorder="little") for part in (lower, quotients)])


def _unpack_rice(data: npt.NDArray[np.uint8], r: int, count: int, numel: int) -> npt.NDArray[np.int64] | None:
    """Return the positions, or None if an encoder does not write such bytes."""
    split = -(-count * r // 8)
    lower = np.unpackbits(data[:split], bitorder="little")
    ones = np.flatnonzero(np.unpackbits(data[split:], bitorder="little"))
    if len(data) < split or len(ones) != count or lower[count * r :].any() or ones[-1] // 8 != len(data) - split - 1:
        return None
    gaps = np.diff(ones, prepend=-1) - 1 << r
    gaps += lower[: count * r].reshape(count, r).astype(np.int64) @ (1 << np.arange(r))
    index = np.cumsum(gaps + 1) - 1
    return index if index[-1] < numel else None


def _unpack(form: int, data: torch.Tensor, count: int, numel: int) -> list[int] | None:
    """Return the positions of changes, or None if ``data`` does not hold them."""
    inverted, form = form >= INVERTED, form % INVERTED
    listed = numel - count if inverted else count
    index: npt.NDArray[Any] | None = np.zeros(listed, np.int32)
    if not listed:
        index = None if data.numel() else index
    elif form < BITMAP:
        index = _unpack_rice(data.numpy(), form, listed, numel)
    else:
        found, valid = torch.zeros(listed, dtype=torch.int32, device="cpu"), torch.tensor([False], device="cpu")
        decode_indices(data, "bitmap" if form == BITMAP else "width", max(0, form - WIDTH), listed, numel, found, valid)
        index = found.numpy() if bool(valid) else None
    if index is None or not inverted:
        return None if index is None else index.tolist()
    changed = np.ones(numel, bool)
    changed[index] = False
    return np.flatnonzero(changed).tolist()


def _write_bits(out: torch.Tensor, at: int, value: int, count: int) -> None:
    for bit in range(count):
        octet, place = (at + bit) // 8, (at + bit) % 8
        out[octet] = int(out[octet]) % 2**place | (value >> bit & 1) << place


def _read_bits(data: torch.Tensor, at: int, count: int) -> int:
    return sum((int(data[(at + bit) // 8]) >> (at + bit) % 8 & 1) << bit for bit in range(count))
