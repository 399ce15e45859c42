"""Units of sparse methods, elements or runs of adjacent elements, and encodings of their values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from gradwire.exchange.codecs.base import Codec, Constant, Draw, Summary
from gradwire.exchange.codecs.dense import joined_runs
from gradwire.exchange.segments import Parameter, Segment
from gradwire.kernels import SegmentTable

if TYPE_CHECKING:
    from gradwire.kernels import Kernels


REACH = 2**31
"""Elements of a vector whose places fit int32."""


class UnitTable:
    """Units of whole parameters in a flat vector, numbered in the order of the segments.

    Args:
        segments: The parameters.
        length: Number of elements of a unit for each segment, which divides the segment's length.

    Attributes:
        units: Number of units.
        elements: Number of elements of all units.
        single: True if each unit is one element.
        first: Number of units before each segment, int64 ``[segments + 1]``.
        runs: Runs of the segments, see :func:`joined_runs`.
    """

    def __init__(self, segments: Sequence[Segment], length: Sequence[int]) -> None:
        self.segments, self.length = list(segments), np.array(length, np.int64)
        self.offset = np.array([s.offset for s in segments], np.int64)
        self.numel = np.array([s.numel for s in segments], np.int64)
        self.elements, self.single = int(self.numel.sum()), bool((self.length == 1).all())
        self.first = np.concatenate([[0], np.cumsum(self.numel // self.length)])
        self.units = int(self.first[-1])
        # As positions are, which would otherwise be converted in every search.
        self._cuts = self.first.astype(np.int32)
        ends = self.offset + self.numel
        self._extent = int(ends[-1]) if len(ends) else 0
        self._joined = self.single and bool((self.offset[1:] == ends[:-1]).all())
        self.runs = joined_runs(segments)

    def blocks(self, size: int | None) -> SegmentTable:
        """Return the table of blocks of ``size`` units, one row a block, in the layout of :meth:`score`.

        With None each segment is one block.
        """
        begin, numel = [], []
        for i, (a, b) in enumerate(zip(self.first[:-1].tolist(), self.first[1:].tolist())):
            at = np.arange(a, b, size or max(1, b - a))
            begin.append(at - a + self.offset[i] if self.single else at)
            numel.append(np.minimum(b - at, size or b - a))
        starts, counts = np.concatenate([*begin, []]).astype(np.int64), np.concatenate([*numel, []]).astype(np.int64)
        return SegmentTable(starts, counts, np.zeros_like(starts), np.zeros((len(starts), 2), np.uint32))

    def score(self, kernels: Kernels, flat: torch.Tensor) -> torch.Tensor:
        """Return the Euclidean norm of each unit, in the layout of :meth:`blocks`.

        It is +inf if a value is not finite. A single element is its own score, with its sign.
        """
        if self.single:
            return flat
        at = np.concatenate([o + np.arange(0, n, k) for o, n, k in zip(self.offset, self.numel, self.length)])
        each = np.repeat(self.length, np.diff(self.first))
        table = SegmentTable(at, each, np.zeros_like(at), np.zeros((len(at), 2), np.uint32))
        moments = kernels.moments(flat, table)
        return torch.where(torch.isfinite(moments.max_abs), moments.norm.to(torch.float32), torch.inf)

    def places(self, chosen: torch.Tensor) -> torch.Tensor:
        """Return the places of all elements of ascending units in the flat vector, int64, or int32 where these fit."""
        if self._joined:
            origin = int(self.offset[0]) if len(self.offset) else 0
            if self._extent > REACH:
                chosen = chosen.long()
            return chosen + origin if origin else chosen
        segment = self._segments(chosen)
        length, first = torch.from_numpy(self.length)[segment], torch.from_numpy(self.first)[segment]
        begin = torch.from_numpy(self.offset)[segment] + (chosen - first) * length
        if self.single:
            return begin
        ends = length.cumsum(0)
        number = torch.arange(int(ends[-1]) if len(ends) else 0, device="cpu")
        within = number - torch.repeat_interleave(ends - length, length)
        return torch.repeat_interleave(begin, length) + within

    def addresses(self, chosen: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor, int]]:
        """Yield the same places in runs: the run's elements, int32 positions after a common place, and that place.

        There is one run, unless int32 does not reach the end of the vector.
        """
        if self._joined and len(self.offset):
            yield slice(None), chosen, int(self.offset[0])
            return
        places = self.places(chosen)
        if self._extent <= REACH:
            yield slice(None), places.to(torch.int32), 0
            return
        for origin in range(0, self._extent, REACH):
            begin, end = np.searchsorted(places.numpy(), (origin, origin + REACH)).tolist()
            if begin < end:
                yield slice(begin, end), (places[begin:end] - origin).to(torch.int32), origin

    def counts(self, chosen: torch.Tensor) -> tuple[int, ...]:
        """Return the number of elements that ascending units have in each segment."""
        cuts = np.searchsorted(chosen.numpy(), self._cuts)
        return tuple((np.diff(cuts) * self.length).tolist())

    def lengths(self, chosen: torch.Tensor) -> torch.Tensor:
        """Return the number of elements of each unit, int64."""
        if self.single:
            return torch.ones(len(chosen), dtype=torch.int64, device="cpu")
        return torch.from_numpy(self.length)[self._segments(chosen)]

    def _segments(self, chosen: torch.Tensor) -> torch.Tensor:
        """Return the segment of each unit."""
        return torch.from_numpy(np.searchsorted(self.first[1:], chosen.numpy(), side="right"))


BoundCodec: TypeAlias = Callable[[Sequence[Segment]], Codec]
"""Binds an operator to segments, for one worker to encode and decode."""


class KeptValues(ABC):
    """Encoding of a payload's values; ``counts`` is their number in each segment."""

    @abstractmethod
    def bytes(self, counts: Sequence[int]) -> int:
        """Return the size of the encoded values in bytes."""

    @abstractmethod
    def write(self, values: torch.Tensor, counts: tuple[int, ...], draw: Draw, out: torch.Tensor) -> None:
        """Encode the values into ``out``, which has that size."""

    @abstractmethod
    def read(self, data: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
        """Decode the values to float32, from bytes at any alignment."""


class NoValues(KeptValues):
    """No values: a payload of positions."""

    def bytes(self, counts: Sequence[int]) -> int:
        return 0

    def write(self, values: torch.Tensor, counts: tuple[int, ...], draw: Draw, out: torch.Tensor) -> None:
        pass

    def read(self, data: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(0, dtype=torch.float32, device="cpu")


class CastValues(KeptValues):
    """Values rounded to nearest in a dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def bytes(self, counts: Sequence[int]) -> int:
        return sum(counts) * self.dtype.itemsize

    def write(self, values: torch.Tensor, counts: tuple[int, ...], draw: Draw, out: torch.Tensor) -> None:
        out.view(self.dtype).copy_(values)

    def read(self, data: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
        return data.view(self.dtype).to(torch.float32)


class SignedValues(KeptValues):
    """The mean magnitude of each segment's values, float32, and one bit a value: 1 if it is below zero."""

    def bytes(self, counts: Sequence[int]) -> int:
        return 4 * len(counts) + -(-sum(counts) // 8)

    def write(self, values: torch.Tensor, counts: tuple[int, ...], draw: Draw, out: torch.Tensor) -> None:
        sums = torch.stack([part.abs().double().sum() for part in values.split(counts)])
        means = (sums / torch.tensor(counts, device="cpu").clamp(min=1)).to(torch.float32)
        out[: 4 * len(counts)].view(torch.float32).copy_(means)
        bits = np.packbits(torch.signbit(values).numpy(), bitorder="little")
        out[4 * len(counts) :].copy_(torch.from_numpy(bits))

    def read(self, data: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
        means = data[: 4 * len(counts)].clone().view(torch.float32)
        bits = np.unpackbits(data[4 * len(counts) :].numpy(), count=sum(counts), bitorder="little")
        signs = 1.0 - 2.0 * torch.from_numpy(bits).to(torch.float32)
        return torch.repeat_interleave(means, torch.tensor(counts, device="cpu")) * signs


class BinnedValues(KeptValues):
    """The bin of each value, among 2^bits of equal width about the segment's mean, and each bin's mean, float32.

    A bin is ``width / 2^bits`` standard deviations wide, and the first and the last one are open. An empty bin's mean
    is 0, and values without deviation are all in one bin.
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
        segments = torch.repeat_interleave(torch.arange(len(counts), device="cpu"), torch.tensor(counts, device="cpu"))
        return means[bins * segments + codes]

    def _bins(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the bin of each value, and the means of the bins."""
        bins, middle = 2**self.bits, 2 ** (self.bits - 1)
        means, counts = (torch.zeros(bins, dtype=torch.float64, device="cpu") for _ in range(2))
        if not len(values):
            return torch.zeros(0, dtype=torch.int64, device="cpu"), means
        centred = values - values.mean()
        scale = self.width / bins * (centred.square().sum() / max(len(values) - 1, 1)).sqrt()
        codes = (centred / scale + middle).round().clamp(0, bins - 1).nan_to_num(middle).long()
        means.index_add_(0, codes, values)
        counts.index_add_(0, codes, torch.ones_like(values))
        return codes, means / counts.clamp(min=1)


class CodedValues(KeptValues):
    """The values of each segment as a vector, encoded by an operator.

    Args:
        bind: Binds the operator.
        names: Names of the segments, on which random numbers depend.
    """

    def __init__(self, bind: BoundCodec, names: Sequence[str]) -> None:
        self._bind, self._names = bind, names
        self._latest: tuple[tuple[int, ...], Codec, Summary] | None = None

    def bytes(self, counts: Sequence[int]) -> int:
        codec, _ = self._codec(tuple(counts))
        return codec.payload_bytes(codec.units)

    def write(self, values: torch.Tensor, counts: tuple[int, ...], draw: Draw, out: torch.Tensor) -> None:
        codec, _ = self._codec(counts)
        summary = codec.summarise(values).select(Constant(torch.arange(sum(n > 0 for n in counts), device="cpu")), None)
        codec.encode(values, summary, draw, out)

    def read(self, data: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
        (codec, summary), values = self._codec(counts), torch.empty(sum(counts), dtype=torch.float32, device="cpu")
        codec.decode_rows(data[None], summary, values)
        return values

    def _codec(self, counts: tuple[int, ...]) -> tuple[Codec, Summary]:
        """Return the codec of so many values, and a summary for its decoder, which reads only the levels."""
        if self._latest is None or self._latest[0] != counts:
            segments, at = [], 0
            for name, count in zip(self._names, counts):
                if count:
                    segments.append(Segment(Parameter(name, (count,), (1,)), at, 0, count))
                at += count
            codec = self._bind(segments)
            self._latest = counts, codec, codec.summarise(torch.zeros(sum(counts), dtype=torch.float32, device="cpu"))
        return self._latest[1:]
