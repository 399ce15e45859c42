"""Strangers at the ports of a training whose workers come and go: connections, frames, records, secrets, payloads.

    python benchmarks/trials/strangers.py --attempts 100000 --json benchmarks/results/trials/trials_strangers.json

``gradwire coordinate`` and three workers run as processes of their own. Somebody without the secret, who reaches all
their ports, reads the whole store and knows all formats, attacks them in each of the ways below, by numbers drawn from
the seed and the attempt; one attempt in a thousand alters a payload on its way from a worker, with a checksum that
fits. Nothing may be taken: the members stay the same three, and after every round they hold the same bits as an
undisturbed training holds after that round. Memory and open files of all processes are recorded.

A run that was stopped goes on where its file ends. What a stranger can do to torch's store and to Gloo all the same is
measured apart: see :func:`harm`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.runs import earlier, write
from gradwire.exchange.drivers.transports.gloo import GlooTransport
from gradwire.exchange.wire import HEADER_BYTES, pretend_senders
from gradwire.link.membership.records import Epoch, EpochReport, Member, Request, RunRecord, Seal
from gradwire.link.peers.addresses import Address
from gradwire.link.peers.connections import _HELLO, _MAGIC

__all__ = ["WAYS", "Siege", "Sight", "judged"]

NAMES = ("a", "b", "c")
NUMEL, COMPUTE_S, TELL_S = 20_000, 0.01, 0.3
HELD_OPEN, LOOK_EVERY, REFERENCE_ROUNDS = 100, 250, 2000
WAIT_S = 120.0
VALIDATE = b"\0" + struct.pack("<I", 0x3C85F7CE)
SET, COMPARE_SET, GET, ADD, CHECK, WAIT, DELETE, APPEND, MULTI_GET = 1, 2, 3, 4, 5, 6, 8, 9, 10


# ---------------------------------------------------------------------- the workers


def alter_when(armed: threading.Event) -> None:
    """Stand on the way of what this process sends: alter the next payload, with a checksum that fits."""
    usual = GlooTransport._send

    def send(self: GlooTransport, row: torch.Tensor, to: int, slot: Any) -> Any:
        payload = row.dtype == torch.uint8 and row.numel() > HEADER_BYTES and row[:2].tolist() == list(b"GW")
        if payload and armed.is_set():
            armed.clear()
            row = row.clone()
            row[-1 - row.numel() // 4] ^= 0x55
            pretend_senders(row[None], first=self.rank)
        return usual(self, row, to, slot)

    GlooTransport._send = send  # type: ignore[method-assign]


def worker(address: str, secret: str, name: str, pipe: Connection, rounds: int | None, compute_s: float) -> None:
    """Train until told to end or until a round, and tell the digest of the parameters after each round."""
    torch.set_num_threads(1)
    armed, parameter = threading.Event(), torch.nn.Parameter(torch.zeros(NUMEL))
    ended = threading.Event()
    alter_when(armed)

    def obey() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                armed.set() if pipe.recv() == "alter" else ended.set()

    threading.Thread(target=obey, daemon=True).start()
    times = {"silence_s": 60.0, "grace_s": 10.0}
    digests: dict[int, int] = {}
    with gw.join(address, secret=secret, name=name, least=len(NAMES), **times) as membership:
        link = gw.Link([("w", parameter)], "terngrad", group=membership, min_numel=0)
        told_s = 0.0
        while not ended.is_set() and (rounds is None or link.round < rounds):
            draw = torch.Generator().manual_seed(10 * link.round + membership.rank)
            parameter.grad = torch.randn(NUMEL, generator=draw)
            with contextlib.suppress(gw.LeftOutError):
                link.reduce_()
                with torch.no_grad():
                    parameter.add_(parameter.grad, alpha=-0.1)
                digests[link.round] = zlib.crc32(parameter.detach().numpy().data)
            if time.monotonic() - told_s > TELL_S:
                told = {**link.diagnostics()["membership"], "names": sorted(membership.members)}
                pipe.send((digests, told))
                digests, told_s = {}, time.monotonic()
            time.sleep(compute_s)
        pipe.send((digests, {**link.diagnostics()["membership"], "names": sorted(membership.members)}))


class Siege:
    """A coordinator and three workers as processes, and what they told.

    Args:
        rounds: Rounds after which workers end; None: when they are told to.
        compute_s: Time slept in each step.
    """

    def __init__(self, rounds: int | None = None, compute_s: float = COMPUTE_S) -> None:
        command = [sys.executable, "-m", "gradwire", "coordinate", "--listen", "127.0.0.1:0", "--json"]
        # The store tells every malformed frame, with a trace of the stack.
        self.coordinator = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        text = ""
        while not text.endswith("]\n"):
            line = self.coordinator.stdout.readline() if self.coordinator.stdout else ""
            if not line:
                raise SystemExit("the coordinator did not start")
            text += line
        (found,) = json.loads(text)
        self.port, self.secret = found["port"], found["secret"]
        context = multiprocessing.get_context("forkserver")
        self.pipes: dict[str, Connection] = {}
        self.processes: dict[str, Any] = {}
        self.told: dict[str, dict[str, Any]] = {}
        self.latest = dict.fromkeys(NAMES, 0)
        self.digests: dict[int, set[int]] = {}
        for name in NAMES:
            ours, theirs = context.Pipe()
            words = (f"127.0.0.1:{self.port}", self.secret, name, theirs, rounds, compute_s)
            self.processes[name] = context.Process(target=worker, args=words, daemon=True)
            self.processes[name].start()
            theirs.close()
            self.pipes[name] = ours

    @property
    def round(self) -> int:
        """The latest round of which all have told."""
        return min(self.latest.values())

    def hear(self) -> None:
        """Read what the workers have told."""
        for name, pipe in self.pipes.items():
            with contextlib.suppress(EOFError, OSError):
                while pipe.poll():
                    digests, self.told[name] = pipe.recv()
                    self.latest[name] = max(digests, default=self.latest[name])
                    for round, digest in digests.items():
                        self.digests.setdefault(round, set()).add(digest)

    def reach(self, round: int) -> None:
        """Wait until a round has been taken."""
        end_s = time.monotonic() + WAIT_S
        while self.round < round:
            self.hear()
            if time.monotonic() > end_s:
                raise SystemExit(f"the training stands still after round {self.round}")
            time.sleep(0.05)

    def pids(self) -> dict[str, int]:
        """Return the numbers of the processes."""
        return {"coordinator": self.coordinator.pid, **{name: p.pid for name, p in self.processes.items()}}

    def ports(self) -> list[int]:
        """Return the ports at which workers listen."""
        return sorted(port for p in self.processes.values() for port in listening(p.pid))

    def close(self) -> None:
        """End all processes."""
        for process in self.processes.values():
            process.kill()
            process.join()
        self.coordinator.kill()
        self.coordinator.wait()


def listening(pid: int) -> set[int]:
    """Return the ports at which a process listens."""
    held = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                held.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in held:
                found.add(int(words[1].rpartition(":")[2], 16))
    return found


def held(pid: int) -> dict[str, int]:
    """Return the memory and the open files of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return {"rss_bytes": pages * os.sysconf("SC_PAGE_SIZE"), "files": len(os.listdir(f"/proc/{pid}/fd"))}


# ---------------------------------------------------------------------- the strangers


@dataclass
class Sight:
    """What a stranger sees: ports, the keys and values of the store, and connections that it holds open."""

    siege: Siege
    ports: list[int] = field(default_factory=list)
    values: dict[str, bytes] = field(default_factory=dict)
    open: deque[socket.socket] = field(default_factory=deque)

    def look(self) -> None:
        """Look again."""
        self.ports = self.siege.ports()
        store = dist.TCPStore(
            "127.0.0.1", self.siege.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30)
        )
        kinds = ("run", "ask", "epoch", "named", "report")
        keys = [key for key in store.list_keys() if key.startswith(kinds) or "/peers/" in key]
        # The coordinator removes keys meanwhile, of old epochs for example.
        store.set_timeout(timedelta(seconds=1))
        self.values = {}
        for key in keys:
            with contextlib.suppress(dist.DistError):
                if store.check([key]):
                    self.values[key] = bytes(store.get(key))

    def epoch(self) -> int:
        """Return the number of the latest epoch in the store."""
        numbers = [k.partition("/")[2] for k in self.values if k.startswith("epoch/")]
        return max((int(n) for n in numbers if n.isdecimal()), default=1)

    def send(self, port: int, *parts: bytes, hold: bool = False, answer: bool = False) -> None:
        """Connect, send parts, and hang up, or hold the connection open."""
        made = socket.create_connection(("127.0.0.1", port), 10)
        with contextlib.suppress(OSError):
            made.settimeout(0.2 if answer else 10)
            for part in parts:
                made.sendall(part)
            if answer:
                made.recv(64)
        if hold:
            self.open.append(made)
            while len(self.open) > HELD_OPEN:
                self.open.popleft().close()
        else:
            made.close()

    def write(self, key: str, value: bytes) -> None:
        """Write a value at a key of the store."""
        self.send(self.siege.port, VALIDATE, bytes([SET]), text(f"/{key}"), text(value))


def text(value: str | bytes) -> bytes:
    """Return a string as the store's protocol has it."""
    octets = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(octets)) + octets


def noise(draw: random.Random, sight: Sight) -> None:
    """Send random bytes to any port."""
    sight.send(draw.choice([sight.siege.port, *sight.ports]), draw.randbytes(draw.randrange(1, 4000)))


def half_open(draw: random.Random, sight: Sight) -> None:
    """Connect to any port, send nothing or the start of something, and stay."""
    start = draw.choice([b"", VALIDATE[:3], VALIDATE, VALIDATE + bytes([SET, 9]), _MAGIC, bytes(4), bytes(60)])
    sight.send(draw.choice([sight.siege.port, *sight.ports]), start, hold=True)


def truncated(draw: random.Random, sight: Sight) -> None:
    """Begin a command of the store, and hang up in the middle."""
    whole = VALIDATE + bytes([SET]) + text(f"/epoch/{sight.epoch() + 1}") + text(draw.randbytes(300))
    sight.send(sight.siege.port, whole[: draw.randrange(1, len(whole))])


def giant(draw: random.Random, sight: Sight) -> None:
    """Announce a length that nobody has memory for, to any port."""
    size = struct.pack("<Q", draw.choice([1 << 32, 1 << 40, 1 << 62, (1 << 64) - 1]))
    command = draw.choice([SET, COMPARE_SET, GET, ADD, CHECK, WAIT, APPEND, MULTI_GET, 200])
    frame = VALIDATE + bytes([command]) + size
    port = draw.choice([sight.siege.port, *sight.ports])
    sight.send(port, frame if port == sight.siege.port else draw.choice([size, bytes(8), b""]) + size * 8)


def forged(draw: random.Random, sight: Sight) -> None:
    """Write a record of the right form with a digest that was guessed, or bytes of no form, at a key of members."""
    number = sight.epoch() + draw.choice([0, 1, 1, 2, 9])
    record, key = draw.choice(records(draw, sight, number))
    value = draw.choice([Seal(draw.randbytes(16).hex()).close(key, record).encode(), draw.randbytes(500), b"", b"{}"])
    sight.write(key, value)


def wrong_secret(draw: random.Random, sight: Sight) -> None:
    """Write records under another secret, in this run's name, which the stranger has read."""
    run = draw.randbytes(8).hex()
    with contextlib.suppress(ValueError, KeyError):
        run = json.loads(sight.values["run"][64:])["id"]
    record, key = draw.choice(records(draw, sight, sight.epoch() + 1))
    sight.write(key, Seal("not the secret of the run", run).close(key, record).encode())


def replayed(draw: random.Random, sight: Sight) -> None:
    """Write what members wrote at another key, in another epoch, or in another run with the same secret."""
    own = [key for key in sight.values if key.partition("/")[0] in ("epoch", "report", "named", "ask", "run")]
    source = draw.choice(own)
    number = sight.epoch() + 1
    if draw.random() < 0.5:
        record, key = draw.choice(records(draw, sight, number))
        # A coordinator that somebody started elsewhere with this secret would be a run of its own.
        sight.write(key, Seal(sight.siege.secret, draw.randbytes(8).hex()).close(key, record).encode())
    else:
        sight.write(draw.choice([f"epoch/{number}", f"named/{draw.randbytes(8).hex()}", "ask/1"]), sight.values[source])


def records(draw: random.Random, sight: Sight, number: int) -> list[tuple[Any, str]]:
    """Return records that would bring a stranger in, or members apart, with their keys."""
    stranger = Member(draw.randbytes(8).hex(), "stranger")
    ids = [key.rpartition("/")[2] for key in sight.values if key.startswith("named/")] or [stranger.id]
    other = draw.choice(ids)
    return [
        (Epoch(number, (stranger,), (), 1 << 20), f"epoch/{number}"),
        (Epoch(number, (stranger, Member(other, "a")), (stranger.id,)), f"epoch/{number}"),
        (EpochReport(max(1, number - 1), other, 0, True, True), f"report/{max(1, number - 1)}/{other}"),
        (Request(stranger, "0" * 64, draw.randrange(1000)), f"ask/{draw.randrange(1, 40)}"),
        (Epoch(number, (stranger,), (stranger.id,)), f"named/{stranger.id}"),
        (RunRecord(draw.randbytes(8).hex()), "run"),
    ]


def counters(draw: random.Random, sight: Sight) -> None:
    """Count up requests that nobody writes, or write where no member reads."""
    if draw.random() < 0.1:
        sight.send(sight.siege.port, VALIDATE, bytes([ADD]), text("/asks"), struct.pack("<q", 1))
    else:
        sight.write(f"{draw.randbytes(3).hex()}/{draw.randrange(1 << 20)}", draw.randbytes(2000))


def pretender(draw: random.Random, sight: Sight) -> None:
    """Say at a member's port that one is another member, with all that the store tells."""
    told = [value for key, value in sight.values.items() if "/peers/" in key]
    if not told:
        return noise(draw, sight)
    address = Address.read(draw.choice(told))
    hello = _HELLO.pack(_MAGIC, draw.randrange(1, 4))
    proof = draw.choice([address.proof(hello), address.proof(hello, b"a key"), draw.randbytes(32), b""])
    return sight.send(address.port, hello + proof, draw.randbytes(draw.randrange(200)))


def joins(draw: random.Random, sight: Sight) -> None:
    """Join with another secret."""
    with contextlib.suppress(gw.IncompatibleError):
        gw.join(f"127.0.0.1:{sight.siege.port}", secret=draw.randbytes(16).hex(), signals=())
        raise SystemExit("a stranger joined with another secret")


def alters(draw: random.Random, sight: Sight) -> None:
    """Alter the next payload of a worker on its way."""
    sight.siege.pipes[draw.choice(NAMES)].send("alter")


WAYS: tuple[Callable[[random.Random, Sight], None], ...] = (
    noise, half_open, truncated, giant, forged, wrong_secret, replayed, counters, pretender,
)  # fmt: skip
RARE: dict[Callable[[random.Random, Sight], None], int] = {joins: 100, alters: 1000}
"""Ways that take long, each once in so many attempts."""


def way_of(number: int) -> Callable[[random.Random, Sight], None]:
    """Return the way of an attempt."""
    rare = [way for way, every in RARE.items() if number % every == every // 2]
    return rare[0] if rare else WAYS[number % len(WAYS)]


def attempts(siege: Siege, seed: int, first: int, last: int) -> Iterator[tuple[int, str]]:
    """Attack; yield the number of each attempt and its way."""
    sight = Sight(siege)
    for number in range(first, last):
        if (number - first) % LOOK_EVERY == 0:
            sight.look()
            siege.hear()
        way = way_of(number)
        with contextlib.suppress(OSError):
            way(random.Random(f"{seed} {number}"), sight)
        yield number, way.__name__
    for made in sight.open:
        made.close()


def judged(siege: Siege, reference: dict[int, int]) -> dict[str, Any]:
    """Return what came of an attack: all must be 0 but the numbers of rounds, refusals and epochs."""
    counts = siege.told
    strangers = {name for told in counts.values() for name in told["names"]} - set(NAMES)
    same = [round for round, found in siege.digests.items() if round in reference]
    return {
        "rounds": siege.round,
        "strangers_named": len(strangers),
        "members_missing": sum(len(told["names"]) != len(NAMES) for told in counts.values()),
        "members_joined": sum(told["joined"] for told in counts.values()),
        "members_lost": sum(told["lost"] for told in counts.values()),
        "left_out": sum(told["left_out"] for told in counts.values()),
        "rounds_with_differing_digests": sum(len(found) > 1 for found in siege.digests.values()),
        "rounds_compared_with_an_undisturbed_training": len(same),
        "rounds_unlike_an_undisturbed_training": sum(siege.digests[r] != {reference[r]} for r in same),
        "payloads_refused": sum(told["payloads_refused"] for told in counts.values()),
        "epochs": max((told["epoch"] for told in counts.values()), default=0),
    }


def undisturbed(rounds: int) -> dict[int, int]:
    """Return the digest after each round of a training that nobody attacks."""
    siege = Siege(rounds, compute_s=0.0)
    try:
        siege.reach(rounds)
        return {round: next(iter(found)) for round, found in siege.digests.items() if len(found) == 1}
    finally:
        siege.close()


# ---------------------------------------------------------------------- what torch cannot withstand


def harm() -> list[dict[str, Any]]:
    """Measure what anybody who reaches the ports can do to torch's store and to Gloo, while members train."""
    siege = Siege()
    rows = []
    try:
        siege.reach(20)
        for name, what in HARMS.items():
            siege.hear()
            round, began = siege.round, time.monotonic()
            before = {who: held(pid) for who, pid in siege.pids().items()}
            what(siege)
            time.sleep(5)
            siege.hear()
            rows.append({
                "what": name,
                "before": before,
                "after": {who: held(pid) for who, pid in siege.pids().items()},
                "rounds_meanwhile": siege.round - round,
                "seconds": round_to(time.monotonic() - began),
                "coordinator_lives": siege.coordinator.poll() is None,
            })  # fmt: skip
    finally:
        siege.close()
    return rows


def round_to(seconds: float) -> float:
    """Return seconds with one digit."""
    return round(seconds, 1)


def flood_keys(siege: Siege) -> None:
    """Write many keys."""
    with socket.create_connection(("127.0.0.1", siege.port), 10) as made:
        made.sendall(VALIDATE)
        made.sendall(b"".join(bytes([SET]) + text(f"/x{i}") + text(b"v") for i in range(100_000)))
        made.sendall(bytes([GET]) + text("/run"))
        made.recv(8)


def flood_values(siege: Siege) -> None:
    """Write many large values under keys of members."""
    with socket.create_connection(("127.0.0.1", siege.port), 10) as made:
        made.sendall(VALIDATE)
        for number in range(40):
            made.sendall(bytes([SET]) + text(f"/links/1/{number}") + text(bytes((8 << 20) - 64)))
        made.sendall(bytes([GET]) + text("/run"))
        made.recv(8)


def remove(siege: Siege) -> None:
    """Remove every key."""
    store = dist.TCPStore("127.0.0.1", siege.port, is_master=False, wait_for_workers=False)
    for key in store.list_keys():
        store.delete_key(key)


def connect(siege: Siege) -> None:
    """Connect to a Gloo port again and again, send as much as Gloo reads first, and hang up."""
    draw = random.Random(1)
    ports = sorted(listening(siege.processes["a"].pid))
    for _ in range(2000):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", draw.choice(ports)), 10) as made:
            made.sendall(draw.randbytes(8))


HARMS: dict[str, Callable[[Siege], None]] = {
    "2,000 connections to Gloo's ports": connect,
    "100,000 keys": flood_keys,
    "40 values of 8 MB": flood_values,
    "removal of all keys": remove,
}


def main() -> int:
    """Attack, and judge; exit with 1 where something was taken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attempts", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", type=int, default=50_000, help="attempts on one training; then another is begun")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    multiprocessing.set_start_method("forkserver")
    multiprocessing.set_forkserver_preload(["gradwire", "gradwire.kernels", "numba"])
    gw.warm_up("terngrad")
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    reference = undisturbed(REFERENCE_ROUNDS)
    parts = earlier(given.json, "parts")
    done = sum(part["attempts"] for part in parts)
    harmed = earlier(given.json, "harm") or harm()
    while done < given.attempts:
        siege, ways, samples = Siege(), Counter[str](), []
        last, began = min(done + given.part, given.attempts), time.monotonic()
        try:
            siege.reach(20)
            for number, way in attempts(siege, given.seed, done, last):
                ways[way] += 1
                if (number - done) % max(1, (last - done) // 20) == 0 or number == last - 1:
                    now = {name: held(pid) for name, pid in siege.pids().items()}
                    samples.append({"attempts": number - done, "seconds": round_to(time.monotonic() - began), **now})
            siege.reach(siege.round + 20)
            # Before workers end, one after the other: those that are left would go on as two.
            found = judged(siege, reference)
        finally:
            siege.close()
        seconds = round_to(time.monotonic() - began)
        part = {"attempts": last - done, "seconds": seconds, "ways": dict(ways), **found}
        print(part, flush=True)
        parts.append({**part, "samples": samples})
        done = last
        write(given.json, attempts=done, seed=given.seed, parts=parts, harm=harmed)
    print(*harmed, sep="\n")
    wrong = [
        name for name in parts[0] if name.startswith(("strangers", "members_joined", "rounds_unlike", "rounds_with"))
    ]
    return int(any(part[name] for part in parts for name in wrong))


if __name__ == "__main__":
    sys.exit(main())
