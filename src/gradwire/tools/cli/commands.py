"""What ``train``, ``compare`` and ``report`` do once their options are read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gradwire.tools.cli.expected import expected
from gradwire.tools.cli.progress import Progressing
from gradwire.tools.cli.show import print_json, print_runs, print_verdicts
from gradwire.tools.experiments import run
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.report import load_runs, summarize_folders, write_report
from gradwire.tools.report.verdict import verdicts

__all__ = ["compare", "report", "resume", "train"]


def train(
    plan: RunConfig, out: Path | None, *, overwrite: bool, stop_after: int | None, as_json: bool, debug: bool
) -> None:
    """Train, then print the run's line."""
    with Progressing(debug) as progress:
        folder = run.train(plan, progress, folder=out, overwrite=overwrite, stop_after=stop_after)
    if run.speaks():
        _print([folder], folder / "report.html", as_json=as_json)


def resume(folder: Path, *, stop_after: int | None, as_json: bool, debug: bool) -> None:
    """Continue a run, then print its line."""
    with Progressing(debug) as progress:
        run.resume(folder, progress, stop_after=stop_after)
    _print([folder], folder / "report.html", as_json=as_json)


def compare(
    plan: RunConfig, methods: Sequence[str], out: Path | None, *, overwrite: bool, as_json: bool, debug: bool
) -> None:
    """Train once a method, then print the table and whether each method paid."""
    with Progressing(debug) as progress:
        top, runs = run.compare(plan, methods, progress, folder=out, overwrite=overwrite)
    _print(runs, top / "report.html", as_json=as_json)
    lines = [] if as_json else expected(plan, methods)
    print("".join(f"\n{line}" for line in lines), end="\n" if lines else "")


def report(runs: Sequence[Path], out: Path, *, as_json: bool) -> None:
    """Write the page, then print the table it holds."""
    write_report(runs, out)
    _print(runs, out, as_json=as_json)


def _print(runs: Sequence[Path], page: Path, *, as_json: bool) -> None:
    if as_json:
        print_json(summarize_folders(runs))
        return
    loaded = load_runs(runs)
    print_runs(summarize_folders(runs), page)
    if len(loaded) > 1:
        print_verdicts(verdicts(loaded))
