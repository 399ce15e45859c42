"""Which plan a bucket gets: what travels in float32, by which collective, in what chunks, with whose draws."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

import gradwire as gw
from gradwire.exchange.planning import Options, Planner, dense_names, place_kernels
from gradwire.exchange.protocols.bucket_plan import DENSE_TAG, SectionPlan
from gradwire.kernels import get_kernels

SHAPES = {"small": (10,), "even": (1024,), "weight": (2000,), "head.weight": (4000,), "head.bias": (5000,)}
SIZES = {name: shape[0] for name, shape in SHAPES.items()}


def planner(method: str = "terngrad", world_size: int = 4, **options: object) -> Planner:
    tensors = {name: torch.empty(shape) for name, shape in SHAPES.items()}
    return Planner(gw.method(method), tensors, world_size, Options.of({"backend": "reference", **options}))


def test_parameters_below_the_least_size_and_those_that_are_excluded_are_dense() -> None:
    method = gw.method("terngrad")
    assert dense_names(SIZES, Options(), method) == {"small"}, "1024 elements are enough"
    assert dense_names(SIZES, Options(min_numel=1025), method) == {"small", "even"}
    assert dense_names(SIZES, Options(min_numel=0), method) == set()
    assert dense_names(SIZES, Options(), gw.method("bf16")) == set()
    two = Options(exclude=("head.*", "weight"), min_numel=0)
    assert dense_names(SIZES, two, method) == {"weight", "head.weight", "head.bias"}
    with pytest.raises(gw.HyperparameterError, match=r"'heads\.\*' matches no parameter; did you mean 'head"):
        dense_names(SIZES, Options(exclude=("heads.*",)), method)


def test_without_triton_auto_takes_main_memory_where_kernels_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise gw.BackendError(f"kernel backend {name!r} needs triton")

    monkeypatch.setattr("gradwire.exchange.planning.placement.get_kernels", refuse)
    gpu, ternary, cast = torch.device("cuda", 0), gw.method("terngrad"), gw.method("bf16")
    placed = place_kernels([ternary], "auto", gpu)
    assert not placed.on_device
    assert "needs triton" in placed.reason
    assert place_kernels([cast], "auto", gpu).on_device, "a cast needs no kernel"
    with pytest.raises(gw.BackendError, match="cannot serve parameters on cuda:0: kernel backend 'triton' needs"):
        place_kernels([ternary], "triton", gpu)


def test_so_many_rounds_are_dense() -> None:
    made = planner(warmup_steps=2)
    assert [made.is_warm_up(round) for round in range(4)] == [True, True, False, False]
    plans = [made.plan(["weight"], round) for round in range(4)]
    assert plans[0] is plans[1] is not plans[2] is plans[3]
    tags = [plan.tag for plan in plans if isinstance(plan, SectionPlan)]
    assert tags == [DENSE_TAG, DENSE_TAG, gw.TernGrad.tag, gw.TernGrad.tag]


def test_the_collective_with_the_fewest_bytes_is_taken() -> None:
    """Two-shot sends 1.6 bits and the sum's share; a gather 1.6 to each of the others."""
    for world_size, expected in ((2, "all_gather"), (32, "two_shot")):
        made = planner(world_size=world_size)
        assert made.plan(["weight"], 0).collective == expected
        assert made.chosen == {expected: 1}
        costs = {
            name: planner(world_size=world_size, collective=name).sent_bytes(["weight"])
            for name in ("all_gather", "two_shot")
        }
        assert made.sent_bytes(["weight"]) == min(costs.values()) == costs[expected]


def test_the_seed_decides_the_draws() -> None:
    keys = []
    for seed in (0, 1, 0):
        plan = planner(seed=seed).plan(["weight"], 0)
        assert isinstance(plan, SectionPlan)
        keys.append(plan.codec.table.key.tolist())  # type: ignore[union-attr]
    assert keys[0] == keys[2] != keys[1]


def test_chunks_are_as_long_as_was_asked_for() -> None:
    names = ["weight", "head.weight"]
    assert planner().plan(names, 0).chunks == 1
    plan = planner(chunk_numel=1600).plan(names, 0)
    # 6000 elements by 1600.
    assert plan.chunks == 4
    assert [b - a for runs in plan.runs for a, b in runs] == [1600, 1600, 1600, 1200]


def test_another_order_of_parameters_has_another_plan() -> None:
    made = planner()
    first, other = (made.plan(names, 0) for names in (["weight", "even"], ["even", "weight"]))
    assert first is not other
    assert made.plan(["weight", "even"], 0) is first
    assert [s.offset for s in made.segments(["weight", "even"])] == [0, 2000]
    assert [s.offset for s in made.segments(["even", "weight"])] == [0, 1024]


def test_of_a_step_what_is_compressed_lies_first() -> None:
    assert planner(exclude=("even",)).step_order() == ["weight", "head.weight", "head.bias", "small", "even"]


def test_a_plan_that_no_round_uses_any_more_is_dropped() -> None:
    made = planner()
    old, beside = made.plan(["weight"], 0), made.plan(["even"], 0)
    assert made.plan(["weight"], 0) is old
    made.plan(["weight"], 1)
    made.plan(["weight", "even"], 1)
    assert made.plan(["weight"], 1) is old, "it was used in this round"
    assert made.plan(["even"], 1) is not beside, "it was not when a new layout came"


def test_parameters_that_are_compressed_as_one_vector_come_first() -> None:
    made = planner("QSGDinf(levels=7, blocks='model')", exclude=("even",))
    names = made.step_order()
    assert made.plan(names, 0).chunks
    for wrong in (names[::-1], [*names[-1:], *names[:-1]]):
        with pytest.raises(ValueError, match="compressed parameters come first"):
            made.plan(wrong, 0)


def test_a_backend_that_computes_nothing_is_refused() -> None:
    made = planner(backend="meta")
    with pytest.raises(gw.HyperparameterError, match="'meta' computes nothing"):
        made.compile()
    assert planner("fp32").backend == "none"
    assert planner().backend == get_kernels("reference").name


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("warmup_steps", -1, "warmup_steps: a whole number of at least 0"),
        ("min_numel", -1, "min_numel: a whole number of at least 0"),
        ("chunk_numel", 0, "chunk_numel: a whole number of at least 1"),
        ("warmup_steps", True, "not True"),
        ("min_numel", 2.0, "not 2.0"),
        ("seed", "0", "seed: a whole number"),
        ("fallback_limit", 2.0, "without fallback= has no meaning"),
    ],
)
def test_options_that_make_no_sense_are_refused(name: str, value: object, words: str) -> None:
    with pytest.raises(gw.HyperparameterError, match=words):
        Options.of({name: value})
    with pytest.raises(gw.HyperparameterError, match="unknown option 'warm_steps'; did you mean 'warmup_steps'"):
        Options.of({"warm_steps": 1})


@dataclass(frozen=True, kw_only=True)
class Forgetful(gw.Natural):
    """A method that calls kernels and does not say so."""

    name: ClassVar[str] = "forgetful"
    tag: ClassVar[int] = 120

    def declare(self) -> gw.Traits:
        return replace(super().declare(), kernels=())


def test_kernels_that_a_method_does_not_declare_are_refused() -> None:
    """Without a backend nothing was computed: each rank kept its own gradient, and nobody was told."""
    with pytest.raises(gw.IncompatibleError, match="Forgetful calls kernels of the family 'natural' and declares none"):
        gw.simulate(torch.randn(2, 2000), Forgetful())
