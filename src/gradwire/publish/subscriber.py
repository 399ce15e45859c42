"""The subscriber: fetches anchors and patches, checks them, and writes them into its tensors."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gradwire.errors import HyperparameterError, IncompatibleError, PayloadError
from gradwire.publish.codec import codec_kernels
from gradwire.publish.container import ANCHOR, Octets, anchor_layout, read_head
from gradwire.publish.group import GroupChannel, is_group
from gradwire.publish.held import HeldWeights
from gradwire.publish.layout import MAX_LAYOUT_BYTES, Layout
from gradwire.publish.manifest import Manifest, PublishedFile, read_manifest
from gradwire.publish.stores import open_place
from gradwire.publish.weights import LiveTensors, Weights, writable

STAGING = "staging"
_ATTEMPTS = 3
"""Readings of the manifest before an update fails: a publisher may replace files meanwhile."""


@dataclass(frozen=True)
class AppliedFile:
    """A file that an update has fetched and written.

    Attributes:
        name: Description of the file.
        step: Step of the weights.
        nbytes: Bytes of the file.
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

    Args:
        tensors: The tensors to write to: a module, named tensors, or a safetensors file or folder. A file need not be
            there yet; each update replaces it at once.
        where: What the publisher was given. Of a process group, each :meth:`update` of all other ranks meets a
            ``publish`` of rank 0.
        run: Follow this run of a publisher only; None: follow a publisher that has been restarted, too.
        threads: Threads that share the work; None: as many as PyTorch uses.

    Raises:
        IncompatibleError: the tensors or ``where`` cannot be served.

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

    def __init__(self, tensors: Weights, where: object, *, run: str | None = None, threads: int | None = None) -> None:
        if threads is not None and threads < 1:
            raise HyperparameterError(f"threads={threads}: it is at least 1")
        self._live = writable(tensors)
        self._channel = GroupChannel(where) if is_group(where) else None
        self._place = None if self._channel else open_place(where)
        self._run, self._threads = run, threads or torch.get_num_threads()
        self._held = HeldWeights(self._live)
        self._staged: HeldWeights | None = None
        self._refused: set[str] = set()
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
            IncompatibleError: the published weights have other names, types or shapes.
        """
        if into not in (None, STAGING):
            raise HyperparameterError(f'into={into!r}: it is None or "{STAGING}"')
        held = self._held
        if into == STAGING:
            held = self._staging()
        applied: list[AppliedFile] = []
        self._applied = applied
        try:
            if self._channel is not None:
                return self._receive(self._channel, held, full, applied)
            for attempt in range(_ATTEMPTS):
                try:
                    return self._follow(held, full, applied)
                except FileNotFoundError as error:
                    # The publisher may have removed a file since it wrote the manifest that was read.
                    if attempt == _ATTEMPTS - 1:
                        raise PayloadError(f"a file that the manifest lists is lost: {error}") from error
        finally:
            held.settle()
        return held.step

    def swap(self) -> int | None:
        """Copy the staged weights to the tensors, at the speed of memory; return their step.

        Raises:
            HyperparameterError: nothing has been staged.
        """
        if self._staged is None or self._staged.step is None:
            raise HyperparameterError('there are no staged weights: call update(into="staging") first')
        live, staged = self._live, self._staged.weights
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
        if self._held.sums is None:
            self._held.identify(self._threads)
        head, held = read_head(octets), self._held
        if head.kind == ANCHOR and head.run == held.run and held.step is not None and head.step <= held.step:
            raise PayloadError(f"{head.name} comes a second time, or late: these weights are of step {held.step}")
        try:
            held.apply(head, octets, self._threads)
        finally:
            held.settle()
        return head.step

    def _staging(self) -> HeldWeights:
        if not isinstance(self._live, LiveTensors):
            raise IncompatibleError('into="staging" is for tensors in memory: a file is replaced at once in any case')
        if self._staged is None:
            self._staged = HeldWeights(self._live.clone(), private=True)
            self._staged.become(self._held)
        return self._staged

    def _receive(self, channel: GroupChannel, held: HeldWeights, full: bool, applied: list[AppliedFile]) -> int | None:
        layout = held.layout
        if layout is None:
            raise IncompatibleError("weights in files follow a folder, a URL or a store, not a process group")
        channel.wants_anchor(full or held.sums is None)
        began = time.perf_counter()
        data = channel.receive(2 * layout.nbytes + MAX_LAYOUT_BYTES)
        fetch_s = time.perf_counter() - began
        try:
            applied.append(self._write(held, data, None, fetch_s))
        except PayloadError:
            held.forget()
            raise
        return held.step

    def _follow(self, held: HeldWeights, full: bool, applied: list[AppliedFile]) -> int | None:
        if self._place is None:
            return held.step
        manifest = read_manifest(self._place)
        if manifest is None:
            return held.step
        if self._run is not None and manifest.run != self._run:
            raise PayloadError(
                f"{self._place} has run {manifest.run[:8]}, and this subscriber follows run {self._run[:8]} alone: "
                "build it with run=None to follow any"
            )
        layout = held.layout
        if layout is not None and layout.digest.hex() != manifest.layout:
            if isinstance(held.weights, LiveTensors):
                raise IncompatibleError(self._difference(manifest, layout))
            held.forget()
        elif layout is not None and held.sums is None:
            held.identify(self._threads)
        if held.run is not None and held.run.hex() == manifest.run and manifest.step < (held.step or 0):
            # A cache between here and the publisher may serve an older manifest for a while.
            return held.step
        for file in self._way(held, manifest, full):
            began = time.perf_counter()
            try:
                data = self._place.read(file.name, file.nbytes)
                fetch_s = time.perf_counter() - began
                applied.append(self._write(held, data, file, fetch_s))
            except (PayloadError, FileNotFoundError):
                self._refused.add(file.digest)
                raise
        return held.step

    def _difference(self, manifest: Manifest, layout: Layout) -> str:
        """Say how the published layout differs, as the latest anchor states it."""
        found = "see gradwire patch show"
        for file in reversed(manifest.files):
            if file.kind == "anchor" and self._place is not None:
                try:
                    head = read_head(self._place.read(file.name, file.nbytes))
                    found = anchor_layout(head).difference(layout, "published", "here")
                except (PayloadError, FileNotFoundError):
                    continue
                break
        return f"the published weights have other tensors than these: {found}"

    def _way(self, held: HeldWeights, manifest: Manifest, full: bool) -> Sequence[PublishedFile]:
        """Return the files that lead to the latest step with the fewest bytes; avoid those that were refused."""
        files = manifest.files
        if not files:
            return ()
        latest, state = files[-1].state, held.state.hex() if held.state is not None else ""
        if state == latest and not full:
            held.run, held.step = bytes.fromhex(manifest.run), manifest.step
            return ()
        ways = [
            self._chain(files, file.state, place + 1, [file])
            for place, file in enumerate(files)
            if file.kind == "anchor"
        ]
        if state and not full:
            ways.append(self._chain(files, state, 0, []))
        complete = [way for way in ways if way and way[-1].state == latest]
        if not complete:
            raise PayloadError(
                f"no files lead from step {held.step} to step {manifest.step}: the manifest lists {len(files)}, none "
                "an anchor from which patches follow on one another; the next anchor will mend it"
            )

        def cost(way: Sequence[PublishedFile]) -> tuple[bool, int]:
            return any(file.digest in self._refused for file in way), sum(file.nbytes for file in way)

        return min(complete, key=cost)

    @staticmethod
    def _chain(files: Sequence[PublishedFile], state: str, start: int, way: list[PublishedFile]) -> list[PublishedFile]:
        """Append to a way the patches that lead from a state onwards."""
        for file in files[start:]:
            if file.kind == "patch" and file.base_state == state:
                way.append(file)
                state = file.state
        return way

    def _write(
        self, held: HeldWeights, data: Octets, listed: PublishedFile | None, fetch_s: float = 0.0
    ) -> AppliedFile:
        """Check a file and write it."""
        began = time.perf_counter()
        head = read_head(data)
        if listed is not None and head.digest.hex() != listed.digest:
            raise PayloadError(
                f"{listed.name} is the {head.name} of run {head.run.hex()[:8]}, not the file that the manifest lists: "
                "it was replaced, or is of another run"
            )
        held.apply(head, data, self._threads)
        return AppliedFile(head.name, head.step, head.nbytes, head.changed, fetch_s, time.perf_counter() - began)
