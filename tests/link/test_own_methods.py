"""Methods from outside the package on real ranks: what their code does wrong is named, and nobody waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.distributed as dist

import gradwire as gw
from gradwire.exchange.segments import Segment
from gradwire.kernels import Kernels
from gradwire.methods.natural.natural import NaturalCodec
from ranks import Ranks


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
