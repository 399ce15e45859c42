"""Training steps on emulated links with delay and loss: by DDP's own exchanges and by four methods.

    sudo env "PATH=$PATH" python benchmarks/speed/long_links.py

Three models, 2, 4 and 8 hosts, 10 Mbit/s to 1 Gbit/s, 1, 20 and 80 ms one way, and 0, 0.1 and 1 % of the frames lost:
all combinations would take eight hours, so :data:`CELLS` is a part in which each of these values meets most of the
others. Cells whose step in float32 takes longer than ten seconds are left out. :data:`CUBIC` are cells of it under
CUBIC, Linux's usual congestion control, where this machine's is another one. Each cell is one ``gradwire bench
step``, whose exchanges take turns, so that they can be compared with each other. Rows that are in the file are not
measured again: remove it to measure all on one day. Writes ``benchmarks/results/speed/step_long_links.jsonl``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.results import RESULTS

CELLS = (
    # Model, hosts, rate, delay, loss. The cells that goals are set for come first.
    ("lenet", 8, "100mbit", "20ms", ""),
    ("mlp", 4, "100mbit", "20ms", ""),
    ("lenet", 8, "100mbit", "80ms", ""),
    ("lenet", 8, "100mbit", "20ms", "0.1%"),
    ("lenet", 4, "10mbit", "20ms", ""),
    ("mlp", 4, "1gbit", "20ms", ""),
    ("lenet", 8, "100mbit", "1ms", ""),
    ("transformer", 4, "100mbit", "20ms", ""),
    ("mlp", 4, "1gbit", "80ms", ""),
    ("lenet", 4, "1gbit", "20ms", "1%"),
    ("mlp", 2, "1gbit", "20ms", "0.1%"),
    ("transformer", 2, "1gbit", "80ms", ""),
    ("lenet", 2, "10mbit", "80ms", ""),
    ("mlp", 4, "100mbit", "1ms", ""),
    ("transformer", 8, "1gbit", "20ms", ""),
    ("lenet", 4, "100mbit", "80ms", "0.1%"),
    ("mlp", 2, "100mbit", "80ms", ""),
    ("lenet", 2, "1gbit", "1ms", ""),
    ("transformer", 4, "1gbit", "1ms", ""),
    ("lenet", 8, "10mbit", "1ms", ""),
    ("transformer", 2, "100mbit", "20ms", "1%"),
)
CUBIC = tuple((*CELLS[number], "cubic") for number in (0, 1, 3, 9, 10, 15))
"""The cells that goals are set for, and those that lose frames."""

VARIANTS = (
    "compute",
    "ddp fp32",
    "ddp fp16",
    "ddp powersgd",
    "gradwire terngrad",
    "gradwire Coded(TernGrad())",
    "gradwire EDEN(bits=4)",
    "gradwire acp_sgd",
)


def command(cell: tuple[Any, ...], seconds: float, out: Path) -> list[str]:
    """Return the command that measures a cell for about so many seconds."""
    model, hosts, rate, delay, loss, *congestion = cell
    words = [sys.executable, "-m", "gradwire.tools.cli.main", "bench", "step", "--model", model, "--hosts", str(hosts)]
    words += ["--bandwidth", rate, "--delay", delay, *(["--loss", loss] if loss else [])]
    words += ["--congestion", *congestion] if congestion else []
    words += ["--cell-budget", str(seconds), "--out", str(out)]
    for variant in VARIANTS:
        words += ["--variant", variant]
    return words


def main() -> int:
    """Measure the cells whose rows are not in the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "speed/step_long_links.jsonl")
    parser.add_argument("--cell-budget", type=float, default=30.0, help="seconds for all exchanges of a cell")
    parser.add_argument("--first", type=int, default=None, help="measure the first cells only")
    arguments = parser.parse_args()
    failed = 0
    for cell in (*CELLS, *CUBIC)[: arguments.first]:
        print(*cell, flush=True)
        failed += bool(subprocess.run(command(cell, arguments.cell_budget, arguments.out), check=False).returncode)
    if failed:
        print(f"{failed} cells failed; start again to measure what they lack", file=sys.stderr)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
