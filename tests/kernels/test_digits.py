"""Sums and packed words against arithmetic done the long way."""

from __future__ import annotations

import doctest
import importlib

import numpy as np
import pytest
import torch
from kernel_cases import BACKENDS, COMPILED, digits_of, packed_sums, unaligned_bytes

from gradwire.errors import HyperparameterError
from gradwire.kernels import digit_layout, get_kernels, packed_bytes, sum_layout
from gradwire.kernels.packing.loops import reciprocal16, word_table


@pytest.mark.parametrize("module", ["table", "packing.layout", "philox", "backends"])
def test_docstring_examples_hold(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"gradwire.kernels.{module}"))
    assert result.attempted > 0
    assert result.failed == 0


def test_no_layout_of_the_same_words_wastes_fewer_bits() -> None:
    for base in range(3, 700, 2):
        layout = digit_layout(base)
        assert base**layout.digits <= 256**layout.word_bytes
        for width in (1, 2, 4):
            digits = max((d for d in range(41) if base**d <= 256**width), default=0)
            assert not digits or 8 * width / digits >= layout.bits_per_value


def test_a_run_of_values_is_packed_by_planes_of_sixteen() -> None:
    values = torch.zeros(80, dtype=torch.int64)
    values[0], values[17], values[79] = 1, -1, 4  # lane 0 plane 0; lane 1 plane 1; lane 15 plane 4
    words = packed_sums(values, 4)
    zero = sum(4 * 9**p for p in range(5))
    expected = [zero] * 16
    expected[0], expected[1], expected[15] = zero + 1, zero - 9, zero + 4 * 9**4
    assert words.tolist() == [octet for word in expected for octet in (word & 255, word >> 8)]


@pytest.mark.parametrize("name", BACKENDS)
def test_words_of_all_bases_are_unpacked_and_packed_again(name: str) -> None:
    """The sum of a single row is that row."""
    kernels, groups = get_kernels(name), 7
    for world_size in [*range(1, 301), 1000, 32767]:
        generator = torch.Generator().manual_seed(world_size)
        values = torch.randint(-world_size, world_size + 1, (80 * groups,), generator=generator)
        values[:200], values[-3:] = world_size, -world_size
        words = packed_sums(values, world_size)
        out = unaligned_bytes(len(words), world_size % 3)
        kernels.sum_digits(words[None], groups, sum_layout(world_size), out)
        assert torch.equal(out, words), world_size


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8, 16, 64, 127, 128, 300])
@pytest.mark.parametrize("groups", [1, 7, 75])
def test_sums_are_those_of_the_digits(name: str, world_size: int, groups: int) -> None:
    generator = torch.Generator().manual_seed(world_size)
    wide = torch.randint(0, 243, (world_size, 16 * groups + 5), generator=generator, dtype=torch.uint8)
    wide[:, 3:19] = 242  # the first group reaches the largest sum
    rows = wide[:, 3 : 16 * groups + 3]
    out = unaligned_bytes(packed_bytes(80 * groups, world_size), groups % 3)
    kernels = get_kernels(name)
    kernels.ternary_sum(rows, out)
    naive = sum(digits_of(row.clone()) for row in rows) - world_size
    assert torch.equal(out, packed_sums(naive, world_size))


def test_digits_of_a_byte_are_its_trits() -> None:
    digits = digits_of(torch.arange(240, 256, dtype=torch.uint8)).reshape(5, 16)
    for lane, byte in enumerate(range(240, 243)):
        assert sum(int(digits[k, lane]) * 3**k for k in range(5)) == byte
        assert int(digits.max()) == 3  # bytes past 242 show


def test_reciprocals_are_exact_where_they_are_used() -> None:
    for power, multiplier in zip((3, 9, 27, 81), (21846, 7282, 2428, 810)):
        assert all(v * multiplier >> 16 == v // power for v in range(256))
    for base in (3, 7, 9):
        for divisor in (base, base**2, base**4):
            multiplier, shift = reciprocal16(divisor, max(base**5 - 1, 255))
            assert all((v * multiplier >> 16) >> shift == v // divisor for v in range(base**5))


def test_quotients_in_float32_are_exact_where_they_are_used() -> None:
    """For every base: next to all multiples that matter, on both sides of a cut word of four bytes."""
    half = np.float32(0.5)
    for base in [*range(2, 300), *range(301, 1700, 7), 32767, 65535]:
        layout = digit_layout(base)
        table = word_table(layout)
        low, power, inverse = table.low, table.power, table.inverse
        whole = 256**layout.word_bytes
        assert power == base**low
        assert low <= layout.digits
        for part in [power, whole // power + 1] if layout.word_bytes == 4 else [whole]:
            assert part <= 1 << 22
            for digit in range(layout.digits):
                divisor = base**digit
                if divisor > part:
                    break
                top = part // divisor
                multiples = np.unique([1, 2, top // 3, top // 2, max(1, top - 1), max(1, top)]) * divisor
                v = np.unique(np.clip(np.concatenate([multiples - 1, multiples, [0, part - 1]]), 0, part - 1))
                found = np.trunc((v.astype(np.float32) + half) * inverse[digit]).astype(np.int64)
                assert np.array_equal(found, v // divisor)


@pytest.mark.parametrize("name", COMPILED)
def test_misfitting_buffers_are_refused_before_memory_is_touched(name: str) -> None:
    kernels = get_kernels(name)
    with pytest.raises(HyperparameterError, match=r"out is .* with 32 elements"):
        kernels.ternary_sum(torch.zeros(4, 16, dtype=torch.uint8), torch.zeros(31, dtype=torch.uint8))
    with pytest.raises(HyperparameterError, match="whole groups"):
        kernels.ternary_sum(torch.zeros(4, 17, dtype=torch.uint8), torch.zeros(32, dtype=torch.uint8))
    with pytest.raises(HyperparameterError, match="world_size 0"):
        packed_bytes(10, 0)
