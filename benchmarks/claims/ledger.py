"""Measure claims of the ledger again, and keep its rows true. ``claims/README.md`` explains the fields.

python benchmarks/claims/ledger.py list terngrad
python benchmarks/claims/ledger.py run NAME
python benchmarks/claims/ledger.py all --minutes 10
python benchmarks/claims/ledger.py check
python benchmarks/claims/ledger.py record NAME
python benchmarks/claims/ledger.py mark
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.ledger import (
    LEDGER,
    OUTCOMES,
    Claim,
    faults,
    read,
    rewrite,
    section_digest,
    state_of,
    unledgered,
)
from benchmarks.lib.outcomes import alike, outcome
from benchmarks.lib.results import ROOT


def specs(claims: Sequence[Claim]) -> list[str]:
    """Return all specs that rows depend on."""
    return sorted({spec for claim in claims for spec in claim.outcomes})


def run(claim: Claim, folder: str | None = None) -> bool:
    """Run what measures a claim, with ``folder`` in the place of FOLDER, and say how it ended."""
    print(f"{claim.name}: {claim.claim}\n  {claim.verdict}; here: {claim.here or '-'}", flush=True)
    if claim.tests:
        command = shlex.join([sys.executable, "-m", "pytest", "-q", *claim.tests])
    elif claim.command:
        command = claim.command
        if claim.needs:
            print(f"  needs: {', '.join(claim.needs)}", flush=True)
        if "FOLDER" in command and folder is None:
            print(f"  not run: name the folder of its data with --folder, for {command}")
            return False
        command = command.replace("FOLDER", shlex.quote(folder or ""))
    else:
        print(f"  nothing measures it: {claim.why}")
        return True
    start = time.monotonic()
    # As in the index of benchmarks: a line of a shell, in the repository's folder, with this interpreter's programs.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, env={**os.environ, "PATH": path}, check=False)
    ended = "done" if done.returncode == 0 else f"FAILED with {done.returncode}"
    print(f"  {ended} in {time.monotonic() - start:.0f} s")
    return done.returncode == 0


def run_all(claims: Sequence[Claim], minutes: float) -> bool:
    """Run all tests of claims, and each command that takes at most ``minutes`` and needs no data; price the others."""
    tests = sorted({test for claim in claims for test in claim.tests})
    words = [sys.executable, "-m", "pytest", "-q", "-n", "2", *tests]
    right = subprocess.run(words, cwd=ROOT, check=False).returncode == 0
    commands: dict[str, Claim] = {}
    for claim in claims:
        if claim.command:
            commands.setdefault(claim.command, claim)
    for claim in commands.values():
        if (claim.minutes or 0) <= minutes and not claim.needs:
            right = run(claim) and right
    left = [claim for claim in commands.values() if (claim.minutes or 0) > minutes or claim.needs]
    hours = sum(claim.minutes or 0 for claim in left) / 60
    print(f"not run: {len(left)} commands, about {hours:.1f} hours on two cores:")
    for claim in sorted(left, key=lambda claim: claim.minutes or 0):
        needs = f"  needs {', '.join(claim.needs)}" if claim.needs else ""
        print(f"  {claim.minutes:6.0f} min  {claim.name}{needs}")
    return right


def stored() -> dict[str, dict[str, object]]:
    """Return the kept outcomes by spec."""
    return json.loads(OUTCOMES.read_text()) if OUTCOMES.exists() else {}


def update(claims: Sequence[Claim], names: Sequence[str] | None = None) -> list[str]:
    """Compute the outcomes of specs anew, store those that changed, and return their specs.

    Args:
        names: Rows whose specs are computed; None for all rows. What no row depends on is removed.
    """
    before, after = stored(), {}
    wanted = specs(claims if names is None else [claim for claim in claims if claim.name in names])
    for spec in specs(claims):
        if spec in before and spec not in wanted:
            after[spec] = before[spec]
            continue
        found = outcome(spec)
        after[spec] = before[spec] if spec in before and alike(before[spec], found) else found
    changed = [spec for spec in after if after[spec] != before.get(spec)]
    lines = [f" {json.dumps(spec)}: {json.dumps(found)}" for spec, found in after.items()]
    OUTCOMES.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return changed


def record(claims: Sequence[Claim], names: Sequence[str]) -> None:
    """Write date, commit, state and digests of sections into rows that were just measured."""
    update(claims, names)
    commit = subprocess.run(
        ["git", "rev-parse", "--short=7", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for claim in claims:
        if claim.name not in names:
            continue
        sections = [f"{s.partition(' ')[0]} {section_digest(s.partition(' ')[0])}" for s in claim.sections]
        values: dict[str, object] = {"sections": sections} if sections else {}
        if claim.command:
            measured = {"date": datetime.date.today(), "commit": commit.stdout.strip()}
            values |= {**measured, "state": state_of(claim), "old": False}
        rewrite(LEDGER / claim.file, claim.name, values)


def mark(claims: Sequence[Claim]) -> None:
    """Mark every row as old whose dependencies have changed since it was measured."""
    for spec in update(claims):
        print(f"other outcomes: {spec}")
    for claim in claims:
        if claim.command and not claim.old and claim.state != state_of(claim):
            rewrite(LEDGER / claim.file, claim.name, {"old": True})
            print(f"old: {claim.name}")


def check(claims: Sequence[Claim]) -> bool:
    """Print what is wrong with rows, which are older than their code and not marked, and figures that no row names."""
    import gradwire as gw

    wrong = faults(claims, gw.methods())
    wrong += [
        f"{claim.file}: {claim.name}: changed since, and not marked as old"
        for claim in claims
        if claim.command and not claim.old and claim.state != state_of(claim)
    ]
    wrong += [f"{page}: no row names {', '.join(missing)}" for page, missing in unledgered(claims).items()]
    print("\n".join(wrong) or f"{len(claims)} rows, nothing wrong")
    return not wrong


def main() -> int:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["list", "run", "all", "check", "record", "mark"])
    parser.add_argument("names", nargs="*", help="names of rows; for list, parts of names or methods")
    parser.add_argument("--minutes", type=float, default=10.0, help="the most that a command of `all` may take")
    parser.add_argument("--folder", help="what takes the place of FOLDER in a command")
    arguments = parser.parse_args()
    claims, names = read(), arguments.names
    unknown = sorted(set(names) - {claim.name for claim in claims})
    if arguments.what in ("run", "record") and (unknown or not names):
        parser.error(f"no such rows: {', '.join(unknown)}" if unknown else "name a row; `list` shows them")
    if arguments.what == "list":
        for claim in claims:
            if not names or any(name in claim.name or name in claim.methods for name in names):
                print(f"{claim.verdict:12s} {'old ' if claim.old else '    '}{claim.name}: {claim.claim}")
        return 0
    if arguments.what == "run":
        right = [run(claim, arguments.folder) for claim in claims if claim.name in names]
        return int(not all(right))
    if arguments.what == "all":
        return int(not run_all(claims, arguments.minutes))
    if arguments.what == "check":
        return int(not check(claims))
    record(claims, names) if arguments.what == "record" else mark(claims)
    return 0


if __name__ == "__main__":
    sys.exit(main())
