"""What becomes of exchanges in which one message of one rank changes on the way: counts of outcomes, no times.

    python benchmarks/corruption.py --exchanges 30000 --json benchmarks/results/corruption.json

Three simulated ranks exchange by each of the tests' methods and each of its protocols (``tests/cases.py``). In round 2
one message to one rank changes (``tests/corruptions.py``): bits flip, bytes or blocks change places, the tail is lost,
an earlier message comes again, two ranks' messages are exchanged. What reaches a rank by a sum of the backend is not
tried: there is no payload (``fp32``, ``fp16``, ``bf16``). Nor are maxima of scales, which the driver of real ranks
seals (``tests/drivers/test_corruption.py``).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import gradwire as gw  # noqa: E402
from cases import ALL  # noqa: E402
from corruptions import CHANGES, OUTCOMES, Trials  # noqa: E402


def count(exchanges: int) -> list[dict[str, Any]]:
    """Spread so many exchanges evenly over methods, protocols and kinds of change; return a row for each of these."""
    chosen = [(method, name) for method in ALL for name in method.collectives if name != "all_reduce"]
    each = -(-exchanges // (len(chosen) * len(CHANGES)))
    rows = []
    for method, name in chosen:
        trials = Trials(method, name)
        for number, kind in enumerate(CHANGES):
            outcomes = Counter(trials.one(kind, 1_000_000 * number + draw) for draw in range(each))
            unchanged = outcomes.pop(None, 0)
            if outcomes:
                counts = {outcome: outcomes[outcome] for outcome in OUTCOMES}
                rows.append({"method": repr(method), "collective": name, "change": kind, **counts, "same": unchanged})
    return rows


def added_up(rows: list[dict[str, Any]], by: tuple[str, ...]) -> list[dict[str, Any]]:
    """Add the counts of rows that agree in some columns."""
    found: dict[tuple[str, ...], Counter[str]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in by), Counter()).update({name: row[name] for name in OUTCOMES})
    return [{**dict(zip(by, key)), **{name: counts[name] for name in OUTCOMES}} for key, counts in found.items()]


def main() -> int:
    """Count and print; exit with 1 where a change was not refused by name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exchanges", type=int, default=30_000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = count(arguments.exchanges)
    total = Counter({outcome: sum(row[outcome] for row in rows) for outcome in OUTCOMES})
    by_change = added_up(rows, ("change",))
    for row in by_change:
        print(f"{row['change']:28s}", *(f"{name}: {row[name]}" for name in OUTCOMES if row[name]), sep="  ")
    print(f"{sum(total.values())} exchanges in which a byte changed:", dict(total))
    if arguments.json:
        found = {"gradwire": gw.__version__, "exchanges": sum(total.values()), "outcomes": dict(total)}
        found |= {"by_change": by_change, "by_method": added_up(rows, ("method", "collective"))}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(total["refused, named"] != sum(total.values()))


if __name__ == "__main__":
    sys.exit(main())
