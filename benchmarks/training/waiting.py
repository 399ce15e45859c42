"""How long gradients wait in a residual, beside what a training loses by momentum after the exchange.

    python benchmarks/training/waiting.py --json benchmarks/results/training/waiting_digits.json

For each method of the table for digits (``method_table.py``) that was trained with momentum in several places and keeps
a residual: one training of 300 steps, first seed, with momentum 0.9 after the exchange, at the rate that was found best
there. In rounds 10, 30, 100 and 200, with e worker 0's residual after the round and s the vector that it sent, over all
compressed parameters,

    wait = |e|^2 / |s|^2

is the mean number of rounds that a part of a gradient waits (``gradwire/methods/feedback/waiting.py`` derives it), and
the second figure is that of the means of e and s over workers. A row has the medians over rounds, the wait that the
method expects before the training, and the lowest training losses with momentum after the exchange and elsewhere.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.method_entries import label, plain
from benchmarks.lib.results import RESULTS
from benchmarks.lib.runs import write
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.simulate import SimulatedEngine
from gradwire.tools.experiments.tasks import build

AFTER, STEPS, WORKERS, ROUNDS = "optimizer's, 0.9", 300, 4, (10, 30, 100, 200)
LONGEST = 256 * 256
"""Elements of the perceptron's longest parameter."""

Row = dict[str, Any]


class Watched(SimulatedEngine):
    """Measures, in some rounds, how long gradients wait by one worker's residual, and by the mean over workers."""

    def __init__(self, plan: RunConfig) -> None:
        super().__init__(plan)
        self.waits: list[tuple[float, float]] = []

    def backward(self, step: int) -> float:
        """Exchange one round, and look at it."""
        round = self.link.round
        loss = super().backward(step)
        if round in ROUNDS:
            self.waits.append(self._waits())
        return loss

    def _waits(self) -> tuple[float, float]:
        state, kind = self.link.state_dict(), gw.method(self.plan.method).traits.waiting
        held = [
            {key: e.double() for key, e in state[f"rank {r}"].items() if key.startswith(f"{kind}/")}
            for r in range(self.world_size)
        ]
        rows = self.link.diagnostics()["parameters"]
        names = [name for name, p in self.model.named_parameters() if p.numel() >= 1024]
        own = sum(float(e.square().sum()) for e in held[0].values())
        sent = sum(rows[name]["sent_norm"] ** 2 for name in names)
        means = sum(float(torch.stack([h[key] for h in held]).mean(0).square().sum()) for key in held[0])
        gradients = [p.grad for p in self.model.parameters() if p.numel() >= 1024 and p.grad is not None]
        update = sum(float(g.double().square().sum()) for g in gradients)
        return own / sent, means / update


def watch(spec: str, rate: float) -> list[tuple[float, float]]:
    """Train once with momentum after the exchange; return the two figures of each measured round."""
    task = build("digits", lr=rate, momentum=0.9, optimizer="sgd", steps=STEPS)
    engine = Watched(RunConfig(task=task, method=spec, workers=WORKERS, simulate=True, seed=0))
    for step in range(STEPS):
        engine.backward(step)
        engine.optimizer.step()
    return engine.waits


def row_of(found: Row) -> Row:
    """Return what was measured of a row of the table."""
    spec = plain(found["method"])
    after = [one for one in found["tried"] if one["momentum"] == AFTER and one["training_loss"] is not None]
    elsewhere = [one["training_loss"] for one in found["tried"] if one["momentum"] != AFTER]
    best = min(after, key=lambda one: float(one["training_loss"]))
    waits = watch(spec, best["learning_rate"])
    return {
        "method": spec,
        "label": label(spec).replace("()", ""),
        "rate": best["learning_rate"],
        "after": best["training_loss"],
        "elsewhere": min(loss for loss in elsewhere if loss is not None),
        "waits": [own for own, _ in waits],
        "wait": median(own for own, _ in waits),
        "wait_of_means": median(mean for _, mean in waits),
    }


def main() -> None:
    """Measure what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=RESULTS / "training/methods_digits.json")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    table = json.loads(given.table.read_text())["rows"]
    earlier = json.loads(given.json.read_text())["rows"] if given.json and given.json.exists() else []
    rows: dict[str, Row] = {row["method"]: row for row in earlier}
    for spec, row in rows.items():
        row["expected_wait"] = gw.method(spec).wait_of(LONGEST)
    for found in table:
        spec = plain(found["method"])
        traits = gw.method(spec).traits
        if len({one.get("momentum") for one in found["tried"]}) < 2 or traits.waiting not in traits.remembers:
            continue
        if spec not in rows:
            rows[spec] = {**row_of(found), "expected_wait": gw.method(spec).wait_of(LONGEST)}
            write(given.json, rows=sorted(rows.values(), key=lambda row: float(row["wait"])))
    for row in sorted(rows.values(), key=lambda row: float(row["wait"])):
        expected = "-" if row["expected_wait"] is None else f"{row['expected_wait']:.1f}"
        print(
            f"{row['label']:50s} expected {expected:>5s}, wait {row['wait']:8.2f}, "
            f"of means {row['wait_of_means']:8.2f}, loss {row['after']:.3f} after, {row['elsewhere']:.3f} elsewhere"
        )


if __name__ == "__main__":
    main()
