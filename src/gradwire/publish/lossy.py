"""Patches with an error: differences encoded by a method of the project, the error carried by the publisher.

The publisher compares the weights with what readers hold, not with what it last meant to publish. So what a patch
leaves out or rounds away is part of the next difference, and errors do not add up.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch

from gradwire.errors import GradwireError, IncompatibleError, PayloadError
from gradwire.exchange.method import Method
from gradwire.methods.gossip.vector_coder import VectorCoder, check_operator
from gradwire.methods.spec import method as method_of
from gradwire.publish.changes import encode_changes
from gradwire.publish.chunks import EncodedChunk, Read, codec_kernels
from gradwire.publish.container import LOSSY, Octets
from gradwire.publish.layout import BlockSpan, Layout
from gradwire.publish.manifest import MAX_SPEC

ROUNDED = {"BF16", "F16", "F32"}
"""Names of the types whose differences are rounded; others are patched exactly."""

_SPEC, _LENGTH, _ROUNDS = struct.Struct("<H"), struct.Struct("<Q"), 1 << 31


@lru_cache(maxsize=8)
def _method(spec: str) -> Method:
    """Return the method of a spec, compiled.

    Raises:
        HyperparameterError: it is no spec.
        IncompatibleError: the method is no operator that one encodes and another decodes.
    """
    found = method_of(spec)
    check_operator("lossy", found)
    codec_kernels().warm_up(found.traits.kernels)
    return found


def lossy_spec(lossy: str | Method) -> str:
    """Return the spec of a method for patches.

    Raises:
        HyperparameterError: it is no spec.
        IncompatibleError: the method cannot be used.
    """
    spec = repr(method_of(lossy))
    if len(spec) > MAX_SPEC:
        raise IncompatibleError(f"lossy={spec[:80]}...: specs have at most {MAX_SPEC} characters")
    # Some methods say only when they encode that ranks have to share a scale.
    VectorCoder(_method(spec), codec_kernels(), "", 0).encode(torch.ones(8), 0)
    return spec


def _coder(spec: str, run: bytes, span: BlockSpan) -> VectorCoder:
    name = f"{span.tensor}:{span.begin}"
    return VectorCoder(_method(spec), codec_kernels(), name, int.from_bytes(run[:8], "little"))


def _values(octets: torch.Tensor, span: BlockSpan) -> torch.Tensor:
    return octets.view(getattr(torch, span.kind.dtype))


def _moved(base: torch.Tensor, difference: torch.Tensor, span: BlockSpan) -> torch.Tensor:
    """Return a base moved by a difference, rounded to its type, as bytes: the same arithmetic on both sides."""
    values = _values(base, span)
    return (values.float() + difference).to(values.dtype).view(torch.uint8)


class LossyPatches:
    """Encodes differences by a method.

    Args:
        spec: The method, as :func:`lossy_spec` returned it.
    """

    def __init__(self, spec: str) -> None:
        self._spec = spec

    def breaks(self, layout: Layout) -> set[int]:
        """Return the tensors with which a run of blocks begins: a chunk is rounded or exact."""
        found, before = set[int](), None
        for number, entry in enumerate(layout.entries):
            if entry.elements:
                rounded = entry.kind.name in ROUNDED
                if before not in (None, rounded):
                    found.add(number)
                before = rounded
        return found

    def encode(self, spans: Sequence[BlockSpan], base: Read, new: Read, run: bytes, step: int) -> EncodedChunk | None:
        """Encode spans and write to the base what readers then hold; None if nothing differs."""
        kernels = codec_kernels()
        if spans[0].kind.name not in ROUNDED:
            return encode_changes(spans, base, new, advance=True)
        differences = [_values(new(span), span).float() - _values(base(span), span).float() for span in spans]
        if not all(bool(torch.isfinite(difference).all()) for difference in differences):
            return encode_changes(spans, base, new, advance=True)
        if not any(bool(difference.any()) for difference in differences):
            # Zeros may differ by their sign.
            return encode_changes(spans, base, new, advance=True)
        text = self._spec.encode()
        pieces: list[Octets] = [np.frombuffer(_SPEC.pack(len(text)) + text, np.uint8)]
        chunk = EncodedChunk(LOSSY, pieces, sum(span.elements for span in spans), 0)
        for span, difference in zip(spans, differences):
            coder = _coder(self._spec, run, span)
            payload = coder.encode(difference, step % _ROUNDS)
            pieces += [np.frombuffer(_LENGTH.pack(len(payload)), np.uint8), payload.numpy()]
            held = base(span)
            moved = _moved(held, coder.decode(payload, span.elements, step % _ROUNDS), span)
            chunk.changed += _changed(held, moved, span)
            change = kernels.word_sum(moved, span.first_word) - kernels.word_sum(held, span.first_word)
            chunk.sums[span.tensor] = (chunk.sums.get(span.tensor, 0) + change) % 2**64
            held.copy_(moved)
        return chunk


def _changed(before: torch.Tensor, after: torch.Tensor, span: BlockSpan) -> int:
    integers = torch.int16 if span.kind.width == 2 else torch.int32
    return int((before.view(integers) != after.view(integers)).sum())


def spec_of(body: Octets) -> str:
    """Return the spec of the method that a chunk was encoded by.

    Raises:
        PayloadError: the chunk ends within it.
    """
    head = body[: _SPEC.size].tobytes()
    length = _SPEC.unpack(head)[0] if len(head) == _SPEC.size else 0
    text = body[_SPEC.size : _SPEC.size + length].tobytes()
    if not 0 < length == len(text) <= MAX_SPEC or not text.isascii():
        raise PayloadError("it does not name a method")
    return text.decode()


class LossyChunk:
    """A chunk of rounded differences.

    Args:
        spans: Spans of the chunk.
        body: Bytes of the chunk, whose digest has been compared.
        run: Run of the file.
        step: Step of the file.

    Attributes:
        changed: Number of elements that it changes, once :meth:`check` has run.
        light: Whether this object takes little memory.

    Raises:
        PayloadError: the bytes are not those of such a chunk.
    """

    light = True

    def __init__(self, spans: Sequence[BlockSpan], body: Octets, run: bytes, step: int) -> None:
        self._spec, self._run, self._round, self.changed = spec_of(body), run, step % _ROUNDS, 0
        at, self._payloads = _SPEC.size + len(self._spec), list[tuple[BlockSpan, Octets]]()
        for span in spans:
            if span.kind.name not in ROUNDED:
                raise PayloadError(f"it rounds elements of type {span.kind.name}")
            head = body[at : at + _LENGTH.size].tobytes()
            length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else len(body)
            at += _LENGTH.size
            if length > len(body) - at:
                raise PayloadError("it ends within a tensor")
            self._payloads.append((span, body[at : at + length]))
            at += length
        if at != len(body):
            raise PayloadError("there are bytes behind its last tensor")

    def _moved(self, base: Read) -> Iterator[tuple[BlockSpan, torch.Tensor, torch.Tensor]]:
        """Yield the spans, what they hold and what they come to."""
        for span, payload in self._payloads:
            held = base(span)
            try:
                coder = _coder(self._spec, self._run, span)
                if len(payload) > coder.most_bytes(span.elements):
                    raise PayloadError("it has more bytes than the method writes")
                data = torch.from_numpy(payload.copy())
                moved = _moved(held, coder.decode(data, span.elements, self._round), span)
            except (GradwireError, ValueError, RuntimeError, IndexError) as error:
                raise PayloadError(f"{self._spec} cannot decode it: {error}") from error
            yield span, held, moved

    def check(self, base: Read) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """Return by tensor the sum of words of the base, and what the chunk adds to it; write nothing.

        Raises:
            PayloadError: the method cannot decode the bytes.
        """
        kernels, before, change, changed = codec_kernels(), dict[int, int](), dict[int, int](), 0
        for span, held, moved in self._moved(base):
            total = kernels.word_sum(held, span.first_word)
            before[span.tensor] = (before.get(span.tensor, 0) + total) % 2**64
            after = kernels.word_sum(moved, span.first_word)
            change[span.tensor] = (change.get(span.tensor, 0) + after - total) % 2**64
            changed += _changed(held, moved, span)
        self.changed = changed
        return before, change

    def replace(self, target: Read) -> Mapping[int, int]:
        """Write the chunk into the bytes of its spans; return by tensor what it adds to the sum of words.

        Raises:
            PayloadError: the method cannot decode the bytes.
        """
        _, change = self.check(target)
        self.write(target)
        return change

    def write(self, target: Read) -> None:
        """Write the chunk into the bytes of its spans, which have been checked."""
        for _, held, moved in self._moved(target):
            held.copy_(moved)
