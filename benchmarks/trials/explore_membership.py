"""Exhaustive exploration of the protocol of a membership: all orders of its steps, and a fault at each of them.

    python benchmarks/trials/explore_membership.py --json benchmarks/results/trials/explored_membership.json

Explores the cases that the tests explore, and larger ones, one after the other on one core. For each case it records
the number of states, the seconds of the processor, and how often the members of a history ended in which ways. What
breaks a promise of the protocol is told with the shortest way to it; the program goes on, and fails in the end.

A worker ends as one of these: "done" took all rounds; "left" left by its own word; "parted" ended its program between
two rounds; "crash" ended without a word; "out" was left out, and did not come again; "waits" waits to be taken in by
members that have all ended.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.membership_cases import LARGE, QUORUM, SMALL
from benchmarks.lib.membership_explorer import Explorer
from benchmarks.lib.membership_states import Wrong
from benchmarks.lib.membership_workers import Case
from benchmarks.lib.runs import write

CASES = {**SMALL, **{f"with a quorum: {name}": case for name, case in QUORUM.items()}, **LARGE}


def explore(name: str, case: Case) -> dict[str, Any]:
    """Explore a case, and return what was found."""
    began_s, explorer, wrong = time.process_time(), Explorer(case), ""
    try:
        explorer.explore()
    except Wrong as error:
        wrong = str(error)
    found = explorer.found
    cpu_s = time.process_time() - began_s
    ends = {" / ".join(end or "waits" for end in ends): n for ends, n in sorted(found.ends.items(), key=str)}
    faulted = {fault: sorted(steps) for fault, steps in found.faulted.items()}
    print(f"{name}: {found.states} states, {cpu_s:.1f} s", *wrong.split("\n")[:1], flush=True)
    told = {"states": found.states, "cpu_s": round(cpu_s, 1), "wrong": wrong.split("\n") if wrong else []}
    return {"case": name, **asdict(case), **told, "ends": ends, "faulted_at": faulted, "steps": sorted(found.steps)}


def main() -> int:
    """Explore all cases, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORDS", help="cases whose names have these words in them")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, case in CASES.items():
        if arguments.only in name:
            rows.append(explore(name, case))
            write(arguments.json, cases=rows)
    wrong = [row["case"] for row in rows if row["wrong"]]
    print(f"{len(rows)} cases, {sum(row['states'] for row in rows)} states; wrong: {wrong}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
