"""Weights at hand, what is known of them, and how a file is checked against them and written."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

from gradwire.errors import IncompatibleError, PayloadError
from gradwire.publish.changes import ChangedChunk
from gradwire.publish.chunks import in_parallel, sums_of, total_sums
from gradwire.publish.container import (
    ANCHOR,
    CHANGES,
    CODED,
    LOSSY,
    RAW,
    Octets,
    PatchHead,
    anchor_layout,
    check_against,
    digest_of,
)
from gradwire.publish.following_file import FollowingFile
from gradwire.publish.layout import Layout
from gradwire.publish.lossy import LossyChunk, States
from gradwire.publish.pieces import HeldPieces
from gradwire.publish.weights import LiveTensors, Writable
from gradwire.publish.whole import WholeChunk

Decoded = WholeChunk | ChangedChunk | LossyChunk
Decode = Callable[[int], Decoded]
"""Returns a chunk, given its number."""

LOSSY_REMEDY = "build the subscriber with lossy=True to hold weights that are exact at anchors only"


class HeldWeights:
    """Weights that follow a publisher's, and the run, the step and the sums of tensors that they have.

    Args:
        weights: The tensors.
        selected: Numbers of the layout's tensors that are at hand; None: all.
        lossy: Whether patches may round differences.
        private: Nothing but this object writes to the tensors, and nothing reads them while it does, as with a staging
            copy. Once they have been verified as a whole, patches are checked while they are written.

    Attributes:
        weights: The tensors.
        run: Run of the publisher that the weights are of, if they came by a file.
        step: Step of the weights, if it is known.
        sums: Sum of words of each tensor, if it is known.
        recognised: Whether the weights are known by their sums alone, and not by the files that led to them.
        exact: Whether the file that led to the weights has no rounded differences. Readers can begin with such weights,
            whatever the method remembers.
    """

    def __init__(
        self,
        weights: Writable,
        selected: frozenset[int] | None = None,
        *,
        lossy: bool = False,
        private: bool = False,
    ) -> None:
        self.weights = weights
        self.lossy = lossy
        self.selected = selected
        self._private, self._verified, self.recognised, self.exact = private, False, False, False
        self._states: States = {}
        self.run: bytes | None = None
        self.step: int | None = None
        self.sums: tuple[int, ...] | None = None

    @property
    def layout(self) -> Layout | None:
        """Layout of the weights; None for a file that is not there yet."""
        return self.weights.layout

    @property
    def state(self) -> bytes | None:
        """Digest of the weights, if their sums are known."""
        layout = self.layout
        return layout.state(self.sums) if layout is not None and self.sums is not None else None

    def forget(self) -> None:
        """Trust what is known no longer."""
        self._verified = self.exact = False
        self._states = {}
        self.run = self.step = self.sums = None

    def become(self, other: HeldWeights) -> None:
        """Take over what is known of other weights with the same bytes."""
        self.forget()
        self.run, self.step, self.sums, self.recognised = other.run, other.step, other.sums, True
        self.exact = other.exact

    def identify(self, threads: int) -> None:
        """Sum up the weights: they may be those of a published step already."""
        if self.layout is not None:
            self.sums, self.recognised = tuple(sums_of(self.layout, self.weights.read, threads)), True

    def apply(self, head: PatchHead, data: Octets, threads: int) -> None:
        """Check a file in full, then write it; :meth:`settle` ends one or more of these.

        Patches of private weights are written while the sums of what they change are followed. If these differ from
        the publisher's at the end, the weights are of no known step.

        Args:
            head: Head of the file.
            data: The file.
            threads: Threads that share the work.

        Raises:
            PayloadError: the file is refused, and nothing has been written unless the weights are private.
            IncompatibleError: the file is for other tensors.
        """
        self.check(head, data, threads)()

    def check(self, head: PatchHead, data: Octets, threads: int) -> Callable[[], None]:
        """Check a file in full, and return the function that writes it.

        If only some tensors are at hand, only their chunks of ``data`` are read; see :meth:`wanted`.

        Raises:
            PayloadError: the file is refused.
            IncompatibleError: the file is for other tensors.
        """
        layout = self._layout_for(head)
        places, numbers, states = head.places(), self.wanted(head, layout), self._states

        def decode(number: int) -> Decoded:
            chunk, body = head.chunks[number], data[places[number]]
            if digest_of(body.data) != chunk.digest:
                raise PayloadError(f"{head.name}: chunk {number} was damaged: its digest differs")
            spans = layout.spans(chunk.first, chunk.blocks)
            if chunk.kind == LOSSY and not self.lossy:
                raise IncompatibleError(f"{head.name} rounds differences: {LOSSY_REMEDY}")
            with _naming(head, number):
                if chunk.kind == LOSSY:
                    return LossyChunk(spans, body, head.run, head.step, layout, states)
                if chunk.kind in (RAW, CODED):
                    return WholeChunk(chunk.kind, spans, body)
                if chunk.kind != CHANGES:
                    raise PayloadError(f"its kind {chunk.kind} is unknown to this version")
                return ChangedChunk(spans, body)

        if head.kind == ANCHOR and (self._private or self.weights.hidden):
            return lambda: self._fill(head, layout, decode, numbers, threads)
        file, rounded = self.weights, _rounds(head)
        if isinstance(file, FollowingFile) and head.kind != ANCHOR and not file.is_open and not rounded:
            return lambda: self._rewrite(file, head, layout, decode, numbers, threads)
        if self._verified and head.kind != ANCHOR:
            return lambda: self._replace(head, layout, decode, numbers, threads)
        kept = self._check(head, layout, decode, numbers, threads)

        def write() -> None:
            self.weights.open(layout, head.step, whole=head.kind == ANCHOR and self.selected is None)
            # Until all is written, the weights are of no step.
            self.forget()

            def write_chunk(place: int) -> None:
                (kept[place] or decode(numbers[place])).write(self.weights.target)

            in_parallel(write_chunk, range(len(numbers)), threads)
            self._learn(head, states, self._private)

        return write

    def wanted(self, head: PatchHead, layout: Layout) -> list[int]:
        """Return the numbers of the chunks that change tensors at hand."""
        if self.selected is None:
            return list(range(len(head.chunks)))
        rows = enumerate(head.chunks)
        selected = self.selected
        return [n for n, c in rows if any(span.tensor in selected for span in layout.spans(c.first, c.blocks))]

    def _learn(self, head: PatchHead, states: States, verified: bool) -> None:
        """Know the weights by the file that has been written."""
        self.run, self.step, self.sums = head.run, head.step, head.sums
        self._states = {} if head.kind == ANCHOR else states
        self._verified, self.recognised, self.exact = verified, False, not _rounds(head)

    def settle(self) -> None:
        """Make what was written the weights, unless writing was interrupted."""
        if self.sums is None:
            self.weights.abandon()
        else:
            self.weights.commit()

    def _layout_for(self, head: PatchHead) -> Layout:
        """Return the layout of the file, and refuse a file that does not follow on these weights."""
        own = self.layout
        if head.kind == ANCHOR:
            layout = anchor_layout(head)
            if own is not None and own.digest != layout.digest and isinstance(self.weights, LiveTensors | HeldPieces):
                raise IncompatibleError(
                    f"{head.name}: the published weights have other tensors than these: "
                    f"{layout.difference(own, 'published', 'here')}"
                )
            return layout
        if own is None or self.state is None:
            raise PayloadError(f"{head.name}: these weights are of no known step; an anchor comes first")
        if own.digest != head.layout:
            raise IncompatibleError(f"{head.name}: it is for tensors of other names, types or shapes than these")
        check_against(head, own)
        if self.run is not None and head.run != self.run:
            raise PayloadError(
                f"{head.name} is of run {head.run.hex()[:8]}, and these weights are of run {self.run.hex()[:8]}"
            )
        if head.base_state != self.state:
            at = "an unknown step" if self.step is None else f"step {self.step}"
            if self.step is not None and head.step <= self.step:
                reason = "it comes a second time, or late"
            elif self.step is not None and head.base_step > self.step:
                reason = "patches between them are missing"
            else:
                reason = "it starts from other weights"
            raise PayloadError(f"{head.name} does not follow on these weights, which are of {at}: {reason}")
        return own

    def _fill(self, head: PatchHead, layout: Layout, decode: Decode, numbers: Sequence[int], threads: int) -> None:
        """Write an anchor where nobody sees it yet, and compare the sums of all tensors: it is decoded once."""
        self.weights.open(layout, head.step, whole=self.selected is None)
        self.forget()

        def fill(number: int) -> tuple[Mapping[int, int], int]:
            chunk = decode(number)
            with _naming(head, number):
                return _whole(chunk).fill(self.weights.target), chunk.changed

        results = in_parallel(fill, numbers, threads)
        found = total_sums([0] * len(layout.entries), [sums for sums, _ in results])
        self._compare(head, layout, found, sum(changed for _, changed in results))
        self._learn(head, {}, self._private)

    def _replace(self, head: PatchHead, layout: Layout, decode: Decode, numbers: Sequence[int], threads: int) -> None:
        """Write a patch to private weights, and compare the sums of all tensors; memory is passed through once."""
        known, states = self.sums or (), self._states
        self.weights.open(layout, head.step)
        self.forget()

        def replace(number: int) -> tuple[Mapping[int, int], int]:
            chunk = decode(number)
            with _naming(head, number):
                return chunk.replace(self.weights.target), chunk.changed

        results = in_parallel(replace, numbers, threads)
        found = total_sums(known, [change for change, _ in results])
        self._compare(head, layout, found, sum(changed for _, changed in results))
        self._learn(head, states, True)

    def _rewrite(
        self,
        file: FollowingFile,
        head: PatchHead,
        layout: Layout,
        decode: Decode,
        numbers: Sequence[int],
        threads: int,
    ) -> None:
        """Check and write a patch chunk by chunk, where nobody sees it yet; if it is refused, drop what was written."""
        run, step, sums, states = self.run, self.step, self.sums or (), self._states
        recognised, exact = self.recognised, self.exact
        file.open(layout, head.step)
        self.forget()

        def rewrite(number: int) -> tuple[Mapping[int, int], Mapping[int, int], int]:
            chunk = decode(number)
            with _naming(head, number):
                before, change = chunk.check(file.read)
            chunk.write(file.target)
            return before, change, chunk.changed

        try:
            results = in_parallel(rewrite, numbers, threads)
            before, changes = [row[0] for row in results], [row[1] for row in results]
            found = self._followed(head, layout, sums, before, changes, threads)
            self._compare(head, layout, found, sum(changed for *_, changed in results))
        except PayloadError as error:
            file.abandon()
            if not isinstance(error, _OtherBaseError):
                self.run, self.step, self.sums, self._states = run, step, sums, states
                self.recognised, self.exact = recognised, exact
            raise
        self._learn(head, states, False)

    def _check(
        self,
        head: PatchHead,
        layout: Layout,
        decode: Decode,
        numbers: Sequence[int],
        threads: int,
    ) -> list[Decoded | None]:
        """Decode chunks, and compare the sums of all tensors at hand; return the decoded chunks that are kept."""
        whole = head.kind == ANCHOR

        def check(number: int) -> tuple[Mapping[int, int], Mapping[int, int], Decoded | None, int]:
            chunk = decode(number)
            with _naming(head, number):
                before, change = ({}, _whole(chunk).sums()) if whole else chunk.check(self.weights.read)
            return before, change, chunk if chunk.light else None, chunk.changed

        results = in_parallel(check, numbers, threads)
        changes = [change for _, change, _, _ in results]
        if whole:
            found = total_sums([0] * len(layout.entries), changes)
        else:
            try:
                known = self.sums or ()
                found = self._followed(head, layout, known, [before for before, *_ in results], changes, threads)
            except _OtherBaseError:
                self.forget()
                raise
        self._compare(head, layout, found, sum(changed for *_, changed in results))
        return [chunk for _, _, chunk, _ in results]

    def _followed(
        self,
        head: PatchHead,
        layout: Layout,
        known: Sequence[int],
        before: Sequence[Mapping[int, int]],
        changes: Sequence[Mapping[int, int]],
        threads: int,
    ) -> list[int]:
        """Return the sums of all tensors after a patch, of which the chunks have read a part of the base each.

        Raises:
            _OtherBaseError: the base has not the sums that are known.
        """
        left = sums_of(layout, self.weights.read, threads, _left_out(head, layout, self.selected))
        base = total_sums(left, before)
        for number in range(len(layout.entries)) if self.selected is None else sorted(self.selected):
            if base[number] != known[number]:
                raise _OtherBaseError(
                    f"{head.name}: something else has changed the tensor {layout.entries[number].name!r} since the "
                    "last update, so that a patch cannot be written to it; the next update fetches an anchor"
                )
        return total_sums(base, changes)

    def _compare(self, head: PatchHead, layout: Layout, found: Sequence[int], changed: int) -> None:
        """Refuse a file whose weights have other sums, or which changes more or fewer elements, than its head says."""
        for number in range(len(layout.entries)) if self.selected is None else sorted(self.selected):
            if found[number] != head.sums[number]:
                raise PayloadError(
                    f"{head.name}: the digest of {layout.entries[number].name!r} differs from the publisher's"
                )
        if self.selected is None and changed != head.changed:
            raise PayloadError(f"{head.name}: it has other numbers of changes than its head announces")


class _OtherBaseError(PayloadError):
    """Weights are not those that they were after the last update."""


def _rounds(head: PatchHead) -> bool:
    """Return whether a file has rounded differences."""
    return any(chunk.kind == LOSSY for chunk in head.chunks)


def _whole(chunk: Decoded) -> WholeChunk:
    """Return a chunk of an anchor."""
    if not isinstance(chunk, WholeChunk):
        raise PayloadError("an anchor has a chunk of differences")
    return chunk


@contextlib.contextmanager
def _naming(head: PatchHead, number: int) -> Iterator[None]:
    """Name the patch and the chunk in an error of its content."""
    try:
        yield
    except PayloadError as error:
        raise PayloadError(f"{head.name}: chunk {number}: {error}") from error


def _left_out(head: PatchHead, layout: Layout, selected: frozenset[int] | None) -> list[tuple[int, int]]:
    """Return runs of the blocks of tensors at hand that no chunk of a patch changes."""
    runs, at = [], 0
    for chunk in head.chunks:
        if chunk.first > at:
            runs.append((at, chunk.first - at))
        at = chunk.first + chunk.blocks
    if at < layout.blocks:
        runs.append((at, layout.blocks - at))
    if selected is None:
        return runs
    bounds = layout.first_block
    held = [(max(first, bounds[t]), min(first + n, bounds[t + 1])) for first, n in runs for t in sorted(selected)]
    return [(first, end - first) for first, end in held if first < end]
