"""Relays: a subscriber serves others with the files that it has checked."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

from gradwire.errors import IncompatibleError, PayloadError
from gradwire.publish.container import Octets
from gradwire.publish.encoder import StepEncoder
from gradwire.publish.following import Following
from gradwire.publish.group import MOST_FILES, GroupChannel, is_group
from gradwire.publish.manifest import MANIFEST, Manifest, StepFiles, read_manifest, remove_unlisted
from gradwire.publish.stores import Place, open_place
from gradwire.publish.ways import rests_on_rounds

_MOST_PATCHES = 100
"""Patches from one anchor to the next, where the publisher's own anchors are not seen."""

Files = Sequence[Sequence[Octets | bytes]]
"""The bytes of a stage's files, each in pieces."""

Broadcast = tuple[StepFiles, Sequence[Octets | bytes]]
"""A file of whole weights, and its bytes in pieces."""


class PlaceRelay:
    """Serves the readers of a folder, a URL or a store.

    Patches are passed on as they came. Anchors need not come: they are encoded from the weights at hand, at the steps
    at which the publisher has one, where the place has no files that lead to the first patch, and after as many patches
    as the weights have bytes. If patches are rounded by a method that remembers what it sent, readers can begin after
    exact patches alone, and only these have one here. What comes a second time, since this process was restarted or the
    weights were fetched anew, is in the place already, and is left out.

    Args:
        place: The place.
        threads: Threads that share the work.
        keep_anchors: Anchors to keep.
    """

    def __init__(self, place: Place, threads: int, keep_anchors: int = 2) -> None:
        self._place, self._threads, self._keep_anchors = place, threads, keep_anchors
        self._manifest: Manifest | None = None
        with contextlib.suppress(PayloadError):
            self._manifest = read_manifest(place)
        # Files that were checked and are not written yet, by the manifest that will name them.
        self._pending: list[tuple[StepFiles, Files]] = []
        self._waiting = 0
        # Files of runs before, to remove when the next manifest is written.
        self._former: set[str] = set()

    def add(self, source: Manifest, held: Following, stage: StepFiles, data: Files) -> None:
        """Take files that have just been written to the weights at hand."""
        if [held.selected for held in held.parts.values()] != [None] * len(source.parts):
            raise IncompatibleError("a relay serves whole weights: give it tensors that are not sliced")
        if self._is_of_another_run(source):
            self._begin(source)
        latest = self._latest()
        if latest is not None and _place_of(stage) <= _place_of(latest):
            return
        may_begin = _may_begin(source, held)
        if stage.kind == "patch" and (latest is None or stage.base_states != latest.states):
            # Nothing here leads to the patch: begin with the weights that it led to.
            if may_begin:
                self.anchor(held)
            return
        self._take(stage, data)
        if stage.kind == "patch" and may_begin and (_is_anchored(source, stage.step) or self._overdue(source)):
            self.anchor(held)

    def anchor(self, held: Following) -> None:
        """Encode the weights at hand as an anchor."""
        manifest = self._manifest
        if manifest is None or held.run is None or held.step is None:
            return
        files, data = [], list[list[bytes]]()
        for part, weights in held.parts.items():
            layout = weights.layout
            if layout is None:
                return
            encoder = StepEncoder(layout, None, held.run, self._threads, part if manifest.sharded else None)
            file, pieces = encoder.anchor(held.step, weights.weights.read)
            files.append(file)
            # The weights change before they are written if writing fails: what waits is a copy.
            data.append([bytes(piece) for piece in pieces])
        self._take(StepFiles(tuple(files)), data)

    def flush(self, source: Manifest | None, held: Following) -> None:
        """Write what has been taken, and the manifest."""
        if source is not None and held.step is not None and held.run == bytes.fromhex(source.run):
            self._follow(source, held, held.step)
        manifest = self._manifest
        if manifest is None or not self._pending:
            return
        for stage, data in self._pending:
            for file, pieces in zip(stage.files, data):
                self._place.write(file.name, pieces)
        whole = manifest.plus(file for stage, _ in self._pending for file in stage.files)
        new = whole.kept(self._keep_anchors)
        self._place.write(MANIFEST, [new.pack()])
        self._manifest, self._pending, self._waiting = new, [], 0
        former, self._former = self._former, set()
        remove_unlisted(self._place, new, {*former, *(file.name for file in whole.files)})

    def _follow(self, source: Manifest, held: Following, step: int) -> None:
        """Take an anchor of the weights at hand if what has been taken does not lead to them."""
        if self._is_of_another_run(source):
            self._begin(source)
        latest = self._latest()
        if latest is not None and latest.states != held.states and (step, True) <= _place_of(latest):
            if step < source.step:
                # An update that failed on its way: the place has a later step of this run.
                return
            # The publisher has gone back, such as to a copy of its place: what it published since is of no use.
            self._begin(source)
            latest = None
        if (latest is None or latest.states != held.states) and _may_begin(source, held):
            self.anchor(held)

    def _is_of_another_run(self, source: Manifest) -> bool:
        manifest = self._manifest
        return manifest is None or (manifest.run, manifest.parts) != (source.run, source.parts)

    def _begin(self, source: Manifest) -> None:
        """Begin a manifest without files."""
        self._former |= {file.name for file in self._manifest.files} if self._manifest else set()
        self._manifest, self._pending, self._waiting = replace(source, files=()), [], 0

    def _latest(self) -> StepFiles | None:
        """Return the last files that are listed, or will be."""
        if self._pending:
            return self._pending[-1][0]
        stages = self._manifest.stages if self._manifest else ()
        return stages[-1] if stages else None

    def _take(self, stage: StepFiles, data: Files) -> None:
        self._waiting += sum(file.nbytes for file in stage.files)
        if stage.kind == "anchor" and self._manifest is not None and self._waiting > 2 * self._manifest.nbytes:
            # After a long outage of the place, the anchor alone.
            self._pending.clear()
            self._waiting = sum(file.nbytes for file in stage.files)
        self._pending.append((stage, data))

    def _overdue(self, source: Manifest) -> bool:
        """Return whether a late reader would fetch more patches than weights, or very many."""
        stages = [*(self._manifest.stages if self._manifest else ()), *(stage for stage, _ in self._pending)]
        patches, nbytes = 0, 0
        for stage in reversed(stages):
            if stage.kind == "anchor":
                break
            patches, nbytes = patches + 1, nbytes + sum(file.nbytes for file in stage.files)
        return patches >= _MOST_PATCHES or nbytes > source.nbytes


def _is_anchored(source: Manifest, step: int | None) -> bool:
    """Return whether the publisher has an anchor of a step."""
    return any(stage.kind == "anchor" and stage.step == step for stage in source.stages)


def _may_begin(source: Manifest, held: Following) -> bool:
    """Return whether readers can follow on an anchor of the weights at hand: rounds begin anew after exact patches."""
    return not rests_on_rounds(source) or held.exact or _is_anchored(source, held.step)


def _place_of(stage: StepFiles) -> tuple[int, bool]:
    """Return a stage's place in the order of a manifest: an anchor comes after the patch of its step."""
    return stage.step, stage.kind == "anchor"


class GroupRelay:
    """Serves the other ranks of a process group by broadcasts, each update of this rank one of theirs.

    Args:
        channel: The channel, of whose group this is rank 0.
        threads: Threads that share the work.

    Raises:
        IncompatibleError: it is another rank.
    """

    def __init__(self, channel: GroupChannel, threads: int) -> None:
        if not channel.is_source:
            raise IncompatibleError("relay= to a process group is for its rank 0; the other ranks have it as where")
        self._channel, self._threads = channel, threads
        self._pending: list[Broadcast] = []
        # Where a method remembers its rounds: an anchor of exact weights, and all patches since.
        self._since_anchor: list[Broadcast] = []
        # Run and files that were broadcast last: they led the other ranks to the weights that these hold.
        self._told: tuple[str, StepFiles] | None = None
        # Whether the other ranks hold weights without the rounds that led there, and can follow no patch of these.
        self._apart = False

    def lacks(self, source: Manifest, held: Following) -> bool:
        """Return whether other ranks could not begin with the weights at hand, nor with what has been taken."""
        return held.recognised and rests_on_rounds(source) and not self._since_anchor

    def add(self, source: Manifest, held: Following, stage: StepFiles, data: Files) -> None:
        """Take files that have just been written to the weights at hand."""
        if source.sharded or held.sliced:
            raise IncompatibleError("a process group takes whole tensors: relay pieces to a folder, a URL or a store")
        taken = [(stage, pieces) for pieces in data]
        self._pending += taken
        if not rests_on_rounds(source):
            self._since_anchor = []
        elif stage.kind == "anchor":
            self._since_anchor = taken
        elif held.exact and stage.states != stage.base_states:
            # The weights change before they are broadcast: what waits is a copy.
            self._since_anchor = [(file, [bytes(piece) for piece in pieces]) for file, pieces in self._anchor(held)]
        elif self._since_anchor and stage.step > self._since_anchor[-1][0].step:
            self._since_anchor = [*self._since_anchor, *taken] if len(self._since_anchor) < MOST_FILES else []

    def flush(self, source: Manifest | None, held: Following) -> None:
        """Broadcast what the other ranks lack, or what a rank can begin with if one needs it, or if that is shorter."""
        with self._channel.turn():
            files, most = self._onwards(source), source.nbytes if source else 0
            whole = self._channel.wants_anchor(False) or files is None
            waiting = sum(file.nbytes for stage, _ in files or () for file in stage.files)
            if files is None or whole or (self._apart and files) or waiting > most or len(files) > MOST_FILES:
                files = self._since_anchor or self._anchor(held)
                self._apart = source is not None and rests_on_rounds(source) and not self._since_anchor
            self._pending = []
            self._channel.send([pieces for _, pieces in files], source.lossy if source else "")
            if files and source is not None:
                self._told = source.run, files[-1][0]

    def _onwards(self, source: Manifest | None) -> list[Broadcast] | None:
        """Return the pending files that follow on what was broadcast last; None if they do not lead on from there.

        Tensors and their staging copy are led from one step to the next by the same files, one after the other.
        """
        pending = self._pending
        if not pending or self._told is None or source is None or source.run != self._told[0]:
            return pending
        told, first, last = self._told[1], pending[0][0], pending[-1][0]
        if last.step < told.step <= source.step:
            # An update of weights that are behind, which failed on its way.
            return []
        for place, (stage, _) in enumerate(pending):
            if (stage.step, stage.states) == (told.step, told.states):
                return pending[place + 1 :]
        return pending if first.kind == "anchor" or first.base_states == told.states else None

    def _anchor(self, held: Following) -> list[Broadcast]:
        """Encode the weights at hand as an anchor, if they are of a known step."""
        weights = held.parts.get(0)
        if weights is None or weights.layout is None or held.run is None or held.step is None:
            return []
        encoder = StepEncoder(weights.layout, None, held.run, self._threads)
        file, pieces = encoder.anchor(held.step, weights.weights.read)
        return [(StepFiles((file,)), pieces)]


def open_relay(where: object, threads: int) -> PlaceRelay | GroupRelay | None:
    """Return the relay to a place or process group; None for none."""
    if where is None:
        return None
    return GroupRelay(GroupChannel(where), threads) if is_group(where) else PlaceRelay(open_place(where), threads)
