"""Positions as bits: what decodes is what was encoded, and what was not encoded is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import BACKENDS, OTHERS, unaligned_bytes

from gradwire.errors import HyperparameterError, PayloadError
from gradwire.kernels import (
    FORMATS,
    GapStatistics,
    Kernels,
    get_kernels,
    index_bytes,
    most_index_bytes,
    smallest_format,
)

NAMES = BACKENDS
REFERENCE = get_kernels("reference")


def positions(count: int, numel: int, seed: int) -> torch.Tensor:
    """Draw ``count`` of ``numel`` positions."""
    order = torch.randperm(numel, generator=torch.Generator().manual_seed(seed))
    return order[:count].sort().values.int()


@st.composite
def lists(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """Positions of any density, at one end, at both, or far apart."""
    numel = draw(st.integers(1, 3000))
    index = positions(draw(st.integers(0, numel)), numel, draw(st.integers(0, 99)))
    return draw(st.sampled_from([(index, numel), (index, numel + 2_000_000), (index + 2**31 - 1 - numel, 2**31 - 1)]))


def every_format(statistics: GapStatistics) -> list[tuple[str, int]]:
    """Return formats of a few bytes an index, at most."""
    rice = [("rice", r) for r in range(31) if statistics.shifted[r] <= 40 * statistics.count + 20_000]
    width = [("width", w) for w in range(statistics.largest.bit_length(), 32)]
    return [*([("bitmap", 0)] if statistics.numel < 10**7 else []), *rice[:4], *rice[-1:], *width[:2], *width[-1:]]


def encoded(kernels: Kernels, index: torch.Tensor, numel: int, format: str, parameter: int) -> torch.Tensor:
    size = index_bytes(REFERENCE.gap_statistics(index, numel), format, parameter)
    out = torch.empty(size, dtype=torch.uint8)
    assert kernels.encode_indices(index, numel, format, parameter, out) == size
    return out


@pytest.mark.parametrize("name", NAMES)
@given(case=lists(), shift=st.integers(0, 9))
def test_every_format_decodes_to_what_was_encoded_in_the_bytes_that_were_said(
    name: str, case: tuple[torch.Tensor, int], shift: int
) -> None:
    kernels, (index, numel) = get_kernels(name), case
    statistics = kernels.gap_statistics(index, numel)
    assert statistics == REFERENCE.gap_statistics(index, numel)
    gaps = [b - a - 1 for a, b in zip([-1, *index.tolist()], index.tolist())]
    assert statistics.largest == max(gaps, default=0)
    assert statistics.shifted == tuple(sum(gap >> r for gap in gaps) for r in range(31))
    for format, parameter in every_format(statistics):
        size = index_bytes(statistics, format, parameter)
        room = unaligned_bytes(size + 30, shift)
        assert kernels.encode_indices(index, numel, format, parameter, room) == size
        assert bool((room[size:] == 255).all())
        assert torch.equal(room[:size], encoded(REFERENCE, index, numel, format, parameter))
        back = torch.full((len(index) + shift + 5,), -7, dtype=torch.int32)
        kernels.decode_indices(room[:size], format, parameter, len(index), numel, back[shift : shift + len(index)])
        assert torch.equal(back[shift : shift + len(index)], index)
        assert bool((back[:shift] == -7).all())
        assert bool((back[shift + len(index) :] == -7).all())


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("numel", [1_000_003, 2**31 - 1])
def test_long_lists_have_the_bytes_of_the_reference(name: str, numel: int) -> None:
    """Of several tiles of gaps, and of far apart positions, whose sums do not fit 32 bits."""
    kernels, index = get_kernels(name), (positions(9001, 1_000_003, 4).long() * (numel // 1_000_003)).int()
    statistics = REFERENCE.gap_statistics(index, numel)
    assert kernels.gap_statistics(index, numel) == statistics
    assert get_kernels(name, threads=2).gap_statistics(index, numel) == statistics
    for format, parameter in every_format(statistics):
        packed = encoded(REFERENCE, index, numel, format, parameter)
        assert torch.equal(encoded(kernels, index, numel, format, parameter), packed)
        back = torch.empty_like(index)
        kernels.decode_indices(packed, format, parameter, len(index), numel, back)
        assert torch.equal(back, index)


@pytest.mark.parametrize("name", NAMES)
def test_bits_are_packed_from_the_least_significant_up(name: str) -> None:
    index = torch.tensor([2, 3, 9], dtype=torch.int32)  # gaps 2, 0, 5
    found = {
        (format, parameter): encoded(get_kernels(name), index, 12, format, parameter).tolist()
        for format, parameter in (("bitmap", 0), ("rice", 0), ("rice", 1), ("width", 3), ("width", 9))
    }
    assert found == {
        ("bitmap", 0): [0b00001100, 0b0010],
        ("rice", 0): [0b00001100, 0b10],  # 001 1 000001, from the right
        ("rice", 1): [0b10001010, 0b1],  # 01 0, 1 0, 001 1
        ("width", 3): [0b01000010, 0b1],  # 010, 000, 101
        ("width", 9): [2, 0, 0b00010100, 0],
    }


@given(case=lists())
def test_the_smallest_format_is_smaller_than_all_others_and_within_its_bound(case: tuple[torch.Tensor, int]) -> None:
    statistics = REFERENCE.gap_statistics(*case)
    smallest = smallest_format(statistics)
    assert smallest.bytes == index_bytes(statistics, smallest.format, smallest.parameter)
    assert smallest.bytes <= most_index_bytes(statistics.count, statistics.numel)
    sizes = [index_bytes(statistics, "bitmap"), *(index_bytes(statistics, "rice", r) for r in range(31))]
    sizes += [index_bytes(statistics, "width", w) for w in range(statistics.largest.bit_length(), 32)]
    assert smallest.bytes == min(sizes)


def test_the_bound_is_reached() -> None:
    """A single position at the very end has the largest gap that there can be."""
    for numel in (1, 2, 9, 1000, 2**31 - 1):
        last = REFERENCE.gap_statistics(torch.tensor([numel - 1], dtype=torch.int32), numel)
        assert smallest_format(last).bytes == most_index_bytes(1, numel)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_damaged_bytes_are_refused_or_decode_to_another_list(name: str, data: st.DataObject) -> None:
    """Whatever they hold, they decode to positions of which they are the only encoding, or not at all."""
    numel = data.draw(st.integers(1, 400))
    index = positions(data.draw(st.integers(0, numel)), numel, data.draw(st.integers(0, 99)))
    statistics = REFERENCE.gap_statistics(index, numel)
    format, parameter = data.draw(st.sampled_from(every_format(statistics)))
    octets = bytearray(encoded(REFERENCE, index, numel, format, parameter).tolist())
    damage = data.draw(st.sampled_from(["bit", "byte", "cut", "longer", "other count", "other parameter", "random"]))
    count = len(index)
    if damage in ("bit", "byte") and octets:
        place = data.draw(st.integers(0, len(octets) - 1))
        octets[place] ^= data.draw(st.integers(1, 255)) if damage == "byte" else 1 << data.draw(st.integers(0, 7))
    elif damage == "cut" and octets:
        del octets[data.draw(st.integers(0, len(octets) - 1)) :]
    elif damage == "longer":
        octets += data.draw(st.binary(min_size=1, max_size=20))
    elif damage == "other count":
        count = data.draw(st.integers(0, numel))
    elif damage == "other parameter" and format != "bitmap":
        parameter = data.draw(st.integers(0, 30))
    elif damage == "random":
        octets = bytearray(data.draw(st.binary(max_size=60)))
    payload = torch.tensor(list(octets), dtype=torch.uint8)
    room = torch.full((count + 40,), -7, dtype=torch.int32)
    try:
        get_kernels(name).decode_indices(payload, format, parameter, count, numel, room[20 : 20 + count])
    except PayloadError:
        decoded = None
    else:
        decoded = room[20 : 20 + count]
        assert torch.equal(encoded(REFERENCE, decoded, numel, format, parameter), payload)
    assert bool((room[:20] == -7).all())
    assert bool((room[20 + count :] == -7).all())
    if name != "reference":
        expected = torch.empty(count, dtype=torch.int32)
        try:
            REFERENCE.decode_indices(payload, format, parameter, count, numel, expected)
        except PayloadError:
            assert decoded is None
        else:
            assert decoded is not None
            assert torch.equal(decoded, expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("format", "parameter", "octets", "count", "numel"),
    [
        ("bitmap", 0, [0b101], 3, 8),  # fewer ones
        ("bitmap", 0, [0b101], 1, 8),  # more ones
        ("bitmap", 0, [0b1001], 2, 3),  # a one behind the last position
        ("bitmap", 0, [0b101, 0], 2, 8),  # a byte too many
        ("bitmap", 0, [0b101], 2, 9),  # a byte too few
        ("bitmap", 0, [], 0, 1),
        ("rice", 0, [0b10], 2, 8),  # no second code
        ("rice", 2, [0b1], 3, 8),  # the third code has no low bits
        ("rice", 0, [0b10000000], 1, 7),  # a position that is not there
        ("rice", 0, [0b11], 1, 8),  # padding
        ("rice", 0, [0b1, 0], 1, 8),  # a byte too many
        ("rice", 30, [255] * 40, 10, 2**31 - 1),  # gaps that add up beyond 32 bits
        ("rice", 0, [0] * 100 + [1], 1, 800),
        ("width", 31, [255] * 31, 8, 2**31 - 1),
        ("width", 3, [0b111], 1, 7),
        ("width", 3, [0b1000], 1, 8),  # padding
        ("width", 3, [0, 0], 1, 8),
        ("width", 3, [], 1, 8),
        ("width", 0, [], 9, 8),
        ("width", 0, [0], 0, 8),
        ("rice", 31, [1], 1, 8),
        ("bitmap", 1, [1], 1, 8),
        ("runs", 0, [1], 1, 8),
        ("width", -1, [1], 1, 8),
    ],
)
def test_bytes_that_no_encoder_writes_are_refused(
    name: str, format: str, parameter: int, octets: list[int], count: int, numel: int
) -> None:
    room, data = torch.full((20 + count,), -7, dtype=torch.int32), torch.tensor(octets, dtype=torch.uint8)
    with pytest.raises(PayloadError, match=r"positions below|not a known one"):
        get_kernels(name).decode_indices(data, format, parameter, count, numel, room[10 : 10 + count])
    assert bool((room[:10] == -7).all())
    assert bool((room[10 + count :] == -7).all())


@pytest.mark.parametrize("name", NAMES)
def test_lists_that_are_none_are_refused(name: str) -> None:
    kernels, out = get_kernels(name), torch.zeros(40, dtype=torch.uint8)
    for wrong in ([3, 3], [4, 2], [-1, 2], [0, 8], [-(2**31), 1], [2**31 - 1]):
        index = torch.tensor(wrong, dtype=torch.int32)
        with pytest.raises(HyperparameterError, match=r"does not ascend within 0\.\.7"):
            kernels.gap_statistics(index, 8)
        for format in FORMATS:
            with pytest.raises(HyperparameterError, match="does not ascend"):
                kernels.encode_indices(index, 8, format, 3 if format != "bitmap" else 0, out)
    index = torch.tensor([2, 3, 9], dtype=torch.int32)
    with pytest.raises(HyperparameterError, match="does not fit 2 bits"):
        kernels.encode_indices(index, 12, "width", 2, out)
    for format, parameter, size in (("bitmap", 0, 2), ("rice", 1, 2), ("width", 3, 2)):
        with pytest.raises(HyperparameterError, match="out has 1 bytes"):
            kernels.encode_indices(index, 12, format, parameter, out[: size - 1])
    for format, parameter in (("bitmap", 1), ("rice", 31), ("width", 32), ("rice", -1), ("runs", 0)):
        with pytest.raises(HyperparameterError, match="format"):
            kernels.encode_indices(index, 12, format, parameter, out)
    with pytest.raises(HyperparameterError, match="numel"):
        kernels.gap_statistics(index, 2**31)
    with pytest.raises(HyperparameterError, match="index is"):
        kernels.gap_statistics(index.long(), 12)


def test_dry_runs_encode_nothing() -> None:
    kernels, index = get_kernels("meta"), torch.empty(5, dtype=torch.int32, device="meta")
    assert kernels.gap_statistics(index, 100).count == 5
    assert kernels.encode_indices(index, 100, "rice", 3, torch.empty(9, dtype=torch.uint8, device="meta")) == 0
    kernels.decode_indices(torch.empty(9, dtype=torch.uint8, device="meta"), "rice", 3, 5, 100, index)


@pytest.mark.parametrize("name", NAMES)
@given(case=lists(), weight=st.sampled_from([1.0, 1 / 3, -0.1, 2.0**-140, 2.0**100]), offset=st.integers(0, 9))
def test_products_are_rounded_and_added_at_their_places(
    name: str, case: tuple[torch.Tensor, int], weight: float, offset: int
) -> None:
    index, numel = case
    if numel > 10_000:
        return
    generator = torch.Generator().manual_seed(len(index))
    flat, values = torch.randn(numel + 20, generator=generator), torch.randn(len(index), generator=generator)
    expected = flat.clone()
    expected[index.long() + offset] += values * torch.tensor(weight)
    assert get_kernels(name).add_at(flat, index, offset, values, weight)
    assert torch.equal(flat, expected)
    if len(index):
        values[len(values) // 2] = (torch.inf, -torch.inf, torch.nan)[len(index) % 3]
        assert not get_kernels(name).add_at(flat, index, offset, values, weight)
        flat[index.long() + offset] = 0.0
        expected[index.long() + offset] = 0.0
        assert torch.equal(flat, expected)


@pytest.mark.parametrize("name", NAMES)
def test_places_outside_are_refused_and_never_written(name: str) -> None:
    room = torch.zeros(12)
    for index, offset in (([0, 8], 0), ([0, 1], -1), ([3, 4], 4)):
        with pytest.raises(HyperparameterError, match="1 places of index are outside of the 8 elements"):
            get_kernels(name).add_at(room[2:10], torch.tensor(index, dtype=torch.int32), offset, torch.ones(2), 1.0)
    assert room[:2].tolist() + room[10:].tolist() == [0.0] * 4


@pytest.mark.parametrize("name", NAMES)
def test_a_place_twice_gets_both(name: str) -> None:
    flat = torch.zeros(3)
    get_kernels(name).add_at(flat, torch.tensor([1, 1], dtype=torch.int32), 0, torch.tensor([1.0, 2.0]), 1.0)
    assert flat.tolist() == [0.0, 3.0, 0.0]
