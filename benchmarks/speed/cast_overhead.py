"""What a step of a small model takes by the casts beside DDP's own all-reduce and its hooks.

    python benchmarks/speed/cast_overhead.py --json benchmarks/results/speed/cast_overhead.json

Every rank has one DDP module for each exchange, and takes a step with one after the other, in alternating order. So
what disturbs the machine disturbs all of them alike, and differences of a hundredth are seen where separate runs
scatter by a tenth. Ranks are processes of one machine, which talk over its loopback interface.

- ``ddp``: DDP without a hook, whose all-reduce is started in C++.
- ``hook``: ``allreduce_hook`` of PyTorch, the same from Python.
- ``fp16``: ``fp16_compress_hook`` of PyTorch.
- ``gradwire fp32``, ``gradwire bf16``: this library.

Steps are to be timed on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.runs import write
from gradwire.tools.bench.models import bench_model

EXCHANGES = ("ddp", "hook", "fp16", "gradwire fp32", "gradwire bf16")
CELLS = tuple((model, ranks) for model in ("lenet", "resnet", "transformer") for ranks in (2, 4))
WARM, STEPS, BLOCKS = 30, 400, 20
"""Steps before the measurement, steps in it, and blocks of steps whose means give the standard error."""

Row = dict[str, Any]


def module_of(exchange: str, model: str) -> DistributedDataParallel:
    """Return a model in DDP with an exchange."""
    torch.manual_seed(0)
    module = DistributedDataParallel(bench_model(model).make())
    if exchange == "hook":
        module.register_comm_hook(None, allreduce_hook)
    elif exchange == "fp16":
        module.register_comm_hook(None, fp16_compress_hook)
    elif exchange != "ddp":
        # The link lives as long as the module, whose hook holds it.
        gw.attach(module, exchange.removeprefix("gradwire "))
    return module


def times(rank: int, ranks: int, model: str, store: str, told: Connection) -> None:
    """Send the seconds of each exchange's steps on this rank, ``[exchanges, steps]``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    bench = bench_model(model)
    batch = bench.batch(torch.Generator().manual_seed(rank))
    modules = [module_of(exchange, model) for exchange in EXCHANGES]
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.01) for module in modules]
    found = np.zeros((len(EXCHANGES), STEPS))
    for step in range(-WARM, STEPS):
        for i in list(range(len(EXCHANGES)))[:: 1 if step % 2 else -1]:
            began_s = time.perf_counter()
            optimizers[i].zero_grad()
            bench.loss(modules[i], batch).backward()
            optimizers[i].step()
            if step >= 0:
                found[i, step] = time.perf_counter() - began_s
    told.send(found)
    dist.barrier()
    dist.destroy_process_group()


def measure(model: str, ranks: int, work: Path) -> list[Row]:
    """Return a row for each exchange: its median, and how much longer than DDP its steps take."""
    context, store = multiprocessing.get_context("spawn"), work / f"{model}-{ranks}-{os.getpid()}"
    pipes, workers = [], []
    for rank in range(ranks):
        mine, theirs = context.Pipe(duplex=False)
        workers.append(context.Process(target=times, args=(rank, ranks, model, str(store), theirs)))
        workers[-1].start()
        pipes.append(mine)
    found = np.mean([pipe.recv() for pipe in pipes], axis=0)
    for worker in workers:
        worker.join()
    # Steps that something else has held up are left out of all exchanges alike.
    usual = found.max(axis=0) < 2 * np.median(found)
    rows = []
    for exchange, own in zip(EXCHANGES, found):
        differences = (own - found[0])[usual]
        blocks = [block.mean() for block in np.array_split(differences, BLOCKS)]
        rows.append(
            {
                "model": model,
                "ranks": ranks,
                "exchange": exchange,
                "step_s": median(own[usual]),
                "over_ddp_s": float(np.mean(blocks)),
                "standard_error_s": float(np.std(blocks, ddof=1) / BLOCKS**0.5),
                "steps": int(usual.sum()),
            }
        )
    return rows


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/cast_overhead"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for model, ranks in CELLS:
        found = measure(model, ranks, arguments.work)
        rows += found
        for row in found:
            print(
                f"{model:12s}{ranks} ranks  {row['exchange']:14s}{1e3 * row['step_s']:7.2f} ms, over DDP "
                f"{1e3 * row['over_ddp_s']:+.2f} ± {1e3 * row['standard_error_s']:.2f} ms "
                f"({100 * row['over_ddp_s'] / found[0]['step_s']:+.1f} %)",
                flush=True,
            )
    write(arguments.json, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
