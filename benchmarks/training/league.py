"""A league of methods with local steps: a character GPT, equal tokens, equal tuning, two horizons that differ by ten.

    python benchmarks/training/league.py --data FILE --work runs/league --json benchmarks/results/training/league.json

The model and its training are those of nanoGPT's CPU example: 0.80 M elements, Tiny Shakespeare, 12 samples of 64
characters a step, here three for each of four simulated workers, so that a step of all workers costs what one costs
there. Exchanges every 16 steps; horizons of 192 and 1920 steps, 12 and 120 exchanges, the multiples of 16 next to 200
and 2000. Every method is tried in four settings at the short horizon from the first seed: two learning rates of the
workers with its default outer step, then two more outer settings, or learning rates if it has none, with the better of
the two. The best by validation loss is trained from three seeds. At the long horizon that setting is tried, then half
the learning rate and the second-best outer setting, and the best of these again from three seeds.

Beside the league, SparseLoCo's settings are changed one at a time, which answers why it is behind. At the long
horizon a larger outer step than any of its tries suits it, so that it and DiLoCo, with which it is compared, have a
fourth try there, with a larger outer step.

A run has a file, written when it ends, and a state if it is stopped, so that the program may be ended and started
again. ``--minutes`` stops it at that time, within a run. Cheap runs come first, and the result is written from what
there is, after every run. It holds the rows of all runs: a machine without their files goes on from the result.
Several processes may share a folder: each holds the run that it trains. All but one leave ``--json`` out.
"""

from __future__ import annotations

import argparse
import fcntl
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any, TextIO

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.league_run import SAMPLES, WINDOWS, WORKERS, Plan, finished, keep, train
from benchmarks.lib.runs import earlier, write
from benchmarks.lib.stacked_gpt import read_text

EVERY, SHORT, LONG, SEEDS = 16, 192, 1920, (0, 1, 2)
RATES = (0.002, 0.004)
"""Learning rates that every method is tried with first."""
FURTHER = (math.sqrt(2), 2.0)
"""Where there is no outer setting: the same way on from the better of these rates, by these factors."""

NUMBERS = {"workers": WORKERS, "samples": SAMPLES, "windows": WINDOWS, "every": EVERY, "horizons": [SHORT, LONG]}

Row = dict[str, Any]
Found = Callable[[Plan], "Row | None"]


@dataclass(frozen=True)
class Entry:
    """A method in the league.

    Args:
        name: As the table prints it.
        specs: Its outer settings, the default first.
        optimizer: The workers' optimizer.
        like: The entry whose settings it takes, with a compressed exchange; it is not tuned by itself.
    """

    name: str
    specs: tuple[str, ...]
    optimizer: str = "adamw"
    like: str | None = None


DILOCO = tuple(
    f"DiLoCo(every={EVERY}, outer_lr={lr}, outer_momentum={momentum})"
    for lr, momentum in ((0.7, 0.9), (0.4, 0.9), (1.0, 0.5))
)
ENTRIES = (
    Entry("DDP", ("FP32()",)),
    Entry("LocalSGD", (f"LocalSGD(every={EVERY})",)),
    Entry("DiLoCo", DILOCO),
    Entry(
        "SparseLoCo",
        (
            f"SparseLoCo(every={EVERY})",
            f"SparseLoCo(every={EVERY}, outer_lr=2.0)",
            f"SparseLoCo(every={EVERY}, density=0.0625)",
        ),
    ),
    Entry(
        "streaming DiLoCo",
        tuple(
            f"StreamingDiLoCo(every={EVERY}, fragments=4, delay=2, outer_lr={lr}, outer_momentum={momentum})"
            for lr, momentum in ((0.4, 0.9), (0.7, 0.9), (1.0, 0.5))
        ),
    ),
    Entry("EASGD", (f"EASGD(every={EVERY})", f"EASGD(every={EVERY}, alpha=0.1)", f"EASGD(every={EVERY}, alpha=0.25)")),
    Entry(
        "NoLoCo",
        tuple(
            f"Pairs(every={EVERY}, outer_lr={lr}, outer_momentum={momentum})"
            for lr, momentum in ((0.7, 0.5), (1.0, 0.0), (1.0, 0.5))
        ),
    ),
    Entry("DiLoCo, EDEN 4 bits", (), like="DiLoCo"),
    Entry("DDP, Muon", ("FP32()",), "muon"),
    Entry("MuLoCo", DILOCO, "muon"),
)
BY_NAME = {entry.name: entry for entry in ENTRIES}
FOURTH = {
    "DiLoCo": f"DiLoCo(every={EVERY}, outer_lr=1.0, outer_momentum=0.9)",
    "SparseLoCo": f"SparseLoCo(every={EVERY}, outer_lr=4.0)",
}
"""Outer settings that are tried at the long horizon besides."""
CORE = ("DDP", "LocalSGD", "DiLoCo", "SparseLoCo")
"""Trained to the long horizon before the others."""

STUDY = {
    "nothing (density 1/64, outer rate 1, decay 0.95, 2 bits)": "SparseLoCo(every=16)",
    "density 1/16": "SparseLoCo(every=16, density=0.0625)",
    "density 1/4": "SparseLoCo(every=16, density=0.25)",
    "density 1": "SparseLoCo(every=16, density=1.0)",
    "outer rate 2": "SparseLoCo(every=16, outer_lr=2.0)",
    "outer rate 4": "SparseLoCo(every=16, outer_lr=4.0)",
    "every 4 steps": "SparseLoCo(every=4)",
    "LocalSGD, top-k and feedback": (
        "LocalSGD(every=16, inner=ErrorFeedback(compressor=TopK(density=0.015625, block_size=4096, "
        "values=QSGDinf(levels=3, block_size=64)), decay=0.95))"
    ),
    "decay 0.8": "SparseLoCo(every=16, decay=0.8)",
    "decay 0.999": "SparseLoCo(every=16, decay=0.999)",
    "8 bits a value": "SparseLoCo(every=16, bits=8)",
    "blocks of 256": "SparseLoCo(every=16, block_size=256)",
    "density 1/4, outer rate 2": "SparseLoCo(every=16, density=0.25, outer_lr=2.0)",
    "every 64 steps": "SparseLoCo(every=64)",
}
"""SparseLoCo's defaults with one thing changed; every one at the learning rate that its defaults prefer."""
BESIDE = "DiLoCo, every 4 steps"
"""A line beside them: DiLoCo's best setting, exchanged as often as "every 4 steps"."""
LINES = (*STUDY, BESIDE)
FIRST = 8
"""How many of these lines come before the long runs."""
LONG_STUDY = ("density 1/4", "outer rate 2", "density 1/16", "outer rate 4")


def compressed(spec: str) -> str:
    """Return a spec of DiLoCo whose exchange has four bits an element."""
    return spec.replace("every=", "inner=EDEN(bits=4), every=")


def lowest(plans: list[Plan], found: Found) -> Plan | None:
    """Return the plan with the lowest loss; None before all have ended."""
    rows = [(plan, found(plan)) for plan in plans]
    losses = [(row["loss"], i) for i, (_, row) in enumerate(rows) if row is not None]
    return rows[min(losses)[1]][0] if len(losses) == len(rows) else None


def first_tries(entry: Entry) -> list[Plan]:
    """Return the tries of the workers' learning rate at the short horizon."""
    return [Plan(entry.specs[0], entry.optimizer, rate, SHORT, SEEDS[0]) for rate in RATES]


def tries(entry: Entry, found: Found) -> list[Plan]:
    """Return all tries at the short horizon that can be named by now."""
    made = first_tries(entry)
    better = lowest(made, found)
    if better is None:
        return made
    if len(entry.specs) > 1:
        return [*made, *(replace(better, spec=spec) for spec in entry.specs[1:])]
    way = 1 if better.lr == max(RATES) else -1
    return [*made, *(replace(better, lr=better.lr * factor**way) for factor in FURTHER)]


def best_short(entry: Entry, found: Found) -> Plan | None:
    """Return the best try at the short horizon; None before all have ended."""
    if entry.like:
        other = best_short(BY_NAME[entry.like], found)
        return other and replace(other, spec=compressed(other.spec))
    if lowest(first_tries(entry), found) is None:
        return None
    return lowest(tries(entry, found), found)


def long_tries(entry: Entry, found: Found) -> list[Plan]:
    """Return the tries at the long horizon, in the order of their turns: none before the short horizon is done."""
    best = best_short(entry, found)
    if best is None:
        return []
    made = [replace(best, steps=LONG)]
    if entry.like:
        other = best_long(BY_NAME[entry.like], found)
        return made if other is None else [replace(other, spec=compressed(other.spec))]
    made.append(replace(best, steps=LONG, lr=best.lr / 2))
    rest = [plan for plan in tries(entry, found) if plan.spec != best.spec]
    second = lowest(rest, found) if rest else None
    made.append(replace(best, steps=LONG, spec=second.spec) if second else replace(best, steps=LONG, lr=best.lr / 4))
    if entry.name in FOURTH:
        made.append(replace(best, steps=LONG, spec=FOURTH[entry.name]))
    return made


def best_long(entry: Entry, found: Found) -> Plan | None:
    """Return the best try at the long horizon of those that have ended; None before the first."""
    ended = [plan for plan in long_tries(entry, found) if found(plan) is not None]
    return lowest(ended, found) if ended else None


def seeds_of(plan: Plan | None) -> list[Plan]:
    """Return a plan from every seed."""
    return [replace(plan, seed=seed) for seed in SEEDS] if plan else []


def study_rate(found: Found) -> float | None:
    """Return the learning rate that SparseLoCo's defaults prefer."""
    better = lowest(first_tries(BY_NAME["SparseLoCo"]), found)
    return better and better.lr


def studied(name: str, steps: int, found: Found) -> list[Plan]:
    """Return the plan of a line of the study, none before its learning rate is known."""
    if name == BESIDE:
        best = best_short(BY_NAME["DiLoCo"], found)
        return [replace(best, spec=best.spec.replace(f"every={EVERY}", "every=4"), steps=steps)] if best else []
    rate = study_rate(found)
    return [Plan(STUDY[name], "adamw", rate, steps, SEEDS[0])] if rate else []


def wanted(found: Found) -> Iterator[Plan]:
    """Yield the runs in their order; what depends on runs that have not ended is left out."""
    core = [BY_NAME[name] for name in CORE]
    others = [entry for entry in ENTRIES if entry.name not in CORE]
    muon = [entry for entry in others if entry.optimizer == "muon"]
    for entry in core:
        yield from first_tries(entry)
        yield from tries(entry, found)
    for name in (*LINES[:FIRST], BESIDE):
        yield from studied(name, SHORT, found)
    for entry in core:
        yield from seeds_of(best_short(entry, found))
    for entry in reversed(core[2:]):
        yield from long_tries(entry, found)[:1]
    for entry in others:
        if entry not in muon and not entry.like:
            yield from first_tries(entry)
            yield from tries(entry, found)
    for name in LINES:
        yield from studied(name, SHORT, found)
    for entry in others:
        if entry not in muon:
            yield from seeds_of(best_short(entry, found))
    for entry in muon:
        yield from first_tries(entry)
        yield from tries(entry, found)
        yield from seeds_of(best_short(entry, found))
    for turn in range(4):
        for entry in core:
            yield from long_tries(entry, found)[turn : turn + 1]
    for count in (2, 3):
        for entry in core:
            yield from seeds_of(best_long(entry, found))[:count]
    for entry in others:
        yield from long_tries(entry, found)[:1]
    for name in LONG_STUDY:
        yield from studied(name, LONG, found)
    for entry in others:
        yield from long_tries(entry, found)
    for entry in others:
        yield from seeds_of(best_long(entry, found))


def take(plan: Plan, work: Path) -> TextIO | None:
    """Hold a run until the returned file is closed, or this process ends; None if another process holds it."""
    file = (work / f"{plan.label}.lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def next_run(found: Found, work: Path) -> tuple[Plan | None, TextIO | None]:
    """Return the first run that has not ended and that no other process holds, and what holds it for this one.

    Where others hold all that is left, it is the first of theirs and None.
    """
    left = [plan for plan in wanted(found) if found(plan) is None]
    for plan in left:
        held = take(plan, work)
        # Another process may have ended it in the meantime.
        if held is not None and finished(plan, work) is None:
            return plan, held
        if held is not None:
            held.close()
    return (left[0] if left else None), None


def line(entry: Entry, horizon: int, plan: Plan | None, tried: int, found: Found) -> Row | None:
    """Return a cell of the league: a method at a horizon, over the seeds that have ended."""
    rows = [row for its in seeds_of(plan) if (row := found(its)) is not None]
    if plan is None or not rows:
        return None
    losses = [row["loss"] for row in rows]
    return {
        "name": entry.name,
        "optimizer": entry.optimizer,
        "steps": horizon,
        "method": plan.spec,
        "lr": plan.lr,
        "tried": tried,
        "seeds": len(rows),
        "loss_mean": mean(losses),
        "loss_std": stdev(losses) if len(losses) > 1 else None,
        "losses": losses,
        "bytes_mean": mean(row["bytes"] for row in rows),
        "bits_per_element_and_step": mean(row["bits_per_element_and_step"] for row in rows),
        "distance_mean": mean(row["distance"] for row in rows) if all("distance" in row for row in rows) else None,
        "curve": rows[0]["losses"],
    }


def collect(found: Found) -> Row:
    """Return the league, all tries, and the study, from the runs that have ended."""
    league, tried, study = [], [], []
    for entry in ENTRIES:
        short = [plan for plan in (tries(entry, found) if entry.specs else []) if found(plan)]
        long = [plan for plan in long_tries(entry, found) if found(plan)]
        for horizon, best, made in ((SHORT, best_short(entry, found), short), (LONG, best_long(entry, found), long)):
            cell = line(entry, horizon, best, len(made), found)
            league += [cell] if cell else []
            for plan in made:
                row = found(plan) or {}
                tried.append(
                    {"name": entry.name, "steps": horizon, "method": plan.spec, "lr": plan.lr, "loss": row["loss"]}
                )
    for horizon in (SHORT, LONG):
        for name in LINES:
            for plan in studied(name, horizon, found):
                row = found(plan)
                if row:
                    kept = ("loss", "bytes", "bits_per_element_and_step", "lr", "distance", "share_moved")
                    study.append({"name": name, "steps": horizon, "method": plan.spec, **{k: row[k] for k in kept}})
    return {"league": league, "tried": tried, "study": study}


def show(rows: Row) -> None:
    """Print the tables."""
    for row in rows["league"]:
        spread = f"{row['loss_std']:.4f}" if row["loss_std"] is not None else "-"
        print(
            f"{row['steps']:5d} {row['name']:20s} {row['loss_mean']:.4f} {spread:>6s} ({row['seeds']} seeds, "
            f"{row['tried']} tries) {row['bits_per_element_and_step']:8.4f} bits  lr {row['lr']:g} {row['method']}"
        )
    for row in rows["study"]:
        print(f"{row['steps']:5d} {row['name']:26s} {row['loss']:.4f} {row['bits_per_element_and_step']:8.4f} bits")


def main() -> int:
    """Train what is not done, until the time is over, and write what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="Tiny Shakespeare's input.txt")
    parser.add_argument("--work", type=Path, default=Path("runs/league"))
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop then; by default when all is done")
    parser.add_argument("--collect", action="store_true", help="run nothing")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.work.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * arguments.minutes
    cache = {Plan.of(row): row for row in earlier(arguments.json, "runs")}
    for plan, row in cache.items():
        # For processes without the result.
        if finished(plan, arguments.work) is None:
            keep(plan, row, arguments.work)

    def found(plan: Plan) -> Row | None:
        row = cache.get(plan) or finished(plan, arguments.work)
        if row is not None:
            cache[plan] = row
        return row

    def publish() -> Row:
        """Write what there is."""
        rows = collect(found)
        runs = sorted(cache.values(), key=lambda row: Plan.of(row).label)
        spent = round(sum(row["cpu_s"] for row in runs) / 60, 1)
        write(arguments.json, **NUMBERS, ended=len(runs), cpu_minutes=spent, **rows, runs=runs)
        return rows

    text = read_text(arguments.data)
    while not arguments.collect and time.monotonic() < until:
        plan, held = next_run(found, arguments.work)
        if plan is None:
            break
        if held is None:
            # What comes next depends on the runs of other processes.
            time.sleep(5)
            continue
        with held:
            row = train(plan, text, arguments.work, until=until)
        if row is None:
            break
        print(f"{plan.label}: {row['loss']:.4f} ({row['cpu_s']} s)", flush=True)
        publish()
    show(publish())
    return 0


if __name__ == "__main__":
    sys.exit(main())
