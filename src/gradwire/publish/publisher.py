"""The publisher: encodes what changed since the last step, and puts it where readers find it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from dataclasses import asdict, dataclass
from operator import index
from typing import Any

import torch

from gradwire.errors import ExchangeError, HyperparameterError, IncompatibleError, PayloadError
from gradwire.exchange.method import Method
from gradwire.publish.bases import open_base
from gradwire.publish.boxes import Strips, check_strips
from gradwire.publish.chunks import codec_kernels
from gradwire.publish.container import NO_STEP
from gradwire.publish.encoder import File, StepEncoder
from gradwire.publish.group import GroupChannel, is_group
from gradwire.publish.layout import Layout
from gradwire.publish.lossy import LossyPatches, lossy_spec
from gradwire.publish.manifest import MANIFEST, Manifest, PublishedFile, check_length, read_manifest, remove_unlisted
from gradwire.publish.ownership import check_owner, files_before
from gradwire.publish.part_ranks import Alone, GroupRanks, PartRanks, any_of, together
from gradwire.publish.shards import CutTensors, is_shard, own_pieces, parts_of
from gradwire.publish.stores import Place, open_place
from gradwire.publish.weights import Readable, Weights, by_name, named_tensors, readable


@dataclass(frozen=True)
class Publication:
    """The result of :meth:`WeightPublisher.publish`.

    For sharded weights, bytes and elements are sums over all ranks, and seconds are those of this rank.

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


class WeightPublisher:
    """Publishes weights, so that readers follow them bit by bit.

    Each :meth:`publish` writes a *patch*: which elements changed since the step before, and by how many units in the
    last place. Every ``anchor_every`` steps it also writes an *anchor*, the whole weights, for readers that join late
    or have missed a patch. A manifest, which is replaced last, names all files, so that a reader sees a step whole or
    not at all, whenever this process ends.

    Tensors that are sharded (DTensors, as FSDP2 and tensor parallelism make them) are published by the ranks that hold
    them, each its own shards: all ranks of ``group`` build a publisher, and call :meth:`publish` for each step. No
    tensor is gathered, and the step is there for readers when all parts of it are.

    Args:
        tensors: A module (its parameters, and the buffers that a checkpoint has), named tensors, or a safetensors file
            or folder, or a folder of torch.distributed.checkpoint.
        where: A folder, a URL that fsspec knows, a store of torch.distributed, or a process group, whose rank 0
            publishes (see :class:`WeightSubscriber`).
        anchor_every: Steps published from one anchor to the next.
        keep_anchors: Anchors to keep. Files before the oldest of them are removed.
        base: How the weights of the step before are remembered: "memory", a copy of them; a path, a copy in that file,
            which is mapped into memory; "sums", 8 bytes for each block of 2^17 elements, where blocks that
            changed are sent whole. Choose "sums" where the memory for a copy is missing and changes are few and
            close together: changes that are spread over all blocks make each patch as long as an anchor. Ranks that
            publish sharded tensors need files of their own.
        dtype: Publish floating-point tensors rounded to this type, such as torch.bfloat16 of float32 masters; None: as
            they are.
        resume: Go on with the run that is in the place if its latest weights are those of ``tensors``, so that readers
            need no anchor after this process has been restarted from a checkpoint of the published step.
        strips: How readers divide tensors: a dimension, from 0 on, and a number of strips, 1 to 999, by patterns of
            names, such as ``{"*.down_proj.weight": (1, 8), "*": (0, 8)}`` for up to eight tensor-parallel readers.
            Readers that hold shards then fetch only these. The first pattern that fits counts. None: tensors are not
            cut further.
        lossy: A method by which differences are rounded, such as "EDEN(bits=4)", "TopK(density=0.01)" or
            "DIANA(compressor=QSGDinf())": any that one rank can run and others can follow. Patches are then shorter and
            not exact. What one leaves out is part of the next difference, and each ``anchor_every``-th patch is exact.
            Readers ask for it by their own ``lossy=True``. None: all patches are exact.
        group: The ranks that publish sharded tensors, on a backend that serves CPU tensors; None: all.
        threads: Threads that share the work; None: as many as PyTorch uses.

    Raises:
        IncompatibleError: the tensors, ``where`` or the method ``lossy`` cannot be served.
        HyperparameterError: a number is not positive; ``strips``, ``base`` or the spec ``lossy`` is invalid; or
            ``lossy`` is given beside ``base="sums"``.
        BackendError: the URL needs a package that is not installed.
        ExchangeError: another rank that publishes its shards failed.

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
        strips: Strips | None = None,
        lossy: str | Method | None = None,
        group: Any = None,
        threads: int | None = None,
    ) -> None:
        for name, number in (("anchor_every", anchor_every), ("keep_anchors", keep_anchors), ("threads", threads)):
            if number is not None and number < 1:
                raise HyperparameterError(f"{name}={number}: it is at least 1")
        check_strips(strips or {})
        if not isinstance(tensors, str | os.PathLike | torch.nn.Module):
            tensors = by_name(tensors)
        self._tensors, self._dtype, self._strips = tensors, dtype, strips or {}
        self._shared = _is_sharded(tensors)
        self._cut = self._shared or strips is not None or group is not None
        self._ranks: PartRanks = GroupRanks(group) if self._shared or group is not None else Alone()
        self._channel = GroupChannel(where) if is_group(where) else None
        if self._channel and self._cut:
            raise IncompatibleError("a process group takes whole tensors: publish pieces to a folder, a URL or a store")
        with together(self._ranks, "open its place"):
            self._place = None if self._channel else open_place(where)
        self._anchor_every, self._keep_anchors = anchor_every, keep_anchors
        with together(self._ranks, "read its tensors"):
            weights = self._readable(tensors)
            layout = None if weights is None else weights.layout
        spec = "" if lossy is None else lossy_spec(lossy)
        rounding = LossyPatches(spec) if spec else None
        if rounding is not None and base == "sums":
            raise HyperparameterError('base="sums" has no copy of what readers hold, which lossy= compares with')
        run = self._ranks.gather(secrets.token_bytes(16))[0]
        parts, part = parts_of(self._ranks, layout, self._cut)
        check_length(len(parts), anchor_every, keep_anchors)
        self._encoder: StepEncoder | None = None
        with together(self._ranks, "open its base"):
            if layout is not None:
                threads = threads or torch.get_num_threads()
                self._encoder = StepEncoder(layout, open_base(base, layout), run, threads, part, rounding)
        sizes = [0, 0] if layout is None else [layout.nbytes, layout.elements]
        told = [json.loads(row) for row in self._ranks.gather(json.dumps(sizes).encode())]
        nbytes, self._elements = (sum(numbers) for numbers in zip(*told))
        self._manifest = Manifest(run.hex(), parts, nbytes, (), self._cut, spec)
        self._step, self._since_anchor, self._changed = NO_STEP, 0, 0
        # Whether the base and the sums are those of the latest step.
        self._chained = False
        # Files that no manifest names yet, and whether they are written.
        self._pending: list[tuple[File, bool]] = []
        # Whether the place has a manifest of this run, and whether what others left there has been removed.
        self._claimed, self._swept = False, False
        # Last files of the manifests that this publisher has written, or may have written though an error was raised.
        self._latest: set[PublishedFile] = set()
        # Names of files of runs before.
        self._former: set[str] = set()
        codec_kernels()
        if resume and self._place is not None:
            self._resume(self._place, weights)

    @property
    def run(self) -> str:
        """Identity of this publisher's run, in hexadecimal digits."""
        return self._manifest.run

    @property
    def step(self) -> int:
        """The latest step that was written, or whose patch waits to be written; -1 before the first."""
        return self._step

    def publish(self, step: int, tensors: Weights | None = None) -> Publication:
        """Publish the current weights; with sharded weights, all ranks call it, and each publishes its own shards.

        If a patch cannot be written, the error is raised, and the next call, or :meth:`flush`, writes it first. If more
        bytes are waiting than the weights have, they are dropped, and the next call writes an anchor instead. A step
        may be published again if its weights could not be read, or its anchor not be written.

        Args:
            step: Number of the step, 0 to 2^63 - 1, larger than the one before.
            tensors: Publish these instead of the tensors given when the publisher was built; names, types and shapes
                are the same.

        Returns:
            Bytes, changed elements and seconds of this step.

        Raises:
            HyperparameterError: ``step`` does not ascend.
            IncompatibleError: the tensors have another layout.
            ExchangeError: another publisher has taken over the place, or another rank could not publish its part.
        """
        if self._channel is None:
            return self._publish(step, tensors)
        with self._channel.turn():
            return self._publish(step, tensors)

    def _publish(self, step: int, tensors: Weights | None) -> Publication:
        with together(self._ranks, f"begin step {step}"):
            step = index(step)
            if not self._step < step < 2**63:
                raise HyperparameterError(f"step {step} follows step {self._step}: steps ascend from 0")
            # Anew, since a module may have other tensors by now.
            weights = self._readable(self._tensors if tensors is None else tensors)
            self._check_layout(weights)
        began = time.perf_counter()
        chained, due = self._agree(step)
        self._chained = False
        self._since_anchor += 1
        exact = due or self._since_anchor >= self._anchor_every
        with together(self._ranks, f"encode its part of step {step}"):
            patch, anchor, changed = self._encode(step, weights, chained, due, exact)
        encoded = time.perf_counter()
        if chained:
            self._step, self._changed = step, changed
        if self._channel is not None:
            # One file leads all ranks to this step.
            patch = None if anchor else patch
            file = anchor or patch
            if file is not None:
                self._channel.send([file[1]], self._manifest.lossy)
            totals = [patch[0].nbytes if patch else 0, anchor[0].nbytes if anchor else 0, changed]
        else:
            # If anchors alone cannot be sent, no patch may follow them.
            self._chained = chained
            self._pending += [(patch, False)] if patch else []
            totals = self._send(step, patch, anchor, changed)
        self._step, self._chained = step, True
        self._since_anchor = 0 if exact else self._since_anchor
        written = time.perf_counter()
        return Publication(
            step, totals[0], totals[1], self._manifest.nbytes, self._elements, totals[2], encoded - began,
            written - encoded,
        )  # fmt: skip

    def flush(self) -> Publication | None:
        """Write the patches that could not be written; return the publication of the latest, or None if none waits.

        With sharded weights, all ranks call it.

        Raises:
            ExchangeError: another publisher has taken over the place, or another rank could not write its part.
        """
        if not any_of(self._ranks, bool(self._pending)):
            return None
        began, patch = time.perf_counter(), self._pending[-1][0] if self._pending else None
        sent, _, changed = self._send(self._step, patch, None, self._changed)
        spent = 0.0, time.perf_counter() - began
        return Publication(self._step, sent, 0, self._manifest.nbytes, self._elements, changed, *spent)

    def _readable(self, tensors: Weights) -> Readable | None:
        """Return what this rank publishes; None if that is nothing."""
        if not self._cut:
            return readable(tensors, self._dtype)
        if isinstance(tensors, str | os.PathLike):
            return None if self._ranks.rank else CutTensors(readable(tensors, self._dtype), self._strips)
        return own_pieces(tensors, self._strips, self._ranks.rank, self._dtype)

    def _check_layout(self, weights: Readable | None) -> None:
        """Refuse tensors of another layout than the first ones."""
        before = self._encoder.layout if self._encoder else Layout([])
        now = weights.layout if weights is not None else Layout([])
        if now.digest != before.digest:
            raise IncompatibleError(
                f"the tensors differ from the first ones: {now.difference(before)}; "
                "publish another model by a publisher of its own"
            )

    def _agree(self, step: int) -> tuple[bool, bool]:
        """Return whether all ranks have a base to start a patch from, and whether an anchor is due."""
        if self._channel is not None:
            whole = self._channel.wants_anchor(not self._chained)
            return self._chained, whole or not self._chained
        waiting = sum(file.nbytes for (file, _), written in self._pending if not written)
        chained = self._chained and (self._encoder is None or waiting <= self._encoder.layout.nbytes)
        told = [json.loads(row) for row in self._ranks.gather(json.dumps([step, chained]).encode())]
        if {row[0] for row in told} != {step}:
            raise ExchangeError(f"ranks publish different steps: {[row[0] for row in told]}")
        chained = all(row[1] for row in told)
        return chained, not chained or self._since_anchor + 1 >= self._anchor_every

    def _resume(self, place: Place, weights: Readable | None) -> None:
        """Go on with the run in the place, if its latest weights are these."""
        data = b""
        with together(self._ranks, "read the manifest"):
            if self._ranks.rank == 0:
                with contextlib.suppress(PayloadError):
                    manifest = read_manifest(place)
                    data = b"" if manifest is None else manifest.pack()
        data = self._ranks.gather(data)[0]
        if not data:
            return
        manifest = Manifest.parse(data)
        if (
            manifest.parts != self._manifest.parts
            or manifest.sharded != self._cut
            or not manifest.files
            or manifest.lossy != self._manifest.lossy
        ):
            return
        same = True
        with together(self._ranks, "compare its tensors with the latest step"):
            if self._encoder is not None and weights is not None:
                digests = {file.part: file.state for file in manifest.stages[-1].files}
                same = self._encoder.resume(weights) == digests[self._encoder.part or 0]
                weights.check_unchanged()
        if any_of(self._ranks, not same):
            return
        if self._encoder is not None:
            self._encoder.run = bytes.fromhex(manifest.run)
        self._manifest, self._step, self._chained, self._claimed = manifest, manifest.step, True, True
        self._latest = {manifest.files[-1]}
        stages = reversed(manifest.stages)
        self._since_anchor = next((i for i, stage in enumerate(stages) if stage.kind == "anchor"), 0)

    def _encode(
        self, step: int, weights: Readable | None, chained: bool, due: bool, exact: bool
    ) -> tuple[File | None, File | None, int]:
        """Return the patch and the anchor of a step, if it has them, and the number of changed elements."""
        if not chained:
            self._pending.clear()
        encoder = self._encoder
        if encoder is None or weights is None:
            return None, None, 0
        patch, changed = None, encoder.layout.elements
        if chained:
            patch, changed = encoder.patch(step, self._step, weights, exact=exact)
        else:
            encoder.fill(weights)
        anchor = encoder.anchor(step, weights.read) if due else None
        weights.check_unchanged()
        return patch, anchor, changed

    def _send(self, step: int, patch: File | None, anchor: File | None, changed: int) -> list[int]:
        """Write what was not written yet, then the manifest; remove what it names no longer.

        Returns:
            Over all ranks, the bytes of the patch, those of the anchor, and the changed elements.
        """
        place, ranks = self._place, self._ranks
        if place is None:
            return [0, 0, 0]
        with together(ranks, f"write its part of step {step}"):
            if self._claimed and ranks.rank == 0:
                check_owner(place, self._manifest, self._latest)
            for number, ((file, pieces), written) in enumerate(self._pending):
                if not written:
                    place.write(file.name, pieces)
                    self._pending[number] = (file, []), True
            if anchor is not None:
                place.write(anchor[0].name, anchor[1])
        files = [file for (file, _), _ in self._pending] + ([anchor[0]] if anchor else [])
        sizes = [patch[0].nbytes if patch else 0, anchor[0].nbytes if anchor else 0, changed]
        told = json.dumps({"files": [asdict(file) for file in files], "sizes": sizes}).encode()
        rows = [json.loads(row) for row in ranks.gather(told)]
        added = [PublishedFile(**file) for row in rows for file in row["files"]]
        added.sort(key=lambda file: (file.step, file.kind == "anchor", file.part))
        whole = self._manifest.plus(added)
        manifest = whole.kept(self._keep_anchors)
        with together(ranks, "replace the manifest"):
            if ranks.rank == 0:
                if not self._claimed:
                    self._former |= files_before(place)
                self._latest.add(manifest.files[-1])
                place.write(MANIFEST, [manifest.pack()])
                names = {*self._former, *(file.name for file in whole.files)}
                remove_unlisted(place, manifest, names, others=not self._swept)
        self._manifest, self._claimed, self._swept = manifest, True, True
        self._latest, self._former = {manifest.files[-1]}, set()
        self._pending.clear()
        return [sum(numbers) for numbers in zip(*(row["sizes"] for row in rows))]


def _is_sharded(tensors: Weights) -> bool:
    if isinstance(tensors, str | os.PathLike):
        return False
    return any(is_shard(tensor) for tensor in named_tensors(tensors, sharded=True).values())
