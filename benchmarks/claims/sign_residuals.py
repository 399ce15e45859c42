"""What signs lose of real gradients, and how long residuals grow beside them, on the task ``text``.

    python benchmarks/claims/sign_residuals.py --json benchmarks/results/claims/sign_residuals.json

Four simulated workers train by SGD on the task's default data. After some steps, for each compressed parameter of
worker 0: the share |C(g) - g|^2 / |g|^2 of the gradient that the scaled sign loses, by block size (in the float32 run),
and the length of the residual over that of the gradient, or of the momentum where that is what is compressed (in the
other runs). ``link/reports.py`` warns above a multiple that these runs support.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.runs import write
from gradwire.tools.experiments import tasks
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.simulate import SimulatedEngine

BLOCKS = (None, 1024, 256, 64)
MEASURED = (1, 3, 10, 30, 100, 200, 300)
"""Steps after which to measure."""
RUNS: tuple[tuple[str, float, float], ...] = (
    ("fp32", 0.3, 0.9),
    ("EFSignSGD()", 0.3, 0.9),
    ("EFSignSGD(block_size=64)", 0.3, 0.9),
    ("OneBit()", 0.3, 0.9),
    ("EFSignSGD(block_size=1024)", 0.3, 0.9),
    ("EFSignSGD(block_size=256)", 0.3, 0.9),
    ("EFSignSGD(momentum=0.9)", 0.3, 0.0),
    ("ErrorFeedback(QSGDinf(block_size=256))", 0.3, 0.9),
    ("EFSignSGD()", 3.0, 0.0),
)
"""Specs with the learning rate and the momentum of SGD."""


def train(spec: str, lr: float, momentum: float, steps: int) -> list[dict[str, Any]]:
    """Train; return a row for each parameter and measured step, and the accuracy in a last one."""
    text = dataclasses.replace(tasks.build("text"), steps=steps, lr=lr, momentum=momentum, optimizer="sgd")
    engine = SimulatedEngine(RunConfig(task=text, method=spec, workers=4, simulate=True))
    optimizer = text.build_optimizer(engine.model)
    numel = {name: p.numel() for name, p in engine.model.named_parameters()}
    reduce_, own = engine.link.reduce_, torch.empty(engine.link.numel)

    def watched(gradients: torch.Tensor) -> torch.Tensor:
        own.copy_(gradients[0])
        return reduce_(gradients)

    engine.link.reduce_ = watched  # type: ignore[method-assign]
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = text.learning_rate(step - 1)
        engine.backward(step - 1)
        if step in MEASURED:
            state = engine.link.state_dict()["rank 0"]
            for (name, count), g in zip(numel.items(), own.split(list(numel.values()))):
                row = {"spec": spec, "lr": lr, "momentum": momentum, "step": step, "parameter": name, "numel": count}
                if spec == "fp32" and count >= 1024:
                    rows += [{**row, "block_size": size, "lost": lost(g, size)} for size in BLOCKS]
                elif f"residual/{name}" in state:
                    size = float(state.get(f"momentum/{name}", g).norm())
                    rows.append({**row, "residual_over_gradient": float(state[f"residual/{name}"].norm()) / size})
        optimizer.step()
    rows.append({"spec": spec, "lr": lr, "momentum": momentum, "step": steps, "accuracy": engine.score()[1]})
    return rows


def lost(g: torch.Tensor, block_size: int | None) -> float:
    """Return the share of a gradient's square that the scaled sign of blocks loses."""
    found = gw.simulate(g[None].clone(), gw.ScaledSign(block_size=block_size)).mean
    return float((found - g).square().sum() / g.square().sum())


def main() -> int:
    """Train, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for spec, lr, momentum in RUNS:
        found = train(spec, lr, momentum, chosen.steps)
        rows += found
        for key in ("lost", "residual_over_gradient"):
            values = [row[key] for row in found if key in row and row.get("block_size") is None]
            if values:
                print(f"{spec}, lr {lr:g}, momentum {momentum:g}: {key} {min(values):.2f} to {max(values):.2f}")
        print(f"{spec}, lr {lr:g}, momentum {momentum:g}: accuracy {100 * found[-1]['accuracy']:.1f} %", flush=True)
    write(chosen.json, workers=4, steps=chosen.steps, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
