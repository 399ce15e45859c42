"""What a recorder makes of its marks: a clock that says what it is told to."""

from __future__ import annotations

from typing import Any

import pytest

from gradwire.model.profile import ReadyBucket, Recorder, Timeline

Step = tuple[list[float], list[tuple[float, tuple[str, ...], int]]]


def recorded(steps: list[Step]) -> Timeline | None:
    recorder = Recorder.__new__(Recorder)
    recorder._steps = steps
    return recorder.timeline()


def step(begin: float, forward: float, backward: float, after: float, *ready: float, names: str = "ab") -> Step:
    """A step of three spans, whose buckets were ready so long after backward began."""
    marks = [begin, begin + forward, begin + forward + backward, begin + forward + backward + after]
    return marks, [(marks[1] + at, (name,), 10 * (i + 1)) for i, (at, name) in enumerate(zip(ready, names))]


def test_marks_become_spans_and_buckets_are_counted_from_the_begin_of_backward() -> None:
    found = recorded([step(100.0, 1.0, 4.0, 0.5, 2.0, 3.0)])
    buckets = (ReadyBucket(names=("a",), numel=10, ready_s=2.0), ReadyBucket(names=("b",), numel=20, ready_s=3.0))
    assert found == Timeline(forward_s=1.0, buckets=buckets, backward_s=4.0, after_s=0.5)
    assert found.compute_s == 5.5
    assert found.numel == 30


def test_a_step_is_as_long_as_the_median_of_all_and_its_parts_are_in_proportion_to_their_medians() -> None:
    """Where one part of each step is interrupted, the medians of the parts sum up to less than any step took."""
    spans = [(3.0, 4.0, 0.5), (1.0, 7.0, 0.5), (1.0, 4.0, 2.0)]
    found = recorded([step(10.0 * i, *s, 1.0, 3.5) for i, s in enumerate(spans)])
    assert found is not None
    assert found.compute_s == pytest.approx(7.5)
    stretched = 7.5 / (1.0 + 4.0 + 0.5)
    told = (found.forward_s, found.backward_s, found.after_s, *(bucket.ready_s for bucket in found.buckets))
    assert told == pytest.approx([part * stretched for part in (1.0, 4.0, 0.5, 1.0, 3.5)])


def test_only_steps_of_the_newest_layout_count() -> None:
    """DDP lays its buckets out anew after the first step."""
    old = step(0.0, 9.0, 9.0, 9.0, 1.0, 2.0, names="ba")
    found = recorded([old, step(100.0, 1.0, 4.0, 0.5, 2.0, 3.0)])
    assert found is not None
    assert found.forward_s == 1.0
    assert [bucket.names for bucket in found.buckets] == [("a",), ("b",)]
    assert recorded([]) is None


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_a_stretched_timeline_keeps_its_proportions(factor: float) -> None:
    at: Any = recorded([step(0.0, 1.0, 4.0, 0.5, 2.0, 3.0)])
    found = at.scaled(factor * at.compute_s)
    assert (found.forward_s, found.backward_s, found.after_s) == (factor, 4 * factor, 0.5 * factor)
    assert [bucket.ready_s for bucket in found.buckets] == [2 * factor, 3 * factor]
