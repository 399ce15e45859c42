"""The network of an emulated cluster: build its namespaces, links and limits, read its counters, and remove it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from gradwire.errors import BackendError
from gradwire.tools.lab import iproute
from gradwire.tools.lab.impairments import UNIMPAIRED, Outage
from gradwire.tools.lab.iproute import Counters, LabError
from gradwire.tools.lab.locks import Claim, dead_labs
from gradwire.tools.lab.quantities import Rate
from gradwire.tools.lab.relay import Relay, RelayReport
from gradwire.tools.lab.topology import Topology
from gradwire.tools.processes import termination_unwinds

INTERFACE = "eth0"
"""Name of every host's interface, in its own namespace."""

UPLINK = "uplink"
"""Name of the interface of a group's switch to the others. "up" would be a keyword of iproute2."""

Emulator = Literal["veth", "netem", "relay"]
"""What moves frames between hosts: pairs of interfaces and bridges, these with netem, or :class:`Relay`."""

QUEUE_FRAMES = 10_000
"""Frames that a host may have sent and the relay not yet read."""

TCP_BYTES = 67_108_864
USUAL_RATE = 1e9
"""On impaired links TCP may take this much for a buffer, or twice what is on its way at this rate if that is more."""

KILL_S = 10.0


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
        emulator: What moves frames between hosts, once the network is built.
        relay: The relay, if it is the emulator.
    """

    def __init__(self, name: str, topology: Topology) -> None:
        self.name, self.topology = name, topology
        self.emulator: Emulator = "veth"
        self.relay: Relay | None = None
        self._moved: set[int] = set()

    def namespace(self, host: int) -> str:
        """Return the namespace of a host."""
        return f"{self.name}-h{host}"

    def address(self, host: int) -> str:
        """Return the current address of a host."""
        return f"10.77.{int(host in self._moved)}.{host + 1}"

    def change_address(self, host: int) -> None:
        """Give a host another address, as a new lease would, or its first one back; its connections end with the old.

        Raises:
            LabError: the kernel refused.
        """
        before = self.address(host)
        self._moved ^= {host}
        iproute.ip(
            [
                f"addr del {before}/16 dev {INTERFACE}",
                f"addr add {self.address(host)}/16 dev {INTERFACE}",
                # The last address of an interface takes its route and the neighbours with it.
                *self._congestion(host),
                *self._neighbours(host),
            ],
            self.namespace(host),
        )
        for other in range(self.topology.hosts):
            if other != host:
                iproute.ip(self._neighbours(other), self.namespace(other))

    def _neighbours(self, host: int) -> list[str]:
        """Return the lines that tell a host the others' hardware addresses, which the relay does not resolve."""
        if self.relay is None:
            return []
        return [
            f"neigh replace {self.address(other)} lladdr {_hardware(other)} dev {INTERFACE} nud permanent"
            for other in range(self.topology.hosts)
            if other != host
        ]

    def _congestion(self, host: int) -> list[str]:
        """Return the lines that set the congestion control of a host's connections, if one was chosen."""
        if self.topology.congestion is None:
            return []
        # A namespace may not choose among all of them, but a route may.
        route = f"10.77.0.0/16 dev {INTERFACE} proto kernel scope link src {self.address(host)}"
        return [f"route change {route} congctl {self.topology.congestion}"]

    def enter(self, host: int) -> list[str]:
        """Return the words to put before a command that is to run on a host."""
        return ["ip", "netns", "exec", self.namespace(host)]

    def namespace_path(self, host: int) -> str:
        """Return the path of a host's namespace, for processes that enter it themselves."""
        return f"/run/netns/{self.namespace(host)}"

    def _switch(self, group: int) -> str:
        return f"{self.name}-s{group}"

    @property
    def _core(self) -> str:
        return f"{self.name}-c"

    def build(self, emulator: Emulator | None = None) -> None:
        """Make the namespaces, links and limits.

        Args:
            emulator: None chooses: pairs of interfaces for a topology that only limits rates; else netem, if this
                kernel has it and it can do what is asked; else the relay.

        Raises:
            LabError: the kernel refused, or ``emulator`` cannot do what the topology asks; :func:`remove` takes away
                what was made so far.
        """
        hosts = range(self.topology.hosts)
        iproute.ip([f"netns add {self.namespace(host)}" for host in hosts])
        self.emulator = self._choose(emulator)
        if self.emulator == "relay":
            self._build_relay()
        else:
            self._build_pairs()
        for host in hosts:
            self._set_tcp(host)
        self._limit_all()

    def _choose(self, wanted: Emulator | None) -> Emulator:
        t = self.topology
        able = not t.outages and not any(link.jitter_s for link in t.links())
        if wanted is None:
            if not t.impaired:
                return "veth"
            return "netem" if able and iproute.has_netem(self.namespace(0)) else "relay"
        if wanted == "veth" and t.impaired:
            raise LabError("pairs of interfaces only limit rates: use netem or the relay for all else")
        if wanted == "netem" and not able:
            raise LabError("netem has no outages, and its jitter reorders frames: use the relay")
        if wanted == "netem" and not iproute.has_netem(self.namespace(0)):
            raise LabError("this kernel has no netem: use the relay, or load sch_netem")
        return wanted

    def _build_pairs(self) -> None:
        """Connect hosts and switches by pairs of virtual interfaces."""
        t = self.topology
        switches = [self._switch(g) for g in range(t.groups)] + ([self._core] if t.groups > 1 else [])
        iproute.ip([f"netns add {space}" for space in switches])
        pairs = [(self.namespace(h), INTERFACE, self._switch(t.group(h)), f"h{h}") for h in range(t.hosts)]
        if t.groups > 1:
            pairs += [(self._switch(g), UPLINK, self._core, f"s{g}") for g in range(t.groups)]
        iproute.ip([f"link add {a} netns {na} type veth peer name {b} netns {nb}" for na, a, nb, b in pairs])
        # netem drops what the kernel hands it: frames, if no more than one segment is joined.
        single = ["gso_max_segs 1"] if any(link.single for link in t.links()) else []
        for host in range(t.hosts):
            lines = [f"link set {INTERFACE} {words}" for words in single]
            lines += [f"addr add {self.address(host)}/16 dev {INTERFACE}", f"link set {INTERFACE} up", "link set lo up"]
            iproute.ip(lines, self.namespace(host))
        for switch in switches:
            ports = [a for na, a, _, _ in pairs if na == switch] + [b for _, _, nb, b in pairs if nb == switch]
            lines = ["link add br0 type bridge", "link set br0 up"]
            for port in ports:
                lines += [f"link set dev {port} master br0", f"link set dev {port} up"]
            iproute.ip(lines, switch)

    def _build_relay(self) -> None:
        """Let the relay make an interface for each host, and tell each host the others' hardware addresses."""
        t = self.topology
        iproute.ip([f"netns add {self._core}"])
        paths = [self.namespace_path(host) for host in range(t.hosts)]
        whole = not any(link.single for link in t.links())
        self.relay = Relay(t, paths, f"/run/netns/{self._core}", INTERFACE, whole)
        for host in range(t.hosts):
            lines = [
                f"link set {INTERFACE} address {_hardware(host)} txqueuelen {QUEUE_FRAMES}",
                f"addr add {self.address(host)}/16 dev {INTERFACE}",
                f"link set {INTERFACE} up",
                "link set lo up",
            ]
            iproute.ip([*lines, *self._neighbours(host)], self.namespace(host))

    def _set_tcp(self, host: int) -> None:
        """Set the congestion control of a host's connections, and buffers that hold what is on impaired links."""
        t, namespace = self.topology, self.namespace(host)
        if t.congestion is not None:
            known = iproute.available_congestion()
            if t.congestion not in known.split():
                raise LabError(f"congestion={t.congestion}: this kernel has {known}")
            iproute.ip(self._congestion(host), namespace)
        if t.impaired:
            wanted = {}
            longest_s = max(t.delay_s(a, b) for a in range(t.hosts) for b in range(t.hosts))
            # Of a buffer, TCP counts half as window.
            least = max(TCP_BYTES, int(2 * USUAL_RATE / 8 * 2 * longest_s))
            found = iproute.tcp_settings(namespace)
            for name in ("tcp_rmem", "tcp_wmem"):
                low, usual, most = map(int, found[name].split())
                wanted[name] = f"{low} {usual} {max(most, least)}"
            iproute.set_tcp(namespace, wanted)

    def _limit_all(self, again: bool = False) -> None:
        t = self.topology
        netem = self.emulator == "netem"
        for host in range(t.hosts):
            here = t.of_host(host) if netem else UNIMPAIRED
            iproute.limit(self.namespace(host), INTERFACE, t.send_rate(host), here, again)
        if self.relay is not None:
            self.relay.set_rates(t)
            return
        for host in range(t.hosts):
            iproute.limit(self._switch(t.group(host)), f"h{host}", t.receive_rate(host))
        for group in range(t.groups) if t.groups > 1 else ():
            send, receive = t.between_rates(group)
            iproute.limit(self._switch(group), UPLINK, send, t.of_group(group) if netem else UNIMPAIRED, again)
            iproute.limit(self._core, f"s{group}", receive)

    def set_bandwidth(self, rate: Rate) -> None:
        """Change the bandwidth of all hosts that have no rate of their own, also while commands run.

        Raises:
            HyperparameterError: the rate is out of range.
        """
        self.topology = self.topology.with_bandwidth(rate)
        self._limit_all(again=True)

    def counters(self) -> list[Counters]:
        """Read the counters of every host's interface."""
        return [iproute.counted(self.namespace(host), INTERFACE) for host in range(self.topology.hosts)]

    def group_counters(self) -> list[Counters]:
        """Read the counters of every group's link to the others; an empty list if there is one group."""
        groups = self.topology.groups
        if groups == 1:
            return []
        if self.relay is not None:
            return self.relay.group_counters()
        return [iproute.counted(self._switch(group), UPLINK) for group in range(groups)]

    def retransmitted(self) -> list[int]:
        """Return the segments that TCP has sent again on each host."""
        return [iproute.retransmitted(self.namespace(host)) for host in range(self.topology.hosts)]

    def describe(self) -> dict[str, Any]:
        """Return what moves frames, and the settings of TCP on the hosts, to be shown with results."""
        found = {"emulator": self.emulator, **iproute.tcp_settings(self.namespace(0))}
        return found | ({"tcp_congestion_control": self.topology.congestion} if self.topology.congestion else {})

    def report(self) -> RelayReport | None:
        """Return what the relay has counted; None without one."""
        return None if self.relay is None else self.relay.report()

    def check(self) -> None:
        """Raise LabError if the network no longer moves frames, since the relay has ended."""
        if self.relay is not None:
            self.relay.check()

    def restart_outages(self, outages: Sequence[Outage] | None = None) -> None:
        """Let the outages count from now instead of from when the network was opened.

        Args:
            outages: Outages in place of the topology's; None: those. Only the relay has outages.

        Raises:
            LabError: others are given, and the emulator is not the relay.
        """
        if outages is not None:
            if self.relay is None:
                raise LabError(f"{self.emulator} has no outages: open the network with the relay")
            self.topology = replace(self.topology, outages=tuple(outages))
        if self.relay is not None:
            self.relay.restart_outages(outages)

    def close(self) -> None:
        """End the relay."""
        if self.relay is not None:
            self.relay.close()


def _hardware(host: int) -> str:
    """Return the hardware address of a host's interface, whose last bytes the relay reads: the number, from 1 on."""
    return f"02:00:00:00:{(host + 1) >> 8:02x}:{(host + 1) & 255:02x}"


@contextlib.contextmanager
def open_network(topology: Topology, emulator: Emulator | None = None) -> Iterator[Network]:
    """Build an emulated cluster for the body; afterwards, end all processes on it and remove it.

    Clusters of dead processes are removed first; those of living ones are left alone.

    Args:
        topology: The cluster.
        emulator: What moves frames between hosts; None chooses, as :meth:`Network.build` says.

    Raises:
        BackendError: the platform, root or iproute2 is missing.
        LabError: the kernel refused.
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
            network.build(emulator)
            yield network
        finally:
            network.close()
            remove(claim.name)
            claim.release()


def remove(name: str) -> None:
    """Kill all processes in the namespaces of a lab, and delete the namespaces.

    Raises:
        LabError: a process does not die, or the kernel refuses.
    """
    listed = json.loads(iproute.call(["ip", "-j", "netns", "list"]) or "[]")
    spaces = [entry["name"] for entry in listed if entry["name"].startswith(f"{name}-")]
    deadline_s = time.monotonic() + KILL_S
    for space in spaces:
        while pids := iproute.call(["ip", "netns", "pids", space]).split():
            if time.monotonic() > deadline_s:
                raise LabError(f"process {pids[0]} of lab {name} does not end: kill it, then ip netns del {space}")
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.01)
    iproute.ip([f"netns del {space}" for space in spaces])
