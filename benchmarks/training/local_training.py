"""Time and bytes to a stated loss on slow links, with local steps and without: a language model and CIFAR-10.

    python benchmarks/training/local_training.py --data CIFAR10_FOLDER                                      trains
    sudo env "PATH=$PATH" python benchmarks/training/local_training.py --data CIFAR10_FOLDER --lab          times steps
    python benchmarks/training/local_training.py --collect --json benchmarks/results/training/local_training.json

How a loss falls with the steps does not depend on the link, so each method is trained once, by four simulated workers
from each seed, and its steps are timed on each link by four real workers on an emulated cluster of four hosts. The time
to the loss is the number of steps until the first evaluation at or below it, times the mean time of a step over whole
cycles of exchanges. The loss to reach is 1.15 times the final test loss of fp32 from the first seed. All seeds are
trained for the methods that reach it in the least time at 100 Mbit/s, and for fp32.

Runs that are whole are not repeated, so that the script may be stopped and started again; several copies share the
trainings. Rows of an earlier result whose runs are not in ``--work`` are kept, with their date, so that one method can
be trained anew: ``--only NAME``. Steps are to be timed on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.runs import claim, earlier, final, machine, train, write

HOSTS = 4
BANDWIDTHS = ("10mbit", "100mbit", "1gbit")
SEEDS = (0, 1, 2)
EVERY = 16
SLACK = 1.15
"""The loss to reach, as a multiple of fp32's last."""
BEST = 4
"""How many methods are trained from all seeds."""
SPARSE = "TopK(density=0.015625, block_size=4096, values=QSGDinf(levels=3, block_size=64))"

METHODS = {
    "fp32": "FP32()",
    "fp16": "FP16()",
    "TernGrad": "TernGrad()",
    "PowerSGD": "PowerSGD()",
    "LocalSGD": f"LocalSGD(every={EVERY})",
    "DiLoCo": f"DiLoCo(every={EVERY})",
    "DiLoCo, EDEN 4 bits": f"DiLoCo(every={EVERY}, inner=EDEN(bits=4))",
    "DiLoCo, coded TernGrad": f"DiLoCo(every={EVERY}, inner=Coded())",
    "streaming, EDEN 4 bits": f"StreamingDiLoCo(every={EVERY}, fragments=4, delay=2, inner=EDEN(bits=4))",
    "SparseLoCo": f"SparseLoCo(every={EVERY})",
    "LocalSGD, top-k and feedback": f"LocalSGD(every={EVERY}, inner=ErrorFeedback(compressor={SPARSE}, decay=0.95))",
}
LOCAL = tuple(name for name, spec in METHODS.items() if "every=" in spec)

Row = dict[str, Any]


@dataclass(frozen=True)
class Goal:
    """A task and how it is trained."""

    task: str
    steps: int
    eval_every: int
    options: tuple[tuple[str, object], ...]
    reads_data: bool


GOALS = (
    Goal("text", 600, 20, (("model", "transformer"), ("optimizer", "adam"), ("lr", 0.004)), False),
    Goal("cifar10", 600, 20, (), True),
)


def goals(arguments: argparse.Namespace) -> list[Goal]:
    """Return what is to be trained or timed."""
    return [goal for goal in GOALS if arguments.task in (None, goal.task)]


def folder(work: Path, goal: Goal, name: str, seed: int) -> Path:
    """Return the folder of a training."""
    label = "".join(c if c.isalnum() else "-" for c in name.lower())
    return work / f"{goal.task}-{label}-{goal.steps}-{seed}"


def options(goal: Goal, name: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of ``gradwire train``."""
    found = {"workers": HOSTS, "method": METHODS[name], "seed": seed, **dict(goal.options)}
    return found | ({"data": arguments.data} if goal.reads_data else {})


def evaluations(path: Path) -> list[Row]:
    """Return the evaluations of a whole run."""
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == "eval"]


def train_all(arguments: argparse.Namespace) -> None:
    """Train whatever is not whole: every method from the first seed, then the best from the others."""
    for seed in SEEDS:
        for goal in goals(arguments):
            wanted = list(METHODS) if seed == SEEDS[0] else best(arguments, goal)
            for name in [name for name in wanted if arguments.only in (None, name)]:
                path = folder(arguments.work, goal, name, seed)
                if final(path, goal.steps) is None and claim(path):
                    its = options(goal, name, seed, arguments)
                    train(goal.task, path, its | {"steps": goal.steps, "eval-every": goal.eval_every})


def mark(arguments: argparse.Namespace, goal: Goal) -> float | None:
    """Return the loss to reach; None before fp32 has been trained, here or for an earlier result."""
    last = final(folder(arguments.work, goal, "fp32", SEEDS[0]), goal.steps)
    before = next((row["mark"] for row in earlier(arguments.json, "rows") if row["task"] == goal.task), None)
    return before if last is None else SLACK * last["loss"]


def reached(arguments: argparse.Namespace, goal: Goal, name: str, seed: int) -> Row | None:
    """Return the first evaluation of a whole run at or below the mark."""
    limit, path = mark(arguments, goal), folder(arguments.work, goal, name, seed)
    if limit is None or final(path, goal.steps) is None:
        return None
    return next((row for row in evaluations(path) if row["step"] and row["loss"] <= limit), None)


def best(arguments: argparse.Namespace, goal: Goal) -> list[str]:
    """Return fp32 and the methods that reach the mark in the least time at 100 Mbit/s; none before steps are timed."""
    times = timed(arguments)
    found = []
    for name in METHODS:
        row, step_s = reached(arguments, goal, name, SEEDS[0]), times.get((goal.task, name, "100mbit"))
        if row is not None and step_s is not None:
            found.append((row["step"] * step_s["mean_s"], name))
    return ["fp32", *(name for _, name in sorted(found)[:BEST] if name != "fp32")] if found else []


def timed(arguments: argparse.Namespace) -> dict[tuple[str, str, str], Row]:
    """Return the steps' times by task, method and bandwidth."""
    path = arguments.work / "steps.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {(row["task"], row["name"], row["bandwidth"]): row for row in rows}


def time_all(arguments: argparse.Namespace) -> None:
    """Time the steps of every method on every link, where that was not done."""
    done = timed(arguments)
    for goal in goals(arguments):
        for bandwidth in reversed(BANDWIDTHS):
            for name in [name for name in METHODS if arguments.only in (None, name)]:
                if (goal.task, name, bandwidth) not in done:
                    row = time_steps(goal, name, bandwidth, arguments)
                    with (arguments.work / "steps.jsonl").open("a") as lines:
                        lines.write(json.dumps(row) + "\n")
                    print(f"{goal.task:8s} {bandwidth:8s} {name:24s} {1e3 * row['mean_s']:8.1f} ms", flush=True)


def time_steps(goal: Goal, name: str, bandwidth: str, arguments: argparse.Namespace) -> Row:
    """Train for a few cycles on the emulated cluster, and return the mean time of a step of all but the first."""
    cycle = EVERY if name in LOCAL else 8
    steps, path = 4 * cycle, arguments.work / "lab"
    command = [sys.executable, "-m", "gradwire.tools.cli.main", "train", goal.task, "--out", str(path), "--overwrite"]
    command += ["--lab", f"hosts={HOSTS},bandwidth={bandwidth}", "--steps", str(steps), "--eval-every", str(steps)]
    for key, value in (options(goal, name, 0, arguments) | {"log-every": 1}).items():
        command += [f"--{key}", str(value)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    taken = [row for row in rows if row["event"] == "train"]
    times = [row["step_time_s"] for row in taken[cycle:]]
    cycles = [mean(times[i : i + cycle]) for i in range(0, len(times), cycle)]
    sent = [row["sent_bytes"] for row in taken]
    steps_sent = [b - a for a, b in zip(sent[cycle - 1 :], sent[cycle:])]
    return {
        "task": goal.task,
        "name": name,
        "bandwidth": bandwidth,
        "mean_s": mean(times),
        "std_of_cycles_s": stdev(cycles),
        "longest_s": max(times),
        "sent_bytes_a_step": mean(steps_sent),
        "most_sent_bytes_in_a_step": max(steps_sent),
    }


def collect(arguments: argparse.Namespace) -> list[Row]:
    """Return a line for each task and method, with the time on each link where steps were timed.

    Where the runs are not there, it is the line of the earlier result.
    """
    times, lines, today = timed(arguments), [], machine()["date_utc"]
    kept = {(row["task"], row["method"]): row for row in earlier(arguments.json, "rows")}
    for goal in goals(arguments):
        limit = mark(arguments, goal)
        for name, spec in METHODS.items():
            whole = [
                (seed, last)
                for seed in SEEDS
                if (last := final(folder(arguments.work, goal, name, seed), goal.steps)) is not None
            ]
            if limit is None or not whole:
                before = kept.get((goal.task, spec))
                lines += [{"date_utc": dated(arguments), **before, "name": name}] if before else []
                continue
            first = [row for seed, _ in whole if (row := reached(arguments, goal, name, seed))]
            line: Row = {"task": goal.task, "name": name, "method": spec, "mark": limit, "seeds": len(whole)}
            line |= {"date_utc": today, "seeds_reached": len(first)}
            line |= spread("final_loss", [last["loss"] for _, last in whole])
            line |= spread("final_accuracy", [last["accuracy"] for _, last in whole])
            line |= spread("steps", [row["step"] for row in first])
            line |= spread("sent_bytes", [max(row["sent_bytes"], row["received_bytes"]) for row in first])
            line["links"] = {b: times[key] for b in BANDWIDTHS if (key := (goal.task, name, b)) in times}
            for bandwidth, step in line["links"].items():
                line |= spread(f"seconds_{bandwidth}", [row["step"] * step["mean_s"] for row in first])
            lines.append(line)
    return lines


def dated(arguments: argparse.Namespace) -> str | None:
    """Return the date of the earlier result."""
    found: str | None = json.loads(arguments.json.read_text())["date_utc"]
    return found


def spread(field: str, values: list[float]) -> Row:
    """Return mean and standard deviation over seeds; None where there are too few."""
    return {
        f"{field}_mean": mean(values) if values else None,
        f"{field}_std": stdev(values) if len(values) > 1 else None,
    }


def show(lines: list[Row]) -> None:
    """Print the table."""
    for line in lines:
        seconds = " ".join(
            f"{line[f'seconds_{b}_mean']:9.1f}" if line.get(f"seconds_{b}_mean") else f"{'-':>9s}" for b in BANDWIDTHS
        )
        steps, sent = line["steps_mean"], line["sent_bytes_mean"]
        told = f"{steps:5.0f} {sent / 1e6:8.2f} MB" if steps else f"{'-':>5s} {'-':>8s}   "
        print(f"{line['task']:8s} {line['name']:24s} {line['final_loss_mean']:.4f} {told} {seconds}")


def main() -> int:
    """Train, time or collect, and print what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with CIFAR-10's batches")
    parser.add_argument("--work", type=Path, default=Path("runs/local_training"))
    parser.add_argument("--task", choices=[goal.task for goal in GOALS], help="one alone; by default both")
    parser.add_argument("--only", choices=list(METHODS), help="one method alone; by default all")
    parser.add_argument("--lab", action="store_true", help="time steps on the emulated cluster; needs root")
    parser.add_argument("--collect", action="store_true", help="run nothing")
    parser.add_argument("--remark", help="a sentence on how it was measured, for the page")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    if arguments.lab:
        time_all(arguments)
    elif not arguments.collect:
        train_all(arguments)
    found = collect(arguments)
    show(found)
    before = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {}
    kept = {"hosts": HOSTS, "slack": SLACK, "remark": arguments.remark or before.get("remark")}
    write(arguments.json, **kept, goals=[vars(goal) for goal in GOALS], rows=found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
