"""What the lab asks of iproute2 and of ``/proc/sys``: namespaces, limits, counters, and TCP's settings."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from gradwire.errors import GradwireError
from gradwire.tools.lab.impairments import UNIMPAIRED, Impairments
from gradwire.tools.lab.quantities import Rate

HEADER_BYTES = 66
"""Bytes of a packet's headers: Ethernet 14, IPv4 20, TCP with time stamps 32."""

QUEUE_S = 0.05
BURST_S = 1e-3
LEAST_BURST_BYTES = 16_384
"""Token bucket: a burst of one millisecond at the rate, and a queue of 50 milliseconds."""

NETEM_LIMIT = 100_000
"""Frames that netem keeps."""

TCP = ("tcp_congestion_control", "tcp_rmem", "tcp_wmem")
"""Names of TCP's settings that are shown with results, under net.ipv4."""


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


def call(words: Sequence[str], text: str | None = None) -> str:
    """Run a command, and return what it wrote.

    Raises:
        LabError: it failed.
    """
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        told = " ".join(done.stderr.split()) or f"code {done.returncode}"
        raise LabError(f"{' '.join(words[:6])}: {told}")
    return done.stdout


def ip(lines: Sequence[str], namespace: str | None = None) -> None:
    """Run lines of ``ip``, in a namespace if one is named."""
    words = ["ip", *(["-n", namespace] if namespace else []), "-batch", "-"]
    if lines:
        call(words, "\n".join(lines) + "\n")


def burst_bytes(rate: float) -> int:
    """Return the bytes of a token bucket: those of a millisecond at the rate, and enough for a few frames."""
    return max(LEAST_BURST_BYTES, int(rate / 8 * BURST_S))


def limit(
    namespace: str, interface: str, rate: Rate, impairments: Impairments = UNIMPAIRED, again: bool = False
) -> None:
    """Replace the limits on what an interface sends; impairments need the kernel's netem.

    Args:
        namespace: Namespace of the interface.
        interface: Name of the interface.
        rate: Rate at which it may send.
        impairments: What netem does to the frames.
        again: Only the rate has changed since the limits were set before: netem stays, with the frames that it delays.
    """
    tc = ["tc", "-n", namespace, "qdisc"]
    root, within = ["dev", interface, "root"], ["dev", interface, "parent", "1:"]
    impaired = impairments != UNIMPAIRED
    stays = impaired and again
    if not stays or rate is None:
        # Deleting fails if nothing was set, which is the wanted state.
        subprocess.run([*tc, "del", *(within if stays else root)], stderr=subprocess.DEVNULL, check=False)
    if impaired and not stays:
        call([*tc, "add", *root, "handle", "1:", "netem", *netem_words(impairments)])
    if rate is not None:
        limits = ["rate", f"{rate:.0f}bit", "burst", str(burst_bytes(rate)), "latency", f"{QUEUE_S * 1e3:.0f}ms"]
        call([*tc, "replace" if stays else "add", *(within if impaired else root), "tbf", *limits])


def netem_words(impairments: Impairments) -> list[str]:
    """Return netem's words for impairments without jitter, which would reorder frames there."""
    words = ["limit", str(NETEM_LIMIT)]
    if impairments.delay_s:
        words += ["delay", f"{impairments.delay_s * 1e3:g}ms"]
    if impairments.reorder:
        words += ["reorder", f"{impairments.reorder * 100:g}%"]
    if impairments.loss:
        words += ["loss", "gemodel", f"{impairments.begins * 100:g}%", f"{impairments.ends * 100:g}%"]
    return words


def has_netem(namespace: str) -> bool:
    """Return whether this kernel has netem, tried on a namespace's loopback interface."""
    tc = ["tc", "-n", namespace, "qdisc"]
    try:
        call([*tc, "add", "dev", "lo", "root", "netem", "limit", "1"])
    except LabError:
        return False
    call([*tc, "del", "dev", "lo", "root"])
    return True


def counted(namespace: str, interface: str) -> Counters:
    """Read an interface's counters."""
    stats = json.loads(call(["ip", "-n", namespace, "-s", "-j", "link", "show", interface]))[0]["stats64"]
    return Counters(stats["tx"]["bytes"], stats["tx"]["packets"], stats["rx"]["bytes"], stats["rx"]["packets"])


def set_tcp(namespace: str, settings: Mapping[str, str]) -> None:
    """Write settings of net.ipv4 in a namespace.

    Raises:
        LabError: the kernel refused one, for instance a congestion control that it does not have.
    """
    lines = [f"echo '{value}' > /proc/sys/net/ipv4/{name}" for name, value in settings.items()]
    if lines:
        call(["ip", "netns", "exec", namespace, "sh", "-ec", "\n".join(lines)])


def tcp_settings(namespace: str) -> dict[str, str]:
    """Return TCP's settings in a namespace."""
    paths = [f"/proc/sys/net/ipv4/{name}" for name in TCP]
    values = call(["ip", "netns", "exec", namespace, "cat", *paths]).splitlines()
    return {name: " ".join(value.split()) for name, value in zip(TCP, values)}


def retransmitted(namespace: str) -> int:
    """Return the segments that TCP has sent again in a namespace."""
    lines = call(["ip", "netns", "exec", namespace, "cat", "/proc/net/snmp"]).splitlines()
    names, values = (line.split() for line in lines if line.startswith("Tcp:"))
    return int(values[names.index("RetransSegs")])


def congestion_here() -> str | None:
    """Return the congestion control of this machine's connections; None if it is not Linux."""
    try:
        with open("/proc/sys/net/ipv4/tcp_congestion_control") as file:
            return file.read().strip()
    except OSError:
        return None


@cache
def available_congestion() -> str:
    """Return the congestion controls that this kernel has."""
    with open("/proc/sys/net/ipv4/tcp_available_congestion_control") as file:
        return file.read().strip()
