"""Graph networks on partitioned graphs: variable against fixed rates, and caches, by accuracy and bytes of halos.

    python benchmarks/training/graph.py --work runs/graph --json benchmarks/results/training/graph.json

The task ``graph`` on simulated workers: all nodes in every step, three layers of width 64, Adam, weight gradients in
float32, the same seeds for all methods; a seed draws the weights, the partition and the masks. Accuracy is that of the
nodes whose labels are unknown, evaluated with full communication. Bytes are those of halos, of all workers together,
with headers and lengths. Runs that are whole are not repeated, so the script may be stopped and started again; several
copies of it share the work. ``--collect`` only writes the results. Rows of the result that ``--json`` names stay where
the work folder has no runs of theirs. ``--further`` trains the set-ups of other models, partitions and workers first.

``--table adaptive`` trains fixed and adaptive tolerances of CDFGNN on digits instead, and ``--table large`` GraphSAGE
on a generated graph of 100000 nodes, 20 steps, each for a result of its own::

    python benchmarks/training/graph.py --table adaptive --work runs/graph-adaptive \\
        --json FILE
    python benchmarks/training/graph.py --table large --seeds 1 --work runs/graph-large \\
        --json FILE
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.runs import claim, earlier, release, write

STEPS, WORKERS, EVERY = 60, 4, 10
SEEDS = (0, 1, 2)
FULL, NONE = "full", "none"
HALOS: dict[str, str] = {
    FULL: "fp32",
    NONE: "isolated",
    "fixed 2": "VARCO(start=2, end=2)",
    "fixed 8": "VARCO(start=8, end=8)",
    "fixed 32": "VARCO(start=32, end=32)",
    "fixed 128": "VARCO(start=128, end=128)",
    "VARCO 128 to 1, slope 5": "VARCO(start=128, end=1, slope=5)",
    "VARCO 128 to 1, slope 2": "VARCO(start=128, end=1, slope=2)",
    "VARCO 128 to 1, slope 1": "VARCO(start=128, end=1, slope=1)",
    "VARCO 128 to 8, slope 5": "VARCO(start=128, end=8, slope=5)",
    "bf16": "bf16",
    "QSGDinf 4 bits": "QSGDinf(levels=7, block_size=64)",
    "CDFGNN 0.02": "CDFGNN(tolerance=0.02)",
    "CDFGNN 0.1": "CDFGNN(tolerance=0.1)",
    "CDFGNN 0.3": "CDFGNN(tolerance=0.3)",
    "CDFGNN 0.1, 8 bits": "CDFGNN(tolerance=0.1, values=QSGDinf(levels=127, block_size=64))",
    "CDFGNN 0.1, 4 bits": "CDFGNN(tolerance=0.1, values=QSGDinf(levels=7, block_size=64))",
    "CDFGNN 0.3, 4 bits": "CDFGNN(tolerance=0.3, values=QSGDinf(levels=7, block_size=64))",
    "CDFGNN 0.1, adaptive": "CDFGNN(tolerance=0.1, adaptive=True)",
    "CDFGNN 0.3, adaptive": "CDFGNN(tolerance=0.3, adaptive=True)",
}
"""Specs by the names in the results."""
LATER = (
    "bf16",
    "VARCO 128 to 1, slope 1",
    "VARCO 128 to 8, slope 5",
    "CDFGNN 0.02",
    "CDFGNN 0.1, 4 bits",
)
"""Trained when all others are."""
ADAPTIVE = ("CDFGNN 0.1, adaptive", "CDFGNN 0.3, adaptive")
TOLERANCES = (FULL, "CDFGNN 0.1", "CDFGNN 0.3", *ADAPTIVE)
"""Of the table of adaptive tolerances."""
AT_LARGE = (FULL, "VARCO 128 to 1, slope 5", NONE, "fixed 2", "QSGDinf 4 bits")
"""Of the large graph, those that say most first."""
OTHERS = (FULL, NONE, "fixed 8", "fixed 128", "VARCO 128 to 1, slope 5", "CDFGNN 0.1, 8 bits")
"""Of the set-ups that only show whether the picture is another."""
LONGER = (FULL, "VARCO 128 to 1, slope 5", "fixed 2")
"""Of five times as many steps."""


@dataclass(frozen=True)
class SetUp:
    """What all methods of a table share."""

    graph: str
    model: str = "gcn"
    partition: str = "random"
    workers: int = WORKERS
    steps: int = STEPS


DIGITS, SBM, LONG = (SetUp("digits"),), (SetUp("sbm"),), (SetUp("sbm", steps=5 * STEPS),)
LARGE = (SetUp("sbm100k", model="sage", steps=20),)
FURTHER = (
    SetUp("digits", model="gat"),
    SetUp("digits", partition="greedy"),
    SetUp("digits", workers=8),
    SetUp("sbm", workers=8),
)
Stage: TypeAlias = tuple[tuple[SetUp, ...], tuple[str, ...]]

BESIDE: dict[str, tuple[SetUp, ...]] = {"main": (*DIGITS, *SBM), "adaptive": DIGITS, "large": LARGE}
"""The set-ups on whose nodes a perceptron is trained, too, by the name of the table."""


@dataclass(frozen=True)
class Training:
    """One training: what decides it, and where its result lies."""

    setup: SetUp
    label: str
    seed: int
    work: Path

    @property
    def path(self) -> Path:
        """Its file, named after what decides it."""
        s = self.setup
        words = f"{s.graph}-{s.model}-{s.partition}-{s.workers}-{self.label}-{s.steps}-{self.seed}"
        return self.work / (re.sub(r"[^A-Za-z0-9.-]+", "_", words) + ".json")

    def found(self) -> dict[str, Any] | None:
        """Return its result, if it is whole."""
        return json.loads(self.path.read_text()) if self.path.exists() else None

    def go(self) -> None:
        """Train, unless it is whole or another process does."""
        if self.path.exists() or not claim(self.path):
            return
        started = time.monotonic()
        result = self.train()
        self.path.write_text(json.dumps(result))
        release(self.path)
        print(f"{self.path.stem}: {result['curve'][-1]} ({time.monotonic() - started:.0f} s)", flush=True)

    def train(self) -> dict[str, Any]:
        """Return accuracy and bytes every :data:`EVERY` steps."""
        import torch

        from gradwire.graphs import cut_edges, partition
        from gradwire.tools.experiments.config import RunConfig
        from gradwire.tools.experiments.engines import simulated_engine
        from gradwire.tools.experiments.tasks import build
        from gradwire.tools.experiments.tasks.graph import build_graph

        torch.set_num_threads(1)
        s = self.setup
        task = build(
            "graph", graph=s.graph, model=s.model, partition=s.partition, halo=HALOS[self.label], steps=s.steps
        )
        engine = simulated_engine(RunConfig(task=task, workers=s.workers, seed=self.seed, simulate=True))
        owner = partition(build_graph(s.graph), s.workers, s.partition, self.seed)
        curve = []
        for step in range(s.steps):
            loss = engine.backward(step)
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            if (step + 1) % EVERY == 0:
                bytes_of = engine.record()["halo"]["traffic"]
                curve.append(
                    {
                        "step": step + 1,
                        "loss": loss,
                        "accuracy": engine.score()[1],
                        "halo_bytes": sum(worker["sent_bytes"] for worker in bytes_of),
                        "full_bytes": sum(worker["full_bytes"] for worker in bytes_of),
                    }
                )
        return {"cut_edges": cut_edges(build_graph(s.graph), owner), "curve": curve}


def perceptron(graph_name: str, steps: int, seed: int) -> float:
    """Return the accuracy of a perceptron on the same nodes, as wide, with as many steps, which sees no edges."""
    import torch

    from gradwire.tools.experiments.order import generator
    from gradwire.tools.experiments.tasks.graph import build_graph

    graph = build_graph(graph_name)
    with torch.random.fork_rng():
        torch.manual_seed(generator(seed, "perceptron", 0).initial_seed())
        layers = [torch.nn.Linear(graph.features.shape[1], 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)]
        model = torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(64, graph.classes))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for _ in range(steps):
        optimizer.zero_grad()
        found = model(graph.features[graph.training])
        torch.nn.functional.cross_entropy(found, graph.labels[graph.training]).backward()
        optimizer.step()
    with torch.no_grad():
        right = model(graph.features[graph.held_out]).argmax(1) == graph.labels[graph.held_out]
    return float(right.float().mean())


def trainings(arguments: argparse.Namespace) -> Iterator[Training]:
    """Yield all trainings, those that say most first."""
    first = tuple(label for label in HALOS if label not in (*LATER, *ADAPTIVE))
    main = ((DIGITS, first), (SBM, OTHERS), (LONG, LONGER), (FURTHER, OTHERS), (SBM, first), (DIGITS + SBM, LATER))
    own = {"adaptive": (DIGITS, TOLERANCES), "large": (LARGE, AT_LARGE)}
    tables: dict[str, tuple[Stage, ...]] = {"main": main, **{name: (stage,) for name, stage in own.items()}}
    stages = sorted(tables[arguments.table], key=lambda stage: arguments.further and stage[0] is not FURTHER)
    found: dict[Training, None] = {}
    for setups, labels in stages:
        for seed in SEEDS[: arguments.seeds]:
            for setup in setups:
                found |= {Training(setup, label, seed, arguments.work): None for label in labels}
    yield from found


def spread(values: list[float]) -> float | None:
    """Return the standard deviation, where there are several values."""
    return stdev(values) if len(values) > 1 else None


def collect(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each set-up and method: means over the seeds whose trainings are whole."""
    groups: dict[tuple[SetUp, str], list[dict[str, Any]]] = {}
    for training in trainings(arguments):
        result = training.found()
        if result:
            groups.setdefault((training.setup, training.label), []).append(result)
    table = []
    for (setup, label), results in groups.items():
        last = [result["curve"][-1] for result in results]
        accuracy = [row["accuracy"] for row in last]
        curve = [
            {
                "step": rows[0]["step"],
                "accuracy_mean": mean(row["accuracy"] for row in rows),
                "halo_bytes": mean(row["halo_bytes"] for row in rows),
            }
            for rows in zip(*(result["curve"] for result in results))
        ]
        table.append(
            {
                **setup.__dict__,
                "label": label,
                "halo": HALOS[label],
                "seeds": len(results),
                "cut_edges": mean(result["cut_edges"] for result in results),
                "accuracy_mean": mean(accuracy),
                "accuracy_std": spread(accuracy),
                "halo_bytes": mean(row["halo_bytes"] for row in last),
                "full_bytes": mean(row["full_bytes"] for row in last),
                "saving": mean(row["full_bytes"] / row["halo_bytes"] if row["halo_bytes"] else 0.0 for row in last),
                "curve": curve,
            }
        )
    return table


def same(row: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two rows are of one set-up and method."""
    return all(row[key] == other[key] for key in (*SetUp.__dataclass_fields__, "label"))


def main() -> int:
    """Run, collect, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/graph"))
    parser.add_argument("--seeds", type=int, default=len(SEEDS), choices=range(1, len(SEEDS) + 1))
    parser.add_argument("--further", action="store_true")
    parser.add_argument("--table", default="main", choices=list(BESIDE))
    parser.add_argument("--collect", action="store_true", help="run nothing")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not arguments.collect:
        for training in trainings(arguments):
            training.go()
    table = collect(arguments)
    table = [row for row in earlier(arguments.json, "rows") if not any(same(row, new) for new in table)] + table
    for row in table:
        name = f"{row['graph']:6s} {row['model']} {row['partition']:7s} {row['workers']} {row['label']:24s}"
        off = f" +- {100 * row['accuracy_std']:.2f}" if row["accuracy_std"] is not None else ""
        print(f"{name} {100 * row['accuracy_mean']:.2f}{off} %, {row['halo_bytes'] / 1e6:.1f} MB, {row['seeds']} seeds")
    alone = {
        setup.graph: [perceptron(setup.graph, setup.steps, seed) for seed in SEEDS[: arguments.seeds]]
        for setup in BESIDE[arguments.table]
    }
    beside = {name: {"accuracy_mean": mean(found), "accuracy_std": spread(found)} for name, found in alone.items()}
    print("perceptrons without edges:", {name: f"{100 * row['accuracy_mean']:.2f} %" for name, row in beside.items()})
    write(arguments.json, perceptron=beside, seeds=list(SEEDS[: arguments.seeds]), rows=table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
