"""The layout of parameters in a flat vector of gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch


def local_shard(p: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor; return any other tensor unchanged."""
    to_local = getattr(p, "to_local", None)
    return p if to_local is None else to_local()


def is_sharded(p: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor, without importing that class, which takes a second."""
    return hasattr(p, "to_local")


@dataclass(frozen=True)
class Parameter:
    """Description of one parameter for a method, without its values.

    ``shape`` and ``stride`` describe the tensor; in a flat vector its elements are in *memory order*, which differs
    from the order of ``shape`` for ``channels_last`` parameters.

    ``dtype`` is that of its gradient, which most methods convert to float32. For local steps it is float32, in which
    they exchange parameters, or their differences.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Parameter:
        """Describe a tensor."""
        return cls(name, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


@dataclass(frozen=True)
class Segment:
    """A run of one parameter's elements inside a flat vector.

    Elements ``start .. start + numel`` of ``parameter`` (memory order) are elements ``offset .. offset + numel`` of the
    vector. ``dense`` segments are sent in float32 by every method.

    A segment of several parameters joined to one has those of each in ``parts``. It is known by its name and place; its
    state is kept by parameter, so that another model of the same parameters finds it.
    """

    parameter: Parameter
    offset: int
    start: int
    numel: int
    dense: bool = False
    parts: tuple[Segment, ...] = field(default=(), compare=False, repr=False)


def divide(segments: Iterable[Segment]) -> tuple[list[Segment], list[Segment]]:
    """Return the segments that a method compresses and those that are sent in float32, without empty ones."""
    filled = [s for s in segments if s.numel]
    return [s for s in filled if not s.dense], [s for s in filled if s.dense]


def take_apart(segments: Iterable[Segment]) -> list[Segment]:
    """Return segments of single parameters: of each that is joined, its parts."""
    return [part for s in segments for part in s.parts or (s,)]


def join_compressed(segments: Sequence[Segment]) -> list[Segment]:
    """Join all compressed segments, which come first, to one, of a parameter named "(model)".

    Raises:
        ValueError: they are not the first ones of the vector.
    """
    light, dense = [s for s in segments if not s.dense], [s for s in segments if s.dense]
    numel = sum(s.numel for s in light)
    if light and light[-1].offset + light[-1].numel != numel:
        raise ValueError("the order of the vector is wrong: compressed parameters come first if they are joined")
    joined = Segment(Parameter("(model)", (numel,), (1,)), 0, 0, numel, parts=tuple(light))
    return [joined, *dense] if light else dense


def lay_out(parameters: Iterable[Parameter]) -> tuple[Segment, ...]:
    """Place whole parameters one after the other."""
    segments, offset = [], 0
    for parameter in parameters:
        segments.append(Segment(parameter, offset, 0, parameter.numel))
        offset += parameter.numel
    return tuple(segments)


def cut_into_shards(parameter: Parameter, shards: int) -> list[tuple[Parameter, int]]:
    """Divide a parameter into contiguous runs of memory of about equal length, each a parameter itself.

    A run has whole rows of the dimension that is outermost in memory, so that it keeps the other dimensions. If there
    are fewer rows than shards, it is a vector. Runs follow each other in memory; some may be empty.

    Returns:
        For each shard its part, named after its first and last row or element, and its begin in memory.

    Example:
        >>> [(part.name, part.shape, begin) for part, begin in cut_into_shards(Parameter("w", (5, 3), (3, 1)), 2)]
        [('w[0:2]', (2, 3), 0), ('w[2:5]', (3, 3), 6)]
    """
    if shards == 1:
        return [(parameter, 0)]
    shape, stride = list(parameter.shape), parameter.stride
    dim = max(range(len(shape)), key=lambda d: (stride[d] * (shape[d] > 1), -d), default=0)
    rows = shape[dim] if shape else 1
    whole = rows >= shards
    count = rows if whole else parameter.numel
    each = parameter.numel // count if count else 0
    bounds = [count * i // shards for i in range(shards + 1)]
    found = []
    for begin, end in pairwise(bounds):
        size = (*shape[:dim], end - begin, *shape[dim + 1 :]) if whole else (end - begin,)
        part = Parameter(f"{parameter.name}[{begin}:{end}]", size, stride if whole else (1,), parameter.dtype)
        found.append((part, begin * each))
    return found


def rows_of_rank(parameter: Parameter, rank: int, ranks: int) -> tuple[int, int]:
    """Return the range of a rank's elements of a contiguous parameter whose rows are divided over ranks.

    Each rank has ceil(rows / ranks) rows of the first dimension, the last ranks fewer or none, as with ``torch.chunk``
    and FSDP2.

    Example:
        >>> p = Parameter("w", (5, 3), (3, 1))
        >>> [rows_of_rank(p, rank, 4) for rank in range(4)]
        [(0, 6), (6, 12), (12, 15), (15, 15)]
    """
    rows = parameter.shape[0] if parameter.shape else 1
    each, row = -(-rows // ranks), parameter.numel // max(rows, 1)
    return min(rank * each, rows) * row, min((rank + 1) * each, rows) * row


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """View a dense, non-overlapping tensor as a vector in memory order, without a copy.

    A tensor with gaps or overlaps has no such view; it is flattened in the order of its shape, which copies.
    """
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape) if n != 1):
        if stride != expected:
            return tensor.reshape(-1)
        expected *= size
    return tensor.as_strided((tensor.numel(),), (1,))


def flatten(tensors: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    """Join tensors in memory order into one vector."""
    return torch.cat([flat_view(t) for t in tensors], out=out)
