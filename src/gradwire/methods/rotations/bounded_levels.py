"""Unbiased quantisation of normal values of bounded magnitude with shared random numbers: tables, and the codec.

A value z within +-T is first rounded at random, without bias, to one of n + 1 points -T = t_0 < ... < t_n = T, n = k H,
k = 2^bits - 1. With an integer h, uniform in 0 .. H - 1, that sender and receiver both draw, point g is sent as the
digit ``floor((g + h) / H)``, and digit i stands for::

    r(h, i) = r(h, 0) + H sum_{j <= i} (t_{jH - h} - t_{jH - h - 1})

The mean of r over h is t_g, whatever the points, if the mean of r(h, 0) is -T. For a standard normal z the error is
least for the r(h, 0) with which the mean of r over z is zero for every h. Points are quantiles of a normal variable
that is wider than z, so they are further apart where few values fall. :func:`solve` finds the width with the least
error.

The tables were computed by :func:`points_of` and :func:`first_values`, which a test repeats. They are stored, since
mathematical libraries may round differently and all ranks must have the same numbers.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Sequence
from statistics import NormalDist
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


SHARED_VALUES: dict[int, int] = {1: 32, 2: 16, 3: 16, 4: 8}
"""H, the number of values of h, by bits."""

LIMIT = 3.09726908
"""T: a share of 1/512 of standard normal values is larger in magnitude."""

WIDTH: dict[int, float] = {1: 1.309, 2: 1.529, 3: 1.652, 4: 1.709}
"""Standard deviation of the normal variable whose quantiles are the points, by bits."""

# fmt: off
POINTS: dict[int, tuple[float, ...]] = {
    1: (
        0.100793182, 0.202188438, 0.304813432, 0.409349898, 0.516568539, 0.62737539, 0.74287771,
        0.864483386, 0.994059863, 1.13420476, 1.28874234, 1.46372494, 1.66973193, 1.92826844, 2.29658969,
        3.09726908,
    ),
    2: (
        0.0764611945, 0.153114198, 0.23015421, 0.307783372, 0.386214638, 0.465676184, 0.546416595,
        0.628711155, 0.712869712, 0.799246742, 0.888254535, 0.980380918, 1.07621363, 1.17647478, 1.28207096,
        1.39416876, 1.51431293, 1.64462048, 1.78811886, 1.94938067, 2.13583982, 2.36092841, 2.65333365,
        3.09726908,
    ),
    3: (
        0.0347269382, 0.0694692303, 0.104242278, 0.139061578, 0.173942771, 0.208901694, 0.243954428,
        0.279117352, 0.314407202, 0.349841128, 0.385436757, 0.42121226, 0.457186422, 0.493378724,
        0.52980942, 0.566499638, 0.603471471, 0.640748095, 0.678353887, 0.716314561, 0.754657322,
        0.793411034, 0.83260641, 0.872276226, 0.912455568, 0.953182106, 0.994496416, 1.03644234, 1.0790674,
        1.12242331, 1.16656652, 1.21155887, 1.25746842, 1.30437034, 1.35234802, 1.40149444, 1.45191372,
        1.50372314, 1.55705551, 1.61206222, 1.66891695, 1.72782049, 1.78900685, 1.85275122, 1.91938058,
        1.98928786, 2.06295141, 2.14096231, 2.22406364, 2.3132087, 2.4096504, 2.51508442, 2.63189075,
        2.76356869, 2.91558927, 3.09726908,
    ),
    4: (
        0.0332040569, 0.0664206537, 0.0996623635, 0.132941826, 0.166271781, 0.199665105, 0.233134842,
        0.266694246, 0.300356815, 0.334136333, 0.368046912, 0.402103034, 0.436319602, 0.470711989,
        0.50529609, 0.540088385, 0.575105998, 0.61036677, 0.645889331, 0.681693185, 0.717798796,
        0.754227698, 0.791002593, 0.828147486, 0.865687815, 0.90365061, 0.942064661, 0.98096072, 1.02037172,
        1.06033301, 1.10088267, 1.14206183, 1.18391503, 1.22649067, 1.26984152, 1.31402531, 1.3591054,
        1.40515163, 1.45224128, 1.50046021, 1.54990428, 1.600681, 1.65291163, 1.7067337, 1.76230414,
        1.81980327, 1.87943982, 1.94145739, 2.00614293, 2.07383786, 2.14495319, 2.21999022, 2.29956971,
        2.38447391, 2.47570915, 2.57460239, 2.68295667, 2.80331523, 2.9394413, 3.09726908,
    ),
}
# fmt: on
"""The points above zero; the others are zero and their negatives."""

# fmt: off
FIRST: dict[int, tuple[float, ...]] = {
    1: (
        -0.0848538956, -0.199119138, -0.29368465, -0.382676827, -0.46942048, -0.555497509, -0.641906285,
        -0.729399537, -0.818622281, -0.910182454, -1.00469516, -1.10281653, -1.20527476, -1.31290307,
        -1.42667861, -1.54777159, -1.67761023, -1.81796959, -1.97109674, -2.13989216, -2.32817998,
        -2.54112407, -2.78589179, -3.07275935, -3.41704773, -3.84273042, -4.38970505, -5.13002272,
        -6.20954685, -7.97948367, -11.5871609, -25.5368866,
    ),
    2: (
        -1.38348161, -1.49207241, -1.60784348, -1.73257406, -1.86796597, -2.01620914, -2.18029748,
        -2.36445041, -2.57480023, -2.82061025, -3.11658353, -3.48761297, -3.97969473, -4.68908339,
        -5.86029048, -8.38273514,
    ),
    3: (
        -2.13438768, -2.21263701, -2.29562417, -2.38411172, -2.4790137, -2.5814691, -2.69293351,
        -2.81530921, -2.95114069, -3.10392012, -3.27859029, -3.48241023, -3.72653406, -4.02911654,
        -4.42200402, -4.96710323,
    ),
    4: (
        -2.60292054, -2.71074135, -2.82965178, -2.96261628, -3.11392092, -3.29007114, -3.5015566,
        -3.76667403,
    ),
}
# fmt: on
"""r(h, 0) for each h, by bits."""

ERROR: dict[int, float] = {1: 1.48806424, 2: 0.219181424, 3: 0.0431629719, 4: 0.00969816959}
"""E (Q(z) - z)^2 of a standard normal z, by bits."""

MOST_BITS = max(POINTS)

_NORMAL = NormalDist()


def points_of(bits: int, width: float, limit: float) -> list[float]:
    """Return the points above zero, ascending: quantiles up to ``limit`` of a normal of deviation ``width``."""
    n = (2**bits - 1) * SHARED_VALUES[bits]
    outside = _NORMAL.cdf(-limit / width)
    inner = (width * _NORMAL.inv_cdf(outside + (1 - 2 * outside) * j / n) for j in range(n // 2 + 1, n))
    return [*inner, limit]


def first_values(bits: int, points: list[float]) -> list[float]:
    """Return r(h, 0) for each h."""
    return [-sum(gap * above for gap, above in steps) for steps in _steps(bits, points)]


def error_of(bits: int, points: list[float]) -> float:
    """Return E (Q(z) - z)^2 of a standard normal z, with values beyond the limit exact."""
    limit, total = points[-1], 0.0
    inside = 1 - 2 * _tail(limit)
    for steps in _steps(bits, points):
        passed = [inside, *(above * inside for _, above in steps), 0.0]
        value, mean, square = 0.0, 0.0, 0.0
        for (a, b), (gap, _) in zip(itertools.pairwise(passed), [*steps, (0.0, 0.0)]):
            mean, square = mean + (a - b) * value, square + (a - b) * value * value
            value += gap
        total += square - mean * mean / inside
    # Without bias the mean of Q(z) z over z and h is the mean of z^2.
    return total / SHARED_VALUES[bits] - (inside - 2 * limit * _NORMAL.pdf(limit))


def solve(bits: int) -> tuple[float, float]:
    """Return the width with the least error, found by golden sections, and the error."""
    ratio, low, high = (math.sqrt(5) - 1) / 2, 1.0, 2.5

    def error(width: float) -> float:
        return error_of(bits, points_of(bits, width, LIMIT))

    while high - low > 1e-5:
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, b) if error(a) < error(b) else (a, high)
    return (low + high) / 2, error((low + high) / 2)


def _steps(bits: int, points: list[float]) -> list[list[tuple[float, float]]]:
    """Return, for each h and digit above 0, its value minus the one before, and the probability of it or more."""
    values, grid = SHARED_VALUES[bits], [*(-t for t in reversed(points)), 0.0, *points]
    inside = 1 - 2 * _tail(points[-1])

    def step(j: int) -> tuple[float, float]:
        a, b = grid[j - 1], grid[j]
        # Mean of (z - a) / (b - a), cut to 0 to 1, over normal z within the limit.
        above = 1 - _tail(points[-1]) - (_integral(b) - _integral(a)) / (b - a)
        return values * (b - a), above / inside

    return [[step(i * values - h) for i in range(1, 2**bits)] for h in range(values)]


def _integral(x: float) -> float:
    """Return the integral of the distribution function up to x."""
    return x * _NORMAL.cdf(x) + _NORMAL.pdf(x)


def _tail(x: float) -> float:
    return math.erfc(x / math.sqrt(2)) / 2


SHARE = 256
"""One in so many coordinates of a block may be sent exactly."""

NONE = 0xFFFF
"""Place that marks an unused exact coordinate: no block is so long."""


class _Room(threading.local):
    """Buffer for coordinates, kept for the thread's next call: new pages cost more than the rotation."""

    def __init__(self) -> None:
        self._kept = np.empty(0, np.float32)

    def take(self, numel: int) -> torch.Tensor:
        """Return a vector that may be used until the next call."""
        if len(self._kept) < numel:
            self._kept = np.empty(numel, np.float32)
        return torch.from_numpy(self._kept[:numel])


_ROOM = _Room()


class BoundedSupportCodec(RotatedCodec):
    """Codec of rotated blocks, whose coordinates z = H D x / |x| are sent as digits of a table or, if large, exactly.

    A payload is the float32 scales of the blocks, the float32 values and 16-bit places of exact coordinates, b / 256 of
    a block of b, each padded to sixteen bytes, and the packed digits of all coordinates.

    All ranks use the same rotation, so coordinates are added up and rotated back once. The integer h of a coordinate is
    drawn from its sender's stream by its place in the block, and is the same for all blocks of a round.

    Args:
        points: The ``k H + 1`` points, ascending from -T to T, to which coordinates are rounded.
        values: Value of each digit for each h, ``[H, k + 1]``.
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
        # A piece of a parameter begins with a whole block, so coordinates are laid out as the elements are.
        self.coordinates = BlockTable(SegmentTable(np.cumsum(numel) - numel, numel, start, keys), block_size)
        self.shared_key = torch.tensor(parameter_key(seed, "", "bounded"), device="cpu")
        self._sizes, self._place = torch.from_numpy(self.blocks.sizes), torch.from_numpy(self.blocks.place[:-1].copy())
        self._room = (self._sizes // SHARE).clamp(min=1)
        # The block of each exact coordinate, and its index in the block.
        self._owner = torch.repeat_interleave(self._room)
        before = torch.cumsum(self._room, 0) - self._room
        self._number = torch.arange(len(self._owner), device="cpu") - before[self._owner]
        self._blocks = self._some(torch.arange(self.blocks.blocks, device="cpu"))
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
        total, spoilt = self._no_sums(), torch.zeros(self.blocks.blocks, dtype=torch.bool, device="cpu")
        for sender, row in enumerate(rows):
            spoilt |= self._add(row, Draw(round, sender), 1.0 / self.world_size, total)
        self._rotate_back(total, spoilt, round, flat, accumulate=False)

    def add_own(self, data: torch.Tensor, summary: Summary, weight: float, flat: torch.Tensor) -> None:
        draw, total = draw_of(summary), self._no_sums()
        spoilt = self._add(data, draw, weight, total)
        self._rotate_back(total, spoilt, draw.round, flat, accumulate=True)

    def _exact_coordinates(self, z: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write the coordinates beyond the limit. Divide blocks that have too many until they fit.

        Returns:
            The divisor of each block's coordinates, float64.
        """
        stretch = torch.ones(self.blocks.blocks, dtype=torch.float64, device="cpu")
        index = torch.zeros(len(self._owner), dtype=torch.int32, device="cpu")
        found = self._beyond(z, self._blocks, self.limit, self._room, index)
        crowded = torch.nonzero(found > self._room).flatten()
        if len(crowded):
            for block in crowded.tolist():
                begin, room = int(self._place[block]), int(self._room[block])
                part = z[begin : begin + int(self._sizes[block])]
                divisor = float(part.abs().topk(room + 1).values[-1]) / self.limit
                part.div_(divisor)
                stretch[block] = divisor
            # Rounding may leave values equal to the largest above the limit by one last place: they are clamped.
            rooms = self._room[crowded]
            some = torch.zeros(int(rooms.sum()), dtype=torch.int32, device="cpu")
            found[crowded] = self._beyond(z, self._some(crowded), self.limit * (1 + 1e-6), rooms, some)
            index[torch.isin(self._owner, crowded)] = some
        used = self._number < found[self._owner]
        values = out[self._values_at : self._places_at].view(torch.float32)
        places = out[self._places_at : self.side_bytes].view(torch.int16)
        values.zero_(), places.fill_(NONE - (1 << 16))
        values[: len(index)] = torch.where(used, z[self._place[self._owner] + index], 0.0)
        places[: len(index)] = torch.where(used, index, NONE - (1 << 16)).to(torch.int16)
        return stretch

    def _some(self, blocks: torch.Tensor) -> SegmentTable:
        """Return the table of the coordinates of ``blocks``, ascending numbers of blocks."""
        nothing = np.zeros((len(blocks), 2), np.int64)
        return SegmentTable(self._place[blocks].numpy(), self._sizes[blocks].numpy(), nothing[:, 0], nothing)

    def _beyond(
        self, z: torch.Tensor, blocks: SegmentTable, limit: float, room: torch.Tensor, index: torch.Tensor
    ) -> torch.Tensor:
        """Write the places of coordinates above ``limit`` in magnitude; return how many each block has."""
        least = torch.full((len(room),), limit, dtype=torch.float32, device="cpu")
        return self.kernels.select_above(z, blocks, torch.nextafter(least, least + 1), room, index)

    def _no_sums(self) -> torch.Tensor:
        sums = _ROOM.take(self.blocks.coordinates)
        sums.zero_()
        return sums

    def _add(self, row: torch.Tensor, draw: Draw, weight: float, total: torch.Tensor) -> torch.Tensor:
        """Add a rank's coordinates times ``weight``; return which blocks have no finite scale."""
        scale = self.scales(row) * torch.tensor(weight, dtype=torch.float32, device="cpu")
        spoilt = ~torch.isfinite(scale)
        scale = torch.where(spoilt, 0.0, scale)
        values = row[self._values_at : self._places_at].view(torch.float32)[: len(self._owner)]
        places = row[self._places_at : self.side_bytes].view(torch.int16)[: len(self._owner)].long() & NONE
        used = places < self._sizes[self._owner]
        owner = self._owner[used]
        exact = self._place[owner] + places[used]
        # Where a value is exact, the value of its digit is not added.
        sums = total[exact] + values[used] * scale[owner]
        self.kernels.add_shared(
            self.digits(row), self.coordinates, scale, self.grid, self._drawn(draw), self.layout, total
        )
        total[exact] = sums
        return spoilt

    def _rotate_back(
        self, total: torch.Tensor, spoilt: torch.Tensor, round: int, flat: torch.Tensor, accumulate: bool
    ) -> None:
        factor = torch.where(spoilt, torch.inf, 1.0).to(torch.float32)
        self.kernels.rotate_back(total, self.blocks, factor, round, SHARED, flat, accumulate)

    def _drawn(self, draw: Draw) -> torch.Tensor:
        """Return h for each place in a block."""
        groups = torch.arange(-(-self.blocks.size // GROUP_SIZE), device="cpu")
        u = uniform_integers(groups, self.shared_key.expand(len(groups), 2), draw.round, draw.stream).reshape(-1)
        h: torch.Tensor = ((u * self.grid.integers) >> 24)[: self.blocks.size]
        return h.to(torch.uint8)
