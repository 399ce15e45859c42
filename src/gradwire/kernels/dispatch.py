"""Which backend computes: asked for by name, reported by name, never replaced in silence."""

from __future__ import annotations

import difflib
import warnings
from functools import cache

import torch

from gradwire.errors import BackendError, HyperparameterError
from gradwire.kernels.base import Kernels
from gradwire.kernels.digits import packed_bytes
from gradwire.kernels.meta import MetaKernels
from gradwire.kernels.reference import ReferenceKernels
from gradwire.kernels.signs import SIGN_BYTES, RunTable
from gradwire.kernels.table import SegmentTable

__all__ = ["BACKENDS", "get_kernels"]

BACKENDS = ("auto", "reference", "cpu", "cpu-plain", "meta")


@cache
def get_kernels(name: str = "auto", threads: int = 1) -> Kernels:
    """Give a backend; the same object for the same arguments.

    Args:
        name: ``reference`` (plain PyTorch), ``cpu`` (Numba with explicit vectors), ``cpu-plain`` (Numba without),
            ``meta`` (computes nothing) or ``auto``: ``cpu`` if its code compiles here and agrees with ``reference`` on
            a small case, else ``cpu-plain``, with a warning.
        threads: threads that share a call of a ``cpu`` backend.

    Example:
        >>> get_kernels("reference").name
        'reference'
    """
    if threads < 1:
        raise HyperparameterError(f"threads={threads}: a kernel needs at least one")
    if name == "reference":
        return ReferenceKernels()
    if name == "meta":
        return MetaKernels()
    if name in ("cpu", "cpu-plain"):
        # Imported here: numba takes half a second, and whoever asks for another backend need not have it.
        from gradwire.kernels.cpu import CpuKernels

        return CpuKernels(vectors=name == "cpu", threads=threads)
    if name == "auto":
        return _automatic(threads)
    near = difflib.get_close_matches(name, BACKENDS, 1, 0.0)[0]
    raise HyperparameterError(f"no kernel backend {name!r}: did you mean {near!r}? There are {', '.join(BACKENDS)}")


def _automatic(threads: int) -> Kernels:
    try:
        vectors = get_kernels("cpu", threads)
        vectors.warm_up()
        if _agree(vectors, get_kernels("reference")):
            return vectors
        reason = "its results differ from the reference"
    except BackendError:
        raise
    except Exception as error:  # whatever the compiler raises on a machine we have not seen
        reason = f"its code does not compile: {type(error).__name__}: {error}"
    warnings.warn(
        f"kernel backend 'cpu' does not serve here ({reason}); using 'cpu-plain', which is slower",
        stacklevel=3,
    )
    return get_kernels("cpu-plain", threads)


def _agree(first: Kernels, second: Kernels) -> bool:
    """Tell whether two backends give the same bits on a small case that reaches every body."""
    table = SegmentTable([1, 260], [250, 37], [80, 0], [(1, 2), (3, 4)])
    x = torch.sin(torch.arange(300.0) * 1.7)
    limit, inverse, results = torch.tensor([0.9, 0.5]), torch.full((2,), 2.0**24), []
    for kernels in (first, second):
        moments = kernels.moments(x, table)
        rows = torch.empty(4, 16 * table.groups, dtype=torch.uint8)
        for rank, row in enumerate(rows):
            kernels.ternary_encode(x, table, limit, inverse, 7, rank, 0, table.groups, row)
        decoded = torch.zeros(2, 300)
        for world_size, target in zip((2, 4), decoded):
            words = torch.empty(packed_bytes(80 * table.groups, world_size), dtype=torch.uint8)
            kernels.ternary_sum(rows[:world_size], words)
            kernels.decode(words, world_size, table, limit, 0, table.groups, target)
        results.append([moments.max_abs, moments.mean, moments.std, moments.norm, rows, decoded])
        results[-1] += _signs(kernels, x, table)
    return all(torch.equal(a, b) for a, b in zip(*results))


def _signs(kernels: Kernels, x: torch.Tensor, table: SegmentTable) -> list[torch.Tensor]:
    """Give results of all methods for signs, with runs that begin anywhere."""
    sums, runs = kernels.sign_sums(x, table), RunTable(table, 37)
    rows = torch.empty(3, SIGN_BYTES * table.groups, dtype=torch.uint8)
    for shift, row in enumerate(rows):
        kernels.sign_encode(x.roll(shift), table, 0, table.groups, row)
    values, voted = torch.arange(6.0 * runs.runs).reshape(2, 3, runs.runs), torch.empty_like(rows[0])
    kernels.sign_vote(rows, voted)
    decoded = x.clone()
    kernels.sign_decode(rows, runs, values[0], values[1], 0, table.groups, decoded, accumulate=True)
    return [kernels.finite(x, table), sums.above, sums.below, sums.count, rows, voted, decoded]
