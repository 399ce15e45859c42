"""Start local workers, pass their rows on, and end them together.

The parent hosts the rendezvous store on 127.0.0.1 and holds one pipe a worker; on an emulated cluster, whose hosts do
not reach the parent, worker 0 hosts the store. When a worker dies or reports a failure, the others get ``GRACE_S``
seconds to report; then all are killed, and one error holds the most informative account. Killing is safe at any time: a
checkpoint is renamed to its final name only when it is complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch.distributed as dist

from gradwire.errors import GradwireError
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.errors import WorkerError
from gradwire.tools.experiments.folder import LOCK_PATIENCE_S, RunFolder
from gradwire.tools.experiments.train import OnStep, Row
from gradwire.tools.experiments.worker import ENVIRONMENT, Part
from gradwire.tools.lab import INTERFACE, PORT, LabError, Network, open_network
from gradwire.tools.processes import (
    Child,
    ForkedProcess,
    can_fork,
    fork_all,
    killed_by,
    module_command,
    termination_unwinds,
)

GRACE_S = 10.0
STOP_S = 60.0
"""Seconds in which workers that were asked to stop may write a checkpoint."""

TICK_S = 0.2


@dataclass
class Worker:
    """A child process and its messages so far."""

    rank: int
    process: subprocess.Popen[bytes] | ForkedProcess
    pipe: int
    log: IO[bytes]
    pending: bytes = b""
    done: bool = False
    failure: dict[str, Any] | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)

    def read(self) -> bool:
        """Read the messages in the pipe; return False at its end."""
        data = os.read(self.pipe, 1 << 16)
        *lines, self.pending = (self.pending + data).split(b"\n")
        self.messages.extend(json.loads(line) for line in lines)
        return bool(data)

    def last_words(self) -> str:
        """Return the last line of the worker's output."""
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it wrote nothing"

    def account(self) -> tuple[int, str]:
        """Return a description of the failure, after a number that is lower the more informative it is."""
        code = self.process.poll()
        if self.failure is None:
            if code is not None and code < 0:
                return 0, f"worker {self.rank} {killed_by(code)}"
            return 1, f"worker {self.rank} ended with code {code}: {self.last_words()}"
        told, kind = self.failure["message"], self.failure["type"]
        if self.failure["expected"]:
            return (3 if kind == "ExchangeError" else 1), told
        closed = kind in ("RuntimeError", "DistBackendError", "DistNetworkError", "BrokenPipeError")
        return (4 if closed else 2), f"worker {self.rank}: {kind}: {told.strip().splitlines()[0] if told else ''}"


class Crew:
    """The workers of one run; a context manager that leaves none behind."""

    def __init__(self, plan: RunConfig, folder: Path, *, resume: bool, stop_after: int | None) -> None:
        self.plan, self.folder, self.resume, self.stop_after = plan, folder, resume, stop_after
        self.workers: list[Worker] = []
        self.notices: set[str] = set()
        self.network: Network | None = None
        self._lock: int | None = None
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Crew:
        """Lock the folder, build the emulated cluster, if any, and start the store and the workers.

        Raises:
            RunError: another process trains in the folder.
            BackendError: no emulated cluster can be built here.
            LabError: the kernel refused it.
            WorkerError: a worker cannot be started.
        """
        topology = self.plan.topology()
        with contextlib.ExitStack() as stack:
            patience_s = LOCK_PATIENCE_S if self.resume else 0.0
            self._lock = stack.enter_context(RunFolder(self.folder).locked(patience_s=patience_s))
            if topology is None:
                self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            else:
                self.network = stack.enter_context(open_network(topology))
            stack.callback(self.end)
            self._start()
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all workers, remove the emulated cluster and unlock the folder."""
        self._open.close()

    def host(self, rank: int) -> int:
        """Return the host of a worker; hosts have equal numbers of workers, in blocks of ranks."""
        topology = self.plan.topology()
        return 0 if topology is None else rank * topology.hosts // self.plan.workers

    def interfaces(self) -> list[dict[str, int]]:
        """Return the counters of each emulated host's interface, including start-up and evaluations.

        Workers on one host reach each other without passing its interface.
        """
        counted = self.network.counters() if self.network else []
        return [
            {
                "host": host,
                "sent_bytes": c.sent_bytes,
                "sent_payload_bytes": c.sent_payload_bytes,
                "sent_packets": c.sent_packets,
                "received_bytes": c.received_bytes,
                "received_payload_bytes": c.received_payload_bytes,
                "received_packets": c.received_packets,
            }
            for host, c in enumerate(counted)
        ]

    def _start(self) -> None:
        """Start all workers: forks of one process if the platform has them, else separate processes."""
        pipes, logs, parts = [], [], []
        try:
            for rank in range(self.plan.workers):
                pipes.append(os.pipe())
                logs.append(tempfile.TemporaryFile())  # noqa: SIM115
                parts.append(self._part(rank, pipes[-1][1]))
            started: Sequence[ForkedProcess | subprocess.Popen[bytes]] = (
                self._fork(parts, logs) if can_fork() else self._spawn(parts, logs)
            )
        except (OSError, GradwireError) as error:
            for reader, _ in pipes:
                os.close(reader)
            if isinstance(error, LabError):
                raise
            raise WorkerError(
                f"the workers cannot be started: {error}; if memory or processes are short, use fewer --workers"
            ) from error
        finally:
            for _, writer in pipes:
                os.close(writer)
        for rank, (process, (reader, _), log) in enumerate(zip(started, pipes, logs)):
            self.workers.append(Worker(rank, process, reader, log))

    def _part(self, rank: int, writer: int) -> Part:
        return Part(
            rank=rank,
            world_size=self.plan.workers,
            address=self.network.address(self.host(0)) if self.network else "127.0.0.1",
            port=PORT if self.network else self.store.port,
            serves=self.network is not None and rank == 0,
            pipe=writer,
            parent=os.getpid(),
            folder=str(self.folder),
            resume=self.resume,
            stop_after=self.stop_after,
        )

    def _variables(self, part: Part) -> dict[str, str]:
        """Return the variables of a worker's environment that this process's own lacks."""
        if self.network is not None:
            return {ENVIRONMENT: part.to_json(), "GLOO_SOCKET_IFNAME": INTERFACE}
        return {**loopback(), **os.environ, ENVIRONMENT: part.to_json()}

    def _kept(self, part: Part) -> tuple[int, ...]:
        """Return the descriptors that a worker inherits. One that outlives this process keeps the folder locked."""
        return (part.pipe,) if self._lock is None else (part.pipe, self._lock)

    def _fork(self, parts: Sequence[Part], logs: Sequence[IO[bytes]]) -> list[ForkedProcess]:
        def namespace(rank: int) -> str | None:
            return None if self.network is None else self.network.namespace_path(self.host(rank))

        children = [
            Child(
                variables=self._variables(part),
                output=log.fileno(),
                keeps=self._kept(part),
                namespace=namespace(part.rank),
            )
            for part, log in zip(parts, logs)
        ]
        return fork_all("gradwire.tools.experiments.worker", children)

    def _spawn(self, parts: Sequence[Part], logs: Sequence[IO[bytes]]) -> list[subprocess.Popen[bytes]]:
        command = module_command("gradwire.tools.experiments.worker")
        return [
            subprocess.Popen(
                command,
                env={**os.environ, **self._variables(part)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=self._kept(part),
                start_new_session=True,
            )
            for part, log in zip(parts, logs)
        ]

    def ask_to_stop(self) -> None:
        """Ask the workers to write a checkpoint and end."""
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.process.terminate()

    def watch(
        self,
        on_row: Callable[[Row], None],
        on_notice: Callable[[str], None],
        on_step: OnStep,
        *,
        limit_s: float | None = None,
    ) -> None:
        """Pass rows, warnings and progress on until all workers are done, or for ``limit_s`` seconds.

        Raises:
            WorkerError: a worker has failed.
        """
        deadline_s = None if limit_s is None else time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            for worker in self.workers:
                selector.register(worker.pipe, selectors.EVENT_READ, worker)
            while selector.get_map():
                for key, _ in selector.select(TICK_S):
                    worker = key.data
                    if not worker.read():
                        selector.unregister(worker.pipe)
                        worker.process.wait()
                    self._take(worker, on_row, on_notice, on_step)
                if deadline_s is None and any(map(failed, self.workers)):
                    deadline_s = time.monotonic() + GRACE_S
                if deadline_s is not None and time.monotonic() > deadline_s:
                    break
        if any(map(failed, self.workers)):
            raise self._error()

    def _take(
        self, worker: Worker, on_row: Callable[[Row], None], on_notice: Callable[[str], None], on_step: OnStep
    ) -> None:
        for message in worker.messages:
            if message["kind"] == "row":
                on_row(message["row"])
            elif message["kind"] == "step":
                on_step(message["step"], message["activity"])
            elif message["kind"] == "notice":
                # Most notices come from every worker.
                if message["text"] not in self.notices:
                    self.notices.add(message["text"])
                    on_notice(message["text"])
            elif message["kind"] == "done":
                worker.done = True
            else:
                worker.failure = message
        worker.messages.clear()

    def _error(self) -> WorkerError:
        accounts = sorted(worker.account() for worker in self.workers if failed(worker))
        rank, text = accounts[0]
        others = [told for other, told in accounts[1:] if other == 3]
        if rank == 0 and others:
            text += f"; {others[0]}"
        return WorkerError(" ".join(text.split()))

    def logs(self) -> dict[int, str]:
        """Return the output of each worker by rank, standard output and error together."""
        written = {}
        for worker in self.workers:
            worker.log.seek(0)
            written[worker.rank] = worker.log.read().decode(errors="replace")
        return written

    def end(self) -> None:
        """Kill and reap the workers that still run, and remove an unfinished checkpoint."""
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.process.kill()
        for worker in self.workers:
            worker.process.wait()
            with contextlib.suppress(OSError):
                os.close(worker.pipe)
        for pending in (self.folder / "checkpoint").glob("*.tmp"):
            shutil.rmtree(pending, ignore_errors=True)


def failed(worker: Worker) -> bool:
    """Return whether a worker has reported a failure, or ended before it was done."""
    return worker.failure is not None or (worker.process.poll() is not None and not worker.done)


def loopback() -> dict[str, str]:
    """Return the variable that names the loopback interface for Gloo, which else depends on the host's name."""
    names = [name for _, name in socket.if_nameindex()]
    found = next((name for name in ("lo", "lo0") if name in names), None)
    return {"GLOO_SOCKET_IFNAME": found} if found else {}


def run_workers(
    plan: RunConfig,
    folder: Path,
    on_row: Callable[[Row], None],
    *,
    resume: bool = False,
    stop_after: int | None = None,
    on_logs: Callable[[dict[int, str]], None] | None = None,
    on_notice: Callable[[str], None] = lambda text: None,
    on_step: OnStep = lambda step, activity: None,
) -> None:
    """Train ``plan`` on local workers; the run folder must hold its ``config.json``.

    On an emulated cluster, the counters of the hosts' interfaces are added to ``interfaces`` in ``config.json``.

    Raises:
        BackendError: no emulated cluster can be built here.
        LabError: the kernel refused it.
        WorkerError: a worker failed; all others have been ended.
        RunError: another process trains in the folder.
        KeyboardInterrupt, SystemExit: this process was told to end; the workers had :data:`STOP_S` seconds, or until a
            second interruption, to write a checkpoint.
    """
    crew = Crew(plan, folder, resume=resume, stop_after=stop_after)
    with termination_unwinds(), crew:
        try:
            try:
                crew.watch(on_row, on_notice, on_step)
            except (KeyboardInterrupt, SystemExit):
                # A second interruption ends the wait, and with it the workers.
                crew.ask_to_stop()
                on_notice("interrupted: a checkpoint is written at the next row of metrics; interrupt again to end now")
                with contextlib.suppress(WorkerError):
                    crew.watch(on_row, on_notice, on_step, limit_s=STOP_S)
                if crew.network is not None:
                    _record_interfaces(RunFolder(folder), crew.interfaces())
                raise
        except WorkerError:
            if on_logs:
                on_logs(crew.logs())
            raise
        if crew.network is not None:
            _record_interfaces(RunFolder(folder), crew.interfaces())


def _record_interfaces(folder: RunFolder, counted: list[dict[str, int]]) -> None:
    """Add the interfaces' counters to those of the run's earlier parts in the run record."""
    config = folder.read_config()
    for row, before in zip(counted, config.get("interfaces") or []):
        row |= {key: row[key] + before[key] for key in row if key != "host"}
    folder.write_config({**config, "interfaces": counted})
