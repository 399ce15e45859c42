"""The network of an emulated cluster: build its namespaces, links and limits, read its counters, and remove it.

Every lab holds a lock on a file of its name while its process lives, and the kernel releases the lock however the
process ends. So a lab whose lock can be taken is dead, and is removed when another one starts.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from gradwire.errors import BackendError, GradwireError
from gradwire.tools.lab.topology import Rate, Topology
from gradwire.tools.processes import termination_unwinds

FOLDER = Path("/run/gradwire-labs")
"""Folder in which each living lab holds a lock on a file of its name."""

INTERFACE = "eth0"
"""Name of every host's interface, in its own namespace."""

UPLINK = "uplink"
"""Name of the interface of a group's switch to the others. "up" would be a keyword of iproute2."""

HEADER_BYTES = 66
"""Bytes of a packet's headers: Ethernet 14, IPv4 20, TCP with time stamps 32."""

BURST_S = 1e-3
LEAST_BURST_BYTES = 16_384
QUEUE_S = 0.05
"""Token bucket: a burst of one millisecond at the rate, and a queue of 50 milliseconds."""

KILL_S = 10.0


class Claim:
    """This process's claim to the name of a lab.

    Attributes:
        name: Unique among the labs of this machine.
    """

    def __init__(self, folder: Path = FOLDER) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            self.name = f"gw{secrets.token_hex(3)}"
            self.path = folder / self.name
            try:
                # Python opens files so that children do not inherit them: only this process holds the lock.
                self._file: IO[str] = self.path.open("x")
            except FileExistsError:
                continue
            fcntl.flock(self._file, fcntl.LOCK_EX)
            # Another lab that started between creation and lock may have removed the file as a dead lab's.
            if self.path.exists():
                return
            self._file.close()

    def release(self) -> None:
        """Give up the name, once nothing of the lab is left."""
        self.path.unlink(missing_ok=True)
        self._file.close()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Try to take a lab's lock; yield whether its process is gone."""
    try:
        handle = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        yield False
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(handle)


def dead_labs(folder: Path = FOLDER) -> Iterator[str]:
    """Yield the name of each lab whose process is gone; its file is removed when the caller asks for the next.

    The lock is held until then, so that two starting labs do not remove the same one.
    """
    for path in sorted(folder.glob("gw*")) if folder.is_dir() else ():
        with _locked(path) as gone:
            if gone:
                yield path.name
                path.unlink(missing_ok=True)


class LabError(GradwireError):
    """The emulated cluster cannot be built here, or a command on it failed; the message says what to do."""


@dataclass(frozen=True)
class Counters:
    """Counters of a host's interface since it was made."""

    sent_bytes: int
    sent_packets: int
    received_bytes: int
    received_packets: int

    @property
    def sent_payload_bytes(self) -> int:
        """Bytes sent, without the headers of packets."""
        return self.sent_bytes - HEADER_BYTES * self.sent_packets

    @property
    def received_payload_bytes(self) -> int:
        """Bytes received, without the headers of packets."""
        return self.received_bytes - HEADER_BYTES * self.received_packets

    def since(self, before: Counters) -> Counters:
        """Return the difference to earlier counters."""
        return Counters(
            self.sent_bytes - before.sent_bytes,
            self.sent_packets - before.sent_packets,
            self.received_bytes - before.received_bytes,
            self.received_packets - before.received_packets,
        )


def missing() -> str | None:
    """Return why no lab can be built here, with the remedy; None if one can be built."""
    if sys.platform != "linux":
        return f"an emulated cluster needs Linux's network namespaces, and this is {sys.platform}: use a Linux machine"
    tools = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if tools:
        return f"{' and '.join(tools)} not found: apt-get install iproute2"
    if os.geteuid() != 0:
        return "an emulated cluster needs root to make network namespaces: run the command with sudo"
    return None


class Network:
    """The namespaces of one lab. Use :func:`open_network`.

    Attributes:
        name: Prefix of every namespace.
        topology: The current topology.
    """

    def __init__(self, name: str, topology: Topology) -> None:
        self.name, self.topology = name, topology

    def namespace(self, host: int) -> str:
        """Return the namespace of a host."""
        return f"{self.name}-h{host}"

    def address(self, host: int) -> str:
        """Return the address of a host."""
        return f"10.77.0.{host + 1}"

    def enter(self, host: int) -> list[str]:
        """Return the words to put before a command that is to run on a host."""
        return ["ip", "netns", "exec", self.namespace(host)]

    def namespace_path(self, host: int) -> str:
        """Return the path of a host's namespace, for processes that enter it themselves."""
        return f"/run/netns/{self.namespace(host)}"

    def _switch(self, group: int) -> str:
        return f"{self.name}-s{group}"

    def build(self) -> None:
        """Make the namespaces, links and limits.

        Raises:
            LabError: the kernel refused; :func:`remove` takes away what was made so far.
        """
        t = self.topology
        spaces = [self.namespace(h) for h in range(t.hosts)] + [self._switch(g) for g in range(t.groups)]
        core = f"{self.name}-c"
        if t.groups > 1:
            spaces.append(core)
        _ip([f"netns add {space}" for space in spaces])
        pairs = [(self.namespace(h), INTERFACE, self._switch(t.group(h)), f"h{h}") for h in range(t.hosts)]
        if t.groups > 1:
            pairs += [(self._switch(g), UPLINK, core, f"s{g}") for g in range(t.groups)]
        _ip([f"link add {a} netns {na} type veth peer name {b} netns {nb}" for na, a, nb, b in pairs])
        for host in range(t.hosts):
            lines = [f"addr add {self.address(host)}/16 dev {INTERFACE}", f"link set {INTERFACE} up", "link set lo up"]
            _ip(lines, self.namespace(host))
        switches = [self._switch(g) for g in range(t.groups)] + ([core] if t.groups > 1 else [])
        for switch in switches:
            ports = [a for na, a, _, _ in pairs if na == switch] + [b for _, _, nb, b in pairs if nb == switch]
            lines = ["link add br0 type bridge", "link set br0 up"]
            for port in ports:
                lines += [f"link set dev {port} master br0", f"link set dev {port} up"]
            _ip(lines, switch)
        self._limit_all()

    def _limit_all(self) -> None:
        t = self.topology
        for host in range(t.hosts):
            _limit(self.namespace(host), INTERFACE, t.send_rate(host), t.delay_s)
            _limit(self._switch(t.group(host)), f"h{host}", t.receive_rate(host), 0.0)
        if t.groups > 1:
            for group in range(t.groups):
                _limit(self._switch(group), UPLINK, t.between, 0.0)
                _limit(f"{self.name}-c", f"s{group}", t.between, 0.0)

    def set_bandwidth(self, rate: Rate) -> None:
        """Change the bandwidth of all hosts that have no rate of their own, also while commands run."""
        self.topology = self.topology.with_bandwidth(rate)
        self._limit_all()

    def counters(self) -> list[Counters]:
        """Read the counters of every host's interface."""
        return [_counted(self.namespace(host), INTERFACE) for host in range(self.topology.hosts)]

    def group_counters(self) -> list[Counters]:
        """Read the counters of every group's link to the others; an empty list if there is one group."""
        groups = self.topology.groups
        return [_counted(self._switch(group), UPLINK) for group in range(groups)] if groups > 1 else []


@contextlib.contextmanager
def open_network(topology: Topology) -> Iterator[Network]:
    """Build an emulated cluster for the body; afterwards, end all processes on it and remove it.

    Clusters of dead processes are removed first; those of living ones are left alone.

    Raises:
        BackendError: the platform, root or iproute2 is missing.
        LabError: the kernel refused, for instance a delay without netem.
    """
    problem = missing()
    if problem:
        raise BackendError(problem)
    # A lab that is told to end while it builds or removes leaves nothing behind, either.
    with termination_unwinds():
        for name in dead_labs():
            remove(name)
        claim = Claim()
        network = Network(claim.name, topology)
        try:
            network.build()
            yield network
        finally:
            remove(claim.name)
            claim.release()


def remove(name: str) -> None:
    """Kill all processes in the namespaces of a lab, and delete the namespaces.

    Raises:
        LabError: a process does not die, or the kernel refuses.
    """
    listed = json.loads(_run(["ip", "-j", "netns", "list"]) or "[]")
    spaces = [entry["name"] for entry in listed if entry["name"].startswith(f"{name}-")]
    deadline_s = time.monotonic() + KILL_S
    for space in spaces:
        while pids := _run(["ip", "netns", "pids", space]).split():
            if time.monotonic() > deadline_s:
                raise LabError(f"process {pids[0]} of lab {name} does not end: kill it, then ip netns del {space}")
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.01)
    _ip([f"netns del {space}" for space in spaces])


def _counted(namespace: str, interface: str) -> Counters:
    stats = json.loads(_run(["ip", "-n", namespace, "-s", "-j", "link", "show", interface]))[0]["stats64"]
    return Counters(stats["tx"]["bytes"], stats["tx"]["packets"], stats["rx"]["bytes"], stats["rx"]["packets"])


def _limit(namespace: str, interface: str, rate: Rate, delay_s: float) -> None:
    """Replace the limits on what an interface sends."""
    tc = ["tc", "-n", namespace, "qdisc"]
    target = ["dev", interface, "root"]
    # Deleting fails if nothing was set, which is the wanted state.
    subprocess.run([*tc, "del", *target], stderr=subprocess.DEVNULL, check=False)
    if delay_s:
        try:
            _run([*tc, "add", *target, "handle", "1:", "netem", "delay", f"{delay_s * 1e3:g}ms", "limit", "100000"])
        except LabError as error:
            raise LabError(
                f"this kernel has no netem, which a delay needs ({error}): leave the delay out, or load sch_netem"
            ) from None
        target = ["dev", interface, "parent", "1:"]
    if rate is not None:
        burst = max(LEAST_BURST_BYTES, int(rate / 8 * BURST_S))
        limits = ["rate", f"{rate:.0f}bit", "burst", str(burst), "latency", f"{QUEUE_S * 1e3:.0f}ms"]
        _run([*tc, "add", *target, "tbf", *limits])


def _ip(lines: Sequence[str], namespace: str | None = None) -> None:
    words = ["ip", *(["-n", namespace] if namespace else []), "-batch", "-"]
    if lines:
        _run(words, "\n".join(lines) + "\n")


def _run(words: Sequence[str], text: str | None = None) -> str:
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        told = " ".join(done.stderr.split()) or f"code {done.returncode}"
        raise LabError(f"{' '.join(words[:6])}: {told}")
    return done.stdout
