"""How bodies of sections become bytes that travel, and back."""

from __future__ import annotations

import pytest
import torch

from gradwire.errors import PayloadError
from gradwire.exchange.wire import Measured, packing
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
