"""Train as one rank of a process group, as a local worker or under torchrun; a signal stops all ranks together."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

import gradwire as gw
from gradwire.errors import GradwireError
from gradwire.exchange.drivers.tables import all_gather_tables, broadcast_table
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.engines import real_engine
from gradwire.tools.experiments.errors import RunError, UsageError
from gradwire.tools.experiments.folder import RunFolder
from gradwire.tools.experiments.run_record import Audience, config_of, default_folder, report
from gradwire.tools.experiments.train import OnStep, Row, Trainer
from gradwire.tools.processes import die_with_parent, wait_for_parent

ENVIRONMENT = "GRADWIRE_WORKER"


@dataclass(frozen=True, kw_only=True)
class Part:
    """The launcher's instructions to a worker, as JSON in the environment variable ``GRADWIRE_WORKER``.

    Attributes:
        address, port: Where the group's store listens.
        serves: Whether this worker serves the store, if the launcher does not.
        pipe: File descriptor for the worker's messages.
        parent: Process number of the launcher.
    """

    rank: int
    world_size: int
    address: str
    port: int
    serves: bool
    pipe: int
    parent: int
    folder: str
    resume: bool
    stop_after: int | None

    def to_json(self) -> str:
        """Return the text for the environment."""
        return json.dumps(dataclasses.asdict(self))


def prepare(variables: Mapping[str, str]) -> None:
    """Load what all workers of a run need, before they are forked; starts no thread."""
    import torch._dynamo

    torch.set_num_threads(1)
    part = Part(**json.loads(variables[ENVIRONMENT]))
    gw.warm_up(RunConfig.from_json(RunFolder(Path(part.folder)).read_config()["plan"]).method)


def main() -> None:
    """Run one worker, and tell the parent how it ended before the process exits."""
    part = Part(**json.loads(os.environ.pop(ENVIRONMENT)))
    wait_for_parent(part.parent)
    die_with_parent(part.parent)
    pipe = os.fdopen(part.pipe, "wb", buffering=0)

    def tell(kind: str, **content: Any) -> None:
        pipe.write((json.dumps({"kind": kind, **content}) + "\n").encode())

    logging.getLogger("gradwire").addHandler(_PassOn(lambda text: tell("notice", text=text)))
    try:
        _work(
            part,
            lambda row: tell("row", row=dict(row)),
            lambda step, activity: tell("step", step=step, activity=activity),
        )
        tell("done")
    except BaseException as error:
        traceback.print_exc()
        expected = isinstance(error, GradwireError)
        tell("failure", type=type(error).__name__, message=str(error), expected=expected)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


class _PassOn(logging.Handler):
    """Passes the library's warnings on to the parent."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        # If the parent is gone, this process is ended anyway.
        with contextlib.suppress(OSError):
            self._tell(record.getMessage())


def _work(part: Part, on_row: Callable[[Row], None], on_step: OnStep) -> None:
    folder = RunFolder(Path(part.folder))
    plan = RunConfig.from_json(folder.read_config()["plan"])
    store = dist.TCPStore(part.address, part.port, is_master=part.serves, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=part.rank, world_size=part.world_size)
    train_in_group(plan, folder, on_row, on_step, resume=part.resume, stop_after=part.stop_after)
    # The worker that serves the store must not be the first to leave.
    dist.barrier()
    dist.destroy_process_group()


def train_in_group(
    plan: RunConfig,
    folder: RunFolder,
    on_row: Callable[[Row], None],
    on_step: OnStep,
    *,
    resume: bool,
    stop_after: int | None,
) -> bool:
    """Train on the default process group; every rank calls this with the same plan.

    Kernels are loaded first, so that no measured step includes that.

    Returns:
        Whether the training stopped early, with a checkpoint, because one of the ranks received SIGTERM.
    """
    torch.set_num_threads(plan.threads)
    gw.warm_up(plan.method)
    engine = real_engine(plan)
    with stops_on(signal.SIGTERM) as asked_to_stop:
        trainer = Trainer(plan, engine, folder, on_row, on_step, asked_to_stop)
        if resume:
            trainer.load()
        trainer.run(stop_after)
    engine.close()
    return trainer.stopped


@contextlib.contextmanager
def stops_on(*numbers: signal.Signals) -> Iterator[Callable[[], int]]:
    """Record the first of some signals instead of ending; a second one has its former effect.

    Outside the main thread, where Python handles no signals, nothing changes.

    Args:
        numbers: The signals.

    Yields:
        A function that returns the number of the signal that has arrived; 0: none.
    """
    came = 0

    def arrived() -> int:
        return came

    if threading.current_thread() is not threading.main_thread():
        yield arrived
        return
    before = {number: signal.getsignal(number) for number in numbers}

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = number
        restore(list(before))

    def restore(which: Sequence[signal.Signals]) -> None:
        for one in which:
            signal.signal(one, before[one])

    for number in numbers:
        signal.signal(number, note)
    try:
        yield arrived
    finally:
        restore([number for number in numbers if signal.getsignal(number) is note])


def ranks_started() -> int:
    """Return the number of ranks that a launcher, such as torchrun, says it has started.

    Raises:
        UsageError: its variable is no whole number.
    """
    told = os.environ["WORLD_SIZE"]
    if not told.isdecimal():
        raise UsageError(
            f"WORLD_SIZE is {told!r}, no number of ranks: start all ranks by torchrun, or unset RANK and WORLD_SIZE to "
            "train on this machine alone"
        )
    return int(told)


def make_group() -> None:
    """Make the process group of the launcher that started this process, such as torchrun.

    Raises:
        RunError: its variables are not all there, or the other ranks cannot be reached.
    """
    try:
        dist.init_process_group("gloo")
    except (ValueError, RuntimeError) as error:  # torch's own errors are RuntimeErrors
        raise RunError(
            f"RANK and WORLD_SIZE are set, as by torchrun, and their process group cannot be made: {error}; start all "
            "ranks by torchrun, or unset both to train on this machine alone"
        ) from error


def train_under_torchrun(
    plan: RunConfig, audience: Audience, *, folder: Path | None, overwrite: bool, stop_after: int | None
) -> Path:
    """Train on torchrun's group; only rank 0 makes the run folder and reports.

    Raises:
        GradwireError: rank 0 could not make the folder (raised on every rank), or the training failed.
    """
    world_size = ranks_started()
    if world_size == 1:
        raise UsageError("1 worker exchanges nothing: give torchrun --nproc-per-node 2 or more, or --simulate")
    plan = dataclasses.replace(plan, workers=world_size)
    gw.warm_up(plan.method)
    make_group()
    rank = dist.get_rank()
    with contextlib.ExitStack() as lock:
        run = RunFolder(_agree_on_folder(plan, folder, overwrite, lock))
        if rank == 0:
            audience.start(plan)
        stopped = train_in_group(plan, run, audience.row, audience.step, resume=False, stop_after=stop_after)
        if rank == 0 and not stopped:
            report([run.path], run.path)
    dist.barrier()
    dist.destroy_process_group()
    if stopped:
        raise SystemExit(128 + signal.SIGTERM)
    return run.path


def _agree_on_folder(plan: RunConfig, folder: Path | None, overwrite: bool, lock: contextlib.ExitStack) -> Path:
    """Make the run folder on rank 0, which locks it until ``lock`` is closed, and return its path on every rank."""
    answer = {"path": "", "problem": ""}
    if dist.get_rank() == 0:
        try:
            run = RunFolder.create(folder or default_folder(plan), overwrite=overwrite)
            lock.enter_context(run.locked())
            run.write_config(config_of(plan))
            answer["path"] = str(run.path.absolute())
        except GradwireError as error:
            answer["problem"] = str(error)
    group = dist.distributed_c10d._get_default_group()
    path, problem = broadcast_table(answer, "run folder", group, _read_answer)
    if not path:
        raise RunError(problem or "rank 0 made no run folder")
    # Every rank writes its part of a checkpoint there: better to refuse now than at the last step.
    seen = all_gather_tables(Path(path).is_dir(), "sight of the run folder", group, _read_flag)
    if not all(seen):
        raise UsageError(f"rank {seen.index(False)} does not see the run folder {path}: give --out a shared folder")
    return Path(path)


def _read_answer(table: Any) -> tuple[str, str]:
    path, problem = table["path"], table["problem"]
    if not isinstance(path, str) or not isinstance(problem, str):
        raise TypeError("a path and a problem are expected")
    return path, problem


def _read_flag(table: Any) -> bool:
    if not isinstance(table, bool):
        raise TypeError("true or false is expected")
    return table


if __name__ == "__main__":
    main()
