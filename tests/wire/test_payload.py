"""Headers, rows and hostile bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.errors import PayloadError
from gradwire.wire import ALIGNMENT, HEADER_BYTES, WIRE_VERSION, Header, Rows, check_rows, padded

HEADER = Header(tag=1, round=258, bucket=3, chunk=4, body_bytes=32)


def rows(count: int = 3) -> torch.Tensor:
    layout = Rows([16, 16])
    made = torch.zeros(count, layout.row_bytes, dtype=torch.uint8)
    bodies = [torch.arange(count * 16, dtype=torch.uint8).view(count, 16) + 100 * i for i in range(2)]
    layout.write(made, HEADER, bodies)
    return made


def test_golden_header() -> None:
    assert WIRE_VERSION == 1
    assert HEADER.to_bytes().hex() == "47570101020100000300040020000000"
    assert len(HEADER.to_bytes()) == HEADER_BYTES == ALIGNMENT == 16


def test_large_counters_wrap() -> None:
    assert Header(1, 2**32 + 258, 2**16 + 3, 2**16 + 4, 32).to_bytes() == HEADER.to_bytes()


def test_rows_round_trip() -> None:
    layout = Rows([16, 16])
    made = rows()
    first, second = layout.read(made, HEADER)
    assert torch.equal(first, torch.arange(48, dtype=torch.uint8).view(3, 16))
    assert torch.equal(second, torch.arange(48, dtype=torch.uint8).view(3, 16) + 100)
    assert layout.header(tag=1, round=258, bucket=3, chunk=4) == HEADER


@pytest.mark.parametrize(
    ("byte", "part"),
    [
        (0, "not a gradwire payload"),
        (2, "wire version is 2, expected 1"),
        (3, "method tag is 2, expected 1"),
        (4, "round is 259, expected 258"),
        (8, "bucket is 4, expected 3"),
        (10, "chunk is 5, expected 4"),
        (12, "body length in bytes is 33, expected 32"),
    ],
)
def test_each_field_of_a_header_is_checked(byte: int, part: str) -> None:
    made = rows()
    made[2, byte] += 1
    with pytest.raises(PayloadError, match="from rank 2") as caught:
        check_rows(made, HEADER)
    assert part in str(caught.value)


def test_rows_of_another_length() -> None:
    with pytest.raises(PayloadError, match="48 bytes were expected"):
        check_rows(rows()[:, :-1], HEADER)
    with pytest.raises(PayloadError):
        check_rows(rows()[0], HEADER)


@settings(max_examples=200)
@given(st.binary(min_size=16, max_size=16))
def test_any_other_header_is_refused(head: bytes) -> None:
    made = rows(1)
    made[0, :16] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    if head == HEADER.to_bytes():
        check_rows(made, HEADER)
        return
    with pytest.raises(PayloadError):
        check_rows(made, HEADER)


@pytest.mark.parametrize(("count", "expected"), [(0, 0), (1, 16), (16, 16), (17, 32)])
def test_padding(count: int, expected: int) -> None:
    assert padded(count) == expected
