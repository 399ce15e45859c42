"""Child processes that do not outlive their parent, and parents that unwind when they are told to end."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any

from gradwire.errors import GradwireError

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when its parent dies; elsewhere only a parent that is gone already is noticed."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


@contextlib.contextmanager
def termination_unwinds() -> Iterator[None]:
    """Let SIGTERM, and SIGHUP unless ignored (nohup), unwind the stack like Ctrl-C does, so that children are ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    wanted = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


PR_SET_CHILD_SUBREAPER = 36
CLONE_NEWNET = 0x40000000
TICK_S = 0.01


@dataclass(frozen=True, kw_only=True)
class Child:
    """One process to be forked.

    Attributes:
        variables: Added to the environment.
        output: File descriptor for standard output and standard error.
        keeps: Other file descriptors that stay open, under the same numbers.
        namespace: Path of a network namespace to enter.
    """

    variables: Mapping[str, str]
    output: int
    keeps: Sequence[int] = field(default=())
    namespace: str | None = None


class ForkedProcess:
    """A child of this process that another one forked; the part of :class:`subprocess.Popen` that is needed.

    Attributes:
        pid: Of the process.
        returncode: Exit code, or the negative number of the signal that ended it; None while it runs.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None if the process still runs."""
        self._reap(os.WNOHANG)
        return self.returncode

    def wait(self) -> int:
        """Wait for the end of the process, and return its exit code."""
        while self.returncode is None:
            self._reap(0)
        return self.returncode

    def terminate(self) -> None:
        """Ask it to end, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, 9)

    def _reap(self, options: int) -> None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)


def can_fork() -> bool:
    """Return whether this platform has what :func:`fork_all` needs."""
    return sys.platform == "linux"


def fork_all(module: str, children: Sequence[Child]) -> list[ForkedProcess]:
    """Start the ``main()`` of a module in several processes, which are children of this process.

    The module is imported once. If it has a function ``prepare(variables)``, that is called once with the variables of
    the first child, before the forks; it must start no thread. Each child leads a session of its own.

    Raises:
        GradwireError: the processes cannot be started; the message holds the reason.
    """
    _adopt_orphans(True)
    described = json.dumps({"module": module, "children": [asdict(child) for child in children]})
    kept = [fd for child in children for fd in (child.output, *child.keeps)]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "gradwire.tools.processes"],
            input=described.encode(),
            capture_output=True,
            pass_fds=kept,
            start_new_session=True,
            check=False,
        )
    except OSError as error:
        raise GradwireError(f"processes of {module} cannot be started: {error}") from error
    pids = [int(word) for word in done.stdout.split()]
    forked = [ForkedProcess(pid) for pid in pids]
    if done.returncode != 0 or len(forked) != len(children):
        for process in forked:
            process.kill()
            process.wait()
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise GradwireError(f"processes of {module} cannot be started: {lines[-1] if lines else 'no reason was given'}")
    return forked


def wait_for_parent(parent: int) -> None:
    """Return once this process is a child of ``parent``, or of none at all; to be called by a forked process."""
    while os.getppid() not in (parent, 1):
        time.sleep(TICK_S)


def _adopt_orphans(adopt: bool) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def _become(child: Mapping[str, Any], others: Sequence[int], module: Any) -> None:
    """Turn a fork into the child that was described, and run the module; never returns."""
    code = 1
    try:
        os.setsid()
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(child["output"], 1)
        os.dup2(child["output"], 2)
        for fd in others:
            os.close(fd)
        os.environ.update(child["variables"])
        if child["namespace"] is not None:
            _enter(child["namespace"])
        module.main()
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _enter(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(namespace) as place:
        if libc.setns(place.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"the network namespace {namespace} cannot be entered")


def main() -> None:
    """Import, fork as standard input says, print the numbers of the processes, and leave."""
    described = json.load(sys.stdin)
    children = described["children"]
    module = importlib.import_module(described["module"])
    if hasattr(module, "prepare"):
        module.prepare(children[0]["variables"])
    everything = {fd for child in children for fd in (child["output"], *child["keeps"])}
    pids = []
    for child in children:
        pid = os.fork()
        if pid == 0:
            _become(child, sorted(everything - set(child["keeps"])), module)
        pids.append(pid)
    print(*pids, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
