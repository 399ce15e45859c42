"""Tensors at hand, and the parts of published weights that they hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gradwire.errors import IncompatibleError
from gradwire.publish.boxes import TensorBox
from gradwire.publish.container import Octets, PatchHead
from gradwire.publish.following_file import FollowingFile
from gradwire.publish.held import LOSSY_REMEDY, HeldWeights
from gradwire.publish.layout import Entry, Layout
from gradwire.publish.manifest import Manifest
from gradwire.publish.pieces import HeldPieces, check_cover, pieces_of_layout, whole_entries
from gradwire.publish.shards import sliced_box
from gradwire.publish.weights import LiveTensors

LayoutOf = Callable[[int], Layout]
"""Returns the layout of a part, as one of its anchors states it."""


class Following:
    """Tensors at hand, and of each part of published weights that they hold something of, what is known of it.

    Args:
        weights: The tensors.
        boxes: By name, the box that a tensor is of the published one.
        slices: By name, ranges of indices that a tensor is of the published one. All others are whole.
        lossy: Whether patches may round differences.
        private: Whether nothing else reads or writes the tensors, as a staging copy.
    """

    def __init__(
        self,
        weights: LiveTensors | FollowingFile,
        boxes: Mapping[str, TensorBox],
        slices: Mapping[str, Sequence[slice]],
        lossy: bool = False,
        private: bool = False,
    ) -> None:
        self.weights, self.boxes, self.slices, self.lossy = weights, boxes, slices, lossy
        self._private = private
        self.parts: dict[int, HeldWeights] = {0: HeldWeights(weights, lossy=lossy, private=private)}
        self._keys: tuple[str, ...] = ()

    @property
    def sliced(self) -> bool:
        """Whether some tensor is a part of the published one."""
        return bool(self.slices) or any(box.shape != box.whole for box in self.boxes.values())

    @property
    def run(self) -> bytes | None:
        """Run of the publisher that the weights are of."""
        return next(iter(self.parts.values())).run

    @property
    def step(self) -> int | None:
        """Step of the weights, if it is known."""
        steps = {held.step for held in self.parts.values()}
        return steps.pop() if len(steps) == 1 else None

    @property
    def states(self) -> tuple[str, ...] | None:
        """Digests of the parts, in hexadecimal digits, if they are known."""
        found = [held.state for held in self.parts.values()]
        return tuple(state.hex() for state in found if state is not None) if None not in found else None

    @property
    def recognised(self) -> bool:
        """Whether some part is known by its sums alone, and not by the files that led to it."""
        return any(held.recognised for held in self.parts.values())

    @property
    def exact(self) -> bool:
        """Whether the files that led to the weights have no rounded differences."""
        return all(held.exact for held in self.parts.values())

    @property
    def only(self) -> HeldWeights:
        """The only part.

        Raises:
            IncompatibleError: the weights are published in pieces.
        """
        if self._keys or self.sliced:
            raise IncompatibleError("weights in pieces are followed by a folder, a URL or a store, by update()")
        return self.parts[0]

    def forget(self) -> None:
        """Trust what is known no longer."""
        for held in self.parts.values():
            held.forget()

    def claim(self, run: bytes, step: int) -> None:
        """State the run and the step of the weights."""
        for held in self.parts.values():
            held.run, held.step = run, step

    def check_rounding(self, source: str, lossy: str) -> None:
        """Refuse a publisher that rounds differences by a method of this spec, unless these weights may have an error.

        Raises:
            IncompatibleError: these weights are to be exact.
        """
        if lossy and not self.lossy:
            raise IncompatibleError(f"{source} rounds differences by {lossy}: {LOSSY_REMEDY}")

    def fit(self, manifest: Manifest, layout_of: LayoutOf, threads: int) -> None:
        """Find the parts that the tensors hold something of, and what is known of them.

        Raises:
            IncompatibleError: the published tensors are not those at hand.
        """
        self.check_rounding(f"run {manifest.run[:8]}", manifest.lossy)
        if not manifest.sharded and not self.sliced:
            self._fit_whole(manifest, layout_of, threads)
            return
        if self._keys == (keys := (manifest.run, *manifest.parts)):
            return
        numbers = range(len(manifest.parts))
        layouts = [(layout, pieces_of_layout(layout, manifest.sharded)) for layout in map(layout_of, numbers)]
        entries = whole_entries(layouts)
        outer = self.weights.layout
        if isinstance(self.weights, FollowingFile):
            outer = Layout(entries.values())
        if outer is None:
            raise IncompatibleError("there are no tensors to write to")
        boxes = {entry.name: self._box(entry, entries) for entry in outer.entries}
        there = Layout(
            Entry(name, entry.kind, boxes[name].shape if name in boxes else entry.shape)
            for name, entry in entries.items()
        )
        if there.digest != outer.digest:
            raise IncompatibleError(
                f"the published weights have other tensors than these: {there.difference(outer, 'published', 'here')}"
            )
        check_cover(layouts, boxes)
        parts = {}
        for number, (layout, pieces) in zip(numbers, layouts):
            held = HeldPieces(layout, pieces, self.weights, outer, boxes)
            if held.selected:
                every = all(n in held.selected or not entry.elements for n, entry in enumerate(layout.entries))
                parts[number] = HeldWeights(
                    held, None if every else held.selected, lossy=self.lossy, private=self._private
                )
        self.parts, self._keys = parts or {0: self.parts[0]}, keys
        known = self.weights.layout is not None and self.weights.layout.digest == outer.digest
        readable = [isinstance(weights.weights, HeldPieces) and weights.weights.readable for weights in parts.values()]
        if known and all(readable):
            for weights in parts.values():
                weights.identify(threads)

    def _box(self, here: Entry, entries: Mapping[str, Entry]) -> TensorBox:
        """Return the box of the published tensor that a tensor at hand is."""
        name = here.name
        if name not in entries:
            raise IncompatibleError(f"the published weights have other tensors than these: no {name!r} published")
        whole = entries[name].shape
        if name in self.slices:
            return sliced_box(name, self.slices[name], here.shape, whole)
        box = self.boxes.get(name)
        if box is None or box.shape == box.whole:
            return TensorBox.of_all(whole)
        if box.whole != whole:
            raise IncompatibleError(f"{name!r} has the shape {list(box.whole)} here, and {list(whole)} published")
        return box

    def _fit_whole(self, manifest: Manifest, layout_of: LayoutOf, threads: int) -> None:
        if self._keys:
            self.parts, self._keys = {0: HeldWeights(self.weights, lossy=self.lossy, private=self._private)}, ()
        held = self.parts[0]
        layout = held.layout
        if layout is not None and layout.digest.hex() != manifest.parts[0]:
            if isinstance(self.weights, LiveTensors):
                found = layout_of(0).difference(layout, "published", "here")
                raise IncompatibleError(f"the published weights have other tensors than these: {found}")
            held.forget()
        elif layout is not None and held.sums is None:
            held.identify(threads)

    def write(self, checked: Sequence[Callable[[], None]]) -> None:
        """Write the files of all parts, which have been checked."""
        for write in checked:
            write()
        for held in self.parts.values():
            if isinstance(held.weights, HeldPieces):
                held.weights.scatter()

    def settle(self) -> None:
        """Make what was written the weights, unless writing was interrupted.

        If it raises, nothing is known of the weights, and the next update begins with what they hold.

        Raises:
            IncompatibleError: tensors that share memory cannot hold what was written.
        """
        if all(held.sums is not None for held in self.parts.values()):
            try:
                self.weights.commit()
            except BaseException:
                # Some tensors may have been written, and others not.
                self.forget()
                self.weights.abandon()
                raise
        else:
            self.weights.abandon()

    def become(self, other: Following) -> None:
        """Take over what is known of other tensors with the same bytes."""
        if other._keys != self._keys:
            self.parts, self._keys = {}, other._keys
            for number, held in other.parts.items():
                pieces = held.weights.over(self.weights) if isinstance(held.weights, HeldPieces) else self.weights
                self.parts[number] = HeldWeights(pieces, held.selected, lossy=self.lossy, private=self._private)
        for number, held in other.parts.items():
            mine = self.parts[number]
            mine.become(held)
            if isinstance(held.weights, HeldPieces) and isinstance(mine.weights, HeldPieces):
                mine.weights.become(held.weights)

    def check(self, number: int, head: PatchHead, data: Octets, threads: int) -> Callable[[], None]:
        """Check a part's file in full, and return the function that writes it."""
        return self.parts[number].check(head, data, threads)
