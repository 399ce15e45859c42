"""How long a message takes over one TCP connection, by congestion control, frames that are lost, and rests.

    sudo env "PATH=$PATH" python benchmarks/speed/lossy_messages.py

Two hosts and one connection, which stays open. The sender waits for an answer of one byte after each message, and then
for some time, as between the exchanges of two steps. The window of CUBIC shrinks with each loss and grows again slowly,
and shrinks after a rest, unless the kernel is told to keep it. BBR sends at the rate that it has measured, and
spreads a small message over half a round trip, losses or not, unless it has been shown the bandwidth before. Both wait
for what was lost: a round trip if later frames tell the receiver of it, more if it was the end of the message.

Writes ``benchmarks/results/speed/lossy_messages.json``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.results import RESULTS
from benchmarks.lib.runs import write
from benchmarks.speed.lab_network import line_of, on_host
from gradwire.tools.lab import Topology, open_network

LINKS = (
    ("100mbit", "20ms"),
    ("1gbit", "20ms"),
    ("100mbit", "80ms"),
)
LOSSES = ("", "0.1%", "1%")
CUBIC, KEPT, BBR, SHOWN = "cubic", "cubic, windows kept", "bbr", "bbr, bandwidth shown"
"""Congestion controls; with ``net.ipv4.tcp_slow_start_after_idle=0``; after messages of :data:`SHOWN_BYTES` at once."""

SETUPS = (*((CUBIC, 0.02), (BBR, 0.02), (SHOWN, 0.02)), *((CUBIC, 0.5), (KEPT, 0.5), (BBR, 0.5), (SHOWN, 0.5)))
"""Each with the seconds between an answer and the next message; those with long ones are measured without losses."""

SHOWN_BYTES = 1 << 22
SIZES = (1_000, 30_000, 300_000, 3_000_000)
WARM_UP = 3
"""Messages that are not counted: windows are still opening."""

LONG_S = 0.1
SLOW_START = "/proc/sys/net/ipv4/tcp_slow_start_after_idle"


def measure(link: str, setup: str, pause_s: float, seconds: float) -> list[dict[str, Any]]:
    """Return a row for each size of messages on a link."""
    topology, rows = Topology.parse(f"hosts=2,{link},congestion={setup.split(',')[0]}"), []
    with open_network(topology) as lab:
        if setup == KEPT:
            for host in range(2):
                subprocess.run([*lab.enter(host), "sh", "-c", f"echo 0 > {SLOW_START}"], check=True)
        for size in SIZES:
            before, shown = sum(lab.retransmitted()), SHOWN_BYTES if setup == SHOWN else 0
            with on_host(lab, 1, "confirm", size) as server:
                line_of(server.stdout)
                with on_host(lab, 0, "message", lab.address(1), size, seconds, pause_s, shown) as sender:
                    times = [float(line) for line in sender.stdout or ()][WARM_UP:]
            low, middle, high = quantiles(times, n=4, method="inclusive")
            rows.append(
                {
                    "lab": topology.spec(),
                    "setup": setup,
                    "pause_s": pause_s,
                    "bandwidth_bits_per_s": topology.bandwidth,
                    "delay_s": topology.delay_s(0, 1),
                    "loss": topology.of_host(0).loss,
                    "size_bytes": size,
                    "messages": len(times),
                    "mean_s": fmean(times),
                    "median_s": middle,
                    "quartiles_s": [low, high],
                    "slowest_s": max(times),
                    "segments_again": sum(lab.retransmitted()) - before,
                }
            )
            print(
                f"{link:35s} {setup:20s} {pause_s:4g} s {size:9d} bytes: mean {1e3 * fmean(times):8.1f} ms, median"
                f" {1e3 * middle:8.1f}, quartiles {1e3 * low:.1f} and {1e3 * high:.1f}, {len(times)} messages",
                flush=True,
            )
    return rows


def main() -> None:
    """Measure all links with all setups."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS / "speed/lossy_messages.json")
    parser.add_argument("--seconds", type=float, default=2.5, help="seconds for each size on a link")
    given = parser.parse_args()
    rows = [
        row
        for rate, delay in LINKS
        for loss in LOSSES
        for setup, pause_s in SETUPS
        if not loss or pause_s < LONG_S
        for row in measure(
            f"bandwidth={rate},delay={delay}{',loss=' + loss if loss else ''}", setup, pause_s, given.seconds
        )
    ]
    write(given.json, hosts=2, shown_bytes=SHOWN_BYTES, rows=rows)


if __name__ == "__main__":
    main()
