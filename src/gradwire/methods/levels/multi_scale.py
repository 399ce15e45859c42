"""Multi-scale quantisation, and the codec by which ranks agree on small numbers by their minimum."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from gradwire.exchange.codecs.base import Draw, SummableCodec, Summary
from gradwire.exchange.codecs.dense import NoSummary
from gradwire.exchange.deferred_checks import Flag
from gradwire.exchange.method import Method, Properties, is_whole, require
from gradwire.exchange.ops import Exchange
from gradwire.exchange.protocols import PROTOCOLS, Context, Outcome, Section
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting, SectionPlan
from gradwire.exchange.segments import Segment
from gradwire.exchange.traits import Traits
from gradwire.exchange.wire import ALIGNMENT
from gradwire.methods.levels.level_compressor import check_blocks
from gradwire.methods.levels.qsgd_max_norm import SharedLevelCodec
from gradwire.methods.wrappers.wrapper import pieces

if TYPE_CHECKING:
    from gradwire.kernels import Kernels


_UNIT = 8 * ALIGNMENT


class MinimumCodec(SummableCodec):
    """Codec of a vector (uint8) of integers from 0 to ``planes``, whose outcome is the minimum over ranks.

    Bit j of an element is set if it is above j, so that the minimum is a bitwise "and", in any order. A unit is 128
    elements, sixteen bytes a plane.
    """

    grain = 1

    def __init__(self, numel: int, planes: int) -> None:
        self.numel, self.planes = numel, planes
        self.units = -(-numel // _UNIT)

    def summarise(self, flat: torch.Tensor) -> NoSummary:
        return NoSummary()

    def payload_bytes(self, units: int) -> int:
        return ALIGNMENT * self.planes * units

    def mean_bytes(self, units: int) -> int:
        return self.payload_bytes(units)

    def encode(self, flat: torch.Tensor, summary: Summary, draw: Draw, out: torch.Tensor) -> None:
        bits = np.zeros((self.planes, self.units * _UNIT), np.bool_)
        for plane in range(self.planes):
            np.greater(flat.numpy(), plane, out=bits[plane, : self.numel])
        packed = np.packbits(bits, axis=1, bitorder="little").reshape(self.planes, self.units, ALIGNMENT)
        octets = np.ascontiguousarray(packed.transpose(1, 0, 2)).reshape(-1)
        out[: self.payload_bytes(self.units)].copy_(torch.from_numpy(octets))

    def reduce(self, rows: torch.Tensor, begin: int, out: torch.Tensor) -> None:
        out.copy_(rows[0])
        for row in rows[1:]:
            out.bitwise_and_(row)

    def decode_mean(self, data: torch.Tensor, summary: Summary, begin: int, end: int, flat: torch.Tensor) -> None:
        octets = data[: self.payload_bytes(end - begin)].numpy().reshape(-1, self.planes, ALIGNMENT)
        bits = np.unpackbits(octets, axis=2, bitorder="little")
        part = flat[begin * _UNIT : min(end * _UNIT, self.numel)]
        count = bits if self.planes == 1 else np.add.reduce(bits, 1, dtype=np.uint8)
        part.copy_(torch.from_numpy(count.reshape(-1)[: part.numel()]))

    def decode_rows(self, rows: torch.Tensor, summary: Summary, flat: torch.Tensor) -> None:
        total = torch.empty(rows.shape[1], dtype=torch.uint8, device="cpu")
        self.reduce(rows, 0, total)
        self.decode_mean(total, summary, 0, self.units, flat)

    def add_own(self, data: torch.Tensor, summary: Summary, weight: float, flat: torch.Tensor) -> None:
        own = torch.empty(self.numel, dtype=torch.uint8, device="cpu")
        self.decode_mean(data, summary, 0, self.units, own)
        flat.add_(own, alpha=weight)

    def is_finite(self, summary: Summary, flat: torch.Tensor) -> Flag:
        return True


@dataclass(frozen=True, kw_only=True)
class MultiScale(Method):
    r"""Multi-scale quantisation: small coordinates get more levels in the same width.

    With s_1 < s_2 < ... the ``levels`` and R the largest magnitude of a block on any worker, the workers agree for each
    coordinate k on the largest s_j whose level is in the range of s_1 on all of them, and then proceed as
    :class:`QSGDMaxNorm`::

        j_k = min_i max { j : |v_ik| s_j / R <= s_1 }
        z_ik = |v_ik| s_(j_k) / R, rounded at random, with the sign of v_ik         (in [-s_1, s_1])
        mean_k = R / (s_(j_k) N) sum_i z_ik                                         (an exact integer sum)

    Unbiased; worker i's variance is (R / s_(j_k))^2 p (1 - p), p = frac(|v_ik| s_(j_k) / R): never more than with s_1
    alone if the ratios s_j / s_1 are integers, and far less for coordinates below s_1 / s_j of the scale on all
    workers.

    Args:
        levels: Two or more level counts, ascending, the first 1 to 32767 and all below 2^23: the paper's (4, 8) bits
            are (15, 255). With N workers, N times the first is at most 32767.
        block_size: Values that share a scale, a multiple of 16; None: all of a parameter.

    Raises:
        HyperparameterError: a field is out of range.
        IncompatibleError: when attached to so many workers that sums of s_1 levels overflow.

    Wire: first the masks, one bit a coordinate for each level count after the first, combined over workers by the same
    protocol; then as :class:`QSGDMaxNorm` with s_1 levels. Draws from the rank's stream.

    Reference: S. Vineeth, "Unbiased Single-scale and Multi-scale Quantizers for Distributed Optimization",
    arXiv 2109.12497, 2021.

    Example:
        >>> import torch, gradwire as gw
        >>> g = torch.tensor([[1.0, 0.125, 0.25], [-1.0, 0.125, 0.0]])
        >>> gw.simulate(g, gw.MultiScale(levels=(1, 8))).mean[1]
        tensor(0.1250)
    """

    levels: tuple[int, ...] = (15, 255)
    block_size: int | None = None

    name: ClassVar[str] = "multiscale"
    tag: ClassVar[int] = 21
    properties: ClassVar[Properties] = Properties(
        summary="More levels for coordinates that are small on all workers, exact integer sums",
        paper="Vineeth, Quantization for Distributed Optimization, 2021",
        bit_stable=True,
        bits_per_element=(16 / 3 + 8 + 2) / 2,
        stream="rank",
    )

    def __post_init__(self) -> None:
        listed = isinstance(self.levels, (tuple, list)) and all(is_whole(s) for s in self.levels)
        ascending = listed and all(a < b for a, b in itertools.pairwise(self.levels))
        require(
            ascending and len(self.levels) > 1 and 1 <= self.levels[0] <= 32767 and self.levels[-1] < 1 << 23,
            "MultiScale",
            "levels is two or more ascending numbers, the first 1 to 32767 and all below 2^23, such as (15, 255), not "
            f"{self.levels!r}",
        )
        object.__setattr__(self, "levels", tuple(self.levels))
        check_blocks("MultiScale", self.block_size, "parameter")

    def refusal_of_feedback(self, unseen: str) -> str | None:
        return None

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            collectives=("two_shot", "all_gather"),
            kernels=("moments", "levels"),
            shares_scales=True,
            unbiased=True,
            omega_formula="as qsgdmaxnorm with the fewest levels, at most",
            worst_step=1 / self.levels[0],
        )

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> SharedLevelCodec:
        """Bind the codec of the levels."""
        return SharedLevelCodec(
            kernels, segments, world_size, seed, levels=self.levels[0], block_size=self.block_size, owner="MultiScale"
        )

    def plan(self, setting: PlanSetting) -> BucketPlan:
        return _MultiScalePlan(self, setting)


class _MultiScalePlan(SectionPlan):
    """Plan that agrees on the mask of a chunk, multiplies the coordinates that it marks, and divides their mean."""

    def __init__(self, method: MultiScale, setting: PlanSetting) -> None:
        super().__init__(method, setting)
        self._factors = torch.tensor([s / method.levels[0] for s in method.levels], dtype=torch.float32, device="cpu")
        sizes = [sum(b - a for a, b in runs) for runs in self.runs]
        self._masks = [MinimumCodec(size, len(method.levels) - 1) for size in sizes]

    def _count(self, magnitudes: torch.Tensor, limit: torch.Tensor, steps: torch.Tensor) -> None:
        """Count the factors by which a magnitude may grow without passing its limit."""
        stretched, counted = torch.empty_like(magnitudes), steps.numpy()
        for number, factor in enumerate(self._factors[1:]):
            torch.mul(magnitudes, factor, out=stretched)
            # NumPy compares floats several times as fast as PyTorch does.
            if number:
                counted += np.less_equal(stretched.numpy(), limit.numpy())
            else:
                np.less_equal(stretched.numpy(), limit.numpy(), out=counted.view(np.bool_))

    def _in_pieces(self, context: Context, steps: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Cut the chunk into pieces that stay in a cache: yield each piece's place in the bucket and its steps."""
        at = 0
        for a, b in pieces(self.runs[context.chunk]):
            yield slice(a, b), steps[at : at + b - a]
            at += b - a

    def _stretch(self, steps: torch.Tensor) -> torch.Tensor:
        """Return the factor of each element."""
        if len(self._factors) > 2:
            return self._factors.index_select(0, steps.to(torch.int32))
        # The first factor is 1, and a float32 from 1 to 2^24 minus 1 is exact. Selecting by random bits takes many
        # times as long.
        return steps.to(torch.float32).mul_(self._factors[1] - 1).add_(1)

    def run(self, context: Context, flat: torch.Tensor, prepared: Any) -> Exchange[Outcome]:
        chunk, runs = self._chunks[context.chunk].whole, self.runs[context.chunk]
        if chunk is None or not chunk.compressed:
            return (yield from super().run(context, flat, prepared))
        (bound,), ((summary, shared),) = chunk.compressed, prepared
        numel = sum(b - a for a, b in runs)
        steps = torch.empty(numel, dtype=torch.uint8, device=flat.device)
        if not flat.is_meta:
            limit = context.workspace.get("limit", 4 * numel).view(torch.float32)
            bound.codec.spread(summary.select(bound.index, shared), limit)
            at = 0
            for where, part in self._in_pieces(context, steps):
                self._count(flat[where].abs(), limit[at : at + len(part)], part)
                at += len(part)
        beside = replace(context, workspace=context.workspace.part("mask"), wants_sent=False, exchange=2)
        section = Section(self._masks[context.chunk], NoSummary())
        yield from PROTOCOLS[self.collective](beside, self.tag, [section], steps)
        if flat.is_meta:
            return (yield from super().run(context, flat, prepared))
        for where, part in self._in_pieces(context, steps):
            flat[where].mul_(self._stretch(part))
        outcome = yield from super().run(context, flat, prepared)
        for where, part in self._in_pieces(context, steps):
            flat[where].div_(self._stretch(part))
        inner = outcome.sent
        if inner is None:
            return outcome

        def sent(out: torch.Tensor, weight: float) -> None:
            stretched = torch.zeros_like(out)
            inner(stretched, weight)
            for where, part in self._in_pieces(context, steps):
                stretched[where].div_(self._stretch(part))
            # This includes values sent in float32, which are stored between the runs.
            out.add_(stretched)

        return replace(outcome, sent=sent)
