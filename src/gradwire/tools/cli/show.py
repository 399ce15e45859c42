"""Output of the commands: tables and JSON on standard output, errors as one line and an exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

import gradwire as gw
from gradwire.methods.accuracy import note_of
from gradwire.tools.report.summary import link_texts
from gradwire.tools.report.verdict import bytes_text, percent, rate_text, seconds_text

FAILED, USAGE, INTERRUPTED = 1, 2, 130
WIDEST, NARROWEST = 1 << 16, 12
"""Width of a table that need not fit a terminal, and the least width of a column of text in one that does."""


@contextlib.contextmanager
def handled(debug: bool) -> Iterator[None]:
    """Turn gradwire's errors, those of the system and Ctrl-C into one line and an exit code.

    With ``debug`` an error keeps its traceback.
    """
    from gradwire.errors import GradwireError, HyperparameterError
    from gradwire.tools.experiments.errors import UsageError

    try:
        yield
        # What cannot be written is told here: once the process ends, Python would show its own message.
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("gradwire: interrupted; all that it started is ended", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    except GradwireError as error:
        if debug:
            raise
        print(f"gradwire: {' '.join(str(error).split())}", file=sys.stderr)
        usage = isinstance(error, (HyperparameterError, UsageError))
        raise typer.Exit(USAGE if usage else FAILED) from None
    except OSError as error:
        # Who closes a pipe has read enough: typer ends the process in silence.
        if debug or error.errno == errno.EPIPE:
            raise
        print(f"gradwire: {error}; --debug shows where", file=sys.stderr)
        _drop_output()
        raise typer.Exit(FAILED) from None


def _drop_output() -> None:
    """Let the rest of the output go nowhere if it cannot be written, so that the end of the process does not fail."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def print_json(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a list of flat objects on standard output; JSON has no infinity and no NaN, which become null."""
    plain = [{key: _plain(value) for key, value in row.items()} for row in rows]
    print(json.dumps(plain, indent=2))


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_table(table: Table) -> None:
    """Print a table, with its text broken to fit the terminal.

    It is as wide as it needs elsewhere, and where its numbers alone are wider: no number is cut. Cells are not markup.
    """
    console = Console(highlight=False, markup=False, emoji=False)
    wide = Console(highlight=False, markup=False, emoji=False, width=WIDEST)
    fits = console.is_terminal and _least_width(table, wide) <= console.width
    (console if fits else wide).print(table)


def _least_width(table: Table, console: Console) -> int:
    """Return the least width at which no number is cut and columns of text have :data:`NARROWEST` characters."""
    found = 0
    for column in table.columns:
        whole = max(console.measure(cell).maximum for cell in (column.header, *column.cells))
        found += 1 + (whole if column.no_wrap else min(whole, NARROWEST))
    return found


def table_of(*columns: str, text: Collection[str] = ()) -> Table:
    """Return a table whose first column is aligned to the left, the others to the right.

    Args:
        columns: Headers.
        text: Headers of columns of text, which may be broken as the first may.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        broken = not number or column in text
        table.add_column(column, justify="right" if number else "left", no_wrap=not broken, overflow="fold")
    return table


def print_runs(rows: Sequence[Mapping[str, Any]], report: Path | None) -> None:
    """Print one line for each run, the choice of "auto", and the path of the report."""
    table = table_of("method", "accuracy", "loss", "time/step", "training", "sent", "factor", "bits/element")
    for row in rows:
        table.add_row(
            row["label"],
            "-" if row["final_accuracy"] is None else percent(row["final_accuracy"]),
            "-" if row["final_loss"] is None else f"{row['final_loss']:.4f}",
            "-" if row["step_time_s"] is None else seconds_text(row["step_time_s"]),
            seconds_text(row["elapsed_s"]),
            bytes_text(row["sent_bytes"]),
            "-" if row["compression_factor"] is None else f"{row['compression_factor']:.2f}",
            "-" if row["bits_per_element"] is None else f"{row['bits_per_element']:.2f}",
        )
    print_table(table)
    for row in rows:
        for text in link_texts(row):
            print(f"{row['label']}: {text}")
    if report:
        print(f"report: {report}")


def print_verdicts(verdicts: Sequence[tuple[str, str]]) -> None:
    """Print a paragraph for each method that says whether it paid."""
    for label, text in verdicts:
        print(f"\n{label}: {text}")
    sys.stdout.flush()


def print_steps(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print one line for each measured step."""
    columns = ("model", "hosts", "link", "compute", "exchange", "step", "20-80 %", "of floor", "sent", "over DDP fp32")
    table = table_of(*columns, text=("link", "exchange"))
    for row in rows:
        sent, speedup = row["sent_bytes_per_step"], row["speedup_over_ddp_fp32"]
        table.add_row(
            row["model"],
            str(row["hosts"]),
            ",".join(part for part in row["lab"].split(",") if not part.startswith("hosts=")).replace("bandwidth=", ""),
            row.get("compute", "real"),
            row["variant"],
            seconds_text(row["step_time_s"]),
            f"{seconds_text(row['percentile_20_s'])}-{seconds_text(row['percentile_80_s'])}",
            f"{row['ratio_to_floor']:.2f}",
            "-" if sent is None else bytes_text(sent),
            "-" if speedup is None else f"{speedup:.2f} x",
        )
    print_table(table)


def print_timeline(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print one line for each rank and step: the parts of the step, and when the network link was idle."""
    table = table_of(
        "rank", "step", "whole", "earliest", "forward", "idle", "rows", "floor", "idle between", "idle after", "update",
        "encode", "wait", "messages", "decode",
    )  # fmt: skip
    keys: tuple[str, ...] = (
        "step_time_s",
        "earliest_s",
        "forward_s",
        "before_rows_s",
        "rows_s",
        "wire_floor_s",
        "between_rows_s",
        "after_rows_s",
    )
    keys += ("update_s", "encode_s", "wait_for_turn_s", "small_messages_s", "decode_s")
    for row in rows:
        table.add_row(
            str(row["rank"]), str(row["step"]), *("-" if row[k] is None else seconds_text(row[k]) for k in keys)
        )
    print_table(table)


def print_plan(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print one line for each predicted step."""
    columns = ("workers", "link", "method", "step", "80 %", "floor", "speed-up", "sent", "delays", "bounded by")
    table = table_of(*columns, "", "", text=("method", "bounded by"))
    for row in rows:
        rate = row["bandwidth_bits_per_s"]
        table.add_row(
            f"{row['hosts']} x {row['ranks_per_host']}",
            rate_text(rate and float(f"{rate:.4g}")),
            row["method"],
            seconds_text(row["step_s"]),
            f"{seconds_text(row['low_s'])}-{seconds_text(row['high_s'])}",
            seconds_text(row["floor_s"]),
            f"{row['speedup']:.2f} x",
            bytes_text(row["sent_bytes"]),
            f"{row['delays']:.3g}" if row["delays"] < 1000 else f"{row['delays']:.0f}",
            row["bottleneck"],
            "~" if row["extrapolated"] else "",
            "<- recommended" if row["recommended"] else "",
        )
    print_table(table)
    if any(row["exchange_every"] > 1 for row in rows):
        print("steps, bytes and delays of methods that exchange in one of several steps are means over these")
    print("delays: times that a step waits for a message to arrive, requests included, with all gradients at hand")
    for why in dict.fromkeys(row["extrapolated"] for row in rows if row["extrapolated"]):
        print(f"~ extrapolated, the interval may not hold: {why}")


NOTES = {
    "omega": "E|Q(g) - g|^2 <= omega |g|^2 for a vector, or blocks, of d elements: the variance that it adds",
    "delta": "E|Q(g) - g|^2 <= (1 - delta) |g|^2: the share of a vector that it keeps at least",
    "state bytes per element": "what each rank remembers; in memory twice: as it holds, and as the round makes it",
    "bits per element": "sent for each element and direction with 4 workers; a float32 all-reduce has 32",
    "delays": "one-way delays of the network on the critical path of an exchange with 4 workers, on Gloo",
}

DELAY_WORKERS, DELAY_SHAPES = 4, {"weight": (1024, 1024), "bias": (1024,)}
"""Workers and parameters for which delays are shown: one bucket of one chunk."""

DIRECTION = "a direction to step in, not the mean: it needs a learning rate of its own"
PARAMETERS = "parameters, after steps that each worker takes with its own gradients"


def method_rows(names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the declared properties of the named methods, or of all, as flat objects."""
    defaults = {name: info.spec for name, info in gw.methods().items()}
    rows = []
    for name in names or list(defaults):
        chosen = gw.method(name)
        info = gw.MethodInfo.of(chosen)
        rows.append({**dataclasses.asdict(info), "collectives": ", ".join(info.collectives), **_delays(chosen)})
        if info.spec != defaults.get(info.name):
            # Both are declared for the default settings only.
            rows[-1] |= {"bits_per_element": None, "state_bytes_per_element": None}
        if info.name not in defaults:
            rows[-1] |= {
                "unbiased": None,
                "bits_per_element": None,
                "state_bytes_per_element": None,
                "bit_stable": None,
            }
    return rows


def _delays(method: gw.Method) -> dict[str, Any]:
    """Return the delays of an exchange; None for a method that chooses among others, or needs to know the cluster."""
    from gradwire.model.exchange_profile import delays_of

    found = delays_of(method, DELAY_SHAPES, DELAY_WORKERS)
    return {"delays": found and found.count, "delay_phases": found and str(found)}


def _count(delays: int | None) -> str:
    return "-" if delays is None else str(delays)


def unbiased_text(row: Mapping[str, Any]) -> str:
    """Return "yes", "no" or the method's note on whether it is unbiased."""
    return row["unbiased_note"] or ("yes" if row["unbiased"] else "no")


def print_methods(rows: Sequence[Mapping[str, Any]], *, in_full: bool = False) -> None:
    """Print all properties of a single method, else one line for each: by family, or ``in_full`` as a table."""
    if len(rows) == 1:
        _print_one(rows[0])
        return
    if not in_full:
        _print_families(rows)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = ("name", "bits/element (4 workers)", "delays", "unbiased", "bit-stable", "state", "summary")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        stable = "yes" if row["bit_stable"] else "no"
        bits = f"{row['bits_per_element']:.3g}"
        delays = _count(row["delays"])
        table.add_row(row["name"], bits, delays, unbiased_text(row), stable, row["state"], row["summary"])
    print_table(table)


def _print_families(rows: Sequence[Mapping[str, Any]]) -> None:
    families: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        families.setdefault(_family(row["spec"]), []).append(row)
    table = Table(*(Column(overflow="fold") for _ in range(4)), box=None, pad_edge=False, show_header=False)
    for family, members in families.items():
        table.add_row(Text(family, style="bold"))
        for row in members:
            bits, delays = f"{row['bits_per_element']:.3g} bits", f"{_count(row['delays'])} delays"
            table.add_row(f"  {row['name']}", bits, delays, row["summary"])
    print_table(table)
    print("Bits are those sent for each element and direction with 4 workers; a float32 all-reduce has 32.")
    print(
        "Delays are the one-way delays of the network for which an exchange of a bucket among 4 workers waits on Gloo."
    )
    print("gradwire methods NAME shows a method in full, gradwire methods --all more of each.")


def _family(spec: str) -> str:
    """Return the name of a method's family: the beginning of its package's docstring."""
    package = type(gw.method(spec)).__module__.rpartition(".")[0]
    return (import_module(package).__doc__ or package).partition(":")[0].rstrip(".\n")


def _outcome(chosen: gw.Method) -> str:
    if chosen.traits.direction:
        return DIRECTION
    return PARAMETERS if chosen.traits.local_steps else "the mean of the gradients, or an estimate of it"


def _print_one(row: Mapping[str, Any]) -> None:
    chosen = gw.method(row["spec"])
    lines = {key.replace("_", " "): value for key, value in row.items() if key != "unbiased_note"}
    if isinstance(chosen, gw.Auto):
        lines = {key: lines[key] for key in ("name", "spec", "summary")}
        lines |= {"candidates": ", ".join(chosen.traits.tries), "turns": chosen.turns, "steps": chosen.steps}
    else:
        lines |= {"unbiased": unbiased_text(row), "bit stable": "yes" if row["bit_stable"] else "no"}
        lines["outcome"] = _outcome(chosen)
    for key, value in lines.items():
        shown = f"{value:.3g}" if isinstance(value, float) else value
        print(f"{key + ':':<18} {'-' if value in (None, '') else shown}")
    if isinstance(chosen, gw.Auto):
        print("It tries the candidates in so many turns of so many steps each, and keeps the fastest.")
        for spec in chosen.traits.tries:
            if (note := note_of(spec)) is not None:
                print(f"{spec}: {note}")
    for key, text in NOTES.items():
        if any(lines.get(name) is not None for name in (key, f"{key} formula")):
            print(f"{key}: {text}")
