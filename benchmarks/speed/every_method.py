"""A training step by every method: the MLP on 4 emulated hosts at 100 Mbit/s and at 1 Gbit/s, beside DDP.

    sudo env "PATH=$PATH" python benchmarks/speed/every_method.py --work runs/methods

All exchanges at once do not fit in memory, so they are measured in groups, each by one ``gradwire bench step`` with
DDP's float32 and TernGrad among the others' turns; a row's speed-up is over the float32 of its own group. Groups whose
file is whole are not repeated. Writes ``benchmarks/results/speed/step_methods.jsonl``, with the first group's
references. Methods with local steps are not among them: few of their steps have an exchange, and
``benchmarks/training/local_training.py`` has their times.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.results import RESULTS

REFERENCES = ("compute", "ddp fp32", "gradwire terngrad")
GROUPS = (
    ("ddp fp16", "ddp powersgd", "gradwire fp32", "gradwire fp16", "gradwire bf16", "gradwire natural"),
    (
        "gradwire auto",
        "gradwire coded",
        "gradwire Coded(compressor=TernGrad(clip=None))",
        "gradwire qsgd",
        "gradwire Coded(compressor=QSGD())",
        "gradwire qsgdinf",
        "gradwire nuqsgd",
    ),
    (
        "gradwire alq",
        "gradwire Coded(compressor=ALQ())",
        "gradwire alq_n",
        "gradwire amq",
        "gradwire amq_n",
        "gradwire naturaldithering",
    ),
    (
        "gradwire p_quantisation",
        "gradwire dqgd",
        "gradwire diana",
        "gradwire errorfeedback",
        "gradwire qsgdmaxnorm",
        "gradwire multiscale",
    ),
    (
        "gradwire grandk",
        "gradwire ErrorFeedback(compressor=GRandK())",
        "gradwire lattice",
        "gradwire scaledsign",
        "gradwire ef_signsgd",
    ),
    ("gradwire signsgd", "gradwire signum", "gradwire onebit"),
    ("gradwire eden", "gradwire drive", "gradwire quic_fl", "gradwire rotated", "gradwire dorefa"),
    (
        "gradwire topk",
        "gradwire ErrorFeedback(compressor=TopK())",
        "gradwire ErrorFeedback(compressor=TopK(density=0.001))",
        "gradwire GTopK(density=0.001)",
        "gradwire DGC(density=0.001)",
        "gradwire ErrorFeedback(compressor=SIDCo(density=0.001))",
    ),
    ("gradwire gtopk", "gradwire dgc", "gradwire sidco", "gradwire clt_k", "gradwire cat", "gradwire randk"),
    ("gradwire atomo", "gradwire spectral_atomo", "gradwire fourier_atomo", "gradwire scheduled", "gradwire l_greco"),
    (
        "gradwire powersgd",
        "gradwire acp_sgd",
        "gradwire ef21",
        "gradwire lgc",
        "gradwire rank_curve",
        "gradwire threshold",
    ),
    ("gradwire sketched_sgd", "gradwire sketched_amsgrad", "gradwire Hierarchical(TernGrad(), node_size=2)"),
    ("gradwire dpsgd", "gradwire choco_sgd", "gradwire power_gossip"),
)


def measure(group: tuple[str, ...], path: Path) -> list[str]:
    """Measure what of a group is not in its file yet; give the file's lines."""
    command = [sys.executable, "-m", "gradwire.tools.cli.main", "bench", "step", "--model", "mlp", "--hosts", "4"]
    command += ["--bandwidth", "100mbit", "--bandwidth", "1gbit", "--out", str(path)]
    for variant in (*REFERENCES, *group):
        command += ["--variant", variant]
    subprocess.run(command, check=True)
    return path.read_text().splitlines()


def float32_s(rows: list[dict[str, Any]], row: dict[str, Any]) -> float:
    """Return the seconds of DDP's float32 on the link of a row."""
    rate = row["bandwidth_bits_per_s"]
    same = (r for r in rows if r["variant"] == "ddp fp32" and r["bandwidth_bits_per_s"] == rate)
    return float(next(same)["step_time_s"])


def main() -> int:
    """Measure, gather, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/methods"))
    work = parser.parse_args().work
    work.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for number, group in enumerate(GROUPS):
        wanted = (*REFERENCES, *group) if number == 0 else group
        rows = [json.loads(line) for line in measure(group, work / f"{number}.jsonl")]
        for row in rows:
            # A group that was measured in two goes has its float32 in one of them.
            row["speedup_over_ddp_fp32"] = float32_s(rows, row) / row["step_time_s"]
        lines += [json.dumps(row) for row in rows if row["variant"] in wanted]
    (RESULTS / "speed/step_methods.jsonl").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
