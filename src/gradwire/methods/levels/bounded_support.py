"""The codec of rotated blocks whose coordinates are quantised without bias within a bound, and sent exactly beyond."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from gradwire.exchange.codecs.base import Draw, Summary
from gradwire.exchange.segments import Segment
from gradwire.exchange.wire import padded
from gradwire.kernels import GROUP_SIZE, BlockTable, SegmentTable, SharedRandomGrid
from gradwire.kernels.philox import uniform_integers
from gradwire.methods.rotations.rotated_blocks import RotatedCodec, draw_of
from gradwire.seeds import SHARED, parameter_key

if TYPE_CHECKING:
    from gradwire.kernels import Kernels

__all__ = ["BoundedSupportCodec"]

SHARE = 256
"""One of that many coordinates of a block may be sent exactly."""

NONE = 0xFFFF
"""Place of an exact coordinate that is not used: no block is as long."""


class _Room(threading.local):
    """Memory for coordinates, kept for the thread's next call: new pages cost more than the rotation itself."""

    def __init__(self) -> None:
        self._kept = np.empty(0, np.float32)

    def take(self, numel: int) -> torch.Tensor:
        """Return a vector that is free until the next call."""
        if len(self._kept) < numel:
            self._kept = np.empty(numel, np.float32)
        return torch.from_numpy(self._kept[:numel])


_ROOM = _Room()


class BoundedSupportCodec(RotatedCodec):
    """Blocks with the coordinates z = H D x / |x|, as digits of a table of values that all ranks have, and exact ones.

    A payload is the float32 scales of the blocks, the float32 values and 16-bit places of exact coordinates, b / 256 of
    a block of b, each padded to sixteen bytes, and the packed digits of all coordinates.

    All ranks rotate alike, so that their coordinates are added up and rotated back once. The integer h of a coordinate
    is drawn from its sender's stream, by its place in the block: the same for all blocks of a round.

    Args:
        points: Ascending, from -T to T, ``k H + 1`` of them: what coordinates are rounded to.
        values: ``[H, k + 1]``: what each digit stands for, by h.
        block_size: Elements of a block, see :class:`gradwire.kernels.RotationTable`.
    """

    def __init__(
        self,
        kernels: Kernels,
        segments: Sequence[Segment],
        world_size: int,
        seed: int,
        *,
        points: Sequence[float],
        values: npt.NDArray[np.float64],
        block_size: int,
    ) -> None:
        super().__init__(kernels, segments, world_size, seed, base=values.shape[1], block_size=block_size)
        self.grid, self.limit = SharedRandomGrid(points, values), float(points[-1])
        start, names = [s.start for s in segments], [s.parameter.name for s in segments]
        numel = np.array(self.blocks.by_segment, np.int64)
        keys = [parameter_key(seed, name, "bounded") for name in names]
        # A piece of a parameter begins with a whole block, so that its coordinates lie as its elements do.
        self.coordinates = BlockTable(SegmentTable(np.cumsum(numel) - numel, numel, start, keys), block_size)
        self.shared_key = torch.tensor(parameter_key(seed, "", "bounded"))
        self._sizes, self._place = torch.from_numpy(self.blocks.sizes), torch.from_numpy(self.blocks.place[:-1].copy())
        self._room = (self._sizes // SHARE).clamp(min=1)
        # Of each exact coordinate, the block, and which of the block's it is.
        self._owner = torch.repeat_interleave(self._room)
        self._number = torch.arange(len(self._owner)) - (torch.cumsum(self._room, 0) - self._room)[self._owner]
        nothing = np.zeros(self.blocks.blocks, np.int64)
        self._blocks = SegmentTable(self._place.numpy(), self._sizes.numpy(), nothing, self.blocks.columns.key)
        self.units = self.coordinates.table.groups
        self._values_at = padded(4 * self.blocks.blocks)
        self._places_at = self._values_at + padded(4 * len(self._owner))
        self.side_bytes = self._places_at + padded(2 * len(self._owner))

    def encode(self, flat: torch.Tensor, summary: Summary, draw: Draw, out: torch.Tensor) -> None:
        norms = self.norms(flat)
        z = _ROOM.take(self.blocks.coordinates)
        self.kernels.rotate(flat, self.blocks, norms.factor, draw.round, SHARED, z)
        stretch = self._exact_coordinates(z, out)
        self.write_scales(norms.norm * stretch / self._sizes, norms, out)
        self.kernels.quantise_shared(
            z, self.coordinates, self.grid, self._drawn(draw), self.layout, draw.round, draw.stream, self.digits(out)
        )

    def decode_rows(self, rows: torch.Tensor, summary: Summary, flat: torch.Tensor) -> None:
        round = draw_of(summary).round
        total, spoilt = self._no_sums(), torch.zeros(self.blocks.blocks, dtype=torch.bool)
        for sender, row in enumerate(rows):
            spoilt |= self._add(row, Draw(round, sender), 1.0 / self.world_size, total)
        self._rotate_back(total, spoilt, round, flat, accumulate=False)

    def add_own(self, data: torch.Tensor, summary: Summary, weight: float, flat: torch.Tensor) -> None:
        draw, total = draw_of(summary), self._no_sums()
        spoilt = self._add(data, draw, weight, total)
        self._rotate_back(total, spoilt, draw.round, flat, accumulate=True)

    def _exact_coordinates(self, z: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write the coordinates beyond the limit; where there are too many, divide their block until there are not.

        Returns:
            What the coordinates of each block were divided by, float64.
        """
        stretch = torch.ones(self.blocks.blocks, dtype=torch.float64)
        index, limit = torch.zeros(len(self._owner), dtype=torch.int32), torch.full((len(stretch),), self.limit)
        found = self._beyond(z, limit, index)
        crowded = torch.nonzero(found > self._room).flatten()
        if len(crowded):
            for block in crowded.tolist():
                begin, room = int(self._place[block]), int(self._room[block])
                part = z[begin : begin + int(self._sizes[block])]
                divisor = float(part.abs().topk(room + 1).values[-1]) / self.limit
                part.div_(divisor)
                stretch[block] = divisor
            # Rounding may leave those that are equal to the largest beyond the limit by a last place: they are clamped.
            limit[crowded] = self.limit * (1 + 1e-6)
            found = self._beyond(z, limit, index)
        used = self._number < found[self._owner]
        values = out[self._values_at : self._places_at].view(torch.float32)
        places = out[self._places_at : self.side_bytes].view(torch.int16)
        values.zero_(), places.fill_(NONE - (1 << 16))
        values[: len(index)] = torch.where(used, z[self._place[self._owner] + index], 0.0)
        places[: len(index)] = torch.where(used, index, NONE - (1 << 16)).to(torch.int16)
        return stretch

    def _beyond(self, z: torch.Tensor, limit: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Write the places of each block's coordinates above its limit in magnitude; return their numbers."""
        return self.kernels.select_above(z, self._blocks, torch.nextafter(limit, limit + 1), self._room, index)

    def _no_sums(self) -> torch.Tensor:
        sums = _ROOM.take(self.blocks.coordinates)
        sums.zero_()
        return sums

    def _add(self, row: torch.Tensor, draw: Draw, weight: float, total: torch.Tensor) -> torch.Tensor:
        """Add a rank's coordinates times ``weight``; return which blocks have no finite scale."""
        scale = self.scales(row) * torch.tensor(weight, dtype=torch.float32)
        spoilt = ~torch.isfinite(scale)
        scale = torch.where(spoilt, 0.0, scale)
        values = row[self._values_at : self._places_at].view(torch.float32)[: len(self._owner)]
        places = row[self._places_at : self.side_bytes].view(torch.int16)[: len(self._owner)].long() & NONE
        used = places < self._sizes[self._owner]
        owner = self._owner[used]
        exact = self._place[owner] + places[used]
        # Where a value is exact, what its digit stands for is not added.
        sums = total[exact] + values[used] * scale[owner]
        self.kernels.add_shared(
            self.digits(row), self.coordinates, scale, self.grid, self._drawn(draw), self.layout, total
        )
        total[exact] = sums
        return spoilt

    def _rotate_back(
        self, total: torch.Tensor, spoilt: torch.Tensor, round: int, flat: torch.Tensor, accumulate: bool
    ) -> None:
        factor = torch.where(spoilt, torch.inf, 1.0)
        self.kernels.rotate_back(total, self.blocks, factor, round, SHARED, flat, accumulate)

    def _drawn(self, draw: Draw) -> torch.Tensor:
        """Return h of each place in a block."""
        groups = torch.arange(-(-self.blocks.size // GROUP_SIZE))
        u = uniform_integers(groups, self.shared_key.expand(len(groups), 2), draw.round, draw.stream).reshape(-1)
        h: torch.Tensor = ((u * self.grid.integers) >> 24)[: self.blocks.size]
        return h.to(torch.uint8)
