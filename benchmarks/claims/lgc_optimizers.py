"""What optimizer LGC's autoencoder needs: 300 steps by SGD at 0.001 beside Adam at 0.001.

    python benchmarks/claims/lgc_optimizers.py --json benchmarks/results/claims/lgc_optimizers.json

A perceptron on digits trains by CLT-k with four simulated workers, 850 of 85 002 elements a round: what the second
phase of LGC by all-reduce exchanges. In each of 300 rounds, the autoencoder takes one step on the four workers' values
x_i at the leader's elements, in descending order of the leader's values, to make D(mean of E(x_i)) the mean of x_i::

    sgd, raw values       SGD at 0.001 on the values as they are: a public implementation's setting
    sgd, scaled values    SGD at 0.001 on values over their parameter's root mean square, as the library scales them
    adam, scaled values   Adam at 0.001 on the same: the library's default

``before`` and ``after`` are |mean - decoded|^2 / |mean|^2 over the 30 rounds that follow, with the initial weights and
with the trained ones: 1 is what zeros would have. ``learnt`` is the share of the initial error that is gone.

Source: Abrahamyan, Chen, Bekoulis, Deligiannis, 2021, by a public implementation (SGD at 0.001, a step a round).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.lgc_study import USUAL
from benchmarks.lib.runs import write
from gradwire.exchange.protocols import leader
from gradwire.methods.learned.autoencoder import Autoencoder, ElementScales, Training
from gradwire.tools.experiments import tasks
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.simulate import SimulatedEngine

WORKERS, TRAINING_ROUNDS, ROUNDS, SEEDS = 4, 300, 30, (0, 1, 2)
DENSITY, RATE = 0.01, 1e-3
SETTINGS = {
    "sgd, raw values": ("sgd", False),
    "sgd, scaled values": ("sgd", True),
    "adam, scaled values": ("adam", True),
}

Row = dict[str, Any]


def vectors(seed: int) -> tuple[list[int], list[Tensor]]:
    """Train by CLT-k; return how many elements each parameter has in a round, and the workers' values of each round."""
    task = tasks.build("digits", momentum=0.0, optimizer="sgd", steps=TRAINING_ROUNDS + ROUNDS, lr=0.2)
    method = f"CLTk(density={DENSITY})"
    engine = SimulatedEngine(RunConfig(task=task, method=method, workers=WORKERS, simulate=True, seed=seed))
    sizes = {name: p.numel() for name, p in engine.model.named_parameters()}
    counts = [max(1, int(DENSITY * numel)) for numel in sizes.values() if numel >= USUAL]
    reduce_ = engine.link.reduce_
    rounds: list[Tensor] = []

    def watched(gradients: Tensor, names: Sequence[str] | None = None) -> Tensor:
        held, at, rows, places = engine.link.state_dict(), 0, [], []
        for name, numel in sizes.items():
            if numel >= USUAL:
                p = gradients[:, at : at + numel].clone()
                for r in range(WORKERS):
                    if f"residual/{name}" in held[f"rank {r}"]:
                        p[r] += held[f"rank {r}"][f"residual/{name}"].reshape(-1)
                own = p[leader(len(rounds), WORKERS)]
                largest = torch.sort(own.abs(), descending=True, stable=True).indices[: max(1, int(DENSITY * numel))]
                order = largest[torch.sort(own[largest], descending=True, stable=True).indices]
                rows.append(p[:, order])
                places.append(at + order)
            at += numel
        outcome = reduce_(gradients, names)
        rounds.append(torch.cat(rows, 1))
        # These are the vectors that the library exchanges: CLT-k's outcome is their mean.
        torch.testing.assert_close(outcome[torch.cat(places)], rounds[-1].mean(0), rtol=1e-4, atol=1e-6)
        return outcome

    engine.link.reduce_ = watched  # type: ignore[method-assign]
    for step in range(task.steps):
        engine.backward(step)
        engine.optimizer.step()
    return counts, rounds


def scaled(counts: list[int], rows: Tensor) -> Tensor:
    """Return the workers' values over their parameter's largest root mean square on any worker, as LGC sends them."""
    scales = ElementScales(counts)
    shared = torch.stack([scales.of(row) for row in rows]).amax(0)
    return torch.stack([scales.normal(row, shared) for row in rows])


@torch.no_grad()
def error(autoencoder: Autoencoder, weights: Tensor, rounds: Sequence[Tensor]) -> float:
    """Return |mean - decoded|^2 / |mean|^2 of all rounds together."""
    off = square = 0.0
    for rows in rounds:
        wanted = rows.mean(0)
        code = autoencoder.codes(weights, rows).mean(0, keepdim=True)
        found = autoencoder.reconstruct(weights, code, len(wanted))[0]
        off += float((wanted - found).double().square().sum())
        square += float(wanted.double().square().sum())
    return off / square


def fit(optimizer: str, rounds: Sequence[Tensor], seed: int) -> Row:
    """Take a step for each of the first 300 rounds; return the errors in the others before and after."""
    autoencoder = Autoencoder()
    training = Training(autoencoder, optimizer, RATE, 0.5, mean=True)
    weights = autoencoder.initial(seed).clone().requires_grad_(True)
    before = error(autoencoder, weights.detach(), rounds[TRAINING_ROUNDS:])
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    steps = kinds[optimizer]([weights], lr=RATE)
    losses = []
    for rows in rounds[:TRAINING_ROUNDS]:
        steps.zero_grad()
        loss = training.loss(weights, rows, None, 0)
        loss.backward()
        steps.step()
        losses.append(loss.item())
    after = error(autoencoder, weights.detach(), rounds[TRAINING_ROUNDS:])
    return {
        "before": before, "after": after, "learnt": 1 - after / before,
        "first_loss": mean(losses[:10]), "last_loss": mean(losses[-10:]),
    }  # fmt: skip


def main() -> int:
    """Train, fit, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    runs: list[Row] = []
    for seed in SEEDS:
        counts, raw = vectors(seed)
        relative = [scaled(counts, rows) for rows in raw]
        for name, (optimizer, is_scaled) in SETTINGS.items():
            runs.append({"setting": name, "seed": seed, **fit(optimizer, relative if is_scaled else raw, seed)})
            print(seed, name, {k: f"{v:.4g}" for k, v in runs[-1].items() if isinstance(v, float)}, flush=True)
    summary: list[Row] = []
    for name in SETTINGS:
        own = [run for run in runs if run["setting"] == name]
        row: Row = {"setting": name, "seeds": len(own)}
        for field in ("before", "after", "learnt"):
            values = [run[field] for run in own]
            row |= {field: mean(values), f"{field}_spread": stdev(values)}
        summary.append(row)
        print(f"{name}: {row['before']:.4f} to {row['after']:.4f} ± {row['after_spread']:.4f}")
    write(chosen.json, workers=WORKERS, elements=sum(counts), settings=summary, runs=runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
