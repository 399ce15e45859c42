"""Links of the emulated cluster beside what they should be: round trips, throughput, and the relay's own limit.

    sudo env "PATH=$PATH" python benchmarks/speed/lab_network.py --json benchmarks/results/speed/lab_network.json

Two hosts. A round trip should take two delays. Without losses, connections should carry the rate less the headers: 1448
of the 1514 bytes of a frame. With losses a connection's window is limited by its congestion control: for CUBIC by

    max(1.054 (RTT / p)^0.75, 1.22 / sqrt(p))

segments at a loss probability p and a round trip of RTT seconds (RFC 9438, 5.1, with C = 0.4 and beta = 0.7, and its
Reno-friendly region; the second term is Mathis, Semke, Mahdavi and Ott, 1997), and so its rate to that many segments a
round trip. BBR has no such formula. For the relay's own limit, links have no rate: eight connections send what passes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.results import ROOT
from benchmarks.lib.runs import write
from gradwire.tools.lab import Network, Topology, open_network, start

SETTINGS = (
    ("bandwidth=100mbit,delay=20ms", 6),
    ("bandwidth=1gbit,delay=1ms", 6),
    ("bandwidth=10mbit,delay=80ms", 6),
    ("bandwidth=100mbit,delay=20ms,loss=0.1%", 10),
    ("bandwidth=100mbit,delay=80ms,loss=1%", 10),
    ("bandwidth=200mbit,delay=1ms,loss=0.00001%", 6),
)
"""Links, and seconds to measure each number of connections. The last one's loss lets frames pass one by one."""

LIMITS = {"segments joined": "delay=1ms", "single frames": "delay=1ms,loss=0.0000001%"}
CONNECTIONS = (1, 8)
CONGESTION = "cubic"
LOSSY_TOO = "bbr"
"""The congestion control of all settings, and another one for those with loss, if the kernel has it."""

WARM_UP_S, WINDOW_S, PINGS = 3.0, 2.0, 60
PAYLOAD, FRAME = 1448, 1514


@contextlib.contextmanager
def on_host(lab: Network, host: int, *words: object) -> Iterator[subprocess.Popen[bytes]]:
    """Run a role of the traffic on a host for the body."""
    command = [sys.executable, str(ROOT / "benchmarks" / "lib" / "traffic.py"), *map(str, words)]
    process = start(lab, host, command, {}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line_of(pipe: IO[bytes] | None) -> str:
    """Return the next line of a process."""
    return pipe.readline().decode().strip() if pipe else ""


def round_trips(lab: Network) -> list[float]:
    """Return the seconds of round trips on links that carry nothing else, in ascending order."""
    with on_host(lab, 1, "answer") as server:
        line_of(server.stdout)
        with on_host(lab, 0, "ping", lab.address(1), PINGS) as asker:
            return sorted(float(line) for line in asker.stdout or ())


def throughput(lab: Network, connections: int, seconds: float) -> dict[str, Any]:
    """Return the bits a second that connections carry, in windows after a warm-up, and what the relay says."""
    with on_host(lab, 1, "serve", connections) as server:
        line_of(server.stdout)
        with on_host(lab, 0, "send", lab.address(1), connections):
            marks: list[tuple[float, float]] = []
            time.sleep(WARM_UP_S)
            first, busy_s = lab.report(), cpu_s(lab)
            for edge in range(int(seconds / WINDOW_S) + 1):
                if edge:
                    time.sleep(WINDOW_S)
                if server.stdin:
                    server.stdin.write(b"\n")
                    server.stdin.flush()
                taken, at = line_of(server.stdout).split()
                marks.append((float(taken), float(at)))
            last = lab.report()
            busy_s = cpu_s(lab) - busy_s
    rates = [8 * (b - a) / (t - s) for (a, s), (b, t) in itertools.pairwise(marks)]
    found: dict[str, Any] = {"bits_per_s": median(rates), "slowest": min(rates), "fastest": max(rates)}
    if first and last:
        report = last.since(first)
        found |= {
            "frames_per_s": (report.written_frames + report.lost_frames + report.overflowed_frames) / report.wall_s,
            "percentile_99_late_s": report.percentile_99_late_s,
            "overflowed_frames": report.overflowed_frames,
            "lost_frames": report.lost_frames,
            "relay_busy": busy_s / report.wall_s,
            "relay_limits": report.limits(),
        }
    return found


def cpu_s(lab: Network) -> float:
    """Return the seconds that the relay has used of a core."""
    if lab.relay is None:
        return 0.0
    words = Path(f"/proc/{lab.relay.pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def expected(topology: Topology, connections: int) -> float:
    """Return the bits a second that connections with CUBIC should carry."""
    link, rate = topology.of_host(0), topology.send_rate(0) or math.inf
    whole = rate * PAYLOAD / FRAME
    if not link.loss:
        return whole
    round_trip_s = 2 * link.delay_s
    window = max(1.054 * (round_trip_s / link.loss) ** 0.75, 1.22 / math.sqrt(link.loss))
    return min(whole, connections * window * PAYLOAD * 8 / round_trip_s)


def measure(text: str, seconds: float, congestion: str) -> dict[str, Any]:
    """Measure one link with one congestion control."""
    topology = Topology.parse(f"hosts=2,{text},congestion={congestion}")
    with open_network(topology) as lab:
        times_s = round_trips(lab)
        row: dict[str, Any] = {
            "lab": topology.spec(),
            **lab.describe(),
            "round_trip_s": median(times_s),
            "least_round_trip_s": times_s[0],
            "percentile_95_round_trip_s": times_s[int(0.95 * len(times_s))],
            "two_delays_s": 2 * topology.delay_s(0, 1),
        }
        for connections in CONNECTIONS:
            found = throughput(lab, connections, seconds)
            found["expected_bits_per_s"] = expected(topology, connections) if congestion == CONGESTION else None
            row[f"connections_{connections}"] = found
            say(f"{text}, {congestion}, {connections} connections", found)
    return row


def say(what: str, found: dict[str, Any]) -> None:
    """Print one measurement."""
    theory = found.get("expected_bits_per_s")
    print(
        f"{what}: {found['bits_per_s'] / 1e6:.1f} Mbit/s ({found['slowest'] / 1e6:.1f} to {found['fastest'] / 1e6:.1f})"
        + (f", expected {theory / 1e6:.1f}" if theory else "")
        + f"; {found.get('frames_per_s', 0):.0f} frames/s, relay busy {100 * found.get('relay_busy', 0):.0f} %"
        + f", {'; '.join(found.get('relay_limits', ())) or 'no limit of its own'}",
        flush=True,
    )


def main() -> None:
    """Measure all links, and the relay's limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    rows = []
    for text, seconds in SETTINGS:
        lossy = Topology.parse(f"hosts=2,{text}").impairments.loss > 1e-6
        controls = [CONGESTION] + ([LOSSY_TOO] if lossy and LOSSY_TOO in known else [])
        rows += [measure(text, seconds if control == CONGESTION else 6, control) for control in controls]
    limits = []
    for name, text in LIMITS.items():
        with open_network(Topology.parse(f"hosts=2,{text},congestion={CONGESTION}"), "relay") as lab:
            found = throughput(lab, 8, 6)
        say(name, found)
        limits.append({"frames": name, **found})
    write(given.json, hosts=2, window_s=WINDOW_S, warm_up_s=WARM_UP_S, rows=rows, limits=limits)


if __name__ == "__main__":
    main()
