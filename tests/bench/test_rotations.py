"""The rows of the kernel benchmark for rotated blocks: what is timed is what their names say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gradwire.kernels import Kernels, get_kernels
from gradwire.tools.bench.codecs import ROTATION_GOALS, bench_rotations
from gradwire.tools.bench.kernels import GOALS

ELEMENTS = 10_000
"""Two blocks of 4096 and one of 2048."""


class Recorded:
    """Takes the rows' names, and does each row's work once."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[str, int]] = {}

    def run(self, kernel: str, layout: str, elements: int, work: Callable[[], object], inner: int = 1) -> None:
        work()
        self.rows[kernel] = (layout, elements)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What is asked of the family, with its arguments, in order."""
    found: list[tuple[str, Any]] = []
    for name in ("rotate", "rotate_back", "encode_rotated", "decode_rotated"):

        def ask(self: Kernels, *arguments: Any, name: str = name) -> None:
            found.append((name, arguments))

        monkeypatch.setattr(Kernels, name, ask)
    return found


def rows_of(name: str) -> dict[str, tuple[str, int]]:
    bench = Recorded()
    bench_rotations(bench, get_kernels(name), ELEMENTS)  # type: ignore[arg-type]
    return bench.rows


def test_there_is_a_row_for_each_operation_and_each_number_of_bits() -> None:
    coded = [f"{way} rotated, {bits}" for bits in ("1 bit", "2 bits", "4 bits") for way in ("encode", "decode")]
    assert list(rows_of("cpu")) == ["rotate", "rotate back", "rotate back, added", *coded]
    assert set(rows_of("cpu").values()) == {("blocks of 4096", ELEMENTS)}


def test_goals_belong_to_rows() -> None:
    assert set(ROTATION_GOALS) < set(rows_of("cpu"))
    assert {name: GOALS[name] for name in ROTATION_GOALS} == {"rotate": 1.0, "encode rotated, 4 bits": 1.6}


def test_each_row_does_what_it_is_called(called: list[tuple[str, Any]]) -> None:
    rows_of("cpu")
    names = [name for name, _ in called]
    assert names == ["rotate", "rotate_back", "rotate_back", *["encode_rotated", "decode_rotated"] * 3]
    # Backwards, and added.
    assert [arguments[6:] for name, arguments in called if name == "rotate_back"] == [(), (True,)]
    assert all(arguments[1].size == 4096 for _, arguments in called if isinstance(arguments[0], torch.Tensor))
    bases = [arguments[3].base for name, arguments in called if name == "encode_rotated"]
    assert bases == [2, 4, 16]
    sizes = [8 * len(arguments[7]) / 10_240 for name, arguments in called if name == "encode_rotated"]
    assert sizes == pytest.approx([1, 2, 4], rel=0.01)


def test_a_backend_that_computes_nothing_has_no_rows() -> None:
    assert rows_of("meta") == {}
