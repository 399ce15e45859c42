"""The papers' Elias codes against strings of bits, and against damage."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from coder_cases import resealed
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.errors import HyperparameterError, PayloadError
from gradwire.kernels.entropy import elias_bits, elias_decode, elias_encode

FORMS = ("dense", "sparse")

levels_of = st.lists(st.one_of(st.just(0), st.integers(-3, 3), st.integers(-(2**31), 2**31 - 1)), max_size=60).map(
    lambda values: torch.tensor(values, dtype=torch.int32)
)


def omega(value: int) -> str:
    """Elias' recursive code as a string, by its definition."""
    code = "0"
    while value > 1:
        code, value = f"{value:b}" + code, len(f"{value:b}") - 1
    return code


def text_of(levels: list[int], form: str) -> str:
    text, before = "", -1
    for index, level in enumerate(levels):
        sign = "" if level == 0 else str(int(level < 0))
        if form == "dense":
            text += omega(abs(level) + 1) + sign
        elif level:
            text += omega(index - before) + sign + omega(abs(level))
            before = index
    return text


def section_of(levels: torch.Tensor, form: str) -> torch.Tensor:
    size = 28 + -(-elias_bits(levels, form) // 8)
    whole = torch.full((size + 32,), 0xA5, dtype=torch.uint8)
    assert elias_encode(levels, whole[16 : size + 16], form) == size
    assert bool((whole[:16] == 0xA5).all() and (whole[size + 16 :] == 0xA5).all())
    return whole[16 : size + 16].clone()


def test_code_lengths_are_those_of_the_papers() -> None:
    known = {1: 1, 2: 3, 3: 3, 4: 6, 7: 6, 8: 7, 15: 7, 16: 11, 31: 11, 100: 13, 1000: 17}
    for value, bits in known.items():
        assert len(omega(value)) == bits
        sign = int(value > 1)
        assert elias_bits(torch.tensor([value - 1], dtype=torch.int32)) == bits + sign
    gap = torch.zeros(1000, dtype=torch.int32)
    gap[999] = -100
    assert elias_bits(gap, "sparse") == 17 + 1 + 13


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=150)
@given(levels=levels_of)
def test_bits_are_those_of_the_definition_and_are_read_again(form: str, levels: torch.Tensor) -> None:
    section, text = section_of(levels, form), text_of(levels.tolist(), form)
    bits = np.unpackbits(section[28:].numpy(), bitorder="little")
    assert elias_bits(levels, form) == len(text)
    assert "".join(map(str, bits)) == text + "0" * (-len(text) % 8)
    out = torch.full_like(levels, 77)
    elias_decode(section, out, form)
    assert torch.equal(out, levels)


def test_small_levels_have_codes_of_their_own() -> None:
    codes = [text_of([level], "dense") for level in range(-40, 41)]
    assert len(set(codes)) == 81
    assert not any(a != b and b.startswith(a) for a in codes for b in codes)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=100)
@given(levels=levels_of, data=st.data())
def test_damage_is_refused(form: str, levels: torch.Tensor, data: st.DataObject) -> None:
    section = section_of(levels, form)
    damaged, out = section.clone(), torch.empty_like(levels)
    damaged[data.draw(st.integers(0, len(section) - 1))] ^= data.draw(st.integers(1, 255))
    longer = torch.cat([section, section[:1]])
    for bad in (damaged, longer, section[: data.draw(st.integers(0, len(section) - 1))]):
        with pytest.raises(PayloadError, match="elias section refused"):
            elias_decode(bad, out, form)
    with pytest.raises(PayloadError, match="is not that of"):
        elias_decode(section, torch.empty(len(levels) + 1, dtype=torch.int32), form)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=200)
@given(body=st.binary(min_size=4, max_size=40), number=st.integers(0, 20))
def test_any_body_is_refused_or_is_what_an_encoder_writes(form: str, body: bytes, number: int) -> None:
    forged = torch.zeros(24 + len(body), dtype=torch.uint8)
    forged[:8] = torch.tensor([3, int(form == "sparse"), 0, 0, number, 0, 0, 0], dtype=torch.uint8)
    forged[24:] = torch.tensor(list(body), dtype=torch.uint8)
    coded = data_count = number if form == "dense" else body[0] % (number + 1)
    forged[24:28] = torch.tensor([data_count, 0, 0, 0], dtype=torch.uint8)
    forged = resealed(forged)
    whole = torch.full((number + 32,), 77, dtype=torch.int32)
    try:
        elias_decode(forged, whole[16 : 16 + number], form)
    except PayloadError:
        pass
    else:
        assert coded in (number, int((whole[16 : 16 + number] != 0).sum()))
        assert torch.equal(section_of(whole[16 : 16 + number], form), forged)
    assert bool((whole[:16] == 77).all() and (whole[16 + number :] == 77).all())


def test_wrong_arguments_are_refused() -> None:
    levels, out = torch.tensor([1, 2, 3], dtype=torch.int32), torch.zeros(30, dtype=torch.uint8)
    with pytest.raises(HyperparameterError, match="no form 'thick'"):
        elias_bits(levels, "thick")
    with pytest.raises(HyperparameterError, match="out has 29 bytes"):
        elias_encode(levels, out[:29])
    with pytest.raises(HyperparameterError, match="a contiguous vector"):
        elias_encode(levels.long(), out)
