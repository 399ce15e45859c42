"""Trainings whose workers are killed, stopped, cut off, told to leave and fed spoilt bytes, and come again.

    python benchmarks/trials/membership.py --minutes 30 --json benchmarks/results/trials/trials_membership.json
    sudo python benchmarks/trials/membership.py --lab bandwidth=100mbit,delay=20ms --method terngrad

Replicas on this machine train a small network over a membership, under each of some methods: first undisturbed, then
with a fault each so many seconds at a replica that is drawn. The computing of a step is slept, so that replicas do not
wait for one another's cores. What is killed or has left is started anew; the server that forks replicas has imported
what they need, and loaded the kernels. With ``--lab``, each replica is a host of an emulated network. A run that was
ended goes on by the same command: rows that the file has are not measured again.

- kill: SIGKILL; a new replica is started.
- stop: SIGSTOP, and SIGCONT after ``--stop-s``.
- cut: all connections of the replica break at once, while it lives on.
- leave: the replica leaves by its own word; a new one is started.
- corrupt: one bit of what the replica receives in a round flips.

Throughput is that of replicas times rounds that counted, as a share of the undisturbed one, which had all replicas all
the time. So it includes what a replica that is away does not compute. The share of the time of replicas that the trial
itself took away, whatever the members do, is *away*: seconds for which replicas were stopped, and from the end of a
process until its successor runs. A replica is in again when it has taken a round. Digests of parameters are compared
over replicas after every round. No round for ``HANG_S`` is a hang.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import os
import random
import signal
import socket
import sys
import threading
import time
import zlib
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.runs import earlier, write
from benchmarks.trials.loaded import preload
from gradwire.exchange.drivers.transports.gloo import GlooTransport
from gradwire.link.membership import serving_link
from gradwire.tools.lab import INTERFACE, Network, Topology, open_network
from gradwire.tools.processes import enter_namespace

KINDS = ("kill", "stop", "cut", "leave", "corrupt")
METHODS = ("terngrad", "PowerSGD(matrix_rank=2)", "DiLoCo(every=8, inner=EDEN(bits=4))")
WIDTH, BATCH = 64, 8
SMALL = {"width": WIDTH, "momentum": 0.0, "large_bytes": serving_link.LARGE_BYTES}
"""The network of this trial; that of others may have more state."""

HANG_S, START_S, WARM_S, REST_S = 60.0, 300.0, 5.0, 10.0


def network(width: int) -> nn.Sequential:
    """Build four layers."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))


def spoil_next(armed: threading.Event) -> None:
    """Flip one bit of the next rows that this process receives after ``armed`` is set."""
    usual = GlooTransport.execute

    def execute(self: GlooTransport, *args: Any, **more: Any) -> torch.Tensor:
        reply = usual(self, *args, **more)
        if armed.is_set() and reply.dtype == torch.uint8 and reply.numel() > 256:
            armed.clear()
            reply = reply.clone()
            reply.view(-1)[reply.numel() // 2] ^= 1
        return reply

    GlooTransport.execute = execute  # type: ignore[method-assign]


def cut_off() -> None:
    """Break all TCP connections of this process."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as held:
                    if held.family in (socket.AF_INET, socket.AF_INET6):
                        held.getpeername()  # raises for sockets that listen
                        held.shutdown(socket.SHUT_RDWR)


def move(namespace: str | None) -> None:
    """Move this process to a host of an emulated network."""
    if namespace is not None:
        enter_namespace(namespace)
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


def keep(namespace: str | None, listen: str, pipe: Connection) -> None:
    """Coordinate, on a host of an emulated network."""
    move(namespace)
    coordinator = gw.Coordinator(listen)
    pipe.send((coordinator.port, coordinator.secret))
    coordinator.serve()


def replica(
    address: str, secret: str, name: str, spec: str, least: int, given: argparse.Namespace, namespace: str | None,
    pipe: Connection, orders: Connection,
) -> None:  # fmt: skip
    """Train until told to leave, and tell every round that counted."""
    pipe.send(None)
    move(namespace)
    torch.set_num_threads(1)
    torch.manual_seed(zlib.crc32(name.encode()))
    module, armed = network(given.width), threading.Event()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=given.momentum)
    serving_link.LARGE_BYTES = given.large_bytes
    membership = gw.join(address, secret=secret, name=name, least=least, silence_s=given.silence_s)
    spoil_next(armed)

    def obey() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                order = orders.recv()
                if order == "cut":
                    cut_off()
                elif order == "corrupt":
                    armed.set()
                elif order == "leave":
                    membership.leave()

    threading.Thread(target=obey, daemon=True).start()
    with membership:
        sampler = gw.ElasticSampler(1 << 20, membership, BATCH)
        link = gw.Link(module.named_parameters(), spec, group=membership, optimizer=optimizer, min_numel=0)
        local = bool(link.method.traits.local_steps)
        while not membership.left:
            batch = sampler.draw() or [0]
            draw, before = torch.Generator().manual_seed(batch[0]), link.round
            optimizer.zero_grad()
            module(torch.randn(BATCH, given.width, generator=draw)).square().mean().backward()
            time.sleep(given.compute_s)
            try:
                if not local:
                    link.reduce_()
            except gw.LeftOutError:
                continue
            optimizer.step()
            if link.round > before:
                with link.global_parameters() if local else contextlib.nullcontext():
                    flat = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
                told = link.diagnostics()["membership"]
                pipe.send((link.round, zlib.crc32(flat.numpy().data), membership.world_size, told))


class Trial:
    """Replicas of one method, and what they told."""

    def __init__(self, spec: str, given: argparse.Namespace, network: Network | None = None) -> None:
        self.spec, self._given, self._network = spec, given, network
        self._context = multiprocessing.get_context("forkserver")
        told, tells = self._context.Pipe()
        self._host = "127.0.0.1" if network is None else network.address(0)
        words = (None if network is None else network.namespace_path(0), f"{self._host}:0", tells)
        self._coordinator = self._context.Process(target=keep, args=words, daemon=True)
        self._coordinator.start()
        self._port, self._secret = told.recv()
        self._processes: dict[str, Any] = {}
        self._pipes: dict[Connection, str] = {}
        self._orders: dict[str, Connection] = {}
        self.started: dict[str, float] = {}
        self.began_s = time.monotonic()
        self.counted: dict[int, tuple[float, int]] = {}
        self.digests: dict[int, set[int]] = {}
        self.compared = 0
        self.rejoined: list[float] = []
        self.stopped: set[str] = set()
        self.away_s = 0.0
        self._places: dict[str, int] = {}
        self.told: dict[str, dict[str, int]] = {}
        self._number = 0
        for place in range(given.replicas):
            self.start(place, given.replicas)

    def start(self, place: int, least: int = 1) -> None:
        """Start a replica, on the host at a place."""
        name = f"replica-{self._number}"
        self._number += 1
        self._places[name] = place
        (ours, theirs), (told, orders) = self._context.Pipe(), self._context.Pipe()
        space = None if self._network is None else self._network.namespace_path(1 + place)
        words = (f"{self._host}:{self._port}", self._secret, name, self.spec, least, self._given, space)
        process = self._context.Process(target=replica, args=(*words, theirs, orders), daemon=True)
        process.start()
        theirs.close()
        orders.close()
        self._processes[name], self._pipes[ours], self._orders[name] = process, name, told
        self.started[name] = time.monotonic()

    def read(self, seconds: float) -> None:
        """Read what replicas tell for some time.

        Raises:
            SystemExit: nothing has counted for :data:`HANG_S`.
        """
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            for pipe in wait(list(self._pipes), timeout=left_s):
                self._take(pipe)  # type: ignore[arg-type]
            latest_s = max((at for at, _ in self.counted.values()), default=self.began_s)
            if time.monotonic() - latest_s > (HANG_S if self.counted else START_S):
                raise SystemExit(f"{self.spec}: no round counted for {HANG_S:.0f} s")

    def _take(self, pipe: Connection) -> None:
        name, now_s = self._pipes[pipe], time.monotonic()
        try:
            said = pipe.recv()
        except (EOFError, OSError):
            del self._pipes[pipe]
            self._processes.pop(name).join()
            self._orders.pop(name)
            self.start(self._places.pop(name))
            return
        if said is None:
            # It runs: what follows is gradwire's time.
            self.away_s += now_s - self.started.get(name, now_s)
            return
        round, digest, members, told = said
        self.told[name] = told
        self.counted.setdefault(round, (now_s, members))
        self.compared += round in self.digests
        self.digests.setdefault(round, set()).add(digest)
        if name in self.started:
            self.rejoined.append(now_s - self.started.pop(name))

    def fault(self, kind: str, draw: random.Random, stop_s: float) -> None:
        """Disturb a replica that takes part."""
        able = [name for name in self._processes if name not in self.started and name not in self.stopped]
        if not able:
            return
        name = draw.choice(able)
        process = self._processes[name]
        if kind == "kill":
            process.kill()
        elif kind == "stop":
            os.kill(process.pid, signal.SIGSTOP)
            self.stopped.add(name)
            self.away_s += stop_s

            def go_on() -> None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGCONT)
                self.stopped.discard(name)
                self.started[name] = time.monotonic()

            threading.Timer(stop_s, go_on).start()
        else:
            with contextlib.suppress(OSError):
                self._orders[name].send(kind)

    def rate(self, since_s: float) -> tuple[float, float]:
        """Return rounds a second, and replicas times rounds a second, since a time."""
        found = [(at, members) for at, members in self.counted.values() if at >= since_s]
        seconds = max(at for at, _ in found) - since_s
        return len(found) / seconds, sum(members for _, members in found) / seconds

    def close(self) -> None:
        """End everything."""
        for process in (*self._processes.values(), self._coordinator):
            process.kill()
            process.join()


def tried(spec: str, given: argparse.Namespace, seed: int, network: Network | None = None) -> dict[str, Any]:
    """Try one method; return its row."""
    draw = random.Random(f"{seed} {spec}")
    trial = Trial(spec, given, network)
    faults: dict[str, int] = {}
    log: list[tuple[float, str]] = []
    try:
        while trial.started or not trial.counted:
            trial.read(0.5)
        trial.read(WARM_S)
        began_s = time.monotonic()
        trial.read(given.quiet_s)
        quiet = trial.rate(began_s)
        trial.rejoined.clear()
        trial.away_s = 0.0
        began_s = time.monotonic()
        known = len(trial.counted)
        while time.monotonic() - began_s < 60 * given.minutes:
            trial.read(given.every_s)
            kind = KINDS[sum(faults.values()) % len(KINDS)]
            log.append((time.monotonic(), kind))
            trial.fault(kind, draw, given.stop_s)
            faults[kind] = faults.get(kind, 0) + 1
        trial.read(max(REST_S, given.stop_s + 5))
        disturbed = trial.rate(began_s)
        times = sorted(at for at, _ in trial.counted.values() if at >= began_s)
        longest = max(b - a for a, b in itertools.pairwise(times))
        pauses: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for at, kind in log:
            gaps = [b - a for a, b in itertools.pairwise(times) if at <= b and a < at + given.every_s]
            pauses[kind].append(sum(gap - 1 / quiet[0] for gap in gaps if gap > 1.5 / quiet[0]))
    finally:
        trial.close()
    differing = sum(len(found) > 1 for found in trial.digests.values())
    away = trial.away_s / (given.replicas * (times[-1] - began_s))
    return {
        "method": spec,
        "seed": seed,
        "lab": given.lab or "",
        "replicas": given.replicas,
        "compute_s": given.compute_s,
        "every_s": given.every_s,
        "stop_s": given.stop_s,
        "silence_s": given.silence_s,
        "seconds": round(times[-1] - began_s, 1),
        "faults": sum(faults.values()),
        **{f"faults_{kind}": faults.get(kind, 0) for kind in KINDS},
        "rounds": len(trial.counted) - known,
        "undisturbed_rounds_per_s": round(quiet[0], 3),
        "rounds_per_s": round(disturbed[0], 3),
        "rounds_kept": round(disturbed[0] / quiet[0], 4),
        "throughput_kept": round(disturbed[1] / quiet[1], 4),
        "away": round(away, 4),
        "kept_of_present": round(disturbed[1] / quiet[1] / (1 - away), 4),
        "longest_pause_s": round(longest, 2),
        **{f"lost_s_{kind}": round(median(found), 2) for kind, found in pauses.items() if found},
        "lost_s_most": round(max(max(found) for found in pauses.values() if found), 2),
        "rejoined": len(trial.rejoined),
        "rejoin_s_median": round(median(trial.rejoined), 2) if trial.rejoined else None,
        "rejoin_s_longest": round(max(trial.rejoined), 2) if trial.rejoined else None,
        "digests_compared": trial.compared,
        "rounds_with_differing_digests": differing,
        "hangs": 0,
    }


def main() -> int:
    """Try all methods; exit with 1 where digests differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="of disturbance under each method")
    parser.add_argument("--every-s", type=float, default=30.0, help="seconds between two faults")
    parser.add_argument("--quiet-s", type=float, default=60.0, help="seconds without a fault at first")
    parser.add_argument("--stop-s", type=float, default=10.0)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--compute-s", type=float, default=0.25, help="slept in each step")
    parser.add_argument("--silence-s", type=float, default=2.0, help="see gradwire.join; its default is 5")
    parser.add_argument("--method", action="append")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="each is a run of so many minutes")
    parser.add_argument("--lab", help="an emulated network, such as bandwidth=100mbit,delay=20ms")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(namespace=argparse.Namespace(**SMALL))
    methods = given.method or METHODS
    preload(methods)
    rows = earlier(given.json, "rows")
    known = {(row["method"], row["seed"], row.get("lab", "")) for row in rows}
    with contextlib.ExitStack() as stack:
        network = None
        if given.lab:
            topology = Topology.parse(f"hosts={given.replicas + 1},{given.lab}")
            network = stack.enter_context(open_network(topology))
        for seed, spec in itertools.product(given.seeds, methods):
            if (spec, seed, given.lab or "") in known:
                continue
            rows.append(tried(spec, given, seed, network))
            print(rows[-1], flush=True)
            write(given.json, rows=rows)
    return int(any(row["rounds_with_differing_digests"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
