"""Boxes: ranges of each dimension of a tensor, the pieces that parts of weights consist of, and how they are named."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from gradwire.errors import HyperparameterError, PayloadError

MAX_CELLS = 1 << 22
_LABEL = re.compile(r"(\d{3}) (.+) (\S+)", re.DOTALL)
_RANGE = re.compile(r"(\d{1,19}):(\d{1,19})/(\d{1,19})")


@dataclass(frozen=True)
class TensorBox:
    """A range of each dimension of a tensor.

    Attributes:
        start: First index of each dimension.
        stop: The index behind the last of each dimension.
        whole: Shape of the tensor.

    Example:
        >>> TensorBox((0, 2), (4, 5), (4, 6)).shape
        (4, 3)
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]
    whole: tuple[int, ...]

    @classmethod
    def of_all(cls, shape: Sequence[int]) -> TensorBox:
        """Return the box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the box."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop))

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def meet(self, other: TensorBox) -> TensorBox | None:
        """Return what two boxes of one tensor share; None if that is empty."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return TensorBox(start, stop, self.whole) if all(a < b for a, b in zip(start, stop)) else None

    def within(self, outer: TensorBox) -> tuple[slice, ...]:
        """Return the place of this box in a tensor that holds the elements of an outer box."""
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, outer.start))

    def contiguous_at(self, outer: TensorBox) -> int | None:
        """Return the place of this box's first element in the memory of an outer box; None if others lie between."""
        at, stride, full = 0, 1, True
        for a, b, low, size in reversed(list(zip(self.start, self.stop, outer.start, outer.shape))):
            if b - a != 1 and not full:
                return None
            at += (a - low) * stride
            full = full and b - a == size
            stride *= size
        return at

    def strips(self, dimension: int, count: int) -> list[tuple[int, TensorBox]]:
        """Cut the box where ``count`` readers that divide the tensor's dimension evenly do; number the strips.

        Readers have ceil(size / count) indices of the dimension each, the last ones fewer or none, as ``torch.chunk``
        and a DTensor's ``Shard(dimension)`` divide them.

        Example:
            >>> [(n, strip.start, strip.stop) for n, strip in TensorBox((2,), (10,), (10,)).strips(0, 3)]
            [(0, (2,), (4,)), (1, (4,), (8,)), (2, (8,), (10,))]
        """
        each = max(1, -(-self.whole[dimension] // count))
        found, at = [], self.start[dimension]
        while at < self.stop[dimension]:
            end = min((at // each + 1) * each, self.stop[dimension])
            start = (*self.start[:dimension], at, *self.start[dimension + 1 :])
            stop = (*self.stop[:dimension], end, *self.stop[dimension + 1 :])
            found.append((at // each, TensorBox(start, stop, self.whole)))
            at = end
        return found

    def __str__(self) -> str:
        ranges = [f"{a}:{b}/{size}" for a, b, size in zip(self.start, self.stop, self.whole)]
        return ",".join(ranges) or "-"


@dataclass(frozen=True)
class TensorPiece:
    """A box of a tensor that is published.

    Attributes:
        group: Number of the strip that the box was cut to; 0 if it was not cut.
        name: Name of the tensor.
        box: The box.
    """

    group: int
    name: str
    box: TensorBox

    @property
    def label(self) -> str:
        """The piece's name in the layout of its part: group, name of the tensor, box."""
        return f"{self.group:03d} {self.name} {self.box}"

    @classmethod
    def parse(cls, label: str) -> TensorPiece:
        """Read a label.

        Raises:
            PayloadError: it is not a label.

        Example:
            >>> TensorPiece.parse("002 layer.weight 0:4/8,0:3/3")
            TensorPiece(group=2, name='layer.weight', box=TensorBox(start=(0, 0), stop=(4, 3), whole=(8, 3)))
        """
        found = _LABEL.fullmatch(label)
        ranges = [] if not found or found[3] == "-" else [_RANGE.fullmatch(text) for text in found[3].split(",")]
        if not found or not all(ranges):
            raise PayloadError(f"{label[:200]!r} does not name a piece of a tensor")
        rows = [tuple(map(int, match.groups())) for match in ranges if match]
        if any(not a <= b <= size < 2**63 for a, b, size in rows):
            raise PayloadError(f"{label[:200]!r} names a piece that lies outside of its tensor")
        start, stop, whole = zip(*rows) if rows else ((), (), ())
        return cls(int(found[1]), found[2], TensorBox(tuple(start), tuple(stop), tuple(whole)))


def covers(box: TensorBox, parts: Sequence[TensorBox]) -> bool:
    """Return whether boxes have each element of a box once, and none twice.

    Example:
        >>> whole = TensorBox.of_all((4, 4))
        >>> left, right = (TensorBox((0, a), (4, a + 2), (4, 4)) for a in (0, 2))
        >>> covers(whole, [left, right]), covers(whole, [left]), covers(whole, [left, right, right])
        (True, False, False)
    """
    met = [part for part in (box.meet(other) for other in parts) if part is not None]
    if not box.elements:
        return True
    cuts = []
    for dimension in range(len(box.whole)):
        edges = {box.start[dimension], box.stop[dimension]}
        edges |= {edge for part in met for edge in (part.start[dimension], part.stop[dimension])}
        cuts.append(sorted(edges))
    if math.prod(len(edges) - 1 for edges in cuts) > MAX_CELLS:
        return False
    cells = np.zeros([len(edges) - 1 for edges in cuts], np.uint32)
    places = [{edge: number for number, edge in enumerate(edges)} for edges in cuts]
    for part in met:
        cells[tuple(slice(p[a], p[b]) for p, a, b in zip(places, part.start, part.stop))] += 1
    return bool((cells == 1).all())


Strips = Mapping[str, tuple[int, int]]
"""For patterns of tensors' names: the dimension that readers divide, and into how many parts."""


def check_strips(strips: Strips) -> None:
    """Check what a user gives.

    Raises:
        HyperparameterError: a dimension or a number is out of range.
    """
    for pattern, (dimension, count) in strips.items():
        if dimension < 0 or not 1 <= count <= 999:
            raise HyperparameterError(
                f"strips={{{pattern!r}: {(dimension, count)}}}: give a dimension from 0 on, and 1 to 999 strips"
            )


def pieces_of(boxes: Iterable[tuple[str, TensorBox]], strips: Strips) -> list[TensorPiece]:
    """Cut boxes of tensors into pieces; leave out empty ones of others. The first pattern that fits a name counts."""
    found = []
    for name, box in boxes:
        if not box.elements and 0 not in box.whole:
            continue
        cut = next((cut for pattern, cut in strips.items() if fnmatchcase(name, pattern)), None)
        if cut is None or cut[0] >= len(box.whole) or not box.elements:
            found.append(TensorPiece(0, name, box))
        else:
            found += [TensorPiece(group, name, strip) for group, strip in box.strips(*cut)]
    return found
