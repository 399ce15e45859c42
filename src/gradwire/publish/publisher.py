"""The publisher: encodes what changed since the last step, and puts it where readers find it."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradwire.errors import ExchangeError, HyperparameterError, IncompatibleError, PayloadError
from gradwire.publish.bases import Run, SummedBase, open_base
from gradwire.publish.codec import (
    CHUNK_ELEMENTS,
    EncodedChunk,
    codec_kernels,
    encode_changes,
    encode_whole,
    in_parallel,
    sums_of,
    total_sums,
)
from gradwire.publish.container import ANCHOR, NO_STEP, PATCH, ChunkRow, Octets, PatchHead, chunk_row
from gradwire.publish.group import GroupChannel, is_group
from gradwire.publish.manifest import MANIFEST, Manifest, PublishedFile, kept, read_manifest
from gradwire.publish.stores import Place, open_place
from gradwire.publish.weights import Readable, Weights, readable


@dataclass(frozen=True)
class Publication:
    """What :meth:`WeightPublisher.publish` has published.

    Attributes:
        step: Step of the weights.
        patch_bytes: Bytes of the patch; 0 if there is none.
        anchor_bytes: Bytes of the anchor; 0 if there is none.
        weight_bytes: Bytes of the weights.
        elements: Elements of the weights.
        changed: Elements that differ from the step before.
        encode_s: Seconds spent encoding.
        write_s: Seconds spent writing.
    """

    step: int
    patch_bytes: int
    anchor_bytes: int
    weight_bytes: int
    elements: int
    changed: int
    encode_s: float
    write_s: float


File = tuple[PublishedFile, list[Octets | bytes]]


class WeightPublisher:
    """Publishes weights, so that readers follow them bit by bit.

    Each :meth:`publish` writes a *patch*: which elements changed since the step before, and by how many units in the
    last place. Every ``anchor_every`` steps it also writes an *anchor*, the whole weights, for readers that join late
    or have missed a patch. A manifest, which is replaced last, names all files, so that a reader sees a step whole or
    not at all, whenever this process ends.

    Args:
        tensors: A module (its parameters, and the buffers that a checkpoint has), named tensors, or a safetensors file
            or folder.
        where: A folder, a URL that fsspec knows, a store of torch.distributed, or a process group, whose rank
            ``source`` publishes (see :class:`WeightSubscriber`).
        anchor_every: Steps published from one anchor to the next.
        keep_anchors: Anchors to keep. Files before the oldest of them are removed.
        base: How the weights of the step before are remembered: "memory", a copy of them; a path, a copy in that file,
            which is mapped into memory; "sums", 8 bytes for each block of 2^17 elements, where blocks that
            changed are sent whole. Choose "sums" where the memory for a copy is missing and changes are few and
            close together: changes that are spread over all blocks make each patch as long as an anchor.
        dtype: Publish floating-point tensors rounded to this type, such as torch.bfloat16 of float32 masters; None: as
            they are.
        resume: Go on with the run that is in the place if its latest weights are those of ``tensors``, so that readers
            need no anchor after this process has been restarted from a checkpoint of the published step.
        threads: Threads that share the work; None: as many as PyTorch uses.

    Raises:
        IncompatibleError: the tensors or ``where`` cannot be served.
        HyperparameterError: a number is not positive.

    Example:
        >>> import tempfile, gradwire as gw
        >>> trained, served = {"w": torch.zeros(3)}, {"w": torch.ones(3)}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     publisher, subscriber = gw.WeightPublisher(trained, folder), gw.WeightSubscriber(served, folder)
        ...     publication = publisher.publish(7)
        ...     subscriber.update(), served["w"].tolist()
        (7, [0.0, 0.0, 0.0])
    """

    def __init__(
        self,
        tensors: Weights,
        where: object,
        anchor_every: int = 50,
        *,
        keep_anchors: int = 2,
        base: str | os.PathLike[str] = "memory",
        dtype: torch.dtype | None = None,
        resume: bool = False,
        threads: int | None = None,
    ) -> None:
        for name, number in (("anchor_every", anchor_every), ("keep_anchors", keep_anchors), ("threads", threads)):
            if number is not None and number < 1:
                raise HyperparameterError(f"{name}={number}: it is at least 1")
        self._tensors, self._dtype = tensors, dtype
        weights = readable(tensors, dtype)
        self._layout = weights.layout
        self._channel = GroupChannel(where) if is_group(where) else None
        self._place = None if self._channel else open_place(where)
        self._anchor_every, self._keep_anchors = anchor_every, keep_anchors
        self._threads = threads or torch.get_num_threads()
        self._run = secrets.token_bytes(16)
        self._base = open_base(base, self._layout)
        self._runs = self._layout.chunks(CHUNK_ELEMENTS)
        self._step, self._since_anchor = NO_STEP, 0
        self._sums: list[int] = []
        # Whether the base and the sums are those of the latest step.
        self._chained = False
        self._files: tuple[PublishedFile, ...] = ()
        self._unsent: list[File] = []
        self._claimed = False
        codec_kernels()
        if resume and self._place is not None:
            self._resume(self._place, weights)

    @property
    def run(self) -> str:
        """Identity of this publisher's run, in hexadecimal digits."""
        return self._run.hex()

    @property
    def step(self) -> int:
        """The latest step that was encoded; -1 before the first."""
        return self._step

    def publish(self, step: int, tensors: Weights | None = None) -> Publication:
        """Publish the weights as they are now.

        If a patch cannot be written, the error is raised, and the next call writes it before its own. If more bytes
        are waiting than the weights have, they are dropped, and the next call writes an anchor instead.

        Args:
            step: Number of the step, larger than the one before.
            tensors: Publish these instead of the tensors given when the publisher was built; names, types and shapes
                are the same.

        Raises:
            HyperparameterError: ``step`` does not ascend.
            IncompatibleError: the tensors have another layout.
            ExchangeError: another publisher has taken over the place.
        """
        if not self._step < step < 2**63:
            raise HyperparameterError(f"step {step} follows step {self._step}: steps ascend from 0")
        # Anew, since a module may have other tensors by now.
        weights = readable(self._tensors if tensors is None else tensors, self._dtype)
        if weights.layout.digest != self._layout.digest:
            raise IncompatibleError(
                f"the tensors differ from the first ones: {weights.layout.difference(self._layout)}; "
                "publish another model by a publisher of its own"
            )
        began = time.perf_counter()
        whole = self._channel.wants_anchor(not self._chained) if self._channel else False
        if sum(file.nbytes for file, _ in self._unsent) > self._layout.nbytes:
            self._chained = False
        patch, anchor, changed = self._encode(step, weights, whole)
        encoded = time.perf_counter()
        # If an anchor alone cannot be sent, no patch may follow it.
        self._chained = patch is not None and not self._channel
        file = anchor or patch
        if self._channel is None:
            self._send(anchor)
        elif file is not None:
            self._channel.send(file[1])
        self._chained = True
        self._since_anchor = 0 if anchor else self._since_anchor
        written = time.perf_counter()
        return Publication(
            step, patch[0].nbytes if patch else 0, anchor[0].nbytes if anchor else 0, self._layout.nbytes,
            self._layout.elements, changed, encoded - began, written - encoded,
        )  # fmt: skip

    def _resume(self, place: Place, weights: Readable) -> None:
        """Go on with the run in the place, if its latest weights are these."""
        manifest = None
        with contextlib.suppress(PayloadError):
            manifest = read_manifest(place)
        if manifest is None or manifest.layout != self._layout.digest.hex() or not manifest.files:
            return
        self._fill(weights)
        sums = sums_of(self._layout, weights.read, self._threads)
        if self._layout.state(sums).hex() == manifest.files[-1].state:
            self._run, self._files, self._sums = bytes.fromhex(manifest.run), manifest.files, list(sums)
            self._step, self._chained, self._claimed = manifest.step, True, True
            behind = next((i for i, file in enumerate(reversed(manifest.files)) if file.kind == "anchor"), 0)
            self._since_anchor = behind

    def _encode(self, step: int, weights: Readable, whole: bool) -> tuple[File | None, File | None, int]:
        """Return the patch and the anchor of a step, if it has them, and the number of changed elements."""
        chained, base_step, self._chained, self._step = self._chained, self._step, False, step
        patch, changed = None, self._layout.elements
        if chained:
            patch, changed = self._patch(step, base_step, weights)
            if not self._channel:
                self._unsent.append(patch)
        else:
            self._unsent.clear()
            self._fill(weights)
        self._since_anchor += 1
        due = not chained or whole or (self._since_anchor >= self._anchor_every and not self._channel)
        anchor = self._anchor(step, weights) if due else None
        self._chained = True
        return patch, anchor, changed

    def _patch(self, step: int, base_step: int, weights: Readable) -> tuple[File, int]:
        """Encode what differs from the base, and make the weights the base."""
        layout, base = self._layout, self._base

        def encode(run: Run) -> list[tuple[Run, EncodedChunk]]:
            if isinstance(base, SummedBase):
                return base.changed(run, weights)
            chunk = encode_changes(layout.spans(*run), base.read, weights.read, advance=True)
            return [] if chunk is None else [(run, chunk)]

        found = [item for items in in_parallel(encode, self._runs, self._threads) for item in items]
        before = layout.state(self._sums)
        self._sums = total_sums(self._sums, [chunk.sums for _, chunk in found])
        return self._file(PATCH, step, base_step, before, found), sum(chunk.changed for _, chunk in found)

    def _fill(self, weights: Readable) -> None:
        """Make the weights the base."""
        base = self._base

        def fill(run: Run) -> None:
            if isinstance(base, SummedBase):
                base.fill(run, weights)
            else:
                base.fill(self._layout.spans(*run), weights)

        in_parallel(fill, self._runs, self._threads)

    def _anchor(self, step: int, weights: Readable) -> File:
        """Encode the base, or the weights where there is no copy of them; pieces are their memory."""
        read = weights.read if isinstance(self._base, SummedBase) else self._base.read

        def encode(run: Run) -> tuple[Run, EncodedChunk]:
            return run, encode_whole(self._layout.spans(*run), read)

        found = in_parallel(encode, self._runs, self._threads)
        self._sums = total_sums([0] * len(self._layout.entries), [chunk.sums for _, chunk in found])
        return self._file(ANCHOR, step, NO_STEP, bytes(16), found)

    def _file(
        self, kind: int, step: int, base_step: int, base_state: bytes, found: Sequence[tuple[Run, EncodedChunk]]
    ) -> File:
        layout = self._layout

        def describe(item: tuple[Run, EncodedChunk]) -> ChunkRow:
            return chunk_row(*item[0], item[1].kind, item[1].pieces)

        head, first = PatchHead(
            kind, self._run, step, base_step, layout.digest, base_state, layout.state(self._sums),
            sum(chunk.announced for _, chunk in found), tuple(self._sums),
            tuple(in_parallel(describe, found, self._threads)), layout.table if kind == ANCHOR else b"",
        ).pack()  # fmt: skip
        return PublishedFile.of(head), [first, *(piece for _, chunk in found for piece in chunk.pieces)]

    def _send(self, anchor: File | None) -> None:
        """Write what was not written yet, then the manifest; remove what it names no longer."""
        place = self._place
        if place is None:
            return
        if self._claimed:
            self._check_owner(place)
        files = self._files
        while self._unsent:
            file, pieces = self._unsent[0]
            place.write(file.name, pieces)
            self._files = files = (*files, file)
            self._unsent.pop(0)
        if anchor is not None:
            place.write(anchor[0].name, anchor[1])
            files = (*files, anchor[0])
        left = kept(files, self._keep_anchors)
        manifest = Manifest(self._run.hex(), self._layout.digest.hex(), self._layout.nbytes, left)
        place.write(MANIFEST, [manifest.pack()])
        self._files, self._claimed = left, True
        # Files of earlier runs, and those that a killed publisher's manifest never named, go as well.
        listed = {file.name for file in left}
        stale = {file.name for file in files} | {
            name for name in place.names() if name.endswith((".gww", ".gww.partial"))
        }
        for name in sorted(stale - listed):
            with contextlib.suppress(OSError):
                place.remove(name)

    def _check_owner(self, place: Place) -> None:
        """Refuse to write where another publisher has begun."""
        manifest = read_manifest(place)
        if manifest is not None and manifest.run != self.run:
            raise ExchangeError(
                f"run {manifest.run[:8]} has taken over {place}, where run {self.run[:8]} published: give each "
                "publisher a place of its own, or end one of them"
            )
