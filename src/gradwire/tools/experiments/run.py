"""Train, resume and compare runs, for the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

import gradwire as gw
from gradwire.errors import BackendError, GradwireError
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.engine import build_model, link_options
from gradwire.tools.experiments.engines import simulated_engine
from gradwire.tools.experiments.errors import RunError, UsageError
from gradwire.tools.experiments.folder import RunFolder, checkpoint_steps, write_durably
from gradwire.tools.experiments.launch import run_workers
from gradwire.tools.experiments.run_record import (
    MEMBERSHIP,
    Audience,
    check_workers,
    config_of,
    default_folder,
    report,
    slug,
)
from gradwire.tools.experiments.train import OnStep, Row, Trainer
from gradwire.tools.experiments.worker import stops_on, train_under_torchrun
from gradwire.tools.lab import missing


def under_torchrun() -> bool:
    """Return whether torchrun (or another launcher with its variables) started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def check_link(plan: RunConfig) -> None:
    """Raise here what a link would raise in every worker: a wrong method, pattern or collective.

    Also refuse a second momentum in the optimizer, which no link sees, and an average that no evaluation would use.
    """
    method = gw.method(plan.method)
    if method.traits.owns_momentum and (plan.task.optimizer != "sgd" or plan.task.momentum):
        raise UsageError(f"{method!r} brings its own momentum: use --optimizer sgd --momentum 0 with it")
    if plan.task.ema and method.traits.local_steps and not method.traits.outcomes_differ:
        raise UsageError(
            "ema: with local steps the global parameters are evaluated, of which no average is kept: leave --ema out"
        )
    # A link leaves out what Auto(residuals=True) adds where an option refuses it.
    tried = method.candidates if isinstance(method, gw.Auto) and not plan.simulate else (method,)
    # A simulation has no fallback, and RunConfig has refused one.
    model = build_model(plan)
    beside = link_options(plan, plan.task.build_optimizer(model))
    options = beside | {"fallback": None, "fallback_limit": None}
    if plan.simulate and method.traits.needs_link_cost:
        raise UsageError(
            f"{method!r} takes what a message costs from the link, and simulated workers have none: give CAT's "
            "fixed_bytes a number, or use real workers"
        )
    for one in tried:
        gw.SimulatedLink(model.named_parameters(), one, plan.workers, **options)
    if not plan.simulate:
        gw.check_options(method, **beside)


def check_machine(plan: RunConfig) -> None:
    """Refuse a run that this machine cannot start, before a folder is made.

    Raises:
        UsageError: more workers than it can start.
        BackendError: an emulated cluster is asked for, and the platform, root or iproute2 is missing.
    """
    if not plan.simulate:
        check_workers(plan.workers)
    problem = missing() if plan.lab is not None else None
    if problem:
        raise BackendError(problem)


def train(
    plan: RunConfig,
    audience: Audience,
    *,
    folder: Path | None = None,
    overwrite: bool = False,
    stop_after: int | None = None,
) -> Path:
    """Train by the settings and return the run folder.

    Raises:
        GradwireError: the run cannot be started, or has failed; the message says what to do.
    """
    check_link(plan)
    plan.task.check_data()
    if under_torchrun() and not plan.simulate:
        if plan.lab is not None:
            raise UsageError("--lab starts its own workers: call gradwire train --lab without torchrun")
        return train_under_torchrun(plan, audience, folder=folder, overwrite=overwrite, stop_after=stop_after)
    check_machine(plan)
    run = RunFolder.create(folder or default_folder(plan), overwrite=overwrite)
    run.write_config(config_of(plan))
    execute(plan, run, audience, resume=False, stop_after=stop_after)
    return run.path


def resume(folder: Path, audience: Audience, *, stop_after: int | None = None) -> Path:
    """Continue a run from its newest checkpoint, bit-identical to not having stopped.

    Raises:
        RunError: the folder holds no run or no checkpoint.
        UsageError: torchrun started this process; a resumed run starts its own workers.
    """
    if under_torchrun():
        raise UsageError("--resume starts the run's own workers: call gradwire train --resume without torchrun")
    run, plan = planned(folder)
    if MEMBERSHIP in run.read_config():
        raise UsageError(
            f"{folder} is of a worker that came and went (--join): join again, by --resume {shlex.quote(str(folder))} "
            "--join ADDRESS"
        )
    steps = checkpoint_steps(folder)
    if steps[-1] >= plan.task.steps:
        audience.say(f"{folder} is finished: {steps[-1]} of {plan.task.steps} steps")
        # A run that was interrupted at its last rows has none.
        report([folder], folder)
        return folder
    plan.task.check_data()
    check_machine(plan)
    audience.say(f"resuming after step {steps[-1]} of {plan.task.steps}")
    execute(plan, run, audience, resume=True, stop_after=stop_after)
    return folder


def planned(folder: Path) -> tuple[RunFolder, RunConfig]:
    """Return a run that can be resumed, and its plan.

    Raises:
        RunError: the folder holds no run or no checkpoint.
    """
    run, plan = begun(folder)
    if not checkpoint_steps(folder):
        raise RunError(f"{folder} holds no checkpoint to resume from: train again with --overwrite")
    return run, plan


def begun(folder: Path) -> tuple[RunFolder, RunConfig]:
    """Return a run, which may have no checkpoint yet, and its plan.

    Raises:
        RunError: the folder holds no run.
    """
    run = RunFolder(folder)
    config = run.read_config()
    try:
        plan = RunConfig.from_json(config["plan"])
    except (KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{folder / 'config.json'} holds no plan of this version: {error}") from error
    return run, plan


def execute(plan: RunConfig, run: RunFolder, audience: Audience, *, resume: bool, stop_after: int | None) -> None:
    """Compile, then train in this process or on local workers, then write the report."""
    seconds = gw.warm_up(plan.method)
    if seconds > 0.5:
        audience.say(f"compiling kernels, once per machine: {seconds:.1f} s")
    if gw.method(plan.method).traits.direction:
        audience.say(
            f"{plan.method} gives a direction to step in, with entries of about 1, not a mean: use SGD without "
            "momentum (--momentum 0) and a learning rate of the order of 1e-4 to 1e-3 where SGD has 0.1 (--lr)"
        )
    model = build_model(plan)
    caution = gw.method(plan.method).caution(plan.task.build_optimizer(model), dict(model.named_parameters()))
    if caution is not None:
        audience.say(caution)
    audience.start(plan)
    with _resumable(run.path, audience):
        _carry_out(plan, run, audience, resume=resume, stop_after=stop_after)
    report([run.path], run.path)


@contextlib.contextmanager
def _resumable(folder: Path, audience: Audience) -> Iterator[None]:
    """Say how to continue the training if it is interrupted in the body."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        steps = checkpoint_steps(folder)
        if steps:
            command = f"gradwire train --resume {shlex.quote(str(folder))}"
            audience.say(f"stopped; a checkpoint of step {steps[-1]} is kept: {command}")
        raise


def _carry_out(plan: RunConfig, run: RunFolder, audience: Audience, *, resume: bool, stop_after: int | None) -> None:
    if plan.simulate:
        simulate(plan, run, audience.row, audience.step, resume=resume, stop_after=stop_after)
    else:
        run_workers(
            plan,
            run.path,
            audience.row,
            on_step=audience.step,
            resume=resume,
            stop_after=stop_after,
            on_logs=audience.logs,
            on_notice=audience.say,
        )


def simulate(
    plan: RunConfig,
    run: RunFolder,
    on_row: Callable[[Row], None],
    on_step: OnStep,
    *,
    resume: bool,
    stop_after: int | None,
) -> None:
    """Train with all workers in this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(plan.threads)
    try:
        engine = simulated_engine(plan)
        with run.locked(), stops_on(signal.SIGINT, signal.SIGTERM) as asked_to_stop:
            trainer = Trainer(plan, engine, run, on_row, on_step, asked_to_stop)
            if resume:
                trainer.load()
            trainer.run(stop_after)
        # Also after the last row, when the training no longer asks: what would come next is not begun.
        if asked_to_stop() == signal.SIGINT:
            raise KeyboardInterrupt
        if asked_to_stop():
            raise SystemExit(128 + asked_to_stop())
    finally:
        torch.set_num_threads(threads)


def compare(
    plan: RunConfig,
    methods: Sequence[str],
    audience: Audience,
    *,
    folder: Path | None = None,
    overwrite: bool = False,
) -> tuple[Path, list[Path]]:
    """Train the same task once with each method; return the folder and the run folders in it.

    Raises:
        UsageError: the same method twice, or a folder in which a comparison has begun, without ``overwrite``.
    """
    specs = [repr(gw.method(spec)) for spec in methods]
    if len(set(specs)) < len(specs):
        raise UsageError(f"a method is named twice: {', '.join(methods)}")
    if under_torchrun() and not plan.simulate:
        raise UsageError("compare starts its own workers: under torchrun, use train once a method, then report")
    for spec in methods:
        check_link(dataclasses.replace(plan, method=spec))
    plan.task.check_data()
    check_machine(plan)
    if folder is not None and not overwrite and (folder / "compare.json").exists():
        raise UsageError(f"{folder} holds a comparison: {_state(folder, methods)}")
    named = folder or default_folder(dataclasses.replace(plan, method="compare"))
    top = RunFolder.create(named, overwrite=overwrite).path
    write_durably(top / "compare.json", (json.dumps({"methods": specs}, indent=2) + "\n").encode())
    runs = []
    for spec in methods:
        part = dataclasses.replace(plan, method=spec)
        runs.append(train(part, audience, folder=top / slug(spec)))
    report(runs, top)
    return top, runs


def _state(top: Path, methods: Sequence[str]) -> str:
    """Describe how far the runs of a comparison are, and how to go on with them instead of deleting them."""
    told, advice, without = list[str](), [f"gradwire report {shlex.quote(str(top))} shows it"], list[str]()
    begun = sorted(path.parent for path in top.glob("*/config.json"))
    for path in dict.fromkeys([*(top / slug(spec) for spec in methods), *begun]):
        try:
            steps = planned(path)[1].task.steps
        except GradwireError:
            without.append(path.name)
            continue
        done = checkpoint_steps(path)[-1]
        if done >= steps:
            told.append(f"{path.name} is finished")
        else:
            told.append(f"{path.name} has a checkpoint of step {done} of {steps}")
            advice.append(f"gradwire train --resume {shlex.quote(str(path))} continues {path.name}")
    if without:
        told.append(f"{', '.join(without)} {'has' if len(without) == 1 else 'have'} no checkpoint")
        advice.append(
            f"gradwire train with the same options, one --method and --out {shlex.quote(f'{top}/NAME')} --overwrite "
            "trains one of these"
        )
    return (
        f"{', '.join(told)}. {'; '.join(advice)}. To compare anew, choose another --out, or add --overwrite, which "
        "deletes all runs in the folder"
    )


def speaks() -> bool:
    """Return whether this process reports to the user: under torchrun only rank 0 does."""
    return os.environ.get("RANK", "0") == "0"
