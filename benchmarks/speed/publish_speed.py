"""Time of encoding and decoding patches against a memcpy of the same bytes, in turns in one run, on one thread.

    python benchmarks/speed/publish_speed.py --json benchmarks/results/speed/publish_speed.json

One tensor of bfloat16; of its elements a share, drawn at random, moves by one unit in the last place, either way.
Encoding finds the changes, codes them, advances the publisher's copy and computes all digests. Decoding is what a
subscriber does with the patch, from its bytes in memory on:

- in place: digests of the file, the sum of the whole base and of what it becomes are compared with the publisher's,
  which takes a pass of memory, and only then is anything written, in a second pass;
- staged: the same for the subscriber's own copy, which nothing else writes to or reads: words that change are summed
  while they are written, in one pass, and the sums of all tensors are compared before the copy is handed over. The swap
  that follows, a memcpy, is not counted.

A sum of all words, as a subscriber computes it when it starts, is timed as well. A memcpy copies as many bytes with
float32 elements. Rates are bytes of weights a second, of the best of all turns.

Times are those of the processor, which do not grow while the process waits for a core: the machine may be shared. What
others do to caches and memory remains, so that the ratio of times that were taken in turns counts.

Memory: the trained weights, the publisher's copy of them, and a reader's. The peak is that of the whole process.
"""

from __future__ import annotations

import argparse
import math
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.runs import cores_of_others, write
from gradwire.publish.container import read_head
from gradwire.publish.held import HeldWeights
from gradwire.publish.weights import LiveTensors


class Kept:
    """A place in memory, so that no disk is timed."""

    def __init__(self) -> None:
        self.files: dict[str, np.ndarray[Any, Any]] = {}

    def write(self, name: str, pieces: list[Any]) -> None:
        self.files[name] = np.concatenate([np.frombuffer(memoryview(piece), np.uint8) for piece in pieces])

    def read(self, name: str, most_bytes: int) -> np.ndarray[Any, Any]:
        if name not in self.files:
            raise FileNotFoundError(name)
        return self.files[name]

    def remove(self, name: str) -> None:
        self.files.pop(name, None)

    def names(self) -> list[str]:
        return []


READERS = ("in_place", "staged")


def peak_bytes() -> int:
    """Return the largest memory of this process so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def entropy(share: float) -> float:
    """Return the bits that tell which elements change, an element."""
    return -share * math.log2(share) - (1 - share) * math.log2(1 - share)


class Published:
    """Weights, their publisher, and the place that it writes to."""

    def __init__(self, elements: int, threads: int) -> None:
        self.rng, self.place, self.step = np.random.default_rng(0), Kept(), 0
        # Bits at random: what is compared and summed does not depend on them.
        words = self.rng.integers(0, 2**63, elements // 4, dtype=np.int64)
        self.weights = torch.from_numpy(words).view(torch.bfloat16)
        self.publisher = gw.WeightPublisher({"w": self.weights}, self.place, anchor_every=10**6, threads=threads)
        self.publisher.publish(0)
        self.place.files.clear()


def measure(published: Published, density: float, turns: int, threads: int) -> dict[str, Any]:
    """Time one share of changes."""
    weights, place, rng = published.weights, published.place, published.rng
    elements = weights.numel()
    places = np.cumsum(rng.geometric(density, int(1.1 * density * elements) + 1000)) - 1
    changed = torch.from_numpy(places[places < elements])
    ups = torch.from_numpy(rng.integers(0, 2, len(changed), dtype=np.int16) * np.int16(2) - np.int16(1))
    del places
    flat, source, size = weights.view(torch.int16), weights.view(torch.float32), 0
    spent: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], object]) -> Any:
        began = time.process_time()
        found = call()
        spent.setdefault(name, []).append(time.process_time() - began)
        return found

    for name in READERS:
        # One after the other, in the memory that a model's tensors and a staging copy have.
        live = LiveTensors({"w": weights.clone() if name == "in_place" else weights})
        if name == "staged":
            live = live.clone()
        held, served = HeldWeights(live, private=name == "staged"), live.tensors()["w"]
        held.identify(threads)
        target = served.view(torch.float32)
        for turn in range(turns + 1):
            published.step += 1
            flat[changed] += ups if turn % 2 else -ups
            publication = timed("encode", lambda: published.publisher.publish(published.step))
            (data,) = (file for name, file in place.files.items() if name.startswith("patch"))
            place.files.clear()
            size = publication.patch_bytes

            def apply(held: HeldWeights = held, data: np.ndarray[Any, Any] = data) -> None:
                held.apply(read_head(data), data, threads)
                held.settle()

            timed(name, apply)
            # The first patch, and the last, which follows on all others.
            if turn in (0, turns) and not torch.equal(served.view(torch.int16), flat):
                raise RuntimeError("the subscriber's weights differ")
            # To where they are already: no more memory is needed for a copy.
            timed("memcpy", lambda target=target: target.copy_(source))
            timed(f"sum_{name}", lambda held=held: held.identify(threads))
            if turn == 0:
                # A staging copy is decoded as one in place is until it has been verified.
                spent = {key: seconds[:-1] for key, seconds in spent.items()}
        del live, held, served, target, apply
    best = {name: min(seconds) for name, seconds in spent.items()}
    copy_s, nbytes = best["memcpy"], 2 * elements
    return {
        "elements": elements,
        "threads": threads,
        "share_changed": len(changed) / elements,
        "patch_bytes": size,
        "patch_bits_per_change": 8 * size / max(len(changed), 1),
        "bound_bits_per_change": 1 + entropy(len(changed) / elements) * elements / len(changed),
        "memcpy_bytes_per_s": nbytes / copy_s,
        **{f"{name}_s": seconds for name, seconds in best.items()},
        **{f"{name}_rate_of_memcpy": copy_s / seconds for name, seconds in best.items() if name != "memcpy"},
        "medians": {name: statistics.median(seconds) for name, seconds in spent.items()},
        "spread": {name: [min(s), max(s)] for name, s in spent.items()},
        "weight_bytes": nbytes,
        "peak_bytes": peak_bytes(),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1_000_000_000)
    parser.add_argument("--density", type=float, action="append")
    parser.add_argument("--turns", type=int, default=5, help="Turns of each way to decode")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    others = cores_of_others()
    torch.set_num_threads(1)
    rows, published = [], Published(arguments.elements, arguments.threads)
    for density in arguments.density or (0.01, 0.001, 0.026):
        rows.append(measure(published, density, arguments.turns, arguments.threads))
        print({k: (float(f"{v:.4g}") if isinstance(v, float) else v) for k, v in rows[-1].items()}, flush=True)
        write(
            arguments.json,
            cores_of_others=others,
            turns=arguments.turns,
            rows=sorted(rows, key=lambda r: r["share_changed"]),
        )


if __name__ == "__main__":
    main()
