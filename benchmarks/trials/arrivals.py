"""How long members stand still while a newcomer takes their state, and how short the code of state is.

    sudo env "PATH=$PATH" python benchmarks/trials/arrivals.py --json benchmarks/results/trials/trials_arrivals.json

Three replicas train a network of four layers with momentum over an emulated network, until a fourth one comes. The
state is taken in both ways: by one member in plain bytes while all wait, and from all of them while they go on. The
pause is the longest time between two rounds beyond the usual one. 0.25 s of computing are slept in each step.

Then networks learn the digits of scikit-learn with Adam and with momentum, and their states are coded: by gradwire's
code of state, by zlib, and as the difference from the state some steps before (a patch of ``gradwire.publish``).
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.runs import earlier, write
from benchmarks.trials.churn import Trial
from benchmarks.trials.loaded import preload
from benchmarks.trials.membership import MEMBERS
from gradwire.kernels.pieces import PIECE_BYTES, Octets
from gradwire.kernels.pieces import encode as encode_piece
from gradwire.tools.lab import Topology, open_network

METHODS = ("terngrad", "PowerSGD(matrix_rank=2)", "DiLoCo(every=8, inner=EDEN(bits=4))")
WAYS = {"one member, all wait": 1 << 40, "all members, training goes on": 1 << 20}
QUIET_S, MOST_S, AFTER_S = 10.0, 120.0, 6.0


def arrival(spec: str, way: str, given: argparse.Namespace) -> dict[str, Any]:
    """Let one replica come to three others; return its row."""
    settings = {"compute_s": 0.25, "silence_s": 10.0, "momentum": 0.9, "replicas": 3, "log": False}
    options = argparse.Namespace(**settings, width=given.width, large_bytes=WAYS[way])
    with open_network(Topology.parse(f"hosts=5,{given.lab}")) as network:
        trial = Trial(MEMBERS, spec, options, network)
        try:
            while trial.started or not trial.counted:
                trial.read(0.5)
            trial.read(2.0)
            began_s = time.monotonic()
            trial.read(QUIET_S)
            usual = median(gaps(trial, began_s))
            came_s = time.monotonic()
            trial.start(3)
            (name,) = trial.started
            while trial.started and time.monotonic() - came_s < MOST_S:
                trial.read(0.1)
            in_s = time.monotonic() - came_s
            trial.read(AFTER_S)
            pause_s = max(gaps(trial, came_s - usual)) - usual
            told = trial.told[name]
        finally:
            trial.close()
    return {
        "method": spec,
        "way": way,
        "lab": given.lab,
        "state_mb": round(8 * (4 * given.width * (given.width + 1)) / 1e6, 1),
        "usual_round_s": round(usual, 3),
        "pause_s": round(pause_s, 2),
        "in_after_s": round(in_s, 2),
        "received_mb": round(told["state_received_bytes"] / 1e6, 1),
        "had_mb": round(told["state_reused_bytes"] / 1e6, 1),
        "steps_replayed": told["steps_replayed"],
        "rounds_with_differing_digests": sum(len(found) > 1 for found in trial.digests.values()),
    }


def gaps(trial: Trial, since_s: float) -> list[float]:
    """Return the seconds between rounds since a time."""
    times = sorted(found.at_s for found in trial.counted.values() if found.at_s >= since_s)
    return [b - a for a, b in itertools.pairwise(times)]


def trained(kind: str, steps: int) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
    """Train on digits; yield the state after each step: parameters, gradients, and the optimizer's vectors."""
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    images, labels = (torch.tensor(x) for x in load_digits(return_X_y=True))
    module = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    if kind == "Adam":
        optimizer: torch.optim.Optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    else:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        batch = torch.randint(len(images), (64,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(module((images[batch] / 16).float()), labels[batch]).backward()
        optimizer.step()
        vectors: dict[str, list[torch.Tensor]] = {"parameters": [p.detach() for p in module.parameters()]}
        vectors["gradients"] = [p.grad for p in module.parameters() if p.grad is not None]
        for kept in optimizer.state.values():
            for name, x in kept.items():
                if isinstance(x, torch.Tensor) and x.numel() > 1:
                    vectors.setdefault(name, []).append(x)
        yield step, {name: torch.cat([x.reshape(-1) for x in parts]).clone() for name, parts in vectors.items()}


def patch_bytes(old: torch.Tensor, new: torch.Tensor) -> int:
    """Return the bytes of a difference as ``gradwire.publish`` codes it."""
    from gradwire.publish.changes import encode_changes
    from gradwire.publish.layout import BY_DTYPE, Entry, Layout

    layout = Layout([Entry("x", BY_DTYPE[torch.float32], (len(new),))])
    before, after = (x.view(torch.uint8) for x in (old, new))
    found = encode_changes(layout.spans(0, layout.blocks), lambda s: before[s.octets], lambda s: after[s.octets])
    return 0 if found is None else sum(map(len, found.pieces))


def coded(octets: Octets) -> int:
    """Return the bytes of the code of state."""
    pieces = (octets[at : at + PIECE_BYTES] for at in range(0, len(octets), PIECE_BYTES))
    return sum(len(encode_piece(piece, 4, True)) for piece in pieces)


def codes(steps: int = 300) -> list[dict[str, Any]]:
    """Return the bytes of states under each code, as a share of the plain ones."""
    rows = []
    ways: dict[str, Callable[[Octets], int]] = {
        "state": coded,
        "zlib_1": lambda octets: len(zlib.compress(octets.tobytes(), 1)),
        "zlib_6": lambda octets: len(zlib.compress(octets.tobytes(), 6)),
    }
    for kind in ("SGD with momentum", "Adam"):
        states = dict(trained(kind, steps))
        for name, x in states[steps - 1].items():
            octets = x.view(torch.uint8).numpy()
            row: dict[str, Any] = {"optimizer": kind, "vector": name, "elements": len(x)}
            for way, code in ways.items():
                code(octets)
                seconds = []
                for _ in range(3):
                    began_s = time.perf_counter()
                    size = code(octets)
                    seconds.append(time.perf_counter() - began_s)
                row |= {f"{way}_share": round(size / len(octets), 3)}
                row |= {f"{way}_mb_per_s": round(len(octets) / min(seconds) / 1e6)}
            for back in (1, 10):
                before = states[steps - 1 - back][name]
                row[f"patch_{back}_share"] = round(patch_bytes(before, x) / len(octets), 3)
            rows.append(row)
            print(row, flush=True)
    return rows


def main() -> int:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lab", default="bandwidth=100mbit,delay=20ms", help="the emulated network")
    parser.add_argument("--width", type=int, default=1024, help="of each of four layers")
    parser.add_argument("--method", action="append")
    parser.add_argument("--codes", action="store_true", help="measure the codes alone")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = {"rows": earlier(given.json, "rows"), "codes": earlier(given.json, "codes")}
    if not found["codes"]:
        found["codes"] = codes()
        write(given.json, **found)
    if given.codes:
        return 0
    methods = given.method or METHODS
    preload(methods)
    known = {(row["method"], row["way"], row["lab"]) for row in found["rows"]}
    for spec, way in itertools.product(methods, WAYS):
        if (spec, way, given.lab) not in known:
            found["rows"].append(arrival(spec, way, given))
            print(found["rows"][-1], flush=True)
            write(given.json, **found)
    return int(any(row["rounds_with_differing_digests"] for row in found["rows"]))


if __name__ == "__main__":
    sys.exit(main())
