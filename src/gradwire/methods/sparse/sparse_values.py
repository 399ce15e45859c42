"""How the values that a sparse method keeps travel: as they are, cast, or rounded to levels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch

from gradwire.exchange.codecs.base import Codec, Draw, Summary
from gradwire.exchange.codecs.constants import Constant
from gradwire.exchange.segments import Parameter, Segment

__all__ = ["BinnedValues", "BoundCodec", "CastValues", "CodedValues", "KeptValues", "NoValues", "SignedValues"]

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
