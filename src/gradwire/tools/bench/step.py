"""The step benchmark: steps of models on clusters by exchanges, measured side by side.

Within a cell, exchanges take turns, so that a noisy machine disturbs all alike. Rows are appended to a file of JSON
lines when they are measured; cells that are in the file are not measured again.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from gradwire.tools.bench.compute import COMPUTE_KINDS
from gradwire.tools.bench.device_kernels import check_cuda
from gradwire.tools.bench.models import bench_model
from gradwire.tools.bench.network_row import NetworkWatch, bytes_agree, network_fields, wire_floor_s
from gradwire.tools.bench.pace import TURNS, lead, settling_s, steps_of_budget, steps_of_cell
from gradwire.tools.bench.ranks import Deadline, OutOfTimeError, Ranks, open_ranks
from gradwire.tools.bench.row_file import append_row, check_writable
from gradwire.tools.bench.timing import percentiles_20_80
from gradwire.tools.bench.variants import (
    COMPUTE,
    VARIANTS,
    check_variant,
    dense_wire_bytes,
    follows_the_link,
    is_sharded,
)
from gradwire.tools.experiments.errors import UsageError
from gradwire.tools.experiments.run_record import hardware, versions
from gradwire.tools.lab import Network, Topology, format_rate, open_network
from gradwire.tools.lab.iproute import congestion_here

HOSTS = (2, 4, 8)
BANDWIDTHS = ("50mbit", "100mbit", "1gbit", "5gbit", "unlimited")


@dataclass(frozen=True, kw_only=True)
class StepGrid:
    """The cells and exchanges to measure.

    Attributes:
        models: Names of models.
        topologies: Clusters; those that differ only in bandwidth share their processes.
        variants: Exchanges.
        budget_s: Seconds for each variant in each cell, about.
        loopback: Run all ranks in this namespace, without an emulated cluster and without limits.
        compute: "real": the ranks compute, and share this machine's cores. "sleep": they sleep as long as one rank
            alone computes, so that the exchange has the cores for itself. "cuda": they compute on this machine's GPUs,
            and gradients lie there.
        cell_budget_s: Seconds for each cell with all its variants and their warm-up, about, instead of ``budget_s``. A
            cell with long steps takes longer, since each variant takes at least two, and so does one whose links lose
            frames under Cubic (:func:`gradwire.tools.bench.pace.settling_s`).
    """

    models: Sequence[str]
    topologies: Sequence[Topology]
    variants: Sequence[str] = field(default=VARIANTS)
    budget_s: float = 3.0
    loopback: bool = False
    compute: str = "real"
    cell_budget_s: float | None = None

    def __post_init__(self) -> None:
        for model in self.models:
            bench_model(model)
        for variant in self.variants:
            check_variant(variant)
        if self.compute not in COMPUTE_KINDS:
            raise UsageError(f"compute {self.compute!r}: one of {', '.join(COMPUTE_KINDS)} is needed")
        if self.compute == "cuda":
            check_cuda("--compute cuda")
        for topology in self.topologies:
            if topology.hosts < 2:
                raise UsageError("1 host exchanges nothing: use at least 2")
            if self.loopback and (topology.bandwidth is not None or topology.impaired):
                raise UsageError("--loopback has no links to limit: leave the bandwidth out, and delay and loss")

    def families(self) -> Iterator[tuple[str, list[Topology]]]:
        """Yield each model with the clusters that differ only in bandwidth, the slowest last."""
        shapes: dict[str, list[Topology]] = {}
        for topology in self.topologies:
            shapes.setdefault(topology.with_bandwidth(None).spec(), []).append(topology)
        for model in self.models:
            for family in shapes.values():
                yield model, sorted(family, key=lambda t: -(t.bandwidth or float("inf")))


Row = dict[str, Any]
Key = tuple[str, str, str, str]
"""Key of a row: model, cluster, variant, and whether its ranks computed or slept."""

NEEDED: dict[str, tuple[type, ...]] = {
    "model": (str,),
    "hosts": (int,),
    "lab": (str,),
    "variant": (str,),
    "bandwidth_bits_per_s": (int, float, type(None)),
    "step_time_s": (int, float),
    "cores": (int,),
}
"""Fields that a row needs to be found and predicted, and their types."""


def measure_grid(grid: StepGrid, path: Path, say: Callable[[str], None], deadline: Deadline | None = None) -> list[Row]:
    """Measure the rows that ``path`` lacks; return all rows of the grid, or those measured before the deadline.

    If the ranks sleep, all cells of a model use one timeline, which is measured once on rank 0 and stored in the rows
    of ``compute``.

    Raises:
        BackendError: no emulated cluster can be built here.
        WorkerError: a rank died; the rows so far are in the file.
        RunError: the file cannot be written, which is tried before anything is measured.
    """
    found = {_key(row): row for row in read_rows(path)}
    check_writable(path)
    rows: list[Row] = []
    for model, family in grid.families():
        if deadline is not None and deadline.passed:
            break
        wanted = {t.spec(): [v for v in grid.variants if _wanted(grid, model, t, v) not in found] for t in family}
        missing = list(dict.fromkeys(v for variants in wanted.values() for v in variants))
        if not missing:
            continue
        # Timeline and floor belong to the cell, so computing alone is measured with every cell.
        names = list(dict.fromkeys([COMPUTE, *missing]))
        with contextlib.suppress(OutOfTimeError), open_cluster(grid, model, family[0], deadline) as (ranks, network):
            timeline = tell_to_sleep(grid, model, ranks, found.values())
            numel = [ranks.ask("build", variant=name)[0]["numel"] for name in names][-1]
            for topology in family:
                chosen = [n for n in names if n in wanted[topology.spec()]]
                if not chosen:
                    continue
                if network is not None:
                    network.set_bandwidth(topology.bandwidth)
                cell = Cell(grid, model, topology, ranks, network, numel, timeline)
                for row in cell.measure(list(dict.fromkeys([COMPUTE, *chosen]))):
                    if row["variant"] in chosen or (timeline and _key(row) not in found):
                        append_row(path, row)
                        found[_key(row)] = row
                        say(describe(row))
    for model, family in grid.families():
        keys = [_wanted(grid, model, t, v) for t in family for v in grid.variants]
        rows += [found[key] for key in keys if key in found]
    return rows


@contextlib.contextmanager
def open_cluster(
    grid: StepGrid, model: str, topology: Topology, deadline: Deadline | None = None
) -> Iterator[tuple[Ranks, Network | None]]:
    """Start the ranks of a model for the body, on an emulated cluster without limits or on loopback."""
    with contextlib.ExitStack() as stack:
        network = None if grid.loopback else stack.enter_context(open_network(topology.with_bandwidth(None)))
        device = "cuda" if grid.compute == "cuda" else "cpu"
        yield stack.enter_context(open_ranks(model, topology.hosts, network, deadline, device)), network


def tell_to_sleep(grid: StepGrid, model: str, ranks: Ranks, rows: Iterable[Row] = ()) -> Row | None:
    """Let the ranks sleep through a timeline, from a row or measured now, if the grid says so; return the timeline."""
    if grid.compute != "sleep":
        return None
    kept = [r["timeline"] for r in rows if r["model"] == model and compute_of(r) == "sleep" and r.get("timeline")]
    timeline: Row = kept[-1] if kept else ranks.ask("profile")[0]["timeline"]
    ranks.ask("sleep", timeline=timeline)
    return timeline


class Cell:
    """All variants of one model on one cluster, which take turns."""

    def __init__(
        self,
        grid: StepGrid,
        model: str,
        topology: Topology,
        ranks: Ranks,
        network: Network | None,
        numel: int,
        timeline: Row | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.grid, self.model, self.topology, self.timeline = grid, model, topology, timeline
        self.ranks, self.network, self.numel, self.clock = ranks, network, numel, clock
        self._links = topology.links()
        congestion = topology.congestion or congestion_here() or ""
        self._settling_s, self._settled_s = settling_s(self._links, congestion) if network else 0.0, 0.0

    def measure(self, variants: Sequence[str]) -> list[Row]:
        """Measure the variants of this cell, including computing alone; return a row for each.

        If the ranks' deadline passes, the rows are those of the variants that have taken a turn.
        """
        began_s = self.clock()
        step_s = {name: self._warm_up(name) for name in variants}
        if self.grid.cell_budget_s is None:
            counts = {name: steps_of_budget(step_s[name], self.grid.budget_s) for name in variants}
        else:
            counts = steps_of_cell(step_s, self.grid.cell_budget_s - (self.clock() - began_s - self._settled_s))
        self.ranks.ask("forget_timeline", variant=COMPUTE)
        if self.network is not None and self.topology.outages:
            self.network.restart_outages()
        samples: dict[str, list[Row]] = {name: [] for name in variants}
        timeline = self.timeline
        with contextlib.suppress(OutOfTimeError):
            for turn in range(TURNS):
                for name in variants:
                    turns, steps = counts[name]
                    if turn < turns:
                        samples[name].append(
                            self._turn(name, steps, lead(step_s[name], self.grid.budget_s, self._links))
                        )
                timeline = self.timeline or self.ranks.ask("timeline", variant=COMPUTE)[0]["timeline"]
        taken = {name: turns for name, turns in samples.items() if turns}
        if timeline is None or COMPUTE not in taken:
            raise OutOfTimeError("the deadline passed before a turn had ended")
        if self.grid.compute == "cuda":
            # Its times would be those of launches, which end before the work on the GPU.
            timeline = None
        compute_s = median(t for turn in taken[COMPUTE] for t in turn["times_s"])
        rows = {name: self._row(name, turns, compute_s) for name, turns in taken.items()}
        rows[COMPUTE]["timeline"] = timeline
        reference = rows["ddp fp32"]["step_time_s"] if "ddp fp32" in rows else None
        for name, row in rows.items():
            if self.grid.compute == "cuda":
                row["device"] = torch.cuda.get_device_name()
            row["speedup_over_ddp_fp32"] = reference / row["step_time_s"] if reference else None
            if name.startswith("gradwire") or is_sharded(name):
                with contextlib.suppress(OutOfTimeError):
                    row["record"] = self.ranks.ask("record", variant=name)[0]["record"]
        return list(rows.values())

    def _warm_up(self, name: str) -> float:
        """Take steps until connections have their speed and a link its method; return the seconds of a step."""
        chooses, measures = follows_the_link(name)
        if chooses or measures:
            # What it chose or measured is valid for the cell before.
            self.ranks.ask("build", variant=name)
        while chooses and not self.ranks.ask("record", variant=name)[0]["record"]["choice"]["chosen"]:
            self.ranks.ask("steps", variant=name, count=5)
        if name != COMPUTE:
            self._settle(name)
        budget_s = self.grid.cell_budget_s or self.grid.budget_s
        step_s: float = max(answer["times_s"][-1] for answer in self.ranks.ask("steps", variant=name, count=1))
        if self.grid.cell_budget_s is None or step_s < budget_s / 10:
            step_s = max(answer["times_s"][-1] for answer in self.ranks.ask("steps", variant=name, count=1))
        if step_s < self.grid.budget_s / 10:
            step_s = median(self._turn(name, 3)["times_s"])
        return step_s

    def _settle(self, name: str) -> None:
        """Take steps until the windows of an exchange's connections have their mean."""
        began_s = self.clock()
        while (passed_s := self.clock() - began_s) < self._settling_s:
            self.ranks.ask("steps", variant=name, count=1)
        self._settled_s += passed_s

    def _turn(self, name: str, steps: int, first: int = 0) -> Row:
        if first:
            self.ranks.ask("steps", variant=name, count=first)
        watch = NetworkWatch(self.network, self.topology) if self.network else None
        answers = self.ranks.ask("steps", variant=name, count=steps)
        moved = watch.moved() if watch else None
        # Of a sharded module, the interfaces alone count all bytes.
        counted = [a["counted"]["sent_bytes"] for a in answers if "sent_bytes" in a["counted"]]
        return {
            # An exchange keeps ranks in step, so the mean is the step's time; without one, the slowest rank counts.
            "times_s": [
                (max if name == COMPUTE else fmean)(column) for column in zip(*[a["times_s"] for a in answers])
            ],
            "cpu_s": sum(a["cpu_s"] for a in answers),
            "moved": moved,
            "library_bytes": sum(counted) if counted else None,
            "steps": steps,
            **{k: fmean(a["counted"].get(k, 0.0) for a in answers) for k in ("encode_s", "wire_s", "decode_s")},
        }

    def _row(self, name: str, turns: Sequence[Row], compute_s: float) -> Row:
        times = [t for turn in turns for t in turn["times_s"]]
        steps, hosts = sum(turn["steps"] for turn in turns), self.topology.hosts
        dense = dense_wire_bytes(name, self.numel, hosts)
        library = turns[0]["library_bytes"]
        sent = dense if library is None else sum(t["library_bytes"] for t in turns) / steps / hosts
        passed = [turn["moved"] for turn in turns if turn["moved"]]
        moved = sum(m.bytes for m in passed) / steps / hosts if self.network else None
        again = sum(m.again for m in passed) / steps / hosts
        most = max(sent or 0.0, moved or 0.0)
        between = sum(m.between_bytes for m in passed) / steps
        floor_s = max(compute_s, wire_floor_s(self.topology, most if sent is None else sent, between))
        gap = moved / sent - 1 if moved is not None and sent else None
        low, high = percentiles_20_80(times)
        return {
            "model": self.model,
            "parameters": self.numel,
            "hosts": hosts,
            "lab": _place(self.grid, self.topology),
            "bandwidth_bits_per_s": self.topology.bandwidth,
            "variant": name,
            "compute": self.grid.compute,
            "step_time_s": median(times),
            "mean_step_time_s": fmean(times),
            "percentile_20_s": low,
            "percentile_80_s": high,
            "samples": len(times),
            "turn_medians_s": [median(turn["times_s"]) for turn in turns],
            "compute_s": compute_s,
            "floor_s": floor_s,
            "ratio_to_floor": median(times) / floor_s,
            "sent_bytes_per_step": sent,
            "interface_bytes_per_step": moved,
            "interface_over_library": gap,
            "bytes_agree": None if gap is None or not sent else bytes_agree(gap, sent, again, hosts - 1),
            **network_fields(self.network, passed, steps, hosts),
            "cpu_s_per_step": sum(t["cpu_s"] for t in turns) / steps,
            **{f"{k[:-2]}_s_per_step": sum(t[k] for t in turns) / steps for k in ("encode_s", "wire_s", "decode_s")},
            "date_utc": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            **{k: v for k, v in hardware().items() if k in ("processor", "cores")},
            **{f"{name}_version": version for name, version in versions().items()},
        }


def _place(grid: StepGrid, topology: Topology) -> str:
    return f"loopback,hosts={topology.hosts}" if grid.loopback else topology.spec()


def compute_of(row: Mapping[str, Any]) -> str:
    """Return a row's field ``compute``; the oldest rows lack it, and their ranks computed."""
    found: str = row.get("compute", "real")
    return found


def _key(row: Row) -> Key:
    return row["model"], row["lab"], row["variant"], compute_of(row)


def _wanted(grid: StepGrid, model: str, topology: Topology, variant: str) -> Key:
    return model, _place(grid, topology), variant, grid.compute


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a file; a line that is not JSON, such as a truncated last one, is left out.

    Raises:
        UsageError: a line is not a row of this benchmark.
    """
    if not path.exists():
        return []
    rows = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            print(f"gradwire: {path}: a line that is not JSON is left out: {line[:40]}", file=sys.stderr)
            continue
        rows.append(_checked(row, f"{path}, line {number}"))
    return rows


def _checked(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise UsageError(f"{where}: not a row of gradwire bench step, but {str(row)[:40]}")
    missing = [name for name in NEEDED if name not in row]
    wrong = [n for n, kinds in NEEDED.items() if n in row and (not isinstance(row[n], kinds) or row[n] is True)]
    if missing or wrong:
        what = f"it lacks {', '.join(missing)}" if missing else f"{wrong[0]} is {row[wrong[0]]!r}"
        raise UsageError(f"{where}: not a row of gradwire bench step: {what}; name a file that it wrote")
    return row


def describe(row: Row) -> str:
    """Return a description of a row in one line."""
    speed = format_rate(row["bandwidth_bits_per_s"])
    sent = row["sent_bytes_per_step"]
    gap = row["interface_over_library"]
    return (
        f"{row['model']:11s} {row['hosts']} hosts {speed:>9s} {row['variant']:20s} {row['step_time_s'] * 1e3:8.1f} ms"
        + {"sleep": "  asleep", "cuda": "  on GPUs"}.get(compute_of(row), "")
        + f"  {row['ratio_to_floor']:5.2f} x floor"
        + ("" if sent is None else f"  {sent / 1e6:7.3f} MB")
        + ("" if gap is None else f"  interface {100 * gap:+.1f} %")
    )
