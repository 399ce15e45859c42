"""What the commands print: live progress, tables, JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from gradwire.experiments.config import RunConfig
from gradwire.report.link_notes import link_texts
from gradwire.report.verdict import bytes_text, percent, rate_text, seconds_text

__all__ = [
    "Progressing",
    "print_json",
    "print_plan",
    "print_runs",
    "print_steps",
    "print_table",
    "print_verdicts",
]

PLAIN_LINE_EVERY_S = 5.0


class Progressing:
    """Draws a run's progress on standard error: a live line on a terminal, now and then a plain one elsewhere."""

    def __init__(self, debug: bool = False) -> None:
        self.console = Console(stderr=True, highlight=False)
        self.debug = debug
        self.progress: Progress | None = None
        self.task: TaskID | None = None
        self.accuracy: float | None = None
        self.last: Mapping[str, Any] = {}
        self.title, self.steps, self.printed_s = "", 0, 0.0

    def __enter__(self) -> Progressing:
        """Begin."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the terminal as it was."""
        self._finish()

    def say(self, sentence: str) -> None:
        """Print a sentence."""
        (self.progress.console if self.progress else self.console).print(sentence, markup=False)

    def start(self, plan: RunConfig) -> None:
        """Begin a run's line."""
        self._finish()
        kind = "simulated workers" if plan.simulate else "workers"
        self.title, self.steps, self.accuracy = plan.method, plan.task.steps, None
        place = f" on {plan.lab}" if plan.lab else ""
        self.say(f"{plan.task.name}: {plan.method}, {plan.workers} {kind}{place}, {plan.task.steps} steps")
        if self.console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=12),
                MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=9)),
            )
            self.progress = Progress(
                *columns,
                TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=7)),
                TextColumn("{task.fields[now]}"),
                console=self.console,
            )
            self.task = self.progress.add_task(plan.method[:14], total=self.steps, now="starting workers")
            self.progress.start()

    def row(self, row: Mapping[str, Any]) -> None:
        """Show a row of metrics."""
        self.last = row
        if row["event"] == "eval":
            self.accuracy = row["accuracy"]
        if self.progress and self.task is not None:
            self.progress.update(self.task, completed=row["step"], now=self._now(row))
            return
        due = row["step"] == self.steps or time.monotonic() - self.printed_s > PLAIN_LINE_EVERY_S
        if due and row["event"] == "eval":
            self.printed_s = time.monotonic()
            self.say(f"  step {row['step']}/{self.steps}  {self._now(row)}")

    def logs(self, logs: Mapping[int, str]) -> None:
        """Show what the workers of a failed run wrote."""
        if self.debug:
            for rank, text in logs.items():
                self.say(f"--- worker {rank}\n{text.rstrip()}")

    def _now(self, row: Mapping[str, Any]) -> str:
        parts = [f"loss {row['loss']:.3f}"]
        if self.accuracy is not None:
            parts.append(f"acc. {percent(self.accuracy)}")
        if row["step_time_s"]:
            parts.append(f"{seconds_text(row['step_time_s'])}/step")
        if row["bits_per_element"]:
            factor = 32.0 / row["bits_per_element"]
            parts.append(f"{row['bits_per_element']:.2f} bits (x{factor:.1f} less)")
        return ", ".join(parts)

    def _finish(self) -> None:
        if self.progress:
            self.progress.stop()
            if self.last:
                self.progress.console.print(f"  {self._now(self.last)}", markup=False)
        self.progress, self.last = None, {}


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
    for why in dict.fromkeys(row["extrapolated"] for row in rows if row["extrapolated"]):
        print(f"~ extrapolated, the interval may not hold: {why}")
