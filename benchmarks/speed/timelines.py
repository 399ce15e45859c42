"""Where a step's time goes while the workers sleep instead of computing: the MLP on 4 hosts.

    sudo env "PATH=$PATH" python benchmarks/speed/timelines.py

``gradwire bench timeline`` for TernGrad, packed and coded, at 100 Mbit/s and 1 Gbit/s: medians over ranks and
steps, and a figure of one rank's lanes for each. Writes ``benchmarks/results/speed/timelines.json`` and
``docs/figures/lanes_*.png``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.results import RESULTS, ROOT
from benchmarks.lib.runs import write

METHODS = ("terngrad", "coded")
BANDWIDTHS = ("100mbit", "1gbit")
HOSTS = 4


def record(method: str, bandwidth: str, steps: int) -> dict[str, Any]:
    """Return the medians of all parts of a step."""
    figure = ROOT / "docs" / "figures" / f"lanes_{method}_{bandwidth}.png"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "gradwire.tools.cli.main", "bench", "timeline", "--json", "--method", method]
        command += ["--lab", f"hosts={HOSTS},bandwidth={bandwidth}", "--steps", str(steps), "--figure", str(figure)]
        command += ["--out", str(Path(folder) / "trace.json")]
        rows = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    parts = [key for key in rows[0] if key.endswith("_s")]
    found = {key: median(row[key] for row in rows) for key in parts}
    times = sorted(row["step_time_s"] for row in rows)
    return {
        "method": method,
        "bandwidth": bandwidth,
        "steps": steps,
        "fastest_s": times[0],
        "slowest_s": times[-1],
        "sent_bytes_per_step": median(row["sent_bytes_per_step"] for row in rows),
        **found,
    }


def main() -> int:
    """Record, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path, default=RESULTS / "speed/timelines.json")
    arguments = parser.parse_args()
    rows = [record(method, bandwidth, arguments.steps) for bandwidth in BANDWIDTHS for method in METHODS]
    for row in rows:
        parts = {name: f"{1e3 * row[f'{name}_s']:.1f} ms" for name in ("step_time", "earliest", "wire_floor", "rows")}
        print(row["method"], row["bandwidth"], *(f"{name} {text}" for name, text in parts.items()), sep="  ")
    write(arguments.json, model="mlp", hosts=HOSTS, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
