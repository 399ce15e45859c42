"""What a sparse method keeps or leaves out as a whole: elements, or runs of neighbouring ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from gradwire.exchange.codecs.base import Codec, Constant, Draw, Summary
from gradwire.exchange.codecs.dense import joined_runs
from gradwire.exchange.segments import Parameter, Segment
from gradwire.kernels import SegmentTable

if TYPE_CHECKING:
    from gradwire.kernels import Kernels


class UnitTable:
    """The units of whole parameters in a flat vector, numbered through in the order of the segments.

    Args:
        segments: The parameters.
        length: Elements of a unit of each segment; they divide the segment's.

    Attributes:
        units: Their number.
        elements: Elements of all.
        single: Whether each is one element.
        first: Number of units before each segment, int64 ``[segments + 1]``.
        runs: Where the segments lie, see :func:`joined_runs`.
    """

    def __init__(self, segments: Sequence[Segment], length: Sequence[int]) -> None:
        self.segments, self.length = list(segments), np.array(length, np.int64)
        self.offset = np.array([s.offset for s in segments], np.int64)
        self.numel = np.array([s.numel for s in segments], np.int64)
        self.elements, self.single = int(self.numel.sum()), bool((self.length == 1).all())
        self.first = np.concatenate([[0], np.cumsum(self.numel // self.length)])
        self.units = int(self.first[-1])
        ends = self.offset + self.numel
        self._joined = self.single and bool((self.offset[1:] == ends[:-1]).all())
        self.runs = joined_runs(segments)

    def blocks(self, size: int | None) -> SegmentTable:
        """Cut the units of each segment into blocks of ``size`` units, a row each, where :meth:`score` puts them.

        None stands for one block a segment.
        """
        begin, numel = [], []
        for i, (a, b) in enumerate(zip(self.first[:-1].tolist(), self.first[1:].tolist())):
            at = np.arange(a, b, size or max(1, b - a))
            begin.append(at - a + self.offset[i] if self.single else at)
            numel.append(np.minimum(b - at, size or b - a))
        starts, counts = np.concatenate([*begin, []]).astype(np.int64), np.concatenate([*numel, []]).astype(np.int64)
        return SegmentTable(starts, counts, np.zeros_like(starts), np.zeros((len(starts), 2), np.uint32))

    def score(self, kernels: Kernels, flat: torch.Tensor) -> torch.Tensor:
        """Return the magnitude of each unit, as an element of what :meth:`blocks` describes: its Euclidean norm.

        That of a unit with a value that is not finite is +inf. Single elements are their own score, sign included.
        """
        if self.single:
            return flat
        at = np.concatenate([o + np.arange(0, n, k) for o, n, k in zip(self.offset, self.numel, self.length)])
        each = np.repeat(self.length, np.diff(self.first))
        table = SegmentTable(at, each, np.zeros_like(at), np.zeros((len(at), 2), np.uint32))
        moments = kernels.moments(flat, table)
        return torch.where(torch.isfinite(moments.max_abs), moments.norm.to(torch.float32), torch.inf)

    def places(self, chosen: torch.Tensor) -> torch.Tensor:
        """Return the places in the flat vector of all elements of units, given ascending, int64."""
        if self._joined:
            return chosen + int(self.offset[0]) if len(self.offset) else chosen.long()
        segment = self._segments(chosen)
        length, first = torch.from_numpy(self.length)[segment], torch.from_numpy(self.first)[segment]
        begin = torch.from_numpy(self.offset)[segment] + (chosen - first) * length
        if self.single:
            return begin
        ends = length.cumsum(0)
        within = torch.arange(int(ends[-1]) if len(ends) else 0) - torch.repeat_interleave(ends - length, length)
        return torch.repeat_interleave(begin, length) + within

    def counts(self, chosen: torch.Tensor) -> tuple[int, ...]:
        """Return how many elements of each segment the units hold, which are given ascending."""
        cuts = np.searchsorted(chosen.numpy(), self.first)
        return tuple((np.diff(cuts) * self.length).tolist())

    def lengths(self, chosen: torch.Tensor) -> torch.Tensor:
        """Return how many elements each unit has, int64."""
        if self.single:
            return torch.ones(len(chosen), dtype=torch.int64)
        return torch.from_numpy(self.length)[self._segments(chosen)]

    def _segments(self, chosen: torch.Tensor) -> torch.Tensor:
        """Return the segment of each unit."""
        return torch.from_numpy(np.searchsorted(self.first[1:], chosen.numpy(), side="right"))


BoundCodec: TypeAlias = Callable[[Sequence[Segment]], Codec]
"""Binds an operator to segments of which one worker is to encode and to decode the codes."""


class KeptValues(ABC):
    """The values of a payload, given how many each segment has (``counts``)."""

    @abstractmethod
    def bytes(self, counts: Sequence[int]) -> int:
        """Return the bytes that they take."""

    @abstractmethod
    def write(self, values: torch.Tensor, counts: tuple[int, ...], draw: Draw, out: torch.Tensor) -> None:
        """Write them into ``out``, which has so many bytes."""

    @abstractmethod
    def read(self, data: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
        """Return them in float32, from bytes that may start anywhere."""


class NoValues(KeptValues):
    """None: a payload of positions alone."""

    def bytes(self, counts: Sequence[int]) -> int:
        return 0

    def write(self, values: torch.Tensor, counts: tuple[int, ...], draw: Draw, out: torch.Tensor) -> None:
        pass

    def read(self, data: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(0)


class CastValues(KeptValues):
    """Each value in a dtype, rounded to nearest, one after the other."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def bytes(self, counts: Sequence[int]) -> int:
        return sum(counts) * self.dtype.itemsize

    def write(self, values: torch.Tensor, counts: tuple[int, ...], draw: Draw, out: torch.Tensor) -> None:
        out.view(self.dtype).copy_(values)

    def read(self, data: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
        return data.view(self.dtype).to(torch.float32)


class SignedValues(KeptValues):
    """The mean magnitude of each segment's values, float32, and a bit a value: 1 for those below zero."""

    def bytes(self, counts: Sequence[int]) -> int:
        return 4 * len(counts) + -(-sum(counts) // 8)

    def write(self, values: torch.Tensor, counts: tuple[int, ...], draw: Draw, out: torch.Tensor) -> None:
        sums = torch.stack([part.abs().double().sum() for part in values.split(counts)])
        means = (sums / torch.tensor(counts).clamp(min=1)).to(torch.float32)
        out[: 4 * len(counts)].view(torch.float32).copy_(means)
        bits = np.packbits(torch.signbit(values).numpy(), bitorder="little")
        out[4 * len(counts) :].copy_(torch.from_numpy(bits))

    def read(self, data: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
        means = data[: 4 * len(counts)].clone().view(torch.float32)
        bits = np.unpackbits(data[4 * len(counts) :].numpy(), count=sum(counts), bitorder="little")
        signs = 1.0 - 2.0 * torch.from_numpy(bits).to(torch.float32)
        return torch.repeat_interleave(means, torch.tensor(counts)) * signs


class BinnedValues(KeptValues):
    """Each segment's values in 2^bits bins of equal width about their mean, and the mean of each bin, float32.

    A bin is ``width / 2^bits`` standard deviations wide, and the first and the last one are open. An empty bin's mean
    is 0, and of values without deviation all lie in one.
    """

    def __init__(self, bits: int, width: float) -> None:
        self.bits, self.width = bits, width

    def bytes(self, counts: Sequence[int]) -> int:
        return 4 * len(counts) * (1 << self.bits) + -(-sum(counts) * self.bits // 8)

    def write(self, values: torch.Tensor, counts: tuple[int, ...], draw: Draw, out: torch.Tensor) -> None:
        bins, found = 2**self.bits, [self._bins(part.double()) for part in values.split(counts)]
        side = 4 * len(counts) * bins
        out[:side].view(torch.float32).copy_(torch.cat([means for _, means in found]))
        digits = torch.cat([codes for codes, _ in found]).to(torch.uint8).numpy()
        planes = (digits[:, None] >> np.arange(self.bits, dtype=np.uint8)) & 1
        out[side:].copy_(torch.from_numpy(np.packbits(planes, axis=None, bitorder="little")))

    def read(self, data: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
        bins, total = 2**self.bits, sum(counts)
        side = 4 * len(counts) * bins
        means = data[:side].clone().view(torch.float32)
        bits = np.unpackbits(data[side:].numpy(), count=self.bits * total, bitorder="little").reshape(total, self.bits)
        codes = torch.from_numpy(bits.astype(np.int64) @ (1 << np.arange(self.bits)))
        segments = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        return means[bins * segments + codes]

    def _bins(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each value's bin, and the bins' means."""
        bins, middle = 2**self.bits, 2 ** (self.bits - 1)
        means, counts = torch.zeros(bins, dtype=torch.float64), torch.zeros(bins, dtype=torch.float64)
        if not len(values):
            return torch.zeros(0, dtype=torch.int64), means
        centred = values - values.mean()
        scale = self.width / bins * (centred.square().sum() / max(len(values) - 1, 1)).sqrt()
        codes = (centred / scale + middle).round().clamp(0, bins - 1).nan_to_num(middle).long()
        means.index_add_(0, codes, values)
        counts.index_add_(0, codes, torch.ones_like(values))
        return codes, means / counts.clamp(min=1)


class CodedValues(KeptValues):
    """The values of each segment as a vector of their own, encoded by an operator.

    Args:
        bind: Binds the operator.
        names: Of the segments, on which its random numbers depend.
    """

    def __init__(self, bind: BoundCodec, names: Sequence[str]) -> None:
        self._bind, self._names = bind, names
        self._latest: tuple[tuple[int, ...], Codec, Summary] | None = None

    def bytes(self, counts: Sequence[int]) -> int:
        codec, _ = self._codec(tuple(counts))
        return codec.payload_bytes(codec.units)

    def write(self, values: torch.Tensor, counts: tuple[int, ...], draw: Draw, out: torch.Tensor) -> None:
        codec, _ = self._codec(counts)
        summary = codec.summarise(values).select(Constant(torch.arange(sum(n > 0 for n in counts))), None)
        codec.encode(values, summary, draw, out)

    def read(self, data: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
        (codec, summary), values = self._codec(counts), torch.empty(sum(counts))
        codec.decode_rows(data[None], summary, values)
        return values

    def _codec(self, counts: tuple[int, ...]) -> tuple[Codec, Summary]:
        """Return the codec of so many values, and a summary for its decoder, which reads no more than levels of it."""
        if self._latest is None or self._latest[0] != counts:
            segments, at = [], 0
            for name, count in zip(self._names, counts):
                if count:
                    segments.append(Segment(Parameter(name, (count,), (1,)), at, 0, count))
                at += count
            codec = self._bind(segments)
            self._latest = counts, codec, codec.summarise(torch.zeros(sum(counts)))
        return self._latest[1:]
