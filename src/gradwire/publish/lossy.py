"""Patches with an error: differences encoded by a method of the project, the error carried by the publisher.

The publisher compares the weights with what readers hold, not with what it last meant to publish. So what a patch
leaves out or rounds away is part of the next difference, and errors do not add up.

An operator encodes each run of blocks by itself. Of any other method, the publisher sends the replies of its
collectives, and readers run it on them: they hold what it remembers, which begins anew after each exact step.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch

from gradwire.errors import GradwireError, IncompatibleError, PayloadError
from gradwire.exchange.method import Method
from gradwire.methods.gossip.sender_rounds import SenderRounds, check_single_sender, follows_state
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
_FACTOR = struct.Struct("<f")
_PLACE = struct.Struct("<QI")
"""Before the replies of a method's round: the step of its first round, and the rounds since."""

States = dict[tuple[int, int], tuple[int, SenderRounds]]
"""By tensor and first element of a run of blocks, the step of a method's first round there, and its rounds."""


@lru_cache(maxsize=8)
def _method(spec: str) -> Method:
    """Return the method of a spec, compiled.

    Raises:
        HyperparameterError: it is no spec.
    """
    found = method_of(spec)
    codec_kernels().warm_up(found.traits.kernels)
    return found


@lru_cache(maxsize=8)
def _by_itself(spec: str) -> bool:
    """Return whether a method encodes each vector by itself: it is an operator with scales of its own.

    Raises:
        HyperparameterError: it is no spec.
        IncompatibleError: the method cannot have one sender and readers who follow it.
    """
    method = _method(spec)
    try:
        check_operator("lossy", method)
    except IncompatibleError:
        check_single_sender("lossy", method)
        return False
    return True


def keeps_state(spec: str) -> bool:
    """Return whether a patch rounded by a method can be decoded only after those before it.

    Raises:
        PayloadError: it is not the spec of a method that a publisher takes.
    """
    try:
        return not _by_itself(spec) and follows_state(_method(spec))
    except GradwireError as error:
        raise PayloadError(f"weights cannot be rounded by {spec[:80]!r}: {error}") from error


def lossy_spec(lossy: str | Method) -> str:
    """Return the spec of a method for patches.

    Raises:
        HyperparameterError: it is no spec.
        IncompatibleError: the method cannot be used.
    """
    method = method_of(lossy)
    if method.traits.open_coders:
        method = method.with_coder(method.traits.open_coders[0])
    spec = repr(method)
    if len(spec) > MAX_SPEC:
        raise IncompatibleError(f"lossy={spec[:80]}...: specs have at most {MAX_SPEC} characters")
    _by_itself(spec)
    return spec


def _rounds(spec: str, run: bytes, span: BlockSpan, layout: Layout, origin: int) -> SenderRounds:
    """Return the rounds of a method on a run of blocks, before the first one."""
    check_single_sender("lossy", _method(spec))
    columns = math.prod(layout.entries[span.tensor].shape[1:])
    shape: tuple[int, ...] = (span.elements,)
    # Whole rows are a matrix, which methods of low rank take.
    if columns > 1 and span.begin % columns == 0 == span.elements % columns and span.elements > columns:
        shape = (span.elements // columns, columns)
    name = f"{span.tensor}:{span.begin}:{origin}"
    return SenderRounds(_method(spec), codec_kernels(), name, shape, int.from_bytes(run[:8], "little"))


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
        self._states: States = {}

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

    def reset(self) -> None:
        """Begin anew with what the method remembers, at weights that readers have without it."""
        self._states.clear()

    def encode(
        self, layout: Layout, spans: Sequence[BlockSpan], base: Read, new: Read, run: bytes, step: int
    ) -> EncodedChunk | None:
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
        coded, used = list[tuple[torch.Tensor, torch.Tensor]](), list[SenderRounds]()
        for span, difference in zip(spans, differences):
            if _by_itself(self._spec):
                coder = _coder(self._spec, run, span)
                payload = coder.encode(difference, step % _ROUNDS)
                coded.append((payload, coder.decode(payload, span.elements, step % _ROUNDS)))
                continue
            key = span.tensor, span.begin
            if key not in self._states:
                self._states[key] = step, _rounds(self._spec, run, span, layout, step)
            origin, rounds = self._states[key]
            data, outcome = rounds.encode(difference)
            place = torch.frombuffer(bytearray(_PLACE.pack(origin, rounds.count)), dtype=torch.uint8)
            coded.append((torch.cat([place, data]), outcome))
            used.append(rounds)
        if not all(bool(torch.isfinite(outcome).all()) for _, outcome in coded):
            for rounds in used:
                rounds.discard()
            return encode_changes(spans, base, new, advance=True)
        for rounds in used:
            rounds.commit()
        factors = [_factor(difference, outcome) for difference, (_, outcome) in zip(differences, coded)]
        text = self._spec.encode()
        pieces: list[Octets] = [np.frombuffer(_SPEC.pack(len(text)) + text, np.uint8)]
        chunk = EncodedChunk(LOSSY, pieces, sum(span.elements for span in spans), 0)
        for span, factor, (payload, outcome) in zip(spans, factors, coded):
            head = _LENGTH.pack(_FACTOR.size + len(payload)) + _FACTOR.pack(factor)
            pieces += [np.frombuffer(head, np.uint8), payload.numpy()]
            held = base(span)
            moved = _moved(held, outcome * factor, span)
            chunk.changed += _changed(held, moved, span)
            change = kernels.word_sum(moved, span.first_word) - kernels.word_sum(held, span.first_word)
            chunk.sums[span.tensor] = (chunk.sums.get(span.tensor, 0) + change) % 2**64
            held.copy_(moved)
        return chunk


def _factor(difference: torch.Tensor, outcome: torch.Tensor) -> float:
    """Return the factor that brings an outcome nearest to the difference, as a float32.

    With ``f = <d, o> / <o, o>``, what is left over, ``d - f o``, is never longer than d. So errors do not grow from one
    patch to the next, whatever the variance of the method.
    """
    square = float(outcome.double().square().sum())
    best = float(difference.double().dot(outcome.double())) / square if square else 1.0
    return float(np.float32(best))


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
        layout: Layout of the weights.
        states: What the reader knows of the method's rounds; :meth:`write` adds to it.

    Attributes:
        changed: Number of elements that it changes, once :meth:`check` has run.
        light: Whether this object takes little memory.

    Raises:
        PayloadError: the bytes are not those of such a chunk.
    """

    light = True

    def __init__(
        self, spans: Sequence[BlockSpan], body: Octets, run: bytes, step: int, layout: Layout, states: States
    ) -> None:
        self._layout, self._states, self._used = layout, states, list[tuple[BlockSpan, int, SenderRounds]]()
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

    def _decode(self, span: BlockSpan, data: torch.Tensor) -> torch.Tensor:
        """Return the difference of a run of blocks."""
        if _by_itself(self._spec):
            coder = _coder(self._spec, self._run, span)
            if len(data) > coder.most_bytes(span.elements):
                raise PayloadError("it has more bytes than the method writes")
            return coder.decode(data, span.elements, self._round)
        origin, count = _PLACE.unpack(data[: _PLACE.size].numpy().tobytes())
        began, rounds = self._states.get((span.tensor, span.begin), (-1, None))
        if count == 0 or not follows_state(_method(self._spec)):
            rounds = _rounds(self._spec, self._run, span, self._layout, origin)
            rounds.count = count
        elif rounds is None or (began, rounds.count) != (origin, count):
            raise PayloadError(
                f"it follows on {count} rounds since step {origin}, which these weights have not followed"
            )
        self._used.append((span, origin, rounds))
        return rounds.decode(data[_PLACE.size :])

    def _moved(self, base: Read) -> Iterator[tuple[BlockSpan, torch.Tensor, torch.Tensor]]:
        """Yield the spans, what they hold and what they come to."""
        for span, payload in self._payloads:
            held = base(span)
            try:
                (factor,) = _FACTOR.unpack(payload[: _FACTOR.size].tobytes())
                difference = self._decode(span, torch.from_numpy(payload[_FACTOR.size :].copy()))
                moved = _moved(held, difference * factor, span)
            except (GradwireError, ValueError, RuntimeError, IndexError, struct.error) as error:
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
        for *_, rounds in self._used:
            rounds.discard()
        self._used.clear()
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
        for span, origin, rounds in self._used:
            rounds.commit()
            if follows_state(_method(self._spec)):
                self._states[span.tensor, span.begin] = origin, rounds
        self._used.clear()
