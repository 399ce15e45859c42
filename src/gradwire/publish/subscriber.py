"""The subscriber: fetches anchors and patches, checks them, and writes them into its tensors."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch

from gradwire.errors import HyperparameterError, IncompatibleError, PayloadError
from gradwire.publish.chunks import codec_kernels
from gradwire.publish.container import ANCHOR, Octets, anchor_layout, read_head
from gradwire.publish.fetch import fetch, fetch_head
from gradwire.publish.following import Following
from gradwire.publish.following_file import FollowingFile
from gradwire.publish.group import SOURCE, GroupChannel, is_group
from gradwire.publish.layout import MAX_LAYOUT_BYTES, Layout
from gradwire.publish.manifest import Manifest, PublishedFile, StepFiles, read_manifest
from gradwire.publish.relay import GroupRelay, open_relay
from gradwire.publish.shards import check_slices, local_of, local_tensors
from gradwire.publish.stores import Place, open_place
from gradwire.publish.ways import rests_on_rounds, shortest_way
from gradwire.publish.weights import LiveTensors, Weights, named_tensors

STAGING = "staging"
_NO_FILE = "in a process group a file has to be there: copy weights to it first, or follow a folder, a URL or a store"
_ATTEMPTS = 3
"""Readings of the manifest before an update fails: a publisher may replace files meanwhile."""


@dataclass(frozen=True)
class AppliedFile:
    """A file that an update has fetched and written.

    Attributes:
        name: Description of the file.
        step: Step of the weights.
        nbytes: Bytes of the file that were fetched.
        changed: Elements that it changed.
        fetch_s: Seconds spent fetching it.
        apply_s: Seconds spent checking and writing it.
    """

    name: str
    step: int
    nbytes: int
    changed: int
    fetch_s: float
    apply_s: float


class WeightSubscriber:
    """Follows the weights of a :class:`WeightPublisher`, to the last bit.

    Each :meth:`update` reads the manifest, fetches the patches that lead from the weights at hand to the latest ones,
    or an anchor where that takes fewer bytes or no patches lead there, and writes them. A file is decoded and the
    digests of every tensor and of the whole are compared *before* anything is written. What is damaged, truncated, of
    another run, out of order or repeated is refused by name, and the tensors stay as they are.

    Tensors may be shards: DTensors, or tensors of which ``slices`` says what they are. Then no more than their own
    pieces of the published tensors are fetched, as far as the publisher has cut them so (its ``strips``), whatever
    sharding the publisher has.

    Args:
        tensors: The tensors to write to: a module, named tensors, or a safetensors file or folder. Tensors may share
            memory, as tied weights do. Each update replaces a file at once; it need not be there yet, but in a process
            group.
        where: The place that the publisher was given. With a process group, all other ranks call :meth:`update` once
            for each ``publish`` of rank 0.
        slices: For tensors that are parts of published ones, by name: a range of indices for each dimension, or for
            the first ones, such as ``{"down_proj.weight": (slice(None), slice(0, 512))}``.
        lossy: Also follow a publisher that rounds differences (its ``lossy``). An update then verifies that the tensors
            equal the publisher's copy of the tensors of its readers.
        relay: A folder, a URL, a store or a process group in which fetched and checked files are served again: readers
            follow it like the publisher, in a chain or a tree. With a process group this must be rank 0, and all other
            ranks call :meth:`update` once for each update of this one.
        run: Follow this run of a publisher only; None: follow a publisher that has been restarted, too.
        threads: Threads that share the work; None: as many as PyTorch uses.

    Raises:
        HyperparameterError: ``threads`` is not positive.
        IncompatibleError: the tensors, ``slices``, ``where`` or ``relay`` cannot be served.
        BackendError: a URL needs a package that is not installed.

    Example:
        >>> import tempfile, gradwire as gw
        >>> trained, served = {"w": torch.zeros(3)}, {"w": torch.ones(3)}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     publisher, subscriber = gw.WeightPublisher(trained, folder), gw.WeightSubscriber(served, folder)
        ...     steps = [subscriber.update()]
        ...     for step in (1, 2):
        ...         publication = publisher.publish(step)
        ...         steps.append(subscriber.update())
        ...         _ = trained["w"].add_(1)
        >>> steps, served["w"].tolist()
        ([None, 1, 2], [1.0, 1.0, 1.0])
    """

    def __init__(
        self,
        tensors: Weights,
        where: object,
        *,
        slices: Mapping[str, Sequence[slice]] | None = None,
        lossy: bool = False,
        relay: object = None,
        run: str | None = None,
        threads: int | None = None,
    ) -> None:
        if threads is not None and threads < 1:
            raise HyperparameterError(f"threads={threads}: it is at least 1")
        slices = slices or {}
        self._module = tensors if isinstance(tensors, torch.nn.Module) else None
        if isinstance(tensors, str | os.PathLike):
            if slices:
                raise IncompatibleError("slices: a file has whole tensors")
            self._held = Following(FollowingFile(tensors), {}, {}, lossy)
        else:
            local, boxes = local_tensors(tensors)
            check_slices(slices, list(local))
            self._held = Following(LiveTensors(local), boxes, slices, lossy)
        self._channel = GroupChannel(where) if is_group(where) else None
        layout = self._held.weights.layout
        if self._channel is not None and layout is None:
            raise IncompatibleError(_NO_FILE)
        self._most_bytes = 0 if layout is None else 2 * layout.nbytes + MAX_LAYOUT_BYTES
        self._place = None if self._channel else open_place(where)
        self._run, self._threads = run, threads or torch.get_num_threads()
        self._staged: Following | None = None
        self._refused: set[str] = set()
        self._relay = open_relay(relay, self._threads)
        codec_kernels()

    @property
    def step(self) -> int | None:
        """Step of the weights; None before the first update."""
        return self._held.step

    @property
    def staged_step(self) -> int | None:
        """Step of the staged weights; None if there are none."""
        return self._staged.step if self._staged else None

    @property
    def applied(self) -> tuple[AppliedFile, ...]:
        """The files that the latest update wrote, in order."""
        return tuple(self._applied)

    _applied: Sequence[AppliedFile] = ()
    _source: Manifest | None = None
    # Whether rank 0 of the process group rounds differences, and these weights are to be exact.
    _unfit = False

    def update(self, into: str | None = None, *, full: bool = False) -> int | None:
        """Fetch and write the latest weights; return their step.

        If a file is refused, the error is raised, and the weights are those of the last step that could be written.
        The next call takes another way to the latest step, such as an anchor, if there is one.

        Args:
            into: None: write to the tensors. "staging": write to a copy of them, and leave the tensors alone until
                :meth:`swap`.
            full: Fetch the latest anchor, whatever the tensors hold.

        Returns:
            The step of the weights, or None if nothing has been published yet.

        Raises:
            PayloadError: a file was refused, or the tensors have been changed by something else.
            IncompatibleError: the published weights have other names, types or shapes, or the tensors have by now;
                tensors share memory, and cannot hold the published values; or ``into="staging"`` was given for weights
                in a file.
            HyperparameterError: ``into`` is neither None nor "staging".
        """
        held = self._held
        applied: list[AppliedFile] = []
        self._applied = applied
        try:
            with self._turn():
                if into not in (None, STAGING):
                    raise HyperparameterError(f'into={into!r}: it is None or "{STAGING}"')
                self._take_tensors()
                if into == STAGING:
                    held = self._staging()
                try:
                    self._fetch(held, full, applied)
                finally:
                    held.settle()
        finally:
            # Ranks that follow this one wait for it, also if nothing could be fetched.
            if self._relay is not None:
                self._relay.flush(self._source, held)
        return held.step

    def _turn(self) -> AbstractContextManager[None]:
        """Return a context in which this rank takes part in a step of a process group, whatever the body raises."""
        return nullcontext() if self._channel is None else self._channel.turn(self._most_bytes)

    def _fetch(self, held: Following, full: bool, applied: list[AppliedFile]) -> None:
        """Fetch and write the latest weights."""
        if self._channel is not None:
            self._receive(self._channel, held, full, applied)
            return
        for attempt in range(_ATTEMPTS):
            try:
                if self._place is not None:
                    self._follow(self._place, held, full, applied)
                return
            except FileNotFoundError as error:
                # The publisher may have removed a file since it wrote the manifest that was read.
                if attempt == _ATTEMPTS - 1:
                    raise PayloadError(f"a file that the manifest lists is lost: {error}") from error

    def swap(self) -> int | None:
        """Copy the staged weights to the tensors, at the speed of memory; return their step.

        Raises:
            HyperparameterError: nothing has been staged.
            IncompatibleError: tensors share memory, and cannot hold the published values.
        """
        if self._staged is None or self._staged.step is None:
            raise HyperparameterError('there are no staged weights: call update(into="staging") first')
        self._take_tensors()
        live, staged = self._held.weights, self._staged.weights
        # Until all is copied, the tensors are of no step.
        self._held.forget()
        if isinstance(live, LiveTensors) and isinstance(staged, LiveTensors):
            live.copy_from(staged)
        self._held.become(self._staged)
        return self._held.step

    def staged(self) -> Mapping[str, torch.Tensor]:
        """Return the staged tensors by name; they are this object's own, and the next update writes to them."""
        if self._staged is None or not isinstance(self._staged.weights, LiveTensors):
            return {}
        return self._staged.weights.tensors()

    def apply(self, data: bytes | bytearray | Octets) -> int:
        """Check an anchor or patch that came by another way, write it to the tensors, and return its step.

        Raises:
            PayloadError: it is refused, by name.
            IncompatibleError: the weights have other names, types or shapes.
        """
        octets = data if isinstance(data, np.ndarray) else np.frombuffer(bytearray(data), np.uint8)
        self._take_tensors()
        held = self._held.only
        if held.sums is None:
            held.identify(self._threads)
        head = read_head(octets)
        self._check_run(head.name, head.run.hex())
        if head.kind == ANCHOR and head.run == held.run and held.step is not None and head.step <= held.step:
            raise PayloadError(f"{head.name} comes a second time, or late: these weights are of step {held.step}")
        try:
            held.apply(head, octets, self._threads)
        finally:
            self._held.settle()
        return head.step

    def _take_tensors(self) -> None:
        """Take the tensors that the module has by now, and refuse those of another type or shape than before.

        Methods such as ``Module.to`` and ``load_state_dict(assign=True)`` give a module other ones, which hold what
        those before held, or something else.
        """
        live = self._held.weights
        if not isinstance(live, LiveTensors):
            return
        others = True
        try:
            if self._module is None:
                others = live.take(named_tensors(live.own()))
            else:
                others = live.take(local_of(named_tensors(self._module, sharded=True)))
        finally:
            if others:
                # A relay must not serve what they hold as the weights of a step.
                self._held.forget()

    def _staging(self) -> Following:
        live = self._held.weights
        if not isinstance(live, LiveTensors):
            raise IncompatibleError('into="staging" is for tensors in memory: a file is replaced at once in any case')
        if self._staged is None:
            self._staged = Following(live.clone(), self._held.boxes, self._held.slices, self._held.lossy, True)
            self._staged.become(self._held)
        return self._staged

    def _receive(self, channel: GroupChannel, following: Following, full: bool, applied: list[AppliedFile]) -> None:
        held = following.only
        layout = held.layout
        if layout is None:
            raise IncompatibleError(_NO_FILE)
        # Without the patches before, what a method remembers of them is missing.
        lacking = held.recognised and self._source is not None and rests_on_rounds(self._source)
        # An anchor would be refused, too.
        channel.wants_anchor(not self._unfit and (full or lacking or held.sums is None))
        lossy, files = channel.receive(self._most_bytes)
        self._unfit = bool(lossy) and not following.lossy
        try:
            following.check_rounding(f"rank {SOURCE}", lossy)
            self._write_received(files, lossy, following, layout, applied)
        finally:
            # What rank 0 has announced it sends, also if a file before was refused.
            for _ in files:
                pass

    def _write_received(
        self,
        files: Iterable[Octets],
        lossy: str,
        following: Following,
        layout: Layout,
        applied: list[AppliedFile],
    ) -> None:
        held, began = following.only, time.perf_counter()
        for data in files:
            fetched = time.perf_counter()
            try:
                head = read_head(data)
            except PayloadError:
                held.forget()
                raise
            # Files of another run change nothing: the next one of this subscriber's run may follow on.
            self._check_run("the process group", head.run.hex())
            try:
                held.apply(head, data, self._threads)
            except PayloadError:
                held.forget()
                raise
            now = time.perf_counter()
            applied.append(AppliedFile(head.name, head.step, head.nbytes, head.changed, fetched - began, now - fetched))
            began = now
            stage, parts = StepFiles((PublishedFile.of(head),)), (head.layout.hex(),)
            self._source = Manifest(head.run.hex(), parts, layout.nbytes, stage.files, lossy=lossy)
            if self._relay is not None:
                self._relay.add(self._source, following, stage, [[data]])

    def _follow(self, place: Place, held: Following, full: bool, applied: list[AppliedFile]) -> None:
        manifest = read_manifest(place, _ATTEMPTS)
        if manifest is None:
            return
        self._check_run(str(place), manifest.run)
        if not manifest.files:
            return
        held.fit(manifest, lambda part: self._layout_of(place, manifest, part), self._threads)
        if held.run is not None and held.run.hex() == manifest.run and manifest.step < (held.step or 0):
            # A cache between here and the publisher may serve an older manifest for a while.
            return
        self._source = manifest
        if isinstance(self._relay, GroupRelay) and self._relay.lacks(manifest, held):
            # Its ranks may ask for what they can begin with, and the next patch needs the files before it in any case.
            full = True
        for stage in shortest_way(held, manifest, self._refused, full):
            try:
                data = self._write(place, held, stage, applied)
            except (PayloadError, FileNotFoundError):
                self._refused.update(file.digest for file in stage.files)
                raise
            if self._relay is not None:
                self._relay.add(manifest, held, stage, [[octets] for octets in data])

    def _check_run(self, where: str, run: str) -> None:
        if self._run is not None and run != self._run:
            raise PayloadError(
                f"{where} has run {run[:8]}, and this subscriber follows run {self._run[:8]} alone: build it with "
                "run=None to follow any"
            )

    def _layout_of(self, place: Place, manifest: Manifest, part: int) -> Layout:
        """Return the layout of a part, as its latest anchor states it."""
        for stage in reversed(manifest.stages):
            if stage.kind == "anchor":
                return anchor_layout(fetch_head(place, stage.files[part]))
        raise PayloadError("the manifest lists no anchor; the next one will mend it")

    def _write(self, place: Place, held: Following, stage: StepFiles, applied: list[AppliedFile]) -> list[Octets]:
        """Fetch the files of all parts of a step, check all of them, then write them; return them."""
        rows, checked, files = list[AppliedFile](), [], list[Octets]()
        for (part, weights), file in zip(held.parts.items(), stage.files):
            began = time.perf_counter()
            head, data, nbytes = fetch(place, file, weights)
            fetched = time.perf_counter()
            files.append(data)
            checked.append(weights.check(head, data, self._threads))
            name = head.name if len(stage.files) == 1 else f"{head.name}, part {part}"
            spent = time.perf_counter() - fetched
            rows.append(AppliedFile(name, head.step, nbytes, head.changed, fetched - began, spent))
        began = time.perf_counter()
        held.write(checked)
        spent = (time.perf_counter() - began) / len(rows)
        applied += [replace(row, apply_s=row.apply_s + spent) for row in rows]
        return files
