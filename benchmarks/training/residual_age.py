"""What a training loses by a method, beside what a link measures of it, in a few hundred updates.

    python benchmarks/training/residual_age.py --task mnist --data FOLDER \\
        --json benchmarks/results/training/residual_age_mnist.json

A network of two convolutions and two linear layers, 4 simulated workers with 32 samples each, 280 updates of SGD at a
rate that falls to zero, with momentum 0.9 where the method has none of its own. Directions have a rate of their own. A
row is a method, on average over seeds: accuracy on the test images, bits an element, and what worker 0's link measured
in rounds 10, 30, 100 and 200: the age of what waits to be sent, in gradients; the relative error and the cosine of what
is sent; the share of the gradient in it; and the share of its elements that are not zero. The last column says whether
a link would have warned.

The limits of ``gradwire/link/diagnostics.py`` and the methods' default densities are chosen from this. Rows that
``--json`` names already are not measured again, so that the script may be stopped and started again.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.runs import write
from gradwire.link.diagnostics import EARLY, INTERVAL, Comparison, judge
from gradwire.tools.experiments.tasks import build

STEPS, WORKERS, SAMPLES = 280, 4, 32
RATE, MOMENTUM = 0.05, 0.9
DIRECTION_RATE = {"signsgd": 3e-4, "signum": 3e-4, "sketched_amsgrad": 2e-3}
ROUNDS = (*EARLY, *range(INTERVAL, STEPS, INTERVAL))
SPECS = (
    "fp32", "terngrad", "qsgd", "dqgd", "drive", "natural", "multiscale", "diana", "ef21", "errorfeedback",
    "ef_signsgd", "EFSignSGD(block_size=64)", "onebit", "scaledsign", "powersgd", "acp_sgd",
    "ACPSGD(matrix_rank=4)", "atomo",
    "QSGD(levels=1, block_size=None)", "signsgd", "signum",
    *(f"GTopK(density={k})" for k in (0.001, 0.01, 0.02, 0.05, 0.1)),
    *(f"DGC(density={k})" for k in (0.001, 0.01, 0.02, 0.05, 0.1)),
    *(f"CLTk(density={k})" for k in (0.001, 0.01, 0.02, 0.05, 0.1)),
    *(f"CAT(fixed_bytes={c}.0)" for c in (1500, 15000, 50000, 150000, 500000)),
    *(f"SketchedSGD(density={k})" for k in (0.001, 0.01, 0.02, 0.05)),
    *(f"ErrorFeedback(TopK(density={k}))" for k in (0.001, 0.01, 0.02, 0.05, 0.1)),
    *(f"ErrorFeedback(SIDCo(density={k}))" for k in (0.001, 0.01, 0.05)),
    *(f"ErrorFeedback(RandK(density={k}))" for k in (0.01, 0.1, 0.25)),
    *(f"ErrorFeedback(GRandK(cycle={c}))" for c in (64, 8)),
    *(f"TopK(density={k})" for k in (0.01, 0.05, 0.1)),
    *(f"SIDCo(density={k})" for k in (0.001, 0.01, 0.05, 0.1)),
    *(f"RandK(density={k})" for k in (0.01, 0.1, 0.25)),
    *(f"GRandK(cycle={c})" for c in (64, 8)),
    *(f"SketchedAMSGrad(density={k})" for k in (0.001, 0.01, 0.05)),
)  # fmt: skip


class Watched(gw.SimulatedLink):
    """Keeps what was measured of every round that a link measures."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.measured: dict[int, dict[str, float | None]] = {}

    def exchange_(self, gradients: torch.Tensor, names: Any = None) -> None:
        """Exchange one round, and look at it."""
        round, diagnostics = self.round, self._diagnostics
        super().exchange_(gradients, names)
        if round in ROUNDS:
            found = diagnostics.over_all(round, self._memories[0].norm(self.method.traits.waiting))
            if found is not None:
                self.measured[round] = asdict(found)


def network(task: str, seed: int) -> nn.Module:
    """Build the network: 66 or 43 thousand parameters."""
    channels, features = (1, 512) if task == "mnist" else (3, 800)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(channels, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip


def trained(spec: str, task: str, source: Any, seed: int) -> dict[str, Any]:
    """Train once; return the row."""
    method, model = gw.method(spec), network(task, seed)
    own = method.traits.owns_momentum or method.traits.direction
    rate = DIRECTION_RATE.get(type(method).name, RATE)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.0 if own else MOMENTUM)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    link = Watched(model.named_parameters(), method, WORKERS, optimizer=optimizer, seed=seed)
    parameters, rows = list(model.parameters()), torch.empty(WORKERS, link.numel)
    order, batch = torch.Generator().manual_seed(seed), WORKERS * SAMPLES
    for step in range(STEPS):
        indices = torch.randint(0, source.samples, (batch,), generator=order)
        inputs, labels = source.batch(indices, slice(0, batch), seed=seed, step=step)
        for row, x, y in zip(rows, inputs.split(SAMPLES), labels.split(SAMPLES)):
            loss = nn.functional.cross_entropy(model(x), y)
            row.copy_(torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters)]))
        link.scatter_(link.reduce_(rows))
        optimizer.step()
        scheduler.step()
    right = count = 0
    with torch.no_grad():
        for x, y in source.evaluation(0, 1):
            right, count = right + int((model(x).argmax(1) == y).sum()), count + len(y)
    traffic = link.traffic()
    return {
        "accuracy": 100 * right / count,
        "bits_per_element": 32 * traffic.sent_bytes / traffic.dense_bytes,
        "measured": {str(round): row for round, row in link.measured.items()},
    }


def warned(spec: str, row: dict[str, Any]) -> bool:
    """Return whether a link would have warned in some round."""
    method = gw.method(spec)
    return any(judge(method, Comparison(**found), int(round)) for round, found in row["measured"].items())


def table(rows: dict[str, list[dict[str, Any]]]) -> str:
    """Return the rows as a Markdown table, means over seeds."""
    titles = [
        "method",
        "accuracy, %",
        "bits",
        *(f"round {r}: age, error, cosine, kept, share" for r in ROUNDS),
        "warned",
    ]
    lines = [f"| {' | '.join(titles)} |", "|---|---:|---:|" + "---|" * (len(ROUNDS) + 1)]
    for spec, found in rows.items():
        cells = []
        for round in map(str, ROUNDS):
            seen = [row["measured"][round] for row in found if round in row["measured"]]
            names = ("age", "relative_error", "cosine", "kept", "density")
            cells.append(", ".join(f"{mean(row[name] or 0.0 for row in seen):.2f}" for name in names) if seen else "-")
        accuracy, bits = (mean(row[name] for row in found) for name in ("accuracy", "bits_per_element"))
        times = f"{sum(warned(spec, row) for row in found)} of {len(found)}"
        lines.append(f"| `{spec}` | {accuracy:.2f} | {bits:.2f} | {' | '.join(cells)} | {times} |")
    return "\n".join(lines)


def main() -> None:
    """Measure what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=("mnist", "cifar10"), default="mnist")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--collect", action="store_true", help="measure nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, list[dict[str, Any]]] = {}
    if given.json.exists():
        rows = json.loads(given.json.read_text())["rows"]
    source = None if given.collect else build(given.task, data=given.data, batch=WORKERS * SAMPLES).load()
    for seed in range(0 if given.collect else given.seeds):
        for spec in SPECS:
            if len(rows.setdefault(spec, [])) <= seed:
                rows[spec].append(trained(spec, given.task, source, seed))
                write(given.json, task=given.task, steps=STEPS, rows=rows)
                print(f"{spec}: {rows[spec][-1]['accuracy']:.2f}", flush=True)
    print(table({spec: found for spec, found in rows.items() if found}))


if __name__ == "__main__":
    main()
