"""What TernGrad loses on the task ``text``: by its clip alone, and by making trits of what is left.

    python benchmarks/claims/text_clip.py --json benchmarks/results/claims/text_clip.json

Four simulated workers, the task's own settings, the same seeds for all. "Clipped" exchanges float32 gradients, which
each worker has clipped as TernGrad does: at 2.5 root mean squares of each parameter of 1024 elements or more.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import mean, stdev

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.runs import write
from benchmarks.lib.simulated_training import trained
from gradwire.tools.experiments.simulate import SimulatedEngine

CLIP, MIN_NUMEL = 2.5, 1024


def clip(engine: SimulatedEngine, gradients: torch.Tensor) -> None:
    """Clip each worker's gradient of each large parameter."""
    for part in gradients.split([p.numel() for p in engine.parameters], dim=1):
        if part.shape[1] >= MIN_NUMEL:
            limit = CLIP * part.square().mean(dim=1, keepdim=True).sqrt()
            part.copy_(torch.clamp(part, -limit, limit))


RUNS = {"fp32": ("fp32", None), "clipped": ("fp32", clip), "terngrad": (f"TernGrad(clip={CLIP})", None)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for label, (spec, changed) in RUNS.items():
        for seed in chosen.seeds:
            loss, accuracy = trained("text", spec, seed, changed=changed, steps=chosen.steps)
            rows.append({"run": label, "seed": seed, "loss": loss, "accuracy": accuracy})
        found = [100 * row["accuracy"] for row in rows if row["run"] == label]
        spread = f" ± {stdev(found):.2f}" if len(found) > 1 else ""
        print(f"{label}: {mean(found):.2f}{spread} %", flush=True)
    write(chosen.json, workers=4, steps=chosen.steps, rows=rows)


if __name__ == "__main__":
    main()
