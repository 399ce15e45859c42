"""Run a command on every host of an emulated cluster, with the variables that torchrun would set."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import IO

from gradwire.tools.lab.iproute import LabError
from gradwire.tools.lab.network import INTERFACE, Network
from gradwire.tools.processes import die_with_parent, termination_unwinds

PORT = 29500
"""Port of the rendezvous; each lab has its own addresses, so one port serves all."""

GRACE_S = 10.0
TICK_S = 0.05
QUIET_S = 1.0
"""Seconds without a line after which output is given up that processes hold open beyond their host's end."""


class _Reader(threading.Thread):
    """Passes the output of a host on, line by line, after the host's number, until its end.

    Args:
        host: Number of the host.
        source: Its output.
        target: Where to write.
    """

    def __init__(self, host: int, source: IO[bytes], target: IO[bytes]) -> None:
        super().__init__(daemon=True)
        self._source, self._target, self._name = source, target, f"h{host}: ".encode()
        self._lines, self._busy = 0, False
        self._problem: OSError | None = None

    def run(self) -> None:
        """Pass lines on."""
        for line in self._source:
            # If nobody took them, the host would wait for ever.
            if self._problem is not None:
                continue
            self._busy = True
            try:
                # A last line without a newline would be joined with the next host's.
                self._target.write(self._name + line.removesuffix(b"\n") + b"\n")
                self._target.flush()
            except OSError as error:
                self._problem = error
            self._lines, self._busy = self._lines + 1, False

    def finish(self, patient: bool) -> None:
        """Wait until all lines of a host that has ended are written; if ``patient``, however slowly they are taken."""
        before = self._lines
        self.join(timeout=QUIET_S)
        while patient and self.is_alive() and (self._busy or self._lines > before):
            before = self._lines
            self.join(timeout=QUIET_S)

    def check(self) -> None:
        """Raise the error of the target, if there was one."""
        if self._problem is not None:
            raise self._problem


def environment(network: Network, host: int) -> dict[str, str]:
    """Return the variables that torchrun would set in the one process of a host, and Gloo's interface."""
    hosts = network.topology.hosts
    return {
        "RANK": str(host),
        "WORLD_SIZE": str(hosts),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(host),
        "GROUP_WORLD_SIZE": str(hosts),
        "MASTER_ADDR": network.address(0),
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": INTERFACE,
    }


def start(
    network: Network, host: int, command: Sequence[str], variables: Mapping[str, str], **options: object
) -> subprocess.Popen[bytes]:
    """Start a command on a host; it dies with this process.

    Raises:
        LabError: the system cannot start another process.
    """
    try:
        return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
            [*network.enter(host), *command],
            env={"OMP_NUM_THREADS": "1", **os.environ, **variables},
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
            **{"stdin": subprocess.DEVNULL, **options},
        )
    except OSError as error:
        raise LabError(f"host {host}: {command[0]} cannot be started: {error}") from error


def run_command(
    network: Network,
    command: Sequence[str] | Callable[[int], Sequence[str]],
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run a command once on each host, and pass its output on line by line, after the host's number.

    If one fails, the others get ten seconds to report; then all are ended.

    Args:
        network: The emulated cluster.
        command: The command's words, or a function that returns them for a host.
        variables: Variables to set besides those of :func:`environment`.

    Raises:
        LabError: a host failed, or the relay between the hosts has ended; the message names the first host, and how.
        OSError: the output cannot be passed on, such as BrokenPipeError if nobody reads it any more.
    """
    processes: list[subprocess.Popen[bytes]] = []
    readers: list[_Reader] = []
    patient = True
    with termination_unwinds():
        try:
            for host in range(network.topology.hosts):
                process = start(
                    network,
                    host,
                    command(host) if callable(command) else command,
                    {**environment(network, host), **(variables or {})},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
                processes.append(process)
                for source, target in ((process.stdout, sys.stdout.buffer), (process.stderr, sys.stderr.buffer)):
                    if source is not None:
                        readers.append(_Reader(host, source, target))
                        readers[-1].start()
            _wait(network, processes, readers)
        except (KeyboardInterrupt, SystemExit):
            patient = False
            raise
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            for reader in readers:
                reader.finish(patient)
    for reader in readers:
        reader.check()


def _wait(network: Network, processes: Sequence[subprocess.Popen[bytes]], readers: Sequence[_Reader]) -> None:
    first: tuple[int, int] | None = None
    deadline_s = float("inf")
    while any(p.poll() is None for p in processes) and time.monotonic() < deadline_s:
        time.sleep(TICK_S)
        # Without a network, hosts wait for each other for as long as they like, or fail for no reason of their own.
        network.check()
        for reader in readers:
            reader.check()
        if first is None:
            failed = [(h, p.returncode) for h, p in enumerate(processes) if p.poll() not in (None, 0)]
            if failed:
                first, deadline_s = failed[0], time.monotonic() + GRACE_S
    failed = [(h, p.returncode) for h, p in enumerate(processes) if p.poll() not in (None, 0)]
    if first or failed:
        host, code = first or failed[0]
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        raise LabError(f"the command on host {host} {how}; all hosts are ended")
