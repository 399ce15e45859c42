"""Mean steps of methods with local steps: bytes of the real exchange, and times that arithmetic gives."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from model_cases import SHAPES, profile

import gradwire as gw
from gradwire.exchange.drivers import Stage
from gradwire.exchange.ops import Scope
from gradwire.exchange.planning import Options, Planner, exchanged
from gradwire.model.cycle import Cycle, Fragment, cycle_of, cycle_time
from gradwire.model.exchange_profile import BucketJobs, ExchangeProfile
from gradwire.model.forecast import NOTHING, Scenario, forecast, recommend
from gradwire.model.machine import DEFAULT, LinkModel
from gradwire.model.profile import ReadyBucket, Timeline
from gradwire.model.schedule import Load, step_time

SPECS = (
    "LocalSGD(every=3)",
    "DiLoCo(every=4, inner=EDEN(bits=4))",
    "DiLoCo(every=4, inner=TernGrad())",
    "StreamingDiLoCo(every=8, fragments=4, delay=1)",
    "EASGD(every=2)",
    "DPSGD(graph='ring')",
    "DPSGD(graph='exponential', every=2)",
    "ChocoSGD(graph='ring')",
)
COSTS = ("call_s", "message_s", "byte_s", "sum_byte_s", "round_s", "bucket_s")
FREE = dataclasses.replace(DEFAULT, **dict.fromkeys(COSTS, 0.0), efficiency=1.0, contention=1.0)
"""A machine on which nothing but the link takes time."""


@pytest.mark.parametrize("spec", SPECS)
def test_bytes_are_those_of_a_cycle(spec: str) -> None:
    """Of the dry run; and, where bytes do not depend on the order of parameters, of simulated workers."""
    workers, options = 4, Options(min_numel=0)
    cycle = cycle_of(spec, profile().tensors(), workers, options, repeats=1)
    pieces, its = exchanged(gw.method(spec), profile().tensors(), options)
    planner = Planner(gw.method(spec), pieces, workers, its)
    counted = sum(planner.sent_bytes(bucket.names) for f in cycle.fragments for bucket in f.buckets)
    assert sorted(name for f in cycle.fragments for bucket in f.buckets for name in bucket.names) == sorted(pieces)
    assert cycle.sent_bytes * cycle.every == counted
    if "EDEN" in spec:
        return
    modules = [{name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()} for _ in range(workers)]
    link = gw.SimulatedLocalSteps([module.items() for module in modules], spec, min_numel=0)
    sent = []
    for _ in range(3 * cycle.every):
        link.after_step()
        sent.append(link.traffic(0).sent_bytes)
    # From one cycle to the next: a fragment of the last exchange may still be in flight.
    assert sent[-1] - sent[-1 - cycle.every] == counted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("spec", ["LocalSGD(every=3)", "DiLoCo(every=2, inner=FP32())"])
def test_differences_travel_in_float32_whatever_the_parameters_are(spec: str, dtype: torch.dtype) -> None:
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}
    modules = [{name: torch.nn.Parameter(tensor.clone()) for name, tensor in tensors.items()} for _ in range(4)]
    link = gw.SimulatedLocalSteps([module.items() for module in modules], spec)
    found = cycle_of(spec, tensors, 4, repeats=1)
    for _ in range(found.every):
        link.after_step()
    assert found.sent_bytes * found.every == link.traffic(0).sent_bytes


@pytest.mark.parametrize("iterations", [1, 2])
def test_of_factors_in_turn_a_cycle_has_the_mean(iterations: int) -> None:
    spec, workers = f"PowerGossip(iterations={iterations})", 3
    modules = [{name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()} for _ in range(workers)]
    link = gw.SimulatedLocalSteps([module.items() for module in modules], spec)
    totals = [0]
    for _ in range(2):
        link.after_step()
        totals.append(link.traffic(0).sent_bytes)
    first, second = totals[1], totals[2] - totals[1]
    # Rounds of two iterations send both sides.
    assert (first == second) == (iterations == 2)
    found = cycle_of(spec, profile().tensors(), workers, repeats=1)
    assert found.sent_bytes == (first + second) / 2


def cycle(every: int, delay: int, sent: int, fragments: int = 1, own_s: float = 0.0) -> Cycle:
    """All-to-alls of so many bytes, with nothing to compute but what is done beside them."""
    jobs = BucketJobs((), ((Stage(0.0, "all_to_all", sent, 1, 1), Stage(0.0)),), False)
    bucket = ReadyBucket(names=("w",), numel=sent // 4, ready_s=0.0)
    part = Fragment(ExchangeProfile("x", 2, (jobs,)), (bucket,), own_s)
    return Cycle("x", every, delay, (part,) * fragments)


@pytest.mark.parametrize(
    ("every", "delay", "fragments", "expected_s"),
    [
        (1, 0, 1, 0.01 + 0.1),  # as a step that waits for its exchange
        (10, 0, 1, 0.01 + 0.1 / 10),
        (10, 4, 1, (6 * 0.01 + 0.1) / 10),  # four steps end before the exchange does
        (20, 12, 1, 0.01),  # hidden behind twelve steps
        (20, 4, 4, (4 * 0.01 + 4 * 0.1) / 20),
    ],
)
def test_means_over_a_cycle_are_what_arithmetic_gives(
    every: int, delay: int, fragments: int, expected_s: float
) -> None:
    """A step computes for 10 ms; an exchange's 1 MB take 100 ms at 10 MB/s; there is a core for either."""
    link, load = LinkModel(bandwidth_bytes_per_s=1e7), Load(ranks=1, cores=4)
    found = cycle_time(
        profile(0.01).timeline, cycle(every, delay, 1_000_000, fragments), machine=FREE, link=link, load=load
    )
    assert found.step_s == pytest.approx(expected_s)
    assert found.wire_s == pytest.approx(0.1 * fragments / every)
    more = cycle_time(
        profile(0.01).timeline, cycle(every, delay, 1_000_000, fragments, own_s=0.5), machine=FREE, link=link,
        load=load,
    )  # fmt: skip
    assert more.step_s == pytest.approx(expected_s + 0.5 * fragments / every)


def test_a_forecast_has_local_steps_beside_others_and_does_not_recommend_them() -> None:
    methods = ("bf16", "DiLoCo(every=8)", "dpsgd")
    setting = Scenario(hosts=4, link=LinkModel(bandwidth_bytes_per_s=1e6))
    found, refused = forecast(profile(0.01), methods, setting, DEFAULT, repeats=1)
    assert not refused
    by_method = {f.method: f for f in found}
    assert list(by_method) == [NOTHING, *methods]
    assert [by_method[m].exchange_every for m in (NOTHING, *methods)] == [1, 1, 8, 1]
    assert by_method["DiLoCo(every=8)"].step_s < by_method[NOTHING].step_s / 4
    assert "one of 8 steps" in str(by_method["DiLoCo(every=8)"].apart)
    assert "parameters of its own" in str(by_method["dpsgd"].apart)
    assert recommend(found)[0] == "bf16"


def test_what_a_graph_does_not_allow_is_refused_by_name() -> None:
    setting = Scenario(hosts=4, link=LinkModel(bandwidth_bytes_per_s=1e6))
    _, refused = forecast(profile(), ("DPSGD(graph='no-such-file')",), setting, DEFAULT, repeats=1)
    assert list(refused) == ["DPSGD(graph='no-such-file')"]


def test_two_levels_save_time_where_nodes_share_a_slow_link() -> None:
    """Between two nodes of two, half of a rank's gradient crosses once; on one level two of three payloads do."""
    two = "Hierarchical(TernGrad(), node_size=2)"
    # So slow that it is no matter how long this machine, with others at work on it, encodes.
    link = LinkModel(bandwidth_bytes_per_s=1e3)
    setting = Scenario(hosts=2, ranks_per_host=2, link=link)
    specs = ("terngrad", two, f"DiLoCo(every=4, inner={two})")
    found, refused = forecast(profile(0.01), specs, setting, DEFAULT, repeats=1)
    assert not refused
    step_s = {f.method: f.step_s for f in found}
    assert 2.5 < step_s["terngrad"] / step_s[two] < 3.5
    assert step_s[specs[2]] < step_s[two]


def test_operations_of_a_scope_take_the_links_that_its_groups_have() -> None:
    link = LinkModel(bandwidth_bytes_per_s=100.0, latency_s=0.25, ranks_per_host=2)
    inside, between = (Scope(*s) for s in (("node", ((0, 1), (2, 3)), True), ("between", ((0, 2), (1, 3)))))
    found = {}
    for scope, kind in itertools.product((inside, between, None), ("all_to_all", "ring", "pairs")):
        jobs = BucketJobs((), ((Stage(0.0, kind, 60, 1, 1, scope, delays=1), Stage(0.0)),), False)
        empty = Timeline(forward_s=0.0, buckets=profile(0.0).timeline.buckets[:1], backward_s=0.0, after_s=0.0)
        exchange = ExchangeProfile("x", 4, (jobs,))
        steps = step_time(empty, exchange, machine=FREE, link=link, load=Load(ranks=2, cores=4))
        found[scope.name if scope else "all", kind] = (round(steps.step_s, 6), round(steps.wire_s, 6))
    # Two ranks share 100 bytes a second. Inside a node there is neither a link nor its delay. A ring's messages travel
    # while its bytes are sent.
    assert {value for (where, _), value in found.items() if where == "node"} == {(0.0, 0.0)}
    assert found["between", "ring"] == (1.2, 1.2)
    assert found["between", "pairs"] == found["between", "all_to_all"] == (1.45, 1.2)
    assert found["all", "ring"] == (0.6, 0.6)
    assert found["all", "pairs"] == (1.05, 0.8)
