"""Boxes of tensors: how they meet, where their elements lie, and how they are named and cut."""

from __future__ import annotations

import numpy as np
import pytest

import gradwire as gw
from gradwire.publish.boxes import TensorBox, TensorPiece, check_strips, covers, pieces_of


def boxes(seed: int, count: int) -> list[TensorBox]:
    """Boxes of a tensor of three dimensions, at random."""
    rng, whole = np.random.default_rng(seed), (5, 4, 6)
    found = []
    for _ in range(count):
        start = [int(rng.integers(size)) for size in whole]
        stop = [int(rng.integers(a + 1, size + 1)) for a, size in zip(start, whole)]
        found.append(TensorBox(tuple(start), tuple(stop), whole))
    return found


def filled(box: TensorBox) -> np.ndarray:
    """Mark the elements of a box."""
    cells = np.zeros(box.whole, bool)
    cells[tuple(map(slice, box.start, box.stop))] = True
    return cells


def test_what_two_boxes_share_is_what_both_have() -> None:
    for first, second in zip(boxes(0, 200), boxes(1, 200)):
        shared = first.meet(second)
        both = filled(first) & filled(second)
        assert np.array_equal(np.zeros_like(both) if shared is None else filled(shared), both)


def test_elements_that_follow_one_another_are_found() -> None:
    """Compared with the addresses of all elements."""
    known = set()
    for inner, outer in zip(boxes(2, 3000), boxes(3, 3000)):
        shared = inner.meet(outer)
        if shared is None:
            continue
        places = np.arange(outer.elements).reshape(outer.shape)[shared.within(outer)].ravel()
        follow = bool((np.diff(places) == 1).all())
        assert shared.contiguous_at(outer) == (int(places[0]) if follow else None)
        known.add(follow)
    assert known == {True, False}


def test_a_cover_has_each_element_once() -> None:
    whole = TensorBox.of_all((4, 6))
    strips = [box for _, box in whole.strips(0, 3)]
    assert covers(whole, strips)
    assert covers(TensorBox((1, 2), (3, 5), (4, 6)), strips)
    assert not covers(whole, strips[1:])
    assert not covers(whole, [*strips, TensorBox((0, 0), (1, 1), (4, 6))])
    assert covers(TensorBox.of_all(()), [TensorBox.of_all(())])
    assert not covers(TensorBox.of_all(()), [])
    assert covers(TensorBox.of_all((0, 3)), [])


def test_strips_are_those_of_readers() -> None:
    """A shard that begins anywhere is cut where the readers' shards end."""
    box = TensorBox((3, 0), (9, 2), (10, 2))
    assert [(n, b.start[0], b.stop[0]) for n, b in box.strips(0, 4)] == [(1, 3, 6), (2, 6, 9)]
    pieces = pieces_of(
        [("a.down", box), ("a.up", box), ("empty", TensorBox((2,), (2,), (2,)))], {"*down": (1, 2), "*": (0, 2)}
    )
    assert [piece.label for piece in pieces] == [
        "000 a.down 3:9/10,0:1/2",
        "001 a.down 3:9/10,1:2/2",
        "000 a.up 3:5/10,0:2/2",
        "001 a.up 5:9/10,0:2/2",
    ]
    assert pieces_of([("scale", TensorBox.of_all(()))], {"*": (0, 2)}) == [
        TensorPiece(0, "scale", TensorBox.of_all(()))
    ]


@pytest.mark.parametrize("name", ["w", "with space", "a\nb", "0:1/2", "é"])
def test_names_of_pieces_are_read_back(name: str) -> None:
    for box in (TensorBox.of_all(()), TensorBox((1, 2), (3, 5), (4, 6))):
        piece = TensorPiece(7, name, box)
        assert TensorPiece.parse(piece.label) == piece


@pytest.mark.parametrize("label", ["", "w", "00 w 0:1/1", "000 w 0:2/1", "000 w 2:1/3", "000 w 0:1/1,", "000 w -1:2/3"])
def test_other_names_are_refused(label: str) -> None:
    with pytest.raises(gw.PayloadError, match="piece"):
        TensorPiece.parse(label)


def test_strips_out_of_range_are_refused() -> None:
    for cut in ((-1, 2), (0, 0), (0, 1000)):
        with pytest.raises(gw.HyperparameterError, match="strips"):
            check_strips({"*": cut})
