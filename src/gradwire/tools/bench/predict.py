"""Calibration of the performance model by measured steps, and predictions beside measurements."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

import gradwire as gw
from gradwire.model.calibrate import Observation, calibrate
from gradwire.model.exchange_profile import ExchangeProfile, exchange_of, nothing_but_the_sum
from gradwire.model.gradients import Gradients, values_of
from gradwire.model.machine import CUBIC, DEFAULT, LinkModel, Machine
from gradwire.model.profile import Timeline
from gradwire.model.schedule import Load
from gradwire.tools.bench.models import bench_model
from gradwire.tools.bench.ranks import Deadline
from gradwire.tools.bench.step import StepGrid, compute_of, measure_grid, read_rows
from gradwire.tools.bench.variants import COMPUTE, is_sharded
from gradwire.tools.experiments.errors import RunError, UsageError
from gradwire.tools.lab import Topology

Row = dict[str, Any]

OWN = {"ddp fp32": "fp32", "ddp fp16": "fp16"}
"""Methods that equal one of DDP's own exchanges bit for bit."""

NO_METHOD = (COMPUTE, "ddp powersgd")
"""Variants that exchange nothing, or that no method equals."""

MODELS = ("lenet", "mlp", "transformer")
HOSTS = (2, 4)
VARIANTS = ("compute", "ddp fp32", "gradwire bf16", "gradwire terngrad")
BUDGET_S = 0.8
LIMIT_S = 60.0
STEPS_SHARE, CODECS_SHARE = 0.7, 0.85
"""Shares of the time at which taking steps ends, and at which timing codecs ends; the rest is for the fit."""


@dataclass(frozen=True)
class Case:
    """A measured row, and the inputs of its prediction."""

    row: Row
    observation: Observation

    @property
    def cell(self) -> tuple[str, str]:
        """Return model and cluster."""
        return self.row["model"], self.row["lab"]


def cases_of(
    rows: Sequence[Row], say: Callable[[str], None] = lambda text: None, deadline: Deadline | None = None
) -> list[Case]:
    """Return the cases of all rows that the model predicts.

    Rows of computing alone, of PyTorch's PowerSGD hook and of ranks that slept are left out: the model assumes that
    ranks share cores while they compute. So are rows of clusters whose links differ or fail, since the model knows one
    link, rows of methods that choose among others, exchange in some steps only, or exchange shards, and rows of methods
    on nodes whose size they do not state; ``say`` is told of all three.

    Codecs are timed here, one exchange after the other; at the deadline the cases so far are returned. The timeline is
    that of the unlimited (or fastest) cell of the same model and hosts, since a user profiles once, not for each
    bandwidth. It is as long as a step without an exchange in the cell, which took turns with the others: a shared
    machine computes at another speed in another hour.

    Raises:
        RunError: a model and number of hosts has no timeline, or a damaged one.
    """
    rows = predictable(rows, say)
    timelines = _timelines(rows)
    exchanges: dict[tuple[str, int, str], ExchangeProfile] = {}
    cases = []
    for row in rows:
        variant = row["variant"]
        if variant in NO_METHOD:
            continue
        key = row["model"], row["hosts"], variant
        timeline = timelines.get(key[:2])
        if timeline is None:
            raise RunError(f"no step without an exchange was measured for {row['model']} on {row['hosts']} hosts")
        if key not in exchanges:
            if deadline is not None and deadline.passed:
                break
            say(f"rehearsing {row['model']}, {row['hosts']} hosts, {variant}")
            exchanges[key] = _exchange(row["model"], row["hosts"], _spec(variant), variant, timeline)
        topology = _topology(row)
        rate = topology.bandwidth
        cases.append(
            Case(
                row,
                Observation(
                    timeline.scaled(row.get("compute_s") or timeline.compute_s),
                    exchanges[key],
                    LinkModel(
                        bandwidth_bytes_per_s=rate / 8 if rate else None,
                        latency_s=topology.delay_s(0, 1),
                        loss=topology.of_host(0).loss,
                        congestion=row.get("tcp_congestion_control", CUBIC),
                    ),
                    Load(ranks=row["hosts"], cores=row["cores"]),
                    _measured_s(row, topology),
                ),
            )
        )
    return cases


def predictable(rows: Sequence[Row], say: Callable[[str], None]) -> list[Row]:
    """Return the rows that :func:`cases_of` does not leave out, and those of its timelines."""
    rows = [row for row in rows if compute_of(row) == "real"]
    return of_known_nodes(of_every_step(of_one_link(rows, say), say), say)


def of_one_link(rows: Sequence[Row], say: Callable[[str], None]) -> list[Row]:
    """Return the rows of clusters that one link describes, and tell ``say`` in one line of the others."""
    others = {row["lab"] for row in rows if not _has_one_link(_topology(row))}
    if others:
        say(
            "left out, since links that differ, or fail for some time, are not predicted: the rows of "
            + "; ".join(sorted(others))
        )
    return [row for row in rows if row["lab"] not in others]


def of_every_step(rows: Sequence[Row], say: Callable[[str], None]) -> list[Row]:
    """Return the rows of methods that exchange buckets in every step, and tell ``say`` in one line of the others."""
    others = {row["variant"] for row in rows if not _exchanges_buckets(row["variant"])}
    if others:
        say("left out, since no bucket of theirs is exchanged in every step: the rows of " + "; ".join(sorted(others)))
    return [row for row in rows if row["variant"] not in others]


def of_known_nodes(rows: Sequence[Row], say: Callable[[str], None]) -> list[Row]:
    """Return the rows of methods whose nodes are known, and tell ``say`` in one line of the others."""
    others = {row["variant"] for row in rows if not _has_known_nodes(row["variant"], row["hosts"])}
    if others:
        say(
            "left out, since they do not state the ranks of a node (node_size): the rows of "
            + "; ".join(sorted(others))
        )
    return [row for row in rows if row["variant"] not in others]


def _spec(variant: str) -> str:
    return OWN.get(variant) or variant.partition(" ")[2]


def _exchanges_buckets(variant: str) -> bool:
    if variant in NO_METHOD:
        return True
    if is_sharded(variant):
        return False
    traits = gw.method(_spec(variant)).traits
    return not (traits.tries or traits.local_steps or traits.at_own_pace)


def _has_known_nodes(variant: str, hosts: int) -> bool:
    if variant in NO_METHOD:
        return True
    try:
        gw.method(_spec(variant)).scopes(hosts)
    except gw.IncompatibleError:
        return False
    return True


def _topology(row: Row) -> Topology:
    return Topology.parse(row["lab"]) if "bandwidth" in row["lab"] else Topology(hosts=row["hosts"])


def _has_one_link(topology: Topology) -> bool:
    own = topology.overrides or topology.host_impairments
    return topology.groups == 1 and topology.asymmetric is None and not own and not topology.outages


def _measured_s(row: Row, topology: Topology) -> float:
    # Where frames are lost, few steps wait long for some: the model predicts the mean, which the oldest rows lack.
    lossy = topology.of_host(0).loss > 0
    measured: float = row["mean_step_time_s" if lossy and "mean_step_time_s" in row else "step_time_s"]
    return measured


def _timelines(rows: Sequence[Row]) -> dict[tuple[str, int], Timeline]:
    fastest: dict[tuple[str, int], Timeline] = {}
    for row in sorted(rows, key=lambda r: r["bandwidth_bits_per_s"] or float("inf")):
        if row["variant"] == COMPUTE and row.get("timeline"):
            fastest[row["model"], row["hosts"]] = _timeline(row)
    return fastest


def _timeline(row: Row) -> Timeline:
    try:
        found = Timeline.from_json(row["timeline"])
        if not found.compute_s > 0:
            raise ValueError("its step takes no time")
        return found
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise RunError(
            f"the timeline of {row['model']} on {row['hosts']} hosts cannot be read ({type(error).__name__}: {error}):"
            " measure that cell again"
        ) from None


def _exchange(model: str, hosts: int, spec: str, variant: str, timeline: Timeline) -> ExchangeProfile:
    with torch.device("meta"):
        module = bench_model(model).make()
    found = exchange_of(spec, dict(module.named_parameters()), timeline.buckets, hosts, gradients=_gradients(model))
    return nothing_but_the_sum(found) if variant == "ddp fp32" else found


@cache
def _gradients(model: str) -> Gradients:
    """Return the values of a model's gradients in its first step."""
    bench = bench_model(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = bench.make()
    bench.loss(module, bench.batch(torch.Generator().manual_seed(0))).backward()
    return {name: values_of(p.grad) for name, p in module.named_parameters() if p.grad is not None}


def split(cases: Iterable[Case]) -> tuple[list[Case], list[Case]]:
    """Return the cases of every third cell, in the order of model, hosts, bandwidth and lab, and all other cases."""
    listed = list(cases)
    cells = sorted({c.cell for c in listed}, key=lambda cell: _order(cell, listed))
    chosen = set(cells[::3])
    return [c for c in listed if c.cell in chosen], [c for c in listed if c.cell not in chosen]


def _order(cell: tuple[str, str], cases: Sequence[Case]) -> tuple[str, int, float, str]:
    row = next(c.row for c in cases if c.cell == cell)
    # Links of one bandwidth differ in delay or loss; without the last part their order would differ from run to run.
    return row["model"], row["hosts"], row["bandwidth_bits_per_s"] or float("inf"), row["lab"]


def judge(rows: Sequence[Row], say: Callable[[str], None] = lambda text: None) -> tuple[Machine, list[Row]]:
    """Calibrate on a third of the cells; return the machine, and a row of measured and predicted time for each case."""
    cases = cases_of(rows, say)
    chosen, _ = split(cases)
    cells = {c.cell for c in chosen}
    machine = calibrate([c.observation for c in chosen], f"{len(chosen)} measured steps of {len(cells)} cells")
    found = []
    for case in cases:
        predicted = case.observation.predict(machine)
        row = case.row
        found.append(
            {
                "model": row["model"],
                "hosts": row["hosts"],
                "lab": row["lab"],
                "bandwidth_bits_per_s": row["bandwidth_bits_per_s"],
                "variant": row["variant"],
                "measured_s": case.observation.step_s,
                "predicted_s": predicted,
                "relative_error": predicted / case.observation.step_s - 1,
                "role": "calibration" if case.cell in cells else "judged",
            }
        )
    return machine, found


def default_path() -> Path:
    """Return the path of this machine's calibration.

    Raises:
        RunError: there is no home folder, or it cannot be read.
    """
    try:
        path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradwire" / "calibration.json"
        path.exists()  # Raises in a folder that is not this user's.
    except (OSError, RuntimeError) as error:
        raise RunError(
            f"the file of this machine's calibration cannot be read ({error}): set XDG_CACHE_HOME to a folder of yours"
        ) from error
    return path


def measure_machine(
    path: Path,
    say: Callable[[str], None],
    limit_s: float = LIMIT_S,
    clock: Callable[[], float] = time.monotonic,
) -> Machine:
    """Take steps with two and four local workers, fit the costs to them, and save the costs in ``path``.

    Loopback has no slow network, so the efficiency of a link keeps its default value.

    Measurements stop at the time limit. With few steps, the costs are drawn towards the defaults; with none, they are
    the defaults, and ``path`` is not written. ``source`` of the result says so. If ``path`` cannot be written, the
    costs are returned all the same.

    Args:
        path: Where to save the costs.
        say: Called with a line for each row, if time ran out, and if the costs could not be saved.
        limit_s: Most seconds to take, besides the compilation of kernels, which is needed once on a machine.
        clock: Returns seconds.
    """
    grid = StepGrid(
        models=MODELS,
        topologies=[Topology(hosts=n) for n in HOSTS],
        variants=VARIANTS,
        budget_s=BUDGET_S,
        loopback=True,
    )
    compiled_s = gw.warm_up("terngrad")
    if compiled_s > 0.5:
        say(f"compiled kernels, once per machine: {compiled_s:.1f} s")
    steps, codecs, fit = (Deadline(share * limit_s, clock) for share in (STEPS_SHARE, CODECS_SHARE, 1.0))
    with tempfile.TemporaryDirectory() as folder:
        rows = measure_grid(grid, Path(folder) / "rows.jsonl", say, steps)
    observations = [case.observation for case in cases_of(rows, deadline=codecs)]
    wanted = len(MODELS) * len(HOSTS) * (len(VARIANTS) - 1)
    count = f"{len(observations)} steps on loopback"
    if len(observations) < wanted:
        count = f"{len(observations)} of {wanted} steps on loopback, in the {limit_s:g} s allowed"
        say(f"{count}: give more with --calibration-limit, or calibrate anew on an idle machine with --calibrate")
    if not observations:
        return replace(DEFAULT, source=f"defaults: no step was measured in the {limit_s:g} s allowed")
    machine = calibrate(observations, count, fit_links=False, few=True, stop=lambda: fit.passed)
    try:
        machine.save(path)
    except OSError as error:
        say(
            f"not kept, so that the next plan measures again ({error}): name another file by --calibration, or set "
            "XDG_CACHE_HOME to a folder of yours"
        )
    return machine


def machine_of_rows(path: Path, say: Callable[[str], None] = lambda text: None) -> Machine:
    """Fit the costs to all rows of a file of ``gradwire bench step``.

    Args:
        path: The file.
        say: Called with a line for each reason for which rows are left out; see :func:`cases_of`.

    Raises:
        UsageError: the file does not exist.
        HyperparameterError: it holds too few steps.
    """
    if not path.is_file():
        raise UsageError(f"calibration {path} does not exist: measure rows with gradwire bench step --out {path}")
    observations = [case.observation for case in cases_of(predictable(read_rows(path), say))]
    return calibrate(observations, f"{len(observations)} steps of {path.name}")
