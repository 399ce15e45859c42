"""Methods from outside the package on real ranks: what their code does wrong is named, and nobody waits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.distributed as dist

import gradwire as gw
from gradwire.exchange.codecs import Draw, Summary
from gradwire.exchange.segments import Segment
from gradwire.kernels import Kernels
from gradwire.methods.natural.natural import NaturalCodec
from ranks import Ranks, fresh_ranks


class LongerCodec(NaturalCodec):
    """On rank 1, as after an edit of its code there alone, payloads are longer."""

    def payload_bytes(self, units: int) -> int:
        return super().payload_bytes(units) + (16 if dist.get_rank() == 1 else 0)


@dataclass(frozen=True, kw_only=True)
class OddSize(gw.Natural):
    """Natural compression whose payload has another size on rank 1."""

    name: ClassVar[str] = "odd_size"
    tag: ClassVar[int] = 120

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> NaturalCodec:
        made = super().codec(kernels, segments, world_size, seed)
        return LongerCodec(kernels, made.table, world_size)


@dataclass(frozen=True, kw_only=True)
class OddTrait(gw.Natural):
    """Natural compression that sends small parameters in float32 except on rank 1."""

    name: ClassVar[str] = "odd_trait"
    tag: ClassVar[int] = 121

    def declare(self) -> gw.Traits:
        return replace(super().declare(), min_numel=1 if dist.get_rank() == 1 else 1024)


class BrokenCodec(NaturalCodec):
    """On rank 1 the encoder has a fault."""

    def encode(self, flat: torch.Tensor, summary: Summary, draw: Draw, out: torch.Tensor) -> None:
        if dist.get_rank() == 1:
            out.copy_(flat[:3])
        super().encode(flat, summary, draw, out)


@dataclass(frozen=True, kw_only=True)
class Broken(gw.Natural):
    """Natural compression with an encoder that fails on rank 1."""

    name: ClassVar[str] = "broken"
    tag: ClassVar[int] = 122

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> NaturalCodec:
        return BrokenCodec(kernels, super().codec(kernels, segments, world_size, seed).table, world_size)


def failed() -> str:
    """Exchange by a broken method; return the error."""
    parameter = torch.nn.Parameter(torch.zeros(4000))
    link = gw.Link({"w": parameter}.items(), Broken())
    parameter.grad = torch.ones(4000)
    try:
        link.reduce_()
    except gw.ExchangeError as error:
        return str(error)
    return "no error"


def test_all_ranks_are_told_the_line_of_the_codec_that_failed() -> None:
    """An error of PyTorch's names neither the codec nor the file, and DDP shows no traceback of it."""
    with fresh_ranks(3, group_timeout_s=600) as ranks:
        ranks.start(failed)
        answers = ranks.collect(60)
    for kind, value in answers:
        assert kind == "ok", value
        assert re.search(r"rank 1 failed at .*: RuntimeError: The .*test_own_methods\.py, line \d+, in encode\)", value)


def opened() -> list[str]:
    """Open links of methods whose code differs between ranks; return the errors."""
    told = []
    for method in (OddSize(), gw.ErrorFeedback(OddSize()), OddTrait()):
        try:
            gw.Link({"w": torch.nn.Parameter(torch.zeros(4000))}.items(), method)
        except gw.RankMismatchError as error:
            told.append(str(error))
    return told


def test_ranks_with_different_code_for_one_method_are_told_so(three_ranks: Ranks) -> None:
    """They waited for each other's bytes until the group's timeout, and then named the network."""
    for size, inside, trait in three_ranks(opened):
        assert size.startswith("rank 1 differs from rank 0 in 'bytes that a rank sends in a round': rank 1 has ")
        assert inside.startswith("rank 1 differs from rank 0 in 'bytes that a rank sends in a round': rank 1 has ")
        assert trait.startswith("rank 1 differs from rank 0 in \"trait 'min_numel' of the method\": rank 1 has 1, ")
