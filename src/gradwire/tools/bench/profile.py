"""Profile a task, a model of the step benchmark, or the user's own script."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.exchange.planning import Options
from gradwire.model.profile import Profile, Recorder
from gradwire.tools.bench.models import MODELS
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.engine import build_model
from gradwire.tools.experiments.errors import UsageError, WorkerError, check_known
from gradwire.tools.experiments.launch import loopback
from gradwire.tools.experiments.order import share
from gradwire.tools.experiments.tasks import ALL, build
from gradwire.tools.processes import die_with_parent, look_beside, module_command, termination_unwinds

STEPS = 12
"""Steps to profile. The first two are not counted: DDP lays out its buckets in them."""

ENVIRONMENT = "GRADWIRE_PROFILE"

END_S = 10.0
"""Seconds in which torchrun may end its worker."""

UNPROFILED = {"steps", "lr", "optimizer", "momentum", "schedule", "weight_decay", "eval_every", "ema"}
"""Settings of every task that a profile does not depend on."""


def profile_name(name: str, data: str | None = None) -> Profile:
    """Profile a task, with a worker's share of its batch, or a model of the step benchmark.

    Raises:
        UsageError: there is no task or model of that name.
        DataError: the task's data is missing.
    """
    if name in MODELS:
        model = MODELS[name]
        batch = model.batch(torch.Generator().manual_seed(0))
        return profile_module(name, model.make, lambda module, step: model.loss(module, batch))
    tasks = [task.name for task in ALL]
    check_known("task or model", name, [*tasks, *MODELS], " to profile, which is no .py script either")
    return profile_plan(RunConfig(task=build(name, data=data)))


def usual_options(name: str) -> Options:
    """Return the options with which a task is trained unless others are given; the defaults for anything else."""
    return Options(min_numel=next((task.min_numel for task in ALL if task.name == name), None))


def options_of_steps(plan: RunConfig) -> Options:
    """Return the options of a training run that change what its steps exchange; warm-up has ended in most of them."""
    given = plan.link_options()
    return Options(**{name: given[name] for name in ("collective", "exclude", "min_numel")})


def profile_plan(plan: RunConfig) -> Profile:
    """Profile the task of a training run, with a worker's share of its batch.

    Raises:
        UsageError: the settings do not fit the data.
        DataError: the task's data is missing.
    """
    plan.task.check_data()
    source = plan.task.load()
    order = plan.task.order(plan.seed, source.samples, plan.workers)
    part = share(order.batch, 0, plan.workers)

    def loss(module: nn.Module, step: int) -> torch.Tensor:
        inputs, targets = source.batch(order.indices(step), part, seed=plan.seed, step=step)
        return plan.task.loss(module(inputs), targets)

    return profile_module(plan.task.name, lambda: build_model(plan), loss)


def profiled_by_name(plan: RunConfig) -> bool:
    """Return whether :func:`profile_name` profiles the task with the same model, data and share of the batch."""
    usual = RunConfig(task=build(plan.task.name))
    asked, known = plan.task.settings(), usual.task.settings()
    return plan.workers == usual.workers and all(asked[key] == known[key] for key in asked.keys() - UNPROFILED)


def profile_module(name: str, make: Callable[[], nn.Module], loss: Callable[[nn.Module, int], torch.Tensor]) -> Profile:
    """Profile a module by a few steps of one worker on one thread.

    Args:
        name: Name of the module in the profile.
        make: Builds the module.
        loss: Returns the loss of a module in a step.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    own = not dist.is_initialized()
    if own:
        os.environ.update({k: v for k, v in loopback().items() if k not in os.environ})
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module = make()
        ddp = DistributedDataParallel(module, process_group=None if own else _alone())
        recorder = Recorder(ddp)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        for step in range(STEPS):
            if step == 2:
                recorder.reset()
            recorder.begin()
            optimizer.zero_grad()
            value = loss(ddp, step)
            recorder.forward_ended()
            value.backward()
            recorder.backward_ended()
            optimizer.step()
            recorder.end()
        return Profile.of(name, module, recorder)
    finally:
        if own:
            dist.destroy_process_group()
        torch.set_num_threads(threads)


def _alone() -> Any:
    """Return a group of this rank only; the other ranks take no part."""
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def profile_script(script: Path, arguments: Sequence[str]) -> Profile:
    """Run the first steps of a DDP script, unchanged, as its only worker, and profile its first DDP module.

    Communication hooks that the script registers on it, such as that of :func:`gradwire.attach`, exchange nothing.

    Raises:
        UsageError: the script does not exist.
        WorkerError: the script ended before it had taken enough steps; the message holds its last line.
    """
    if not script.is_file():
        raise UsageError(f"script {script} does not exist")
    with termination_unwinds(), tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "profile.json"
        words = [*module_command("torch.distributed.run"), "--standalone", "--nproc-per-node=1", "--no-python"]
        with subprocess.Popen(
            [*words, *module_command("gradwire.tools.bench.profile"), str(script), *arguments],
            env={"OMP_NUM_THREADS": "1", **loopback(), **os.environ, ENVIRONMENT: str(out)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A script may print bytes that are no text, and only a line of it is shown.
            errors="replace",
            preexec_fn=partial(die_with_parent, os.getpid()),
        ) as process:
            try:
                _, said = process.communicate()
            finally:
                _end(process)
        if not out.exists():
            lines = [line for line in said.splitlines() if line.strip()]
            errors = [line for line in lines if "Error" in line and "ChildFailed" not in line]
            told = (errors or lines or ["it wrote nothing"])[-1]
            raise WorkerError(f"{script} took fewer than {STEPS} steps with a DDP module: {told.strip()}")
        return Profile.read(out)


def _end(process: subprocess.Popen[str]) -> None:
    """End torchrun, which ends its worker, unless it has ended."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()


def main() -> None:
    """Run a script until its first DDP module has taken enough steps, write the profile, and exit."""
    # torchrun starts it in a session of its own.
    die_with_parent(os.getppid())
    out = Path(os.environ[ENVIRONMENT])
    script, *arguments = sys.argv[1:]
    original: Callable[..., None] = DistributedDataParallel.__init__
    watched: list[Recorder] = []

    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if watched:
            return
        recorder = Recorder(self, automatic=True)
        # A hook of the script, such as that of gradwire.attach, would be refused: DDP takes one in its life.
        self._comm_hooks.clear()
        self.register_comm_hook = _pass_over
        watched.append(recorder)
        self.register_forward_pre_hook(lambda module, inputs: _enough(script, module, recorder, out))

    DistributedDataParallel.__init__ = initialize  # type: ignore[method-assign]
    sys.argv = [script, *arguments]
    look_beside(script)
    runpy.run_path(script, run_name="__main__")


def _pass_over(state: object, hook: object) -> None:
    """Take no hook: steps are profiled without an exchange."""


def _enough(script: str, module: Any, recorder: Recorder, out: Path) -> None:
    if recorder.steps >= STEPS:
        Profile.of(script, module.module, recorder).save(out)
        _leave()


def _leave() -> NoReturn:
    # The script's data loaders, logs and process group are not needed any more.
    os._exit(0)


if __name__ == "__main__":
    main()
