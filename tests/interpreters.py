"""Python processes that start as forks of one that has imported what they need, rather than as new interpreters.

Importing torch and what DDP needs takes a process three to five seconds of CPU, and a command of ours is several of
them: the command line, torchrun, the process that forks workers, ranks. :class:`Popen` is ``subprocess.Popen``, but
``python -m gradwire...``, torchrun and scripts become forks of a server, with the words, environment, descriptors,
session and network namespace that they would have had, and as children of the process that asks; so do, in turn, the
processes that these start. Everything else, and everything on other platforms, starts as ever.

What only a new interpreter shows is not tested by such a fork: variables that libraries read when they are imported,
and what an import itself imports. For that, and so that each kind of command is started for real somewhere, there is
``fresh``.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import inspect
import itertools
import multiprocessing.util
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

NAME = "interpreters"
"""What a server calls itself, see ``/proc/PID/comm``."""

PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36
CLONE_NEWNET = 0x40000000
LARGEST = 1 << 17
STARTERS = ("gradwire", "gradwire.tools.cli.main", "gradwire.tools.cli.launcher", "torch.distributed.run")
"""Modules that start processes themselves, and so get a server of their own while they run no thread."""
STARTING_SCRIPTS = ("notebooks.py", "published_weights.py")
"""Scripts that do, by the names of their files."""

_Popen, _execve = subprocess.Popen, os.execve
_lock = threading.Lock()
_server: socket.socket | None = None
_imported: Mapping[str, str] = {}
_fresh = False
_is_fork = False


def can_fork() -> bool:
    """Return whether this platform has what forks need."""
    return sys.platform == "linux"


def _prctl(*words: Any) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(*words, 0, 0, 0)


def _without_flags(words: Sequence[str]) -> list[str]:
    """Return what follows ``python`` and flags such as ``-u``; those that multiprocessing adds are this process's."""
    return list(itertools.dropwhile(lambda word: word.startswith("-") and word not in ("-m", "-c"), words[1:]))


def _known(words: Sequence[str]) -> bool:
    """Return whether a command can be a fork."""
    if not words or words[0] != sys.executable:
        return False
    rest = _without_flags(words)
    if rest[:1] == ["-c"]:
        return rest[1].startswith("from multiprocessing.forkserver import main")
    if rest[:1] == ["-m"]:
        return rest[1] == "torch.distributed.run" or rest[1].split(".")[0] == "gradwire"
    return bool(rest) and rest[0].endswith(".py") and Path(rest[0]).is_file()


def _imported_with(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that imports depend on; a process whose are others cannot be a fork."""
    return {key: value for key, value in environment.items() if key.startswith(("PYTHON", "NUMBA_"))}


class Popen(_Popen):  # type: ignore[type-arg]
    """``subprocess.Popen`` whose Python commands are forks of a server."""

    def _execute_child(self, *args: Any) -> None:
        given = inspect.signature(_Popen._execute_child).bind(self, *args).arguments  # type: ignore[attr-defined]
        if not self._forked(given):
            _Popen._execute_child(self, *args)  # type: ignore[attr-defined]

    def _forked(self, given: Mapping[str, Any]) -> bool:
        words = given["args"]
        if _fresh or given["shell"] or isinstance(words, (str, bytes)) or not can_fork():
            return False
        if _server is None and _is_fork:
            return False
        words, namespace = [os.fspath(word) for word in words], None
        if words[:3] == ["ip", "netns", "exec"]:
            namespace, words = words[3], words[4:]
        environment = dict(os.environ if given["env"] is None else given["env"])
        if not _known(words) or _imported_with(environment) != (_imported or _imported_with(os.environ)):
            return False
        pairs = ((given["p2cread"], 0), (given["c2pwrite"], 1), (given["errwrite"], 2))
        kept = {number: number if fd == -1 else fd for fd, number in pairs} | {fd: fd for fd in given["pass_fds"]}
        asked = {
            "words": words,
            "environment": environment,
            "folder": os.path.abspath(given["cwd"] or os.curdir),
            "namespace": namespace,
            "session": given["start_new_session"],
            "first": given["preexec_fn"],
            "descriptors": list(kept),
        }
        self.pid = _ask(pickle.dumps(asked), list(kept.values()))
        self._child_created = True
        nothing = getattr(self, "_devnull", None)
        for own, theirs in (("p2cwrite", "p2cread"), ("c2pread", "c2pwrite"), ("errread", "errwrite")):
            if given[own] != -1 and given[theirs] not in (-1, nothing):
                os.close(given[theirs])
        if nothing is not None:
            os.close(nothing)
        self._closed_child_pipe_fds = True
        return True


def _ask(message: bytes, descriptors: Sequence[int]) -> int:
    """Have the server fork a child of this process, and return the child's number."""
    with _lock:
        server = _server or _start_server()
        socket.send_fds(server, [message], descriptors)
        answer = server.recv(64)
    if not answer:
        raise ChildProcessError("the server that forks interpreters has ended")
    return int(answer)


def _start_server() -> socket.socket:
    """Start the server of a process that may run threads: an interpreter of its own."""
    global _server, _imported
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        _Popen(
            [sys.executable, str(Path(__file__).absolute()), str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    ours.setblocking(True)
    for size in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        ours.setsockopt(socket.SOL_SOCKET, size, LARGEST)
    _server, _imported = ours, _imported_with(os.environ)
    return ours


def _fork_server() -> None:
    """Start the server of this process, which runs no thread yet: a fork."""
    global _server
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        with open(os.devnull, "r+b") as nothing:
            for number in range(3):
                os.dup2(nothing.fileno(), number)
        os.closerange(3, theirs.fileno())
        os.closerange(theirs.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        serve(theirs)
    theirs.close()
    _server = ours


def _forget_server() -> None:
    global _server
    if _server is not None:
        _server.close()
        _server = None


os.register_at_fork(after_in_child=_forget_server)


@contextlib.contextmanager
def forking(fresh: bool = False) -> Iterator[None]:
    """Let commands that are started in the body be forks, or new interpreters."""
    global _fresh
    before, _fresh = (subprocess.Popen, _fresh), fresh
    subprocess.Popen = Popen  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen, _fresh = before  # type: ignore[misc]


@contextlib.contextmanager
def forks_for(request: Any) -> Iterator[None]:
    """Let the commands of a test be forks, for a fixture.

    Where it is marked as one that starts processes, the server starts outside of the time that the test may take.
    """
    if can_fork() and any(map(request.node.get_closest_marker, ("ranks", "lab"))):
        start_server()
    with forking():
        yield


def start_server() -> None:
    """Start this process's server, unless it runs, and wait until it has loaded, and compiled, what it needs."""
    if _server is None:
        _ask(b"ready?", [])


def is_server(process: int) -> bool:
    """Return whether a process is such a server."""
    try:
        return Path(f"/proc/{process}/comm").read_text().strip() == NAME
    except OSError:
        return False


@contextlib.contextmanager
def spawning() -> Iterator[None]:
    """Let the server of multiprocessing that is started in the body be a fork, too."""
    before = multiprocessing.util.spawnv_passfds
    multiprocessing.util.spawnv_passfds = _spawn  # type: ignore[assignment]
    try:
        yield
    finally:
        multiprocessing.util.spawnv_passfds = before


def _spawn(path: bytes | str, words: Sequence[Any], descriptors: Sequence[int]) -> int:
    process = Popen([os.fsdecode(word) for word in words], pass_fds=descriptors)
    # Whoever asked waits for it by its number.
    process.returncode = 0
    return process.pid


def serve(channel: socket.socket) -> NoReturn:
    """Fork what is asked for, until the process that asks has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _prctl(PR_SET_NAME, NAME.encode())
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, LARGEST, 64)
        if not message:
            os._exit(0)
        if message == b"ready?":
            channel.send(b"0")
            continue
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:
            # A process whose parent ends becomes the child of the process that asked.
            between = os.getpid()
            child = os.fork()
            if child != 0:
                os.write(writer, str(child).encode())
                os._exit(0)
            _become(pickle.loads(message), descriptors, (channel.detach(), reader, writer), between)
        for fd in (writer, *descriptors):
            os.close(fd)
        os.waitpid(between, 0)
        with open(reader, "rb") as told:
            channel.send(told.read())


def _become(asked: Mapping[str, Any], descriptors: Sequence[int], closed: Sequence[int], between: int) -> NoReturn:
    """Turn a fork into the process that was asked for, and run its command."""
    import fcntl

    # A parent's death is to be this process's (prctl), once it is the right parent's.
    while os.getppid() == between:
        time.sleep(0.001)
    for fd in closed:
        os.close(fd)
    # Out of the way of the numbers that they are to get.
    above = max([*asked["descriptors"], *descriptors]) + 1
    away = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in descriptors]
    for fd in descriptors:
        os.close(fd)
    for number, fd in zip(asked["descriptors"], away):
        os.dup2(fd, number)
        os.close(fd)
    _prctl(PR_SET_NAME, b"python")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if asked["session"]:
        os.setsid()
    os.chdir(asked["folder"])
    if asked["namespace"] is not None:
        with open(f"/run/netns/{asked['namespace']}") as place:
            if ctypes.CDLL(None).setns(place.fileno(), CLONE_NEWNET) != 0:
                os._exit(1)
    if asked["first"] is not None:
        asked["first"]()
    _run(asked["words"], asked["environment"])


def _run(words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Run a command in this process, and leave as an interpreter would."""
    os.environ.clear()
    os.environ.update(environment)
    rest = _without_flags(words)
    if words[1] == "-u":
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if rest[0] == "-c":
        sys.argv = ["-c", *rest[2:]]
        _leave_after(exec, rest[1], main.__dict__)
    if rest[0] == "-m":
        if rest[1] in STARTERS and _server is None:
            _fork_server()
        sys.path[0], sys.argv = os.getcwd(), ["-m", *rest[2:]]
        # As a new interpreter has it: the module that runs is not the one that others import.
        sys.modules.pop(rest[1] if rest[1] != "gradwire" else "gradwire.__main__", None)
        _leave_after(runpy._run_module_as_main, rest[1])  # type: ignore[attr-defined]
    if Path(rest[0]).name in STARTING_SCRIPTS and _server is None:
        _fork_server()
    sys.path[0], sys.argv = str(Path(rest[0]).resolve().parent), rest
    main.__file__ = rest[0]
    _leave_after(exec, compile(Path(rest[0]).read_bytes(), rest[0], "exec"), main.__dict__)


def _leave_after(function: Any, *args: Any) -> NoReturn:
    code, interrupted = 0, False
    try:
        function(*args)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code, interrupted = 1, isinstance(error, KeyboardInterrupt)
    with contextlib.suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _become_by_exec(path: Any, words: Sequence[Any], environment: Mapping[str, str]) -> NoReturn:
    """Run another command in this process: ``os.execve``, where the command can be run so."""
    words = [os.fspath(word) for word in words]
    if not _known(words):
        _execve(path, words, environment)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _run(words, environment)


def preload() -> None:
    """Import what commands, torchrun and ranks need; starts no thread."""
    import jinja2  # noqa: F401
    import matplotlib.figure  # noqa: F401
    import rich.live  # noqa: F401
    import torch.distributed.elastic.multiprocessing.subprocess_handler
    import torch.distributed.elastic.rendezvous.c10d_rendezvous_backend
    import torch.distributed.run  # noqa: F401

    import gradwire.tools.bench.rank
    import gradwire.tools.bench.step
    import gradwire.tools.cli.app
    import gradwire.tools.cli.bootstrap
    import gradwire.tools.cli.launcher
    import gradwire.tools.experiments.run
    import gradwire.tools.experiments.worker
    import gradwire.tools.lab
    import gradwire.tools.report  # noqa: F401
    import ranks_preload  # noqa: F401
    from gradwire.link.membership.store_connections import forget_name_servers

    forget_name_servers()
    if len(os.listdir("/proc/self/task")) != 1:
        raise AssertionError("the server runs a thread: a fork of it is not safe")


def main() -> NoReturn:
    """Load, and serve over the socket whose number the first word is."""
    global _is_fork, _imported
    _is_fork, _imported = True, _imported_with(os.environ)
    subprocess.Popen = Popen  # type: ignore[misc]
    os.execve = _become_by_exec  # type: ignore[assignment]
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    preload()
    serve(channel)


if __name__ == "__main__":
    # The functions of a module, not of this script, whose name each fork takes.
    import interpreters

    interpreters.main()
