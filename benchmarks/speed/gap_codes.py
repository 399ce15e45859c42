"""Bytes of the positions that sparse methods send: as they are packed, entropy-coded, and the entropy of their gaps.

    python benchmarks/speed/gap_codes.py --mnist FOLDER --cifar10 FOLDER --json benchmarks/results/speed/gap_codes.json

Four simulated workers train with ``ErrorFeedback(TopK(density))``, so that positions lie as in real payloads, in
clusters if gradients do. Every tenth step the positions of all workers are packed in the shortest of the formats that
need no coder, and coded as ``Coded`` does, by either coder, with headers, tables and checks. ``sent`` is the shortest
for each payload. The empirical entropy of the gaps' symbols, with the bits beside them, is what no coder of single
symbols can go below, even if its table cost nothing. ``random`` is log2 of the number of ways to choose so many
positions: the least for positions without any order.

Beside them stand positions drawn at random, for sizes that the tasks do not have.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.runs import write
from gradwire.kernels import get_kernels, smallest_format
from gradwire.kernels.entropy import entropy_bits, get_coder
from gradwire.kernels.indices.operations import IndexOperations
from gradwire.methods.sparse.sparse_codec import encode_gaps, gaps_of, symbols_of
from gradwire.tools.experiments import tasks
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.simulate import SimulatedEngine

DENSITIES = (0.1, 0.01, 0.001)
STEPS, EVERY = 100, 10
RANDOM = 1 << 22
Positions = npt.NDArray[np.int64]


def sizes(index: Positions, numel: int) -> dict[str, float]:
    """Return the bits that a position takes, by what packs it."""
    positions, count = torch.from_numpy(index.astype(np.int32)), len(index)
    packed = smallest_format(get_kernels("auto").gap_statistics(positions, numel)).bytes
    coded = {name: len(encode_gaps(positions, get_coder(name))) for name in ("rans", "huffman")}
    symbols, left = symbols_of(gaps_of(positions))
    chosen = math.lgamma(numel + 1) - math.lgamma(count + 1) - math.lgamma(numel - count + 1)
    return {
        "packed_bits": 8 * packed / count,
        **{f"{name}_bits": 8 * size / count for name, size in coded.items()},
        "sent_bits": 8 * min(packed, *coded.values()) / count,
        "entropy_bits": (entropy_bits(torch.from_numpy(symbols)) + int(left.sum())) / count,
        "random_bits": chosen / math.log(2) / count,
    }


def row_of(name: str, density: float, found: list[tuple[Positions, int]]) -> dict[str, Any]:
    """Return the mean over payloads."""
    each = [sizes(index, numel) for index, numel in found]
    row: dict[str, Any] = {
        "positions_of": name,
        "density": density,
        "numel": max(numel for _, numel in found),
        "count": sum(len(index) for index, _ in found) / len(found),
        "payloads": len(found),
    }
    row.update({key: sum(one[key] for one in each) / len(each) for key in each[0]})
    print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()})
    return row


def trained(task: Any, density: float) -> list[tuple[Positions, int]]:
    """Train, and return the positions of every tenth step's payloads with what they are below."""
    spec = f"ErrorFeedback(compressor=TopK(density={density}))"
    engine = SimulatedEngine(RunConfig(task=task, method=spec, workers=4, simulate=True))
    optimizer, found, encode = task.build_optimizer(engine.model), [], IndexOperations.encode_indices

    def watched(self: Any, index: torch.Tensor, numel: int, *others: Any) -> int:
        if step % EVERY == 0:
            found.append((index.numpy().astype(np.int64), numel))
        return encode(self, index, numel, *others)

    with mock.patch.object(IndexOperations, "encode_indices", watched):
        for step in range(1, STEPS + 1):
            for group in optimizer.param_groups:
                group["lr"] = task.learning_rate(step - 1)
            engine.backward(step - 1)
            optimizer.step()
    return found


def drawn(density: float) -> list[tuple[Positions, int]]:
    """Return positions that are a uniform choice."""
    generator = np.random.default_rng(0)
    return [(np.sort(generator.choice(RANDOM, int(density * RANDOM), replace=False)), RANDOM)]


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", help="folder with MNIST's files")
    parser.add_argument("--cifar10", help="folder with CIFAR-10's data batches")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folders = {"text": None, "digits": None, "mnist": arguments.mnist, "cifar10": arguments.cifar10}
    rows = [row_of("random", density, drawn(density)) for density in DENSITIES]
    for name, folder in folders.items():
        if folder is None and name in ("mnist", "cifar10"):
            continue
        task = tasks.build(name, steps=STEPS, **({} if folder is None else {"data": folder}))
        rows += [row_of(name, density, trained(task, density)) for density in DENSITIES]
    write(arguments.json, steps=STEPS, every=EVERY, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
