"""Predicted steps of the cluster of ``two_level.py``, to be compared with its measured ones.

    python benchmarks/speed/two_level_predictions.py --json benchmarks/results/speed/two_level_predictions.json

Calibrates this machine's collectives on loopback, where no link is emulated and no node is known, and profiles the same
perceptron; so nothing of what is predicted went into the prediction. Run it where ``two_level.py`` ran, with nothing
beside it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.runs import write
from benchmarks.speed.two_level import HSDP, METHODS, NODE, STEPS
from gradwire.model.forecast import NOTHING, Scenario, forecast
from gradwire.model.machine import LinkModel
from gradwire.tools.bench.predict import measure_machine
from gradwire.tools.bench.profile import profile_module
from gradwire.tools.lab import parse_rate

NODES, CORES, CALIBRATION_S = 2, 2, 180.0


def perceptron() -> nn.Module:
    """Return the module of ``two_level.py``."""
    return nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def main() -> None:
    """Predict all methods but HSDP's at all rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        machine = measure_machine(Path(folder) / "machine.json", lambda line: print(line, flush=True), CALIBRATION_S)
    inputs = torch.randn(16, 1024, generator=torch.Generator().manual_seed(0))
    profile = profile_module("perceptron", perceptron, lambda module, step: module(inputs).square().mean())
    specs = {name: spec for name, spec in METHODS.items() if not name.startswith(HSDP)}
    rows = []
    for rate in STEPS:
        link = LinkModel(bandwidth_bytes_per_s=(parse_rate(rate) or 0) / 8)
        # All ranks share this machine's cores.
        setting = Scenario(hosts=NODES, ranks_per_host=NODE, cores=CORES // NODES, link=link)
        found, refused = forecast(profile, [spec for spec in specs.values() if spec], setting, machine)
        assert not refused, refused
        steps = {f.method: f for f in found}
        for name, spec in specs.items():
            step = steps[spec or NOTHING]
            rows.append({"between": rate, "method": name, "spec": spec, "step_s": step.step_s})
            print(f"{rate:8s} {name:24s} {1e3 * step.step_s:9.1f} ms, bounded by {step.bottleneck}", flush=True)
    write(given.json, machine=machine.to_json(), rows=rows)


if __name__ == "__main__":
    main()
