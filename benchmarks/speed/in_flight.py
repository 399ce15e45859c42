"""How long a step takes beside an exchange in flight, and what a fragment sends: streaming DiLoCo on slow links.

    sudo env "PATH=$PATH" python benchmarks/speed/in_flight.py --json benchmarks/results/speed/in_flight.json

The language model of ``local_training.py`` on an emulated cluster. A cycle has 32 steps and four fragments, whose
exchanges begin after the steps 8, 16, 24 and 32 and end three steps later. So of every eight steps four exchange
nothing (*alone*), in one an exchange begins (its step ends with the codes made), two lie beside it (*beside*), and one
waits for it and takes the outer step (*ends*). DiLoCo with the same method inside sends all at once.

Steps are to be timed on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.runs import write

EVERY, FRAGMENTS, DELAY = 32, 4, 3
CYCLES = 3
INNER = {"fp32": "FP32()", "TernGrad": "TernGrad()", "EDEN, 4 bits": "EDEN(bits=4)"}
CELLS = ((2, "10mbit"), (2, "100mbit"), (4, "10mbit"), (4, "100mbit"))
KINDS = ("alone", "begins", "beside", "ends")

Row = dict[str, Any]


def kind(step: int) -> str:
    """Return what happens in a step of a cycle, counted from 1."""
    within = (step - 1) % (EVERY // FRAGMENTS) + 1
    if step > EVERY // FRAGMENTS and within <= DELAY:
        return "ends" if within == DELAY else "beside"
    return "begins" if within == EVERY // FRAGMENTS else "alone"


def trained(spec: str, hosts: int, bandwidth: str, work: Path) -> list[Row]:
    """Train for some cycles, and return the rows of steps."""
    steps, path = EVERY * CYCLES, work / "lab"
    command = [sys.executable, "-m", "gradwire.tools.cli.main", "train", "text", "--out", str(path), "--overwrite"]
    command += ["--lab", f"hosts={hosts},bandwidth={bandwidth}", "--steps", str(steps), "--eval-every", str(steps)]
    options = {"workers": hosts, "method": spec, "model": "transformer", "optimizer": "adam", "lr": 0.004}
    for key, value in (options | {"seed": 0, "log-every": 1}).items():
        command += [f"--{key}", str(value)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == "train"]


def most_sent(rows: list[Row]) -> int:
    """Return the bytes of the step that sends most."""
    sent = [0, *(row["sent_bytes"] for row in rows)]
    return max(b - a for a, b in pairwise(sent))


def measure(name: str, inner: str, hosts: int, bandwidth: str, work: Path) -> Row:
    """Time the steps of a cell by what happens in them, without the first cycle."""
    rows = trained(
        f"StreamingDiLoCo(every={EVERY}, fragments={FRAGMENTS}, delay={DELAY}, inner={inner})", hosts, bandwidth, work
    )
    whole = trained(f"DiLoCo(every={EVERY}, inner={inner})", hosts, bandwidth, work)
    found: Row = {"inner": name, "hosts": hosts, "bandwidth": bandwidth}
    for wanted in KINDS:
        times = [row["step_time_s"] for row in rows[EVERY:] if kind(row["step"]) == wanted]
        low, _, _, high = quantiles(times, n=5, method="inclusive")
        found[wanted] = {"steps": len(times), "median_s": median(times), "p20_s": low, "p80_s": high}
    found["beside_to_alone"] = found["beside"]["median_s"] / found["alone"]["median_s"]
    found |= {"most_bytes_streaming": most_sent(rows), "most_bytes_at_once": most_sent(whole)}
    found["longest_s_streaming"] = max(row["step_time_s"] for row in rows[EVERY:])
    found["longest_s_at_once"] = max(row["step_time_s"] for row in whole[EVERY:])
    print(
        f"{name:14s} {hosts} hosts, {bandwidth:8s}",
        *(f"{k} {1e3 * found[k]['median_s']:6.1f}" for k in KINDS),
        f"beside / alone {found['beside_to_alone']:.3f}, bytes {found['most_bytes_streaming']} of "
        f"{found['most_bytes_at_once']}",
        flush=True,
    )
    return found


def main() -> int:
    """Measure all cells."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/in_flight"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    rows = [
        measure(name, inner, hosts, bandwidth, arguments.work)
        for hosts, bandwidth in CELLS
        for name, inner in INNER.items()
    ]
    write(arguments.json, every=EVERY, fragments=FRAGMENTS, delay=DELAY, cycles=CYCLES, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
