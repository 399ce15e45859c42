"""FP32, FP16 and BF16: gradients sent in a float type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.codecs import DenseCodec
from gradwire.exchange.codecs.base import Codec, Draw, Summary
from gradwire.exchange.codecs.dense import NoSummary, joined_runs
from gradwire.exchange.deferred_checks import Flag, all_finite
from gradwire.exchange.method import Method, Properties, no_operator
from gradwire.exchange.protocols import REDUCE_SCATTER
from gradwire.exchange.protocols.bucket_plan import BucketPlan, CastPlan, Operator, PlanSetting, SectionPlan
from gradwire.exchange.segments import Segment
from gradwire.exchange.traits import Traits
from gradwire.exchange.wire import ALIGNMENT
from gradwire.kernels import Coder

if TYPE_CHECKING:
    from gradwire.kernels import Kernels


_WORDS = {2: (np.uint16, torch.int16), 4: (np.uint32, torch.int32)}


class CastCodec(Codec):
    """Codec of values cast to a float type, with their exponents stored apart for an entropy coder.

    The mean is the sum over ranks of cast(x_r) * float32(1 / world_size), added in float32 in the order of ranks, and
    cast again. So it is rounded once, whatever the number of ranks, and has the same bits whether every rank adds up
    all payloads or the owner of a share does so and sends the result.

    A value's bits, rotated left by one, have the exponent in front and the sign at the end. The first byte is a symbol
    for a coder: the exponent of bfloat16 and float32, or the exponent of float16 and three more bits. All other bytes
    are plain. A payload is the plain bytes of all values, little endian, and then the symbols. A unit is sixteen
    values; the last one is padded with zeros.

    Args:
        segments: Runs of the flat vector to send; adjacent ones are joined.
        world_size: Number of ranks.
        dtype: Float type of two or four bytes.
    """

    grain = 1

    def __init__(self, segments: Sequence[Segment], world_size: int, dtype: torch.dtype) -> None:
        self.runs, self.dtype, self.width = joined_runs(segments), dtype, dtype.itemsize
        self.numel = sum(count for _, count in self.runs)
        self.units = -(-self.numel // ALIGNMENT)
        self.weight = torch.tensor(1.0 / world_size, dtype=torch.float32, device="cpu")

    def use_coder(self, coder: Coder) -> None:
        self.coder = coder

    def summarise(self, flat: torch.Tensor) -> NoSummary:
        return NoSummary()

    def payload_bytes(self, units: int) -> int:
        return ALIGNMENT * self.width * units

    def plain_payload_bytes(self, units: int) -> int:
        return ALIGNMENT * (self.width - 1) * units

    def encode(self, flat: torch.Tensor, summary: Summary, draw: Draw, out: torch.Tensor) -> None:
        unsigned, signed = _WORDS[self.width]
        values = torch.cat([flat[a : a + n] for a, n in self.runs]).to(self.dtype)
        bits = values.view(signed).numpy().view(unsigned)
        octets = ((bits << 1) | (bits >> (8 * self.width - 1))).view(np.uint8).reshape(-1, self.width)
        plain, symbols = self._planes(out)
        plain[: self.numel], plain[self.numel :] = octets[:, :-1], 0
        symbols[: self.numel], symbols[self.numel :] = octets[:, -1], 0

    def decode_rows(self, rows: torch.Tensor, summary: Summary, flat: torch.Tensor) -> None:
        total = self._values(rows[0]) * self.weight
        for row in rows[1:]:
            total.add_(self._values(row) * self.weight)
        mean = total.to(self.dtype).to(torch.float32)
        for (start, count), part in zip(self.runs, mean.split([n for _, n in self.runs])):
            flat[start : start + count].copy_(part)

    def add_own(self, data: torch.Tensor, summary: Summary, weight: float, flat: torch.Tensor) -> None:
        for (start, count), part in zip(self.runs, self._values(data).split([n for _, n in self.runs])):
            flat[start : start + count].add_(part, alpha=weight)

    def is_finite(self, summary: Summary, flat: torch.Tensor) -> Flag:
        return all_finite(*(flat[a : a + n] for a, n in self.runs))

    def _planes(self, data: torch.Tensor) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """View the plain bytes of a payload, ``[values, width - 1]``, and its symbols."""
        octets, end = data.numpy(), self.plain_payload_bytes(self.units)
        return octets[:end].reshape(-1, self.width - 1), octets[end : self.payload_bytes(self.units)]

    def _values(self, data: torch.Tensor) -> torch.Tensor:
        """Return the values of a payload in float32."""
        unsigned, _ = _WORDS[self.width]
        plain, symbols = self._planes(data)
        octets = np.empty((self.numel, self.width), np.uint8)
        octets[:, :-1], octets[:, -1] = plain[: self.numel], symbols[: self.numel]
        bits = octets.reshape(-1).view(unsigned)
        words = ((bits >> 1) | (bits << (8 * self.width - 1))).view(f"i{self.width}")
        return torch.from_numpy(words).view(self.dtype).to(torch.float32)


@dataclass(frozen=True, kw_only=True)
class Cast(Method):
    """Base of methods that send the gradient itself, in ``dtype``, divided by the world size before the sum."""

    dtype: ClassVar[torch.dtype]
    tag: ClassVar[int]
    """Unique number of the wire format, where :class:`CastCodec` is used."""

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            collectives=("all_reduce",),
            kernels=(),
            min_numel=0,
            scatters=True,
            rounds_sums=self.dtype.itemsize < 4,
            on_device=True,
            unbiased=False,
        )

    @property
    def as_operator(self) -> Operator:
        return self

    @property
    def cast_dtype(self) -> torch.dtype:
        return self.dtype

    def refusal_of_feedback(self, unseen: str) -> str | None:
        if self.cast_dtype == torch.float32:
            return f"{no_operator(self)}: float32 leaves nothing out"
        return f"{no_operator(self)}: the backend sums in sixteen bits, and {unseen} sees what that loses"

    def check_between_two(self, owner: str) -> None:
        pass  # a cast needs no other rank

    def codec_between_two(self, kernels: Kernels, segments: Sequence[Segment], seed: int) -> Codec:
        return DenseCodec(segments, 1, self.dtype)

    def plan(self, setting: PlanSetting) -> BucketPlan:
        if setting.collective == REDUCE_SCATTER:
            # The owner adds up payloads in float32, since the backend can only add up whole vectors.
            return SectionPlan(self, setting)
        self._check(setting.collective)
        return CastPlan(self.dtype, setting.segments)

    def dense_plan(self, setting: PlanSetting) -> BucketPlan:
        if setting.collective == REDUCE_SCATTER:
            return SectionPlan(self, setting.whole())
        self._check(setting.collective)
        return CastPlan(None, setting.segments)

    def _check(self, collective: str) -> None:
        if collective not in self.traits.collectives:
            raise IncompatibleError(
                f"{self!r} cannot travel by {collective}; use collective={self.traits.collectives[0]!r} or 'auto'"
            )

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> CastCodec:
        """Return the codec that is used where an entropy coder shortens the payloads."""
        return CastCodec(segments, world_size, self.dtype)


@dataclass(frozen=True, kw_only=True)
class FP32(Cast):
    """Float32: plain DDP, bit for bit.

    mean = all_reduce_sum(g_i * float32(1/N)), multiplied before the sum, as DDP does. With
    ``gradient_as_bucket_view`` and gradients kept between steps DDP divides instead, so there the bits agree for
    power-of-two world sizes only.
    """

    name: ClassVar[str] = "fp32"
    tag: ClassVar[int] = 61
    dtype: ClassVar[torch.dtype] = torch.float32
    properties: ClassVar[Properties] = Properties(
        summary="Float32 all-reduce: plain DDP, bit for bit",
        paper="the baseline",
        bit_stable=False,
        bits_per_element=32.0,
    )

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            unbiased=True,
            omega_formula="0",
        )

    def plan(self, setting: PlanSetting) -> BucketPlan:
        return self.dense_plan(setting)

    def omega_of(self, numel: int | None = None) -> float:
        return 0.0


@dataclass(frozen=True, kw_only=True)
class FP16(Cast):
    """IEEE half precision: mean = all_reduce_sum(half(g_i) / N).

    Values above 65504 become inf, on every rank; below 6e-8 they become 0. Use it under a GradScaler.
    Same arithmetic as PyTorch's ``fp16_compress_hook``. The declared ``delta`` is for values from 2^-14 to 65504, which
    are rounded with a relative error of at most 2^-11 on each rank. The division rounds again unless N is a power of
    two, and so does the backend's sum.
    """

    name: ClassVar[str] = "fp16"
    tag: ClassVar[int] = 62
    dtype: ClassVar[torch.dtype] = torch.float16
    properties: ClassVar[Properties] = Properties(
        summary="Half-precision all-reduce, as PyTorch's fp16 hook",
        paper="Micikevicius et al., Mixed Precision Training, ICLR 2018",
        bit_stable=False,
        bits_per_element=16.0,
    )
    delta_formula: ClassVar[str | None] = "1 - 2^-22"

    def delta_of(self, numel: int | None = None) -> float:
        return 1 - 2.0**-22


@dataclass(frozen=True, kw_only=True)
class BF16(Cast):
    """Brain float: mean = all_reduce_sum(bfloat16(g_i) / N); float32's range with eight bits of precision.

    Same arithmetic as PyTorch's ``bf16_compress_hook``, which a CPU build refuses to register. The declared ``delta``
    is for normal numbers, which are rounded with a relative error of at most 2^-8 on each rank. The division rounds
    again unless N is a power of two, and so does the backend's sum.
    """

    name: ClassVar[str] = "bf16"
    tag: ClassVar[int] = 63
    dtype: ClassVar[torch.dtype] = torch.bfloat16
    properties: ClassVar[Properties] = Properties(
        summary="Brain-float all-reduce, as PyTorch's bf16 hook",
        paper="Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019",
        bit_stable=False,
        bits_per_element=16.0,
    )
    delta_formula: ClassVar[str | None] = "1 - 2^-16"

    def delta_of(self, numel: int | None = None) -> float:
        return 1 - 2.0**-16
