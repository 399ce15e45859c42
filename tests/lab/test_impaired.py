"""Real hosts on links with delay, loss and outages: what their connections see, and what is counted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab_help import NEEDS_LAB, limit, on_host, program, spaces, start_lab
from run_help import alive, wait_for

from gradwire.tools.lab import (
    Counters,
    Emulator,
    Impairments,
    LabError,
    Network,
    RelayReport,
    Topology,
    iproute,
    open_network,
    run_command,
)

pytestmark = NEEDS_LAB

PORT = 7001
WAIT_S = 60
"""What the harness bounds; nothing here takes that long."""


def run_on(lab: Network, host: int, name: str, *words: object) -> str:
    """Run a program beside this file on a host to its end, and return what it wrote."""
    command = [*lab.enter(host), *program(name, *words)]
    return subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL).stdout


@pytest.mark.ranks
def test_a_probe_finds_the_delay_in_one_direction() -> None:
    process = start_lab("--hosts", 2, "--delay", "100ms", "--", *program("probed_link"))
    told, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors
    (delay_s,) = [float(line.split("delay ")[1]) for line in told.splitlines() if "delay " in line]
    # A round trip would be 0.2 s. Nothing arrives before its delay; a busy machine may hand it over later.
    assert 0.099 < delay_s < 0.18


@pytest.fixture
def serving() -> Iterator[Any]:
    """A function that starts a program that serves on a host, and waits until it does."""
    started: list[subprocess.Popen[str]] = []

    def serve(lab: Network, host: int, name: str, *words: object) -> subprocess.Popen[str]:
        process = on_host(lab, host, program(name, *words))
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield serve
    for process in started:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def settled(lab: Network) -> RelayReport:
    """Return the relay's report when no frame is on its way any more."""
    found: list[RelayReport] = []

    def quiet() -> bool:
        report = lab.report()
        assert report is not None
        found.append(report)
        return len(found) > 1 and found[-1].pending_frames == 0 and found[-1].read_frames == found[-2].read_frames

    wait_for(quiet, WAIT_S, "the last frames")
    return found[-1]


def counted_at_rest(lab: Network) -> tuple[list[Counters], RelayReport | None]:
    """Return the counters of the hosts, and the relay's report, if any, when nothing has moved between their readings.

    A closing connection's last frames, and ARP's, come when no program waits for them.
    """
    found: list[tuple[list[Counters], RelayReport | None]] = []

    def rest() -> bool:
        before, report = lab.counters(), settled(lab) if lab.emulator == "relay" else None
        after = lab.counters()
        found.append((after, report))
        return before == after

    wait_for(rest, WAIT_S, "the network to rest")
    return found[-1]


def check_delay_and_loss(lab: Network, serving: Any) -> None:
    """Host 0 sends 2000 datagrams to host 1, which answers each; 10 % of the frames are lost in each direction."""
    serving(lab, 1, "echo", "serve", PORT)
    times_ms = [float(word) for word in run_on(lab, 0, "echo", "ask", lab.address(1), PORT, 2000, 3.0).split()]
    assert min(times_ms) >= 2 * 5.0
    # An answer comes with a probability of 0.81: within 5 standard deviations of 1620. A busy machine also drops
    # datagrams where a program does not empty its socket in time: 40 more.
    assert 1490 < len(times_ms) < 1710


def test_answers_take_two_delays_and_frames_are_lost(serving: Any) -> None:
    with open_network(Topology.parse("hosts=2,delay=5ms,loss=10%,seed=1"), "relay") as lab:
        check_delay_and_loss(lab, serving)
        counted, report = counted_at_rest(lab)
    assert report is not None
    assert report.lost_frames > 0
    assert report.read_frames == report.written_frames + report.lost_frames
    assert report.read_bytes == sum(c.sent_bytes for c in counted)
    assert report.written_bytes == sum(c.received_bytes for c in counted)
    assert report.read_bytes == report.written_bytes + report.lost_bytes


@pytest.mark.parametrize("emulator", ["netem", "relay"])
def test_netem_and_the_relay_agree(emulator: Emulator, serving: Any) -> None:
    with open_network(Topology(hosts=1)) as lab:
        if not iproute.has_netem(lab.namespace(0)):
            pytest.skip("this kernel has no netem")
    with open_network(Topology.parse("hosts=2,delay=5ms,loss=10%,seed=1"), emulator) as lab:
        check_delay_and_loss(lab, serving)


def test_a_connection_moves_the_same_bytes_at_both_ends_and_knows_its_buffers(serving: Any) -> None:
    with open_network(Topology.parse("hosts=2,bandwidth=100mbit,delay=2ms,congestion=cubic")) as lab:
        assert lab.emulator in ("netem", "relay")
        server = serving(lab, 1, "pour", "serve", PORT, 1)
        run_on(lab, 0, "pour", "send", lab.address(1), PORT, 2_000_000)
        server.communicate(timeout=WAIT_S)
        (sent, received), _ = counted_at_rest(lab)
        told = lab.describe()
    assert sent.sent_bytes == received.received_bytes
    assert sent.received_bytes == received.sent_bytes
    assert sent.sent_payload_bytes == pytest.approx(2_000_000, rel=0.05)
    assert told["tcp_congestion_control"] == "cubic"
    assert int(told["tcp_rmem"].split()[2]) >= 64 << 20


def test_a_connection_outlives_an_outage(serving: Any) -> None:
    with open_network(Topology.parse("hosts=2,bandwidth=1gbit,outage=0.5s@0s:host1")) as lab:
        server = serving(lab, 1, "pour", "serve", PORT, 1)
        sender = on_host(lab, 0, program("pour", "send", lab.address(1), PORT, 1_000_000), stdin=subprocess.PIPE)
        assert sender.stdout is not None
        assert sender.stdin is not None
        assert sender.stdout.readline() == "connected\n"
        began = time.monotonic()
        lab.restart_outages()
        sender.stdin.write("\n")
        sender.stdin.flush()
        sender.communicate(timeout=WAIT_S)
        server.communicate(timeout=WAIT_S)
        took_s = time.monotonic() - began
        report = settled(lab)
    assert (sender.returncode, server.returncode) == (0, 0)
    # The outage began before the first byte was sent, or the sender was held up for longer than it lasted.
    assert report.silenced_frames > 0 or took_s > 0.5


def test_rates_are_the_kernels_where_hosts_send_and_the_relays_where_they_receive() -> None:
    with open_network(
        Topology.parse("hosts=3,bandwidth=10mbit,asymmetric=5mbit,delay=1ms,host2=1mbit:2mbit"), "relay"
    ) as lab:
        assert [limit(lab.namespace(h), "eth0") for h in range(3)] == [5e6, 5e6, 1e6]
        lab.set_bandwidth(5e7)
        assert [limit(lab.namespace(h), "eth0") for h in range(3)] == [5e6, 5e6, 1e6]
        assert lab.topology.receive_rate(0) == 5e7


def test_the_relay_survives_what_runs_on_hosts_and_goes_with_its_lab(serving: Any) -> None:
    with open_network(Topology(hosts=2, impairments=Impairments(delay_s=0.001)), "relay") as lab:
        assert lab.relay is not None
        relay = lab.relay.pid
        echo = serving(lab, 1, "echo", "serve", PORT)
        os.kill(echo.pid, signal.SIGKILL)
        echo.communicate()
        serving(lab, 1, "echo", "serve", PORT)
        assert len(run_on(lab, 0, "echo", "ask", lab.address(1), PORT, 3, 30.0).split()) == 3
    assert not alive(relay)
    assert spaces(lab.name) == []


def test_commands_end_when_the_relay_does() -> None:
    """They would wait for each other for ever: host 0 kills the relay, and neither ends by itself."""
    code = "import os, signal, sys, time\nif os.environ['RANK'] == '0': os.kill(int(sys.argv[1]), signal.SIGKILL)\n"
    with open_network(Topology(hosts=2), "relay") as lab:
        assert lab.relay is not None
        lab.check()
        with pytest.raises(LabError, match="the relay between the hosts has ended: it was killed by SIGKILL"):
            run_command(lab, [sys.executable, "-c", f"{code}time.sleep(600)", str(lab.relay.pid)])
        for host in range(2):
            assert iproute.call(["ip", "netns", "pids", lab.namespace(host)]) == ""


def test_a_killed_lab_s_relay_goes_and_the_next_lab_removes_the_rest(tmp_path: Path) -> None:
    process = start_lab("--hosts", 2, "--delay", "1ms", "--", *program("hold", tmp_path))
    try:
        wait_for(lambda: process.poll() is not None or len(list(tmp_path.glob("pids-*"))) == 2, WAIT_S, "both hosts")
        pids = [int(pid) for path in tmp_path.glob("pids-*") for pid in path.read_text().split()]
        words = ["ip", "netns", "identify", str(pids[0])]
        name = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip().rpartition("-")[0]
        relays = [int(pid) for pid in iproute.call(["ip", "netns", "pids", f"{name}-c"]).split()]
        assert len(relays) <= 1
    finally:
        process.kill()
        process.communicate()

    def gone() -> bool:
        # Another test's lab may be tidying up at this moment: then it is that one's work.
        with open_network(Topology(hosts=1)):
            return spaces(name) == [] and not any(map(alive, pids + relays))

    wait_for(gone, WAIT_S, "the dead lab to go")


def test_a_lab_ends_with_a_line_about_its_network() -> None:
    process = start_lab("--hosts", 2, "--delay", "1ms", "--outage", "1s@900s", "--", sys.executable, "-c", "print(5)")
    out, told = process.communicate(timeout=WAIT_S)
    assert (process.returncode, sorted(out.split())) == (0, ["5", "5", "h0:", "h1:"])
    assert told.splitlines()[-1].startswith("gradwire: network: 0 frames, 0.0 MB")


def test_a_relay_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire.tools.lab.network.INTERFACE", "a name that is too long for an interface")
    names: list[str] = []
    build = Network.build

    def noted(self: Network, emulator: Emulator | None = None) -> None:
        names.append(self.name)
        build(self, emulator)

    monkeypatch.setattr(Network, "build", noted)
    with (
        pytest.raises(LabError, match=r"the relay between the hosts has ended: .*"),
        open_network(Topology(hosts=2), "relay"),
    ):
        pass
    assert spaces(names[0]) == []
