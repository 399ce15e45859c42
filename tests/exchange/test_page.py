"""Payloads of levels, read as ``docs/wire-format.md`` says, without the package's own readers."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import gradwire as gw
from gradwire.exchange.drivers.tables import encode as encode_table
from gradwire.exchange.ops import AllGather, Op
from gradwire.exchange.planning import Options, Planner
from gradwire.exchange.protocols import Context, Memory
from gradwire.exchange.wire import HEADER_BYTES, WIRE_VERSION
from gradwire.kernels.checksum import checksums
from gradwire.kernels.entropy import get_coder

PAGE = Path(__file__).parents[2] / "docs" / "wire-format.md"
NUMEL, BLOCK, WORKERS = 203, 32, 2
WORDS = {1: "B", 2: "<u2", 4: "<u4"}


def layout(base: int, widths: tuple[int, ...] = (1, 2, 4)) -> tuple[int, int]:
    """Return the bytes of a word and its digits: the fewest bits a digit."""
    found = []
    for width in widths:
        digits = 0
        while base ** (digits + 1) <= 256**width:
            digits += 1
        if digits:
            found.append((width / digits, width, digits))
    _, width, digits = min(found)
    return width, digits


def unpack(data: bytes, base: int, width: int, digits: int) -> list[int]:
    """Sixteen words a block, digit q of word j is value 16 q + j."""
    words = np.frombuffer(data, WORDS[width]).astype(np.int64).reshape(-1, 16)
    return [int(w) // base**q % base for block in words for q in range(digits) for w in block]


def payloads(method: gw.Method, gradients: torch.Tensor) -> tuple[list[bytes], torch.Tensor]:
    """Return what both ranks send in round 0, and the mean that comes of it."""
    parameters = {"w": torch.empty(NUMEL)}
    planner = Planner(method, parameters, WORKERS, Options(min_numel=0, backend="reference"))
    plan, rows = planner.plan(["w"], 0), gradients.clone()
    ranks = [plan.whole(Context(r, WORKERS, 0, memory=Memory()), rows[r]) for r in range(WORKERS)]
    ops: list[Op] = [next(rank) for rank in ranks]
    sent = []
    for op in ops:
        assert isinstance(op, AllGather)
        size = op.send.numel() if op.lengths is None else int(op.lengths.max())
        sent.append(bytes(op.send[:size].tolist()))
        if op.arrived is not None:
            op.arrived.fill_(size)
    for rank, op in zip(ranks, ops):
        assert isinstance(op, AllGather)
        for source, data in enumerate(sent):
            op.recv[source, : len(data)] = torch.tensor(list(data), dtype=torch.uint8)
        with pytest.raises(StopIteration):
            rank.send(op.recv)
    return sent, rows[0]


def decode(section: bytes, values: np.ndarray, base: int, width: int, digits: int) -> Iterator[np.float32]:
    """Return each element's level times the scale of its block, both float32, for a share of 1 / N."""
    blocks = -(-NUMEL // BLOCK)
    scales = np.frombuffer(section[: 4 * blocks], "<f4") * np.float32(1 / WORKERS)
    numbers = unpack(section[-(-4 * blocks // 16) * 16 :], base, width, digits)
    for e in range(NUMEL):
        yield values[min(numbers[e], base - 1)] * scales[e // BLOCK]


def magnitudes(method: gw.Method) -> np.ndarray:
    """Levels by digit."""
    if isinstance(method, gw.NUQSGD):
        m = [2.0 ** (j - method.levels) for j in range(1, method.levels + 1)]
        return np.array([-x for x in m[::-1]] + [0.0] * method.zero + m, np.float32)
    if isinstance(method, gw.DoReFa):
        n = 2**method.bits - 1
        return np.array([(2 * j - n) / n for j in range(n + 1)], np.float32)
    s = getattr(method, "levels", 1)
    return np.arange(-s, s + 1, dtype=np.float32) / np.float32(s)


def checksum(head: bytes, body: bytes) -> int:
    """Compute the checksum of a payload."""
    mask = 2**64 - 1

    def step(x: int) -> int:
        y = x * 0x9FB21C651E98DF25 & mask
        return y ^ y >> 32

    sums: list[int] = []
    for begin in range(0, max(len(body), 1), 16384):
        block, own = body[begin : begin + 16384], [0x9E3779B97F4A7C15 * (j + 1) & mask for j in range(16)]
        for at in range(0, len(block), 128):
            row = block[at : at + 128].ljust(128, bytes(1))
            own = [step(a ^ w) for a, w in zip(own, struct.unpack("<16Q", row))]
        sums = [step(a ^ b) for a, b in zip(sums, own)] if begin else own
    h = 0xC2B2AE3D27D4EB4F
    for v in (*struct.unpack(f"<{len(head) // 8}Q", head), *sums):
        h = step(h ^ v)
    return h


METHODS = [
    gw.QSGD(levels=5, block_size=BLOCK),
    gw.QSGDinf(levels=7, block_size=BLOCK),
    gw.NUQSGD(levels=3, block_size=BLOCK),
    gw.NUQSGD(levels=4, zero=False, block_size=BLOCK),
    gw.DoReFa(bits=3, block_size=BLOCK),
    gw.PQuantisation(p=1, block_size=BLOCK),
]


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_section_of_levels_is_read_as_the_page_says(method: gw.Method, coded: bool) -> None:
    gradients = torch.randn(WORKERS, NUMEL, generator=torch.Generator().manual_seed(3))
    sent, mean = payloads(gw.Coded(compressor=method, coder="rans") if coded else method, gradients)
    values = magnitudes(method)
    base, total = len(values), np.zeros(NUMEL, np.float32)
    for rank, data in enumerate(sent):
        magic, version, _, round_, _, _, size = struct.unpack("<2sBBIHHI", data[:16])
        assert (magic, version, round_, size) == (b"GW", 3, 0, len(data) - 32)
        sender, receiver, exchange, zero, check = struct.unpack("<HHHHQ", data[16:32])
        assert (sender, receiver, exchange, zero) == (rank, 0xFFFF, 0, 0)
        assert check == checksum(data[:24], data[32:])
        body = data[32:]
        width, digits = layout(base, (1,) if coded else (1, 2, 4))
        if coded:
            (length,) = struct.unpack("<I", body[:4])
            assert body[4:16] == bytes(12)
            assert body[16 + length :] == bytes(-length % 16)
            plain = -(-4 * -(-NUMEL // BLOCK) // 16) * 16
            groups = -(-NUMEL // 80)
            room = torch.empty(-(-80 * groups // (16 * digits)) * 16, dtype=torch.uint8)
            section = torch.tensor(list(body[16 + plain : 16 + length]), dtype=torch.uint8)
            get_coder("rans", "reference").decode(section, room)
            body = body[16 : 16 + plain] + bytes(room.tolist())
        total = total + np.fromiter(decode(body, values, base, width, digits), np.float32)
    assert torch.equal(torch.from_numpy(total), mean)


SIGNS = [
    (gw.ScaledSign(), NUMEL),
    (gw.ScaledSign(block_size=BLOCK), BLOCK),
    (gw.EFSignSGD(block_size=BLOCK), BLOCK),
    (gw.OneBit(), NUMEL),
    (gw.OneBit(block_size=BLOCK), BLOCK),
]


@pytest.mark.parametrize(("method", "run"), SIGNS, ids=repr)
def test_a_section_of_signs_is_read_as_the_page_says(method: gw.Method, run: int) -> None:
    """Values of runs padded to sixteen bytes, all of bit 1 before all of bit 0, then ten bytes for 80 elements."""
    gradients = torch.randn(WORKERS, NUMEL, generator=torch.Generator().manual_seed(3))
    sent, mean = payloads(method, gradients)
    runs, sides = -(-NUMEL // run), 2 if isinstance(method, gw.OneBit) else 1
    total = np.zeros(NUMEL, np.float32)
    for data in sent:
        body = data[HEADER_BYTES:]
        values = np.frombuffer(body[: 4 * sides * runs], "<f4").reshape(sides, runs) * np.float32(1 / WORKERS)
        bits = body[-(-4 * sides * runs // 16) * 16 :]
        for e in range(NUMEL):
            group, i = divmod(e, 80)
            above = bits[10 * group + i // 8] >> i % 8 & 1
            total[e] += values[0, e // run] if above else values[1, e // run] if sides == 2 else -values[0, e // run]
    assert torch.equal(torch.from_numpy(total), mean)


@pytest.mark.parametrize("length", [0, 24, 16384, 16385, 40000])
def test_a_checksum_is_what_the_page_says(length: int) -> None:
    body = np.random.default_rng(length).integers(0, 256, length, np.uint8)
    head = np.arange(3, dtype=np.uint64)[None]
    assert checksums(head, body[None]).tolist() == [checksum(head.tobytes(), body.tobytes())]


@pytest.mark.repository
def test_a_table_is_what_the_page_says() -> None:
    text = b'{"rate":0.1}'
    digest = hashlib.blake2b(b"gradwire table\0handshake\x003\0" + text, digest_size=32).digest()
    assert encode_table({"rate": 0.1}, "handshake", 3) == digest + text
    assert f"as the `handshake` of rank 3 begins with `{digest[:8].hex(' ')}`" in PAGE.read_text()
    assert encode_table([b"\0", 1, None], "save", 0)[32:] == b'[{"$bytes":"AA=="},1,null]'


@pytest.mark.repository
def test_the_page_is_about_the_version_that_is_written() -> None:
    text = PAGE.read_text()
    assert text.startswith(f"# Wire format, version {WIRE_VERSION}\n")
    assert f"| 2 | 1 | wire version: {WIRE_VERSION} |" in text
