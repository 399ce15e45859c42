"""The pieces of one part of published weights, as far as a reader's tensors hold them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import torch

from gradwire.errors import IncompatibleError
from gradwire.publish.boxes import TensorBox, TensorPiece, covers
from gradwire.publish.layout import BlockSpan, Entry, Layout
from gradwire.publish.weights import Writable

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class HeldPieces:
    """The pieces of one part that share elements with tensors at hand.

    A piece whose elements lie in the tensor one behind the other, as rows do, is read and written there. Of any other,
    such as columns, or one of which the tensor has a part only, a copy is kept, from which the tensor's elements are
    written at :meth:`scatter`. What the tensors share nothing with is neither read nor kept.

    Args:
        layout: Layout of the part.
        pieces: The piece of each of its tensors.
        tensors: The tensors at hand.
        outer: Layout of the tensors at hand.
        boxes: By name, the box of the published tensor that the tensor at hand is.
    """

    def __init__(
        self,
        layout: Layout,
        pieces: Sequence[TensorPiece],
        tensors: Writable,
        outer: Layout,
        boxes: Mapping[str, TensorBox],
    ) -> None:
        self._layout, self._pieces, self._tensors, self._outer, self._boxes = layout, pieces, tensors, outer, boxes
        self._index = {entry.name: number for number, entry in enumerate(outer.entries)}
        self._copies: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()
        self._shared = {
            number: shared
            for number, piece in enumerate(pieces)
            if (shared := piece.box.meet(boxes[piece.name])) is not None
        }
        self._direct = {
            number: at * layout.entries[number].kind.numbers
            for number, shared in self._shared.items()
            if shared == pieces[number].box and (at := shared.contiguous_at(boxes[pieces[number].name])) is not None
        }

    @property
    def layout(self) -> Layout:
        """Layout of the part."""
        return self._layout

    @property
    def selected(self) -> frozenset[int]:
        """Numbers of the part's tensors that are held."""
        return frozenset(self._shared)

    @property
    def readable(self) -> bool:
        """Whether the tensors at hand hold the whole part, so that its sums can be computed from them."""
        return len(self._direct) == sum(entry.elements > 0 for entry in self._layout.entries)

    def _place(self, span: BlockSpan) -> BlockSpan | None:
        """Return a span's place in the tensors at hand; None if it is not there as a whole."""
        at = self._direct.get(span.tensor)
        if at is None:
            return None
        return BlockSpan(self._index[self._pieces[span.tensor].name], at + span.begin, at + span.stop, span.kind)

    def _copy(self, span: BlockSpan) -> torch.Tensor:
        if span.tensor not in self._shared:
            # Decoded along with others of its chunk, and not kept.
            return torch.zeros(span.elements * span.kind.width, dtype=torch.uint8, device="cpu")
        with self._lock:
            if span.tensor not in self._copies:
                nbytes = self._layout.entries[span.tensor].nbytes
                self._copies[span.tensor] = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        return self._copies[span.tensor][span.octets]

    def read(self, span: BlockSpan) -> torch.Tensor:
        place = self._place(span)
        return self._copy(span) if place is None else self._tensors.read(place)

    @property
    def hidden(self) -> bool:
        # Copies outlive an update, and some tensors may be in no piece of this part.
        return False

    def open(self, layout: Layout, step: int, *, whole: bool = False) -> None:
        self._tensors.open(self._outer, step)

    def target(self, span: BlockSpan) -> torch.Tensor:
        place = self._place(span)
        return self._copy(span) if place is None else self._tensors.target(place)

    def scatter(self) -> None:
        """Write what the copies hold of the tensors to them."""
        for number, copy in self._copies.items():
            piece, shared, kind = self._pieces[number], self._shared[number], self._layout.entries[number].kind
            box, index = self._boxes[piece.name], self._index[piece.name]
            octets = self._tensors.target(BlockSpan(index, 0, self._outer.entries[index].elements, kind))
            target = _numbers(octets, kind.width).reshape(*box.shape, kind.numbers)
            source = _numbers(copy, kind.width).reshape(*piece.box.shape, kind.numbers)
            target[shared.within(box)] = source[shared.within(piece.box)]

    def commit(self) -> None:
        """Do nothing: the tensors of all parts are written at once."""

    def abandon(self) -> None:
        """Do nothing, likewise."""

    def over(self, tensors: Writable) -> HeldPieces:
        """Return the same pieces of other tensors of the same layout."""
        return HeldPieces(self._layout, self._pieces, tensors, self._outer, self._boxes)

    def become(self, other: HeldPieces) -> None:
        """Take over the copies of pieces of other tensors with the same bytes."""
        self._copies = {number: copy.clone() for number, copy in other._copies.items()}


def _numbers(octets: torch.Tensor, width: int) -> torch.Tensor:
    """View bytes as integers as wide as a number."""
    return octets.view(_INTEGERS[width])


def whole_entries(layouts: Sequence[tuple[Layout, Sequence[TensorPiece]]]) -> dict[str, Entry]:
    """Return the published tensors, of which layouts have pieces.

    Raises:
        IncompatibleError: the pieces of a tensor are of different types or shapes.
    """
    found: dict[str, Entry] = {}
    for layout, pieces in layouts:
        for entry, piece in zip(layout.entries, pieces):
            whole = Entry(piece.name, entry.kind, piece.box.whole)
            if found.setdefault(piece.name, whole) != whole or entry.shape != piece.box.shape:
                raise IncompatibleError(f"the published pieces of {piece.name!r} do not fit together")
    return found


def check_cover(layouts: Sequence[tuple[Layout, Sequence[TensorPiece]]], boxes: Mapping[str, TensorBox]) -> None:
    """Refuse pieces that do not have each element of tensors at hand once.

    Raises:
        IncompatibleError: some element is in no piece, or in two.
    """
    found: dict[str, list[TensorBox]] = {name: [] for name in boxes}
    for _, pieces in layouts:
        for piece in pieces:
            found[piece.name].append(piece.box)
    for name, box in boxes.items():
        if not covers(box, found[name]):
            raise IncompatibleError(f"the published pieces of {name!r} do not have each element of {box} once")


def pieces_of_layout(layout: Layout, sharded: bool) -> list[TensorPiece]:
    """Return the piece that each tensor of a part's layout is; of weights that are not sharded, whole tensors.

    Raises:
        PayloadError: a name does not name a piece.
    """
    if sharded:
        return [TensorPiece.parse(entry.name) for entry in layout.entries]
    return [TensorPiece(0, entry.name, TensorBox.of_all(entry.shape)) for entry in layout.entries]
