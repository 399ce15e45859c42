"""Real ranks for tests: processes that talk over Gloo, kept alive between tests.

A test hands a function of its own module to all ranks and gets what each returned. Functions that end or break their
processes are run by :func:`fresh_ranks` instead, in processes of their own.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import io
import itertools
import multiprocessing
import os
import random
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import interpreters

TIMEOUT_S = 90
_REQUESTS = itertools.count()


class RankError(Exception):
    """A rank raised; the message holds its traceback."""


def _load(path: str, name: str) -> Callable[..., Any]:
    module_name = "ranks_of_" + Path(path).stem
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, path)
        if spec is None or spec.loader is None:
            raise ImportError(path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
        # No later collection goes through what the tests of other files have left, nor a search for living objects.
        gc.collect()
        gc.freeze()
    return getattr(sys.modules[module_name], name)


@cache
def _context() -> Any:
    """Return the context that starts processes: forks of a server that has loaded what every rank needs.

    Where there is a GPU, each rank is an interpreter of its own: what CUDA's libraries have started no fork can use.
    """
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ranks_preload"])
    if interpreters.can_fork():
        with interpreters.spawning():
            forkserver.ensure_running()
        return context
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), before]))
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


@cache
def start_server() -> None:
    """Start the server that forks ranks, and wait until it has loaded, and compiled, what they need."""
    first = _context().Process(target=int)
    first.start()
    first.join()


def _rank_main(rank: int, world_size: int, port: int, group_timeout_s: float, pipe: Connection) -> None:
    from gradwire.exchange.planning import planner

    sys.path.insert(0, str(Path(__file__).parent))
    torch.set_num_threads(1)
    # The small models of tests stand for large ones, whose buckets are exchanged one by one; test_joined_buckets.py has
    # the others.
    planner.JOINED_NUMEL = 0
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=group_timeout_s)
    )
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            break
        if task is None:
            break
        path, name, args = task
        try:
            pipe.send(("ok", _load(path, name)(*args)))
        except BaseException:
            pipe.send(("error", traceback.format_exc()))
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    os._exit(0)


class Ranks:
    """A pool of ranks."""

    def __init__(self, world_size: int, group_timeout_s: float = 60) -> None:
        self.world_size = world_size
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = _context()
        self.processes: list[BaseProcess] = []
        self.pipes: list[Connection] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main, args=(rank, world_size, self.store.port, group_timeout_s, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Run a module-level function on every rank, without waiting."""
        path = function.__code__.co_filename
        for pipe in self.pipes:
            pipe.send((path, function.__name__, args))

    def collect(self, timeout_s: float = TIMEOUT_S) -> list[tuple[str, Any]]:
        """Wait for all ranks: ("ok", value), ("error", traceback) or ("gone", exit code) each."""
        found: dict[int, tuple[str, Any]] = {}
        while len(found) < self.world_size:
            open_pipes = [p for r, p in enumerate(self.pipes) if r not in found]
            ready = wait(open_pipes, timeout=timeout_s)
            if not ready:
                self.close()
                missing = sorted(set(range(self.world_size)) - set(found))
                raise TimeoutError(f"ranks {missing} did not answer within {timeout_s} s; the others: {found}")
            for pipe in ready:
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    found[rank] = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    self.processes[rank].join(10)
                    found[rank] = ("gone", self.processes[rank].exitcode)
        return [found[rank] for rank in range(self.world_size)]

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run a module-level function on every rank and give what each returned."""
        self.start(function, *args)
        answers = self.collect()
        for rank, (kind, value) in enumerate(answers):
            if kind != "ok":
                raise RankError(f"rank {rank}: {kind}\n{value}")
        return [value for _, value in answers]

    def close(self) -> None:
        """End all processes."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


@contextlib.contextmanager
def fresh_ranks(world_size: int, group_timeout_s: float = 10) -> Iterator[Ranks]:
    """Ranks of a test's own, to be broken."""
    ranks = Ranks(world_size, group_timeout_s)
    try:
        yield ranks
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()


def wait_until_watched(group: dist.ProcessGroup | None = None) -> None:
    """Wait, on all ranks of a group, until each is watched: who ends before is only known not to have come."""
    from gradwire.link.peers.watch import Watch

    while Watch.current().absent(range(dist.get_world_size())):
        time.sleep(0.01)
    dist.barrier(group)


def _script_main(rank: int, world_size: int, port: int, path: str, words: list[str], out: Connection) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RESTART_COUNT": "0"}
    sys.argv = [path, *words]
    told = io.StringIO()
    try:
        with contextlib.redirect_stdout(told):
            runpy.run_path(path, run_name="__main__")
        out.send(("ok", told.getvalue()))
    except BaseException:
        out.send(("error", traceback.format_exc()))


def _script_server(imports: tuple[str, ...], requests: Connection) -> None:
    """Import modules, and run scripts in forks of this process, which starts no thread, until nobody asks any more."""
    sys.path.insert(0, str(Path(__file__).parent))
    for name in imports:
        importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) != 1:
        raise AssertionError(f"importing {', '.join(imports)} starts a thread: a fork is not safe")
    while True:
        try:
            number, asked = requests.recv()
        except EOFError:
            os._exit(0)
        pipes, children = [], []
        for arguments in asked:
            ours, theirs = multiprocessing.Pipe()
            children.append(os.fork())
            if children[-1] == 0:
                requests.close()
                _script_main(*arguments, theirs)
                os._exit(0)
            theirs.close()
            pipes.append(ours)
        answers = _answers(pipes)
        # Those that have answered may take a while to end.
        for child in children:
            for _ in range(500):
                if os.waitpid(child, os.WNOHANG)[0]:
                    break
                time.sleep(0.01)
            else:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        requests.send((number, answers))


@cache
def _script_server_with(imports: tuple[str, ...]) -> Connection:
    ours, theirs = _context().Pipe()
    _context().Process(target=_script_server, args=(imports, theirs), daemon=True).start()
    theirs.close()
    return ours  # type: ignore[no-any-return]


def _answers(pipes: Sequence[Connection]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for pipe in pipes:
        try:
            found.append(pipe.recv() if pipe.poll(TIMEOUT_S) else ("late", ""))
        except (EOFError, ConnectionResetError):
            found.append(("gone", ""))
    return found


def unused_port() -> int:
    """Return a port that nobody has, from those that the kernel hands out neither to listeners nor to connections.

    One that it had handed out and got back could be another process's before a script listens there.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def run_script(path: Path, *words: object, world_size: int = 2, imports: tuple[str, ...] = ()) -> str:
    """Run a script on every rank, with the variables that torchrun sets; return what rank 0 printed.

    Its processes are forks of the server, so that it starts in a fraction of torchrun's time.

    Args:
        path: The script.
        words: Its arguments.
        world_size: Number of ranks.
        imports: Modules that take long to import, and that several calls with the same ones share.
    """
    port = unused_port()
    asked = [(rank, world_size, port, str(path), [str(word) for word in words]) for rank in range(world_size)]
    if imports and interpreters.can_fork():
        server = _script_server_with(imports)
        number = next(_REQUESTS)
        server.send((number, asked))
        answered, answers = server.recv()
        # A test that was ended while it waited has left its answers.
        while answered != number:
            answered, answers = server.recv()
    else:
        answers = _answers_of_processes(asked)
    # All of them: the first rank's error may only say that another one has ended.
    failed = [f"rank {rank}: {kind}\n{value}" for rank, (kind, value) in enumerate(answers) if kind != "ok"]
    if failed:
        raise RankError("\n".join(failed))
    return str(answers[0][1])


def _answers_of_processes(asked: Sequence[tuple[Any, ...]]) -> list[tuple[str, Any]]:
    processes, pipes = [], []
    for arguments in asked:
        ours, theirs = _context().Pipe()
        processes.append(_context().Process(target=_script_main, args=(*arguments, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        return _answers(pipes)
    finally:
        for process in processes:
            process.join(5)
            process.kill()
            process.join()
