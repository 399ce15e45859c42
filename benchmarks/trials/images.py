"""Every method at its defaults on held-out images, beside what the library warned of.

    python benchmarks/trials/images.py --data FOLDER --json benchmarks/results/trials/trials_images.json

FOLDER holds CIFAR-10's binary batches. A small convolutional network trains for 300 updates on four processes over Gloo
by DistributedDataParallel, as a user would run it: ``gw.attach(ddp, name, optimizer=optimizer)`` with
``SGD(momentum=0.9)``, and without momentum where the method refuses that one. Four batches are for training; accuracy
is measured on the fifth. All methods see the same batches of a seed, and begin with the same parameters. Rows that are
in the file already are kept, so that the run may be stopped and started again.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.runs import machine
from gradwire.tools.experiments.tasks.readers import read_cifar10

WORKERS, UPDATES, BATCH = 4, 300, 64
RATE = 0.05
HELD_OUT = 5000


def network() -> nn.Sequential:
    """Build three convolutions and two linear layers: 0.31 M parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(64, 64, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 10),
    )  # fmt: skip


def images(folder: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Read training images and labels, then held-out ones; pixels have mean 0 and deviation 1 over the training set."""
    batches = []
    for number in range(1, 6):
        path = next(p for p in (folder / f"data_batch_{number}.bin{end}" for end in ("", ".xz")) if p.exists())
        batches.append(read_cifar10(path))
    x = torch.cat([b[0] for b in batches[:4]]).float()
    mean, deviation = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
    held = (batches[4][0][:HELD_OUT].float() - mean) / deviation
    return (x - mean) / deviation, torch.cat([b[1] for b in batches[:4]]), held, batches[4][1][:HELD_OUT]


class Heard(logging.Handler):
    """Keeps what the library says."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record's text, if it says something about the method."""
        if not record.getMessage().startswith("compiled kernels"):
            self.texts.append(record.getMessage())


def train(name: str, seed: int, data: Any, heard: Heard) -> dict[str, Any]:
    """Train by one method from the beginning; return this rank's row."""
    x, y, held, labels = data
    torch.manual_seed(seed)
    ddp = DistributedDataParallel(network())
    heard.texts.clear()
    momentum, refused = 0.9, None
    optimizer = torch.optim.SGD(ddp.parameters(), lr=RATE, momentum=momentum)
    try:
        link = gw.attach(ddp, name, optimizer=optimizer, seed=seed)
    except gw.IncompatibleError as error:
        if "momentum" not in str(error):
            raise
        momentum, refused = 0.0, str(error)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=RATE)
        link = gw.attach(ddp, name, optimizer=optimizer, seed=seed)
    draw = torch.Generator().manual_seed(seed)
    started = time.monotonic()
    for _ in range(UPDATES):
        chosen = torch.randint(len(x), (WORKERS, BATCH), generator=draw)[dist.get_rank()]
        optimizer.zero_grad()
        cross_entropy(ddp(x[chosen]), y[chosen]).backward()
        optimizer.step()
    seconds = time.monotonic() - started
    traffic = link.traffic()
    if link.method.traits.local_steps:
        link.synchronise()
    with torch.no_grad():
        correct = sum(int((ddp.module(h).argmax(1) == l).sum()) for h, l in zip(held.split(1000), labels.split(1000)))
    link.close()
    # A warning of any rank is a warning; it is given once.
    told: list[list[str]] = [[] for _ in range(WORKERS)]
    dist.all_gather_object(told, list(heard.texts))
    return {
        "method": name,
        "spec": repr(link.method),
        "seed": seed,
        "accuracy": correct / len(labels),
        "momentum": momentum,
        "momentum_refused": refused,
        "warnings": [text for texts in told for text in texts],
        "compression_factor": traffic.compression_factor,
        "seconds": round(seconds, 1),
    }


def worker(rank: int, jobs: list[tuple[str, int]], folder: Path, path: Path, store: str) -> None:
    """Be one of the ranks: train by every method, one after the other."""
    torch.set_num_threads(1)
    # Two nodes of two processes for methods that have levels.
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORKERS)
    data = images(folder)
    heard = Heard()
    logger = logging.getLogger("gradwire")
    logger.addHandler(heard)
    logger.propagate = False
    for name, seed in jobs:
        try:
            row = train(name, seed, data, heard)
        except gw.GradwireError as error:
            row = {"method": name, "seed": seed, "refused": str(error)}
        except Exception:
            traceback.print_exc()
            os._exit(1)
        if rank == 0:
            found = json.loads(path.read_text())
            found["rows"].append(row)
            path.write_text(json.dumps(found, indent=1) + "\n")
            warned = f"{len(row['warnings'])} warnings" if "warnings" in row else row["refused"]
            print(f"{name:20s} seed {seed}  {100 * row.get('accuracy', 0):.2f} %  {warned}", flush=True)
    dist.destroy_process_group()


def main() -> int:
    """Train what is not in the file yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--method", action="append", help="instead of all of them")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    path: Path = arguments.json
    if not path.exists():
        settings = {"workers": WORKERS, "updates": UPDATES, "batch": BATCH, "rate": RATE, "held_out": HELD_OUT}
        path.write_text(json.dumps({**machine(), **settings, "rows": []}) + "\n")
    done = {(row["method"], row["seed"]) for row in json.loads(path.read_text())["rows"]}
    names = arguments.method or sorted(gw.methods(), key=lambda name: (name != "fp32", name))
    jobs = [(name, seed) for seed in range(arguments.seeds) for name in names if (name, seed) not in done]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (jobs, arguments.data, path, f"{folder}/store"), nprocs=WORKERS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
