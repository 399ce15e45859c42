"""Bits that methods send for an element, counted from the bytes of simulated workers, beside what pages say.

    python benchmarks/claims/sent_bits.py --json benchmarks/results/claims/sent_bits.json

Bits are on the scale where an all-reduce in float32 has 32: bytes that the rank that sends most has sent, over
2 (N - 1) / N for N workers. Gradients are normal. ``said`` is the figure of the claim.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.figures import figures_of
from gradwire.kernels.entropy import elias_bits

NUMEL = 1_000_000
WORKERS = 4
"""As in the tables of ``docs/methods.md``."""

SCHEDULED = (
    "Scheduled(compressor=TopK(density=0.001), field='density', start=0.25, schedule='exponential', rounds=4, stages=4)"
)
DEFAULTS = {
    "topk": 0.80, "atomo": 0.80, "gtopk": 4.9, "clt_k": 3.8, "dgc": 3.8, "sidco": 3.8, "spectral_atomo": 0.38,
    "fourier_atomo": 0.72,
    SCHEDULED: 0.087,
}  # fmt: skip
RESNET_50 = 25_557_032
SECTIONS = (1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
"""Elements of buckets that are coded."""


def sent(
    spec: str, shape: tuple[int, ...], workers: int, rounds: int = 1, first: int = 0, **options: Any
) -> tuple[float, float]:
    """Return bits of an element that the rank that sends most sends, and bytes that it receives.

    Args:
        rounds: Number of rounds.
        first: The first of those over which the mean is taken.
    """
    link = gw.SimulatedLink([("x", torch.empty(shape))], spec, workers, min_numel=0, **options)
    generator = torch.Generator().manual_seed(0)
    numel = torch.Size(shape).numel()
    before = [link.traffic(worker) for worker in range(workers)]
    for round in range(rounds):
        if round == first:
            before = [link.traffic(worker) for worker in range(workers)]
        link.exchange_(torch.randn(workers, numel, generator=generator))
    after = [link.traffic(worker) for worker in range(workers)]
    most = max(b.sent_bytes - a.sent_bytes for a, b in zip(before, after)) / (rounds - first)
    received = max(b.received_bytes - a.received_bytes for a, b in zip(before, after)) / (rounds - first)
    return 8 * most / numel / (2 * (workers - 1) / workers), received


def defaults() -> Iterator[dict[str, Any]]:
    """Measure methods at their defaults."""
    for spec, said in DEFAULTS.items():
        shape = (1000, 1000) if spec == "spectral_atomo" else (NUMEL,)
        yield {"case": spec, "measured": sent(spec, shape, WORKERS, 14, first=4)[0], "said": said}


def sparse_loco(workers: int) -> float:
    """Return the bits of an element that a rank sends in an exchange of SparseLoCo."""
    held = [torch.nn.Parameter(torch.zeros(NUMEL)) for _ in range(workers)]
    steps = gw.SimulatedLocalSteps([[("x", x)] for x in held], "SparseLoCo(every=1)", min_numel=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for x in held:
            x.add_(torch.randn(NUMEL, generator=generator))
    steps.after_step()
    return 8 * steps.link.traffic().sent_bytes / NUMEL / (2 * (workers - 1) / workers)


def loco_bits() -> Iterator[dict[str, Any]]:
    """Measure SparseLoCo's payload, and what it is in one exchange of four workers."""
    yield {"case": "a payload", "measured": sparse_loco(2), "said": 0.147}
    yield {"case": "in one of 30 steps, four workers", "measured": sparse_loco(WORKERS), "said": 0.29}


def loco_places() -> Iterator[dict[str, Any]]:
    """Measure the bits of a place of SparseLoCo, which sends 64 of 4096 elements and 2 bits for each value."""
    yield {"case": "bits of a place", "measured": sparse_loco(2) * 4096 / 64 - 2, "said": 7.4}


def two_shot() -> Iterator[dict[str, Any]]:
    """Measure eight workers by two-shot and by all-gather."""
    for spec in ("qsgdinf", "nuqsgd"):
        for collective, said in (("two_shot", 4.1), ("all_gather", 16.3)):
            found = sent(spec, (NUMEL,), 8, collective=collective)[0]
            yield {"case": f"{spec}, {collective}", "measured": found, "said": said}


def large_model() -> Iterator[dict[str, Any]]:
    """Measure how many times fewer bytes than float32 Top-k sends of a large model."""
    found = 32 / sent("TopK(density=0.001)", (RESNET_50,), 2)[0]
    yield {"case": "times fewer bytes than float32", "measured": found, "said": 561.0}


def volume() -> Iterator[dict[str, Any]]:
    """Measure what a worker receives, by their number."""
    for spec in ("dgc", "topk"):
        least = sent(spec, (NUMEL,), 2)[1]
        for workers in (4, 8, 16):
            found = sent(spec, (NUMEL,), workers)[1] / least
            yield {"case": f"{spec}, {workers} over 2 workers", "measured": found, "said": workers - 1.0}


def sections() -> Iterator[dict[str, Any]]:
    """Measure what a coded section takes beside its symbols, and where coding begins to pay."""
    for inner in ("terngrad", "QSGDinf(levels=7)"):
        coded = f"Coded(compressor={inner}, coder='rans')"
        rate = sent(coded, (4 * NUMEL,), 2)[0]
        pays = None
        for numel in SECTIONS:
            long, short = (sent(spec, (numel,), 2)[0] * numel / 8 for spec in (coded, inner))
            pays = numel if pays is None and long < short else pays
            beside = long - rate * numel / 8
            yield {"case": f"{inner}, {numel} elements: bytes beside the symbols", "measured": beside, "said": None}
        yield {"case": f"{inner}: elements from which coding pays", "measured": pays, "said": 20_000}


def elias() -> Iterator[dict[str, Any]]:
    """Measure the average lengths of Elias codes of the levels of normal values, with a float32 for each block."""
    generator = torch.Generator().manual_seed(0)
    for norm, size, levels, said in (
        ("l2", 4096, 1, 0.17), ("l2", 4096, 64, 2.77), ("max", 512, 1, 1.56), ("max", 512, 3, 2.74),
        ("max", 512, 15, 5.92),
    ):  # fmt: skip
        x = torch.randn(2048 * 512 // size, size, generator=generator)
        scale = x.norm(dim=1, keepdim=True) if norm == "l2" else x.abs().amax(dim=1, keepdim=True)
        drawn = torch.floor(x.abs() / scale * levels + torch.rand(x.shape, generator=generator))
        symbols = (drawn * x.sign()).to(torch.int32)
        forms = {
            form: 32 / size + sum(elias_bits(row, form) for row in symbols) / x.numel() for form in ("sparse", "dense")
        }
        for form, measured in forms.items():
            fits = form == min(forms, key=lambda form: abs(forms[form] - said))
            case = f"{norm}, blocks of {size}, s = {levels}: {form} form"
            yield {"case": case, "measured": measured, "said": said if fits else None}


CLAIMS = {
    "methods-bits-of-sparse-methods": defaults,
    "sparse-loco-bits": loco_bits,
    "sparse-loco-places": loco_places,
    "two-shot-bits-of-eight-workers": two_shot,
    "topk-wire-cost-25m": large_model,
    "dgc-all-gather-volume-grows": volume,
    "coded-section-overhead": sections,
    "qsgd-elias-other-settings": elias,
}


if __name__ == "__main__":
    figures_of(CLAIMS, __doc__, numel=NUMEL)
