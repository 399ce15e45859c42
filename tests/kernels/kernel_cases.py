"""Tables and inputs that the kernel tests share."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch
from hypothesis import strategies as st

from gradwire.kernels import BACKENDS as ALL_BACKENDS
from gradwire.kernels import SegmentTable, digit_layout, packed_bytes, sum_layout
from gradwire.kernels.packing.layout import pack_digits, unpack_digits

OTHERS = tuple(name for name in ALL_BACKENDS if name not in ("auto", "reference", "triton", "meta"))
"""Whoever computes, but the reference: a backend that is added is held to its bits at once.

Triton's interpreter takes a thousand times as long: ``test_triton.py`` holds it to the same bits on fewer examples.
"""

BACKENDS = ("reference", *OTHERS)
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
    """Return the bytes of 255 that start ``shift`` bytes after an aligned address, with a guard behind."""
    return torch.full((numel + shift + 64,), 255, dtype=torch.uint8)[shift : shift + numel]


def derived_tolerance(variance: float, draws: int, sigmas: float = 5.0) -> float:
    """Largest deviation of a mean of ``draws`` that chance explains."""
    return sigmas * math.sqrt(variance / draws)


def digits_of(payload: torch.Tensor) -> torch.Tensor:
    """Unpack bytes of five trits (uint8 ``[16 * G]``) into digits in group order, int64 ``[80 * G]``."""
    return unpack_digits(payload, digit_layout(3), len(payload) // 16, clamp=False).reshape(-1)


def packed_sums(values: torch.Tensor, world_size: int) -> torch.Tensor:
    """Pack sums of ``world_size`` trits, int64 ``[80 * G]`` in ``[-world_size, world_size]``."""
    words = torch.empty(packed_bytes(len(values), world_size), dtype=torch.uint8)
    pack_digits(values + world_size, sum_layout(world_size), words)
    return words


def same_signatures(loops: ModuleType) -> list[int]:
    """Count the signatures that each loop of a module is compiled for."""
    return [len(loop.signatures) for loop in kept_loops(loops).values()]


def kept_loops(loops: ModuleType) -> dict[str, Any]:
    """Return the loops of a module that Numba keeps on disk, by name."""
    found = {name: value for name, value in vars(loops).items() if name.endswith("_range")}
    return {name: value for name, value in found.items() if value.__module__ == loops.__name__}
