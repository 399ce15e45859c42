"""What comes out of exchanges over links that fall silent, lose frames and reorder them: one row a trial.

    sudo env "PATH=$PATH" python benchmarks/trials/links.py --json benchmarks/results/trials/trials_links.json

Four hosts of an emulated cluster exchange 20,000 or a million elements for some rounds by one method, or train for some
steps over shards, by gossip or by local steps (``ways.py``), over TCP that is disturbed in one of three ways. Methods
take turns, so that each meets every disturbance at other moments of its rounds; sizes take turns too, with rows below
and above those that are sent one at a time. A trial is good if all rounds end, without an error, with the bits of a
simulation on every rank, or of a training on the same hosts with undisturbed links. Of float32, which Gloo sums in an
order of its own, all ranks must have the same bits. A trial that takes longer than its limit is a hang, and ends the
disturbance's part.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.runs import write
from gradwire.tools.lab import Impairments, Outage, Topology, environment, open_network, start

HOSTS, ROUNDS, CHUNK = 4, 5, 1 << 17
LIMIT_S = 150.0
SPECS = (
    "TernGrad()",
    "Coded(TernGrad(), coder='rans')",
    "EDEN(bits=4)",
    "Natural()",
    "QSGDinf(levels=7)",
    "GTopK(density=0.05)",
    "ErrorFeedback(Threshold(threshold=1.0))",
    "CLTK(density=0.02)",
    "DIANA()",
    "PowerSGD()",
    "ACPSGD()",
    "Hierarchical(TernGrad(), node_size=2)",
    "fp32",
)
SUMMED_BY_GLOO = {"fp32"}
"""Methods whose sums Gloo computes, in an order of its own: all ranks have the same bits, but not the simulation's."""

TRAININGS = ("FSDP2", "HSDP", "weights", "gossip", "gossip of changes", "DiLoCo", "streaming DiLoCo", "halos")
"""Ways of ``ways.py`` whose exchanges no simulated link has."""

SIZES = (20_000, 1_000_000)
WIDTHS = (48, 256)
"""Of the layers of trainings: as many elements as of links in the first turn, or fewer, or a quarter of a million."""

LINK = {"bandwidth": 200e6, "hosts": HOSTS}


def outages(seed: int) -> tuple[Outage, ...]:
    """Return ten minutes of outages: most of one to three seconds, of all links or of one; one of twelve seconds."""
    draw = random.Random(seed)
    found, at = [], 8.0
    while at < 600.0:
        lasts = 12.0 if len(found) == 5 else round(draw.uniform(0.3, 3.0), 1)
        found.append(Outage(lasts_s=lasts, from_s=round(at, 1), host=draw.choice([None, *range(HOSTS)])))
        at += lasts + draw.uniform(2.0, 5.0)
    return tuple(found)


DISTURBANCES = {
    "outages": Topology(**LINK, impairments=Impairments(delay_s=0.005), outages=outages(1)),
    "loss and reordering": Topology(
        **LINK, impairments=Impairments(delay_s=0.01, jitter_s=0.003, loss=0.01, reorder=0.02)
    ),
    "loss in bursts": Topology(**LINK, impairments=Impairments(delay_s=0.01, loss=0.02, burst=8.0)),
}
"""The clusters of the trials, by name."""


def trials(count: int) -> list[dict[str, Any]]:
    """Return the trials of one disturbance; those of trainings have a width."""
    found = []
    for n in range(count):
        turn, place = divmod(n, len(SPECS) + len(TRAININGS))
        if place < len(SPECS):
            found.append({"number": n, "spec": SPECS[place], "elements": SIZES[turn % len(SIZES)]})
        else:
            found.append(training(n, TRAININGS[place - len(SPECS)], WIDTHS[turn % len(WIDTHS)]))
    return found


def training(number: int, way: str, width: int) -> dict[str, Any]:
    """Return the trial of a training."""
    return {"number": number, "spec": way, "width": width, "elements": 4 * (width * width + width)}


def digest(values: Any) -> int:
    """Return a checksum of a vector's bits."""
    return zlib.crc32(values.contiguous().numpy().tobytes())


def gradients(elements: int, round: int, rank: int) -> Any:
    """Return what a rank exchanges in a round."""
    import torch

    return torch.randn(elements, generator=torch.Generator().manual_seed(1000 * round + rank))


def simulated(spec: str, elements: int) -> list[list[int]]:
    """Return the digest of the mean in each round, once for each rank."""
    import torch

    import gradwire as gw

    named = [("w", torch.nn.Parameter(torch.zeros(elements // 100, 100)))]
    link = gw.SimulatedLink(named, spec, HOSTS, min_numel=0, chunk_numel=CHUNK)
    found = []
    for round in range(ROUNDS):
        rows = torch.stack([gradients(elements, round, rank) for rank in range(HOSTS)])
        found.append([digest(link.reduce_(rows))] * HOSTS)
    return found


def exchanged(spec: str, elements: int, rank: int) -> list[int]:
    """Return the digests of what this rank has after each round."""
    import torch

    import gradwire as gw

    parameter = torch.nn.Parameter(torch.zeros(elements // 100, 100))
    link = gw.Link([("w", parameter)], spec, min_numel=0, chunk_numel=CHUNK)
    found = []
    try:
        for round in range(ROUNDS):
            parameter.grad = gradients(elements, round, rank).view_as(parameter)
            link.reduce_()
            found.append(digest(parameter.grad.view(-1)))
    finally:
        link.close()
    return found


def trained(way: str, width: int) -> list[int]:
    """Return the digests of this rank's parameters and gradients after each step of a training."""
    from benchmarks.trials.ways import MORE_WAYS

    worker = MORE_WAYS[way].worker(width)
    next(worker)
    built = next(worker)
    found = []
    try:
        for _ in range(ROUNDS):
            next(worker)
            found.append(built.digest())
    finally:
        built.link.close()
    return found


def work(count: int, references: Path | None) -> None:
    """Run all trials of a disturbance on one host; rank 0 prints their rows.

    Args:
        count: Number of trials; 0: each training once, at each width.
        references: File with the digests of trainings on undisturbed links; None prints them instead.
    """
    import torch.distributed as dist

    import gradwire as gw
    from benchmarks.trials.mortal import prepare

    prepare()
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S))
    rank = dist.get_rank()
    known = {} if references is None else json.loads(references.read_text())
    print("begin", flush=True)
    for trial in trials(count) or [training(0, way, width) for way in TRAININGS for width in WIDTHS]:
        spec, elements, width = trial["spec"], trial["elements"], trial.get("width")
        began, error, own = time.monotonic(), None, list[int]()
        try:
            own = exchanged(spec, elements, rank) if width is None else trained(spec, width)
        except (gw.GradwireError, RuntimeError) as raised:
            error = f"{type(raised).__name__}: {raised}"
        taken_s = time.monotonic() - began
        told: list[Any] = [None] * HOSTS
        dist.all_gather_object(told, (own, error))
        if rank == 0:
            errors = [text for _, text in told if text]
            found = [digests for digests, _ in told]
            row = {**trial, "seconds": round(taken_s, 2), "errors": errors}
            if references is None:
                print(json.dumps({**row, "digests": found}), flush=True)
                continue
            if width is not None:
                expected = known[f"{spec} {width}"]
            elif spec in SUMMED_BY_GLOO:
                expected = [found[0]] * HOSTS
            else:
                expected = [list(column) for column in zip(*simulated(spec, elements))]
            good = not errors and found == expected and len(found[0]) == ROUNDS
            print(json.dumps({**row, "good": good}), flush=True)


def references() -> dict[str, list[list[int]]]:
    """Return the digests of each training on undisturbed links, by rank.

    Raises:
        SystemExit: one of them failed.
    """
    found = {}
    for row in rows_of("none", 0, None):
        if row["errors"]:
            raise SystemExit(f"{row['spec']} fails on undisturbed links: {row['errors']}")
        found[f"{row['spec']} {row['width']}"] = row["digests"]
    if len(found) < len(TRAININGS) * len(WIDTHS):
        raise SystemExit(f"workers on undisturbed links ended behind {', '.join(found) or 'nothing'}")
    return found


def rows_of(name: str, count: int, known: Path | None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a disturbance, and one more where its trials ended early."""
    command, found = [sys.executable, __file__, "--work", str(count)], 0
    command += [] if known is None else ["--references", str(known)]
    with open_network(DISTURBANCES.get(name, Topology(**LINK)), "relay") as network:
        workers = [
            start(network, host, command, environment(network, host), stdout=subprocess.DEVNULL if host else -1)
            for host in range(HOSTS)
        ]

        def end() -> None:
            for worker in workers:
                worker.kill()

        lines = workers[0].stdout
        while lines is not None:
            patience = threading.Timer(2 * LIMIT_S, end)
            # Else it would keep an interrupted program alive.
            patience.daemon = True
            patience.start()
            line = lines.readline()
            patience.cancel()
            if line.startswith(b"begin"):
                network.restart_outages()
            elif not line:
                break
            elif line.startswith(b"{"):
                found += 1
                yield {"disturbance": name, **json.loads(line)}
        end()
        codes = [worker.wait() for worker in workers]
        report = network.report()
    if found < count:
        missing = trials(count)[found]
        yield {"disturbance": name, **missing, "seconds": None, "errors": [f"workers ended: {codes}"], "good": False}
    if report is not None:
        counts = {kind: getattr(report, f"{kind}_frames") for kind in ("read", "lost", "silenced", "overtaking")}
        print(f"{name}: frames {counts}", file=sys.stderr)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how many trials of each disturbance were good, and the longest."""
    return {
        name: {
            "trials": len(mine),
            "good": sum(row["good"] for row in mine),
            "longest_s": max((row["seconds"] or 0.0 for row in mine), default=0.0),
        }
        for name in DISTURBANCES
        for mine in [[row for row in rows if row["disturbance"] == name]]
    }


def main() -> int:
    """Run all disturbances and print; exit with 1 where a trial was not good."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trials", type=int, default=70, help="of each disturbance")
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--references", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work is not None:
        work(arguments.work, arguments.references)
        return 0
    rows = []
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        known = Path(file.name)
        known.write_text(json.dumps(references()))
        for name in DISTURBANCES:
            for row in rows_of(name, arguments.trials, known):
                rows.append(row)
                end = "good" if row["good"] else f"BAD {row['errors']}"
                print(f"{name}, {row['spec']}, {row['elements']}: {row['seconds']} s, {end}", flush=True)
                write(arguments.json, rounds=ROUNDS, hosts=HOSTS, summary=summary(rows), rows=rows)
    print(json.dumps(summary(rows)))
    return 0 if all(row["good"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
