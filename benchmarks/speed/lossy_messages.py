"""How long a message takes over one TCP connection whose frames are lost, by congestion control.

    sudo env "PATH=$PATH" python benchmarks/speed/lossy_messages.py

Two hosts and one connection, which stays open. The sender waits for an answer of one byte after each message, and then
for some time, as between the exchanges of two steps. The window of CUBIC shrinks with each loss and grows again slowly.
BBR sends at the rate that it has measured, and spreads a small message over half a round trip, losses or not. Both wait
for what was lost: a round trip if later frames tell the receiver of it, more if it was the end of the message.

Writes ``benchmarks/results/speed/lossy_messages.json``.
"""

from __future__ import annotations

import argparse
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
CONTROLS = ("cubic", "bbr")
SIZES = (1_000, 30_000, 300_000, 3_000_000)
PAUSE_S = 0.02
WARM_UP = 3
"""Messages that are not counted: windows are still opening."""


def measure(text: str, seconds: float) -> list[dict[str, Any]]:
    """Return a row for each size of messages on a link."""
    topology, rows = Topology.parse(f"hosts=2,{text}"), []
    with open_network(topology) as lab:
        for size in SIZES:
            before = sum(lab.retransmitted())
            with on_host(lab, 1, "confirm", size) as server:
                line_of(server.stdout)
                with on_host(lab, 0, "message", lab.address(1), size, seconds, PAUSE_S) as sender:
                    times = [float(line) for line in sender.stdout or ()][WARM_UP:]
            low, middle, high = quantiles(times, n=4, method="inclusive")
            rows.append(
                {
                    "lab": topology.spec(),
                    "congestion": topology.congestion,
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
                f"{text:55s} {size:9d} bytes: mean {1e3 * fmean(times):8.1f} ms, median {1e3 * middle:8.1f}, quartiles "
                f"{1e3 * low:.1f} and {1e3 * high:.1f}, {len(times)} messages",
                flush=True,
            )
    return rows


def main() -> None:
    """Measure all links with both congestion controls."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS / "speed/lossy_messages.json")
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds for each size on a link")
    given = parser.parse_args()
    rows = [
        row
        for rate, delay in LINKS
        for loss in LOSSES
        for control in CONTROLS
        for row in measure(
            f"bandwidth={rate},delay={delay}{',loss=' + loss if loss else ''},congestion={control}", given.seconds
        )
    ]
    write(given.json, hosts=2, pause_s=PAUSE_S, rows=rows)


if __name__ == "__main__":
    main()
