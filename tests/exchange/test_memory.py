"""What a rank remembers: a round changes all of it or nothing, and it follows its parameter to another layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import gradwire as gw
from gradwire.exchange.protocols import Memory, Workspace
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


def test_a_vector_follows_its_parameter_back_to_an_earlier_layout() -> None:
    """A round with one of two parameters in between: the bank of both has an old vector of that one."""
    memory, alone = Memory(), lay_out([A])
    for value, segments in enumerate((SEGMENTS, alone, SEGMENTS, alone, SEGMENTS), 1):
        memory.stage("residual", segments).copy_(memory.read("residual", segments) + value)
        memory.commit()
    assert memory.read("residual", SEGMENTS).tolist() == [15.0] * 3 + [9.0] * 2
    assert {key: x.tolist() for key, x in memory.state()["rank"].items()} == {
        "residual/a": [15.0] * 3,
        "residual/b": [9.0] * 2,
    }


@pytest.mark.parametrize("method", ["ErrorFeedback(TopK(density=0.1))", "DIANA()"])
def test_nothing_is_lost_between_exchanges_of_all_and_of_some(method: str) -> None:
    """As a stream's fragments and ``synchronise()`` alternate: what was asked for was sent, or waits."""
    link = gw.SimulatedLink([(name, torch.empty(64)) for name in "abc"], method, 2, min_numel=0)
    generator = torch.Generator().manual_seed(1)
    asked, sent = torch.zeros(192), torch.zeros(192)
    for names in ("abc", "ab", "abc", "bc", "abc", "ab", "c", "abc"):
        rows = torch.zeros(2, 192)
        places = slice(64 * "abc".index(names[0]), 64 * "abc".index(names[-1]) + 64)
        rows[:, places] = torch.randn(2, 64 * len(names), generator=generator)
        asked += rows.mean(0)
        sent[places] += link.reduce_(rows[:, places].clone(), list(names))
    if method != "DIANA()":
        state = link.state_dict()
        left = sum(torch.cat([state[f"rank {r}"][f"residual/{name}"] for name in "abc"]) for r in range(2)) / 2
        assert torch.allclose(sent + left, asked, rtol=0, atol=1e-5)
        return
    # The mean of the shifts is what all ranks hold to be it.
    state = link.state_dict()
    for name in "abc":
        mean = (state["rank 0"][f"shift/{name}"] + state["rank 1"][f"shift/{name}"]) / 2
        assert torch.allclose(mean, state["replicated"][f"mean_shift/{name}"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", ["DIANA()", "Hierarchical(compressor=DIANA(), node_size=2)"])
def test_buffers_do_not_grow_with_the_number_of_chunks(method: str) -> None:
    numel, held = 1 << 15, []

    def count(space: Workspace) -> int:
        return sum(x.numel() for x in space._buffers.values()) + sum(map(count, space._parts.values()))

    for chunk_numel in (numel, numel >> 5):
        link = gw.SimulatedLink([("w", torch.empty(numel))], method, 4, min_numel=0, chunk_numel=chunk_numel)
        link.reduce_(torch.randn(4, numel, generator=torch.Generator().manual_seed(0)))
        held.append(sum(map(count, link._spaces[0])))
    assert held[1] < 1.2 * held[0] + 4 * numel
