"""The checksum of payloads: the same bits from the reference and from both compiled variants."""

from __future__ import annotations

import doctest
import importlib

import numpy as np
import pytest
import torch

from gradwire.kernels import checksum
from gradwire.kernels.checksum import loops, reference
from triton_interpreter import interpreted

LENGTHS = (0, 1, 7, 8, 16, 127, 128, 129, 255, 256, 4096, 5003, 16384, 16385, 16512, 49152, 50003)


def test_docstring_examples_hold() -> None:
    assert doctest.testmod(reference).failed == 0


@pytest.mark.parametrize("variant", [True, None])
@pytest.mark.parametrize("words", [1, 2, 3])
@pytest.mark.parametrize("length", LENGTHS)
def test_every_variant_gives_the_bits_of_the_reference(variant: bool | None, words: int, length: int) -> None:
    draw = np.random.default_rng(length)
    rows = draw.integers(0, 256, (3, length + 5), np.uint8)
    heads = draw.integers(0, 2**64, (3, words), np.uint64)
    expected = [reference.reference_check(h.tobytes(), row[5:]) for h, row in zip(heads, rows)]
    found = np.zeros(3, np.uint64)
    # As payloads lie: with something before each body.
    loops.row_checksums(variant, rows.reshape(-1)[5:], length + 5, length, heads, found)
    assert found.tolist() == expected
    assert checksum.checksums(heads, rows[:, 5:]).tolist() == expected
    assert checksum.checksums(heads[:1], rows[:1, 5:]).tolist() == expected[:1]


# The interpreter takes a millisecond for each 128 bytes. So of long bodies each length is read in one of the two ways,
# word by word or byte by byte, and three blocks are the least of which a later one is joined twice.
GPU_LENGTHS = (*(length for length in LENGTHS if length <= 5003), 16384, 16385, 16512, 2 * reference.BLOCK_BYTES + 5)


@pytest.mark.parametrize("length", GPU_LENGTHS)
def test_the_kernel_for_gpus_gives_the_bits_of_the_reference(length: int) -> None:
    interpreted()
    triton = importlib.import_module("gradwire.kernels.checksum.triton")
    draw = np.random.default_rng(length)
    rows = draw.integers(0, 256, (2, length + 5), np.uint8)
    heads = draw.integers(0, 2**64, (2, 3), np.uint64)
    expected = [reference.reference_check(h.tobytes(), row[5:]) for h, row in zip(heads, rows)]
    # At whole words, where the length is one of those, and beside them.
    beside, at_words = (5, rows), (0, np.ascontiguousarray(rows[:, 5:]))
    ways = (beside, at_words) if length <= 5003 else (beside,) if length % 8 else (at_words,)
    for begin, part in ways:
        found = torch.zeros(2, dtype=torch.int64)
        triton.row_checksums(torch.from_numpy(heads.view(np.int64)), torch.from_numpy(part)[:, begin:], found)
        assert found.numpy().view(np.uint64).tolist() == expected


def test_a_step_is_a_bijection_so_that_no_single_word_can_change_unseen() -> None:
    """The product is with an odd number, and the fold undoes itself: both have an inverse."""
    assert reference.MULTIPLIER % 2 == 1
    inverse = pow(reference.MULTIPLIER, -1, 2**64)
    for x in (0, 1, 2**63, 2**64 - 1, 0x0123456789ABCDEF):
        y = x * reference.MULTIPLIER % 2**64
        folded = y ^ y >> 32
        assert (folded ^ folded >> 32) * inverse % 2**64 == x


def test_the_changes_that_are_said_to_be_missed_are_the_known_ones() -> None:
    """The highest bit of a word, and bits 31 and 63 of the next word of the same sum."""
    row = np.random.default_rng(0).integers(256, size=(1, 4096), dtype=np.uint8)
    head, changed = np.zeros((1, 3), dtype=np.uint64), row.copy()
    for octet in (8 * 5 + 7, 128 + 8 * 5 + 3, 128 + 8 * 5 + 7):
        changed[0, octet] ^= 0x80
    assert checksum.checksums(head, changed) == checksum.checksums(head, row)
    changed[0, 128 + 8 * 5 + 3] ^= 0x80
    assert checksum.checksums(head, changed) != checksum.checksums(head, row)
