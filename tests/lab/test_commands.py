"""The words by which a cluster is made, without making one."""

from __future__ import annotations

import dataclasses
import io
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest

from gradwire.tools.lab import LabError, Topology, iproute
from gradwire.tools.lab.command import environment, run_command
from gradwire.tools.lab.network import Network
from gradwire.tools.lab.relay import RelayReport


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what iproute2 would have been told, a command a line."""
    found: list[str] = []

    def call(words: Sequence[str], text: str | None = None) -> str:
        found.extend(
            [" ".join(words)] if text is None else [f"{' '.join(words)}: {line}" for line in text.splitlines()]
        )
        return ""

    monkeypatch.setattr(iproute, "call", call)
    monkeypatch.setattr(iproute.subprocess, "run", lambda words, **_: found.append(" ".join(words)))
    monkeypatch.setattr(iproute, "tcp_settings", lambda namespace: {"tcp_rmem": "4 5 6", "tcp_wmem": "4 5 99999999"})
    return found


def limits(said: Sequence[str]) -> dict[tuple[str, str], str]:
    """Return what limits each interface, by namespace and name."""
    found = {}
    for line in said:
        words = line.split()
        if words[0] == "tc" and "tbf" in words:
            found[words[2], words[words.index("dev") + 1]] = " ".join(words[words.index("tbf") + 1 :])
    return found


def test_a_link_is_limited_to_its_rate_at_both_ends(said: list[str]) -> None:
    Network("gw", Topology.parse("hosts=2,bandwidth=100mbit,asymmetric=8mbit,host1=10mbit:1gbit")).build()
    # A burst of a millisecond, 16 KiB at least, and a queue of 50 ms.
    assert limits(said) == {
        ("gw-h0", "eth0"): "rate 8000000bit burst 16384 latency 50ms",
        ("gw-s0", "h0"): "rate 100000000bit burst 16384 latency 50ms",
        ("gw-h1", "eth0"): "rate 10000000bit burst 16384 latency 50ms",
        ("gw-s0", "h1"): "rate 1000000000bit burst 125000 latency 50ms",
    }


def test_groups_have_switches_whose_links_are_limited(said: list[str]) -> None:
    Network("gw", Topology.parse("hosts=4,groups=2,between=1gbit")).build()
    limit = "rate 1000000000bit burst 125000 latency 50ms"
    ends = [("gw-s0", "uplink"), ("gw-c", "s0"), ("gw-s1", "uplink"), ("gw-c", "s1")]
    assert limits(said) == dict.fromkeys(ends, limit)
    pairs = [line.partition(": link add ")[2] for line in said if "type veth" in line]
    assert [pair.split()[2:] for pair in pairs] == [
        [a, "type", "veth", "peer", "name", name, "netns", b]
        for a, name, b in (
            ("gw-h0", "h0", "gw-s0"),
            ("gw-h1", "h1", "gw-s0"),
            ("gw-h2", "h2", "gw-s1"),
            ("gw-h3", "h3", "gw-s1"),
            ("gw-s0", "s0", "gw-c"),
            ("gw-s1", "s1", "gw-c"),
        )
    ]


def test_a_delay_acts_on_what_a_host_sends_and_the_rate_lies_within(said: list[str]) -> None:
    lab = Network("gw", Topology.parse("hosts=2,bandwidth=1gbit,delay=5ms"))
    lab.build()
    assert lab.emulator == "netem"
    delays = [line for line in said if "netem" in line and " lo " not in line]
    assert delays == [
        f"tc -n gw-h{host} qdisc add dev eth0 root handle 1: netem limit 100000 delay 5ms" for host in range(2)
    ]
    assert not any("gso_max_segs" in line for line in said)
    assert "tc -n gw-h0 qdisc add dev eth0 parent 1: tbf rate 1000000000bit burst 125000 latency 50ms" in said


def test_netem_loses_single_frames_of_hosts_and_groups_by_the_same_chain(said: list[str]) -> None:
    text = "hosts=4,groups=2,delay=5ms,reorder=2%,host1.loss=1%,host1.burst=8,between.loss=10%"
    Network("gw", Topology.parse(text)).build("netem")
    found = {line.split()[2]: line.partition(" netem ")[2] for line in said if " handle 1: " in line}
    usual = "limit 100000 delay 5ms reorder 2%"
    assert found == {
        "gw-h0": usual,
        "gw-h1": f"{usual} loss gemodel 0.126263% 12.5%",
        "gw-h2": usual,
        "gw-h3": usual,
        "gw-s0": "limit 100000 loss gemodel 10% 90%",
        "gw-s1": "limit 100000 loss gemodel 10% 90%",
    }
    assert [f"ip -n gw-h{h} -batch -: link set eth0 gso_max_segs 1" in said for h in range(4)] == [True] * 4


def test_buffers_of_tcp_grow_with_impaired_links_only(said: list[str]) -> None:
    Network("gw", Topology.parse("hosts=2,bandwidth=1gbit")).build()
    assert not any("tcp_" in line for line in said)
    # Twice 1 Gbit/s for 400 ms.
    Network("gw", Topology.parse("hosts=2,delay=400ms")).build("netem")
    written = [line for line in said if "tcp_" in line]
    assert [line.split()[3] for line in written] == ["gw-h0", "gw-h1"]
    assert all("'4 5 200000000' > /proc/sys/net/ipv4/tcp_rmem" in line.replace("\n", " ") for line in written)


def test_the_congestion_control_is_the_routes(said: list[str]) -> None:
    lab = Network("gw", Topology.parse(f"hosts=2,congestion={iproute.available_congestion().split()[0]}"))
    lab.build()
    name = lab.topology.congestion
    route = "route change 10.77.0.0/16 dev eth0 proto kernel scope link src"
    assert [line for line in said if "congctl" in line] == [
        f"ip -n gw-h{host} -batch -: {route} 10.77.0.{host + 1} congctl {name}" for host in range(2)
    ]
    assert lab.describe()["tcp_congestion_control"] == name


@pytest.mark.parametrize(
    ("text", "emulator", "message"),
    [
        ("delay=5ms", "veth", "only limit rates"),
        ("delay=5ms,jitter=1ms", "netem", "its jitter reorders frames: use the relay"),
        ("outage=1s@5s", "netem", "netem has no outages"),
        ("hosts=2,congestion=nosuch", None, "congestion=nosuch: this kernel has"),
    ],
)
def test_what_an_emulator_cannot_do_is_refused(text: str, emulator: Any, message: str, said: list[str]) -> None:
    with pytest.raises(LabError, match=message):
        Network("gw", Topology.parse(text)).build(emulator)


def test_another_bandwidth_replaces_the_limits_of_all_without_their_own(said: list[str]) -> None:
    lab = Network("gw", Topology.parse("hosts=2,bandwidth=1gbit,host1=10mbit"))
    lab.build()
    said.clear()
    lab.set_bandwidth(None)
    assert set(limits(said)) == {("gw-h1", "eth0"), ("gw-s0", "h1")}
    assert "tc -n gw-h0 qdisc del dev eth0 root" in said
    lab.set_bandwidth(2e8)
    assert limits(said)["gw-h0", "eth0"].startswith("rate 200000000bit ")


def test_another_bandwidth_leaves_the_frames_that_netem_delays(said: list[str]) -> None:
    """netem holds them: to delete it would throw them away."""
    lab = Network("gw", Topology.parse("hosts=4,groups=2,bandwidth=1gbit,delay=5ms,between.loss=1%"))
    lab.build("netem")
    said.clear()
    lab.set_bandwidth(2e8)
    impaired = [line for line in said if "eth0" in line or "uplink" in line]
    assert impaired == [
        *(
            f"tc -n gw-h{host} qdisc replace dev eth0 parent 1: tbf rate 200000000bit burst 25000 latency 50ms"
            for host in range(4)
        ),
        *(f"tc -n gw-s{group} qdisc del dev uplink parent 1:" for group in range(2)),
    ]
    said.clear()
    lab.set_bandwidth(None)
    assert [line for line in said if "eth0" in line] == [
        f"tc -n gw-h{host} qdisc del dev eth0 parent 1:" for host in range(4)
    ]


def test_hosts_have_addresses_of_one_network(said: list[str]) -> None:
    lab = Network("gw", Topology(hosts=3))
    lab.build()
    assert [lab.address(host) for host in range(3)] == ["10.77.0.1", "10.77.0.2", "10.77.0.3"]
    for host in range(3):
        assert f"ip -n gw-h{host} -batch -: addr add 10.77.0.{host + 1}/16 dev eth0" in said


def test_the_environment_is_torchruns_without_a_network() -> None:
    found = [environment(Network("gw", Topology(hosts=3)), host) for host in range(3)]
    assert [one["RANK"] for one in found] == ["0", "1", "2"]
    assert {(one["WORLD_SIZE"], one["MASTER_ADDR"], one["LOCAL_RANK"]) for one in found} == {("3", "10.77.0.1", "0")}


def test_frames_that_no_host_took_may_have_been_late() -> None:
    nothing: dict[str, Any] = {field.name: 0 for field in dataclasses.fields(RelayReport)}
    assert RelayReport(**nothing).limits() == []
    (limit,) = RelayReport(**{**nothing, "late_frames": 3, "refused_frames": 4, "late_limit_s": 0.001}).limits()
    assert limit == "75.0 % of the frames left more than 1 ms late"


class NoNetwork(Network):
    """Hosts that are this machine itself."""

    def enter(self, host: int) -> list[str]:
        return []

    def check(self) -> None:
        pass


def test_hosts_are_ended_when_nobody_reads_what_they_print(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb", buffering=0) as nobody, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", io.TextIOWrapper(nobody))
        with pytest.raises(BrokenPipeError):
            run_command(NoNetwork("gw", Topology(hosts=2)), ["seq", "100000"])


def test_the_last_lines_of_a_host_are_passed_on_to_a_slow_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            time.sleep(0.05)
            lines.append(bytes(data))
            return len(data)

    lines: list[bytes] = []
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", io.TextIOWrapper(Slow()))  # type: ignore[type-var]
        run_command(NoNetwork("gw", Topology(hosts=1)), ["seq", "30"])
    assert lines == [f"h0: {n}\n".encode() for n in range(1, 31)]
