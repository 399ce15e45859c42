"""DiLoCo with Muon as the workers' optimizer: differences at 2 bits beside float32, a small language model.

    python benchmarks/claims/muloco_bits.py --data FILE --work runs/muloco_bits \\
        --json benchmarks/results/claims/muloco_bits.json

A character GPT of two layers, 64 wide, on Tiny Shakespeare, by the training of ``benchmarks/training/league.py``: four
simulated workers with three samples of 64 characters each, 192 steps, an exchange every 16 steps by DiLoCo's default
outer step. The differences travel in float32, or by EDEN at 2 bits; the workers' optimizer is Muon for matrices, with
AdamW for embeddings and norms, or AdamW alone.

Each of the four is tuned alike: by the validation loss, in nats a character, from seed 10, over the same learning
rates; a rate at the end of the grid moves the search on by a factor of two. Seeds 0, 1 and 2 are trained at the best
rate, and ``differences`` pairs them: the loss at 2 bits less that of float32.

Source: MuLoCo (arXiv:2505.23725): DiLoCo works with Muon inside, with differences of 2 bits.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.league_run import Plan, finished, train
from benchmarks.lib.runs import write
from benchmarks.lib.stacked_gpt import Shape, Text, read_text

STEPS, SEEDS, TUNING_SEED = 192, (0, 1, 2), 10
SPECS = {"float32": "DiLoCo(every=16)", "2 bits": "DiLoCo(inner=EDEN(bits=2), every=16)"}
OPTIMIZERS = ("muon", "adamw")
RATES = (0.004, 0.008, 0.016)
HIGHEST, LOWEST = 0.064, 0.001

Row = dict[str, Any]


class Trainings:
    """Trainings of one text; each ends in a file, and is not repeated."""

    def __init__(self, text: Text, work: Path, steps: int) -> None:
        self._text, self._work, self._steps = text, work, steps
        self._shape = Shape(characters=text.characters, width=64, layers=2, heads=2)
        self.rows: list[Row] = []

    def run(self, spec: str, optimizer: str, lr: float, seed: int) -> Row:
        """Return the row of a training."""
        plan = Plan(spec, optimizer, lr, self._steps, seed)
        row = finished(plan, self._work) or train(plan, self._text, self._work, shape=self._shape)
        if row is None:
            raise RuntimeError(f"{plan.label} did not end")
        self.rows.append(row)
        return row

    def best_rate(self, spec: str, optimizer: str) -> float:
        """Return the rate of the least loss, inside the rates tried or at an end of those allowed."""
        losses = {lr: self.run(spec, optimizer, lr, TUNING_SEED)["loss"] for lr in RATES}
        while True:
            best = min(losses, key=lambda lr: losses[lr] if losses[lr] == losses[lr] else float("inf"))
            if best == max(losses) and best < HIGHEST:
                losses[2 * best] = self.run(spec, optimizer, 2 * best, TUNING_SEED)["loss"]
            elif best == min(losses) and best > LOWEST:
                losses[best / 2] = self.run(spec, optimizer, best / 2, TUNING_SEED)["loss"]
            else:
                return best


def main() -> int:
    """Tune, train, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="Tiny Shakespeare's text")
    parser.add_argument("--work", type=Path, default=Path("runs/muloco_bits"))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    chosen.work.mkdir(parents=True, exist_ok=True)
    trainings = Trainings(read_text(chosen.data), chosen.work, chosen.steps)
    methods: list[Row] = []
    differences: list[Row] = []
    for optimizer in OPTIMIZERS:
        losses: dict[str, list[float]] = {}
        for name, spec in SPECS.items():
            lr = trainings.best_rate(spec, optimizer)
            rows = [trainings.run(spec, optimizer, lr, seed) for seed in SEEDS]
            losses[name] = [row["loss"] for row in rows]
            found: Row = {"optimizer": optimizer, "differences": name, "spec": spec, "lr": lr}
            found |= {"loss": mean(losses[name]), "spread": stdev(losses[name])}
            found["bits_per_element_and_step"] = rows[0]["bits_per_element_and_step"]
            methods.append(found)
            print(
                f"{optimizer:5s} {spec:40s} lr {lr:g}: {found['loss']:.4f} ± {found['spread']:.4f}, "
                f"{found['bits_per_element_and_step']:.3f} bits",
                flush=True,
            )
        apart = [a - b for a, b in zip(losses["2 bits"], losses["float32"])]
        differences.append({"optimizer": optimizer, "nats": mean(apart), "spread": stdev(apart)})
        print(f"{optimizer}: 2 bits less float32 {mean(apart):+.4f} ± {stdev(apart):.4f} nats", flush=True)
    kept = ("spec", "optimizer", "lr", "steps", "seed", "loss", "bytes", "numel")
    runs = [{field: row[field] for field in kept} for row in trainings.rows]
    shape = dataclasses.asdict(Shape(width=64, layers=2, heads=2))
    write(chosen.json, shape=shape, methods=methods, differences=differences, runs=runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
