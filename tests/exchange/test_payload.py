"""Headers, checksums, rows and hostile bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.errors import PayloadError
from gradwire.exchange.wire import (
    ALIGNMENT,
    EVERYONE,
    HEADER_BYTES,
    WIRE_VERSION,
    Header,
    Rows,
    check_rows,
    checked_values,
    padded,
    pretend_senders,
    seal_rows,
    with_checksum,
)

HEADER = Header(tag=1, round=258, bucket=3, chunk=4, body_bytes=32)
VERSION_1 = "47570101020100000300040020000000"


def rows(count: int = 3, receiver: int = 5) -> torch.Tensor:
    """Return what ``count`` ranks sent to one."""
    layout = Rows([16, 16])
    made = torch.zeros(count, layout.row_bytes, dtype=torch.uint8)
    bodies = [torch.arange(count * 16, dtype=torch.uint8).view(count, 16) + 100 * i for i in range(2)]
    for sender in range(count):
        one = slice(sender, sender + 1)
        layout.write(made[one], HEADER, [body[one] for body in bodies], sender, [receiver])
    return made


def test_golden_payload() -> None:
    assert WIRE_VERSION == 3
    assert HEADER.to_bytes(1, 2).hex() == "4757030102010000030004002000000001000200" + "00000000"
    assert rows(1)[0, 24:32].numpy().tobytes().hex() == "d8787e4e3defa314"
    assert HEADER_BYTES == 2 * ALIGNMENT == 32


def test_version_1_has_grown_by_the_place_and_the_checksum_alone() -> None:
    """Its sixteen bytes of header, but for the version, then sixteen new ones, then the body as it was."""
    payload = rows(1)[0].numpy().tobytes()
    assert payload[:2] + b"\x01" + payload[3:16] == bytes.fromhex(VERSION_1)
    assert payload[32:] == bytes(range(16)) + bytes(range(100, 116))


def test_large_counters_wrap() -> None:
    assert Header(1, 2**32 + 258, 2**16 + 3, 2**16 + 4, 32).to_bytes(2**16 + 1, 2) == HEADER.to_bytes(1, 2)


def test_rounds_are_told_apart_up_to_2_to_the_32() -> None:
    heads = {replace(HEADER, round=258 + (1 << bit)).to_bytes(1, 2) for bit in range(9, 32)}
    assert len(heads | {HEADER.to_bytes(1, 2)}) == 24


def test_rows_round_trip() -> None:
    layout = Rows([16, 16])
    first, second = layout.read(rows(), HEADER, 5)
    assert torch.equal(first, torch.arange(48, dtype=torch.uint8).view(3, 16))
    assert torch.equal(second, torch.arange(48, dtype=torch.uint8).view(3, 16) + 100)
    assert layout.header(tag=1, round=258, bucket=3, chunk=4) == HEADER


@pytest.mark.parametrize(
    ("byte", "part"),
    [
        (0, "not a gradwire payload"),
        (2, "wire version is 4, expected 3"),
        (3, "method tag is 2, expected 1"),
        (4, "round is 259, expected 258"),
        (8, "bucket is 4, expected 3"),
        (10, "chunk is 5, expected 4"),
        (12, "body length in bytes is 33, expected 32"),
        (16, "sender is 3, expected 2"),
        (18, "receiver is 6, expected 5"),
        (20, "exchange is 1, expected 0"),
        (22, "reserved field is 1, expected 0"),
        (24, "its checksum differs"),
        (32, "its checksum differs"),
        (63, "its checksum differs"),
    ],
)
def test_each_field_and_the_body_are_checked(byte: int, part: str) -> None:
    made = rows()
    made[2, byte] += 1
    with pytest.raises(PayloadError, match="from rank 2 for bucket 3, chunk 4, round 258: ") as caught:
        check_rows(made, HEADER, 5)
    assert part in str(caught.value)


def test_a_sound_header_of_another_exchange_is_refused_too() -> None:
    """What was sealed whole, but for another place, differs in a field that the receiver knows."""
    made = rows()
    for other in (
        replace(HEADER, round=257), replace(HEADER, bucket=2), replace(HEADER, chunk=0), replace(HEADER, exchange=1),
    ):  # fmt: skip
        with pytest.raises(PayloadError):
            check_rows(made, other, 5)
    for receiver in (0, EVERYONE):
        with pytest.raises(PayloadError):
            check_rows(made, HEADER, receiver)
    with pytest.raises(PayloadError, match=r"from rank 1 .*sender is 2, expected 1"):
        check_rows(made[[0, 2, 1]], HEADER, 5)
    pretend_senders(made)
    check_rows(made, HEADER, 5)


def test_rows_of_another_length() -> None:
    with pytest.raises(PayloadError, match="64 bytes were expected"):
        check_rows(rows()[:, :-1], HEADER, 5)
    with pytest.raises(PayloadError):
        check_rows(rows()[0], HEADER, 5)


@settings(max_examples=200)
@given(st.binary(min_size=32, max_size=32))
def test_any_other_header_is_refused(head: bytes) -> None:
    made = rows(1)
    right = made[0, :32].numpy().tobytes()
    made[0, :32] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    if head == right:
        check_rows(made, HEADER, 5)
        return
    with pytest.raises(PayloadError):
        check_rows(made, HEADER, 5)


def payload(size: int) -> tuple[torch.Tensor, Header]:
    header = replace(HEADER, body_bytes=size)
    made = torch.randint(0, 256, (1, HEADER_BYTES + size), generator=torch.Generator().manual_seed(size)).byte()
    seal_rows(made, header, 0, [EVERYONE])
    return made, header


def is_refused(made: torch.Tensor, header: Header) -> bool:
    try:
        check_rows(made, header, EVERYONE)
    except PayloadError:
        return True
    return False


def test_every_bit_and_every_pair_of_bits_that_flips_is_found() -> None:
    """A body of three rows of the checksum, the last in part: words of one lane, of others, and of the last row."""
    made, header = payload(272)
    bits = list(range(8 * HEADER_BYTES, 8 * made.shape[1]))
    for bit in bits:
        made[0, bit // 8] ^= 1 << bit % 8
        assert is_refused(made, header)
        made[0, bit // 8] ^= 1 << bit % 8
    draw = np.random.default_rng(0)
    pairs = {tuple(sorted(draw.choice(bits, 2, replace=False).tolist())) for _ in range(1500)}
    pairs |= {(bit, bit + 1024 * rows) for bit in bits for rows in (1, 2) if bit + 1024 * rows <= bits[-1]}
    for first, second in pairs:
        for bit in (first, second):
            made[0, bit // 8] ^= 1 << bit % 8
        assert is_refused(made, header), (first, second)
        for bit in (first, second):
            made[0, bit // 8] ^= 1 << bit % 8
    assert not is_refused(made, header)


@pytest.mark.parametrize("size", [32, 128, 144, 256, 4096])
def test_blocks_that_move_and_tails_that_are_cut_are_found(size: int) -> None:
    made, header = payload(size)
    body = made[0, HEADER_BYTES:]
    before = body.clone()
    blocks = before.view(-1, 16)
    moved = [blocks.roll(1, 0), blocks.roll(8, 0) if size > 128 else blocks.flip(0), blocks.flip(0)]
    moved += [blocks[[1, 0, *range(2, len(blocks))]]]
    tails = [torch.cat([before[:-n], torch.zeros(n, dtype=torch.uint8)]) for n in (1, 8, 16, size // 2, size)]
    for other in [*(m.reshape(-1) for m in moved), *tails]:
        body.copy_(other)
        assert is_refused(made, header) == (not torch.equal(other, before))
    body.copy_(before)
    assert not is_refused(made, header)


def test_small_messages_carry_a_checksum_of_values_sender_and_place() -> None:
    values = torch.tensor([[1.0, 2.0, 3.5], [0.0, -1.0, 2.0], [5.0, 5.0, 5.0]])
    made = torch.stack([with_checksum(v, rank, 7) for rank, v in enumerate(values)])
    assert made.shape == (3, 12 + 8)
    assert torch.equal(checked_values(made, torch.float32, "scales", 7), values)
    damaged = made.clone()
    damaged[1, 3] ^= 64
    swapped = made[[0, 2, 1]]
    for wrong, place in ((damaged, 7), (swapped, 7), (made, 8)):
        with pytest.raises(PayloadError, match=r"scales from rank [01]: its checksum differs"):
            checked_values(wrong, torch.float32, "scales", place)


@pytest.mark.parametrize(("count", "expected"), [(0, 0), (1, 16), (16, 16), (17, 32)])
def test_padding(count: int, expected: int) -> None:
    assert padded(count) == expected
