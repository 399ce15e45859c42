"""Tables and inputs that the kernel tests share."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st

from gradwire.kernels import SegmentTable

BACKENDS = ("reference", "cpu", "cpu-plain")
COMPILED = ("cpu", "cpu-plain")


@st.composite
def tables(draw: st.DrawFn) -> SegmentTable:
    """Up to 12 segments of 0 to 400 or a few thousand elements, with gaps, anywhere in their parameters."""
    sizes = draw(st.lists(st.one_of(st.integers(0, 400), st.integers(4000, 9000)), max_size=12))
    gaps = draw(st.lists(st.integers(0, 7), min_size=len(sizes), max_size=len(sizes)))
    starts = draw(st.lists(st.integers(0, 2**20), min_size=len(sizes), max_size=len(sizes)))
    word = st.integers(0, 2**32 - 1)
    keys = draw(st.lists(st.tuples(word, word), min_size=len(sizes), max_size=len(sizes)))
    offsets, at = [], 0
    for size, gap in zip(sizes, gaps):
        offsets.append(at + gap)
        at += gap + size
    return SegmentTable(offsets, sizes, [80 * start for start in starts], keys)


def one_segment(numel: int, key: tuple[int, int] = (11, 22)) -> SegmentTable:
    """A single whole parameter."""
    return SegmentTable([0], [numel], [0], [key])


def normal(numel: int, seed: int, shift: int = 0, spread: float = 1.0) -> torch.Tensor:
    """Heavy-tailed values that start ``shift`` floats after an aligned address."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel + shift, generator=generator)
    return (x * torch.exp(spread * torch.randn(numel + shift, generator=generator)))[shift:]


def unaligned_bytes(numel: int, shift: int = 0) -> torch.Tensor:
    """Bytes of 255 that start ``shift`` bytes after an aligned address, with a guard behind."""
    return torch.full((numel + shift + 64,), 255, dtype=torch.uint8)[shift : shift + numel]


def derived_tolerance(variance: float, draws: int, sigmas: float = 5.0) -> float:
    """Largest deviation of a mean of ``draws`` that chance explains."""
    return sigmas * math.sqrt(variance / draws)
