"""Sharded modules in the step benchmark: real steps, and steps that sleep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradwire.model.profile import ReadyBucket, Timeline
from gradwire.tools.bench.models import bench_model
from gradwire.tools.bench.network_row import wire_floor_s
from gradwire.tools.bench.ranks import open_ranks
from gradwire.tools.bench.sharded import (
    Passes,
    SleepingShards,
    make_sharded,
    measure_passes,
    shard,
    units_of,
)
from gradwire.tools.bench.variants import Variant, check_variant, is_sharded
from gradwire.tools.experiments.errors import RunError, UsageError
from gradwire.tools.lab import Topology
from ranks import Ranks

TIMELINE = Timeline(
    forward_s=3.0, buckets=(ReadyBucket(names=("all",), numel=1, ready_s=5.0),), backward_s=6.0, after_s=0.5
)
PASSES = Passes(forward_s=(1.0, 2.0, 2.0, 2.0, 2.0, 1.0), backward_s=(2.0, 3.0, 3.0, 3.0, 3.0, 1.0), update_s=9.0)


def test_layers_of_the_longest_list_are_units() -> None:
    assert [type(unit).__name__ for unit in units_of(bench_model("transformer").make())] == [
        "TransformerEncoderLayer"
    ] * 4
    assert [type(unit).__name__ for unit in units_of(bench_model("mlp").make())] == ["Linear"] * 4


@pytest.mark.parametrize("name", ["fsdp terngrad", "fsdp+weights EDEN(bits=4)", "hsdp native"])
def test_variants_of_sharded_modules_have_names(name: str) -> None:
    assert check_variant(name) == name
    assert is_sharded(name)


def test_other_names_are_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"'fsdp SPEC', 'fsdp\+weights SPEC', 'hsdp SPEC', with any method or native"):
        check_variant("zero3 terngrad")
    with pytest.raises(ValueError, match="terngard"):
        check_variant("hsdp terngard")
    assert not is_sharded("gradwire terngrad")


def test_passes_are_stretched_to_a_timeline_and_kept_as_json() -> None:
    found = PASSES.scaled(TIMELINE)
    assert (sum(found.forward_s), sum(found.backward_s), found.update_s) == pytest.approx((3.0, 6.0, 0.5))
    assert found.backward_s[1] == pytest.approx(6.0 * 3 / 15)
    assert Passes.from_json(PASSES.to_json()) == PASSES


@pytest.mark.parametrize("name", ["transformer", "mlp"])
def test_the_passes_of_every_unit_are_measured(name: str) -> None:
    model = bench_model(name)
    found = measure_passes(model, model.batch(torch.Generator().manual_seed(0)))
    assert len(found.forward_s) == len(found.backward_s) == 6
    assert min(found.forward_s + found.backward_s) >= 0.0
    # Layers multiply matrices, which takes time on any clock.
    assert min(found.forward_s[1:5] + found.backward_s[2:5]) > 0.0


def test_the_floor_is_that_of_the_link_that_takes_longest() -> None:
    flat, nodes = (Topology.parse(f"hosts=4,{rest}") for rest in ("bandwidth=100mbit", "groups=2,between=8mbit"))
    assert wire_floor_s(flat, 1e6, 5e6) == pytest.approx(0.08)
    assert wire_floor_s(nodes, 1e9, 1e6) == pytest.approx(1.0)
    assert wire_floor_s(Topology(hosts=4), 1e9) == 0.0


def slept(kind: str) -> tuple[list[float], bool]:
    """Take a step that sleeps; return the sleeps, and whether its gradients are those of the real step."""
    model = bench_model("transformer")
    batch = model.batch(torch.Generator().manual_seed(dist.get_rank()))
    found = []
    for timeline in (None, TIMELINE):
        compute: Any = make_sharded(kind, model, batch, timeline, PASSES)
        sleeps = list[float]()
        if timeline is not None:
            compute.sleep = sleeps.append
        compute.forward().backward()
        found.append({n: p.grad.to_local().clone() for n, p in compute.wrapped.named_parameters()})
        compute.update()
    real, asleep = found
    return sleeps, all(torch.allclose(value, asleep[n], rtol=1e-4, atol=1e-6) for n, value in real.items())


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
def test_a_step_that_sleeps_reduces_the_gradients_of_a_real_one(four_ranks: Ranks, kind: str) -> None:
    scaled = PASSES.scaled(TIMELINE)
    for sleeps, alike in four_ranks(slept, kind):
        assert sleeps == [*scaled.forward_s, *reversed(scaled.backward_s), 0.5]
        assert alike


def refused() -> list[str]:
    model, told = bench_model("transformer"), []
    module = model.make()
    for build in (lambda: shard("hsdp", module), lambda: SleepingShards(module, {}, Passes.from_json(SHORT))):
        try:
            build()
        except (UsageError, RunError) as error:
            told.append(str(error))
    return told


SHORT = {"forward_s": [1.0], "backward_s": [1.0], "update_s": 0.0}


@pytest.mark.ranks
def test_what_does_not_fit_is_refused(three_ranks: Ranks) -> None:
    for told in three_ranks(refused):
        assert told == [
            "hsdp on 3 hosts: 2 replicas of two or more shards need 4 hosts, 6, 8, ...",
            "the passes are of a model with another number of units: measure this model's own",
        ]


def counted() -> tuple[list[float], bool, bool]:
    model = bench_model("transformer")
    batch = model.batch(torch.Generator().manual_seed(dist.get_rank()))
    variants = [Variant.build(f"fsdp{kind}", model, batch) for kind in (" native", " terngrad", "+weights terngrad")]
    for variant in variants:
        variant.steps(2)
    found = [variant.counts().get("exchange_bytes", 0) for variant in variants]
    weights = [variant.weights for variant in variants]
    measured = weights[2] is not None and weights[2].traffic().sent_bytes > 0
    for variant in variants:
        variant.close()
    return found, measured, weights[:2] == [None, None]


@pytest.mark.ranks
def test_a_variants_counters_are_those_of_its_gradients_alone(four_ranks: Ranks) -> None:
    for (native, alone, beside), measured, without in four_ranks(counted):
        assert native == 0
        assert alone == beside > 0
        assert measured
        assert without


@pytest.mark.ranks
def test_ranks_take_sharded_steps_at_command() -> None:
    with open_ranks("lenet", 2, None, variables={"GRADWIRE_TEST": "1"}) as ranks:
        ranks.ask("sleep", timeline=TIMELINE.scaled(0.01).to_json())
        (built, _) = ranks.ask("build", variant="fsdp terngrad")
        (first, _) = ranks.ask("steps", variant="fsdp terngrad", count=2)
        (record, _) = ranks.ask("record", variant="fsdp terngrad")
    assert built["numel"] == 431080
    assert len(first["times_s"]) == 2
    assert first["counted"]["exchange_bytes"] > 0
    assert "sent_bytes" not in first["counted"]
    assert record["record"]["method"].startswith("TernGrad(")
