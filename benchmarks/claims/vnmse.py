"""The error of every quantiser at the bits that it takes: E|Q(x) - x|^2 / |x|^2, for normal and for lognormal values.

    python benchmarks/claims/vnmse.py --json benchmarks/results/claims/vnmse.json

One worker, so that nothing but the encoding itself errs; bits are those of a payload, headers included, from bytes that
were counted: of a coder's, those of the normal values. Beside EDEN, DRIVE and QUIC-FL stands what is derived for normal
values.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.runs import write
from gradwire.methods.rotations.bounded_levels import ERROR
from gradwire.methods.rotations.normal_levels import DISTORTION, level_count, uniform_levels, uniform_step

SPECS = (
    *(f"EDEN(bits={bits})" for bits in (0.25, 0.5, 1, 1.6, 2, 2.47, 2.67, 2.91, 3, 3.2, 3.56, 4, 4.58, 5, 5.34, 6)),
    *(f"Coded(compressor=EDEN(bits={bits}), coder='rans')" for bits in (2, 3, 4)),
    *(
        f"Coded(compressor=EDEN(bits={bits}, spacing='uniform'), coder='rans')"
        for bits in (0.25, 0.5, 1, 1.5, 2, 2.5, 3, 4, 5, 6)
    ),
    *(f"QUICFL(bits={bits})" for bits in range(1, 5)),
    "DRIVE(least_error=True)",
    "TernGrad()",
    "TernGrad(clip=None)",
    *(f"QSGDinf(levels={levels})" for levels in (1, 3, 7, 15)),
    "Rotated(compressor=QSGDinf(levels=7))",
    *(f"QSGD(levels={levels})" for levels in (4, 16)),
    "NUQSGD()",
    "Natural()",
    "NaturalDithering(block_size=512)",
    "QSGDMaxNorm()",
    "Rotated(compressor=QSGDMaxNorm())",
    "Lattice()",
    "ALQ(block_size=512, updates=(0,), every=1000000)",
    "AMQ(block_size=512, updates=(0,), every=1000000)",
    "PQuantisation()",
    "ScaledSign(block_size=512)",
    "BF16()",
)
KINDS = ("normal", "lognormal")


def expected(spec: str) -> float | None:
    """Return the error that is derived for normal values, where it is that of all vectors."""
    method = gw.method(spec)
    method = method.compressor if isinstance(method, gw.Coded) else method
    if isinstance(method, gw.EDEN):
        if method.samples:
            return math.pi / (2 * method.bits) - 1
        if method.spacing == "uniform":
            distortion = uniform_levels(uniform_step(method.bits))[1]
        else:
            distortion = DISTORTION[level_count(method.bits)]
        return distortion / (1 - distortion)
    if isinstance(method, gw.QUICFL):
        return ERROR[method.bits]
    return DISTORTION[2] if isinstance(method, gw.DRIVE) else None


def measure(spec: str, x: torch.Tensor, rounds: int) -> list[float]:
    """Return the error of each round."""
    link, size = gw.SimulatedLink([("x", x)], spec, 1, min_numel=0), float(x.double().square().sum())
    return [float((link.reduce_(x[None].clone()).double() - x).square().sum()) / size for _ in range(rounds)]


def bits_of(spec: str, numel: int) -> float:
    """Return the bits of an element in what one of two workers sends to the other."""
    link = gw.SimulatedLink([("x", torch.empty(numel))], spec, 2, min_numel=0)
    link.reduce_(torch.randn(2, numel, generator=torch.Generator().manual_seed(1)))
    return 8 * link.traffic().sent_bytes / numel


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=1 << 18)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    normal = torch.randn(arguments.numel, generator=torch.Generator().manual_seed(0))
    vectors = {"normal": normal, "lognormal": normal.exp()}
    rows: list[dict[str, Any]] = []
    for spec in SPECS:
        row: dict[str, Any] = {"spec": spec, "bits": bits_of(spec, arguments.numel), "expected": expected(spec)}
        for kind in KINDS:
            found = measure(spec, vectors[kind], arguments.rounds)
            row[kind], row[f"{kind}_std"] = mean(found), stdev(found)
        rows.append(row)
        print(f"{spec:55s} {row['bits']:6.3f} bits  " + "  ".join(f"{kind} {row[kind]:.4g}" for kind in KINDS))
    write(arguments.json, numel=arguments.numel, rounds=arguments.rounds, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
