"""Gossip on a ring of eight simulated workers, beside an all-reduce: consensus, loss and accuracy, bytes of a link.

    python benchmarks/training/gossip.py --work runs/gossip --json benchmarks/results/training/gossip.json

Digits, 200 steps of SGD with momentum 0.9, eight samples a worker and step. Each worker draws from all samples, or
("unlike") owns an eighth of them in the order of their labels, about one or two digits. Rates are the better of two by
the loss of the mean model on the training set, for the first seed; that rate is then run with all seeds. Runs that are
whole are not repeated. A link's bytes are those that a worker sends to one neighbour, headers included.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.runs import claim, release, write
from gradwire.exchange.drivers import dense_bytes
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.engine import build_model, score_share
from gradwire.tools.experiments.order import DataOrder
from gradwire.tools.experiments.tasks import build

WORKERS, BATCH, STEPS, SEEDS = 8, 8, 200, (0, 1)
RATES = (0.05, 0.2)
SPLITS = ("like", "unlike")
METHODS = (
    "fp32",
    "DPSGD()",
    "ChocoSGD(compressor=QSGDinf(levels=7, block_size=256), gamma=0.9)",
    "ChocoSGD(compressor=ScaledSign(block_size=256), gamma=0.3)",
    "ChocoSGD(compressor=TopK(density=0.01), gamma=0.02)",
    "ChocoSGD(compressor=TopK(density=0.01), gamma=0.1)",
    "PowerGossip(matrix_rank=1)",
    "PowerGossip(matrix_rank=1, iterations=2)",
    "PowerGossip(matrix_rank=4)",
)
SHORT = ("fp32", "DPSGD()", METHODS[2], METHODS[6])
"""Of these the workers are also given unlike data."""

KEPT = ("consensus", "loss", "accuracy", "workers_loss", "workers_accuracy", "worst_accuracy", "training_loss")


class Data:
    """The task's samples, and which of them each worker takes in a step."""

    def __init__(self, split: str, seed: int) -> None:
        self.plan = RunConfig(
            task=build("digits", steps=STEPS), method="fp32", workers=WORKERS, seed=seed, simulate=True
        )
        self.source = self.plan.task.load()
        everything = torch.arange(self.source.samples)
        self.inputs, self.targets = self.source.batch(everything, slice(None), seed=seed, step=0)
        if split == "like":
            self.shares, self.orders = [everything] * WORKERS, [DataOrder(seed, len(everything), BATCH * WORKERS)]
        else:
            share = self.source.samples // WORKERS
            by_label = self.targets.argsort(stable=True)[: share * WORKERS]
            self.shares = list(by_label.split(share))
            self.orders = [DataOrder(seed, share, BATCH, f"share {worker}") for worker in range(WORKERS)]

    def batch(self, worker: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a worker's inputs and targets of a step."""
        if len(self.orders) == 1:
            chosen = self.orders[0].indices(step)[worker * BATCH : (worker + 1) * BATCH]
        else:
            chosen = self.shares[worker][self.orders[worker].indices(step)]
        return self.inputs[chosen], self.targets[chosen]

    def score(self, model: nn.Module) -> tuple[float, float]:
        """Return loss and accuracy on the evaluation data."""
        loss, right, count = score_share(self.plan, model, self.source.evaluation(0, 1))
        return loss / count, right / count


def flat(model: nn.Module) -> torch.Tensor:
    """Return all parameters of a model in float64."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).double()


class Exchange:
    """An exchange after, or of the gradients before, the workers' steps."""

    def __init__(self, method: str, models: list[nn.Module]) -> None:
        self._models, self.gossips = models, gw.method(method).traits.outcomes_differ
        named = [list(model.named_parameters()) for model in models]
        if self.gossips:
            self.steps = gw.SimulatedLocalSteps(named, method)
        else:
            self.link = gw.SimulatedLink(named[0], method, len(models))

    def before(self) -> None:
        """Give all workers the mean gradient."""
        if not self.gossips:
            rows = [torch.cat([p.grad.reshape(-1) for p in m.parameters() if p.grad is not None]) for m in self._models]
            mean_of_all = self.link.reduce_(torch.stack(rows))
            for model in self._models:
                sizes = [p.numel() for p in model.parameters()]
                for p, part in zip(model.parameters(), mean_of_all.split(sizes)):
                    p.grad = part.view(p.shape).clone()

    def after(self) -> None:
        """Let neighbours average."""
        if self.gossips:
            self.steps.after_step()

    def link_bytes(self, steps: int) -> float:
        """Return the bytes that cross a link of the ring, in one direction, in a step, the most of all workers."""
        if not self.gossips:
            return float(dense_bytes(sum(p.numel() for p in self._models[0].parameters()), WORKERS))
        traffic = [self.steps.link.traffic(worker) for worker in range(WORKERS)]
        return max(sent for one in traffic for sent in one.sent_to.values()) / steps


def train(method: str, split: str, rate: float, seed: int) -> dict[str, Any]:
    """Train, and describe how the workers and their mean end."""
    data, began = Data(split, seed), time.monotonic()
    models = [build_model(data.plan) for _ in range(WORKERS)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9) for model in models]
    exchange = Exchange(method, models)
    consensus = []
    for step in range(STEPS):
        for worker, (model, optimizer) in enumerate(zip(models, optimizers)):
            inputs, targets = data.batch(worker, step)
            optimizer.zero_grad()
            data.plan.task.loss(model(inputs), targets).backward()
        exchange.before()
        for optimizer in optimizers:
            optimizer.step()
        try:
            exchange.after()
        except gw.ExchangeError:
            return {"finite": False, "steps_done": step}
        if (step + 1) % 10 == 0:
            consensus.append(distance(models))
    scores = [data.score(model) for model in models]
    middle = build_model(data.plan)
    with torch.no_grad():
        for p, *own in zip(middle.parameters(), *(model.parameters() for model in models)):
            p.copy_(torch.stack(own).double().mean(0))
    loss, accuracy = data.score(middle)
    with torch.no_grad():
        training_loss = float(data.plan.task.loss(middle(data.inputs), data.targets))
    return {
        "finite": math.isfinite(loss),
        "consensus": consensus[-1],
        "consensus_by_10_steps": [float(f"{x:.4g}") for x in consensus],
        "loss": loss,
        "accuracy": accuracy,
        "workers_loss": mean(x for x, _ in scores),
        "workers_accuracy": mean(x for _, x in scores),
        "worst_accuracy": min(x for _, x in scores),
        "training_loss": training_loss,
        "link_bytes_per_step": exchange.link_bytes(STEPS),
        "seconds": time.monotonic() - began,
    }


def distance(models: list[nn.Module]) -> float:
    """Return the root mean square distance of workers from their mean, relative to its length."""
    rows = torch.stack([flat(model) for model in models])
    middle = rows.mean(0)
    return float((rows - middle).square().sum(1).mean().sqrt() / middle.norm())


@dataclass(frozen=True)
class Run:
    """One training: what decides it, and where its result lies."""

    method: str
    split: str
    rate: float
    seed: int
    work: Path

    @property
    def folder(self) -> Path:
        """Its folder, named after what decides it."""
        name = re.sub(r"\W+", "_", self.method).strip("_")
        return self.work / f"{name}-{self.split}-lr{self.rate:g}-{STEPS}-{self.seed}"

    def found(self) -> dict[str, Any] | None:
        """Return its result, if it is whole."""
        path = self.folder / "result.json"
        return json.loads(path.read_text()) if path.exists() else None

    def go(self) -> None:
        """Train, unless it is whole or another process does."""
        if self.found() or not claim(self.folder):
            return
        result = train(self.method, self.split, self.rate, self.seed)
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.folder / "partial.json"
        partial.write_text(json.dumps(result))
        partial.replace(self.folder / "result.json")
        release(self.folder)
        print(f"{self.folder.name}: {result.get('accuracy')}, {result.get('consensus')}", flush=True)


def rows(work: Path) -> Iterator[dict[str, Any]]:
    """Run what is missing, and yield a row a method and split."""
    for split in SPLITS:
        for method in METHODS if split == "like" else SHORT:
            first = [Run(method, split, rate, SEEDS[0], work) for rate in RATES]
            for run in first:
                run.go()
            tried = {run.rate: run.found() for run in first}
            if not all(tried.values()):
                continue
            losses = {rate: r["training_loss"] if r and r["finite"] else math.inf for rate, r in tried.items()}
            best = min(RATES, key=lambda rate: losses[rate])
            runs = [Run(method, split, best, seed, work) for seed in SEEDS]
            for run in runs:
                run.go()
            found = [r for run in runs if (r := run.found()) and r["finite"]]
            row: dict[str, Any] = {"method": method, "split": split, "learning_rate": best, "seeds": len(found)}
            row["training_loss_by_rate"] = {
                str(rate): loss if loss < math.inf else None for rate, loss in losses.items()
            }
            if len(found) == len(SEEDS):
                for key in KEPT:
                    values = [r[key] for r in found]
                    row[f"{key}_mean"], row[f"{key}_std"] = mean(values), stdev(values)
                row["link_bytes_per_step"] = found[0]["link_bytes_per_step"]
                row["consensus_by_10_steps"] = found[0]["consensus_by_10_steps"]
            yield row


def main() -> None:
    """Run the grid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/gossip"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = list(rows(options.work))
    write(options.json, task="digits", workers=WORKERS, batch=BATCH, steps=STEPS, graph="ring", rows=found)
    for row in found:
        told = {key: row.get(f"{key}_mean") for key in ("consensus", "accuracy", "workers_accuracy", "loss")}
        print(row["split"], row["method"], row["learning_rate"], told, row.get("link_bytes_per_step"))


if __name__ == "__main__":
    main()
