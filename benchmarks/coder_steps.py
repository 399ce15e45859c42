"""Where a coder makes TernGrad's step shorter, and whether ``method="auto"`` finds out: 4 emulated hosts.

    sudo env "PATH=$PATH" python benchmarks/coder_steps.py

``gradwire bench step`` on every model and bandwidth with DDP fp32 and fp16, bf16, TernGrad packed and coded, and auto,
taking turns. Cells whose rows are whole are not measured again. Writes ``benchmarks/results/step_coded.jsonl``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from page_parts import ORDER, RESULTS

ROWS = RESULTS / "step_coded.jsonl"
BANDWIDTHS = ("50mbit", "100mbit", "1gbit", "5gbit", "unlimited")
VARIANTS = ("ddp fp32", "ddp fp16", "gradwire bf16", "gradwire terngrad", "gradwire coded", "gradwire auto")


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=ORDER, help="repeatable; by default all")
    chosen = parser.parse_args()
    command = [sys.executable, "-m", "gradwire.cli.main", "bench", "step", "--hosts", "4", "--out", str(ROWS)]
    for option, values in (("model", chosen.model or ORDER), ("bandwidth", BANDWIDTHS), ("variant", VARIANTS)):
        for value in values:
            command += [f"--{option}", value]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
