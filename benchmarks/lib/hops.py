"""Ways from the workers' vectors to their mean, with what is sent quantised: one hop, two, a ring and a butterfly.

A vector is cut into chunks, and each chunk is summed by its own order of the workers. All chunks are worked on at once,
so that one hop of all of them is one call on whole vectors. The orders are those of a real all-reduce, where every
worker starts one chunk, and ends one. Chunks have a given length here: with fewer of them than workers, they are an
excerpt of a longer vector; with more, orders begin again.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

__all__ = ["CHUNK", "TOPOLOGIES", "Round", "mean_by", "vnmse"]

CHUNK = 1024
"""Elements of a chunk."""

TOPOLOGIES = ("one hop", "direct", "ring", "butterfly")
"""One hop: all send to all. Direct: all send a chunk to its owner, which adds and sends the sum to all (two-shot)."""


class Round(Protocol):
    """What a quantiser does in one all-reduce; ``rows`` are the vectors that it quantises."""

    rows: Tensor

    def gathered(self) -> Tensor:
        """Return the sum of all rows, each quantised once."""

    def quantise(self, x: Tensor, slots: slice | None) -> Tensor:
        """Return what is decoded of each row of ``x``, which the senders ``slots`` send; None: an owner of a sum."""

    def finish(self, mean: Tensor) -> Tensor:
        """Return the outcome, given the mean of rows."""


def mean_by(topology: str, round: Round, gathered: Tensor | None = None) -> Tensor:
    """Return the mean that all workers get.

    Args:
        topology: One of :data:`TOPOLOGIES`.
        round: The quantiser.
        gathered: The sum of rows that are quantised once, where it is known already.
    """
    count = len(round.rows)
    if topology in ("one hop", "direct"):
        total = round.gathered() if gathered is None else gathered
        if topology == "direct":
            total = round.quantise(total[None], None)[0]
    elif topology == "ring":
        rows = ordered(round.rows, ring=True)
        total = rows[0]
        for k in range(1, count):
            total = round.quantise(total[None], slice(k - 1, k))[0] + rows[k]
        total = round.quantise(total[None], slice(count - 1, count))[0]
    elif topology == "butterfly":
        rows, half = ordered(round.rows, ring=False), count // 2
        if count & (count - 1):
            raise ValueError(f"a butterfly has a power of two of workers, not {count}")
        while half:
            rows = rows[:half] + round.quantise(rows[half:], slice(half, 2 * half))
            half //= 2
        total = round.quantise(rows, slice(0, 1))[0]
    else:
        raise ValueError(f"there is no topology {topology!r}: one of {', '.join(TOPOLOGIES)}")
    return round.finish(total / count)


def ordered(rows: Tensor, ring: bool) -> Tensor:
    """Return rows whose chunk c is from the worker at that place of chunk c's order, c modulo the workers.

    On the ring the order of chunk c starts after worker c, and ends at it. In the butterfly place k is worker k ^ c: in
    every round the upper half sends to the lower, and place 0, worker c, ends with the sum.
    """
    count = len(rows)
    chunks = rows.shape[1] // CHUNK
    place, chunk = torch.arange(count)[:, None], torch.arange(chunks)[None]
    worker = (chunk + 1 + place) % count if ring else place ^ (chunk % count)
    return rows.view(count, chunks, CHUNK)[worker, chunk].reshape(count, -1)


def vnmse(found: Tensor, rows: Tensor) -> float:
    """Return |found - mean|^2 / |mean|^2, as THC and DynamiQ report it, of the mean of rows."""
    mean = rows.double().mean(0)
    return float((found.double() - mean).square().sum() / mean.square().sum())
