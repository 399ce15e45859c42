"""What the commands print at their end: tables, JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gradwire.tools.report.link_notes import link_texts
from gradwire.tools.report.verdict import bytes_text, percent, rate_text, seconds_text

__all__ = [
    "print_json",
    "print_plan",
    "print_runs",
    "print_steps",
    "print_table",
    "print_timeline",
    "print_verdicts",
]


def print_json(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a list of flat objects on standard output."""
    print(json.dumps([dict(row) for row in rows], indent=2))


def print_table(table: Table) -> None:
    """Print a table, on a terminal as wide as that."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    console.print(table)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=not number)
    return table


def print_runs(rows: Sequence[Mapping[str, Any]], report: Path | None) -> None:
    """Print one line a run, what "auto" took, and where the report is."""
    table = _table("method", "accuracy", "loss", "time/step", "training", "sent", "factor", "bits/element")
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
    """Print for each method whether it paid."""
    for label, text in verdicts:
        print(f"\n{label}: {text}")
    sys.stdout.flush()


def print_steps(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print one line a measured step."""
    table = _table(
        "model", "hosts", "link", "compute", "exchange", "step", "20-80 %", "of floor", "sent", "over DDP fp32"
    )
    for row in rows:
        sent, speedup = row["sent_bytes_per_step"], row["speedup_over_ddp_fp32"]
        table.add_row(
            row["model"],
            str(row["hosts"]),
            row["lab"].partition(",")[2].replace("bandwidth=", ""),
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
    """Print one line a rank and step: the parts of the step, and where the link was idle."""
    table = _table(
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
    """Print one line a predicted step."""
    table = _table("workers", "link", "method", "step", "80 %", "floor", "speed-up", "sent", "bounded by", "", "")
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
            row["bottleneck"],
            "~" if row["extrapolated"] else "",
            "<- recommended" if row["recommended"] else "",
        )
    print_table(table)
    if any(row["exchange_every"] > 1 for row in rows):
        print("steps and bytes of methods that exchange in one of several steps are means over these")
    for why in dict.fromkeys(row["extrapolated"] for row in rows if row["extrapolated"]):
        print(f"~ extrapolated, the interval may not hold: {why}")
