"""Steps whose passes are sleeps: DDP buckets, orders and hands over gradients as it does in real steps."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from alone import group_of_one
from gradwire.model.profile import ReadyBucket, Timeline
from gradwire.tools.bench.compute import SleepingCompute, make_compute
from gradwire.tools.bench.models import bench_model
from gradwire.tools.experiments.errors import RunError
from gradwire.tools.experiments.launch import loopback

CAP_MB = 4e-4
"""About 100 float32 elements, so that a small module has several buckets."""


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in loopback().items():
        monkeypatch.setenv(name, os.environ.get(name, value))
    with group_of_one():
        yield


class Clock:
    """Passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def three_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 10), nn.Linear(10, 4))


TIMELINE = Timeline(
    forward_s=1.0,
    buckets=(
        ReadyBucket(names=("2.bias", "2.weight"), numel=44, ready_s=0.5),
        ReadyBucket(names=("1.weight",), numel=120, ready_s=2.0),
        ReadyBucket(names=("1.bias", "0.bias", "0.weight"), numel=118, ready_s=3.5),
    ),
    backward_s=4.0,
    after_s=0.25,
)


class Seen:
    """A hook that notes each bucket, takes its time, and spoils the bucket, as an exchange would."""

    def __init__(self, module: nn.Module, clock: Clock, takes_s: float) -> None:
        self.names = {id(p): name for name, p in module.named_parameters()}
        self.clock, self.takes_s = clock, takes_s
        self.steps: list[list[tuple[float, tuple[str, ...]]]] = []

    def hook(self, state, bucket):  # type: ignore[no-untyped-def] # DDP compares annotations with types
        if not bucket.index():
            self.steps.append([])
        self.steps[-1].append((self.clock(), tuple(self.names[id(p)] for p in bucket.parameters())))
        self.values = bucket.buffer().clone()
        self.clock.sleep(self.takes_s)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer().fill_(7.0))
        return future


def sleeping(takes_s: float, gradients: dict[str, torch.Tensor] | None = None) -> tuple[SleepingCompute, Seen, Clock]:
    module, clock = three_layers(), Clock()
    made = {name: torch.randn_like(p) for name, p in module.named_parameters()}
    compute = SleepingCompute(module, gradients or made, TIMELINE, CAP_MB, clock, clock.sleep)
    seen = Seen(module, clock, takes_s)
    compute.wrapped.register_comm_hook(None, seen.hook)
    return compute, seen, clock


def step(compute: SleepingCompute) -> None:
    compute.forward().backward()  # type: ignore[no-untyped-call]
    compute.update()


@pytest.mark.usefixtures("alone")
def test_buckets_reach_the_hook_at_their_measured_times_in_the_measured_layout() -> None:
    compute, seen, clock = sleeping(takes_s=0.0)
    for _ in range(3):
        step(compute)
    # DDP lays its buckets out anew, in the order of arrival, after the first step.
    for number in (1, 2):
        began = number * 5.25
        layout = [names for _, names in seen.steps[number]]
        assert [n for names in layout for n in names] == [n for b in TIMELINE.buckets for n in b.names]
        ends = {b.names[-1]: b.ready_s for b in TIMELINE.buckets}
        for when, names in seen.steps[number]:
            expected = max((s for name, s in ends.items() if name in names), default=None)
            if expected is not None:
                assert when == pytest.approx(began + 1.0 + expected)
    assert clock() == pytest.approx(3 * (1.0 + 4.0 + 0.25))


@pytest.mark.usefixtures("alone")
def test_a_hook_delays_the_backward_pass_by_the_time_it_takes() -> None:
    compute, seen, clock = sleeping(takes_s=0.125)
    step(compute)
    before = clock()
    step(compute)
    hooks = len(seen.steps[1])
    assert hooks >= 2
    assert clock() - before == pytest.approx(5.25 + 0.125 * hooks)
    assert seen.steps[1][-1][0] == pytest.approx(before + 1.0 + 3.5 + 0.125 * (hooks - 1))


@pytest.mark.usefixtures("alone")
def test_every_step_exchanges_the_same_gradients_though_the_exchange_overwrites_them() -> None:
    gradients = {name: torch.full_like(p, i + 1.0) for i, (name, p) in enumerate(three_layers().named_parameters())}
    kept = {name: g.clone() for name, g in gradients.items()}
    compute, seen, _ = sleeping(0.0, gradients)
    for _ in range(3):
        step(compute)
        last = seen.steps[-1][-1][1]
        assert torch.equal(seen.values, torch.cat([kept[name].flatten() for name in last]))
    assert all(torch.equal(gradients[name], kept[name]) for name in kept)
    assert all(bool((p.grad == 7.0).all()) for p in compute.wrapped.parameters() if p.grad is not None)


@pytest.mark.usefixtures("alone")
def test_a_timeline_of_another_module_is_refused() -> None:
    module = nn.Linear(3, 2)
    gradients = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    with pytest.raises(RunError, match="other parameters"):
        SleepingCompute(module, gradients, TIMELINE, None)


@pytest.mark.usefixtures("alone")
def test_a_sleeping_models_gradients_are_its_own() -> None:
    model = bench_model("lenet")
    batch = model.batch(torch.Generator().manual_seed(0))
    real = make_compute(model, batch, None)
    real.forward().backward()  # type: ignore[no-untyped-call]
    names = list(dict(real.wrapped.module.named_parameters()))
    bucket = ReadyBucket(names=tuple(reversed(names)), numel=1, ready_s=0.0)
    still = Timeline(forward_s=0.0, buckets=(bucket,), backward_s=0.0, after_s=0.0)
    asleep: Any = make_compute(model, batch, still)
    asleep.forward().backward()
    for one, other in zip(real.wrapped.parameters(), asleep.wrapped.parameters()):
        assert one.grad is not None
        assert torch.equal(one.grad, other.grad)
