"""What LGC's code adds to the leader's order, and what else the same bytes can carry.

    python benchmarks/claims/lgc_curve.py --data FOLDER --work runs/lgc_curve \\
        --json benchmarks/results/claims/lgc_curve.json

LeNet on MNIST is trained by LGC (by all-reduce, 4 simulated workers, the phases and settings of
``benchmarks/training/lgc.py``: 30 rounds in float32, 90 of top-k in which the autoencoder learns), and then for 60
rounds of its codes. Beside it, links of other methods are given the same gradients. With the leader's elements and
``feedback="selection"`` residuals depend on gradients and elements alone, so that all have the same vectors p to send,
of gradient, momentum and residual, and only differ in what they send of them. ``error`` is |mean p - outcome|^2 over
|mean p|^2 at the leader's elements, of all 60 rounds together; bytes are those that links count in these rounds.

Decoders without a link read what a round of LGC or of RankCurve sends, or as many numbers, and are fitted to the same
90 rounds: they have these methods' bytes. A penalty is the best for the last 30 rounds of a fit to the first 60. Values
in few bits are sent at the same elements, with their positions and without their order: bytes of positions are those of
CLT-k less those of its float32 values, and bytes of values those of a link of the quantiser.

Runs that are whole are not repeated, and others go on from where they were saved, so that the script may be stopped
and started again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.lgc_study import DENSITY, FULL, MOMENTUM, RATE, TRAINING, USUAL, Row, lgc
from benchmarks.lib.runs import claim, earlier, release, write
from gradwire.methods.learned.autoencoder import Autoencoder, ElementScales
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.simulate import SimulatedEngine
from gradwire.tools.experiments.tasks import build

TASK, WORKERS, ROUNDS = "mnist", 4, 60
PHASES = f"full_rounds={FULL}, training_rounds={TRAINING}"
ELEMENTS = f"density={DENSITY[TASK]}, momentum={MOMENTUM}"
LINKS = {
    "RankCurve": f"RankCurve({ELEMENTS}, {PHASES})",
    "CLT-k": f"CLTk({ELEMENTS})",
}
VALUES = (
    "QSGDMaxNorm(levels=127, block_size=None)",
    "QSGDMaxNorm(levels=7, block_size=None)",
    "TernGrad(clip=None)",
    "QSGDinf(levels=127, block_size=64)",
    "QSGDinf(levels=7, block_size=64)",
)
"""Quantisers of the values at the leader's elements, by two-shot."""

EVERY = 15
"""Steps from one save to the next."""

PENALTIES = (1.0, 10.0, 100.0, 1e3, 1e4, 1e5, 1e6)


class Shared:
    """A link whose gradients other links are given, too."""

    def __init__(self, link: gw.SimulatedLink, others: dict[str, gw.SimulatedLink]) -> None:
        self.link, self.others, self.outcomes = link, others, dict[str, Tensor]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.link, name)

    def reduce_(self, rows: Tensor) -> Tensor:
        """Return the link's mean, and keep that of the others."""
        self.outcomes = {label: link.reduce_(rows.clone()).clone() for label, link in self.others.items()}
        self.outcomes["LGC"] = self.link.reduce_(rows).clone()
        return self.outcomes["LGC"]


class Watched(SimulatedEngine):
    """Training by LGC that keeps the vectors of the leader's elements, and the outcomes of all links there."""

    def __init__(self, seed: int, data: Path) -> None:
        made = build(TASK, data=str(data), lr=RATE[TASK], momentum=0.0, optimizer="sgd", weight_decay=0.0)
        method = lgc(TASK)
        super().__init__(RunConfig(task=made, method=repr(method), workers=WORKERS, simulate=True, seed=seed))
        like = [(name, torch.empty(p.numel())) for name, p in self.model.named_parameters()]
        others = {
            label: gw.SimulatedLink(
                like, spec, WORKERS, min_numel=USUAL, seed=seed, warmup_steps=0 if label == "RankCurve" else FULL
            )
            for label, spec in LINKS.items()
        }
        self.shared = Shared(self.link, others)
        self.link = self.shared  # type: ignore[assignment]
        self.sizes = [(name, p.numel()) for name, p in self.model.named_parameters() if p.numel() >= USUAL]
        self.counts = [max(1, int(DENSITY[TASK] * n)) for _, n in self.sizes]
        offsets, at = {}, 0
        for name, p in self.model.named_parameters():
            offsets[name] = at
            at += p.numel()
        self.offsets = [offsets[name] for name, _ in self.sizes]
        self.vectors: list[Tensor] = []
        self.found: dict[str, list[Tensor]] = {}
        self.sent: dict[str, list[float]] = {}

    def backward(self, step: int) -> float:
        """Train, and keep the vectors ``[workers, k]`` in the leader's order, and outcomes ``[k]``."""
        before = self.link.state_dict() if step >= FULL else {}
        counted = self._counted()
        loss = super().backward(step)
        for label, bytes_ in self._counted().items():
            self.sent.setdefault(label, []).append(bytes_ - counted[label])
        if step < FULL:
            return loss
        after, rows, places = self.link.state_dict(), [], []
        for (name, _), count, offset in zip(self.sizes, self.counts, self.offsets):
            ranks = range(WORKERS)
            p = torch.stack(
                [before[f"rank {r}"].get(f"residual/{name}", torch.zeros(())) + after[f"rank {r}"][f"momentum/{name}"]
                 for r in ranks]
            )  # fmt: skip
            own = p[step % WORKERS]
            largest = torch.sort(own.abs(), descending=True, stable=True).indices[:count].sort().values
            order = largest[torch.sort(own[largest], descending=True, stable=True).indices]
            rows.append(p[:, order])
            places.append(offset + order)
        self.vectors.append(torch.cat(rows, 1))
        place = torch.cat(places)
        for label, outcome in self.shared.outcomes.items():
            self.found.setdefault(label, []).append(outcome[place])
        # The links have the vectors that are compared: CLT-k sends their mean.
        torch.testing.assert_close(self.found["CLT-k"][-1], self.vectors[-1].mean(0), rtol=1e-4, atol=1e-6)
        return loss

    def save(self, path: Path, step: int) -> None:
        """Write all that the following steps depend on."""
        links = {"LGC": self.shared.link, **self.shared.others}
        torch.save(
            {
                "step": step,
                "model": self.model.state_dict(),
                "links": {label: link.state_dict() for label, link in links.items()},
                **{name: getattr(self, name) for name in ("vectors", "found", "sent")},
            },
            path,
        )

    def resume(self, path: Path) -> int:
        """Read what :meth:`save` wrote; return the next step. Plain SGD has no state."""
        if not path.exists():
            return 0
        kept = torch.load(path, weights_only=True)
        self.model.load_state_dict(kept["model"])
        for label, link in {"LGC": self.shared.link, **self.shared.others}.items():
            link.load_state_dict(kept["links"][label])
        self.vectors, self.found, self.sent = kept["vectors"], kept["found"], kept["sent"]
        return int(kept["step"])

    def _counted(self) -> dict[str, float]:
        links = {"LGC": self.shared.link, **self.shared.others}
        return {n: mean(link.traffic(w).sent_bytes for w in range(WORKERS)) for n, link in links.items()}


def error(means: Tensor, found: Tensor) -> float:
    """Return |mean - found|^2 / |mean|^2 of all rounds together."""
    return float((means - found).double().square().sum() / means.double().square().sum())


def linear(inputs: Tensor, wanted: Tensor, penalty: float) -> Tensor:
    """Return the least squares map with a penalty on its squared entries, times the mean square of the inputs."""
    a, b = inputs.double(), wanted.double()
    scale = float(a.square().mean())
    gram = a.T @ a + penalty * scale * torch.eye(a.shape[1], dtype=torch.float64)
    found: Tensor = torch.linalg.solve(gram, a.T @ b)
    return found


def best_linear(inputs: Tensor, wanted: Tensor, weights: Tensor) -> tuple[Tensor, float]:
    """Return the map with the penalty that errs least in the last third of rounds, and that penalty.

    Args:
        inputs: ``[rounds, numbers]``, without their mean.
        wanted: What is to be added to the curve, ``[rounds, k]``, over the scales ``weights``.
    """
    cut = 2 * len(inputs) // 3

    def off(penalty: float) -> float:
        found = inputs[cut:].double() @ linear(inputs[:cut], wanted[:cut], penalty)
        return float(((wanted[cut:] - found) * weights[cut:]).square().sum())

    penalty = min(PENALTIES, key=off)
    return linear(inputs, wanted, penalty), penalty


def decoders(engine: Watched, weights: Tensor) -> tuple[dict[str, tuple[str, Tensor]], dict[str, float]]:
    """Return for each decoder whose bytes it has, and what it finds in the 60 rounds; and the penalties chosen."""
    rows = torch.stack(engine.vectors)
    scaled, means, k = ElementScales(engine.counts), rows.mean(1), rows.shape[2]
    leaders = torch.stack([row[(FULL + t) % WORKERS] for t, row in enumerate(rows)])
    scales = torch.stack([scaled.of(row)[scaled.each] for row in leaders])
    shared = torch.stack([torch.stack([scaled.of(x) for x in row]).amax(0)[scaled.each] for row in rows])
    fit, test = slice(0, TRAINING), slice(TRAINING, TRAINING + ROUNDS)
    relative = means / scales
    curve = relative[fit].mean(0)
    found: dict[str, tuple[str, Tensor]] = {}

    halves = torch.zeros(k)
    for i in range(len(engine.counts)):
        for side in (curve > 0, curve <= 0):
            own = (scaled.each == i) & side
            halves[own] = curve[own].mean() if bool(own.any()) else 0.0
    found["two constants a parameter, by order"] = "RankCurve", scales[test] * halves
    found["the curve, with the second phase's scales"] = "RankCurve", scales[fit].mean(0).expand(ROUNDS, -1) * curve

    autoencoder = Autoencoder()
    with torch.no_grad():
        codes = torch.stack([autoencoder.codes(weights, x).flatten(1).mean(0) for x in rows / shared[:, None]])
    centred = codes - codes[fit].mean(0)
    left = relative - curve
    penalties = {}
    matrix, penalties["code"] = best_linear(centred[fit], left[fit], scales[fit])
    found["the curve, and a linear map of LGC's code"] = (
        "LGC",
        scales[test] * (curve + (centred[test].double() @ matrix).float()),
    )
    spread = (means - scales * curve)[fit].square().mean(0)
    kept = spread.topk(codes.shape[1]).indices
    exact = scales[test] * curve
    exact[:, kept] = means[test][:, kept]
    found["the curve, and means at a quarter of the ranks"] = "LGC", exact
    own = (rows / scales[:, None])[fit].flatten(0, 1)
    basis = torch.linalg.svd(own - own.mean(0), full_matrices=False)[2][: codes.shape[1]]
    found["the curve, and a projection of the values"] = "LGC", scales[test] * (curve + left[test] @ basis.T @ basis)
    return found, penalties


def floats(sizes: Sequence[tuple[str, int]]) -> float:
    """Return the bytes of a round in which all values are float32, by two-shot: one of warm-up."""
    link = gw.SimulatedLink(
        [(n, torch.empty(k)) for n, k in sizes], "terngrad", WORKERS, min_numel=0, warmup_steps=1, collective="two_shot"
    )
    link.reduce_(torch.zeros(WORKERS, link.numel))
    return mean(link.traffic(w).sent_bytes for w in range(WORKERS))


def quantised(engine: Watched, spec: str, positions: float, seed: int) -> tuple[float, Tensor]:
    """Return the bytes of a round, and the means of the values at the leader's elements in the 60 rounds."""
    light = [(name, count) for (name, _), count in zip(engine.sizes, engine.counts)]
    names = {name for name, _ in light}
    dense = [(n, p.numel()) for n, p in engine.model.named_parameters() if n not in names]
    link = gw.SimulatedLink(
        [(n, torch.empty(k)) for n, k in light + dense], spec, WORKERS, min_numel=0, seed=seed, collective="two_shot",
        exclude=[n for n, _ in dense],
    )  # fmt: skip
    beside, k = sum(k for _, k in dense), sum(engine.counts)
    rows = engine.vectors[TRAINING : TRAINING + ROUNDS]
    found = torch.stack([link.reduce_(torch.cat([row, torch.zeros(WORKERS, beside)], 1))[:k].clone() for row in rows])
    return positions + mean(link.traffic(w).sent_bytes for w in range(WORKERS)) / ROUNDS, found


def measure(seed: int, data: Path, saved: Path) -> Row:
    """Train, compare, and return the errors and bytes of all."""
    began_s = time.monotonic()
    engine = Watched(seed, data)
    for step in range(engine.resume(saved), FULL + TRAINING + ROUNDS):
        if step % EVERY == 0 and step > FULL:
            engine.save(saved, step)
        for group in engine.optimizer.param_groups:
            group["lr"] = engine.plan.task.learning_rate(step)
        engine.backward(step)
        engine.optimizer.step()
    means = torch.stack([row.mean(0) for row in engine.vectors[TRAINING:]])
    # The first of these rounds sends LGC's weights as well.
    sent = {label: mean(bytes_[FULL + TRAINING + 1 :]) for label, bytes_ in engine.sent.items()}
    found: list[Row] = []
    for label, outcomes in engine.found.items():
        off = error(means, torch.stack(outcomes[TRAINING:]))
        found.append({"label": label, "error": off, "sent_bytes_a_round": sent[label]})
    others, penalties = decoders(engine, engine.link.state_dict()["global"]["autoencoder"])
    for label, (bytes_of, outcome) in others.items():
        found.append({"label": label, "error": error(means, outcome), "sent_bytes_a_round": sent[bytes_of]})
    light = [(name, count) for (name, _), count in zip(engine.sizes, engine.counts)]
    dense = [(n, p.numel()) for n, p in engine.model.named_parameters() if n not in dict(light)]
    positions = sent["CLT-k"] - floats(light + dense)
    for spec in VALUES:
        bytes_, outcome = quantised(engine, spec, positions, seed)
        found.append({"label": f"values by `{spec}`", "error": error(means, outcome), "sent_bytes_a_round": bytes_})
    return {
        "seed": seed, "elements": sum(engine.counts), "found": found, "penalties": penalties,
        "positions_bytes_a_round": positions, "took_s": time.monotonic() - began_s,
    }  # fmt: skip


def summary(runs: Sequence[Row]) -> list[Row]:
    """Return a row for each label: mean and spread of the error over seeds, and mean bytes."""
    rows = []
    for label in dict.fromkeys(row["label"] for run in runs for row in run["found"]):
        own = [row for run in runs for row in run["found"] if row["label"] == label]
        errors = [row["error"] for row in own]
        rows.append({
            "label": label, "seeds": len(own), "error": mean(errors), "spread": stdev(errors) if len(own) > 1 else None,
            "sent_bytes_a_round": mean(row["sent_bytes_a_round"] for row in own),
        })  # fmt: skip
    return rows


def main() -> None:
    """Measure what is missing, and write what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/lgc_curve"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.work.mkdir(parents=True, exist_ok=True)
    known = {row["seed"]: row for row in earlier(arguments.json, "runs")}
    for seed in arguments.seeds:
        path = arguments.work / f"{seed}.json"
        if path.exists() or seed in known or not claim(path):
            continue
        row = measure(seed, arguments.data, arguments.work / f"{seed}.pt")
        path.write_text(json.dumps(row, indent=1) + "\n")
        release(path)
        for found in row["found"]:
            print(f"{seed} {found['label']}: {found['error']:.4f}, {found['sent_bytes_a_round']:.0f} bytes", flush=True)
    runs = [json.loads(path.read_text()) for path in sorted(arguments.work.glob("*.json"))]
    rows = list((known | {row["seed"]: row for row in runs}).values())
    kept = {"task": TASK, "workers": WORKERS, "rounds": ROUNDS, "full_rounds": FULL, "training_rounds": TRAINING}
    write(arguments.json, **kept, density=DENSITY[TASK], momentum=MOMENTUM, methods=summary(rows), runs=rows)


if __name__ == "__main__":
    main()
