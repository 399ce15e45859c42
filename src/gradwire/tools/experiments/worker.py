"""A worker: one process of a real group, under our launcher or under torchrun.

Started by :mod:`gradwire.tools.experiments.launch`, as a fork or as ``python -m gradwire.tools.experiments.worker``, it
reads its part from the environment (:class:`Part`) and tells its parent about rows and its end over a pipe, one JSON
object a line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gradwire as gw
from gradwire.errors import GradwireError
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.engines import real_engine
from gradwire.tools.experiments.folder import RunFolder
from gradwire.tools.experiments.stopping import stops_on
from gradwire.tools.experiments.train import OnStep, Row, Trainer
from gradwire.tools.forking import wait_for_parent
from gradwire.tools.processes import die_with_parent

__all__ = ["ENVIRONMENT", "Part", "main", "prepare", "train_in_group"]

ENVIRONMENT = "GRADWIRE_WORKER"


@dataclass(frozen=True, kw_only=True)
class Part:
    """What the launcher tells a worker, as JSON in the environment variable ``GRADWIRE_WORKER``.

    ``address`` and ``port`` are the store's; ``serves`` tells the one worker that is to serve it, where the launcher
    does not.
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

    Kernels are loaded first, so that no step's time holds it.

    Returns:
        Whether the training stopped, with a checkpoint, since SIGTERM asked one of the ranks to.
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


class _Passed(logging.Handler):
    """Passes the library's warnings on."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        # A parent that is gone ends this process by itself.
        with contextlib.suppress(OSError):
            self._tell(record.getMessage())


def prepare(variables: Mapping[str, str]) -> None:
    """Load what all workers of a run need, once, before they are forked; starts no thread."""
    import torch._dynamo

    torch.set_num_threads(1)
    part = Part(**json.loads(variables[ENVIRONMENT]))
    gw.warm_up(RunConfig.from_json(RunFolder(Path(part.folder)).read_config()["plan"]).method)


def main() -> None:
    """Run one worker to its end; every end is told to the parent before the process leaves."""
    part = Part(**json.loads(os.environ.pop(ENVIRONMENT)))
    wait_for_parent(part.parent)
    die_with_parent(part.parent)
    pipe = os.fdopen(part.pipe, "wb", buffering=0)

    def tell(kind: str, **content: Any) -> None:
        pipe.write((json.dumps({"kind": kind, **content}) + "\n").encode())

    logging.getLogger("gradwire").addHandler(_Passed(lambda text: tell("notice", text=text)))
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


def _work(part: Part, on_row: Callable[[Row], None], on_step: OnStep) -> None:
    folder = RunFolder(Path(part.folder))
    plan = RunConfig.from_json(folder.read_config()["plan"])
    store = dist.TCPStore(part.address, part.port, is_master=part.serves, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=part.rank, world_size=part.world_size)
    train_in_group(plan, folder, on_row, on_step, resume=part.resume, stop_after=part.stop_after)
    # The worker that serves the store must not be the first to leave.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
