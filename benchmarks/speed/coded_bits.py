"""Bits an element of what one worker sends: packed, Elias, Huffman, rANS, and the entropy that bounds the last two.

    python benchmarks/speed/coded_bits.py --json benchmarks/results/speed/coded_bits.json

On a Gaussian vector of a million elements and on a gradient of the ``text`` task (parameters below 1024 elements left
out), 4 workers. All bytes count: headers, scales, tables, checks. The entropy is the empirical one, order 0, of the
joined digits that the coders see, with scales and payload headers added, since no coder touches them. Elias' codes are
counted on the same levels, in the shorter of their two forms; levels that are not integers (ALQ) have none.

Casts have the bits of their type where they are packed, and travel by the backend's ring. Coded, their exponents are
symbols and all else is plain, which the entropy includes.

``traffic`` is what crosses the wire for an element and direction in the method's own protocol, on the scale where a
float32 all-reduce has 32.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.runs import write
from benchmarks.lib.text_gradient import real_gradient
from gradwire.exchange.drivers import Meter, simulate_ranks
from gradwire.exchange.planning import Options, Planner
from gradwire.exchange.protocols import Context, Memory, Workspace
from gradwire.kernels import Coder, Kernels, get_kernels
from gradwire.kernels.entropy import elias_bits, entropy_bits, get_coder

WORKERS = 4
GAUSSIAN_NUMEL = 1 << 20
METHODS = (
    "TernGrad()",
    "TernGrad(clip=None)",
    "QSGD()",
    "QSGD(levels=1, block_size=512)",
    "QSGDinf()",
    "NUQSGD()",
    "ALQ(updates=(0,))",
)
CASTS = ("FP32()", "FP16()", "BF16()")


class Counting:
    """A coder that notes what goes in and what comes out."""

    def __init__(self, coder: Coder) -> None:
        self.coder, self.bound, self.decode = coder, coder.bound, coder.decode
        self.saved_by_entropy_bits = 0.0

    def encode(self, symbols: torch.Tensor, out: torch.Tensor) -> int:
        size = self.coder.encode(symbols, out)
        self.saved_by_entropy_bits += 8 * size - entropy_bits(symbols)
        return size


class Watched(Planner):
    """A planner whose kernels hand out a counting coder."""

    coders: dict[str, Counting]

    @property
    def kernels(self) -> Kernels:
        found = get_kernels("auto")
        self.coders = self.__dict__.setdefault("coders", {})
        planner = self

        class Proxy:
            def __getattr__(self, name: str) -> Any:
                return getattr(found, name)

            def coder(self, name: str) -> Counting:
                return planner.coders.setdefault(name, Counting(get_coder(name)))

        return Proxy()  # type: ignore[return-value]


def payload_bits(method: str, parameters: dict[str, torch.Tensor], gradients: torch.Tensor) -> tuple[float, float]:
    """Return the bits an element that rank 0 sends to one other, and how many of them lie above the entropy."""
    planner = Watched(gw.method(method), parameters, WORKERS, Options(collective="all_gather", min_numel=0))
    memories, spaces = [Memory() for _ in range(WORKERS)], [Workspace() for _ in range(WORKERS)]
    sent = above = 0.0
    for round in range(2):  # levels are fitted in the first
        plan = planner.plan(planner.step_order(), round)
        meters = [Meter() for _ in range(WORKERS)]
        before = sum(c.saved_by_entropy_bits for c in planner.coders.values())
        contexts = [Context(r, WORKERS, round, workspace=spaces[r], memory=memories[r]) for r in range(WORKERS)]
        simulate_ranks([plan.whole(c, g.clone()) for c, g in zip(contexts, gradients)], meters)
        for memory in memories:
            memory.commit()
        sent = 8 * meters[0].sent_bytes / (WORKERS - 1)
        above = (sum(c.saved_by_entropy_bits for c in planner.coders.values()) - before) / WORKERS
    numel = gradients.shape[1]
    return sent / numel, above / numel


def packed_bits(method: str, parameters: dict[str, torch.Tensor], gradients: torch.Tensor) -> float:
    """Return the bits an element of a payload without a coder; those of its type for a cast."""
    cast: Any = gw.method(method)
    return 8 * cast.dtype.itemsize if method in CASTS else payload_bits(method, parameters, gradients)[0]


def elias(method: str, parameters: dict[str, torch.Tensor], gradient: torch.Tensor) -> tuple[float, str] | None:
    """Return bits an element of the shorter Elias code of a worker's levels, with float32 scales, and its form."""
    chosen: Any = gw.method(method)
    even = isinstance(chosen, gw.QSGD | gw.QSGDinf)
    if not even and not isinstance(chosen, gw.TernGrad):
        return None
    link = gw.SimulatedLink(parameters.items(), method, 1, min_numel=0)
    decoded = link.reduce_(gradient[None].clone())
    levels, scales, start = [], 0, 0
    for p in parameters.values():
        v, q = (x[start : start + p.numel()].double() for x in (gradient, decoded))
        start += p.numel()
        if not even:
            levels.append(q.sign())
            scales += 1
            continue
        for block, rounded in zip(v.split(chosen.block_size), q.split(chosen.block_size)):
            scale = block.norm() if chosen.norm == "l2" else block.abs().max()
            levels.append((rounded * chosen.levels / scale.clamp(min=1e-300)).round())
            scales += 1
    joined = torch.cat(levels).to(torch.int32)
    bits, form = min((elias_bits(joined, form), form) for form in ("dense", "sparse"))
    return (bits + 32 * scales) / gradient.numel(), form


def traffic_bits(method: str, parameters: dict[str, torch.Tensor], gradients: torch.Tensor) -> float:
    """Return the bits of an element and direction in the method's own protocol."""
    link = gw.SimulatedLink(parameters.items(), method, WORKERS, min_numel=0)
    for _ in range(2):
        before = link.traffic().sent_bytes
        link.reduce_(gradients.clone())
    sent = link.traffic().sent_bytes - before
    return 8 * sent / gradients.shape[1] / (2 * (WORKERS - 1) / WORKERS)


def vectors(steps: int) -> dict[str, tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Return parameters and every worker's gradient, by the vector's name."""
    generator = torch.Generator().manual_seed(0)
    gaussian = torch.randn(WORKERS, GAUSSIAN_NUMEL, generator=generator)
    parameters, gradients = {}, []
    for worker in range(WORKERS):
        found = real_gradient(steps, first=worker * (steps + 1))
        parameters = {n: torch.empty_like(g) for n, g in found.items() if g.numel() >= 1024}
        gradients.append(torch.cat([found[n].reshape(-1) for n in parameters]))
    return {
        "Gaussian": ({"g": torch.empty(GAUSSIAN_NUMEL)}, gaussian),
        "text gradient": (parameters, torch.stack(gradients)),
    }


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="of training before the real gradients are taken")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, (parameters, gradients) in vectors(chosen.steps).items():
        for method in (*METHODS, *CASTS):
            row: dict[str, Any] = {"vector": name, "elements": gradients.shape[1], "method": repr(gw.method(method))}
            row["packed"] = packed_bits(method, parameters, gradients)
            for coder in ("rans", "huffman"):
                coded = f"Coded(compressor={method}, coder={coder!r})"
                row[coder], above = payload_bits(coded, parameters, gradients)
                row["entropy"] = row[coder] - above
                row[f"{coder}_over_entropy"] = row[coder] / row["entropy"]
                row[f"traffic_{coder}"] = traffic_bits(coded, parameters, gradients)
            row["traffic_packed"] = traffic_bits(method, parameters, gradients)
            row["elias"], row["elias_form"] = elias(method, parameters, gradients[0]) or (None, None)
            rows.append(row)
            told = "     -" if row["elias"] is None else f"{row['elias']:6.3f} {row['elias_form']}"
            print(
                f"{name:14s} {method:32s} packed {row['packed']:6.3f}, rANS {row['rans']:6.3f}, Huffman "
                f"{row['huffman']:6.3f}, entropy {row['entropy']:6.3f} ({row['rans_over_entropy']:.4f}), Elias {told}; "
                f"traffic {row['traffic_packed']:5.2f}, {row['traffic_rans']:5.2f}, {row['traffic_huffman']:5.2f}",
                flush=True,
            )
    write(chosen.json, workers=WORKERS, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
