"""What it costs a worker to decode the payloads of all workers after an all-gather, by their number.

    python benchmarks/speed/decoding.py --json benchmarks/results/speed/decoding.json

A million elements in one bucket, payloads gathered, codecs rehearsed here by the code of the performance model. The
growth is that of a payload more: the slope of a line through the times.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.runs import write
from gradwire.exchange.planning import Options
from gradwire.model.exchange_profile import exchange_of
from gradwire.model.profile import ReadyBucket

SIDE, REPEATS = 1024, 15
WORKERS = (2, 4, 8, 16)
METHODS = ("QUICFL(bits=4)", "EDEN(bits=4)", "DRIVE()", "QSGDinf()", "TernGrad(share_scaler=False)", "TopK()")


def decoding_s(spec: str, workers: int) -> float:
    """Return the seconds of work after the last message."""
    parameters = {"w": torch.empty(SIDE, SIDE, device="meta")}
    bucket = ReadyBucket(names=("w",), numel=SIDE * SIDE, ready_s=0.0)
    options = Options.of({"collective": "all_gather"})
    found = exchange_of(spec, parameters, [bucket], workers, options, REPEATS)
    (jobs,) = found.buckets
    return sum(chunk[-1].work_s for chunk in jobs.chunks if not chunk[-1].kind)


def main() -> None:
    """Measure all, and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for spec in METHODS:
        times = [decoding_s(spec, workers) for workers in WORKERS]
        growth, _ = np.polyfit(WORKERS, times, 1)
        rows.append({"method": spec, "workers": WORKERS, "ms": [1e3 * t for t in times], "ms_a_worker": 1e3 * growth})
        print(f"{spec:30s} {'  '.join(f'{1e3 * t:6.2f}' for t in times)} ms, {1e3 * growth:.3f} a worker", flush=True)
    write(given.json, elements=SIDE * SIDE, repeats=REPEATS, rows=rows)


if __name__ == "__main__":
    main()
