"""The recorder: buckets in their order, marks in theirs, by hand and by itself."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from alone import group_of_one
from gradwire.model import profile
from gradwire.model.profile import Profile, Recorder, Timeline
from gradwire.tools.bench.profile import profile_module, profile_name, profile_script
from gradwire.tools.experiments.errors import UsageError, WorkerError

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits.py"


def recorded(automatic: bool) -> Profile:
    with group_of_one():
        module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
        ddp = DistributedDataParallel(module, bucket_cap_mb=0.005)
        recorder = Recorder(ddp, automatic=automatic)
        for _ in range(5):
            if not automatic:
                recorder.begin()
            loss = ddp(torch.ones(2, 64)).sum()
            if not automatic:
                recorder.forward_ended()
            loss.backward()
            if not automatic:
                recorder.backward_ended()
                recorder.end()
        return Profile.of("here", module, recorder)


@pytest.mark.parametrize("automatic", [False, True])
def test_every_parameter_is_in_one_bucket_and_time_moves_forward(automatic: bool) -> None:
    found = recorded(automatic)
    buckets = found.timeline.buckets
    assert sorted(n for b in buckets for n in b.names) == sorted(found.parameters)
    assert len(buckets) > 1
    assert [b.ready_s for b in buckets] == sorted(b.ready_s for b in buckets)
    assert 0 < buckets[0].ready_s <= found.timeline.backward_s
    assert found.timeline.forward_s > 0
    assert Timeline.from_json(found.timeline.to_json()) == found.timeline


FORWARD_S, BACKWARD_S, AFTER_S, PAUSE_S = 4.0, 6.0, 3.5, 100.0


class Busy(torch.autograd.Function):
    """Lets a clock go on while it computes."""

    @staticmethod
    def forward(ctx: Any, clock: SimpleNamespace, x: torch.Tensor) -> torch.Tensor:
        ctx.clock = clock
        clock.now_s += FORWARD_S
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        ctx.clock.now_s += BACKWARD_S
        return None, gradients[0]


class Worker:
    """A module with a recorder, and a clock that only its forward, its backward and the optimizer move."""

    def __init__(self, clock: SimpleNamespace) -> None:
        class Model(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return Busy.apply(clock, super().forward(x))  # type: ignore[no-any-return, no-untyped-call]

        self.clock, self.ddp = clock, DistributedDataParallel(Model(4, 4))
        self.recorder = Recorder(self.ddp, automatic=True)

    def loss(self) -> torch.Tensor:
        return self.ddp(torch.ones(2, 4)).sum()  # type: ignore[no-any-return]

    def optimize(self) -> None:
        self.clock.now_s += AFTER_S

    def accumulate(self) -> None:
        """Take a step of four micro-batches."""
        for micro in range(4):
            with self.ddp.no_sync() if micro < 3 else contextlib.nullcontext():
                self.loss().backward()
        self.optimize()

    def add_up(self) -> None:
        """Take a step of three forwards and one backward."""
        torch.stack([self.loss() for _ in range(3)]).sum().backward()
        self.optimize()

    def evaluate(self) -> None:
        """Take a step, and evaluate."""
        self.loss().backward()
        self.optimize()
        with torch.no_grad():
            self.loss()
            self.clock.now_s += PAUSE_S


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    clock = SimpleNamespace(now_s=0.0)
    clock.perf_counter = lambda: clock.now_s
    monkeypatch.setattr(profile, "time", clock)
    with group_of_one():
        yield Worker(clock)


@pytest.mark.parametrize(
    ("step", "spans"),
    [
        # The last of four backwards is the one whose buckets are exchanged.
        (Worker.accumulate, (4 * FORWARD_S + 3 * BACKWARD_S, BACKWARD_S, AFTER_S)),
        (Worker.add_up, (3 * FORWARD_S, 3 * BACKWARD_S, AFTER_S)),
        # An evaluation is no part of a step.
        (Worker.evaluate, (FORWARD_S, BACKWARD_S, AFTER_S)),
    ],
)
def test_a_step_is_all_that_its_gradients_took(
    worker: Worker, step: Callable[[Worker], None], spans: tuple[float, float, float]
) -> None:
    for _ in range(3):
        step(worker)
    found = worker.recorder.timeline()
    assert found is not None
    assert worker.recorder.steps == 2 + (step is Worker.evaluate)
    assert (found.forward_s, found.backward_s, found.after_s) == spans
    assert [bucket.ready_s for bucket in found.buckets] == [spans[1]]
    assert found.compute_s == sum(spans)


def test_scaling_keeps_proportions() -> None:
    found = recorded(False).timeline
    twice = found.scaled(2 * found.compute_s)
    assert twice.compute_s == pytest.approx(2 * found.compute_s)
    assert twice.buckets[0].ready_s == pytest.approx(2 * found.buckets[0].ready_s)


def test_parameters_that_ddp_ignores_are_no_part_of_a_profile() -> None:
    def make() -> nn.Module:
        module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(torch.float64)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["0.weight", "0.bias"])
        return module

    found = profile_module("x", make, lambda module, step: module(torch.ones(2, 8, dtype=torch.float64)).sum())
    assert list(found.parameters) == ["1.weight", "1.bias"]
    assert {tensor.dtype for tensor in found.tensors().values()} == {torch.float64}


def test_parameters_of_the_root_module_that_ddp_reduces_all_the_same_are_part_of_a_profile() -> None:
    """DDP compares their names with a leading dot when it leaves out ignored ones."""

    def make() -> nn.Module:
        module = nn.Linear(8, 8)
        module.inner = nn.Linear(8, 8)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["bias", "inner.weight"])
        return module

    def loss(module: nn.Module, step: int) -> torch.Tensor:
        inner: nn.Linear = module.module.inner  # type: ignore[assignment,union-attr]
        return (module(torch.ones(2, 8)) + inner.bias).sum()

    found = profile_module("x", make, loss)
    assert list(found.parameters) == ["weight", "bias", "inner.bias"]
    assert {name for bucket in found.timeline.buckets for name in bucket.names} == set(found.parameters)


def test_a_model_and_a_task_are_profiled_by_name() -> None:
    assert profile_name("lenet").numel == 431_080
    assert profile_name("digits").timeline.compute_s > 0
    with pytest.raises(UsageError, match="did you mean 'lenet"):
        profile_name("lenett")


@pytest.mark.ranks
@pytest.mark.skipif(not EXAMPLE.exists(), reason="the examples are not in the wheel")
def test_an_unchanged_script_is_profiled() -> None:
    found = profile_script(EXAMPLE, ["--steps", "200"])
    assert found.numel == 64 * 256 + 256 + 256 * 10 + 10
    assert found.timeline.compute_s > 0


@pytest.mark.ranks
@pytest.mark.parametrize(
    "hook",
    [
        "gw.attach(model, 'terngrad', optimizer=optimizer)",
        "gw.attach(model, 'DiLoCo(every=2)')",
        "model.register_comm_hook(None, default_hooks.fp16_compress_hook)",
    ],
)
def test_a_script_with_a_hook_of_its_own_is_profiled_without_it(tmp_path: Path, hook: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, gradwire as gw, torch.distributed as dist\n"
        "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n"
        "dist.init_process_group('gloo')\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(40, 30))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        f"{hook}\n"
        "for _ in range(20):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.ones(2, 40)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    found = profile_script(script, [])
    assert found.numel == 40 * 30 + 30
    assert found.timeline.compute_s > 0


@pytest.mark.ranks
def test_a_script_may_print_bytes_that_are_no_text(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "for stream in (sys.stdout, sys.stderr):\n"
        "    stream.buffer.write(b'\\xe9\\n')\n"
        "raise ValueError('no such data')\n"
    )
    with pytest.raises(WorkerError, match="no such data"):
        profile_script(script, [])


@pytest.mark.ranks
def test_a_script_that_trains_nothing_is_refused_with_its_last_error(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise ValueError('no such data')\n")
    with pytest.raises(WorkerError, match="no such data"):
        profile_script(script, [])
    with pytest.raises(UsageError, match="does not exist"):
        profile_script(tmp_path / "other.py", [])
    assert sys.argv[0] != str(script)
