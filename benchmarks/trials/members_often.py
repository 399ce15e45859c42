"""Ten thousand faults: many short trials of members at once, each with other draws of the faults.

    python benchmarks/trials/members_often.py --json benchmarks/results/trials/trials_members_often.json

The trials are those of ``membership.py``, on purpose too many for the machine and with faults too dense: a fault each
``--every-s`` seconds comes while members still meet after the last one. What is looked for are rounds after which
replicas' parameters differ, and trainings that stand still. Throughput is not looked at. A training that loses all of
its members at once is over, as the newcomers say: such a trial ends early, and counts as *lost all*.

A run that was ended goes on by the same command, until the sum of faults is reached.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.runs import earlier, write
from benchmarks.trials.churn import KINDS

TRIAL = Path(__file__).with_name("membership.py")

METHODS = (
    "terngrad",
    "PowerSGD(matrix_rank=2)",
    "ErrorFeedback(TopK(density=0.1))",
    "DiLoCo(every=8, inner=EDEN(bits=4))",
)
SLOWER = 3
"""So many times longer are the pauses between the faults of a method with local steps: a newcomer waits for a round."""

KEPT = (
    "method", "seed", "replicas", "every_s", "stop_s", "silence_s", "seconds", "faults",
    *(f"faults_{kind}" for kind in KINDS), "rounds", "rejoined", "rejoin_s_median", "rejoin_s_longest",
    "longest_pause_s", "ended_by_itself", "rounds_lost", "digests_compared", "rounds_compared",
    "rounds_with_differing_digests", "differing_after", "hangs", "load", "halted",
)  # fmt: skip
"""What is kept of the row of a trial."""


def start(given: argparse.Namespace, method: str, seed: int, path: Path) -> subprocess.Popen[bytes]:
    """Start a trial, whose row will be in a file, and whose words beside it."""
    every_s = given.every_s * (SLOWER if method.startswith("DiLoCo") else 1)
    told = {
        "minutes": given.minutes, "every-s": every_s, "quiet-s": 5, "stop-s": given.stop_s,
        "silence-s": given.silence_s, "replicas": given.replicas, "at-once": given.at_once, "seeds": seed,
        "method": method, "json": path,
    }  # fmt: skip
    command = [
        sys.executable,
        str(TRIAL),
        "--log",
        *(part for name, x in told.items() for part in (f"--{name}", str(x))),
    ]
    with path.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def summed(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums over trials."""
    names = ["faults", *(f"faults_{kind}" for kind in KINDS), "rounds", "rejoined", "ended_by_itself"]
    names += ["digests_compared", "rounds_compared", "rounds_with_differing_digests", "hangs"]
    sums: Counter[str] = Counter()
    for row in rows:
        sums.update({name: row[name] for name in names})
    return {"trials": len(rows), **sums, "lost_all": sum(bool(row["halted"]) for row in rows)}


def main() -> int:
    """Try until there were enough faults; exit with 1 where digests differ, a training hung or a trial failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=10_000, help="in sum, with those of rows that are there")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=6.0, help="of each trial")
    parser.add_argument("--until", type=float, default=float("inf"), help="begin no trial after so many minutes")
    parser.add_argument("--replicas", type=int, default=6)
    parser.add_argument("--every-s", type=float, default=3.0, help="seconds between two faults")
    parser.add_argument("--stop-s", type=float, default=5.0)
    parser.add_argument("--silence-s", type=float, default=2.0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows, began_s = earlier(given.json, "rows"), time.monotonic()
    tried = {(row["method"], row["seed"]) for row in rows}
    draws = ((m, seed) for seed in itertools.count() for m in METHODS if (m, seed) not in tried)
    failed = 0
    while sum(row["faults"] for row in rows) < given.faults and time.monotonic() - began_s < 60 * given.until:
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder) / f"{number}.json" for number in range(given.at_once)]
            running = [start(given, *next(draws), path) for path in paths]
            for trial, path in zip(running, paths):
                trial.wait()
                if not path.exists():
                    sys.stderr.write(path.with_suffix(".log").read_text(errors="replace")[-4000:])
                    print(f"a trial ended with {trial.returncode} and without a row", flush=True)
                    failed += 1
                    continue
                (row,) = json.loads(path.read_text())["rows"]
                rows.append({name: row[name] for name in KEPT})
                if any(row[name] for name in ("hangs", "rounds_with_differing_digests", "halted", "ended_by_itself")):
                    kept = Path(tempfile.mkdtemp(prefix="members_often_")) / "log"
                    shutil.copy(path.with_suffix(".log"), kept)
                    print(f"{rows[-1]}: what it said is in {kept}", flush=True)
        write(given.json, sum=summed(rows), rows=rows)
        print(summed(rows), flush=True)
        if failed >= given.at_once:
            break
    return int(failed > 0 or any(row["rounds_with_differing_digests"] or row["hangs"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
