"""Lattice: cubic-lattice mean estimation, decoded next to the receiver's own vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from gradwire.exchange.codecs.base import CheckedCodec, Constant, Draw, Summary, usable
from gradwire.exchange.compressor import Compressor
from gradwire.exchange.deferred_checks import Flag, all_finite
from gradwire.exchange.method import Properties, is_number, is_whole, require
from gradwire.exchange.segments import Segment
from gradwire.exchange.traits import Traits
from gradwire.exchange.wire import ALIGNMENT
from gradwire.kernels import SegmentTable, digit_layout, dither_shifts, packed_groups
from gradwire.seeds import SHARED, parameter_key

if TYPE_CHECKING:
    from gradwire.kernels import Kernels


@dataclass(frozen=True, eq=False)
class LatticeSummary:
    """The largest magnitudes of the segments on any rank, float32 ``[segments]``.

    ``draw`` is set when the vector is encoded; ``own`` is this rank's vector, kept if its sent values are needed later.
    """

    shared: torch.Tensor | None
    largest: torch.Tensor
    draw: Draw | None = None
    own: torch.Tensor | None = None

    def select(self, index: Constant, shared: torch.Tensor | None) -> LatticeSummary:
        return replace(self, largest=(self.largest if shared is None else shared)[index.on(self.largest.device)])


class LatticeCodec(CheckedCodec):
    """Codec of the colours of lattice points; a unit is a group of 80 elements.

    A payload is the check (four bytes, padded to sixteen, if a distance is given) and the packed colours.

    Args:
        colours: Number of colours, a power of two.
        distance: Largest difference of two workers' values of one element; None: twice the largest magnitude on any
            worker.
    """

    grain = 1

    def __init__(
        self,
        kernels: Kernels,
        segments: Sequence[Segment],
        world_size: int,
        seed: int,
        *,
        colours: int,
        distance: float | None,
    ) -> None:
        self.kernels, self.world_size, self.colours, self.distance = kernels, world_size, colours, distance
        self._key = [parameter_key(seed, s.parameter.name, "lattice") for s in segments]
        self.table = self._table(segments, [s.offset for s in segments])
        self._segments = list(segments)
        self.units = self.table.groups
        self.layout = digit_layout(colours)
        self.shifts = dither_shifts(world_size)
        self.checked = distance is not None
        self.side_bytes = ALIGNMENT if self.checked else 0

    def _table(self, segments: Sequence[Segment], offset: Sequence[int]) -> SegmentTable:
        return SegmentTable(offset, [s.numel for s in segments], [s.start for s in segments], self._key)

    def summarise(self, flat: torch.Tensor) -> LatticeSummary:
        largest = usable(self.kernels.moments(flat, self.table).max_abs)
        return LatticeSummary(largest, largest)

    def payload_bytes(self, units: int) -> int:
        return self.side_bytes + packed_groups(units, self.layout)

    def encode(self, flat: torch.Tensor, summary: Summary, draw: Draw, out: torch.Tensor) -> None:
        _, inverse = self._sides(_lattice(summary))
        check = self.kernels.lattice_encode(
            flat, self.table, inverse, self.colours, draw.round, SHARED, self.shifts[draw.stream],
            out[self.side_bytes :],
        )  # fmt: skip
        if self.checked:
            out[: self.side_bytes].copy_(
                torch.tensor(list(int(check).to_bytes(ALIGNMENT, "little")), dtype=torch.uint8, device="cpu")
            )

    def decode_rows(self, rows: torch.Tensor, summary: Summary, flat: torch.Tensor) -> bool | None:
        ours = _lattice(summary)
        if ours.draw is None:
            raise TypeError("a lattice codec cannot decode before it has encoded")
        side, inverse = self._sides(ours)
        scale = side * torch.tensor(1.0 / self.world_size, dtype=torch.float32, device="cpu")
        found = self.kernels.lattice_mean(
            rows[:, self.side_bytes :], self.table, inverse, scale, self.colours, ours.draw.round, SHARED,
            self.shifts, flat, flat,
        ).tolist()  # fmt: skip
        told = [int.from_bytes(bytes(row[:4].tolist()), "little") for row in rows] if self.checked else found
        return told == found

    def remember(self, summary: Summary, flat: torch.Tensor, draw: Draw, wants_sent: bool) -> LatticeSummary:
        own = torch.cat([flat[s.offset : s.offset + s.numel] for s in self._segments]) if wants_sent else None
        return replace(_lattice(summary), draw=draw, own=own)

    def spoil(self, flat: torch.Tensor) -> None:
        for s in self._segments:
            flat[s.offset : s.offset + s.numel].fill_(torch.inf)

    def unread(self) -> str:
        first, more = self._segments[0].parameter.name, len(self._segments) - 1
        names = f"{first!r}" + (f", or of {more} more parameters exchanged with it," if more else "")
        return (
            f"workers' gradients of {names} differ by more than distance={self.distance!r}, so that their mean is"
            " +inf on all ranks, and a step with it destroys the model unless a GradScaler skips it: set a larger"
            " distance, or distance=None, which is always enough (later rounds like this are counted in"
            " diagnostics()['skipped_rounds'], without a warning)"
        )

    def add_own(self, data: torch.Tensor, summary: Summary, weight: float, flat: torch.Tensor) -> None:
        ours = _lattice(summary)
        if ours.own is None or ours.draw is None:
            raise TypeError("a lattice codec cannot tell what it sent unless the vector was remembered")
        side, inverse = self._sides(ours)
        scale = side * torch.tensor(weight, dtype=torch.float32, device="cpu")
        sizes = [s.numel for s in self._segments]
        offset = [sum(sizes[:i]) for i in range(len(sizes))]
        sent = torch.empty_like(ours.own)
        self.kernels.lattice_mean(
            data[None, self.side_bytes :], self._table(self._segments, offset), inverse, scale, self.colours,
            ours.draw.round, SHARED, [self.shifts[ours.draw.stream]], ours.own, sent,
        )  # fmt: skip
        for s, part in zip(self._segments, sent.split(sizes)):
            flat[s.offset : s.offset + s.numel].add_(part)

    def is_finite(self, summary: Summary, flat: torch.Tensor) -> Flag:
        ours = _lattice(summary)
        side, _ = self._sides(ours)
        first = torch.from_numpy(self.table.offset.copy())
        # A point may be one side beyond the largest magnitude; a spoilt segment is spoilt from its first element on.
        return all_finite(ours.largest + side, flat[first])

    def _sides(self, summary: LatticeSummary) -> tuple[torch.Tensor, torch.Tensor]:
        """Return s and 1 / s of each segment; (0, 0) for one of zeros and (inf, 0) for one that is not finite.

        The distance is stretched by 2^-20 of the largest magnitude, more than what float32 rounds in either direction,
        and a side is no less than 2^-22 of it, so that points have numbers below 2^23.
        """
        largest = summary.largest.to(torch.float64)
        distance = 2 * largest
        if self.distance is not None:
            distance = distance.clamp(max=self.distance)
        side = 2 * (distance + largest * 2.0**-20) / (self.colours - 1)
        side = torch.maximum(side, largest * 2.0**-22).to(torch.float32)
        known = torch.isfinite(side) & (side > 0)
        inverse = (1 / torch.where(known, side, 1.0).to(torch.float64)).to(torch.float32)
        return side, torch.where(known, inverse, 0.0)


def _lattice(summary: Summary) -> LatticeSummary:
    if not isinstance(summary, LatticeSummary):
        raise TypeError(f"a lattice codec cannot use a {type(summary).__name__}")
    return summary


MOST_COLOURS = 1 << 15


@dataclass(frozen=True, kw_only=True)
class Lattice(Compressor):
    r"""Cubic-lattice mean estimation: the colour of a lattice point, decoded next to the receiver's own vector.

    With q = ``colours``, y = ``distance`` >= |x_u - x_v|_inf for all workers u, v, side s = 2 y / (q - 1), and an
    offset theta uniform in [-1/2, 1/2) for each element::

        u sends c = k mod q of k = round(x_u / s - theta_u)
        v reads k = c + q round((x_v / s - theta_u - c) / q), and takes s (k + theta_u) for x_u

    All workers find the same points, whose mean is the outcome. Unbiased; each error is uniform in [-s/2, s/2], so that
    E|Q(x) - x|^2 = d s^2 / 12 = d y^2 / (3 (q - 1)^2), whatever |x|: adding one vector to all inputs changes nothing.

    The offset is one shared draw, plus r / N for rank r: where workers nearly agree, their errors cancel (the mean of
    equal vectors has s^2 / (12 N^2)); where they are many sides apart, the mean has s^2 / (12 N); never more than
    s^2 / 12.

    Workers further apart than y would silently decode points that are off by q s. So every payload has a 32-bit check
    of the information that colours leave out, and a small reduction at the end reports to all ranks whether any of them
    decoded a different point. If one did, the chunk's mean is +inf on all ranks, with a warning at a link's first
    failure. Residuals and momenta keep their state, and a GradScaler skips the step. Without one, the optimizer steps
    with +inf, from which no parameter recovers: check for +inf before the step, or choose a distance that is never
    exceeded. With ``distance=None`` y is twice the largest magnitude on any worker, which no two vectors exceed: no
    check is needed, but nothing is gained where workers are close. This y also replaces a larger ``distance``.

    Args:
        colours: Number q, a power of two from 4 to 32768; log2 q bits an element.
        distance: Largest distance y of two workers' values of one element, in units of the gradient as it is exchanged
            (a GradScaler has multiplied it by the loss scale); None: as above.

    Raises:
        HyperparameterError: a field is out of range.

    Wire: check and packed colours (``docs/wire-format.md``); every worker receives every worker's; the largest
    magnitude of each parameter by a maximum over the workers before. Draws from the shared stream.

    Reference: P. Davies et al., "New Bounds for Distributed Mean Estimation and Variance Reduction", ICLR 2021, the
    cubic lattice; the offset (dither) makes it unbiased.

    Example:
        >>> import torch, gradwire as gw
        >>> x = 100 + torch.linspace(0, 0.01, 200).view(2, 100)
        >>> bool((gw.simulate(x, gw.Lattice(distance=0.01)).mean - x.mean(0)).abs().max() < 0.01 / 15)
        True
    """

    colours: int = 16
    distance: float | None = None

    name: ClassVar[str] = "lattice"
    tag: ClassVar[int] = 25
    properties: ClassVar[Properties] = Properties(
        summary="Colours of lattice points, decoded next to the receiver's own vector",
        paper="Davies et al., New Bounds for Distributed Mean Estimation, ICLR 2021",
        bit_stable=True,
        bits_per_element=2 * 4,
        stream="shared",
    )

    def __post_init__(self) -> None:
        q, y = self.colours, self.distance
        require(
            is_whole(q, 4, MOST_COLOURS) and not q & (q - 1),
            "Lattice",
            f"colours is a power of two from 4 to {MOST_COLOURS}, not {q!r}",
        )
        if y is not None:
            require(
                is_number(y, above=0),
                "Lattice",
                f"distance is a positive number in units of the gradient, or None for what is always enough, not {y!r}",
            )
            object.__setattr__(self, "distance", float(y))

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            collectives=("all_gather",),
            kernels=("moments", "lattice"),
            shares_scales=True,
            unbiased=True,
        )

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> LatticeCodec:
        return LatticeCodec(kernels, segments, world_size, seed, colours=self.colours, distance=self.distance)
