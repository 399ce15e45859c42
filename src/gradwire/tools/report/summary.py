"""One flat line of numbers a run: the table of the page and of the command line, and its ``--json`` form."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.tools.report.link_notes import fallback_reason
from gradwire.tools.report.load import Run, load_runs

__all__ = ["RunSummary", "first_reaching", "summarize", "summarize_folders"]


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Numbers of one run. Bytes are rank 0's; times leave out evaluation, checkpoints and start-up.

    ``final_*`` is the last evaluation, ``best_*`` the best; both None for a run that ended before its first.
    ``chosen_method`` is what ``auto`` took, ``choice_reason`` why: both None where there was nothing to choose, the
    method alone where the trial did not end. ``fallback_method`` is what ranks returned to, ``fallback_reason`` since
    when and why: both None where they did not.
    """

    run: str
    label: str
    task: str
    method: str
    workers: int
    simulated: bool
    seed: int
    steps: int
    final_loss: float | None
    final_accuracy: float | None
    best_accuracy: float | None
    best_accuracy_step: int | None
    step_time_s: float | None
    step_time_p20_s: float | None
    step_time_p80_s: float | None
    elapsed_s: float
    sent_bytes: int
    received_bytes: int
    dense_bytes: int
    compression_factor: float | None
    bits_per_element: float | None
    chosen_method: str | None
    choice_reason: str | None
    fallback_method: str | None
    fallback_reason: str | None

    def flat(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return dataclasses.asdict(self)


def quantile(values: list[float], share: float) -> float:
    """Return a quantile by linear interpolation; ``values`` must not be empty."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def summarize(run: Run) -> RunSummary:
    """Compute a run's numbers."""
    evaluations, last = run.of("eval"), run.rows[-1]
    best = max(evaluations, key=lambda row: row["accuracy"], default=None)
    times_s = [row["step_time_s"] for row in run.of("train")]
    sent, dense = last["sent_bytes"], last["dense_bytes"]
    link = run.config.get("link") or {}
    choice, returned = link.get("choice") or {}, link.get("fallback")
    return RunSummary(
        run=str(run.path),
        label=run.label,
        task=run.config["task"],
        method=run.config["method"],
        workers=run.config["world_size"],
        simulated=run.config["simulated"],
        seed=run.config["seed"],
        steps=last["step"],
        final_loss=evaluations[-1]["loss"] if evaluations else None,
        final_accuracy=evaluations[-1]["accuracy"] if evaluations else None,
        best_accuracy=best["accuracy"] if best else None,
        best_accuracy_step=best["step"] if best else None,
        step_time_s=statistics.median(times_s) if times_s else None,
        step_time_p20_s=quantile(times_s, 0.2) if times_s else None,
        step_time_p80_s=quantile(times_s, 0.8) if times_s else None,
        elapsed_s=last["elapsed_s"],
        sent_bytes=sent,
        received_bytes=last["received_bytes"],
        dense_bytes=dense,
        compression_factor=dense / sent if sent else None,
        bits_per_element=32.0 * sent / dense if dense else None,
        chosen_method=choice.get("chosen"),
        choice_reason=choice.get("reason"),
        fallback_method=returned["method"] if returned else None,
        fallback_reason=fallback_reason(returned) if returned else None,
    )


def summarize_folders(folders: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the flat numbers of each run in ``folders``; raises ReportError."""
    return [summarize(run).flat() for run in load_runs(folders)]


def first_reaching(run: Run, accuracy: float) -> dict[str, Any] | None:
    """Return the first evaluation at which a run had at least this accuracy, or None."""
    return next((row for row in run.of("eval") if row["accuracy"] >= accuracy), None)
