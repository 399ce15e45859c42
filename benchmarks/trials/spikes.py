"""What one finite spike costs under every method: rounds that are skipped, and how far later ones stray.

    python benchmarks/trials/spikes.py --json benchmarks/results/trials/trials_spikes.json

Four simulated workers exchange by each method of ``gw.methods()`` with its defaults. Once, one value of one worker is
1e20, 1e30, 1e38 or inf: an element of the first parameter's gradient in one trial and of the last one's in another.
Of methods with local steps, it is the difference that a worker's parameter has come to before an exchange; of gossip,
a parameter. One row a trial, one more a method without a spike.

``relative_error`` is that of the last quarter of a run, from the true means. Of a method that gives a direction, or
steps locally, it is the distance from the run without a spike, which has one exchange more. ``as_infinity`` says
whether all later outcomes have the bits that they have after inf in the same place.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.runs import write

SHAPES = {"first": (96, 80), "bias": (96,), "middle": (64, 48), "last": (48, 40)}
NUMEL = sum(math.prod(shape) for shape in SHAPES.values())
PLACES = {"first": 17, "last": NUMEL - 3}
SPIKES = (1e20, 1e30, 1e38, math.inf)
WORKERS = 4

SPECS = {"hierarchical": "Hierarchical(node_size=2)"}
"""Where a default needs to know the cluster."""

POWERSGD_BETWEEN = "Hierarchical(compressor=PowerSGD(), node_size=2)"
"""Not a default; the method for which it was reported."""


@dataclass(frozen=True)
class Trial:
    """One spike in one run.

    Attributes:
        spike: None: there is none.
        place: Name of the parameter that it is in.
        round: The round, counted from 0, that it is in.
        rounds: Rounds, or exchanges, of the run.
    """

    spike: float | None
    place: str
    round: int
    rounds: int


@dataclass(frozen=True)
class Run:
    """What came of a trial.

    Attributes:
        means: Of every round: its mean, or, of local steps, the global parameters after it.
        finite: Of every round, whether all of it was.
        refused: What was said where the exchange ended with an error.
    """

    means: list[torch.Tensor]
    finite: list[bool]
    refused: str | None = None


@cache
def drawn(round: int) -> torch.Tensor:
    """Return the gradients of all workers, not to be written: a common part that stays, and noise of each."""
    common = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1))
    return common + 0.5 * torch.randn(WORKERS, NUMEL, generator=torch.Generator().manual_seed(2 + round))


def with_gradients(method: gw.Method, trial: Trial) -> Run:
    """Exchange gradients round by round."""
    cost = gw.LinkCost(message_s=1e-4, bytes_per_s=1e8)
    parameters = [(name, torch.empty(shape)) for name, shape in SHAPES.items()]
    link, means, finite = gw.SimulatedLink(parameters, method, WORKERS, link_cost=cost), [], []
    for round in range(trial.rounds):
        g = drawn(round).clone()
        if round == trial.round and trial.spike is not None:
            g[1, PLACES[trial.place]] = trial.spike
        before = link.skipped_rounds
        means.append(link.reduce_(g).clone())
        finite.append(bool(torch.isfinite(means[-1]).all()) and link.skipped_rounds == before)
    return Run(means, finite)


def with_local_steps(method: gw.Method, trial: Trial) -> Run:
    """Let workers descend to minima of their own, and exchange parameters as often as the method says."""
    workers = [[(n, torch.nn.Parameter(torch.zeros(shape))) for n, shape in SHAPES.items()] for _ in range(WORKERS)]
    steps, flat = gw.SimulatedLocalSteps(workers, method), [[p.data.view(-1) for _, p in worker] for worker in workers]
    means, finite, exchanged, count = [], [], 0, 0
    while exchanged < trial.rounds:
        for own, minimum in zip(flat, drawn(count % trial.rounds)):
            for p, part in zip(own, minimum.split([p.numel() for p in own])):
                p.sub_(p - part, alpha=0.1)
        count += 1
        due = count % method.traits.local_steps == 0
        if due and exchanged == trial.round and trial.spike is not None:
            own, at = (flat[1][0], PLACES["first"]) if trial.place == "first" else (flat[1][-1], -3)
            own[at] = trial.spike
        try:
            steps.after_step()
        except gw.ExchangeError as error:
            return Run(means, finite, str(error))
        if due:
            exchanged += 1
            means.append(torch.cat([x.reshape(-1) for x in steps.global_parameters.values()]))
            finite.append(all(bool(torch.isfinite(p).all()) for own in flat for p in own))
    return Run(means, finite)


def strayed(run: Run, expected: list[torch.Tensor], after: int) -> float | None:
    """Return |sum of means - sum of expected| / |sum of expected| over the rounds after one; None if not finite."""
    found, wanted = (torch.stack(means[after:]).double().sum(0) for means in (run.means, expected))
    distance = float((found - wanted).norm() / wanted.norm())
    return distance if math.isfinite(distance) else None


def rows_of(name: str, method: gw.Method, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each trial of a method, that without a spike first."""
    exchange = with_local_steps if method.traits.local_steps else with_gradients
    exchanges = min(rounds, 12) if method.traits.local_steps else rounds
    spike_at, last = exchanges // 4, exchanges - exchanges // 4
    calm = exchange(method, Trial(None, "first", spike_at, exchanges))
    lost: dict[str, Run] = {place: exchange(method, Trial(math.inf, place, spike_at, exchanges)) for place in PLACES}
    means = (
        calm.means
        if method.traits.local_steps or method.traits.direction
        else [drawn(r).mean(0) for r in range(exchanges)]
    )
    common = {"method": name, "remembers": bool(method.traits.remembers), "local_steps": method.traits.local_steps}
    common |= {"rounds": exchanges, "spike_round": spike_at}
    off = strayed(calm, means, last)
    yield common | {"spike": None, "place": None, "skipped_rounds": calm.finite.count(False), "relative_error": off}
    for place in PLACES:
        for spike in SPIKES:
            run = lost[place] if spike == math.inf else exchange(method, Trial(spike, place, spike_at, exchanges))
            row = common | {"spike": str(spike), "place": place}
            if run.refused is not None:
                yield row | {"refused": run.refused, "as_infinity": lost[place].refused == run.refused}
                continue
            pairs = zip(run.means[spike_at + 1 :], lost[place].means[spike_at + 1 :])
            yield row | {
                "skipped_rounds": run.finite.count(False),
                "later_skipped_rounds": run.finite[spike_at + 1 :].count(False),
                "later_finite": all(run.finite[spike_at + 1 :]),
                "as_infinity": all(torch.equal(mean, other) for mean, other in pairs),
                "relative_error": strayed(run, means, last),
                "relative_error_without_spike": off,
            }


def tried(name: str, spec: str, rounds: int) -> list[dict[str, Any]]:
    """Return the rows of a method, in a process of its own."""
    torch.set_num_threads(1)
    logging.getLogger("gradwire").setLevel(logging.ERROR)
    return list(rows_of(name, gw.method(spec), rounds))


def main() -> int:
    """Try all methods and print what a spike costs; exit with 1 where a later round was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=40, help="of a run; methods with local steps: 12 exchanges at most"
    )
    parser.add_argument("--method", action="append", help="this one alone; may be repeated")
    parser.add_argument("--processes", type=int, default=2, help="side by side")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    specs = {name: SPECS.get(name, name) for name in gw.methods()} | {"hierarchical, powersgd": POWERSGD_BETWEEN}
    specs = {name: spec for name, spec in specs.items() if not arguments.method or name in arguments.method}
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(arguments.processes) as pool:
        results = list(pool.map(tried, specs, specs.values(), [arguments.rounds] * len(specs)))
    for name, found in zip(specs, results):
        spiked = [row for row in found[1:] if "refused" not in row]
        lost = [row for row in spiked if not row["later_finite"]]
        worst = max((row["skipped_rounds"] for row in spiked), default=0)
        told = f"{worst} skipped at most, {len(lost)} of {len(spiked)} trials lost a later round"
        print(f"{name:24s} {told if spiked else 'refused: ' + found[1]['refused'][:80]}", flush=True)
        rows += found
    if arguments.json:
        write(arguments.json, rows=rows)
    return int(any(row.get("later_finite") is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
