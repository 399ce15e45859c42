"""``python -m gradwire.tools.cli.launcher FLAGS``: torchrun, whose failures and interruptions are told in one line.

``gradwire run`` becomes this process. Its workers (:mod:`gradwire.tools.cli.bootstrap`) leave a report in a folder
whose name they find in ``GRADWIRE_REPORTS``; what torchrun knows (a signal, an exit code) and what the reports say
become one sentence that names the rank.
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
from typing import Any, NoReturn

REPORTS = "GRADWIRE_REPORTS"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a worker says of its end.

    Attributes:
        round: The last that a link began; None without a link.
        kind, message: Of the script's exception; None where torchrun ended the worker.
        link: The link's own error, in full.
        remote: Whether that error began on another rank.
    """

    rank: int
    round: int | None = None
    kind: str | None = None
    message: str | None = None
    link: str | None = None
    remote: bool = False

    def save(self) -> None:
        """Leave the report, where somebody wants it."""
        folder = os.environ.get(REPORTS)
        if folder:
            with contextlib.suppress(OSError):
                (Path(folder) / f"{self.rank}.json").write_text(json.dumps(asdict(self)))


def read_reports(folder: Path) -> dict[int, Report]:
    """Read what the workers left; a report that was cut off does not count."""
    found = {}
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            report = Report(**json.loads(path.read_text()))
            found[report.rank] = report
    return found


def account(exit_codes: Mapping[int, int], reports: Mapping[int, Report]) -> str:
    """Describe which rank failed, where and why: the account that tells most.

    Args:
        exit_codes: Of the ranks that torchrun found failed, negative for a signal.
        reports: Of all ranks that left one.
    """
    remote = [r.link for _, r in sorted(reports.items()) if r.link and r.remote]
    told: list[tuple[int, int, str]] = []
    for rank, code in exit_codes.items():
        report = reports.get(rank)
        if code < 0:
            name = signal.Signals(-code).name
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            told.append((0, rank, f"rank {rank} was killed by {name}{hint}{_beside(remote, rank, reports)}"))
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
    """Run torchrun, and leave with its exit code, or 130 where the user interrupted it."""
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

    # What it says here of signals and exit codes, the one line says better.
    for name in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").addFilter(_of_an_end)
    try:
        torchrun.main(list(words))
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            _interrupted()
        print(f"gradwire: ended by {signal.Signals(error.sigval).name}; all workers are ended", file=sys.stderr)
        sys.exit(128 + error.sigval)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        print(f"gradwire: {account(codes, read_reports(folder))}", file=sys.stderr, flush=True)
        sys.exit(1)


def _of_an_end(record: Any) -> bool:
    text = str(record.msg)
    return not ("closing signal" in text or "death signal" in text or text.startswith("failed (exitcode"))


def _interrupted() -> NoReturn:
    print("gradwire: interrupted; all workers are ended", file=sys.stderr, flush=True)
    sys.exit(130)


if __name__ == "__main__":
    main()
