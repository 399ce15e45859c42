"""Networks as the kernel has them: rates, counters, neighbours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from lab_help import NEEDS_LAB, limit, on_host, program, spaces

from gradwire.errors import BackendError
from gradwire.tools.lab import Counters, Emulator, Network, Topology, iproute, open_network

PORT = 7001
MEGABYTE = 1_000_000


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("platform", "needs Linux's network namespaces, and this is darwin: use a Linux machine"),
        ("tools", "ip and tc not found: apt-get install iproute2"),
        ("root", "needs root to make network namespaces: run the command with sudo"),
    ],
)
def test_what_is_missing_is_named_with_its_remedy(what: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin" if what == "platform" else "linux")
    monkeypatch.setattr(shutil, "which", lambda name: None if what == "tools" else f"/sbin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000 if what == "root" else 0)
    with pytest.raises(BackendError, match=message), open_network(Topology()):
        pass


def test_counters_know_headers_and_differences() -> None:
    before, after = Counters(1000, 10, 500, 5), Counters(3000, 20, 800, 8)
    assert after.since(before) == Counters(2000, 10, 300, 3)
    assert after.since(before).sent_payload_bytes == 2000 - 660
    assert after.since(before).received_payload_bytes == 300 - 198


def pour(lab: Network, source: int, target: int, count: int) -> None:
    """Send bytes from one host to another, to the end."""
    server = on_host(lab, target, program("pour", "serve", PORT, 1))
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    command = [*lab.enter(source), *program("pour", "send", lab.address(target), PORT, count)]
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    server.communicate()
    assert server.returncode == 0


class TestNetwork:
    pytestmark = NEEDS_LAB

    def test_counters_agree_with_the_bytes_of_a_connection(self) -> None:
        with open_network(Topology.parse("hosts=3,bandwidth=1gbit")) as lab:
            before = lab.counters()
            pour(lab, 0, 2, 2 * MEGABYTE)
            moved = [b.since(a) for a, b in zip(before, lab.counters())]
        assert moved[0].sent_payload_bytes == pytest.approx(2 * MEGABYTE, rel=0.05)
        assert moved[2].received_payload_bytes == pytest.approx(2 * MEGABYTE, rel=0.05)
        assert moved[1].sent_bytes + moved[1].received_bytes < MEGABYTE / 20

    def test_links_between_groups_count_what_crosses_them(self) -> None:
        with open_network(Topology.parse("hosts=4,bandwidth=1gbit,groups=2,between=1gbit")) as lab:
            start = lab.group_counters()
            pour(lab, 0, 1, 2 * MEGABYTE)
            inside = lab.group_counters()
            pour(lab, 1, 2, MEGABYTE)
            crossed = lab.group_counters()
        assert all(b.since(a).sent_bytes < MEGABYTE / 20 for a, b in zip(start, inside))
        moved = [b.since(a) for a, b in zip(inside, crossed)]
        assert moved[0].sent_payload_bytes == pytest.approx(MEGABYTE, rel=0.05)
        assert moved[1].received_payload_bytes == pytest.approx(MEGABYTE, rel=0.05)

    def test_two_labs_at_once_do_not_collide(self) -> None:
        with open_network(Topology(hosts=2)) as first, open_network(Topology(hosts=2)) as second:
            assert first.name != second.name
            assert first.address(1) == second.address(1)
            servers = [on_host(lab, 1, program("pour", "serve", PORT, 1)) for lab in (first, second)]
            for server in servers:
                assert server.stdout is not None
                assert server.stdout.readline() == "ready\n"
            for lab, count in ((first, MEGABYTE), (second, 2 * MEGABYTE)):
                command = [*lab.enter(0), *program("pour", "send", lab.address(1), PORT, count)]
                subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True)
            for server in servers:
                server.communicate()
            for lab, count in ((first, MEGABYTE), (second, 2 * MEGABYTE)):
                assert lab.counters()[0].sent_payload_bytes == pytest.approx(count, rel=0.05)
        assert spaces(first.name) == spaces(second.name) == []

    def test_each_rate_is_set_where_it_acts(self) -> None:
        text = "hosts=4,bandwidth=10mbit,asymmetric=5mbit,host3=1mbit:unlimited,groups=2,between=20mbit"
        with open_network(Topology.parse(text)) as lab:
            sends = [limit(lab.namespace(h), "eth0") for h in range(4)]
            receives = [limit(f"{lab.name}-s{h // 2}", f"h{h}") for h in range(4)]
            assert sends == [5e6, 5e6, 5e6, 1e6]
            assert receives == [1e7, 1e7, 1e7, None]
            for group in range(2):
                assert limit(f"{lab.name}-s{group}", "uplink") == 2e7
                assert limit(f"{lab.name}-c", f"s{group}") == 2e7
            # And bytes pass from group to group.
            pour(lab, 0, 3, MEGABYTE // 10)

    @pytest.mark.parametrize("emulator", ["veth", "relay"])
    def test_a_new_address_leaves_the_congestion_control(self, emulator: Emulator) -> None:
        name = iproute.available_congestion().split()[0]
        with open_network(Topology.parse(f"hosts=2,congestion={name}"), emulator) as lab:
            for address in ("10.77.0.2", "10.77.1.2", "10.77.0.2"):
                assert lab.address(1) == address
                (route,) = iproute.call(["ip", "-n", lab.namespace(1), "route", "show"]).splitlines()
                assert f"src {address} congctl {name}" in route
                lab.change_address(1)

    def test_a_new_bandwidth_leaves_hosts_of_their_own_alone(self) -> None:
        with open_network(Topology.parse("hosts=2,bandwidth=10mbit,host1=1mbit")) as lab:
            lab.set_bandwidth(5e7)
            assert [limit(lab.namespace(h), "eth0") for h in range(2)] == [5e7, 1e6]
            lab.set_bandwidth(None)
            assert [limit(lab.namespace(h), "eth0") for h in range(2)] == [None, 1e6]

    def test_a_host_with_ten_times_the_rate_moves_several_times_the_bytes(self) -> None:
        """Both pour without end for the same while; only the ratio of what they moved counts."""
        with open_network(Topology.parse("hosts=3,host1=2mbit,host2=20mbit")) as lab:
            server = on_host(lab, 0, program("pour", "serve", PORT, 2))
            assert server.stdout is not None
            server.stdout.readline()
            command = program("pour", "send", lab.address(0), PORT, 1000 * MEGABYTE)
            senders = [on_host(lab, host, command, stdin=subprocess.PIPE) for host in (1, 2)]
            for sender in senders:
                assert sender.stdout is not None
                assert sender.stdout.readline() == "connected\n"
            before = lab.counters()
            # The fast one first: what passes before the other one begins is no advantage of the slow one.
            for sender in reversed(senders):
                assert sender.stdin is not None
                sender.stdin.write("\n")
                sender.stdin.flush()
            while (now := lab.counters())[1].since(before[1]).sent_bytes < MEGABYTE // 4:
                pass
            slow, fast = (now[host].since(before[host]).sent_bytes for host in (1, 2))
            for process in (*senders, server):
                process.kill()
                process.communicate()
        assert fast > 4 * slow
