"""LGC against methods that send the same elements as they are, at equal measured bytes.

    python benchmarks/training/lgc.py --task mnist --data FOLDER --work runs/lgc \\
        --json benchmarks/results/training/lgc_mnist.json

Simulated workers, SGD, momentum before compression for all (float32: the optimizer's). The phases of LGC are short, so
that a training of a few hundred steps has all three; the other methods have the first one, too, as rounds of warm-up.
Densities of the others are set so that a worker sends as many bytes a round, on average over workers, as with LGC by
all-reduce in its third phase, or with a server where the label says so: found on Gaussian gradients, measured in
training. LGC and CLT-k send parameters with fewer than 1024 elements in float32, by two-shot; for top-k and DGC, which
would gather them, these are compressed as well. ``error`` is what the outcome misses of the mean of all workers' values
at its own elements, the squared norm over that of the mean, averaged over the third phase.

Runs that are whole, in the work folder or in the result that ``--json`` names, are not repeated, so that the script may
be stopped and started again. ``--collect`` runs nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.lgc_study import DENSITY, FULL, MOMENTUM, RATE, TRAINING, USUAL, Row, lgc
from benchmarks.lib.runs import claim, earlier, release, write
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.simulate import SimulatedEngine
from gradwire.tools.experiments.tasks import build

STEPS = {"mnist": 300, "cifar10": 300}
EVERY = 10
"""Rounds from one look at the error to the next."""


@dataclass(frozen=True)
class Setting:
    """A method, and the smallest parameter that it compresses."""

    method: gw.Method
    min_numel: int = USUAL


def settings(task: str, workers: int) -> dict[str, Setting]:
    """Return the methods by label."""
    numel = parameters(task)
    learned = Setting(lgc(task))
    wanted = bytes_of(learned, numel, workers)
    found = {
        "LGC, all-reduce": learned,
        "CLT-k": matched("CLTk(density={}, momentum=0.9)", USUAL, wanted, numel, workers),
        "CLT-k, the same elements": Setting(gw.CLTk(density=DENSITY[task], momentum=MOMENTUM)),
        "top-k": matched("ErrorFeedback(TopK(density={}), momentum=0.9)", 0, wanted, numel, workers),
        "DGC": matched("DGC(density={}, momentum=0.9)", 0, wanted, numel, workers),
        "fp32": Setting(gw.FP32()),
    }
    server = found["LGC, server"] = Setting(lgc(task, instance="parameter_server"))
    found["LGC, all-reduce, reconstruction"] = Setting(lgc(task, feedback="reconstruction"))
    found["LGC, all-reduce, by index"] = Setting(lgc(task, order="index"))
    wanted = bytes_of(server, numel, workers)
    found["CLT-k, server's bytes"] = matched("CLTk(density={}, momentum=0.9)", USUAL, wanted, numel, workers)
    found["LGC, server, reconstruction"] = Setting(lgc(task, instance="parameter_server", feedback="reconstruction"))
    return found


def parameters(task: str) -> dict[str, int]:
    """Return the sizes of the task's parameters."""
    with torch.random.fork_rng(devices=[]):
        return {name: p.numel() for name, p in build(task).build_model().named_parameters()}


def bytes_of(setting: Setting, numel: dict[str, int], workers: int) -> float:
    """Return the bytes of a usual round, on average over workers, on Gaussian gradients."""
    link = gw.SimulatedLink(
        [(n, torch.empty(k)) for n, k in numel.items()], setting.method, workers, min_numel=setting.min_numel
    )
    # After the round in which the autoencoder is told.
    link.round, generator = FULL + TRAINING, torch.Generator().manual_seed(0)
    seen = []
    for _ in range(1 + workers):
        link.reduce_(torch.randn(workers, link.numel, generator=generator))
        seen.append(mean(link.traffic(worker).sent_bytes for worker in range(workers)))
    return (seen[-1] - seen[0]) / workers


def matched(spec: str, min_numel: int, wanted: float, numel: dict[str, int], workers: int) -> Setting:
    """Return the method with the density that sends so many bytes, to a hundredth."""
    low, high = 1e-6, 1.0
    for _ in range(30):
        density = float(f"{(low * high) ** 0.5:.4g}")
        found = bytes_of(Setting(gw.method(spec.format(density)), min_numel), numel, workers)
        if abs(found - wanted) <= 0.01 * wanted:
            break
        low, high = (density, high) if found < wanted else (low, density)
    return Setting(gw.method(spec.format(density)), min_numel)


class Watched(SimulatedEngine):
    """Counts bytes by phase, and looks at what the outcome misses of the mean at its elements."""

    def __init__(self, plan: RunConfig) -> None:
        super().__init__(plan)
        self.sent: list[list[int]] = [[0] * self.world_size]
        self.errors: list[float] = []
        self.light = [name for name, p in self.model.named_parameters() if p.numel() >= plan.min_numel]

    def backward(self, step: int) -> float:
        """Exchange, and note bytes and errors."""
        look = step >= FULL + TRAINING and step % EVERY == 0 and isinstance(self.link.method, gw.LGC)
        before = self.link.state_dict() if look else None
        self.rows = None
        loss = super().backward(step)
        self.sent.append([self.link.traffic(worker).sent_bytes for worker in range(self.world_size)])
        if before is not None:
            after = self.link.state_dict()
            self.errors.append(self._error(before, after))
        return loss

    def _error(self, before: dict[str, Any], after: dict[str, Any]) -> float:
        """Return |mean p - outcome|^2 / |mean p|^2 over the outcome's elements.

        p is what the residual was before plus the momentum after the round, which holds this round's gradient.
        """
        off = total = 0.0
        named = dict(self.model.named_parameters())
        for name in self.light:
            ranks = range(self.world_size)
            p = sum(before[f"rank {r}"][f"residual/{name}"] + after[f"rank {r}"][f"momentum/{name}"] for r in ranks)
            p = p / self.world_size
            outcome = named[name].grad.flatten()
            there = outcome != 0
            off += float((p[there] - outcome[there]).square().sum())
            total += float(p[there].square().sum())
        return off / total if total else 0.0


def train(task: str, label: str, setting: Setting, workers: int, seed: int, data: Path | None) -> Row:
    """Train, and return what came of it."""
    method = setting.method
    dense = isinstance(method, gw.FP32)
    made = build(
        task, data=None if data is None else str(data), lr=RATE[task], momentum=MOMENTUM if dense else 0.0,
        optimizer="sgd", steps=STEPS[task], weight_decay=0.0,
    )  # fmt: skip
    warm = 0 if dense or isinstance(method, gw.LGC) else FULL
    plan = RunConfig(
        task=made,
        method=repr(method),
        workers=workers,
        simulate=True,
        seed=seed,
        min_numel=setting.min_numel,
        warmup_steps=warm,
    )
    engine, began_s = Watched(plan), time.monotonic()
    losses = []
    for step in range(made.steps):
        for group in engine.optimizer.param_groups:
            group["lr"] = made.learning_rate(step)
        losses.append(engine.backward(step))
        engine.optimizer.step()
        if not losses[-1] < 1e4:
            break
    loss, accuracy = engine.score()
    cuts = [0, FULL, FULL + TRAINING, FULL + TRAINING + 1, made.steps]
    names = ("full", "training", "first compressed", "compressed")
    whole = len(losses) == made.steps
    sent = {
        name: mean((engine.sent[b][w] - engine.sent[a][w]) / (b - a) for w in range(workers))
        for name, a, b in zip(names, cuts, cuts[1:])
    } if whole else {}  # fmt: skip
    roles = {}
    if whole and isinstance(method, gw.LGC):
        a, b = cuts[-2:]
        each = [(engine.sent[b][w] - engine.sent[a][w]) / (b - a) for w in range(workers)]
        roles = {"rank 0": each[0], "others": mean(each[1:] or each)}
    return {
        "task": task, "label": label, "spec": repr(method), "workers": workers, "seed": seed, "rate": RATE[task],
        "steps": made.steps, "accuracy": accuracy, "loss": loss, "train_loss": mean(losses[-20:]), "ended": whole,
        "sent_bytes_a_round": sent, "compressed_by_rank": roles,
        "sent_bytes": mean(engine.sent[-1]), "dense_bytes": engine.link.traffic().dense_bytes,
        "error": mean(engine.errors) if engine.errors else None, "errors": [round(e, 4) for e in engine.errors],
        "took_s": time.monotonic() - began_s,
    }  # fmt: skip


def identity(row: Row) -> tuple[str, int, int]:
    """Return what tells a run from the others of its task."""
    return row["spec"], row["workers"], row["seed"]


def summary(rows: list[Row]) -> list[Row]:
    """Return a row for each method and number of workers: means over seeds, with the spread of the accuracy."""
    found = []
    for key in dict.fromkeys((r["task"], r["workers"], r["label"]) for r in rows):
        group = [r for r in rows if (r["task"], r["workers"], r["label"]) == key]
        marks = [100 * r["accuracy"] for r in group]
        errors = [r["error"] for r in group if r["error"] is not None]
        found.append({
            "task": key[0], "workers": key[1], "label": key[2], "spec": group[0]["spec"], "seeds": len(group),
            "accuracy_percent": mean(marks), "spread": stdev(marks) if len(marks) > 1 else None,
            "sent_bytes_a_round": group[0]["sent_bytes_a_round"], "compressed_by_rank": group[0]["compressed_by_rank"],
            "sent_bytes": mean(r["sent_bytes"] for r in group), "dense_bytes": group[0]["dense_bytes"],
            "error": mean(errors) if errors else None,
        })  # fmt: skip
    return found


def main() -> None:
    """Train what is missing, and write what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="mnist", choices=sorted(STEPS))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path, default=Path("runs/lgc"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--workers", type=int, nargs="+", default=[4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", help="labels")
    parser.add_argument("--collect", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.work.mkdir(parents=True, exist_ok=True)
    known = {identity(row): row for row in earlier(arguments.json, "runs")}
    for workers in () if arguments.collect else arguments.workers:
        for label, setting in settings(arguments.task, workers).items():
            if arguments.only and label not in arguments.only:
                continue
            for seed in arguments.seeds:
                name = f"{arguments.task}-{workers}-{zlib.crc32(repr(setting).encode()):08x}-{seed}"
                path = arguments.work / f"{name}.json"
                if path.exists() or (repr(setting.method), workers, seed) in known or not claim(path):
                    continue
                row = train(arguments.task, label, setting, workers, seed, arguments.data)
                path.write_text(json.dumps(row, indent=1) + "\n")
                release(path)
                print(f"{workers} {label} {seed}: {row['accuracy']:.4f}, error {row['error']}", flush=True)
    found = [json.loads(path.read_text()) for path in sorted(arguments.work.glob(f"{arguments.task}-*.json"))]
    rows = list((known | {identity(row): row for row in found}).values())
    kept = {"full_rounds": FULL, "training_rounds": TRAINING, "density": DENSITY[arguments.task], "momentum": MOMENTUM}
    write(arguments.json, **kept, methods=summary(rows), runs=rows)


if __name__ == "__main__":
    main()
