"""The examples of Accelerate, Trainer, Lightning and Fabric, each in a fresh environment with its extra alone.

    python benchmarks/training/integrations.py --json benchmarks/results/training/integrations.json

For each extra a virtual environment is made and ``gradwire[EXTRA]`` installed with the pins of ``constraints.txt``.
Each example is trained on two processes with a method and by plain DDP. From a checkpoint after half of the steps it is
resumed on two processes, which has to give the same loss to the last digit, and on three, which goes on by the policy
of ``gradwire.load``. Losses are those of the whole data after the last step.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.results import ROOT
from benchmarks.lib.runs import write

METHOD = "ErrorFeedback(TopK(density=0.05))"
LIGHTNING = ("{python}", "lightning_digits.py", "--devices", "{processes}")
TORCHRUN = ("{python}", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "{processes}")
EXAMPLES = {
    "accelerate": ("accelerate", (*TORCHRUN, "accelerate_digits.py")),
    "trainer": ("trainer", (*TORCHRUN, "trainer_gpt2.py")),
    "lightning": ("lightning", LIGHTNING),
    "fabric": ("lightning", (*LIGHTNING, "--fabric")),
}
"""Of each framework, the extra and the command."""


def environment(folder: Path, extra: str) -> Path:
    """Make a virtual environment with an extra, and return its interpreter."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        # The examples of digits read scikit-learn's images.
        packages = [f"{ROOT}[{extra}]", "scikit-learn"]
        constraints = str(ROOT / "constraints.txt")
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "-c", constraints, *packages], check=True)
    return python


def loss_of(python: Path, command: tuple[str, ...], folder: Path, processes: int, *words: str) -> float:
    """Run an example, and return the loss that it prints."""
    filled = [word.format(python=python, processes=processes) for word in command]
    filled = [str(ROOT / "examples" / word) if word.endswith(".py") else word for word in filled]
    told = subprocess.run(
        [*filled, "--folder", str(folder), *words],
        check=False,
        capture_output=True,
        text=True,
        env={"OMP_NUM_THREADS": "1", **os.environ},
    )
    found = re.search(r"loss ([\d.]+)", told.stdout)
    if not found:
        raise SystemExit(f"{' '.join(filled)} printed no loss:\n{told.stdout}{told.stderr}")
    return float(found[1])


def main() -> int:
    """Run all; exit with 1 where a resumed training is another one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as path:
        work = Path(path)
        for framework, (extra, command) in EXAMPLES.items():
            python, folder = environment(work / extra, extra), work / f"{framework} run"
            row = {"framework": framework, "extra": extra, "method": METHOD}
            row["loss"] = loss_of(python, command, folder, 2, "--method", METHOD)
            row["loss_resumed"] = loss_of(python, command, folder, 2, "--method", METHOD, "--resume")
            row["loss_resumed_on_three"] = loss_of(python, command, folder, 3, "--method", METHOD, "--resume")
            row["loss_ddp"] = loss_of(python, command, work / f"{framework} plain", 2, "--method", "none")
            row["resumed_exactly"] = row["loss"] == row["loss_resumed"]
            rows.append(row)
            print(row, flush=True)
    write(arguments.json, rows=rows)
    return 0 if all(row["resumed_exactly"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
