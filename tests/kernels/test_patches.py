"""The family ``patches``: changes between two states of memory, and the sum of words."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import BACKENDS, OTHERS, unaligned_bytes

from gradwire.errors import HyperparameterError, PayloadError
from gradwire.kernels import Kernels, get_kernels
from gradwire.kernels.patches.formats import (
    BITMAP,
    CHECK,
    INVERTED,
    SYMBOLS,
    WIDTH,
    WRITE,
    WRITE_CHECKED,
    rice_bytes,
    rice_candidates,
)

REFERENCE = get_kernels("reference")
KINDS = [(1, False), (1, True), (2, False), (2, True), (4, False), (4, True), (8, False), (8, True)]


class Changes(NamedTuple):
    """What describes changes."""

    rows: torch.Tensor
    positions: torch.Tensor
    symbols: torch.Tensor
    extra: torch.Tensor
    change: int


def find(
    kernels: Kernels, old: torch.Tensor, new: torch.Tensor, width: int, floating: bool, block: int,
    first: int = 0, advance: bool = False,
) -> Changes:  # fmt: skip
    numel = old.numel() // width
    blocks = -(-numel // block)
    rows, cursor = torch.zeros(blocks, 3, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
    positions, symbols, extra = (
        torch.zeros(size, dtype=torch.uint8) for size in (numel // 8 + blocks + 8, numel, numel * width + 32)
    )
    kernels.find_changes(old, new, width, floating, block, first, rows, positions, symbols, extra, cursor, advance)
    count, size, bits, change, _ = cursor.tolist()
    return Changes(rows, positions[:size], symbols[:count], extra[: -(-bits // 8)], change % 2**64)


def apply(
    kernels: Kernels, base: torch.Tensor, changes: Changes, width: int, floating: bool, block: int, mode: int
) -> list[int]:
    cursor = torch.zeros(5, dtype=torch.int64)
    kernels.apply_changes(base, width, floating, block, 0, *changes[:4], cursor, mode)
    return cursor.tolist()


def pair(numel: int, width: int, density: float, far: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two states: a share of the elements differs, most of them by 1, a share ``far`` of these by anything."""
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, numel * width, dtype=np.uint8)
    elements = old.view(f"<u{width}").copy()
    changed = rng.random(numel) < density
    steps = np.where(rng.random(numel) < 0.5, 1, -1).astype(f"<i{width}").view(f"<u{width}")
    anything = rng.integers(0, 256, numel * width, dtype=np.uint8).view(f"<u{width}")
    moved = np.where(rng.random(numel) < far, anything, elements + steps)
    elements[changed] = moved[changed]
    return torch.from_numpy(old), torch.from_numpy(elements.view(np.uint8).copy())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("width", "floating"), KINDS)
@pytest.mark.parametrize("density", [0.0, 0.01, 0.3, 0.8, 1.0])
def test_changes_lead_from_one_state_to_the_other(backend: str, width: int, floating: bool, density: float) -> None:
    kernels = get_kernels(backend)
    old, new = pair(1003, width, density, 0.2, 1)
    changes = find(kernels, old, new, width, floating, 256)
    base = old.clone()
    checked = apply(kernels, base, changes, width, floating, 256, CHECK)
    assert torch.equal(base, old)
    assert checked[3] % 2**64 == changes.change == (kernels.word_sum(new) - kernels.word_sum(old)) % 2**64
    assert checked[4] % 2**64 == kernels.word_sum(old)
    apply(kernels, base, changes, width, floating, 256, WRITE)
    assert torch.equal(base, new)
    assert int(changes.rows[:, 1].sum()) == int((old.view(-1, width) != new.view(-1, width)).any(1).sum())
    advanced = old.clone()
    find(kernels, advanced, new, width, floating, 256, advance=True)
    assert torch.equal(advanced, new)


@given(
    numel=st.integers(1, 700),
    kind=st.sampled_from(KINDS),
    density=st.sampled_from([0.0, 0.005, 0.1, 0.5, 0.95, 1.0]),
    far=st.sampled_from([0.0, 0.1, 1.0]),
    seed=st.integers(0, 2**32 - 1),
    shift=st.integers(0, 9),
    block=st.sampled_from([8, 64, 1024]),
)
@settings(max_examples=60, deadline=None)
def test_backends_write_the_bytes_of_the_reference(
    numel: int, kind: tuple[int, bool], density: float, far: float, seed: int, shift: int, block: int
) -> None:
    old, new = pair(numel, kind[0], density, far, seed)
    expected = find(REFERENCE, old, new, *kind, block, first=seed)
    for name in OTHERS:
        kernels = get_kernels(name)
        a, b = unaligned_bytes(len(old), shift), unaligned_bytes(len(new), 7 - shift % 8)
        a.copy_(old)
        b.copy_(new)
        found = find(kernels, a, b, *kind, block, first=seed)
        assert found.change == expected.change
        for part, other in zip(found[:4], expected[:4]):
            assert torch.equal(part, other)
        assert kernels.word_sum(a, seed) == REFERENCE.word_sum(old, seed)
        expected_cursor = apply(REFERENCE, old.clone(), expected, *kind, block, CHECK)
        assert apply(kernels, a, found, *kind, block, CHECK) == expected_cursor
        for mode in (WRITE, WRITE_CHECKED):
            a.copy_(old)
            written = apply(kernels, a, found, *kind, block, mode)
            assert written == [*expected_cursor[:3], expected_cursor[3] if mode == WRITE_CHECKED else 0, 0]
            assert torch.equal(a, new)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_value_of_small_types_is_reached_from_every_other(backend: str) -> None:
    """NaNs with any payload, both zeros, infinities and denormal numbers are values as others are."""
    kernels = get_kernels(backend)
    values = torch.arange(256, dtype=torch.uint8)
    old, new = values.repeat_interleave(256), values.repeat(256)
    if backend == "reference":
        old, new = old[::7].clone(), new[::7].clone()
    for floating in (False, True):
        base = old.clone()
        apply(kernels, base, find(kernels, old, new, 1, floating, 1 << 16), 1, floating, 1 << 16, WRITE)
        assert torch.equal(base, new)


def test_neighbours_are_one_unit_apart_across_zero_and_powers_of_two() -> None:
    """-0.0 and 0.0 are neighbours; the largest number and infinity are, too."""
    pairs = [(0.0, -0.0), (1.0, 1.0078125), (2.0, 1.9921875), (float("inf"), 3.3895314e38), (-1.0, -1.0078125)]
    old, new = (torch.tensor(side).to(torch.bfloat16).view(torch.uint8) for side in zip(*pairs))
    changes = find(REFERENCE, old, new, 2, True, 8)
    assert changes.symbols.tolist() == [1, 0, 1, 1, 1]


def test_words_in_other_places_have_other_sums() -> None:
    kernels, data = get_kernels("auto"), torch.arange(64, dtype=torch.uint8)
    total = kernels.word_sum(data)
    swapped = data.clone()
    swapped[:8], swapped[8:16] = data[8:16], data[:8]
    assert kernels.word_sum(swapped) != total
    assert kernels.word_sum(torch.zeros(64, dtype=torch.uint8)) != 0
    # Sums of parts add up.
    assert (kernels.word_sum(data[:24]) + kernels.word_sum(data[24:], 3)) % 2**64 == total


def test_a_change_of_any_bits_changes_the_sum() -> None:
    """The sign bits of two elements, for one: they move a sum of plain products by nothing or by a power of two."""
    kernels = get_kernels("auto")
    data = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8))
    total, changes = kernels.word_sum(data), []
    for first in range(7, 4096, 264):
        for second in range(first + 8, 4096, 264):
            for _ in range(2):
                data[first] ^= 128
                data[second] ^= 128
                changes.append((kernels.word_sum(data) - total) % 2**64)
    assert set(changes[1::2]) == {0}
    assert len({0, *changes[::2]}) == 1 + len(changes) // 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_no_encoder_writes_is_refused_and_the_base_stays(backend: str) -> None:
    kernels = get_kernels(backend)
    old, new = pair(512, 2, 0.2, 0.5, 3)
    good = find(kernels, old, new, 2, True, 256)

    def row(number: int, column: int, value: int) -> Changes:
        rows = good.rows.clone()
        rows[number, column] = value
        return good._replace(rows=rows)

    symbols = good.symbols.clone()
    symbols[0] = SYMBOLS
    wide = good.symbols.clone()
    wide[0] = SYMBOLS - 1
    bad = {
        "unknown form": [row(0, 0, -1), row(0, 0, 2 * INVERTED), row(1, 1, 257), row(1, 1, -1)],
        "positions": [
            row(0, 2, -1), row(0, 2, 10**9), row(0, 2, int(good.rows[0, 2]) - 1), row(0, 0, WIDTH + 31),
            row(0, 0, BITMAP), good._replace(positions=good.positions[:-1]),
        ],
        "fewer symbols": [good._replace(symbols=good.symbols[:-1])],
        "type does not have": [good._replace(symbols=symbols), good._replace(symbols=wide)],
        "fewer extra bits": [good._replace(extra=good.extra[:-1])],
    }  # fmt: skip
    for reason, cases in bad.items():
        for changes in cases:
            base = old.clone()
            with pytest.raises(PayloadError, match=reason):
                apply(kernels, base, changes, 2, True, 256, CHECK)
            assert torch.equal(base, old)


def test_arguments_that_do_not_fit_are_refused() -> None:
    kernels = get_kernels("auto")
    old = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(HyperparameterError, match="multiple of 8"):
        find(kernels, old, old.clone(), 2, True, 12)
    with pytest.raises(HyperparameterError, match="a width is one of"):
        find(kernels, old, old.clone(), 3, True, 8)
    with pytest.raises(HyperparameterError, match="whole elements"):
        find(kernels, old[:63], old[:63].clone(), 2, True, 8)
    with pytest.raises(HyperparameterError, match="new is"):
        find(kernels, old, old[:32].clone(), 2, True, 8)


@pytest.mark.parametrize("density", [0.002, 0.01, 0.03, 0.1, 0.3, 0.7])
def test_positions_take_few_bits_more_than_their_entropy(density: float) -> None:
    """Rice codes of geometric gaps: within 4 % of the entropy, and 8 bits of padding a block."""
    old, new = pair(1 << 18, 2, density, 0.0, 5)
    changes = find(get_kernels("auto"), old, new, 2, False, 1 << 17)
    share = len(changes.symbols) / (1 << 18)
    entropy = -share * np.log2(share) - (1 - share) * np.log2(1 - share)
    assert 8 * len(changes.positions) <= 1.04 * entropy * (1 << 18) + 16


def test_candidates_of_rice_parameters_have_the_best_one() -> None:
    """Against all 31 parameters, on geometric gaps of any mean."""
    rng = np.random.default_rng(2)
    for mean in (0.3, 1, 3, 10, 47, 100, 333, 5000):
        gaps = rng.geometric(1 / (1 + mean), 4000) - 1
        bits = [rice_bytes(len(gaps), int((gaps >> r).sum()), r) for r in range(31)]
        least, most = rice_candidates(int(gaps.sum()), len(gaps))
        assert min(bits[least : most + 1]) == min(bits)
