"""How long messages take under CUBIC on links that lose frames: at first, and once the connection's window has settled.

    sudo env "PATH=$PATH" python benchmarks/speed/settling.py

Two hosts exchange messages over one connection, as in ``lossy_messages.py``, for :data:`SECONDS`. A window begins as
long as a message, and each loss shortens it. The result also has the time that the performance model predicts: a round
trip, and the bytes of a message at :func:`gradwire.model.machine.connection_rate`. ``gradwire bench step`` counts no
step before windows have settled (:func:`gradwire.tools.bench.pace.settling_s`). Writes
``benchmarks/results/speed/settling.json``.
"""

from __future__ import annotations

import argparse
import sys
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.results import RESULTS
from benchmarks.lib.runs import write
from benchmarks.speed.lab_network import line_of, on_host
from gradwire.model.machine import CUBIC, connection_rate
from gradwire.tools.bench.pace import settling_s
from gradwire.tools.lab import Topology, open_network

CELLS = (
    ("bandwidth=1gbit,delay=20ms,loss=0.1%", 1_250_000),
    ("bandwidth=100mbit,delay=20ms,loss=0.1%", 300_000),
    ("bandwidth=100mbit,delay=80ms,loss=0.1%", 300_000),
    ("bandwidth=1gbit,delay=20ms,loss=1%", 300_000),
)
"""Links, and bytes of a message."""

SECONDS = 75.0
FIRST_S = 2.0
"""Time from which the first mean is."""
PAUSE_S = 0.02


def measure(link: str, size: int, seconds: float) -> dict[str, Any]:
    """Return the mean times of messages at first and after the window has settled, and what is predicted."""
    topology = Topology.parse(f"hosts=2,{link},congestion={CUBIC}")
    with open_network(topology) as lab:
        before = sum(lab.retransmitted())
        with on_host(lab, 1, "confirm", size) as server:
            line_of(server.stdout)
            with on_host(lab, 0, "message", lab.address(1), size, seconds, PAUSE_S, 0) as sender:
                times = [float(line) for line in sender.stdout or ()]
        again = sum(lab.retransmitted()) - before
    begins = [0.0, *accumulate(spent + PAUSE_S for spent in times)]
    delay_s, loss, settled_s = topology.delay_s(0, 1), topology.of_host(0).loss, settling_s(topology.links(), CUBIC)
    first = [spent for at, spent in zip(begins, times) if at < FIRST_S]
    later = [spent for at, spent in zip(begins, times) if at >= settled_s]
    return {
        "lab": topology.spec(),
        "size_bytes": size,
        "settling_s": settled_s,
        "messages": len(times),
        "first_mean_s": fmean(first),
        "settled_messages": len(later),
        "settled_mean_s": fmean(later),
        "predicted_s": size / connection_rate(delay_s, loss) + 2 * delay_s,
        "segments_again": again,
    }


def main() -> None:
    """Measure all cells."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS / "speed/settling.json")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="seconds for each link")
    given = parser.parse_args()
    rows = []
    for link, size in CELLS:
        rows.append(measure(link, size, given.seconds))
        print(rows[-1], flush=True)
    write(given.json, hosts=2, first_s=FIRST_S, rows=rows)


if __name__ == "__main__":
    main()
