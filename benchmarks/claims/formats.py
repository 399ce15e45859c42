"""Error at equal bits beside today's number formats and quantisers, for one hop, an owner, a ring and a butterfly.

    python benchmarks/claims/formats.py --mnist FOLDER --cifar10 FOLDER --json benchmarks/results/claims/formats.json

Gradients of the library's tasks at an early and a late step, of distinct batches, a worker each. vNMSE is
|estimate - mean|^2 / |mean|^2 with the true mean of the workers' gradients, as THC and DynamiQ report it. Bits are all
that is sent for an element in one direction, scales, tables and padding included: by this library's methods as their
links count it, by others as ``benchmarks/lib/formats.py`` and ``benchmarks/lib/summed_formats.py`` state it.

Whole gradients are large: pieces of 1024 neighbours, evenly spaced over the parameters, stand for them, and each is a
chunk of the ring and the butterfly, by its own order of the workers. Where a method's blocks are longer than a chunk,
these two are left out. Payloads with a coder have tables: their bits are counted on a vector that is four times as
long, which is still short for a bucket. Without ``--mnist`` or ``--cifar10`` that task is left out.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.formats import MX, NVFP4, TurboQuant
from benchmarks.lib.hops import CHUNK, TOPOLOGIES, mean_by, vnmse
from benchmarks.lib.measured_rounds import (
    DynamiQMeasured,
    EnergyRound,
    FormatRound,
    LibraryRound,
    SumsRound,
    THCRound,
    library_sums,
    payload_bits,
)
from benchmarks.lib.runs import write
from benchmarks.lib.summed_formats import THC, DynamiQ
from benchmarks.lib.task_gradients import sampled, task_gradients
from gradwire.tools.experiments import tasks

TASKS: dict[str, tuple[dict[str, Any], int]] = {
    "digits": ({}, 16),
    "mnist": ({}, 16),
    "text": ({"model": "transformer", "batch": 16}, 8),
    "cifar10": ({"batch": 32}, 16),
}
"""Settings of the training, and samples of a worker's gradient."""

STEPS = (5, 100)
FEW = 8
"""Most workers at the early step, and of methods that are not among the best: more would take longer than all else."""

HOPS = ("ring", "butterfly")


def coded(inner: str) -> str:
    """Return the spec of an operator with its digits coded by rANS."""
    return f"Coded(compressor={inner}, coder='rans')"


OURS = (
    # A little below 2, 3, 4, 4.25, 4.5, 5 and 6 bits with scales and tables.
    *(coded(f"EDEN(bits={b}, block_size=1024, spacing='uniform')") for b in (1.88, 2.88, 3.87, 4.11, 4.36, 4.85, 5.85)),
    "EDEN(bits=4, block_size=1024)",
    *(coded(f"QSGDinf(levels={levels}, block_size=16384)") for levels in (63, 127)),
    coded("QSGDinf(levels=127, block_size=1024)"),
    coded("Rotated(compressor=QSGDinf(levels=127, block_size=96), block_size=1024)"),
)
ONE_HOP = (
    *(f"QUICFL(bits={bits}, block_size=1024)" for bits in (2, 3, 4)),
    "Rotated(compressor=QSGDinf(levels=7, block_size=1024), block_size=1024)",
    "QSGDinf(levels=7, block_size=64)",
    "QSGD(levels=7, block_size=64)",
    "NUQSGD(levels=7, block_size=64)",
    "DoReFa(bits=4, block_size=64)",
    "DoReFa(bits=8, block_size=128)",
    "NaturalDithering(levels=8, block_size=64)",
    "Lattice(colours=256)",
    "ALQ(block_size=512, updates=(0,), every=1000000)",
    "AMQ(block_size=512, updates=(0,), every=1000000)",
)
"""Measured where all send to all alone: far above the others there, or without a way to encode a sum again."""

SUMS = ("QSGDMaxNorm(levels=15)", "Rotated(compressor=QSGDMaxNorm(levels=15))", "MultiScale(levels=(15, 255))")
"""Their codes add up."""

FORMATS: dict[str, Any] = {
    "MXFP4": MX("E2M1"),
    "MXFP4, at random": MX("E2M1", stochastic=True),
    "MXFP6 E2M3": MX("E2M3"),
    "MXFP6 E3M2": MX("E3M2"),
    "MXFP8 E4M3": MX("E4M3"),
    "MXFP8 E5M2": MX("E5M2"),
    "NVFP4": NVFP4(),
    "NVFP4, at random": NVFP4(stochastic=True),
    **{f"TurboQuant mse, {bits} bits": TurboQuant(bits) for bits in (2, 3, 4, 5, 6, 8)},
}
PRODUCTS = {f"TurboQuant prod, {bits} bits": TurboQuant(bits, "prod") for bits in (2, 3, 4)}
THCS = {
    f"THC, {bits} bits, {name} cut": THC(bits, 2 ** (bits + 1) - 2, 1 / inverse)
    for bits, name, inverse in ((2, "1/32", 32), (3, "1/32", 32), (4, "1/32", 32), (4, "1/1024", 1024))
}
DYNAMIQ = {
    f"DynamiQ, {budget} bits": DynamiQ(budget, (2, 4, 8, 16) if budget > 6 else (2, 4, 8)) for budget in (3, 4, 5, 6, 8)
}
STUDIED = (4, 5)

OFTEN = {*OURS, *FORMATS, *THCS, *DYNAMIQ}
"""Measured with any number of workers."""

Begin = Callable[[Tensor, int], FormatRound]


def seeded(seed: int) -> torch.Generator:
    """Return a generator."""
    return torch.Generator().manual_seed(seed)


def format_round(of: Any, rows: Tensor, seed: int) -> FormatRound:
    """Begin a round of a format, of THC or of DynamiQ."""
    if isinstance(of, THC):
        return THCRound(of, rows, seeded(seed))
    if isinstance(of, DynamiQ):
        return DynamiQMeasured(of, rows, seeded(seed))
    return FormatRound(of, of.bits(rows.shape[1]), rows, seeded(seed))


def methods() -> dict[str, tuple[str, tuple[str, ...], Begin]]:
    """Return, by name, whose a method is, the ways it is measured on, and what begins a round of it."""
    once = TOPOLOGIES[:1]
    return {
        **{spec: ("ours", TOPOLOGIES, partial(LibraryRound, spec)) for spec in OURS},
        **{spec: ("ours", once, partial(LibraryRound, spec)) for spec in ONE_HOP},
        **{spec: ("ours", TOPOLOGIES, partial(library_sums, spec)) for spec in SUMS},
        **{n: ("theirs", TOPOLOGIES, partial(format_round, of)) for n, of in (FORMATS | THCS | DYNAMIQ).items()},
        **{name: ("theirs", once, partial(format_round, of)) for name, of in PRODUCTS.items()},
        **{f"EDEN, bits by energy, {b} bits": ("study", TOPOLOGIES, partial(EnergyRound, b)) for b in STUDIED},
    }


def longest_block(name: str) -> int:
    """Return the elements of the longest block that a spec names."""
    return max((int(size) for size in re.findall(r"block_size=(\d+)", name)), default=1)


def measure(name: str, ways: tuple[str, ...], begin: Begin, rows: Tensor, seed: int) -> dict[str, tuple[float, ...]]:
    """Return bits of a code and of a sum, and vNMSE by topology, of one quantiser for the workers' gradients."""
    round = begin(rows, seed)
    found: dict[str, tuple[float, ...]] = {"bits": (round.bits, round.sum_bits)}
    adds, gathered = isinstance(round, SumsRound), round.gathered()
    for way in ways:
        if way in HOPS and longest_block(name) > CHUNK and not adds:
            continue
        found[way] = (vnmse(mean_by("one hop" if adds else way, round, gathered), rows),)
    return found


def main() -> int:
    """Train, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", help="folder with MNIST's idx files")
    parser.add_argument("--cifar10", help="folder with CIFAR-10's data batches")
    parser.add_argument("--workers", default="2,4,8,16,32,64", help="numbers of workers, powers of two")
    parser.add_argument("--numel", type=int, default=16384, help="elements of each gradient, a power of two")
    parser.add_argument("--only", default="", help="measure methods whose name contains this")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    counts = [int(part) for part in chosen.workers.split(",")]
    folders = {"mnist": chosen.mnist, "cifar10": chosen.cifar10}
    wanted = {name: of for name, of in methods().items() if chosen.only in name}
    found: dict[str, dict[str, list[str]]] = {name: {way: [] for way in ways} for name, (_, ways, _) in wanted.items()}
    started = time.process_time()
    for task, (settings, batch) in TASKS.items():
        if task in folders and folders[task] is None:
            continue
        data = {"data": folders[task]} if task in folders else {}
        built = tasks.build(task, **settings, **data)
        for step, whole in task_gradients(built, {STEPS[0]: min(FEW, max(counts)), STEPS[1]: max(counts)}, batch):
            gradients = sampled(whole, chosen.numel)
            long = sampled(whole, min(4 * chosen.numel, whole.shape[1] // CHUNK * CHUNK))
            coded_bits = {name: payload_bits(name, long) for name in wanted if name.startswith("Coded")}
            for count in (c for c in counts if c <= len(gradients)):
                for seed, (name, (_, ways, begin)) in enumerate(wanted.items()):
                    if count > FEW and name not in OFTEN:
                        continue
                    errors = measure(name, ways, begin, gradients[:count], seed)
                    bits = coded_bits.get(name, errors.pop("bits"))
                    for way, (error,) in errors.items():
                        line = f"{task} {step} {count} {bits[way != 'one hop']:.4g} {error:.4g}"
                        found[name][way].append(line)
                print(f"{task}, step {step}, {count} workers: {time.process_time() - started:.0f} s", flush=True)
    write(
        chosen.json,
        numel=chosen.numel,
        workers=counts,
        steps=STEPS,
        processor_s=round(time.process_time() - started),
        columns="task step workers bits vnmse",
        whose={name: whose for name, (whose, _, _) in wanted.items()},
        found=found,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
