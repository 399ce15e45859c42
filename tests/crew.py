"""Workers of a membership for tests: a coordinator in this process, and processes that come and go."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

import gradwire as gw
from gradwire.link.membership.membership_link import MembershipLink
from ranks import _context, _load, unused_port

WAIT_S = 240.0


def _worker_main(path: str, name: str, address: str, secret: str, own: str, args: Any, pipe: Connection) -> None:
    torch.set_num_threads(1)
    try:
        pipe.send(("ok", _load(path, name)(address, secret, own, pipe, *args)))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
    os._exit(0)


class Worker:
    """A worker's process, and what it told."""

    def __init__(self, name: str, process: BaseProcess, pipe: Connection, crew: list[Worker]) -> None:
        self.name, self._process, self._pipe, self._crew = name, process, pipe, crew
        self.steps: dict[int, Any] = {}
        self.result: Any = None
        self.ended = False

    def read(self, timeout_s: float) -> bool:
        """Read what it has told; return False if there was nothing."""
        if self.ended or not self._pipe.poll(timeout_s):
            return False
        try:
            kind, *said = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self.ended = True
            return True
        if kind == "step":
            self.steps[said[0]] = said[1]
        elif kind == "ok":
            self.result, self.ended = said[0], True
        else:
            raise AssertionError(f"worker {self.name}: {said[0]}")
        return True

    def _hear_others(self) -> None:
        """Read what the others have told: one whose pipe is full stands still, and with it all."""
        for other in self._crew:
            while other.read(0.0) and not other.ended:
                pass

    def reach(self, round: int) -> None:
        """Wait until it has taken a step."""
        end_s = time.monotonic() + WAIT_S
        while max(self.steps, default=-1) < round:
            self.read(0.1)
            self._hear_others()
            # It may have told its last step and its end at once.
            latest = max(self.steps, default=-1)
            assert latest >= round or not self.ended, f"{self.name} ended after step {latest}: {self.result}"
            assert time.monotonic() < end_s, f"{self.name} hangs after step {max(self.steps, default=-1)}"

    def end(self) -> Any:
        """Wait until it has ended, and return its result; None if it was killed."""
        end_s = time.monotonic() + WAIT_S
        while not self.ended:
            self.read(0.1)
            self._hear_others()
            assert time.monotonic() < end_s, f"{self.name} hangs after step {max(self.steps, default=-1)}"
        return self.result

    def tell(self, word: str) -> None:
        """Send it a word."""
        self._pipe.send(word)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        if self._process.pid is not None:
            os.kill(self._process.pid, number)

    def stop(self) -> None:
        """Stop it, wait until all its threads stand still, and read all that it has told.

        It may have taken many steps since the last one that was read.
        """
        self.signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self._process.pid}/task")
        wait_for(lambda: all(_state_of(thread) == "T" for thread in threads.iterdir()))
        self._hear_others()

    def kill(self) -> None:
        """End it by SIGKILL, and read all that it has told."""
        self.signal(signal.SIGKILL)
        self.end()

    def close(self) -> None:
        """End its process."""
        self._process.kill()
        self._process.join()


def _state_of(thread: Path) -> str:
    with contextlib.suppress(OSError):  # it may have ended just then
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    return ""


class Crew:
    """A coordinator and its workers."""

    def __init__(self, state: Path | None = None) -> None:
        self._state = state
        # Where it is started again, the kernel shall not have given its port to somebody else meanwhile.
        self._begin(f"127.0.0.1:{unused_port()}", None)
        self.secret = self.coordinator.secret
        self.port = self.coordinator.port
        self.workers: list[Worker] = []

    def _begin(self, listen: str, secret: str | None) -> None:
        self.coordinator = gw.Coordinator(listen, secret=secret, state=self._state)
        self._thread = threading.Thread(target=self.coordinator.serve, daemon=True)
        self._thread.start()

    def start(self, name: str, function: Callable[..., Any], *args: Any) -> Worker:
        """Start a worker that runs a module-level function of the test's file."""
        ours, theirs = _context().Pipe()
        told = (function.__code__.co_filename, function.__name__, f"127.0.0.1:{self.port}", self.secret, name, args)
        process = _context().Process(target=_worker_main, args=(*told, theirs), daemon=True)
        process.start()
        theirs.close()
        self.workers.append(Worker(name, process, ours, self.workers))
        return self.workers[-1]

    @contextlib.contextmanager
    def without_coordinator(self) -> Iterator[None]:
        """End the coordinator, whose store is lost, and start it again after the ``with`` block."""
        self.coordinator.close()
        self._thread.join()
        del self.coordinator, self._thread
        gc.collect()
        try:
            yield
        finally:
            self._begin(f"127.0.0.1:{self.port}", None)

    def close(self) -> None:
        """End everything."""
        for worker in self.workers:
            worker.close()
        self.coordinator.close()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the coordinator's thread goes on"


@contextlib.contextmanager
def crew(state: Path | None = None) -> Iterator[Crew]:
    """Make a crew for the ``with`` block."""
    made = Crew(state)
    try:
        yield made
    finally:
        made.close()


def die_in_exchange(at: int) -> None:
    """End this process by SIGKILL at its ``at``-th operation on a wire."""
    from gradwire.exchange.drivers.transports.gloo import GlooTransport

    done = [0]

    def counting(usual: Any) -> Any:
        def counted(*args: Any, **more: Any) -> Any:
            done[0] += 1
            if done[0] >= at:
                os.kill(os.getpid(), signal.SIGKILL)
            return usual(*args, **more)

        return counted

    for name in ("execute", "start"):
        setattr(GlooTransport, name, counting(getattr(GlooTransport, name)))


def learn(module: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: list[int]) -> None:
    """Compute the gradient of random inputs that follow from the first number of a batch."""
    draw = torch.Generator().manual_seed(1000 * batch[0])
    optimizer.zero_grad()
    module(torch.randn(8, 20, generator=draw)).square().mean().backward()


def report_late(board: Any, seconds: float) -> None:
    """Let a worker that leaves by its word hang for some time before it writes so."""
    put = board.put_unless_away

    def put_late(key: str, record: Any) -> None:
        time.sleep(seconds)
        put(key, record)

    board.put_unless_away = put_late


def cut_off_in_meetings(times: int) -> None:
    """Let all connections of this worker with the others break while it meets them, a number of times."""
    compare, left = MembershipLink._compare_state, [times]

    def cut(self: Any) -> None:
        if self._seat.epoch.number > 1 and left[0]:
            left[0] -= 1
            watch, ranks = self._epoch_group.watch, self._epoch_group.ranks
            with watch.changed:
                watch.changed.wait_for(lambda: not watch.absent(ranks))
                for line in list(watch._connections._lines.values()):
                    line.socket.shutdown(socket.SHUT_RDWR)
                watch.changed.wait_for(lambda: watch.vanished(ranks))
            raise RuntimeError("the network broke")
        compare(self)

    MembershipLink._compare_state = cut  # type: ignore[method-assign]


def wait_for(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    end_s = time.monotonic() + 60.0
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.01)
