"""Positions as symbols for a coder: there and back, shorter where they lie in clusters, and damage refused."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradwire as gw
from gradwire.errors import PayloadError
from gradwire.exchange.segments import Parameter, lay_out
from gradwire.kernels import get_kernels, smallest_format
from gradwire.kernels.entropy import entropy_bits
from gradwire.methods.sparse.sparse_codec import (
    CODED,
    CODED_HEAD,
    HEAD,
    MOST_SYMBOL,
    decode_gaps,
    encode_gaps,
    symbols_of,
)

KERNELS = get_kernels("reference")


def clustered(numel: int, count: int, seed: int = 0) -> torch.Tensor:
    """Positions, three quarters of which lie in an eighth of all places."""
    generator = np.random.default_rng(seed)
    near = generator.choice(numel // 8, 3 * count // 4, replace=False)
    far = numel // 8 + generator.choice(numel - numel // 8, count - len(near), replace=False)
    return torch.from_numpy(np.sort(np.concatenate([near, far])).astype(np.int32))


@pytest.mark.parametrize("coder", ["rans", "huffman"])
@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 20), st.integers(0, 2**24)), min_size=1, max_size=80))
def test_positions_come_back(coder: str, gaps: list[int]) -> None:
    index = torch.tensor(gaps).add(1).cumsum(0).sub(1).to(torch.int32)
    chosen, numel = KERNELS.coder(coder), int(index[-1]) + 1
    data = encode_gaps(index, chosen)
    assert torch.equal(decode_gaps(data, chosen, len(gaps), numel), index)
    with pytest.raises(PayloadError, match="go on to"):
        decode_gaps(data, chosen, len(gaps), numel - 1)


def test_the_largest_gap_has_the_largest_symbol() -> None:
    symbols, left = symbols_of(np.array([0, 7, 8, 2**31 - 2]))
    assert (symbols.tolist(), left.tolist()) == ([0, 7, 8, 119], [0, 0, 1, 28])
    index = torch.tensor([2**31 - 2], dtype=torch.int32)
    coder = KERNELS.coder("huffman")
    assert torch.equal(decode_gaps(encode_gaps(index, coder), coder, 1, 2**31 - 1), index)


def test_bytes_are_those_of_the_symbols_and_of_the_bits_beside_them() -> None:
    """Gaps 9, 1000 and 2: one bit 1, and seven bits 1101000, from the lowest."""
    coder = KERNELS.coder("rans")
    data = encode_gaps(torch.tensor([9, 1010, 1013], dtype=torch.int32), coder)
    used = int(data[:4].view(torch.int32))
    symbols = torch.empty(3, dtype=torch.uint8)
    coder.decode(data[4 : 4 + used], symbols)
    assert symbols.tolist() == [8, 35, 2]
    assert data[4 + used :].tolist() == [0b1101000_1]


def test_clusters_are_coded_in_little_more_than_their_entropy() -> None:
    index = clustered(1 << 20, 10_000)
    gaps = np.diff(index.numpy(), prepend=-1) - 1
    symbols, left = symbols_of(gaps.astype(np.int64))
    least = (entropy_bits(torch.from_numpy(symbols)) + left.sum()) / 8
    packed = smallest_format(KERNELS.gap_statistics(index, 1 << 20)).bytes
    coded = len(encode_gaps(index, KERNELS.coder("rans")))
    # A frame, a table of 120 symbols at most, the last states of 128 lanes, and probabilities of twelve bits.
    assert least < coded < 1.01 * least + 24 + 240 + 512 + 4
    assert coded < 0.95 * packed


@pytest.mark.parametrize("coder", ["rans", "huffman"])
def test_damage_is_refused_or_names_other_positions_within_bounds(coder: str) -> None:
    chosen, index = KERNELS.coder(coder), clustered(5000, 400)
    data = encode_gaps(index, chosen)
    for short in range(0, len(data), 7):
        with pytest.raises(PayloadError):
            decode_gaps(data[:short].clone(), chosen, 400, 5000)
    with pytest.raises(PayloadError, match="beside their symbols"):
        decode_gaps(torch.cat([data, torch.zeros(1, dtype=torch.uint8)]), chosen, 400, 5000)
    refused = 0
    for place in range(len(data)):
        hurt = data.clone()
        hurt[place] ^= 0x80
        try:
            found = decode_gaps(hurt, chosen, 400, 5000).long()
        except PayloadError:
            refused += 1
        else:
            assert bool((found[1:] > found[:-1]).all())
            assert 0 <= int(found[0]) <= int(found[-1]) < 5000
    # All of the symbols' section has a check; what lies beside it has none of its own.
    assert refused >= int(data[:4].view(torch.int32))


def test_a_symbol_that_no_gap_has_is_refused() -> None:
    coder = KERNELS.coder("huffman")
    out = torch.empty(coder.bound(2), dtype=torch.uint8)
    used = coder.encode(torch.tensor([1, 120], dtype=torch.uint8), out)
    data = torch.cat([torch.tensor([used], dtype=torch.int32).view(torch.uint8), out[:used]])
    with pytest.raises(PayloadError, match="symbols that no gap has"):
        decode_gaps(data, coder, 2, 1 << 30)


@pytest.mark.parametrize(
    ("spec", "message"), [("TopK(density=0.01)", "positions of format"), ("Threshold(threshold=1.0)", "beside their")]
)
def test_a_short_section_of_many_positions_takes_little_memory(spec: str, message: str) -> None:
    """A coder writes equal symbols in a few bytes, whatever their number; each of these leaves out 28 bits."""
    numel, coder = 1 << 18, KERNELS.coder("rans")
    coded = torch.empty(coder.bound(numel), dtype=torch.uint8)
    used = coder.encode(torch.full((numel,), MOST_SYMBOL, dtype=torch.uint8), coded)
    size = CODED_HEAD.size + used
    assert size < 64
    codec = gw.method(spec).codec(KERNELS, lay_out([Parameter("x", (numel,), (1,))]), 2, 0)
    codec.use_coder(coder)
    row = torch.zeros(codec.payload_bytes(codec.units), dtype=torch.uint8)
    head = HEAD.pack(HEAD.size + 64, numel, size, CODED, 0, 0) + CODED_HEAD.pack(used)
    row[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    row[len(head) : len(head) + used] = coded[:used]
    tracemalloc.start()
    try:
        with pytest.raises(PayloadError, match=message):
            codec.read(row)
        assert tracemalloc.get_traced_memory()[1] < 8 * numel
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("spec", ["TopK(density=0.05)", "Threshold(threshold=2.5)", "ATOMO(density=0.05)"])
def test_coded_positions_are_shorter_and_the_outcome_is_the_same(spec: str) -> None:
    """Of each payload that this shortens: where elements are as large everywhere it is the plain one, to the byte."""
    g = torch.randn(3, 200_000, generator=torch.Generator().manual_seed(0))
    loud = g.clone()
    loud[:, :12_500] *= 10
    for x, gains in ((loud, True), (g[:, :20_000], False)):
        plain, coded = gw.simulate(x, spec), gw.simulate(x, f"Coded(compressor={spec}, coder='huffman')")
        assert torch.equal(plain.mean, coded.mean)
        assert (coded.traffic.sent_bytes < plain.traffic.sent_bytes) is gains
        assert coded.traffic.sent_bytes <= plain.traffic.sent_bytes
