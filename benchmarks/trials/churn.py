"""Trials of trainings whose replicas are killed, stopped, cut off, told to leave and fed spoilt bytes, and come again.

The faults, the driver and the accounting are here; a :class:`Program` is what is tried: how its coordinator and a
replica of it run. Replicas on this machine train a small network, first undisturbed, then with a fault each so many
seconds. The computing of a step is slept, so that replicas do not wait for one another's cores. What is killed or has
left is started anew; the server that forks replicas has imported what they need.

- kill: SIGKILL; a new replica is started.
- stop: SIGSTOP, and SIGCONT after ``stop_s``.
- cut: all connections of the replica with other processes break at once, while it lives on.
- leave: the replica leaves by its own word; a new one is started.
- corrupt: one bit of what the replica receives in a round flips.

A seed and a trace give the same faults at the same times to every program. If the replica at the place of a fault does
not take part at the time, the next one that does has it.

Throughput is that of replicas times rounds that counted, as a share of the undisturbed one, which had all replicas all
the time. So it includes what a replica that is away does not compute. The share of the time of replicas that the trial
itself took away, whatever the members do, is *away*: seconds for which replicas were stopped, and from the end of a
process until its successor runs. A replica is in again when it has taken a round. Digests of parameters are compared
over replicas after every round; *spread* is the greatest distance between two replicas' parameters, over their length,
as projections tell it. *Met* is the median over epochs of the longest time of a replica from the end of the last one
until all had met. No round for ``HANG_S`` is a hang. A round whose number has been is not counted again, and
*rounds lost* is how far numbers fell back.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import math
import multiprocessing
import os
import random
import signal
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.lib.runs import earlier, write
from gradwire.tools.lab import INTERFACE, Network
from gradwire.tools.processes import enter_namespace

__all__ = [
    "BATCH",
    "KINDS",
    "WIDTH",
    "Fault",
    "Program",
    "Seat",
    "Told",
    "Trial",
    "add_arguments",
    "append",
    "backward",
    "cut_off",
    "follow",
    "judged",
    "move",
    "network",
    "rate",
    "schedule",
    "tell",
    "tried",
]

KINDS = ("kill", "stop", "cut", "leave", "corrupt")
WIDTH, BATCH = 64, 8
"""The network of the trial and the samples of a step."""

HANG_S, START_S, WARM_S, REST_S = 60.0, 300.0, 5.0, 10.0
BEHIND = 10
"""Rounds by which a training falls back that has begun anew."""

MOST_ENDS = 200
"""Replicas that may end by themselves before the trial is given up."""


class HaltedError(Exception):
    """A training that does not go on."""


class Fault(NamedTuple):
    """A disturbance of the replica at a place, so many seconds after the first disturbed one."""

    at_s: float
    kind: str
    place: int


def schedule(trace: str, seed: int, minutes: float, every_s: float, replicas: int) -> list[Fault]:
    """Draw the faults of a trial.

    Args:
        trace: What is drawn differently for each: the name of a method. Programs that have the same trace have the
            same faults.
    """
    draw = random.Random(f"{seed} {trace}")
    numbers = range(math.ceil(60 * minutes / every_s))
    return [Fault((i + 1) * every_s, KINDS[i % len(KINDS)], draw.randrange(replicas)) for i in numbers]


@dataclass(frozen=True)
class Seat:
    """What a replica is started with.

    Args:
        address: What the coordinator told.
        least: Replicas that begin together.
        steps: Steps of a replica in a round.
    """

    address: Any
    name: str
    place: int
    spec: str
    least: int
    given: argparse.Namespace
    steps: int = 1
    namespace: str | None = None


@dataclass(frozen=True)
class Program:
    """What is tried.

    Args:
        serve: Coordinates: it is called with the namespace and the address to listen at, and sends what replicas need
            to find it.
        replica: Trains until told to leave: it is called with its seat, the pipe for :func:`tell`, and an event by
            order: see :func:`follow`.
        kinds: Faults that replicas can be given.
    """

    serve: Callable[[str | None, str, Connection], None]
    replica: Callable[[Seat, Connection, Connection], None]
    kinds: Sequence[str] = KINDS


class Told(NamedTuple):
    """What a replica tells when a round has counted.

    Args:
        members: Replicas that took part. A negative number is this replica's own part alone, to be summed.
    """

    round: int
    digest: int
    sketch: tuple[float, ...]
    members: float
    loss: float
    counts: dict[str, Any]


def network(width: int = WIDTH) -> nn.Sequential:
    """Build four layers."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))


def backward(module: nn.Module, number: int, given: argparse.Namespace) -> float:
    """Compute a step's gradients; return its loss. The time of computing is slept before gradients are there."""
    draw = torch.Generator().manual_seed(number)
    loss = module(torch.randn(BATCH, given.width, generator=draw)).square().mean()
    time.sleep(given.compute_s)
    loss.backward()
    return loss.item()


@cache
def _projection(elements: int) -> torch.Tensor:
    return torch.randn(8, elements, generator=torch.Generator().manual_seed(0))


def tell(
    pipe: Connection, round: int, module: nn.Module, members: float, loss: float, counts: Mapping[str, Any]
) -> None:
    """Tell the trial that a round has counted."""
    flat = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    sketch = tuple((_projection(len(flat)) @ flat).tolist())
    pipe.send(Told(round, zlib.crc32(flat.numpy().data), sketch, members, loss, dict(counts)))


def follow(orders: Connection, obey: Mapping[str, Callable[[], None]]) -> None:
    """Obey the trial's orders in a thread."""

    def run() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                obey[orders.recv()]()

    threading.Thread(target=run, daemon=True).start()


def cut_off(others: Sequence[int] = ()) -> None:
    """Break all TCP connections of this process, and of other processes of its replica, with those of other replicas.

    Args:
        others: Processes that this one has started. Needs Linux 5.6 and the right to trace them.
    """
    held = [socket.socket(fileno=copy) for pid in (os.getpid(), *others) for copy in _sockets(pid)]
    ends = []
    for end in held:
        with contextlib.suppress(OSError):  # sockets that listen
            if end.family in (socket.AF_INET, socket.AF_INET6):
                ends.append((end, _plain(end.getsockname()), _plain(end.getpeername())))
    own = {here for _, here, _ in ends}
    for end, _, there in ends:
        if there not in own:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
    for end in held:
        end.close()


def _plain(address: tuple[Any, ...]) -> tuple[str, int]:
    return address[0].removeprefix("::ffff:"), address[1]  # a server of IPv6 names hosts of IPv4 so


def _sockets(pid: int) -> Iterator[int]:
    """Yield duplicates of the sockets of a process."""
    handle = None if pid == os.getpid() else os.pidfd_open(pid)
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                    yield os.dup(int(name)) if handle is None else _foreign(handle, int(name))
    if handle is not None:
        os.close(handle)


def _foreign(handle: int, number: int) -> int:
    """Return a duplicate of another process's file descriptor: the system call pidfd_getfd."""
    library = ctypes.CDLL(None, use_errno=True)
    if (copy := library.syscall(438, handle, number, 0)) < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return int(copy)


def move(namespace: str | None) -> None:
    """Move this process to a host of an emulated network."""
    if namespace is not None:
        enter_namespace(namespace)
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


def _coordinate(serve: Callable[..., None], namespace: str | None, listen: str, pipe: Connection) -> None:
    os.setsid()
    serve(namespace, listen, pipe)


def _enter(program: Program, seat: Seat, pipe: Connection, orders: Connection) -> None:
    os.setsid()  # signals reach the processes that the replica starts, too
    pipe.send(None)
    move(seat.namespace)
    torch.set_num_threads(1)
    torch.manual_seed(zlib.crc32(seat.name.encode()))
    program.replica(seat, pipe, orders)


@dataclass
class _Replica:
    name: str
    place: int
    process: Any
    pipe: Connection
    orders: Connection
    ends: bool = False  # it was told to


@dataclass
class Round:
    """A round that counted: when it was first told of, and how many took part."""

    at_s: float
    members: float = 0.0


class Trial:
    """Replicas of one program, and what they told."""

    def __init__(
        self,
        program: Program,
        spec: str,
        given: argparse.Namespace,
        network: Network | None = None,
        *,
        steps: int = 1,
    ) -> None:
        self._program, self.spec, self._given, self._network, self._steps = program, spec, given, network, steps
        self._context = multiprocessing.get_context("forkserver")
        told, tells = self._context.Pipe()
        host = "127.0.0.1" if network is None else network.address(0)
        words = (program.serve, None if network is None else network.namespace_path(0), f"{host}:0", tells)
        self._coordinator = self._context.Process(target=_coordinate, args=words, daemon=True)
        self._coordinator.start()
        self._address = told.recv()
        self._replicas: dict[str, _Replica] = {}
        self.started: dict[str, float] = {}
        self.began_s = time.monotonic()
        self.counted: dict[int, Round] = {}
        self.digests: dict[tuple[int, int], set[int]] = {}
        self.compared = 0
        self.spread = 0.0
        self._sketches: dict[tuple[int, int], tuple[float, ...]] = {}
        self._begun, self._latest = 0, 0
        self._resumed: set[str] = set()
        self.losses: list[tuple[float, float]] = []
        self.rejoined: list[float] = []
        self.stopped: set[str] = set()
        self.away_s = 0.0
        self.ended_by_itself = 0
        self.fell_back = 0
        self.told: dict[str, dict[str, Any]] = {}
        self.met: dict[int, float] = {}
        self._number = 0
        for place in range(given.replicas):
            self.start(place, given.replicas)

    def start(self, place: int, least: int = 1) -> None:
        """Start a replica, on the host at a place."""
        name = f"replica-{self._number}"
        self._number += 1
        (ours, theirs), (told, orders) = self._context.Pipe(), self._context.Pipe()
        space = None if self._network is None else self._network.namespace_path(1 + place)
        seat = Seat(self._address, name, place, self.spec, least, self._given, self._steps, space)
        process = self._context.Process(target=_enter, args=(self._program, seat, theirs, orders), daemon=True)
        process.start()
        theirs.close()
        orders.close()
        self._replicas[name] = _Replica(name, place, process, ours, told)
        self.started[name] = time.monotonic()

    def read(self, seconds: float) -> None:
        """Read what replicas tell for some time.

        Raises:
            HaltedError: nothing has counted for :data:`START_S`, or replicas end again and again.
        """
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            # Processes that a replica has started may hold its pipe open when it has ended.
            sources = {end: r for r in self._replicas.values() for end in (r.pipe, r.process.sentinel)}
            ready = wait(list(sources), timeout=left_s)
            for replica in {id(sources[end]): sources[end] for end in ready}.values():
                self._take(replica)
            latest_s = max((found.at_s for found in self.counted.values()), default=self.began_s)
            if time.monotonic() - latest_s > START_S:
                raise HaltedError(f"{self.spec}: no round counted for {START_S:.0f} s")

    def _take(self, replica: _Replica) -> None:
        try:
            while replica.pipe.poll():
                self._hear(replica.name, replica.pipe.recv())
            ended = not replica.process.is_alive() and not replica.pipe.poll()
        except (EOFError, OSError):
            ended = True
        if not ended:
            return
        _signal(replica.process, signal.SIGKILL)
        replica.process.join()
        replica.pipe.close()
        replica.orders.close()
        del self._replicas[replica.name]
        self.ended_by_itself += not replica.ends
        if self.ended_by_itself > MOST_ENDS:
            raise HaltedError(f"{self.spec}: replicas ended by themselves {MOST_ENDS} times")
        self.start(replica.place)

    def _hear(self, name: str, said: Told | None) -> None:
        now_s = time.monotonic()
        if said is None:
            # It runs: what follows is the program's time.
            self.away_s += now_s - self.started.get(name, now_s)
            return
        if name in self._resumed and said.round < self._latest - BEHIND:
            return  # what it had to tell when it was stopped
        self._resumed.discard(name)
        self.told[name] = said.counts
        if "met_s" in said.counts:
            epoch = said.counts["epoch"]
            self.met[epoch] = max(self.met.get(epoch, 0.0), said.counts["met_s"])
        found = self.counted.setdefault(said.round, Round(now_s))
        found.members = max(found.members, said.members) if said.members >= 0 else found.members - said.members
        if said.round < self._latest - BEHIND:
            self.fell_back = max(self.fell_back, self._latest - said.round)
            self._begun += 1  # from nothing: its rounds are not those that had their numbers before
            self._latest = said.round
        self._latest = max(self._latest, said.round)
        key = (self._begun, said.round)
        self.compared += key in self.digests
        self.digests.setdefault(key, set()).add(said.digest)
        other = self._sketches.setdefault(key, said.sketch)
        if math.hypot(*other) > 0:
            self.spread = max(self.spread, math.dist(other, said.sketch) / math.hypot(*other))
        self.losses.append((now_s, said.loss))
        if name in self.started:
            self.rejoined.append(now_s - self.started.pop(name))

    def fault(self, fault: Fault, stop_s: float) -> bool:
        """Disturb the replica at a place, or the next that takes part; tell whether there was one."""
        able = {
            r.place: r for name, r in self._replicas.items() if name not in self.started and name not in self.stopped
        }
        if not able or fault.kind not in self._program.kinds:
            return False
        replica = able[min(able, key=lambda place: (place - fault.place) % self._given.replicas)]
        if fault.kind == "kill":
            replica.ends = True
            _signal(replica.process, signal.SIGKILL)
        elif fault.kind == "stop":
            _signal(replica.process, signal.SIGSTOP)
            self.stopped.add(replica.name)
            self.away_s += stop_s

            def go_on() -> None:
                _signal(replica.process, signal.SIGCONT)
                self.stopped.discard(replica.name)
                self._resumed.add(replica.name)
                self.started[replica.name] = time.monotonic()

            threading.Timer(stop_s, go_on).start()
        else:
            replica.ends |= fault.kind == "leave"
            with contextlib.suppress(OSError):
                replica.orders.send(fault.kind)
        return True

    def close(self) -> None:
        """End everything."""
        for process in (*(replica.process for replica in self._replicas.values()), self._coordinator):
            _signal(process, signal.SIGKILL)
            process.kill()  # it may not lead a group yet
            process.join()


def _signal(process: Any, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def rate(rounds: Iterable[Round], since_s: float, until_s: float) -> tuple[float, float]:
    """Return rounds a second, and replicas times rounds a second, between the last rounds before two times.

    If no round counted before ``until_s`` for three times the usual, that time counts as well.
    """
    found = sorted((round for round in rounds if round.at_s <= until_s), key=lambda round: round.at_s)
    first_s = max((round.at_s for round in found if round.at_s <= since_s), default=since_s)
    later = [round for round in found if round.at_s > first_s]
    last_s = later[-1].at_s if later else first_s
    if not later:
        return 0.0, 0.0
    usual_s = median(b - a for a, b in itertools.pairwise([first_s, *(round.at_s for round in later)]))
    seconds = (until_s if until_s - last_s > 3 * usual_s else last_s) - first_s
    return len(later) / seconds, sum(round.members for round in later) / seconds


@dataclass
class Phase:
    """When faults were given, which, and the rates of :func:`rate` before the first and after the last of them."""

    quiet: list[tuple[float, float]]
    began_s: float
    ended_s: float
    faults: list[tuple[float, str]] = field(default_factory=list)


def judged(trial: Trial, phase: Phase, given: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a trial."""
    # A machine's own pace can change by a hundredth in half an hour: it is taken before and after.
    quiet, began_s = tuple(map(mean, zip(*phase.quiet))), phase.began_s
    disturbed = rate(trial.counted.values(), began_s, phase.ended_s)
    times = sorted(found.at_s for found in trial.counted.values() if began_s <= found.at_s <= phase.ended_s)
    ends = [began_s, *times, phase.ended_s]
    gaps = list(itertools.pairwise(ends))
    pauses: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for at_s, kind in phase.faults:
        near = [b - a for a, b in gaps if at_s <= b < at_s + given.every_s]
        pauses[kind].append(sum(gap - 1 / quiet[0] for gap in near if gap > 1.5 / quiet[0]))
    away = trial.away_s / (given.replicas * (phase.ended_s - began_s))
    differing = sorted(number for (_, number), found in trial.digests.items() if len(found) > 1)
    latest = [
        next((kind for at_s, kind in reversed(phase.faults) if at_s <= trial.counted[number].at_s), "")
        for number in differing
    ]
    given_kinds = [kind for _, kind in phase.faults]
    return {
        "seconds": round(phase.ended_s - began_s, 1),
        "faults": len(phase.faults),
        **{f"faults_{kind}": given_kinds.count(kind) for kind in KINDS},
        "rounds": len(times),
        "undisturbed_rounds_per_s": round(quiet[0], 3),
        "undisturbed_phases": [round(rounds, 3) for rounds, _ in phase.quiet],
        "rounds_per_s": round(disturbed[0], 3),
        "rounds_kept": round(disturbed[0] / quiet[0], 4),
        "throughput_kept": round(disturbed[1] / quiet[1], 4),
        "away": round(away, 4),
        "kept_of_present": round(disturbed[1] / quiet[1] / (1 - away), 4),
        "longest_pause_s": round(max(b - a for a, b in gaps), 2),
        **{f"lost_s_{kind}": round(median(found), 2) for kind, found in pauses.items() if found},
        "lost_s_most": round(max((max(found) for found in pauses.values() if found), default=0.0), 2),
        "rejoined": len(trial.rejoined),
        "rejoin_s_median": round(median(trial.rejoined), 2) if trial.rejoined else None,
        "rejoin_s_longest": round(max(trial.rejoined), 2) if trial.rejoined else None,
        **({"met_s_median": round(median(trial.met.values()), 2)} if trial.met else {}),
        "ended_by_itself": trial.ended_by_itself,
        "rounds_lost": trial.fell_back,
        "digests_compared": trial.compared,
        "rounds_compared": len(trial.digests),
        "rounds_with_differing_digests": len(differing),
        "differing_after": {kind: latest.count(kind) for kind in dict.fromkeys(latest)},
        "greatest_spread": float(f"{trial.spread:.2g}"),
        "loss_first": _mean_loss(trial.losses[:80]),
        "loss_last": _mean_loss(trial.losses[-80:]),
        "hangs": sum(b - a > HANG_S for a, b in gaps),
        "load": round(os.getloadavg()[2], 1),
    }


def _mean_loss(losses: Sequence[tuple[float, float]]) -> float:
    return float(f"{mean(loss for _, loss in losses):.4g}") if losses else math.nan


def append(path: Path | None, row: dict[str, Any]) -> list[dict[str, Any]]:
    """Add a row to a result, to which other programs may add theirs meanwhile; return all rows."""
    rows = [*earlier(path, "rows"), row]
    write(path, rows=rows)
    return rows


def tried(
    program: Program,
    spec: str,
    given: argparse.Namespace,
    seed: int,
    *,
    trace: str = "",
    steps: int = 1,
    network: Network | None = None,
) -> dict[str, Any]:
    """Try one method of a program; return its row.

    Args:
        trace: The method whose faults are given; by default ``spec``.
        steps: Steps of a replica in a round.
    """
    trial = Trial(program, spec, given, network, steps=steps)
    try:
        while trial.started or not trial.counted:
            trial.read(0.5)
        trial.read(WARM_S)
        quiet_s = time.monotonic()
        trial.read(given.quiet_s)
        began_s = time.monotonic()
        phase = Phase([rate(trial.counted.values(), quiet_s, began_s)], began_s, began_s)
        trial.rejoined.clear()
        trial.met.clear()
        trial.away_s, trial.ended_by_itself = 0.0, 0
        trial.fell_back = 0
        halted = ""
        try:
            for fault in schedule(trace or spec, seed, given.minutes, given.every_s, given.replicas):
                trial.read(began_s + fault.at_s - time.monotonic())
                now_s = time.monotonic()
                if trial.fault(fault, given.stop_s):
                    phase.faults.append((now_s, fault.kind))
            trial.read(max(REST_S, given.stop_s + 5))
        except HaltedError as error:
            halted = str(error)
        phase.ended_s = time.monotonic()
        if not halted:
            trial.read(given.quiet_s)
            phase.quiet.append(rate(trial.counted.values(), phase.ended_s, time.monotonic()))
        found = judged(trial, phase, given)
    finally:
        trial.close()
    return {
        "method": spec,
        "trace": trace or spec,
        "seed": seed,
        "lab": given.lab or "",
        "replicas": given.replicas,
        "compute_s": given.compute_s,
        "every_s": given.every_s,
        "stop_s": given.stop_s,
        "silence_s": given.silence_s,
        "at_once": given.at_once,
        "date_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "steps": steps,
        "pace": round(mean(both for _, both in phase.quiet) * steps * given.compute_s / given.replicas, 4),
        **found,
        "halted": halted,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a trial to a command line."""
    parser.add_argument("--minutes", type=float, default=30.0, help="of disturbance under each method")
    parser.add_argument("--every-s", type=float, default=30.0, help="seconds between two faults")
    parser.add_argument("--quiet-s", type=float, default=60.0, help="seconds without a fault, at first and at last")
    parser.add_argument("--stop-s", type=float, default=10.0)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--compute-s", type=float, default=0.25, help="slept in each step")
    parser.add_argument("--silence-s", type=float, default=2.0, help="without a sign of life, a replica is lost")
    parser.add_argument("--method", action="append")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="each is a run of so many minutes")
    parser.add_argument("--at-once", type=int, default=1, help="trials that run beside this one, and itself: noted")
    parser.add_argument("--json", type=Path)
