"""What it costs to fit the levels of ALQ and AMQ anew: seconds of an update round beyond those of another round.

    python benchmarks/speed/level_updates.py --turns 5 --json benchmarks/results/speed/level_updates.json

A million Laplacian elements, blocks of 8192, one thread, one, four and sixteen simulated workers. A row is a method
with one width and one model: in turns, a round that updates the levels and a round that does not; the seconds are the
medians of either, and of their difference, with the 20 % and 80 % points. With several workers the difference has the
statistics of all of them, which real workers take at once, and one fit to all of them, for which the others wait.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.runs import write

ELEMENTS, TURNS, WORKERS = 1_000_000, 7, (1, 4, 16)
KINDS = {"ALQ": gw.ALQ, "ALQ-N": gw.ALQN, "AMQ": gw.AMQ, "AMQ-N": gw.AMQN}
WIDTHS, MODELS = (3, 4), ("normal", "histogram")

Row = dict[str, Any]


def spread(values: list[float]) -> Row:
    """Return the median and the 20 % and 80 % points."""
    low, middle, high = torch.tensor(values).double().quantile(torch.tensor([0.2, 0.5, 0.8]).double()).tolist()
    return {"median": middle, "p20": low, "p80": high}


def measured(kind: type[gw.ALQ] | type[gw.AMQ], bits: int, model: str, workers: int, turns: int) -> Row:
    """Time rounds with an update and without one, in turns."""
    generator = torch.Generator().manual_seed(0)
    gradients = torch.rand(workers, ELEMENTS, generator=generator).sub_(0.5)
    gradients = gradients.sign() * (1 - 2 * gradients.abs()).clamp_(1e-7).log_()
    links = [
        gw.SimulatedLink([("w", torch.empty(ELEMENTS))], kind(bits=bits, model=model, updates=(0,), every=n), workers)
        for n in (1, 1 << 30)
    ]
    taken: list[list[float]] = [[], []]
    for turn in range(turns + 1):
        for link, kept in zip(links, taken):
            rows = gradients.clone()
            began_s = time.perf_counter()
            link.reduce_(rows)
            # The first round of both updates the levels, and compiles kernels.
            if turn:
                kept.append(time.perf_counter() - began_s)
    return {
        "with_s": spread(taken[0]),
        "without_s": spread(taken[1]),
        "update_s": spread([a - b for a, b in zip(*taken)]),
    }


def main() -> None:
    """Measure all, and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for workers in WORKERS:
        for (name, kind), bits, model in ((k, b, m) for k in KINDS.items() for b in WIDTHS for m in MODELS):
            found = measured(kind, bits, model, workers, given.turns)
            rows.append({"method": name, "bits": bits, "model": model, "workers": workers, **found})
            update = found["update_s"]
            print(
                f"{name:6s} {bits} bits, {model:9s}, {workers} workers: an update takes {update['median']:.3f} s "
                f"({update['p20']:.3f} to {update['p80']:.3f}) beyond {found['without_s']['median']:.3f}",
                flush=True,
            )
            write(given.json, elements=ELEMENTS, turns=given.turns, rows=rows)


if __name__ == "__main__":
    main()
