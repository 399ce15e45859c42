"""The format of files: golden bytes, and a reader that follows the page's words alone."""

from __future__ import annotations

import hashlib
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

import gradwire as gw
from gradwire.publish.changes import ChangedChunk, encode_changes
from gradwire.publish.container import read_head
from gradwire.publish.layout import BY_NAME, TYPES, Entry, Layout

PAGE = Path(__file__).parents[2] / "docs" / "patch-format.md"


def golden(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[bytes, bytes]:
    """Publish two steps of two small tensors under a fixed run; return the anchor and the patch."""
    monkeypatch.setattr("secrets.token_bytes", lambda size: bytes(range(size)))
    tensors = {"w": torch.tensor([1.0, -2.0, 0.0, 3.5]).bfloat16(), "n": torch.tensor([7, -1], dtype=torch.int32)}
    publisher = gw.WeightPublisher(tensors, folder)
    publisher.publish(1)
    tensors["w"].view(torch.int16)[1] += 1
    tensors["w"][2] = -0.0
    tensors["n"][0] = 1007
    publisher.publish(2)
    (anchor,), (patch,) = folder.glob("anchor-*"), folder.glob("patch-*")
    return anchor.read_bytes(), patch.read_bytes()


def page_bytes(kind: str) -> bytes:
    """Return the bytes of an example on the page."""
    found = re.search(rf"{kind}:\n\n```\n([0-9a-f\s]+)```", PAGE.read_text())
    assert found, kind
    return bytes.fromhex(found.group(1))


@pytest.mark.repository
def test_golden_files_are_those_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    anchor, patch = golden(tmp_path, monkeypatch)
    assert anchor.hex(" ", 1) == page_bytes("The anchor").hex(" ", 1)
    assert patch.hex(" ", 1) == page_bytes("The patch").hex(" ", 1)


@pytest.mark.repository
def test_the_golden_files_of_the_page_are_read(tmp_path: Path) -> None:
    served = {"w": torch.zeros(4).bfloat16(), "n": torch.zeros(2, dtype=torch.int32)}
    subscriber = gw.WeightSubscriber(served, tmp_path)
    assert subscriber.apply(page_bytes("The anchor")) == 1
    assert served["w"].tolist() == [1.0, -2.0, 0.0, 3.5]
    assert subscriber.apply(page_bytes("The patch")) == 2
    assert served["w"].tolist() == [1.0, -2.015625, 0.0, 3.5]
    assert torch.signbit(served["w"]).tolist() == [False, True, True, False]
    assert served["n"].tolist() == [1007, -1]


@pytest.mark.repository
def test_the_chunk_of_changes_of_the_page_is_written_and_read() -> None:
    """Moves by 1, 2 and -70 units, the last one to the negative numbers behind -0.0, the neighbour of 0.0."""
    span = Layout([Entry("w", BY_NAME["BF16"], (128,))]).spans(0, 1)
    old = torch.zeros(128, dtype=torch.int16)
    new = old.clone()
    new[[3, 40, 41]] = torch.tensor([1, 2, 69 - 2**15], dtype=torch.int16)
    chunk = encode_changes(span, lambda span: old.view(torch.uint8), lambda span: new.view(torch.uint8))
    assert chunk is not None
    body = np.concatenate(chunk.pieces)
    found = re.search(r"are 0, 2 and 126:\n\n```\n([0-9a-f\s]+)```", PAGE.read_text())
    assert found
    assert body.tobytes().hex(" ", 1) == bytes.fromhex(found.group(1)).hex(" ", 1)
    change = ChangedChunk(span, body).replace(lambda span: old.view(torch.uint8))
    assert torch.equal(old, new)
    assert change == chunk.sums


def mix(value: int) -> int:
    """Mix a word as the page says."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


def word_sum(data: bytes) -> int:
    """Sum up words as the page says."""
    data += bytes(-len(data) % 8)
    words = struct.unpack(f"<{len(data) // 8}Q", data)
    return sum(mix((word + (j + 1) * 0x9E3779B97F4A7C15) % 2**64) for j, word in enumerate(words)) % 2**64


def test_digests_are_those_of_the_pages_formulas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    anchor, patch = golden(tmp_path, monkeypatch)

    def digest(data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=16).digest()

    head, later = (read_head(np.frombuffer(bytearray(data), np.uint8)) for data in (anchor, patch))
    numbers, floats = struct.pack("<2i", 7, -1), struct.pack("<4H", 0x3F80, 0xC000, 0, 0x4060)
    assert head.sums == (word_sum(numbers), word_sum(floats))
    table = struct.pack("<HBB", 1, 7, 1) + b"n" + struct.pack("<Q", 2)
    table += struct.pack("<HBB", 1, 16, 1) + b"w" + struct.pack("<Q", 4)
    assert head.table == table
    assert head.layout == later.layout == digest(table)
    assert head.state == later.base_state == digest(digest(table) + struct.pack("<2Q", *head.sums))
    assert anchor[128:144] == digest(anchor[:128] + anchor[144 : head.body_at])
    assert anchor[head.body_at :] == numbers + floats
    assert head.chunks[0].digest == digest(numbers + floats)


@pytest.mark.repository
def test_the_page_lists_every_type() -> None:
    text = PAGE.read_text()
    for kind in TYPES:
        order = "sign and magnitude" if kind.floating else "integer"
        numbers = ", two numbers an element" if kind.numbers == 2 else ""
        assert f"| {kind.code} | {kind.name} | {kind.width} | {order}{numbers} |" in text, kind
