"""Child processes that end with their parent, forks of one prepared process, and orderly termination."""

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
from pathlib import Path
from types import FrameType
from typing import Any

from gradwire.errors import GradwireError

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
CLONE_NEWNET = 0x40000000
TICK_S = 0.01


def die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when its parent dies; on other systems, exit if the parent is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def killed_by(exit_code: int) -> str:
    """Describe the end of a process by a signal, given its exit code: the negative number of the signal.

    Example:
        >>> killed_by(-9)
        'was killed by SIGKILL (out of memory?)'
        >>> killed_by(-40)
        'was killed by signal 40'
    """
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        # Real-time signals between the first and the last have no name.
        name = f"signal {-exit_code}"
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


@contextlib.contextmanager
def termination_unwinds() -> Iterator[None]:
    """Let SIGTERM, and SIGHUP unless ignored (nohup), unwind the stack as Ctrl-C does, so that children are ended."""
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


@dataclass(frozen=True, kw_only=True)
class Child:
    """A process to be forked.

    Attributes:
        variables: Variables to add to the environment.
        output: File descriptor for standard output and standard error.
        keeps: Other file descriptors that stay open, under the same numbers.
        namespace: Path of a network namespace to enter.
    """

    variables: Mapping[str, str]
    output: int
    keeps: Sequence[int] = field(default=())
    namespace: str | None = None


class ForkedProcess:
    """A child of this process that another process forked; it has the methods of :class:`subprocess.Popen` used here.

    Attributes:
        pid: Number of the process.
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
        """Wait for the process to end, and return its exit code."""
        while self.returncode is None:
            self._reap(0)
        return self.returncode

    def terminate(self) -> None:
        """Send SIGTERM to the process, unless it has ended."""
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
    """Return whether :func:`fork_all` works on this platform."""
    return sys.platform == "linux"


def module_command(module: str) -> list[str]:
    """Return the command that runs a module in a process of its own, which finds modules where this process does.

    With ``-m`` alone Python looks in the current folder first, where a user's ``random.py`` would be imported in place
    of the library's. From Python 3.11 on it can leave that folder out.
    """
    # Who started this process in a folder of packages wants them found there.
    found = {"", os.getcwd()} if os.path.exists(os.curdir) else {""}
    apart = sys.version_info >= (3, 11) and found.isdisjoint(sys.path)
    return [sys.executable, *(["-P"] if apart else []), "-m", module]


def look_beside(script: str) -> None:
    """Let a module that runs a user's script find modules in its folder first, as ``python SCRIPT`` does.

    Python has put the current folder there, unless :func:`module_command` told it not to.
    """
    sys.path[: 0 if getattr(sys.flags, "safe_path", False) else 1] = [str(Path(script).resolve().parent)]


def fork_all(module: str, children: Sequence[Child]) -> list[ForkedProcess]:
    """Run the ``main()`` of a module in several forked processes, which become children of this process.

    The module is imported once. If it has a function ``prepare(variables)``, this is called once with the variables of
    the first child before the forks; it must not start a thread. Each child leads a session of its own.

    Raises:
        GradwireError: the processes cannot be started; the message holds the reason.
    """
    _adopt_orphans(True)
    described = json.dumps({"module": module, "children": [asdict(child) for child in children]})
    kept = [fd for child in children for fd in (child.output, *child.keeps)]
    try:
        done = subprocess.run(
            module_command("gradwire.tools.processes"),
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
    """Wait until this forked process is a child of ``parent``, or has lost its parent."""
    while os.getppid() not in (parent, 1):
        time.sleep(TICK_S)


def _adopt_orphans(adopt: bool) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def _become(child: Mapping[str, Any], others: Sequence[int], module: Any) -> None:
    """Turn a fork into the described child, run the module, and exit."""
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
            enter_namespace(child["namespace"])
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


def enter_namespace(namespace: str) -> None:
    """Move this process into a network namespace, given its path."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(namespace) as place:
        if libc.setns(place.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"the network namespace {namespace} cannot be entered")


def main() -> None:
    """Import a module, fork the children that standard input describes, and print their process numbers."""
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
