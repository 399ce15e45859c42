"""Codec and base class of methods that round blocks to levels: scales of blocks, then packed digits."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.codecs.base import Codec, Constant, Draw, Summary, usable
from gradwire.exchange.compressor import Compressor
from gradwire.exchange.deferred_checks import Flag, all_finite
from gradwire.exchange.method import is_whole, require
from gradwire.exchange.segments import Segment
from gradwire.exchange.traits import Traits
from gradwire.exchange.wire import ALIGNMENT, padded
from gradwire.kernels import (
    WHOLE,
    BlockTable,
    Coder,
    Grid,
    Moments,
    SegmentTable,
    byte_layout,
    digit_layout,
    packed_groups,
)
from gradwire.seeds import parameter_key

if TYPE_CHECKING:
    from gradwire.kernels import Kernels


_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, eq=False)
class LevelSummary:
    """Scales of all blocks of a bucket, the moments from which they were computed, and each segment's first block.

    ``first`` is the number of blocks before each segment of the codec, set by ``select``. ``shared`` has the scales
    where all ranks use the largest.
    """

    scale: torch.Tensor
    first: torch.Tensor
    grid: Grid
    moments: Moments
    shared: torch.Tensor | None = None

    def select(self, index: Constant, shared: torch.Tensor | None) -> LevelSummary:
        return replace(
            self, first=self.first[index.on(self.first.device)], scale=self.scale if shared is None else shared
        )


class LevelCodec(Codec):
    """Codec of digits. Each worker has its own scales, so payloads can only be gathered.

    A payload is the float32 scales of the blocks that the segments reach into, padded to sixteen bytes, and then the
    digits of all groups of 80 elements, packed in the layout of ``digit_layout(grid.base)``.

    Args:
        grid: The levels; a summary may have others with as many digits.
        norm: "max", "l2" or "l1", the norm by which a block is divided. "l1" adds up magnitudes rounded down to units
            of 2^-23 times the power of two below the largest of each 4096; no scale is below the largest magnitude.
        block_size: Number of values that share a scale; None: all of a parameter.
    """

    grain = 1

    def __init__(
        self,
        kernels: Kernels,
        segments: Sequence[Segment],
        world_size: int,
        seed: int,
        *,
        grid: Grid,
        norm: str,
        block_size: int | None,
        purpose: str = "levels",
    ) -> None:
        table = SegmentTable(
            offset=[s.offset for s in segments],
            numel=[s.numel for s in segments],
            start=[s.start for s in segments],
            key=[parameter_key(seed, s.parameter.name, purpose) for s in segments],
        )
        self.kernels, self.table, self.world_size = kernels, table, world_size
        self.grid, self.norm = grid, norm
        self.blocks = BlockTable(table, block_size or WHOLE)
        self.layout = digit_layout(grid.base)
        self.units = table.groups
        self.side_bytes = padded(4 * self.blocks.blocks)
        self._runs: SegmentTable | None = None
        self._first_elements: Constant | None = None
        # Blocks are counted from the start of a parameter, even if a rank's share has only a part of it.
        self._first_blocks = Constant(self.blocks.first[:-1] - table.start // self.blocks.block_size)
        counts = np.diff(self.blocks.first)
        self._owner = Constant(np.repeat(np.arange(len(table)), counts))
        within = np.arange(self.blocks.blocks) - np.repeat(self.blocks.first[:-1], counts)
        self._within = Constant(within + np.repeat(table.start // self.blocks.block_size, counts))

    def use_coder(self, coder: Coder) -> None:
        if self.grid.base > 256:
            raise IncompatibleError(
                f"digits of {self.grid.base} values do not fit the bytes that a coder takes: use at most 127 levels "
                "either side of zero, or no coder"
            )
        self.coder, self.layout = coder, byte_layout(self.grid.base)

    def plain_payload_bytes(self, units: int) -> int:
        return self.side_bytes

    @property
    def runs(self) -> SegmentTable:
        """The elements of each block."""
        if self._runs is None:
            self._runs = self.blocks.runs()
        return self._runs

    def summarise(self, flat: torch.Tensor) -> LevelSummary:
        moments = self.kernels.moments(flat, self.runs)
        scale = moments.max_abs
        if self.norm != "max":
            # Beyond float32 the largest finite scale is used, which is still above every element.
            norm = self._norm(flat, moments).clamp(max=_LARGEST).to(torch.float32)
            scale = torch.where(torch.isfinite(scale), torch.maximum(norm, scale), scale)
        return LevelSummary(usable(scale), self._first_blocks.on(flat.device), self.grid, moments)

    def summarise_mean(self, flat: torch.Tensor, summary: Summary) -> LevelSummary:
        # Scales are in the payload, the levels are not: those that were fitted to the workers' vectors.
        return replace(self.summarise(flat), grid=as_levels(summary).grid)

    def _norm(self, flat: torch.Tensor, moments: Moments) -> torch.Tensor:
        if self.norm == "l2":
            return moments.norm
        # An exact sum of integers, which does not depend on order, layout or backend.
        sums = self.kernels.sign_sums(flat, self.runs)
        return sums.above + sums.below

    def payload_bytes(self, units: int) -> int:
        return self.side_bytes + packed_groups(units, self.layout)

    def encode(self, flat: torch.Tensor, summary: Summary, draw: Draw, out: torch.Tensor) -> None:
        ours = as_levels(summary)
        scale = self._scales(ours)
        out[: 4 * len(scale)].view(torch.float32).copy_(scale)
        self.kernels.quantise(
            flat,
            self.blocks,
            self.kernels.inverse_scale(scale),
            ours.grid,
            self.layout,
            draw.round,
            draw.stream,
            self._digits(out),
        )

    def decode_rows(self, rows: torch.Tensor, summary: Summary, flat: torch.Tensor) -> None:
        weight = torch.tensor(1.0 / self.world_size, dtype=torch.float32, device="cpu")
        scale = torch.stack([row[: 4 * self.blocks.blocks].view(torch.float32) for row in rows]) * weight
        self._decode(rows, scale, as_levels(summary).grid, flat, accumulate=False)

    def add_own(self, data: torch.Tensor, summary: Summary, weight: float, flat: torch.Tensor) -> None:
        ours = as_levels(summary)
        scale = self._scales(ours) * torch.tensor(weight, dtype=torch.float32, device="cpu")
        self._decode(data, scale, ours.grid, flat, accumulate=True)

    def is_finite(self, summary: Summary, flat: torch.Tensor) -> Flag:
        # A scale that is not finite fills its block.
        if self._first_elements is None:
            self._first_elements = Constant(self.runs.offset)
        return all_finite(flat[self._first_elements.on(flat.device)])

    def _scales(self, summary: LevelSummary) -> torch.Tensor:
        """Select the scales of this codec's blocks from the bucket's."""
        where = summary.scale.device
        return summary.scale[summary.first[self._owner.on(where)] + self._within.on(where)]

    def _digits(self, data: torch.Tensor) -> torch.Tensor:
        return data[..., self.side_bytes : self.payload_bytes(self.units)]

    def _decode(
        self, rows: torch.Tensor, scale: torch.Tensor, grid: Grid, flat: torch.Tensor, accumulate: bool
    ) -> None:
        self.kernels.dequantise(self._digits(rows), self.blocks, scale, grid, self.layout, flat, accumulate)


def as_levels(summary: Summary) -> LevelSummary:
    """Narrow a summary's type."""
    if not isinstance(summary, LevelSummary):
        raise TypeError(f"a codec of levels cannot use a {type(summary).__name__}")
    return summary


def check_blocks(owner: str, block_size: int | None, blocks: str) -> None:
    """Check the fields ``block_size`` and ``blocks``, which determine the values that share a scale.

    Raises:
        HyperparameterError: ``block_size`` is not None or a multiple of 16, or ``blocks`` is neither "parameter" nor
            "model".
    """
    require(
        block_size is None or (is_whole(block_size, ALIGNMENT) and block_size % ALIGNMENT == 0),
        owner,
        f"block_size is a multiple of {ALIGNMENT}, or None for one block a parameter, not {block_size!r}",
    )
    require(
        blocks in ("parameter", "model"),
        owner,
        f"blocks is 'parameter' (cut from each parameter's start) or 'model' (across parameters), not {blocks!r}",
    )


def re_encoded(traits: Traits, block_size: int | None) -> Traits:
    """Return traits of a method that gathers codes of blocks, or sends them to owners who encode the mean again.

    Two-shot needs a block size: the scale of a whole parameter is not that of a share of it.
    """
    return replace(
        traits,
        collectives=("all_gather", "two_shot") if block_size else ("all_gather",),
        re_encoding=block_size is not None,
        share_cut=math.lcm(traits.cut, block_size or 1),
    )


class LevelCompressor(Compressor):
    """A compressor that rounds blocks to levels without bias, with the fields ``block_size`` and ``blocks``.

    Payloads are gathered, as in the papers. With ``collective="two_shot"`` the owner of a share encodes the mean again,
    so that the bytes that a rank sends do not grow with the number of workers, and the mean has the variance of one
    more rounding.

    Not a dataclass, so that each method's own fields keep their order in its spec.
    """

    block_size: int | None
    blocks: str

    def declare(self) -> Traits:
        return replace(
            re_encoded(super().declare(), self.block_size),
            # Blocks that cross parameters need the gradients of all parameters.
            whole_step=(self.blocks == "model"),
            joined=self.blocks == "model",
            quantises_blocks=True,
            unbiased=True,
        )

    @abstractmethod
    def block_omega(self, numel: int) -> float | None:
        """Return the variance constant for blocks of ``numel`` values; None where none is known."""

    def omega_of(self, numel: int | None = None) -> float | None:
        size = self.block_size
        if numel is not None and self.blocks == "parameter":
            size = max(1, min(numel, size or numel))
        return None if size is None else self.block_omega(size)
