"""The processes of the step benchmark as their parent sees them, and a deadline for their answers."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import IO, Any

import torch
import torch.distributed as dist

from gradwire.tools.bench.rank import ENVIRONMENT
from gradwire.tools.experiments.errors import RunError, WorkerError
from gradwire.tools.experiments.launch import loopback
from gradwire.tools.lab import Network, environment, start
from gradwire.tools.processes import die_with_parent, killed_by, module_command, termination_unwinds


class OutOfTimeError(RunError):
    """A measurement did not end before its deadline."""


class Deadline:
    """A moment some seconds from now.

    Args:
        seconds: Seconds until the deadline.
        clock: Returns seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._until = clock, clock() + seconds

    @property
    def left_s(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self._until - self._clock())

    @property
    def passed(self) -> bool:
        """Whether no time is left."""
        return self.left_s == 0.0


class Ranks:
    """Ranks that all receive the same commands.

    Args:
        model: Name of the model.
        hosts: Number of ranks.
        network: Emulated cluster to run on; None: loopback.
        deadline: Deadline for all answers; None: no limit.
        device: "cuda": each rank computes on one of this machine's GPUs.
        variables: Further environment variables of the ranks.
    """

    def __init__(
        self,
        model: str,
        hosts: int,
        network: Network | None,
        deadline: Deadline | None = None,
        device: str = "cpu",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.hosts, self.network, self.deadline = hosts, network, deadline
        self._variables = dict(variables or {})
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs: list[IO[bytes]] = []
        # A port that was found free here could be taken before rank 0 listened there.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if network is None else None
        port, given = 0 if self._store is None else self._store.port, {"model": model}
        if device != "cpu":
            given |= {"device": device, "backend": backend_of(device, hosts, network)}
        try:
            for host in range(hosts):
                self._logs.append(tempfile.TemporaryFile())  # noqa: SIM115
                self._processes.append(self._start(host, {ENVIRONMENT: json.dumps(given)}, port))
        except BaseException:
            self._end()
            raise

    def _start(self, host: int, variables: dict[str, str], port: int) -> subprocess.Popen[bytes]:
        command = module_command("gradwire.tools.bench.rank")
        options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._logs[host]}
        if self.network is not None:
            variables |= environment(self.network, host) | self._variables
            return start(self.network, host, command, variables, **options)
        variables |= {"RANK": str(host), "WORLD_SIZE": str(self.hosts), **loopback()}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        # As torchrun says that it holds the store.
        variables |= {"TORCHELASTIC_USE_AGENT_STORE": str(True)}
        return subprocess.Popen(
            command,
            env={**os.environ, **variables, **self._variables},
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
            **options,
        )

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
        for log in self._logs:
            log.close()

    def ask(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        """Send a command to all ranks and return their answers by rank.

        Raises:
            WorkerError: a rank ended instead of answering.
            OutOfTimeError: the deadline passed; the ranks take no more commands.
        """
        line = (json.dumps({"do": do, **arguments}) + "\n").encode()
        for process in self._processes:
            if process.stdin:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(line)
                    process.stdin.flush()
        answers = []
        for rank, process in enumerate(self._processes):
            answer = self._read(process.stdout) if process.stdout else b""
            if not answer:
                raise WorkerError(self._account(rank))
            answers.append(json.loads(answer))
        return answers

    def _read(self, pipe: IO[bytes]) -> bytes:
        # An answer is one line, so nothing is left in the pipe's buffer, where select would not see it.
        if self.deadline is not None and not select.select([pipe], [], [], self.deadline.left_s)[0]:
            raise OutOfTimeError("the ranks did not answer in the time that the measurement may take")
        return pipe.readline()

    def _account(self, rank: int) -> str:
        """Describe how the benchmark ended, by a rank that was killed if there is one."""
        self._processes[rank].wait()
        for other, process in enumerate(self._processes):
            code = process.poll()
            if code is not None and code < 0:
                return f"rank {other} of the benchmark {killed_by(code)}"
        return f"rank {rank} of the benchmark ended: {self._last_words(rank)}"

    def _last_words(self, rank: int) -> str:
        self._logs[rank].seek(0)
        lines = self._logs[rank].read().decode(errors="replace").strip().splitlines()
        # torch puts the rank before each line of a traceback.
        return lines[-1].removeprefix(f"[rank{rank}]: ") if lines else "it wrote nothing"


def backend_of(device: str, hosts: int, network: Network | None) -> str:
    """Return the backend of the ranks' process group.

    NCCL is used if each rank has its own GPU and no network is emulated, which it would bypass on one machine.
    """
    alone = device == "cuda" and network is None and hosts <= torch.cuda.device_count() and dist.is_nccl_available()
    return "cpu:gloo,cuda:nccl" if alone else "gloo"


@contextlib.contextmanager
def open_ranks(
    model: str,
    hosts: int,
    network: Network | None,
    deadline: Deadline | None = None,
    device: str = "cpu",
    variables: Mapping[str, str] | None = None,
) -> Iterator[Ranks]:
    """Start ranks for the body and end them after it, also if this process is told to end."""
    with termination_unwinds(), Ranks(model, hosts, network, deadline, device, variables) as ranks:
        yield ranks
