"""What TernGrad loses on the task ``text``: by its clip alone, and by making trits of what is left.

    python benchmarks/claims/text_clip.py --json benchmarks/results/claims/text_clip.json

Four simulated workers, the task's own settings, the same seeds for all. "Clipped" exchanges float32 gradients, which
each worker has clipped as TernGrad does: at 2.5 root mean squares of each parameter of 1024 elements or more.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from statistics import mean, stdev

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.runs import write
from gradwire.tools.experiments import tasks
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.simulate import SimulatedEngine

CLIP, MIN_NUMEL, WORKERS = 2.5, 1024, 4
RUNS = {"fp32": "fp32", "clipped": "fp32", "terngrad": f"TernGrad(clip={CLIP})"}


def train(label: str, seed: int, steps: int) -> tuple[float, float]:
    """Train; return loss and accuracy on held-out text."""
    text = dataclasses.replace(tasks.build("text"), steps=steps)
    engine = SimulatedEngine(RunConfig(task=text, method=RUNS[label], workers=WORKERS, simulate=True, seed=seed))
    optimizer = text.build_optimizer(engine.model)
    numel = [p.numel() for p in engine.model.parameters()]
    reduce_ = engine.link.reduce_

    def clipped(gradients: torch.Tensor) -> torch.Tensor:
        for part in gradients.split(numel, dim=1):
            if part.shape[1] >= MIN_NUMEL:
                limit = CLIP * part.square().mean(dim=1, keepdim=True).sqrt()
                part.copy_(torch.clamp(part, -limit, limit))
        return reduce_(gradients)

    if label == "clipped":
        engine.link.reduce_ = clipped  # type: ignore[method-assign]
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = text.learning_rate(step)
        engine.backward(step)
        optimizer.step()
    return engine.score()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for label in RUNS:
        for seed in chosen.seeds:
            loss, accuracy = train(label, seed, chosen.steps)
            rows.append({"run": label, "seed": seed, "loss": loss, "accuracy": accuracy})
        found = [100 * row["accuracy"] for row in rows if row["run"] == label]
        spread = f" ± {stdev(found):.2f}" if len(found) > 1 else ""
        print(f"{label}: {mean(found):.2f}{spread} %", flush=True)
    write(chosen.json, workers=WORKERS, steps=chosen.steps, rows=rows)


if __name__ == "__main__":
    main()
