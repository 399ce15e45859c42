"""Sizes and times of the entropy coders, and what their check costs.

    python benchmarks/speed/coder_speed.py --json benchmarks/results/speed/coder_speed.json

    python benchmarks/speed/coder_speed.py --sizes-only --json benchmarks/results/speed/coder_speed.json

The second form leaves the times in the file as they are.

Sizes are over the empirical order-0 entropy of the bytes, with header, tables and check: of trits, five to a byte (a
Gaussian's, clipped at 2.5 deviations or scaled by its maximum, and trits of which few are not zero), of the exponents
of natural compression, and of bytes that are 1 in one of 100, 1000 or 10 000 cases, else 0. Times are of a million
trits, which stay in the caches, on one thread: medians of turns in which every row comes once, a float32 memcpy of as
many elements among them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.runs import write
from gradwire.kernels import get_kernels
from gradwire.kernels.entropy import CODERS, entropy_bits, get_coder
from gradwire.tools.bench.codecs import trits_of_a_gaussian

SIZES = (1_000_000, 20_000_000)
SKEWS = (100, 1000, 10_000)
TURNS = 400


def sparse_trits(elements: int, share: float) -> torch.Tensor:
    """Draw trits of which a share is not zero, joined five to a byte."""
    generator = torch.Generator().manual_seed(0)
    trits = (torch.rand(elements, generator=generator) < share).to(torch.uint8)
    trits += trits * (torch.rand(elements, generator=generator) < 0.5)
    return (trits.view(-1, 5) * torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8)).sum(1, dtype=torch.uint8)


def exponents(elements: int) -> torch.Tensor:
    """Return the exponents that natural compression makes of a Gaussian, a byte an element."""
    x = torch.randn(1, elements, generator=torch.Generator().manual_seed(0))
    return (gw.simulate(x, gw.Natural()).mean.view(torch.int32) >> 23 & 255).to(torch.uint8)


def skewed_bytes(number: int, share: float) -> torch.Tensor:
    """Draw bytes of which a share is 1 and the others 0."""
    return (torch.rand(number, generator=torch.Generator().manual_seed(0)) < share).to(torch.uint8)


def inputs(elements: int) -> dict[str, tuple[torch.Tensor, int]]:
    """Return symbols by name, and how many elements a byte holds."""
    kernels = get_kernels("auto")
    return {
        "trits, clipped at 2.5 sigma": (trits_of_a_gaussian(kernels, elements, 2.5), 5),
        "trits, maximum": (trits_of_a_gaussian(kernels, elements, None), 5),
        "trits, one in 10 not zero": (sparse_trits(elements, 0.1), 5),
        "trits, one in 100 not zero": (sparse_trits(elements, 0.01), 5),
        "exponents": (exponents(elements), 1),
        **{f"bytes, one in {n} not zero": (skewed_bytes(elements, 1 / n), 1) for n in SKEWS},
    }


def sizes() -> list[dict[str, Any]]:
    """Measure each coder's section against the entropy."""
    rows = []
    for elements in SIZES:
        for name, (symbols, joined) in inputs(elements).items():
            bits = entropy_bits(symbols)
            row: dict[str, Any] = {"symbols": name, "elements": elements}
            row["entropy_bits_per_element"] = bits / (joined * len(symbols))
            for coder in map(get_coder, CODERS):
                room = torch.empty(coder.bound(len(symbols)), dtype=torch.uint8)
                row[f"{coder.name}_over_entropy"] = 8 * coder.encode(symbols, room) / bits
            rows.append(row)
    return rows


def times() -> list[dict[str, Any]]:
    """Time encoders, decoders and the check in turns."""
    from gradwire.kernels.entropy.cpu import compiled_check

    chosen = get_coder("rans").variants
    in_vectors = chosen is not None and chosen.check != "scalar"
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    for name, (symbols, _) in list(inputs(SIZES[0]).items())[:2]:
        for kind in CODERS:
            coder = get_coder(kind)
            room, back = torch.zeros(coder.bound(len(symbols)), dtype=torch.uint8), torch.zeros_like(symbols)
            section = room[: coder.encode(symbols, room)].clone()
            calls[name, f"{kind} encode"] = partial(coder.encode, symbols, room)
            calls[name, f"{kind} decode"] = partial(coder.decode, section, back)
            if kind == "rans":
                head, body = bytes(section[:16].tolist()), section[24:].numpy()
                calls[name, "check of its section"] = partial(compiled_check, in_vectors, head, body)
        source = torch.randn(SIZES[0])
        calls[name, "float32 memcpy"] = partial(torch.zeros_like(source).copy_, source)
    spent: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for turn in range(TURNS + 3):
        for key, call in calls.items():
            start = time.perf_counter()
            call()
            if turn >= 3:
                spent[key].append(time.perf_counter() - start)
    rows = []
    for (name, what), seconds in spent.items():
        ns = [1e9 * s / SIZES[0] for s in seconds]
        low, _, _, high = statistics.quantiles(ns, n=5)
        rows.append({"symbols": name, "what": what, "ns_per_trit": statistics.median(ns), "p20": low, "p80": high})
    return rows


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--sizes-only", action="store_true", help="keep the times that FILE holds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.sizes_only and arguments.json is None:
        parser.error("--sizes-only needs --json FILE, whose times it keeps")
    found_sizes = sizes()
    kept = json.loads(arguments.json.read_text()) if arguments.sizes_only else None
    found_times = kept["times"] if kept else times()
    for row in found_sizes:
        ratios = ", ".join(f"{kind} {row[f'{kind}_over_entropy']:.4f}" for kind in CODERS)
        print(f"{row['elements']:>9} {row['symbols']:<28} {row['entropy_bits_per_element']:.3f} bits: {ratios}")
    for row in found_times:
        print(
            f"{row['symbols']:<28} {row['what']:<21} {row['ns_per_trit']:.3f} ns ({row['p20']:.3f} - {row['p80']:.3f})"
        )
    if kept:
        arguments.json.write_text(json.dumps({**kept, "sizes": found_sizes}, indent=1) + "\n")
    else:
        write(arguments.json, sizes=found_sizes, times=found_times, turns=TURNS)


if __name__ == "__main__":
    main()
