"""Steps of a transformer that FSDP2 shards, by this checkout and by another commit's link, side by side.

    sudo env "PATH=$PATH" nice -n -15 python benchmarks/speed/fsdp_overlap.py \\
        --json benchmarks/results/speed/fsdp_overlap.json

Each cell is an emulated cluster of four hosts, the variants of ``gradwire bench step`` and whether its ranks compute or
sleep. Two sets of ranks take turns: ``after`` runs this checkout, and ``before`` imports ``gradwire.link`` from the
commit ``--before``, the last one whose exchanges waited inside of backward, and all else from this checkout. In each
turn every variant takes steps by one set and then by the other, which is first in every other turn. A row has the
median of all steps, the 20th and 80th percentile, the medians of turns, and ``ratio_to_floor``: the step over
max(compute, link). Computing is that of the module alone in the same cell. The link's time is the bytes that the
interfaces counted in these steps over the bandwidth: those of a host, or of a node where the links of nodes are slow.
``cpu_s_per_step`` is what all ranks took of the cores. Between nodes nothing can be sent before the forward pass and
the backward pass of the last unit have ended, which take ``ahead_s`` where ranks sleep; ``ratio_to_earliest`` is the
step over max(compute, ahead + link). The file is written after each cell, whose rows replace earlier ones. ``nice`` is
for machines that others use.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.results import ROOT
from benchmarks.lib.runs import earlier, write
from gradwire.model.profile import Timeline
from gradwire.tools.bench.network_row import Moved, NetworkWatch, wire_floor_s
from gradwire.tools.bench.ranks import Ranks, open_ranks
from gradwire.tools.bench.sharded import Passes
from gradwire.tools.bench.variants import COMPUTE
from gradwire.tools.lab import PORT, Network, Topology, open_network

MODEL = "transformer"
BEFORE = "29c18c5"
EVERYWHERE, BETWEEN, UNLIMITED = "hosts=4,bandwidth=100mbit", "hosts=4,groups=2,between=100mbit", "hosts=4"
CELLS = [
    (BETWEEN, ("hsdp native", "hsdp terngrad", "hsdp EDEN(bits=4)", "hsdp bf16")),
    (EVERYWHERE, ("fsdp native", "fsdp terngrad", "fsdp EDEN(bits=4)", "fsdp+weights EDEN(bits=4)")),
    (EVERYWHERE, ("hsdp native", "hsdp EDEN(bits=4)")),
    (UNLIMITED, ("hsdp native", "hsdp EDEN(bits=4)", "fsdp EDEN(bits=4)")),
]
COMPUTES = ("sleep", "real")
SIDES = ("before", "after")
WARM_UP, MOST_STEPS = 3, 20


FINDER = """
import importlib.abc, importlib.util, pathlib, sys

class LinkOfAnotherCommit(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "gradwire.link":
            folder = pathlib.Path(__file__).parent / "src" / "gradwire" / "link"
            return importlib.util.spec_from_file_location(
                name, folder / "__init__.py", submodule_search_locations=[str(folder)]
            )

sys.meta_path.insert(0, LinkOfAnotherCommit())
"""
"""What Python runs first where this is ``sitecustomize.py``. Kernels stay in their place, and are not compiled anew."""


@contextlib.contextmanager
def link_of(commit: str) -> Iterator[str]:
    """Extract the link of a commit; give the PYTHONPATH with which it takes the place of this checkout's."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["git", "-C", str(ROOT), "archive", commit, "src/gradwire/link"]
        packed = subprocess.run(words, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
        (Path(folder) / "sitecustomize.py").write_text(FINDER)
        yield os.pathsep.join(filter(None, [folder, str(ROOT / "src"), os.environ.get("PYTHONPATH")]))


class Side:
    """One set of ranks, with all variants of a cell.

    Args:
        ranks: The ranks.
        network: Their cluster.
    """

    def __init__(self, ranks: Ranks, network: Network) -> None:
        self.ranks, self.network = ranks, network
        self.times: dict[str, list[list[float]]] = {}
        self.moved: dict[str, list[Moved]] = {}
        self.exchange_bytes: dict[str, list[float]] = {}
        self.cpu_s: dict[str, list[float]] = {}

    def build(self, variant: str) -> float:
        """Build a variant and take its first steps; return the seconds of one."""
        self.ranks.ask("build", variant=variant)
        self.ranks.ask("steps", variant=variant, count=WARM_UP)
        return fmean(answer["times_s"][-1] for answer in self.ranks.ask("steps", variant=variant, count=1))

    def turn(self, variant: str, count: int) -> None:
        """Take steps by a variant, and keep what they took."""
        watch = NetworkWatch(self.network, self.network.topology)
        answers = self.ranks.ask("steps", variant=variant, count=count)
        self.moved.setdefault(variant, []).append(watch.moved())
        # An exchange keeps ranks in step; without one, the slowest counts.
        joined = max if variant == COMPUTE else fmean
        columns = zip(*(answer["times_s"] for answer in answers))
        self.times.setdefault(variant, []).append([joined(column) for column in columns])
        self.cpu_s.setdefault(variant, []).append(sum(answer["cpu_s"] for answer in answers) / count)
        sent = sum(answer["counted"].get("exchange_bytes", 0) for answer in answers)
        self.exchange_bytes.setdefault(variant, []).append(sent / len(answers) / count)


def measure(lab: str, variants: tuple[str, ...], compute: str, before: str, given: Any) -> list[dict[str, Any]]:
    """Measure one cell; return a row for each variant and side."""
    topology = Topology.parse(lab)
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(open_network(topology))
        sides = {}
        for number, name in enumerate(SIDES):
            # The two sets of ranks have stores of their own.
            other = {"MASTER_PORT": str(PORT + number)}
            if name == "before":
                other["PYTHONPATH"] = before
            ranks = stack.enter_context(open_ranks(MODEL, topology.hosts, network, variables=other))
            sides[name] = Side(ranks, network)
        ahead_s = None
        if compute == "sleep":
            profiled = sides["after"].ranks.ask("profile")[0] | sides["after"].ranks.ask("profile_passes")[0]
            for side in sides.values():
                side.ranks.ask("sleep", **profiled)
            passes = Passes.from_json(profiled["passes"]).scaled(Timeline.from_json(profiled["timeline"]))
            ahead_s = sum(passes.forward_s) + sum(passes.backward_s[-2:])
        took = {COMPUTE: sides["after"].build(COMPUTE)}
        took |= {variant: max(side.build(variant) for side in sides.values()) for variant in variants}
        counts = {name: max(2, min(MOST_STEPS, int(given.seconds / step_s))) for name, step_s in took.items()}
        for turn in range(given.turns):
            sides["after"].turn(COMPUTE, counts[COMPUTE])
            for variant in variants:
                for name in SIDES if turn % 2 == 0 else SIDES[::-1]:
                    sides[name].turn(variant, counts[variant])
    compute_s = median(t for times in sides["after"].times[COMPUTE] for t in times)
    rows = [
        row_of(side, name, variant, topology, counts[variant], compute_s, ahead_s if lab == BETWEEN else None)
        for variant in variants
        for name, side in sides.items()
    ]
    return [{"model": MODEL, "lab": lab, "compute": compute, **row} for row in rows]


def row_of(
    side: Side,
    name: str,
    variant: str,
    topology: Topology,
    count: int,
    compute_s: float,
    ahead_s: float | None,
) -> dict[str, Any]:
    """Return the row of a variant by one set of ranks."""
    turns, moved = side.times[variant], side.moved[variant]
    times, steps = [t for turn in turns for t in turn], count * len(turns)
    low, *_, high = quantiles(times, n=5)
    host_bytes = sum(m.bytes for m in moved) / steps / topology.hosts
    between_bytes = sum(m.between_bytes for m in moved) / steps
    wire_s = wire_floor_s(topology, host_bytes, between_bytes)
    floor_s = max(compute_s, wire_s)
    return {
        "variant": variant,
        "side": name,
        "step_time_s": median(times),
        "percentile_20_s": low,
        "percentile_80_s": high,
        "turn_medians_s": [median(turn) for turn in turns],
        "samples": len(times),
        "compute_s": compute_s,
        "wire_s": wire_s,
        "floor_s": floor_s,
        "ratio_to_floor": median(times) / floor_s,
        "ahead_s": ahead_s,
        "ratio_to_earliest": None if ahead_s is None else median(times) / max(compute_s, ahead_s + wire_s),
        "interface_bytes_per_step": host_bytes,
        "between_bytes_per_step": between_bytes,
        "cpu_s_per_step": fmean(side.cpu_s[variant]),
        "exchange_bytes_per_step": fmean(side.exchange_bytes[variant]),
    }


def describe(row: dict[str, Any]) -> str:
    """Return a row as a line."""
    return (
        f"{row['lab']:34s} {row['compute']:5s} {row['variant']:26s} {row['side']:6s} "
        f"{1e3 * row['step_time_s']:8.1f} ms "
        f"({1e3 * row['percentile_20_s']:.1f} to {1e3 * row['percentile_80_s']:.1f})  "
        f"cores {1e3 * row['cpu_s_per_step']:.0f}, "
        f"compute {1e3 * row['compute_s']:.1f}, link {1e3 * row['wire_s']:.1f}: {row['ratio_to_floor']:.2f}"
        + ("" if row["ratio_to_earliest"] is None else f", earliest {row['ratio_to_earliest']:.2f}")
    )


def key_of(row: dict[str, Any]) -> tuple[str, ...]:
    """Return what a row is of; the file has one row of each."""
    return row["lab"], row["compute"], row["variant"], row["side"]


def main() -> None:
    """Measure all cells."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default=BEFORE, metavar="COMMIT", help="whose link the other set of ranks has")
    parser.add_argument("--compute", nargs="*", default=list(COMPUTES), choices=COMPUTES)
    parser.add_argument("--cells", nargs="*", type=int, default=list(range(len(CELLS))), metavar="NUMBER")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each turn of a variant, about")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = earlier(given.json, "rows")
    with link_of(given.before) as before:
        for compute in given.compute:
            for number in given.cells:
                found = measure(*CELLS[number], compute, before, given)
                rows = [row for row in rows if key_of(row) not in map(key_of, found)] + found
                for row in found:
                    print(describe(row), flush=True)
                write(given.json, model=MODEL, before=given.before, turns=given.turns, nice=os.nice(0), rows=rows)


if __name__ == "__main__":
    main()
