"""What ``gradwire bench`` does once its options are read."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradwire.tools.bench.kernels import measure_cuda_kernels, measure_kernels
from gradwire.tools.bench.models import MODELS
from gradwire.tools.bench.step import BANDWIDTHS, BYTES_TOLERANCE, HOSTS, StepGrid, compute_of, measure_grid
from gradwire.tools.bench.timeline import summarise, trace_steps, write_trace
from gradwire.tools.bench.variants import VARIANTS
from gradwire.tools.cli.options import check_figure
from gradwire.tools.cli.show import print_json, print_steps, print_timeline
from gradwire.tools.experiments.errors import RunError, UsageError
from gradwire.tools.lab import Topology, parse_rate
from gradwire.tools.report.figures import draw_steps, draw_timeline


def step(
    *,
    models: Sequence[str] | None,
    hosts: Sequence[int] | None,
    bandwidths: Sequence[str] | None,
    variants: Sequence[str] | None,
    lab: str | None,
    loopback: bool,
    compute: str,
    budget_s: float,
    cell_budget_s: float | None,
    out: Path,
    figure: Path | None,
    as_json: bool,
) -> None:
    """Measure, print the table, and fail where bytes disagree.

    Raises:
        RunError: in some cell the interfaces counted other bytes than the library.
    """
    check_figure(figure)
    for name, seconds in (("--budget", budget_s), ("--cell-budget", cell_budget_s)):
        if seconds is not None and not seconds > 0:
            raise UsageError(f"{name} {seconds:g}: seconds above 0 are needed")
    if lab is not None:
        if hosts or bandwidths or loopback:
            raise UsageError("--lab names the whole cluster: leave --hosts, --bandwidth and --loopback out")
        topologies = [Topology.parse(lab)]
    else:
        rates = [parse_rate(text) for text in bandwidths or (("unlimited",) if loopback else BANDWIDTHS)]
        topologies = [Topology(hosts=n, bandwidth=rate) for n in hosts or HOSTS for rate in rates]
    grid = StepGrid(
        models=models or list(MODELS),
        topologies=topologies,
        variants=variants or VARIANTS,
        budget_s=budget_s,
        cell_budget_s=cell_budget_s,
        compute=compute,
        loopback=loopback,
    )
    rows = measure_grid(grid, out, lambda line: print(line, file=sys.stderr, flush=True))
    if as_json:
        print_json([flat(row) for row in rows])
    else:
        print_steps(rows)
        print(f"rows: {out}")
    if figure is not None:
        draw_steps(figure, rows)
        print(f"figure: {figure}", file=sys.stderr)
    wrong = [row for row in rows if row["bytes_agree"] is False]
    if wrong:
        first = wrong[0]
        raise RunError(
            f"{len(wrong)} of {len(rows)} rows: interfaces and library differ in bytes by over"
            f" {100 * BYTES_TOLERANCE:g} %; first: {first['model']}, {first['lab']}, {first['variant']}"
            f" ({100 * first['interface_over_library']:+.1f} %)"
        )


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what is not a plain value; a row from before ranks could sleep gets the field that it lacks."""
    nested = ("timeline", "record", "turn_medians_s")
    return {key: value for key, value in row.items() if key not in nested} | {"compute": compute_of(row)}


def timeline(
    *,
    model: str,
    lab: str,
    loopback: bool,
    method: str,
    compute: str,
    steps: int,
    rank: int,
    out: Path,
    figure: Path | None,
    as_json: bool,
) -> None:
    """Record, write the trace, print the summary, draw.

    Raises:
        UsageError: there is no such rank, or the exchange has no lanes of ours.
    """
    check_figure(figure)
    if compute == "cuda":
        raise UsageError("--compute cuda: passes on a GPU go on after they have returned; use real or sleep")
    topology = Topology.parse(lab)
    if loopback:
        topology = Topology(hosts=topology.hosts)
    if not 0 <= rank < topology.hosts:
        raise UsageError(f"--rank {rank}: there are ranks 0 to {topology.hosts - 1}")
    grid = StepGrid(
        models=[model], topologies=[topology], variants=[f"gradwire {method}"], loopback=loopback, compute=compute
    )
    traces = trace_steps(grid, steps)
    write_trace(out, traces)
    rows = summarise(traces, topology.bandwidth)
    if as_json:
        print_json(rows)
    else:
        print_timeline(rows)
        print(f"trace: {out}")
    if figure is not None:
        parts, lanes = traces[rank].steps()[-1]
        spans = [("compute", name, *ends) for name, ends in parts.items()]
        spans += sorted((s.track, s.name, s.began_s, s.ended_s) for s in lanes)
        draw_timeline(figure, spans, f"{model}, {topology.spec()}, {method}, compute {compute}: rank {rank}")
        print(f"figure: {figure}", file=sys.stderr)


def kernels(elements: int, repetitions: int, backend: str, device: str, *, as_json: bool) -> None:
    """Measure, printing each row as it comes; on a GPU, say first of each family whether it agrees with the reference.

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
