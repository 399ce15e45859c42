"""Time to a fixed test accuracy or loss on slow links: MNIST and a language model, four hosts, three seeds.

    sudo env "PATH=$PATH" python benchmarks/training/time_to_accuracy.py --data FOLDER \\
        --json benchmarks/results/training/time_to_accuracy.json

Each run is ``gradwire train TASK --lab hosts=4,bandwidth=...``, ended at the first evaluation that reaches the target.
Its time leaves out start-up and evaluations, its bytes are those that one worker sent. Whole runs are not repeated, so
the script may be stopped and started again; the first seed comes first everywhere, so that early results cover all.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import mean, stdev
from typing import Any

HOSTS = 4
BANDWIDTHS = ("100mbit", "1gbit")
METHODS = ("fp32", "fp16", "terngrad")
SEEDS = (0, 1, 2)
POLL_S = 0.2


@dataclass(frozen=True)
class Goal:
    """A task, how it is trained, and what is to be reached: a test accuracy at least, or a test loss at most."""

    task: str
    field: str
    target: float
    steps: int
    eval_every: int
    options: tuple[str, ...] = ()

    def reached(self, row: dict[str, Any]) -> bool:
        """Return whether an evaluation is good enough."""
        value = float(row[self.field])
        return value >= self.target if self.field == "accuracy" else value <= self.target

    def words(self) -> str:
        """Describe what is to be reached."""
        return f"accuracy {100 * self.target:g} %" if self.field == "accuracy" else f"loss {self.target:g}"


GOALS = (
    Goal("mnist", "accuracy", 0.97, steps=300, eval_every=20, options=("--lr", "0.04")),
    Goal("text", "loss", 2.0, steps=300, eval_every=20),
)
"""Steps are those of the learning rate's schedule, and where a run ends that never gets there."""


@dataclass(frozen=True)
class Cell:
    """One run."""

    goal: Goal
    bandwidth: str
    method: str
    seed: int

    @property
    def name(self) -> str:
        """Return the name of its folder."""
        return f"{self.goal.task}-{self.bandwidth}-{self.method}-{self.seed}"


def cells() -> Iterator[Cell]:
    """Yield all runs, the first seed of everything first."""
    for seed in SEEDS:
        for goal in GOALS:
            for bandwidth in BANDWIDTHS:
                for method in METHODS:
                    yield Cell(goal, bandwidth, method, seed)


def evaluations(folder: Path) -> list[dict[str, Any]]:
    """Return the evaluations of a run so far."""
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in rows if row["event"] == "eval"]


def settings(cell: Cell) -> dict[str, Any]:
    """Return what a run's record must say for the run to count: another target or schedule is another run."""
    goal = cell.goal
    return {"steps": goal.steps, "eval_every": goal.eval_every, "options": list(goal.options), "target": goal.target}


def end_of(cell: Cell, work: Path) -> dict[str, Any] | None:
    """Return the evaluation with which a run came to its end: the first that reached the target, or its last step's."""
    try:
        same = json.loads((work / f"{cell.name}.json").read_text()) == settings(cell)
    except FileNotFoundError:
        same = False
    rows = evaluations(work / cell.name) if same else []
    first = next((row for row in rows if cell.goal.reached(row)), None)
    return first or next((row for row in rows if row["step"] == cell.goal.steps), None)


def run(cell: Cell, arguments: argparse.Namespace) -> None:
    """Train until the target is reached.

    Raises:
        SystemExit: the run failed.
    """
    goal, folder = cell.goal, arguments.work / cell.name
    # Rows of an earlier run must not be taken for this one's.
    shutil.rmtree(folder, ignore_errors=True)
    (arguments.work / f"{cell.name}.json").write_text(json.dumps(settings(cell)) + "\n")
    command = [sys.executable, "-m", "gradwire.tools.cli.main", "train", goal.task, "--out", str(folder)]
    command += ["--lab", f"hosts={HOSTS},bandwidth={cell.bandwidth}", "--workers", str(HOSTS)]
    command += ["--method", cell.method, "--seed", str(cell.seed), *goal.options]
    command += ["--steps", str(goal.steps), "--eval-every", str(goal.eval_every), "--log-every", "20"]
    if goal.task == "mnist":
        command += ["--data", str(arguments.data)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            time.sleep(POLL_S)
            if any(map(goal.reached, evaluations(folder))):
                # What was measured is on disk; the rest of the schedule is not needed.
                process.send_signal(signal.SIGTERM)
                process.wait()
    finally:
        process.terminate()
        process.wait()
    if process.returncode not in (0, 128 + signal.SIGTERM):
        sys.exit(f"{cell.name} failed with code {process.returncode}: {' '.join(command[3:])}")


def run_all(arguments: argparse.Namespace) -> None:
    """Run whatever is not whole."""
    arguments.work.mkdir(parents=True, exist_ok=True)
    for cell in cells():
        if arguments.only and not cell.name.startswith(arguments.only):
            continue
        if end_of(cell, arguments.work):
            continue
        began_s = time.monotonic()
        run(cell, arguments)
        row = end_of(cell, arguments.work)
        print(f"{cell.name:26s} {told(cell, row)} ({time.monotonic() - began_s:.0f} s)", flush=True)


def told(cell: Cell, row: dict[str, Any] | None) -> str:
    """Describe how a run ended."""
    if row is None:
        return "ended without an evaluation"
    found = f"step {row['step']}, {row['elapsed_s']:.1f} s, {row['sent_bytes'] / 1e6:.1f} MB"
    return (
        found if cell.goal.reached(row) else f"{cell.goal.words()} not reached: {row[cell.goal.field]:.4f} at {found}"
    )


def collect(arguments: argparse.Namespace) -> dict[str, Any]:
    """Gather every whole run, and the mean over seeds of each cell."""
    runs = []
    for cell in cells():
        row = end_of(cell, arguments.work)
        if row is None:
            continue
        config = json.loads((arguments.work / cell.name / "config.json").read_text())
        runs.append(
            {
                "task": cell.goal.task,
                "goal": cell.goal.words(),
                "bandwidth": cell.bandwidth,
                "name": cell.method,
                "method": config["method"],
                "seed": cell.seed,
                "reached": cell.goal.reached(row),
                "step": row["step"],
                "elapsed_s": row["elapsed_s"],
                "sent_bytes": row["sent_bytes"],
                "test_loss": row["loss"],
                "test_accuracy": row["accuracy"],
            }
        )
    return {"table": table(runs), "runs": runs}


def table(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each task, link and method; times and bytes are over the seeds that reached the target."""
    lines: list[dict[str, Any]] = []
    for goal in GOALS:
        for bandwidth in BANDWIDTHS:
            for method in METHODS:
                key = (goal.task, bandwidth, method)
                mine = [r for r in runs if (r["task"], r["bandwidth"], r["name"]) == key]
                if not mine:
                    continue
                good = [r for r in mine if r["reached"]]
                line = {"task": goal.task, "goal": goal.words(), "bandwidth": bandwidth, "name": method}
                line |= {"seeds": len(mine), "seeds_reached": len(good)}
                for field in ("elapsed_s", "sent_bytes", "step"):
                    values = [r[field] for r in good]
                    line[f"{field}_mean"] = mean(values) if values else None
                    line[f"{field}_std"] = stdev(values) if len(values) > 1 else None
                lines.append({**line, "time_over_fp32": _over_fp32(runs, good)})
    return lines


def _over_fp32(runs: list[dict[str, Any]], mine: list[dict[str, Any]]) -> float | None:
    """Return the mean over seeds of the time as a share of fp32's with the same seed, None without such a pair."""
    shares = []
    for r in mine:
        key = ("fp32", r["task"], r["bandwidth"], r["seed"], True)
        base = [o for o in runs if (o["name"], o["task"], o["bandwidth"], o["seed"], o["reached"]) == key]
        shares += [r["elapsed_s"] / o["elapsed_s"] for o in base]
    return mean(shares) if shares else None


def show(lines: list[dict[str, Any]]) -> None:
    """Print the table: mean and standard deviation over seeds."""
    heads = ("seconds", "of fp32", "MB", "steps")
    print(f"{'task':6s} {'goal':15s} {'link':8s} {'method':9s}" + "".join(f"{head:>16s}" for head in heads))
    for line in lines:
        seconds, megabytes = spread(line, "elapsed_s", 1, 1), spread(line, "sent_bytes", 1e6, 1)
        share = "-" if line["time_over_fp32"] is None else f"{line['time_over_fp32']:.2f}"
        texts = (seconds, share, megabytes, spread(line, "step", 1, 0))
        print(
            f"{line['task']:6s} {line['goal']:15s} {line['bandwidth']:8s} {line['name']:9s}"
            + "".join(f"{text:>16s}" for text in texts)
        )
        missed = line["seeds"] - line["seeds_reached"]
        if missed:
            print(f"       {missed} of {line['seeds']} seeds did not get there")


def spread(line: dict[str, Any], field: str, unit: float, digits: int) -> str:
    """Write a mean with its standard deviation."""
    centre, deviation = line[f"{field}_mean"], line[f"{field}_std"]
    if centre is None:
        return "not reached"
    text = f"{centre / unit:.{digits}f}"
    return text if deviation is None else f"{text} +- {deviation / unit:.{digits}f}"


def record(found: dict[str, Any]) -> dict[str, Any]:
    """Put what ran beside what was measured."""
    import numba
    import torch

    import gradwire

    cpu = next(
        (x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().split("\n") if "model name" in x), ""
    )
    return {
        "date_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "what": f"first evaluation (one in {GOALS[0].eval_every} steps) that reaches the goal; {HOSTS} workers, each on"
        " an emulated host; seconds of training, evaluations left out; bytes that one worker sent",
        "cpu": cpu,
        "cores": os.cpu_count(),
        "versions": {
            "gradwire": gradwire.__version__,
            "torch": torch.__version__,
            "numba": numba.__version__,
            "python": platform.python_version(),
        },
        **found,
    }


def main() -> int:
    """Run, collect, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with MNIST's four files")
    parser.add_argument("--work", type=Path, default=Path("runs/tta"))
    parser.add_argument("--only", metavar="PREFIX", help="runs whose names begin so, such as text-1gbit")
    parser.add_argument("--collect", action="store_true", help="run nothing")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    try:
        if not arguments.collect:
            run_all(arguments)
    finally:
        found = collect(arguments)
        show(found["table"])
        if arguments.json and found["runs"]:
            arguments.json.write_text(json.dumps(record(found), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
