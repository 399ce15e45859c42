"""Every method trained on one task with one tuning budget: accuracy, bytes, and bytes to a mark.

    python benchmarks/training/method_table.py --json benchmarks/results/training/methods_digits.json
    python benchmarks/training/method_table.py --task mnist --data FOLDER \\
        --json benchmarks/results/training/methods_mnist.json

Four simulated workers, SGD. Each method is trained at three learning rates from the first seed; the rate with the
lowest training loss over the last tenth of the steps is then trained from the other seeds. Coded methods take the rate
of the method that they code. Momentum is 0.9: the optimizer's, or the method's own. Methods that keep a residual and
have a field for momentum are tried with it after the exchange, before it, and without any at rates ten times as high,
each at three rates, and the lowest training loss decides among the nine. The mark is 0.95 times fp32's final accuracy.

The other tasks train the best methods of the table for ``digits`` (``--from``), at most one setting of each; those of
images also what sends a hundred and a thousand times fewer bytes than float32. With ``--narrow TABLE`` they train these
and float32 alone, at the rates that the table has found: for trainings so long that three rates would take too much.

With ``--keep TABLE`` rows of an earlier table stay as they are, except where momentum has several places: for a change
that concerns these alone.

With ``--methods SPEC ...`` they train float32 and these, and with ``--evaluations`` they look at the held-out images
more seldom, which takes most of a short training's time.

    python benchmarks/training/method_table.py --task mnist --data FOLDER --steps 150 --evaluations 3 --seeds 1 \\
        --methods "PowerSGD()" "EFSignSGD()" "GTopK(density=0.01)" "ErrorFeedback(RandK(density=0.1))" \\
        --json benchmarks/results/training/places_mnist.json

Runs that are whole are not repeated, so that the script may be stopped and started again, and trains only what is
missing when methods are added. Several copies of it share the work. ``--collect`` runs nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.method_entries import (
    RATES,
    Entry,
    as_tuned,
    entries,
    entry_of,
    family,
    label,
    narrow,
    places,
    plain,
    rates_of,
    tuned_as,
)
from benchmarks.lib.results import RESULTS
from benchmarks.lib.runs import claim, release, write
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.folder import RunFolder
from gradwire.tools.experiments.run_record import config_of, slug
from gradwire.tools.experiments.simulate import SimulatedEngine
from gradwire.tools.experiments.tasks import build
from gradwire.tools.experiments.train import Trainer

WORKERS = 4
SEEDS = (0, 1, 2)
STEPS = {"digits": 300, "mnist": 500, "text": 300, "cifar10": 300}
EVALUATIONS = {"digits": 60, "mnist": 16, "text": 15, "cifar10": 6}
SETTINGS: dict[str, dict[str, Any]] = {"text": {"model": "transformer"}}
"""Of tasks, beside those that the table decides."""
BEST = {"mnist": 12, "text": 6, "cifar10": 6}
"""How many methods of the table for ``digits`` a task trains; others train all."""
MARK = 0.95
"""The mark as a share of fp32's final accuracy."""
CLOSE = 0.01
"""How far below fp32's final accuracy a method may end to be among the best."""
BANDWIDTHS = {"100mbit": 100e6, "1gbit": 1e9}

Row = dict[str, Any]


class TimedEngine(SimulatedEngine):
    """Keeps the processor's seconds of each step: a loaded machine stretches those of a clock."""

    def __init__(self, plan: RunConfig) -> None:
        super().__init__(plan)
        self.steps_s: list[float] = []

    def backward(self, step: int) -> float:
        """Time forward, backward and the exchange of all workers."""
        began_s = time.process_time()
        loss = super().backward(step)
        self.steps_s.append(time.process_time() - began_s)
        return loss


@dataclass(frozen=True)
class Run:
    """One training: what decides it, and where it lies."""

    task: str
    entry: Entry
    rate: float
    seed: int
    steps: int
    work: Path
    evaluations: int | None = None

    @property
    def folder(self) -> Path:
        """Its folder, named after what decides it."""
        name = f"{slug(self.entry.spec)[:60]}-{zlib.crc32(self.entry.spec.encode()):08x}"
        least = "" if self.entry.min_numel is None else f"-from{self.entry.min_numel}"
        least += "" if self.evaluations is None else f"-e{self.evaluations}"
        return self.work / (
            f"{self.task}-{name}-m{self.entry.momentum:g}{least}-lr{self.rate:g}-{self.steps}-{self.seed}"
        )

    def ended(self) -> Row | None:
        """Return what it took, and why it failed if it did; None where it is not whole."""
        path = self.folder / "ended.json"
        return json.loads(path.read_text()) if path.exists() else None

    def rows(self) -> list[Row]:
        """Return its rows of metrics."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def go(self, data: Path | None) -> None:
        """Train, unless it is whole or another process does."""
        if self.ended() or not claim(self.folder):
            return
        settings = {"lr": self.rate, "momentum": self.entry.momentum, "optimizer": "sgd", "steps": self.steps}
        settings["eval_every"] = max(1, self.steps // (self.evaluations or EVALUATIONS[self.task]))
        settings |= SETTINGS.get(self.task, {})
        task = build(self.task, data=None if data is None else str(data), **settings)
        plan = RunConfig(
            task=task,
            method=self.entry.spec,
            workers=WORKERS,
            simulate=True,
            seed=self.seed,
            min_numel=self.entry.min_numel,
        )
        ended = train(plan, self.folder)
        (self.folder / "ended.json").write_text(json.dumps(ended) + "\n")
        release(self.folder)
        last = self.rows()[-1]
        told = ended["failed"] or f"{last['accuracy']:.4f}"
        print(f"{self.folder.name}: {told} ({ended['wall_s']:.0f} s, {ended['cpu_s']:.0f} of them on the processor)")
        sys.stdout.flush()


def train(plan: RunConfig, folder: Path) -> Row:
    """Train in this process, and return what it took, and the sentence with which it failed if it did."""
    run = RunFolder.create(folder, overwrite=True)
    run.write_config(config_of(plan))
    gw.warm_up(plan.method)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    engine, failed = TimedEngine(plan), None
    try:
        Trainer(plan, engine, run, on_row=lambda row: None).run()
    except gw.GradwireError as error:
        failed = str(error)
    return {
        "failed": failed,
        "wall_s": time.perf_counter() - began_s,
        "cpu_s": time.process_time() - began_cpu_s,
        "compute_s": median(engine.steps_s) / plan.workers,
    }


def training_loss(rows: Iterable[Row], steps: int) -> float:
    """Return the mean training loss over the last tenth of the steps."""
    return mean(row["loss"] for row in rows if row["event"] == "train" and row["step"] > 0.9 * steps)


def first_at(rows: Iterable[Row], mark: float) -> Row | None:
    """Return the first evaluation whose accuracy is at least the mark."""
    return next((row for row in rows if row["event"] == "eval" and row["accuracy"] >= mark), None)


def seconds(bytes_: float, bandwidth: float, steps: float, compute_s: float) -> float:
    """Return how long a worker takes that sends so many bytes and computes so many steps, one after the other."""
    return 8 * bytes_ / bandwidth + steps * compute_s


def moments(values: Sequence[float]) -> Row:
    """Return mean and standard deviation; None where there are too few values."""
    return {"mean": mean(values) if values else None, "std": stdev(values) if len(values) > 1 else None}


def tuned(runs: Sequence[Run]) -> tuple[Run | None, list[Row]]:
    """Return the run with the lowest training loss of those that did not fail, and what each rate came to.

    None for the run where all failed, or one is not whole.
    """
    tried: list[Row] = []
    losses: list[tuple[float, Run]] = []
    for run in runs:
        ended = run.ended()
        if ended is None:
            return None, []
        loss = None if ended["failed"] else training_loss(run.rows(), run.steps)
        tried.append(
            {
                "momentum": run.entry.convention,
                "learning_rate": run.rate,
                "training_loss": loss,
                "failed": ended["failed"],
            }
        )
        if loss is not None:
            losses.append((loss, run))
    return (min(losses, key=lambda pair: pair[0])[1] if losses else None), tried


def best(rows: Sequence[Row], count: int) -> list[str]:
    """Return the specs of fp32 and of the ``count - 1`` others that reach the mark with the fewest bytes.

    Only those that end close to fp32's accuracy or above it count, with all seeds at the mark, and one of each family.
    """
    whole = next(row for row in rows if row["method"] == "FP32()")
    taken = {family(whole["method"]): whole["method"]}
    good = [
        row
        for row in rows
        if row["rate"] is not None
        and row["accuracy"]["mean"] >= whole["accuracy"]["mean"] - CLOSE
        and row["mark"]["seeds"] == row["seeds"]
    ]
    for row in sorted(good, key=lambda row: row["mark"]["bytes"]["mean"]):
        if len(taken) < count:
            taken.setdefault(family(row["method"]), row["method"])
    return list(taken.values())


@dataclass(frozen=True)
class Line:
    """What a line of the table comes from: an entry, and the runs that find its rate."""

    entry: Entry
    tuning: tuple[Run, ...]

    @classmethod
    def of(
        cls,
        entry: Entry,
        task: str,
        steps: int,
        work: Path,
        rate: float | None = None,
        evaluations: int | None = None,
    ) -> Line:
        """Return an entry's line; a given ``rate`` is the only one, with the entry's own place of momentum."""
        trained = tuned_as(entry, task)
        tried = [(place, value) for place in places(trained) for value in rates_of(place, task)]
        if rate is not None:
            tried = [(entry, rate)]
        return cls(entry, tuple(Run(task, place, value, SEEDS[0], steps, work, evaluations) for place, value in tried))

    def finals(self, seeds: int) -> list[Run]:
        """Return the runs at the rate that was found; none while it is not."""
        chosen, _ = tuned(self.tuning)
        if chosen is None:
            return []
        return [replace(chosen, entry=as_tuned(self.entry, chosen.entry), seed=seed) for seed in SEEDS[:seeds]]


def kept_rows(path: Path | None) -> list[Row]:
    """Return the rows of an earlier table whose methods have one place for momentum."""
    rows = [] if path is None else json.loads(path.read_text())["rows"]
    return [{"of": row["method"], **row} for row in rows if len(places(_as_entry(row))) == 1]


def _as_entry(row: Row) -> Entry:
    return Entry(row["method"], 0.0, 1.0, row["momentum"], row["min_numel"])


def lines(arguments: argparse.Namespace) -> list[Line]:
    """Return what is to be trained."""
    kept = {(row["of"], row["min_numel"]) for row in kept_rows(arguments.keep)}
    return [line for line in _all_lines(arguments) if (line.entry.spec, line.entry.min_numel) not in kept]


def _all_lines(arguments: argparse.Namespace) -> list[Line]:
    steps = arguments.steps or STEPS[arguments.task]
    if arguments.narrow:
        rows = json.loads(arguments.narrow.read_text())["rows"]
        found = {(plain(row["method"]), row["min_numel"]): row for row in rows if row["rate"] is not None}
        wanted = [entry_of("fp32", arguments.task), *narrow(arguments.task)]
        pairs = [(entry, row) for entry in wanted if (row := found.get((plain(entry.spec), entry.min_numel)))]
        return [
            Line.of(place, arguments.task, steps, arguments.work, row["rate"])
            for entry, row in pairs
            for place in places(entry)
            if (place.spec, place.convention) == (row["method"], row["momentum"])
        ]
    if arguments.methods:
        wanted = [entry_of(spec, arguments.task) for spec in ("fp32", *arguments.methods)]
    elif arguments.task in BEST:
        found = json.loads(arguments.best_of.read_text())["rows"]
        wanted = [entry_of(spec, arguments.task) for spec in best(found, BEST[arguments.task])]
        wanted += narrow(arguments.task)
    else:
        wanted = entries(arguments.task)
    return [
        Line.of(entry, arguments.task, steps, arguments.work, evaluations=arguments.evaluations) for entry in wanted
    ]


def completed(runs: Sequence[Run]) -> Iterator[tuple[Row, list[Row]]]:
    """Yield what each whole run that did not fail took, and its rows."""
    for run in runs:
        ended = run.ended()
        if ended and not ended["failed"]:
            yield ended, run.rows()


def row_of(line: Line, seeds: int, mark: float | None) -> Row | None:
    """Return a line of the table; None where its tuning or all of its runs at the best rate are missing.

    Args:
        line: What it comes from.
        seeds: How many the best rate is trained from.
        mark: The accuracy to reach; None takes it from this line.
    """
    chosen, tried = tuned(line.tuning)
    if not tried:
        return None
    entry = line.entry if chosen is None else as_tuned(line.entry, chosen.entry)
    row: Row = {
        "method": entry.spec,
        "of": line.entry.spec,
        "label": label(entry.spec),
        "remembers": bool(gw.method(entry.spec).traits.remembers),
        "momentum": entry.convention,
        "tried": tried,
        "steps": line.tuning[0].steps,
        "min_numel": entry.min_numel,
    }
    if chosen is None:
        return {**row, "rate": None, "seeds": 0, "failed": 0}
    runs = line.finals(seeds)
    whole = list(completed(runs))
    if not whole:
        return None
    last = [rows[-1] for _, rows in whole]
    accuracy = [end["accuracy"] for end in last]
    mark = MARK * mean(accuracy) if mark is None else mark
    compute_s = median(ended["compute_s"] for ended, _ in whole)
    reached = [found for _, rows in whole if (found := first_at(rows, mark))]
    steps, sent = [found["step"] for found in reached], [_busier(found) for found in reached]
    row |= {
        "rate": chosen.rate,
        "at_the_grids_end": len(tried) > 1 and chosen.rate in _ends(tried, chosen.entry.convention),
        "seeds": len(whole),
        "failed": sum(bool(ended and ended["failed"]) for ended in (run.ended() for run in runs)),
        "accuracy": {**moments(accuracy), "values": accuracy},
        "loss": moments([end["loss"] for end in last]),
        "training_loss": moments([training_loss(rows, chosen.steps) for _, rows in whole]),
        "bits_per_element": mean(end["bits_per_element"] for end in last),
        "sent_bytes": moments([end["sent_bytes"] for end in last]),
        "compute_s": compute_s,
        "mark": {"accuracy": mark, "seeds": len(reached), "steps": moments(steps), "bytes": moments(sent)},
    }
    for name, bandwidth in BANDWIDTHS.items():
        row["mark"][f"seconds_{name}"] = (
            seconds(mean(sent), bandwidth, mean(steps), compute_s) if len(reached) == len(whole) else None
        )
    return row


def _ends(tried: Sequence[Row], convention: str) -> tuple[float, float]:
    """Return the lowest and the highest rate that was tried with momentum in one place."""
    rates = [one["learning_rate"] for one in tried if one["momentum"] == convention]
    return min(rates), max(rates)


def _busier(row: Row) -> int:
    """Return the bytes of the busier direction of a worker's link."""
    return max(row["sent_bytes"], row["received_bytes"])


def collect(wanted: Sequence[Line], seeds: int, kept: Sequence[Row] = ()) -> Row:
    """Return all lines, fp32's first, which sets the mark, and what all of their runs took.

    Args:
        kept: Rows of an earlier table that stay as they are.
    """
    ordered = [line for line in wanted if line.entry.spec != "FP32()"]
    first = [row_of(line, seeds, None) for line in wanted if line.entry.spec == "FP32()"]
    whole = next((row for row in (*first, *kept) if row and row["of"] == "FP32()"), None)
    if whole is None:
        return {"rows": []}
    mark = whole["mark"]["accuracy"]
    rows = [row for line in ordered if (row := row_of(line, seeds, mark))]
    rows += [row for row in kept if row is not whole]
    shown = {row["of"] for row in (whole, *rows)}
    runs = {run.folder: run for line in wanted for run in (*line.tuning, *line.finals(seeds))}
    took = [ended for run in runs.values() if (ended := run.ended())]
    return {
        "workers": WORKERS,
        "mark": mark,
        "runs": len(took),
        "machine_hours": sum(ended["wall_s"] for ended in took) / 3600,
        "processor_hours": sum(ended["cpu_s"] for ended in took) / 3600,
        "missing": [label(line.entry.spec) for line in wanted if line.entry.spec not in shown],
        "rows": [whole, *rows],
    }


def show(rows: Sequence[Row]) -> None:
    """Print the table."""
    for row in rows:
        if row["rate"] is None:
            print(f"{row['method']:70s} failed at every rate: {row['tried'][0]['failed']}")
            continue
        sent = row["mark"]["bytes"]["mean"]
        reached = "mark not reached" if sent is None else f"{sent / 1e6:.3g} MB to the mark"
        print(
            f"{row['method']:70s} lr {row['rate']:<7g} {100 * row['accuracy']['mean']:.2f} % "
            f"+- {100 * (row['accuracy']['std'] or 0):.2f}, loss {row['loss']['mean']:.3f}, "
            f"{row['bits_per_element']:.2f} bits, {reached} ({row['mark']['seeds']} of {row['seeds']} seeds)"
        )


def main() -> int:
    """Tune all, repeat the best, collect, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="digits", choices=sorted(RATES))
    parser.add_argument("--data", type=Path, help="what gradwire train takes as --data")
    parser.add_argument("--work", type=Path, default=Path("runs/method_table"))
    parser.add_argument("--seeds", type=int, default=len(SEEDS), choices=range(1, len(SEEDS) + 1))
    parser.add_argument("--steps", type=int, help="of every run; by default those that the page reports")
    parser.add_argument("--evaluations", type=int, help="of every run; by default those that the page reports")
    parser.add_argument("--methods", nargs="+", metavar="SPEC", help="what to train beside float32")
    parser.add_argument(
        "--from",
        dest="best_of",
        type=Path,
        default=RESULTS / "training/methods_digits.json",
        help="the table whose best methods the tasks other than digits train",
    )
    parser.add_argument("--narrow", type=Path, metavar="TABLE", help="a table of the same task, which has the rates")
    parser.add_argument("--keep", type=Path, metavar="TABLE", help="an earlier table whose other rows stay")
    parser.add_argument("--collect", action="store_true", help="run nothing")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    wanted = lines(arguments)
    if not arguments.collect:
        for run in (run for line in wanted for run in line.tuning):
            run.go(arguments.data)
        for run in (run for line in wanted for run in line.finals(arguments.seeds)):
            run.go(arguments.data)
    found = collect(wanted, arguments.seeds, kept_rows(arguments.keep))
    show(found["rows"])
    if found["rows"]:
        write(arguments.json, task=arguments.task, **found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
