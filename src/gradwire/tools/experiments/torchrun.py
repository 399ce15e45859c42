"""``gradwire train`` under torchrun: the process group, and with it any number of machines, is torchrun's."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import torch.distributed as dist

import gradwire as gw
from gradwire.errors import GradwireError
from gradwire.exchange.drivers.tables import all_gather_tables, broadcast_table
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.errors import RunError, UsageError
from gradwire.tools.experiments.folder import RunFolder
from gradwire.tools.experiments.run_record import Audience, config_of, default_folder, report
from gradwire.tools.experiments.worker import train_in_group

__all__ = ["train_under_torchrun"]


def train_under_torchrun(
    plan: RunConfig, audience: Audience, *, folder: Path | None, overwrite: bool, stop_after: int | None
) -> Path:
    """Train on the group that torchrun gives; rank 0 alone writes the run folder and speaks.

    Raises:
        GradwireError: on every rank where rank 0 could not make the folder, or as training does.
    """
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size == 1:
        raise UsageError("1 worker exchanges nothing: give torchrun --nproc-per-node 2 or more, or --simulate")
    plan = dataclasses.replace(plan, workers=world_size)
    gw.warm_up(plan.method)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    run = RunFolder(_agree_on_folder(plan, folder, overwrite))
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


def _agree_on_folder(plan: RunConfig, folder: Path | None, overwrite: bool) -> Path:
    """Let rank 0 make the run folder and tell all ranks its path, or why there is none."""
    answer = {"path": "", "problem": ""}
    if dist.get_rank() == 0:
        try:
            run = RunFolder.create(folder or default_folder(plan), overwrite=overwrite)
            run.write_config(config_of(plan))
            answer["path"] = str(run.path.absolute())
        except GradwireError as error:
            answer["problem"] = str(error)
    group = dist.distributed_c10d._get_default_group()
    path, problem = broadcast_table(answer, "run folder", group, _answered)
    if not path:
        raise RunError(problem or "rank 0 made no run folder")
    # Every rank writes its part of a checkpoint there: better to refuse now than at the last step.
    seen = all_gather_tables(Path(path).is_dir(), "sight of the run folder", group, _flag)
    if not all(seen):
        raise UsageError(f"rank {seen.index(False)} does not see the run folder {path}: give --out a shared folder")
    return Path(path)


def _answered(table: Any) -> tuple[str, str]:
    path, problem = table["path"], table["problem"]
    if not isinstance(path, str) or not isinstance(problem, str):
        raise TypeError("a path and a problem are expected")
    return path, problem


def _flag(table: Any) -> bool:
    if not isinstance(table, bool):
        raise TypeError("true or false is expected")
    return table
