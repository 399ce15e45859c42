"""No compression, or a cast to 16 bits, summed by the backend: the arithmetic of DDP and of its own hooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.method import Method, Properties
from gradwire.exchange.protocols import REDUCE_SCATTER
from gradwire.exchange.protocols.bucket_plan import BucketPlan, CastPlan, PlanSetting, SectionPlan
from gradwire.exchange.segments import Segment
from gradwire.methods.casts.cast_codec import CastCodec

if TYPE_CHECKING:
    from gradwire.kernels import Kernels

__all__ = ["BF16", "FP16", "FP32", "Cast"]


@dataclass(frozen=True, kw_only=True)
class Cast(Method):
    """A method whose payload is the gradient itself, in ``dtype``, divided by the world size before the sum."""

    dtype: ClassVar[torch.dtype]
    tag: ClassVar[int]
    """Unique number of the wire format, for payloads of the cast's own."""

    collectives: ClassVar[tuple[str, ...]] = ("all_reduce",)
    scatters: ClassVar[bool] = True
    kernels: ClassVar[tuple[str, ...]] = ()
    # A value's relative error does not depend on how many there are, and what stays in float32 is a second collective:
    # 15 to 29 % of a step of LeNet on 4 and 8 hosts at 1 Gbit/s.
    min_numel: ClassVar[int] = 0

    def plan(self, setting: PlanSetting) -> BucketPlan:
        if setting.collective == REDUCE_SCATTER:
            # Payloads of its own, added up in float32 by the owner: the backend's sum serves whole vectors.
            return SectionPlan(self, setting)
        self._check(setting.collective)
        return CastPlan(self.dtype, setting.segments)

    def dense_plan(self, setting: PlanSetting) -> BucketPlan:
        if setting.collective == REDUCE_SCATTER:
            return SectionPlan(self, setting.whole())
        self._check(setting.collective)
        return CastPlan(None, setting.segments)

    def _check(self, collective: str) -> None:
        if collective not in self.collectives:
            raise IncompatibleError(
                f"{self!r} cannot travel by {collective}; use collective={self.collectives[0]!r} or 'auto'"
            )

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> CastCodec:
        """Return the codec for payloads of the cast's own, where a coder is to shorten them."""
        return CastCodec(segments, world_size, self.dtype)


@dataclass(frozen=True, kw_only=True)
class FP32(Cast):
    """Float32: plain DDP, bit for bit.

    mean = all_reduce_sum(g_i * float32(1/N)), multiplied before the sum, as DDP does. With
    ``gradient_as_bucket_view`` and gradients kept between steps DDP divides instead, so there the bits agree for
    power-of-two world sizes only.
    """

    name: ClassVar[str] = "fp32"
    on_device: ClassVar[bool] = True
    tag: ClassVar[int] = 61
    dtype: ClassVar[torch.dtype] = torch.float32
    properties: ClassVar[Properties] = Properties(
        summary="Float32 all-reduce: plain DDP, bit for bit",
        paper="the baseline",
        bit_stable=False,
        bits_per_element=32.0,
    )
    unbiased: ClassVar[bool] = True
    omega_formula: ClassVar[str | None] = "0"

    def plan(self, setting: PlanSetting) -> BucketPlan:
        return self.dense_plan(setting)

    def omega_of(self, numel: int | None = None) -> float:
        return 0.0


@dataclass(frozen=True, kw_only=True)
class FP16(Cast):
    """IEEE half precision: mean = all_reduce_sum(half(g_i) / N).

    Values above 65504 become inf, on every rank; below 6e-8 they become 0. Use it under a GradScaler.
    Same arithmetic as PyTorch's ``fp16_compress_hook``. The declared ``delta`` is for values from 2^-14 to 65504, which
    are rounded with a relative error of at most 2^-11 on each rank; the backend's sum rounds again.
    """

    name: ClassVar[str] = "fp16"
    on_device: ClassVar[bool] = True
    tag: ClassVar[int] = 62
    dtype: ClassVar[torch.dtype] = torch.float16
    properties: ClassVar[Properties] = Properties(
        summary="Half-precision all-reduce, as PyTorch's fp16 hook",
        paper="Micikevicius et al., Mixed Precision Training, ICLR 2018",
        bit_stable=False,
        bits_per_element=16.0,
    )
    unbiased: ClassVar[bool] = False
    delta_formula: ClassVar[str | None] = "1 - 2^-22"

    def delta_of(self, numel: int | None = None) -> float:
        return 1 - 2.0**-22


@dataclass(frozen=True, kw_only=True)
class BF16(Cast):
    """Brain float: mean = all_reduce_sum(bfloat16(g_i) / N); float32's range with eight bits of precision.

    Same arithmetic as PyTorch's ``bf16_compress_hook``, which a CPU build refuses to register. The declared ``delta``
    is for normal numbers, which are rounded with a relative error of at most 2^-8 on each rank; the backend's sum
    rounds again.
    """

    name: ClassVar[str] = "bf16"
    on_device: ClassVar[bool] = True
    tag: ClassVar[int] = 63
    dtype: ClassVar[torch.dtype] = torch.bfloat16
    properties: ClassVar[Properties] = Properties(
        summary="Brain-float all-reduce, as PyTorch's bf16 hook",
        paper="Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019",
        bit_stable=False,
        bits_per_element=16.0,
    )
    unbiased: ClassVar[bool] = False
    delta_formula: ClassVar[str | None] = "1 - 2^-16"

    def delta_of(self, numel: int | None = None) -> float:
        return 1 - 2.0**-16
