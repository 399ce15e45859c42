"""Put known faults into a copy of the package, one at a time, and check that the tests notice each of them.

Run as a program (``make mutants``), this applies every fault of ``faults/*.toml`` to a copy of the package, runs the
tests that the fault names, and prints a table of faults that were caught and that survived. The working tree is never
changed. A fault is a table ``[[fault]]`` with these keys:

==========  ============================================================================================================
``name``    unique; ``--only`` selects by a part of it, or of the path of its file
``where``   the definition to change: ``function``, ``Class``, ``Class.method``, ``function.inner``, a ``CONSTANT`` of a
            module, or ``<module>`` for the statements outside of these
``path``    only if several files define that name: the one that is meant, or a folder in which no other one does
``old``     the text to replace, which occurs exactly once in the definition: an expression, an argument or a statement,
            as short as is unique
``new``     the text in its place
``tests``   node ids of the tests that must fail, the fastest first
``means``   what would be wrong, in one line
``spared``  optional: the reason why no test can catch this fault; it counts as one that survived
==========  ============================================================================================================

The file is looked up by the definition, so a fault stays valid when its definition moves to another file. ``old`` is
compared token by token (``anchors.py``): comments and line breaks may differ. A nested function or class is a
definition of its own and not searched with the one around it. A fault in a file that is not Python has the ``path``
of the file and no ``where``, and its ``old`` is compared character by character.

The outcome of a fault is kept as long as neither the package nor the tests change, nor the benchmarks that some
import, so that a run that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import json
import multiprocessing
import os
import queue
import re
import shutil
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anchors import Sources, StaleError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGE = ROOT / "src" / "gradwire"
LIST = HERE / "faults"

CAUGHT, SURVIVED, STALE, BROKEN, SPARED = "caught", "survived", "stale", "broken", "spared"
SHARE = 0.9
"""Of all faults, those that must be caught at least."""
WRITTEN = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
TEST_S, FAULT_S, ALL_S = 300, 400, 1800
"""Seconds for one test, for those of a fault, and for those of all: a fault may make them wait forever."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One change of one definition, and the tests that must fail under it."""

    name: str
    where: str | None = None
    path: str | None = None
    old: str
    new: str
    tests: tuple[str, ...]
    means: str
    spared: str | None = None

    @property
    def layer(self) -> str:
        """The part of the package that the path begins with."""
        return (self.path or "nowhere").partition("/")[0].removesuffix(".py")

    def changed(self, sources: Sources) -> tuple[str, str]:
        """Return the file and its text under the fault; raises StaleError where the fault cannot be applied."""
        if self.where is not None:
            file = sources.home(self.where, self.path)
            return file, sources.changed(file, self.where, self.old, self.new)
        if self.path is None or self.path.endswith(".py"):
            raise StaleError("'where' has to name a definition")
        file = sources.package / self.path
        if not file.is_file():
            raise StaleError(f"there is no file {self.path}")
        text = file.read_text()
        if (count := text.count(self.old)) != 1:
            raise StaleError(f"its 'old' occurs {count} times in {self.path}, not once")
        if self.old == self.new:
            raise StaleError("it changes nothing")
        return self.path, text.replace(self.old, self.new)

    def problem(self, sources: Sources) -> str | None:
        """Explain why the fault cannot be applied to a package; None where it can."""
        try:
            self.changed(sources)
        except StaleError as error:
            return str(error)
        return None

    def missing_tests(self, root: Path) -> list[str]:
        """Return the named tests that no file defines."""
        return [test for test in self.tests if not _defined(root, test)]


@functools.cache
def sources_of(package: Path) -> Sources:
    """Read the definitions of a package, once a process."""
    return Sources(package)


def located(faults: Iterable[Fault], sources: Sources) -> list[Fault]:
    """Return faults with the paths of the files that they change, as far as these can be told."""
    found = []
    for fault in faults:
        with contextlib.suppress(StaleError):
            if fault.where is not None:
                fault = dataclasses.replace(fault, path=sources.home(fault.where, fault.path))
        found.append(fault)
    return found


def _defined(root: Path, test: str) -> bool:
    path, _, name = test.partition("::")
    if not (root / path).is_file():
        return False
    function = re.escape(name.partition("[")[0])
    return not name or re.search(rf"^def {function}\(", (root / path).read_text(), re.MULTILINE) is not None


def read_list(path: Path) -> list[Fault]:
    """Read one list; raises ValueError for a key that is unknown or missing."""
    faults = []
    for record in tomllib.loads(path.read_text())["fault"]:
        try:
            faults.append(Fault(**{**record, "tests": tuple(record["tests"])}))
        except (TypeError, KeyError) as error:
            raise ValueError(f"{path.name}: {record.get('name', record)}: {error}") from error
    return faults


def read_faults(folder: Path = LIST) -> list[Fault]:
    """Read all lists of a folder; raises ValueError for a name that is used twice or a key that is unknown."""
    faults = [fault for path in sorted(folder.glob("*.toml")) for fault in read_list(path)]
    twice = [name for name, count in collections.Counter(fault.name for fault in faults).items() if count > 1]
    if twice:
        raise ValueError(f"names that are used twice: {', '.join(twice)}")
    return faults


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a fault."""

    status: str
    seconds: float
    detail: str = ""


CONTEXT = multiprocessing.get_context("forkserver")
"""Each run of pytest begins as a copy of one process, which may have imported what takes long, but not the package."""
PRELOADED = ["pytest", "hypothesis", "torch", "torch.distributed", "sklearn.datasets", "matplotlib"]


def run_pytest(command: Sequence[str], variables: dict[str, str], root: Path, log: Path) -> None:
    """Be a process that runs pytest, as a shell would start it."""
    os.setsid()
    for descriptor, target in ((0, os.open(os.devnull, os.O_RDONLY)), (1, os.open(log, WRITTEN)), (2, 1)):
        os.dup2(target, descriptor)
    os.chdir(root)
    os.environ.update(variables)
    sys.path[:] = [*variables["PYTHONPATH"].split(os.pathsep), *(path for path in sys.path if path != str(HERE))]
    # What multiprocessing starts would import this program anew, which needs what is no longer on the path.
    sys.modules["__main__"] = types.ModuleType("__main__")
    import pytest

    sys.stdout.flush()
    code = int(pytest.main(list(command)))
    sys.stdout.flush()
    os._exit(code)


class Slot:
    """A copy of the package, with compiled kernels of its own, in which one fault at a time is tried."""

    def __init__(self, root: Path, package: Path, folder: Path) -> None:
        self.root, self.package, self.folder = root, package, folder
        self.copy = folder / "src" / package.name
        self.refresh()

    def refresh(self) -> None:
        """Make the copy what the package is; files keep their times, so that what was compiled of them stays valid."""
        shutil.copytree(self.package, self.copy, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        for path in self.copy.rglob("*"):
            if path.is_file() and path.suffix != ".pyc" and not (self.package / path.relative_to(self.copy)).exists():
                path.unlink()
        self.sources = Sources(self.copy)

    def run(
        self, tests: Sequence[str], *words: str, compiled: Path | None = None, limit_s: float = FAULT_S
    ) -> tuple[int, str]:
        """Run tests on the copy; return pytest's exit code, or 124 where they took too long, and what it printed."""
        command = ["-q", "-p", "no:cacheprovider", f"--timeout={TEST_S}", *words, *tests]
        paths = os.pathsep.join([str(self.copy.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        variables = {"PYTHONPATH": paths, "NUMBA_CACHE_DIR": str(compiled or self.folder / "numba")}
        log = self.folder / "log.txt"
        process = CONTEXT.Process(target=run_pytest, args=(command, variables, self.root, log))
        process.start()
        process.join(limit_s)
        late = process.is_alive()
        if process.pid:
            # With whatever a fault made the tests leave behind.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.join()
        return 124 if late else process.exitcode or 0, log.read_text(errors="replace")

    def try_fault(self, fault: Fault) -> Outcome:
        """Apply a fault, run its tests, and take it back."""
        began_s = time.monotonic()
        try:
            file, text = fault.changed(self.sources)
        except StaleError as error:
            return Outcome(status=STALE, seconds=0.0, detail=str(error))
        if missing := fault.missing_tests(self.root):
            return Outcome(status=STALE, seconds=0.0, detail=f"no such test: {', '.join(missing)}")
        path = self.copy / file
        whole, times = path.read_bytes(), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
        _rewrite(path, text.encode())
        # Numba looks at a kernel's own file only, so compiled code of its callers would hide the fault.
        compiled = self.folder / "numba-of-a-fault" if file.startswith("kernels/") else None
        try:
            code, told = self.run(fault.tests, "-x", compiled=compiled)
        finally:
            _rewrite(path, whole)
            os.utime(path, ns=times)
            if compiled:
                shutil.rmtree(compiled, ignore_errors=True)
        seconds = time.monotonic() - began_s
        if code == 1 and "from pytest-timeout" in told:
            # As likely a busy machine as the fault.
            code = 124
        if code == 1:
            return Outcome(status=CAUGHT, seconds=seconds, detail=_first_failure(told))
        if code == 0:
            return Outcome(status=SPARED if fault.spared else SURVIVED, seconds=seconds, detail=fault.spared or "")
        reason = "the tests took too long" if code == 124 else f"pytest ended with code {code}"
        return Outcome(status=BROKEN, seconds=seconds, detail=f"{reason}: {' '.join(told.split())[-300:]}")

    def passing(self, tests: Sequence[str]) -> dict[str, str]:
        """Run tests on the package as it is; return those that do not pass, with the reason."""
        _, told = self.run(tests, "-rA", limit_s=ALL_S)
        passed = re.findall(r"^PASSED (\S.*)$", told, re.MULTILINE)
        failed = re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", told, re.MULTILINE)
        wrong = {}
        for test in tests:
            if any(_belongs(one, test) for one in failed):
                wrong[test] = "it fails"
            elif not any(_belongs(one, test) for one in passed):
                wrong[test] = "it did not run"
        return wrong


def _rewrite(path: Path, content: bytes) -> None:
    """Write a module; Python would take its bytecode for a change of the same size within the same second."""
    path.write_bytes(content)
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def _belongs(node: str, test: str) -> bool:
    return node == test or node.startswith((f"{test}[", f"{test}::"))


def _first_failure(told: str) -> str:
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", told, re.MULTILINE)
    return found.group(1) if found else ""


def digest(*folders: Path) -> str:
    """Compute a digest of all files that an outcome depends on."""
    found = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            # The folder itself may lie in one that is called as the lists are.
            inside = path.relative_to(folder)
            if path.is_file() and not {"__pycache__", LIST.name} & set(inside.parts):
                found.update(str(inside).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


class Store:
    """Outcomes on disk, by the fault, as long as what they were tried on (a digest) stays as it is."""

    def __init__(self, path: Path, tried_on: str) -> None:
        self.path, self.tried_on, self._lock = path, tried_on, threading.Lock()
        try:
            record = json.loads(path.read_text())
        except (OSError, ValueError):
            record = {}
        same = record.get("tried_on") == tried_on
        self.known: dict[str, Any] = record["known"] if same else {}
        self.passing: set[str] = set(record["passing"]) if same else set()

    def _key(self, fault: Fault) -> str:
        return hashlib.sha256(repr(fault).encode()).hexdigest()

    def get(self, fault: Fault) -> Outcome | None:
        """Return the outcome of an earlier run."""
        found = self.known.get(self._key(fault))
        return Outcome(**found) if found else None

    def put(self, fault: Fault, outcome: Outcome) -> None:
        """Keep an outcome."""
        with self._lock:
            self.known[self._key(fault)] = vars(outcome)
            self._save()

    def all_passed(self, tests: Iterable[str]) -> None:
        """Keep that tests pass without a fault."""
        with self._lock:
            self.passing |= set(tests)
            self._save()

    def _save(self) -> None:
        record = {"tried_on": self.tried_on, "known": self.known, "passing": sorted(self.passing)}
        self.path.write_text(json.dumps(record))


def run(
    faults: Sequence[Fault],
    *,
    root: Path = ROOT,
    package: Path = PACKAGE,
    work: Path = ROOT / ".cache" / "mutants",
    jobs: int = 2,
    fresh: bool = False,
    say: Callable[[str], None] = print,
) -> bool:
    """Try faults, print what became of them, and return whether that is enough.

    Args:
        faults: To try.
        root: Where tests are run.
        package: What is copied and changed.
        work: For copies, compiled kernels and outcomes.
        jobs: Faults that are tried side by side.
        fresh: Forget the outcomes of earlier runs.
        say: Called with each line.
    """
    work.mkdir(parents=True, exist_ok=True)
    if fresh:
        (work / "outcomes.json").unlink(missing_ok=True)
    faults = located(faults, sources_of(package))
    store = Store(work / "outcomes.json", digest(package, root / "tests", root / "benchmarks"))
    outcomes = {f.name: found for f in faults if (found := store.get(f)) is not None}
    left = [fault for fault in faults if fault.name not in outcomes]
    if outcomes:
        say(f"{len(outcomes)} outcomes of an earlier run on the same files are kept")
    slots: queue.SimpleQueue[Slot] = queue.SimpleQueue()
    for number in range(jobs if left else 0):
        slots.put(Slot(root, package, work / f"slot-{number}"))

    def in_a_slot(job: Callable[[Slot], Any]) -> Any:
        slot = slots.get()
        try:
            return job(slot)
        finally:
            slots.put(slot)

    with ThreadPoolExecutor(jobs) as pool:

        def start(tests: list[str]) -> Future[dict[str, str]]:
            return pool.submit(in_a_slot, lambda slot: slot.passing(tests))

        tests = {test for fault in left for test in fault.tests if not fault.missing_tests(root)} - store.passing
        if not _all_pass(sorted(tests), jobs, start, say):
            return False
        store.all_passed(tests)

        def attempt(fault: Fault) -> None:
            outcome = in_a_slot(lambda slot: slot.try_fault(fault))
            outcomes[fault.name] = outcome
            store.put(fault, outcome)
            say(f"{outcome.status:9}{outcome.seconds:6.1f} s  {fault.path or 'nowhere'}: {fault.name}")

        # The longest first would keep both busy to the end, but nobody knows which those are.
        for done in [pool.submit(attempt, fault) for fault in left]:
            done.result()
    return summarise(faults, outcomes, say)


def _all_pass(
    tests: Sequence[str],
    jobs: int,
    start: Callable[[list[str]], Future[dict[str, str]]],
    say: Callable[[str], None],
) -> bool:
    """Check that tests pass without any fault: else their failure would prove nothing."""
    if not tests:
        return True
    files = sorted({test.partition("::")[0] for test in tests})
    parts = [[t for t in tests if files.index(t.partition("::")[0]) % jobs == part] for part in range(jobs)]
    say(f"{len(tests)} tests are to pass without a fault first")
    wrong: dict[str, str] = {}
    for done in [start(part) for part in parts if part]:
        wrong |= done.result()
    for test, why in wrong.items():
        say(f"without any fault: {test}: {why}")
    return not wrong


def summarise(faults: Sequence[Fault], outcomes: dict[str, Outcome], say: Callable[[str], None]) -> bool:
    """Print the table, and all that is wrong; return whether nothing is."""
    layers: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for fault in faults:
        layers[fault.layer][outcomes[fault.name].status] += 1
    shown = (CAUGHT, SURVIVED, SPARED, STALE, BROKEN)
    say("\n" + f"{'layer':14}" + "".join(f"{status:>10}" for status in shown))
    total: collections.Counter[str] = sum(layers.values(), collections.Counter())
    for layer, counted in [*sorted(layers.items()), ("all", total)]:
        say(f"{layer:14}" + "".join(f"{counted[status]:10}" for status in shown))
    caught = total[CAUGHT]
    say(f"{caught} of {len(faults)} faults were caught")
    for fault in faults:
        outcome = outcomes[fault.name]
        if outcome.status in (SURVIVED, STALE, BROKEN):
            say(f"{outcome.status}: {fault.name} ({fault.path or 'nowhere'}): {outcome.detail or fault.means}")
        elif outcome.status == CAUGHT and fault.spared:
            say(f"caught after all: {fault.name}: remove its 'spared'")
    wrong = total[SURVIVED] + total[STALE] + total[BROKEN]
    wrong += sum(outcomes[f.name].status == CAUGHT and f.spared is not None for f in faults)
    return not wrong and caught >= SHARE * len(faults)


def selected(faults: Iterable[Fault], words: Sequence[str]) -> list[Fault]:
    """Return the faults whose name or path contains one of the words; all of them without words."""
    return [f for f in faults if not words or any(word in f.name or word in (f.path or "") for word in words)]


def main() -> None:
    """Run from the command line; the exit code is 1 where a fault survives."""
    parser = argparse.ArgumentParser(description="Check that the tests catch known faults.")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="faults with this in their name or path")
    parser.add_argument("--jobs", type=int, default=2, help="faults that are tried side by side")
    parser.add_argument("--fresh", action="store_true", help="forget the outcomes of earlier runs")
    options = parser.parse_args()
    faults = selected(located(read_faults(), sources_of(PACKAGE)), options.only)
    if not faults:
        parser.error(f"no fault is named {' or '.join(options.only)}")
    CONTEXT.set_forkserver_preload(PRELOADED)
    began_s = time.monotonic()
    enough = run(faults, jobs=options.jobs, fresh=options.fresh, say=lambda line: print(line, flush=True))
    print(f"{time.monotonic() - began_s:.0f} s")
    sys.exit(0 if enough else 1)


if __name__ == "__main__":
    main()
