"""Run torchrun, and describe a failure or an interruption in one line.

``gradwire run`` replaces itself by ``python -m gradwire.tools.cli.launcher FLAGS``. The workers
(:mod:`gradwire.tools.cli.bootstrap`) save reports in the folder that ``GRADWIRE_REPORTS`` names. The line names the
rank that failed and why, from torchrun's signals and exit codes and from the reports.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from gradwire.tools.processes import killed_by

REPORTS = "GRADWIRE_REPORTS"


@dataclass(frozen=True, kw_only=True)
class Report:
    """How a worker ended, in its own words.

    Attributes:
        round: The last round that a link began; None without a link.
        kind, message: Type and text of the script's exception; None if torchrun ended the worker.
        link: The full text of the link's own error.
        remote: Whether that error began on another rank.
    """

    rank: int
    round: int | None = None
    kind: str | None = None
    message: str | None = None
    link: str | None = None
    remote: bool = False

    def save(self) -> None:
        """Write the report to the launcher's folder, if there is one."""
        folder = os.environ.get(REPORTS)
        if folder:
            with contextlib.suppress(OSError):
                (Path(folder) / f"{self.rank}.json").write_text(json.dumps(asdict(self)))


def read_reports(folder: Path) -> dict[int, Report]:
    """Read the workers' reports by rank; a truncated one is left out."""
    found = {}
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            report = Report(**json.loads(path.read_text()))
            found[report.rank] = report
    return found


def account(exit_codes: Mapping[int, int], reports: Mapping[int, Report]) -> str:
    """Describe in one line which rank failed, where and why, from the most informative source.

    Args:
        exit_codes: Exit codes of the ranks that failed, as torchrun gives them; negative for a signal.
        reports: The workers' own reports, by rank.
    """
    remote = [r.link for _, r in sorted(reports.items()) if r.link and r.remote]
    told: list[tuple[int, int, str]] = []
    for rank, code in exit_codes.items():
        report = reports.get(rank)
        if code < 0:
            told.append((0, rank, f"rank {rank} {killed_by(code)}{_beside(remote, rank, reports)}"))
        elif report is None:
            told.append((3, rank, f"rank {rank} ended with code {code}"))
        elif report.link and report.remote:
            told.append((4, rank, report.link))
        else:
            told.append((2, rank, _own(report)))
    for rank, report in reports.items():
        if rank not in exit_codes and report.kind and not report.remote:
            told.append((2, rank, _own(report)))
    return " ".join(min(told)[2].split()) if told else "a worker failed without a word"


def _own(report: Report) -> str:
    if report.link:
        return report.link
    where = "" if report.round is None else f" in round {report.round}"
    return f"rank {report.rank} failed{where}: {report.kind}: {report.message}"


def _beside(remote: Sequence[str], rank: int, reports: Mapping[int, Report]) -> str:
    if remote:
        return f"; {remote[0]}"
    rounds = [r.round for other, r in reports.items() if other != rank and r.round is not None]
    return f"; the others were in round {max(rounds)}" if rounds else ""


def main() -> NoReturn:
    """Run torchrun, and exit with its code, or with 130 if the user interrupted it."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.environ[REPORTS] = folder
            _launch(sys.argv[1:], Path(folder))
    except KeyboardInterrupt:
        _interrupted()
    sys.exit(0)


def _launch(words: Sequence[str], folder: Path) -> None:
    import torch.distributed.run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # The one line says better what torchrun logs about signals and exit codes.
    heard = Torchrun()
    for name in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").addFilter(heard)
    try:
        torchrun.main(list(words))
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            _interrupted()
        print(f"gradwire: ended by {signal.Signals(error.sigval).name}; all workers are ended", file=sys.stderr)
        sys.exit(128 + error.sigval)
    except ChildFailedError as error:
        failures = error.failures.items()
        codes = {rank: failure.exitcode for rank, failure in failures if failure.pid not in heard.killed}
        print(f"gradwire: {account(codes, read_reports(folder))}", file=sys.stderr, flush=True)
        sys.exit(1)


class Torchrun(logging.Filter):
    """Filter that leaves out what torchrun logs about signals and exit codes.

    Attributes:
        killed: Process ids that torchrun killed because they had not ended 30 s after another worker had failed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.killed: set[int] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        text = str(record.msg)
        if "forcefully exiting" in text and isinstance(record.args, tuple) and record.args:
            self.killed.add(int(str(record.args[0])))
        return not ("closing signal" in text or "death signal" in text or text.startswith("failed (exitcode"))


def _interrupted() -> NoReturn:
    print("gradwire: interrupted; all workers are ended", file=sys.stderr, flush=True)
    sys.exit(130)


if __name__ == "__main__":
    main()
