"""Rows of the kernel benchmark for the entropy coders, on ternary payloads as they are sent."""

from __future__ import annotations

from functools import partial

import torch

from gradwire.kernels import GROUP_SIZE, Kernels, SegmentTable, inverse_scale
from gradwire.kernels.entropy import CODERS
from gradwire.kernels.entropy.select import SAMPLE, select, variant_calls
from gradwire.tools.bench.timing import Bench

__all__ = ["CODER_GOALS", "bench_coder_choices", "bench_coders"]

CODER_GOALS = {"rans encode": 0.20, "rans decode": 0.15, "huffman encode": 0.25, "huffman decode": 0.28}

SLOW_ELEMENTS = 100_000  # for the reference, which is there to be read


def trits_of_a_gaussian(kernels: Kernels, elements: int, clip: float | None) -> torch.Tensor:
    """Encode a Gaussian, clipped at ``clip`` standard deviations or scaled by its maximum, five trits a byte."""
    x = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    table = SegmentTable([0], [elements], [0], [(1, 2)])
    moments = kernels.moments(x, table)
    limit = moments.max_abs if clip is None else torch.minimum(moments.max_abs, (clip * moments.std).float())
    out = torch.empty(16 * table.groups, dtype=torch.uint8)
    kernels.ternary_encode(x, table, limit, inverse_scale(limit), 1, 0, 0, table.groups, out)
    return out


def bench_coders(bench: Bench, kernels: Kernels, elements: int) -> None:
    """Time encoder and decoder of every coder; elements are trits. The backend is that of ``kernels``."""
    if kernels.name == "meta":
        return
    elements = min(elements, SLOW_ELEMENTS) if kernels.name == "reference" else elements
    for layout, clip in (("clip 2.5", 2.5), ("clip none", None)):
        symbols = trits_of_a_gaussian(kernels, elements // GROUP_SIZE * GROUP_SIZE, clip)
        for name in CODERS:
            coder = kernels.coder(name)
            room, back = torch.zeros(coder.bound(len(symbols)), dtype=torch.uint8), torch.zeros_like(symbols)
            section = room[: coder.encode(symbols, room)].clone()
            inner = max(1, 2_000_000 // elements)
            bench.run(f"{name} encode", layout, 5 * len(symbols), partial(coder.encode, symbols, room), inner)
            bench.run(f"{name} decode", layout, 5 * len(symbols), partial(coder.decode, section, back), inner)


def bench_coder_choices(bench: Bench) -> None:
    """Time every variant of the coders' parts at the work by which "auto" chooses, and say which it has chosen."""
    for name in CODERS:
        for part, call_of in variant_calls(name).items():
            for variant, call in call_of.items():
                bench.run(f"{name} {part} of 64 KiB", variant, 5 * SAMPLE, call, inner=20)
                bench.rows[-1]["chosen"] = variant == getattr(select(name).variants, part)
