"""Output of the commands: tables and JSON on standard output, errors as one line and an exit code.

It does without torch, which takes seconds to import.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from gradwire.errors import GradwireError, HyperparameterError
from gradwire.tools.experiments.errors import UsageError
from gradwire.tools.report import load_runs, summarize_folders
from gradwire.tools.report.summary import link_texts
from gradwire.tools.report.verdict import bytes_text, percent, rate_text, seconds_text, verdicts

FAILED, USAGE, INTERRUPTED = 1, 2, 130
WIDEST, NARROWEST = 1 << 16, 12
"""Width of a table that need not fit a terminal, and the least width of a column of text in one that does."""


@contextlib.contextmanager
def handled(debug: bool) -> Iterator[None]:
    """Turn gradwire's errors, those of the system and Ctrl-C into one line and an exit code.

    With ``debug`` an error keeps its traceback.
    """
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


def print_summary(runs: Sequence[Path], report: Path, *, as_json: bool) -> None:
    """Print the table of finished runs and the path of their report, and for several runs whether each method paid."""
    loaded = load_runs(runs, lambda sentence: print(f"gradwire: {sentence}", file=sys.stderr))
    if as_json:
        print_json(summarize_folders(runs))
        return
    print_runs(summarize_folders(runs), report)
    if len(loaded) > 1:
        print_verdicts(verdicts(loaded))


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
