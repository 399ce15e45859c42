"""How bodies of sections become bytes that travel, and back."""

from __future__ import annotations

import pytest
import torch

from gradwire.errors import IncompatibleError, PayloadError
from gradwire.exchange.wire import MOST_BODY_BYTES, Header, Measured, Packing, packing
from gradwire.exchange.wire.rows import VariableRows
from gradwire.kernels import get_kernels


def body(size: int) -> torch.Tensor:
    return (torch.arange(size) % 7).to(torch.uint8)


@pytest.mark.parametrize(("size", "plain"), [(64, 64), (0, 0), (512, 0), (512, 48), (480, 480)])
@pytest.mark.parametrize("coded", [False, True])
def test_what_is_unpacked_is_what_was_packed(size: int, plain: int, coded: bool) -> None:
    way = packing(size, plain, get_kernels("reference").coder("huffman") if coded else None)
    out, back = torch.zeros(way.bound, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    used = way.pack(body(size), out)
    assert used <= way.bound
    assert way.variable or used == size
    way.unpack(out[:used], back)
    assert torch.equal(back, body(size))
    with pytest.raises(PayloadError):
        way.unpack(torch.cat([out[:used], out.new_zeros(1)]), back)


def test_a_measured_section_travels_as_far_as_it_is_used() -> None:
    way, one = Measured(96), body(96)
    one[:4].view(torch.int32).fill_(37)
    out, back = torch.zeros(96, dtype=torch.uint8), torch.zeros(96, dtype=torch.uint8)
    assert (way.pack(one, out), way.variable) == (37, True)
    way.unpack(out[:37], back)
    assert torch.equal(back[:37], one[:37])
    assert not back[37:].any()


@pytest.mark.parametrize("length", [0, 3, 36, 38])
def test_a_section_that_says_another_length_is_refused(length: int) -> None:
    one = body(96)
    one[:4].view(torch.int32).fill_(37)
    with pytest.raises(PayloadError):
        Measured(96).unpack(one[:length], torch.zeros(96, dtype=torch.uint8))
    with pytest.raises(PayloadError):
        Measured(32).unpack(one[:37], torch.zeros(32, dtype=torch.uint8))


LONG = 2**31 + 16
"""A length that int32 does not hold."""


def test_a_length_beyond_int32_is_read_as_it_was_written() -> None:
    one = body(96)
    one[:4] = torch.tensor([LONG]).view(torch.uint8)[:4]
    assert Measured(96).pack(one, torch.zeros(96, dtype=torch.uint8)) == LONG
    with pytest.raises(PayloadError, match=f"says it has {LONG},"):
        Measured(96).unpack(one, torch.zeros(96, dtype=torch.uint8))


class Long(Packing):
    """Claims to have written more than there is room for."""

    size = bound = 16

    def pack(self, body: torch.Tensor, out: torch.Tensor) -> int:
        return LONG

    def unpack(self, data: torch.Tensor, body: torch.Tensor) -> None:
        raise AssertionError("nothing is as long")


def test_a_table_of_lengths_holds_sections_beyond_int32() -> None:
    way = VariableRows([Long()], lambda name, *shape: torch.zeros(shape, dtype=torch.uint8))
    rows, header = torch.zeros(1, way.row_bytes, dtype=torch.uint8), way.header(tag=1, round=0, bucket=0, chunk=0)
    assert way.write(rows, header, [torch.zeros(1, 16, dtype=torch.uint8)], 0, [1]).tolist() == [32 + 16 + LONG]
    with pytest.raises(PayloadError, match=f"a section of {LONG} bytes does not fit"):
        way._read_row(rows[0], [torch.zeros(16, dtype=torch.uint8)])


def test_a_body_that_no_header_can_announce_is_refused_in_words() -> None:
    assert len(Header(1, 0, 0, 0, MOST_BODY_BYTES).to_bytes(0)) == 24
    with pytest.raises(IncompatibleError, match=r"bucket 3, chunk 0, round 0 has 4294967264 bytes.*smaller"):
        Header(1, 0, 3, 0, MOST_BODY_BYTES + 1).to_bytes(0)
