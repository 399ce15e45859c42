"""What a rank remembers: a round changes all of it or nothing, and it follows its parameter to another layout."""

from __future__ import annotations

from dataclasses import replace

import torch

from gradwire.exchange.protocols import Memory
from gradwire.exchange.segments import Parameter, lay_out

A, B = Parameter("a", (3,), (1,)), Parameter("b", (2,), (1,))
SEGMENTS = lay_out([A, B])


def staged(memory: Memory, value: float, kind: str = "residual") -> None:
    memory.stage(kind, SEGMENTS).fill_(value)
    memory.stage_value("levels", torch.tensor(value))


def held(memory: Memory) -> tuple[list[float], float | None]:
    value = memory.value("levels")
    return memory.read("residual", SEGMENTS).tolist(), None if value is None else float(value)


def test_what_is_staged_holds_from_the_commit_on() -> None:
    memory = Memory()
    staged(memory, 1.0)
    assert held(memory) == ([0.0] * 5, None)
    memory.commit()
    assert held(memory) == ([1.0] * 5, 1.0)


def test_what_an_overflowed_round_staged_is_never_committed() -> None:
    memory = Memory()
    staged(memory, 1.0)
    memory.commit()
    staged(memory, 2.0)
    memory.discard()
    assert held(memory) == ([1.0] * 5, 1.0)
    # Also not by a later round that stages nothing of its own.
    memory.commit()
    assert held(memory) == ([1.0] * 5, 1.0)
    memory.stage("residual", SEGMENTS).fill_(3.0)
    memory.commit()
    assert held(memory) == ([3.0] * 5, 1.0)


def test_a_commit_without_anything_staged_changes_nothing() -> None:
    memory = Memory()
    staged(memory, 1.0)
    memory.commit()
    memory.commit()
    assert held(memory) == ([1.0] * 5, 1.0)


def test_a_vector_follows_its_parameter_to_another_layout() -> None:
    memory = Memory()
    memory.stage("residual", SEGMENTS).copy_(torch.arange(5.0))
    memory.commit()
    assert memory.read("residual", lay_out([B, A])).tolist() == [3.0, 4.0, 0.0, 1.0, 2.0]
    assert memory.read("residual", lay_out([A])).tolist() == [0.0, 1.0, 2.0]
    assert memory.read("residual", lay_out([B])).tolist() == [3.0, 4.0]


def test_what_travels_in_float32_is_not_kept() -> None:
    memory = Memory()
    segments = [SEGMENTS[0], replace(SEGMENTS[1], dense=True)]
    memory.stage("residual", segments).fill_(1.0)
    memory.commit()
    assert set(memory.state()["rank"]) == {"residual/a"}


def test_a_state_is_taken_whole_and_by_scope() -> None:
    memory = Memory()
    staged(memory, 1.0)
    memory.stage("mean_shift", SEGMENTS, replicated=True, dtype=torch.float64).copy_(torch.arange(5.0))
    memory.commit()
    state = memory.state()
    assert {scope: sorted(part) for scope, part in state.items()} == {
        "global": ["levels"],
        "replicated": ["mean_shift/a", "mean_shift/b"],
        "rank": ["residual/a", "residual/b"],
    }
    other = Memory()
    staged(other, 7.0)
    other.load(state)
    other.commit()
    assert held(other) == ([1.0] * 5, 1.0), "what was staged before the load is gone"
    again = other.read("mean_shift", SEGMENTS, replicated=True, dtype=torch.float64)
    assert (again.tolist(), again.dtype) == ([0.0, 1.0, 2.0, 3.0, 4.0], torch.float64)
    # Two rounds, as what is held and what is staged change places.
    for value in (8.0, 9.0):
        staged(memory, value)
        memory.commit()
    assert state["rank"]["residual/a"].tolist() == [1.0] * 3, "a state is a copy"
    assert float(state["global"]["levels"]) == 1.0


def test_norms_and_forgetting() -> None:
    memory = Memory()
    memory.stage("residual", SEGMENTS).copy_(torch.tensor([2.0, 3.0, 6.0, 3.0, 4.0]))
    memory.commit()
    assert (memory.norm("residual", "a"), memory.norm("residual", "b")) == (7.0, 5.0)
    assert memory.norm("shift", "a") is None
    memory.forget("residual")
    assert held(memory)[0] == [0.0] * 5
