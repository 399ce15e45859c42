"""What a row of the step benchmark says of its network: bytes, segments sent again, and what became of frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradwire.tools.lab import Network, RelayReport, Topology

SEGMENT_BYTES = 1448
"""The most payload of a TCP segment: an MTU of 1500 bytes without the headers of IPv4 and TCP with time stamps."""

BYTES_TOLERANCE = 0.05
"""Largest relative difference between the bytes that the library and the interfaces count."""

CARRIER_BYTES = 1024
"""What Gloo itself sends each other host in a step, at most: 48 bytes before each of some twenty messages. The library
does not count it, and it is seen where a step sends a few kilobytes alone."""


@dataclass(frozen=True, kw_only=True)
class Moved:
    """What passed the network in some steps.

    Attributes:
        bytes: Payload that all hosts sent.
        most_bytes: The same of the host that sent most.
        between_bytes: Payload that a group sent to the others: that of the group that sent most.
        again: Segments that TCP sent again, on all hosts.
        report: What the relay counted, if there is one.
    """

    bytes: int
    most_bytes: int
    between_bytes: int = 0
    again: int = 0
    report: RelayReport | None = None


class NetworkWatch:
    """Counters of a network from now on.

    Args:
        network: The network.
        topology: Its topology; segments that TCP sends again are counted if it is impaired.
    """

    def __init__(self, network: Network, topology: Topology) -> None:
        self._network, self._impaired = network, topology.impaired
        self._counters, self._groups = network.counters(), network.group_counters()
        self._again = network.retransmitted() if self._impaired else []
        self._report = network.report() if self._impaired else None

    def moved(self) -> Moved:
        """Return what has passed since then."""
        sent, crossed = (
            [b.since(a).sent_payload_bytes for a, b in zip(before, now)]
            for before, now in (
                (self._counters, self._network.counters()),
                (self._groups, self._network.group_counters()),
            )
        )
        total, most, between = sum(sent), max(sent), max(crossed, default=0)
        if not self._impaired:
            return Moved(bytes=total, most_bytes=most, between_bytes=between)
        report = self._network.report()
        return Moved(
            bytes=total,
            most_bytes=most,
            between_bytes=between,
            again=sum(self._network.retransmitted()) - sum(self._again),
            report=report.since(self._report) if report and self._report else None,
        )


def bytes_agree(gap: float, sent_bytes: float, again: float, peers: int) -> bool:
    """Return whether interface and library count the same bytes a host and step.

    Interfaces also count the carrier's own bytes, and what TCP sends again, at most :data:`SEGMENT_BYTES` a segment.

    Args:
        gap: The interface's bytes over the library's, minus 1.
        sent_bytes: The library's bytes, above 0.
        again: Segments that TCP sent again.
        peers: Other hosts.
    """
    uncounted = CARRIER_BYTES * peers + SEGMENT_BYTES * again
    return -BYTES_TOLERANCE <= gap <= BYTES_TOLERANCE + uncounted / sent_bytes


def host_rates(topology: Topology) -> list[float]:
    """Return the rates in bits per second at which hosts send and receive, where they are limited."""
    return [r for h in range(topology.hosts) for r in (topology.send_rate(h), topology.receive_rate(h)) if r]


def wire_floor_s(topology: Topology, host_bytes: float, between_bytes: float = 0.0) -> float:
    """Return the least seconds in which the slowest links carry what a host sends, and what a group sends the others.

    Links without a limit take no time.
    """
    hosts = host_rates(topology)
    groups = [r for g in range(topology.groups) for r in topology.between_rates(g) if r]
    return max(
        8 * sent / min(rates) if rates else 0.0 for sent, rates in ((host_bytes, hosts), (between_bytes, groups))
    )


def network_fields(network: Network | None, moved: Sequence[Moved], steps: int, hosts: int) -> dict[str, Any]:
    """Return a row's fields about its network.

    They are ``emulator`` and TCP's settings. An impaired network adds ``segments_again_per_step``: segments that TCP
    sent again, for each step and host. A relay adds the frames that it read, lost, silenced and let overflow,
    ``percentile_99_late_s`` of all frames since it started, those of earlier rows among them, and ``relay_limits``: how
    the relay limited them, "" if it did not. Without a network there are no fields.
    """
    if network is None:
        return {}
    fields: dict[str, Any] = dict(network.describe())
    reports = [m.report for m in moved if m.report is not None]
    if network.topology.impaired:
        fields["segments_again_per_step"] = sum(m.again for m in moved) / steps / hosts
    if reports:
        whole = RelayReport.together(reports)
        for name in ("read", "lost", "silenced", "overflowed"):
            fields[f"{name}_frames"] = getattr(whole, f"{name}_frames")
        fields["percentile_99_late_s"] = whole.percentile_99_late_s
        fields["relay_limits"] = "; ".join(whole.limits())
    return fields
