"""Coded anchors: what they take, the page's words, both versions, hostile ones, and memory."""

from __future__ import annotations

import os
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import save_file
from test_format import PAGE
from weight_cases import DTYPES, any_bits, copies, manifest, nudge, octets, same, weights, zeros

import gradwire as gw
from benchmarks.trials.hostile_patches import attempt, parts, prepare, rebuilt
from gradwire.kernels import get_kernels
from gradwire.kernels.pieces import PIECE_BYTES, decode
from gradwire.publish.container import CODED, RAW, digest_of, read_head
from gradwire.publish.layout import BY_DTYPE, Entry, Layout
from gradwire.publish.whole import WholeChunk, encode_whole

NORMAL = torch.randn(300_000, generator=torch.Generator().manual_seed(0)) * 0.02


def encoded(tensor: torch.Tensor) -> tuple[int, npt.NDArray[np.uint8], Any]:
    """Return the kind and the bytes of a tensor's only chunk, and its spans."""
    layout = Layout([Entry("w", BY_DTYPE[tensor.dtype], tuple(tensor.shape))])
    spans = layout.spans(0, layout.blocks)
    chunk = encode_whole(spans, lambda span: octets(tensor)[span.octets])
    return chunk.kind, np.concatenate(chunk.pieces), spans


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("bfloat16", 10.65), ("float16", 13.6), ("float32", 26.7), ("float8_e4m3fn", 6.7), ("float64", 58.0)],
)
def test_weights_take_the_bits_of_their_exponents(dtype: str, bits: float) -> None:
    """2.55 bits for the exponent of a normal number, all others as they are; the page says how much."""
    tensor = (NORMAL * (100 if "8" in dtype else 1)).to(getattr(torch, dtype))
    kind, body, spans = encoded(tensor)
    assert kind == CODED
    assert 8 * len(body) / tensor.numel() < bits
    out = torch.zeros_like(tensor)
    chunk = WholeChunk(kind, spans, body)
    assert chunk.fill(lambda span: octets(out)[span.octets]) == chunk.sums()
    assert chunk.sums() == {0: get_kernels("auto").word_sum(octets(tensor))}
    assert torch.equal(octets(out), octets(tensor))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_of_any_kind_come_back_and_take_no_more_than_they_are(dtype: torch.dtype) -> None:
    tensor = any_bits(4099, dtype)
    kind, body, spans = encoded(tensor)
    assert len(body) <= tensor.nbytes
    out = torch.zeros(tensor.nbytes, dtype=torch.uint8)
    chunk = WholeChunk(kind, spans, body)
    sums = chunk.fill(lambda span: out[span.octets])
    assert torch.equal(out, octets(tensor))
    assert chunk.sums() == sums
    assert chunk.replace(lambda span: out[span.octets]) == {0: 0}


def test_mantissas_are_stored_after_a_look_at_a_sample() -> None:
    """Of 8 bits that take 7.9 by their frequencies: coding them would take longer than it saves."""
    rng = np.random.default_rng(0)
    low = np.where(rng.random(1 << 16) < 0.37, rng.integers(0, 128, 1 << 16), rng.integers(0, 256, 1 << 16))
    numbers = (low | rng.integers(0, 4, 1 << 16) << 8).astype(np.int16)
    body = encoded(torch.from_numpy(numbers))[1].tobytes()
    begin = 4 + 1
    (high,) = struct.unpack_from("<I", body, begin)
    assert body[begin + 4 + high + 4 : begin + 4 + high + 6] == b"\x01\x00"
    assert body[begin + 5] == 2


def sections(body: bytes, count: int, numel: int) -> list[bytes]:
    """Read stored sections and runs as the page on the wire format says."""
    found, at = [], 0
    for _ in range(count):
        size, coder, mode, zero, symbols, length, also_zero = struct.unpack_from("<IBBHIII", body, at)
        assert (coder, zero, symbols, also_zero, size) == (1, 0, numel, 0, 24 + length)
        data = body[at + 28 : at + 28 + length]
        found.append({0: data, 1: data * numel}[mode])
        at += 4 + size
    assert at == len(body)
    return found


def test_a_reader_that_follows_the_words_reads_planes() -> None:
    """Exponents that are equal are a run, and 256 mantissas with both signs are stored."""
    bits = np.arange(0x3F80, 0x4000, dtype=np.uint16)
    numbers = np.concatenate([bits, bits | 0x8000])
    kind, body, _ = encoded(torch.from_numpy(numbers.view(np.int16)).view(torch.bfloat16))
    assert kind == CODED
    data = body.tobytes()
    (length,) = struct.unpack_from("<I", data)
    assert len(data) == 4 + length
    assert data[4] == 1
    high, low = sections(data[5:], 2, 256)
    turned = np.frombuffer(high, np.uint8).astype(np.uint16) << 8 | np.frombuffer(low, np.uint8)
    assert np.array_equal(turned >> 1 | turned << 15, numbers)


@pytest.mark.repository
def test_the_coded_chunk_of_the_page_is_written_and_read() -> None:
    found = re.search(r"form of few words:\n\n```\n([0-9a-f\s]+)```", PAGE.read_text())
    assert found
    ones = torch.ones(1024).bfloat16()
    kind, body, spans = encoded(ones)
    assert (kind, body.tobytes().hex(" ")) == (CODED, bytes.fromhex(found.group(1)).hex(" "))
    wire = (PAGE.parent / "wire-format.md").read_text()
    assert f"1024 bfloat16 ones are `{body[4:].tobytes().hex(' ')}`" in wire
    assert body[4] == 2
    assert sections(body[8:].tobytes(), 1, 1024) == [bytes(1024)]
    out = torch.zeros_like(ones)
    WholeChunk(kind, spans, body).write(lambda span: octets(out))
    assert torch.equal(out, ones)


def published(folder: Path, **settings: Any) -> tuple[dict[str, torch.Tensor], bytes]:
    """Publish a step; return the weights and the anchor."""
    trained = weights()
    gw.WeightPublisher(trained, folder, **settings).publish(0)
    return trained, (folder / manifest(folder).files[0].name).read_bytes()


def signed(data: bytes, version: int) -> bytes:
    """Give a file another version, and sign its head anew."""
    head = read_head(np.frombuffer(bytearray(data), np.uint8))
    fixed = data[:4] + struct.pack("<H", version) + data[6:128]
    return fixed + digest_of(fixed, data[144 : head.body_at]) + data[144:]


def test_the_version_before_is_read_and_lacks_coded_chunks(tmp_path: Path) -> None:
    trained, data = published(tmp_path)
    head, bodies = parts(data)
    assert [chunk.kind for chunk in head.chunks] == [CODED]
    served = zeros(trained)
    subscriber = gw.WeightSubscriber(served, tmp_path)
    for version, reason in ((2, "unknown kind"), (1, "format version 1"), (4, "format version 4")):
        with pytest.raises(gw.PayloadError, match=reason):
            subscriber.apply(signed(data, version))
    plain = [b"".join(octets(trained[name]).numpy().tobytes() for name in sorted(trained))]
    raw = replace(head, chunks=tuple(replace(chunk, kind=RAW) for chunk in head.chunks))
    assert len(bodies[0]) < 0.75 * len(plain[0])
    assert subscriber.apply(signed(rebuilt(raw, plain), 2)) == 0
    assert same(served, trained)


def test_hostile_anchors_are_refused_and_the_weights_untouched() -> None:
    """As hostile patches, with a coded anchor in most attempts."""
    case = prepare(seed=1)
    case.files[:] = [case.files[1]] * 2
    assert parts(case.files[0])[0].chunks[0].kind == CODED
    outcomes = [attempt(case, number) for number in range(300)]
    assert {outcome for outcome, _ in outcomes} <= {"refused", "right"}
    reasons = {reason for outcome, reason in outcomes if outcome == "refused"}
    assert any("coded piece" in reason for reason in reasons)
    assert any("its pieces have" in reason for reason in reasons)


@pytest.mark.parametrize("into", ["file", "staging"])
def test_what_is_written_in_one_pass_is_not_handed_over_if_it_differs(into: str, tmp_path: Path) -> None:
    """A file and a staging copy are written while an anchor is decoded; sums are compared before the exchange."""
    trained, data = published(tmp_path / "place")
    head, bodies = parts(data)
    sums = (head.sums[0] ^ 1, *head.sums[1:])
    layout = Layout.parse(head.table, len(sums))
    wrong = rebuilt(replace(head, sums=sums, state=layout.state(sums)), bodies)
    (anchor,) = (tmp_path / "place").glob("anchor-*")
    anchor.write_bytes(wrong)
    listed = manifest(tmp_path / "place")
    found = read_head(np.frombuffer(bytearray(wrong), np.uint8))
    entry = replace(listed.files[0], digest=found.digest.hex(), state=found.state.hex())
    (tmp_path / "place" / "manifest.json").write_bytes(replace(listed, files=(entry,)).pack())
    before, file = weights(1), tmp_path / "model.safetensors"
    served = copies(before)
    save_file(before, file)
    held = file.read_bytes()
    subscriber = gw.WeightSubscriber(file if into == "file" else served, tmp_path / "place")
    with pytest.raises(gw.PayloadError, match="the digest of 'empty' differs"):
        subscriber.update(into=None if into == "file" else "staging")
    assert file.read_bytes() == held
    assert same(served, before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "place"]
    gw.WeightPublisher(trained, tmp_path / "place").publish(1)
    assert subscriber.update(into=None if into == "file" else "staging") == 1


def test_large_anchors_are_encoded_twice_and_are_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.token_bytes", bytes)
    kept = published(tmp_path / "kept")[1]
    monkeypatch.setattr("gradwire.publish.encoder.KEPT_BYTES", 0)
    for base in ("memory", "sums", tmp_path / "base.bin"):
        trained, data = published(tmp_path / f"by {Path(base).name}", base=base)
        assert data == kept
    served = zeros(trained)
    assert gw.WeightSubscriber(served, tmp_path / "kept").update() == 0
    assert same(served, trained)


def test_weights_that_change_while_they_are_published_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradwire.publish.encoder.KEPT_BYTES", 0)
    trained, opened = weights(), os.open

    def change(path: Any, *words: Any) -> int:
        trained["layer.weight"].zero_()
        return opened(path, *words)

    publisher = gw.WeightPublisher(trained, tmp_path, base="sums")
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", change)
        with pytest.raises(gw.ExchangeError, match="changed while they were published"):
            publisher.publish(0)
    assert publisher.publish(1).anchor_bytes
    served = zeros(trained)
    assert gw.WeightSubscriber(served, tmp_path).update() == 1
    assert same(served, trained)


def test_patches_that_change_everything_are_coded_whole(tmp_path: Path) -> None:
    trained, served = {"w": NORMAL.bfloat16()}, {"w": torch.zeros(len(NORMAL)).bfloat16()}
    publisher, subscriber = gw.WeightPublisher(trained, tmp_path), gw.WeightSubscriber(served, tmp_path)
    publisher.publish(0)
    subscriber.update()
    trained["w"].copy_(NORMAL.flip(0))
    publication = publisher.publish(1)
    assert 8 * publication.patch_bytes < 10.7 * len(NORMAL)
    assert subscriber.update() == 1
    assert same(served, trained)
    nudge(trained, 0)
    publisher.publish(2)
    assert subscriber.update() == 2
    assert same(served, trained)


@pytest.mark.parametrize(("numel", "dtype"), [(5, torch.float32), (3000, torch.int8)], ids=["short", "int8"])
def test_a_patch_that_waits_has_the_weights_of_its_step(
    numel: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of blocks that coding does not shorten, it has the bytes, and the trainer goes on with its tensors."""
    trained = {"w": any_bits(numel, dtype), "frozen": torch.zeros(1000)}
    moving = {"w": trained["w"]}
    publisher = gw.WeightPublisher(trained, tmp_path, base="sums")
    subscriber = gw.WeightSubscriber(served := zeros(trained), tmp_path)
    publisher.publish(0)
    assert subscriber.update() == 0
    nudge(moving, 0, 0.5)
    with monkeypatch.context() as context:
        context.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("no space left")))
        with pytest.raises(OSError, match="no space left"):
            publisher.publish(1)
    nudge(moving, 1, 0.5)
    publisher.publish(2)
    assert subscriber.update() == 2
    assert [file.name.split()[0] for file in subscriber.applied] == ["patch", "patch"]
    assert same(served, trained)


def test_pieces_are_found_by_their_lengths() -> None:
    """Two tensors in a chunk, the first of two pieces: each piece decodes by itself."""
    layout = Layout([Entry("a", BY_DTYPE[torch.bfloat16], (600_000,)), Entry("b", BY_DTYPE[torch.float32], (50,))])
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(600_000, generator=generator).bfloat16(), torch.randn(50, generator=generator)]
    chunk = encode_whole(layout.spans(0, layout.blocks), lambda span: octets(values[span.tensor])[span.octets])
    body = np.concatenate(chunk.pieces)
    lengths = body[:12].view("<u4").tolist()
    assert (chunk.kind, sum(lengths)) == (CODED, len(body) - 12)
    begin = 12 + lengths[0]
    second = decode(body[begin : begin + lengths[1]].tobytes(), 1_200_000 - PIECE_BYTES, 2, True)
    assert np.array_equal(second, octets(values[0]).numpy()[PIECE_BYTES:])
