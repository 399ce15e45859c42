"""The work of ``gradwire bench``, given its options."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from gradwire.tools.bench.kernels import measure_cuda_kernels, measure_kernels
from gradwire.tools.bench.models import MODELS
from gradwire.tools.bench.network_row import BYTES_TOLERANCE, host_rates
from gradwire.tools.bench.row_file import check_writable
from gradwire.tools.bench.step import BANDWIDTHS, HOSTS, StepGrid, compute_of, measure_grid
from gradwire.tools.bench.timeline import summarise, trace_steps, write_trace
from gradwire.tools.bench.variants import VARIANTS
from gradwire.tools.cli.options import StepOptions, TimelineOptions, check_figure
from gradwire.tools.cli.show import print_json, print_steps, print_timeline
from gradwire.tools.experiments.errors import RunError, UsageError
from gradwire.tools.lab import Topology
from gradwire.tools.report.figures import draw_steps, draw_timeline


def step(options: StepOptions) -> None:
    """Measure steps, print the table, and fail if the counts of bytes disagree.

    Raises:
        UsageError: an option is out of range, or two do not go together.
        RunError: in some cell the interfaces counted other bytes than the library.
    """
    check_figure(options.figure)
    for name, seconds in (("--budget", options.budget), ("--cell-budget", options.cell_budget)):
        if seconds is not None and not 0 < seconds < math.inf:
            raise UsageError(f"{name} {seconds:g}: finite seconds above 0 are needed")
    if options.lab is not None:
        if options.hosts or options.bandwidth or options.loopback or _impairments(options):
            raise UsageError(
                "--lab names the whole cluster: leave --hosts, --bandwidth, --loopback and what its links do out"
            )
        topologies = [Topology.parse(options.lab)]
    else:
        rates = options.bandwidth or (("unlimited",) if options.loopback else BANDWIDTHS)
        links = [
            {"delay": delay, "loss": loss} for delay in options.delay or (None,) for loss in options.loss or (None,)
        ]
        given = [_impairments(options) | {k: v for k, v in link.items() if v is not None} for link in links]
        topologies = [
            Topology.parse(",".join(f"{k}={v}" for k, v in {"hosts": hosts, "bandwidth": rate, **link}.items()))
            for link in given
            for hosts in options.hosts or HOSTS
            for rate in rates
        ]
    grid = StepGrid(
        models=options.model or list(MODELS),
        topologies=topologies,
        variants=options.variant or VARIANTS,
        budget_s=options.budget,
        cell_budget_s=options.cell_budget,
        compute=options.compute,
        loopback=options.loopback,
    )
    rows = measure_grid(grid, options.out, lambda line: print(line, file=sys.stderr, flush=True))
    if options.as_json:
        print_json([flat(row) for row in rows])
    else:
        print_steps(rows)
        print(f"rows: {options.out}")
    if options.figure is not None:
        draw_steps(options.figure, rows)
        print(f"figure: {options.figure}", file=sys.stderr)
    wrong = [row for row in rows if row["bytes_agree"] is False]
    if wrong:
        first = wrong[0]
        raise RunError(
            f"{len(wrong)} of {len(rows)} rows: interfaces and library differ in bytes by over"
            f" {100 * BYTES_TOLERANCE:g} %; first: {first['model']}, {first['lab']}, {first['variant']}"
            f" ({100 * first['interface_over_library']:+.1f} %)"
        )


def _impairments(options: StepOptions) -> dict[str, str]:
    """Return the keys of a topology for what the links of all cells do besides limiting rates."""
    given = {
        "delay": "".join((options.delay or [])[:1]),
        "loss": "".join((options.loss or [])[:1]),
        "jitter": options.jitter,
        "burst": options.burst,
        "reorder": options.reorder,
        "outage": "+".join(options.outage or []),
        "congestion": options.congestion,
    }
    return {key: value for key, value in given.items() if value}


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain values of a row; the oldest rows lack the field ``compute``, which is added."""
    nested = ("timeline", "record", "turn_medians_s")
    return {key: value for key, value in row.items() if key not in nested} | {"compute": compute_of(row)}


def timeline(options: TimelineOptions) -> None:
    """Record a timeline, write the trace, print the summary, and draw the figure.

    Raises:
        UsageError: there is no such rank, or the exchange has no lanes of ours.
        RunError: the trace cannot be written, which is tried before anything is measured.
    """
    check_figure(options.figure)
    if options.compute == "cuda":
        raise UsageError("--compute cuda: passes on a GPU go on after they have returned; use real or sleep")
    topology = Topology.parse(options.lab)
    if options.loopback:
        topology = Topology(hosts=topology.hosts)
    if not 0 <= options.rank < topology.hosts:
        raise UsageError(f"--rank {options.rank}: there are ranks 0 to {topology.hosts - 1}")
    grid = StepGrid(
        models=[options.model],
        topologies=[topology],
        variants=[f"gradwire {options.method}"],
        loopback=options.loopback,
        compute=options.compute,
    )
    check_writable(options.out)
    traces = trace_steps(grid, options.steps)
    rows = summarise(traces, min(host_rates(topology), default=None))
    if options.as_json:
        print_json(rows)
    else:
        print_timeline(rows)
    write_trace(options.out, traces)
    print(f"trace: {options.out}", file=sys.stderr if options.as_json else sys.stdout)
    if options.figure is not None:
        parts, lanes = traces[options.rank].steps()[-1]
        spans = [("compute", name, *ends) for name, ends in parts.items()]
        spans += sorted((s.track, s.name, s.began_s, s.ended_s) for s in lanes)
        where = f"{options.model}, {topology.spec()}, {options.method}, compute {options.compute}: rank {options.rank}"
        draw_timeline(options.figure, spans, where)
        print(f"figure: {options.figure}", file=sys.stderr)


def kernels(elements: int, repetitions: int, backend: str, device: str, *, as_json: bool) -> None:
    """Measure kernels and print each row as it comes; on a GPU, first compare each family with the reference.

    Raises:
        UsageError: too few elements or repetitions to measure anything, or options that do not go together.
        BackendError: there is no such device.
        RunError: a family differs from the reference on the GPU.
    """
    if device not in ("cpu", "cuda"):
        raise UsageError(f"--device {device}: there are cpu and cuda")
    if device == "cuda" and backend not in ("auto", "triton"):
        raise UsageError(f"--device cuda measures the backend triton, not {backend}: leave --backend out")
    if elements < 100_000 or repetitions < 2:
        raise UsageError("at least 100000 elements and 2 repetitions are needed for a time that means something")
    head = f"{'kernel':28}{'layout':12}{'elements':>10}{'ms':>10}{'of memcpy':>11}   [20 %, 80 %]{'goal':>8}"
    print(head, file=sys.stderr)

    def line(row: Mapping[str, Any]) -> None:
        goal = f"{row['goal_ratio']:8.2f}" if row["goal_ratio"] else ""
        print(
            f"{row['kernel']:28}{row['layout']:12}{row['elements']:>10}{row['median_s'] * 1e3:>10.3f}"
            f"{row['ratio_to_memcpy']:>11.3f}   [{row['ratio_p20']:.3f}, {row['ratio_p80']:.3f}]{goal}",
            file=sys.stderr if as_json else sys.stdout,
            flush=True,
        )

    def verified(found: Mapping[str, Any]) -> None:
        verdict = "agrees with" if found["agrees"] else "DIFFERS from"
        print(f"{found['family']} {verdict} the reference", file=sys.stderr, flush=True)

    wrong: list[str] = []
    if device == "cuda":
        rows, wrong = measure_cuda_kernels(elements, repetitions, line, verified)
    else:
        rows = measure_kernels(elements, repetitions, backend, line)
    if as_json:
        print_json(rows)
    if wrong:
        raise RunError(f"on this GPU the backend triton differs from the reference: {', '.join(wrong)}")
