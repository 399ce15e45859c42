"""Codec of sparse payloads, its rules and formats: positions of kept units, and their values."""

from __future__ import annotations

import itertools
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from gradwire.errors import IncompatibleError, PayloadError
from gradwire.exchange.codecs.base import Constant, Draw, LeftOut, MergeableCodec, Summary
from gradwire.exchange.deferred_checks import Flag
from gradwire.exchange.wire import MOST_BODY_BYTES, Measured, Packing, padded
from gradwire.kernels import FORMATS, Coder, SegmentTable, most_index_bytes, smallest_format
from gradwire.methods.sparse.sparse_values import KeptValues, UnitTable

if TYPE_CHECKING:
    from gradwire.kernels import Kernels


CODED_HEAD = struct.Struct("<I")
"""Bytes of the coded symbols."""

PLAIN = 3
"""Leading bits of a gap that its symbol has; a gap below 8 has all of them."""

MOST_SYMBOL = 4 + 4 * (31 - PLAIN) + 3
"""The symbol of gaps of 31 bits that begin with three ones."""

Integers = npt.NDArray[np.int64]


def symbols_of(gaps: Integers) -> tuple[npt.NDArray[np.uint8], Integers]:
    """Return a symbol for each gap, and the number of its lowest bits that the symbol leaves out.

    A gap below 8 is its own symbol. A larger one of n bits leaves out n - 3 bits and has the symbol ``4 (n - 3) + 4``
    plus the number in its second and third bit: four symbols for each length.

    Example:
        >>> symbols, left = symbols_of(np.array([0, 7, 8, 9, 10, 1000]))
        >>> symbols.tolist(), left.tolist()
        ([0, 7, 8, 8, 9, 35], [0, 0, 1, 1, 1, 7])
    """
    length = np.frexp(gaps.astype(np.float64))[1].astype(np.int64)
    left = np.maximum(length - PLAIN, 0)
    return np.where(left == 0, gaps, 4 + 4 * left + ((gaps >> left) & 3)).astype(np.uint8), left


def gaps_of(index: torch.Tensor) -> Integers:
    """Return the number of positions skipped before each of ``index``."""
    before = torch.cat([torch.tensor([-1], device="cpu"), index.long()])[: len(index)]
    gaps: Integers = (index.long() - before - 1).numpy()
    return gaps


def encode_gaps(index: torch.Tensor, coder: Coder) -> torch.Tensor:
    """Encode ascending positions (int32): the coded symbols of their gaps, then the remaining bits.

    The gap before a position is the number of positions skipped, as in :mod:`gradwire.kernels.indices`. Bits are packed
    from the lowest of each byte up, lowest bit of a gap first.
    """
    gaps = gaps_of(index)
    symbols, left = symbols_of(gaps)
    out = torch.empty(CODED_HEAD.size + coder.bound(len(symbols)), dtype=torch.uint8, device="cpu")
    used = coder.encode(torch.from_numpy(symbols), out[CODED_HEAD.size :])
    out[: CODED_HEAD.size] = torch.frombuffer(bytearray(CODED_HEAD.pack(used)), dtype=torch.uint8)
    owner, place = _bits(left)
    packed = np.packbits((gaps[owner] >> place & 1).astype(np.uint8), bitorder="little")
    return torch.cat([out[: CODED_HEAD.size + used], torch.from_numpy(packed)])


def decode_gaps(data: torch.Tensor, coder: Coder, count: int, numel: int) -> torch.Tensor:
    """Decode ``count`` positions (int32) written by :func:`encode_gaps`.

    Raises:
        PayloadError: ``data`` does not encode ``count`` positions below ``numel``.
    """
    used = (
        CODED_HEAD.unpack(data[: CODED_HEAD.size].numpy().tobytes())[0] if len(data) >= CODED_HEAD.size else len(data)
    )
    if CODED_HEAD.size + used > len(data):
        raise PayloadError(f"coded positions of {len(data)} bytes whose symbols are said to take {used}")
    coded = torch.empty(count, dtype=torch.uint8, device="cpu")
    coder.decode(data[CODED_HEAD.size : CODED_HEAD.size + used], coded)
    octets = coded.numpy()
    if np.any(octets > MOST_SYMBOL):
        raise PayloadError("coded positions with symbols that no gap has")
    left = np.maximum(octets // 4, 1) - 1
    # A few bytes can encode many symbols that leave out many bits: lengths first, then memory for each bit.
    needed, rest = int(left.sum(dtype=np.int64)), data[CODED_HEAD.size + used :].numpy()
    if len(rest) != -(-needed // 8):
        raise PayloadError(f"coded positions whose gaps take {needed} bits beside their symbols, not {8 * len(rest)}")
    bits = np.unpackbits(rest, bitorder="little")
    if bits[needed:].any():
        raise PayloadError(f"coded positions whose gaps take {needed} bits, and the bits after them are not zero")
    symbols, left = octets.astype(np.int64), left.astype(np.int64)
    owner, place = _bits(left)
    gaps = np.where(left == 0, symbols, (4 + symbols % 4) << left)
    np.add.at(gaps, owner, bits[:needed].astype(np.int64) << place)
    index = np.cumsum(gaps + 1) - 1
    if count and index[-1] >= numel:
        raise PayloadError(f"coded positions that go on to {index[-1]} of {numel}")
    return torch.from_numpy(index.astype(np.int32))


def _bits(left: Integers) -> tuple[Integers, Integers]:
    """Return for each remaining bit its gap, and its place there."""
    owner = np.repeat(np.arange(len(left)), left)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(left) - left, left)


HEAD = struct.Struct("<IIIBBH")
"""Bytes of the section, units kept, bytes of their positions, their format, the format's parameter, two zero bytes."""

CODED = len(FORMATS)
"""The format of positions whose gaps are entropy-coded, see :mod:`gradwire.methods.sparse.sparse_codec`."""

MOST_UNITS = 2**31 - 1

FEW_BLOCKS = 64
"""Blocks up to which a call for each costs less than a vector with a number for each position."""


class Rule(ABC):
    """Rule by which units of a worker's vector are kept.

    Attributes:
        fixed: True if every vector keeps exactly :meth:`most` units.
        gauges: Values reported for a round: "density", the share of the elements that is kept, or "elements", the mean
            number kept of a block.
    """

    fixed: bool = False
    gauges: tuple[str, ...] = ("density",)

    @abstractmethod
    def most(self, table: SegmentTable) -> torch.Tensor:
        """Return the maximum number of units kept of each block, int64 ``[blocks]``."""

    @abstractmethod
    def choose(
        self, kernels: Kernels, scores: torch.Tensor, table: SegmentTable, draw: Draw
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the kept positions, int32, ascending within their block, and their number in each block."""


class LargestRule(Rule):
    """Rule that keeps the max(1, floor(density n)) largest magnitudes of each block of n units, first ones first."""

    fixed = True
    gauges = ()

    def __init__(self, density: float) -> None:
        self.density = density

    def most(self, table: SegmentTable) -> torch.Tensor:
        return (torch.from_numpy(table.numel.copy()).double() * self.density).long().clamp(min=1)

    def choose(
        self, kernels: Kernels, scores: torch.Tensor, table: SegmentTable, draw: Draw
    ) -> tuple[torch.Tensor, torch.Tensor]:
        counts = self.most(table)
        positions = torch.empty(int(counts.sum()), dtype=torch.int32, device="cpu")
        kernels.select_largest(scores, table, counts, positions)
        return positions, counts


class AboveRule(Rule):
    """Rule that keeps all units whose magnitude is at least a threshold."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def most(self, table: SegmentTable) -> torch.Tensor:
        return torch.from_numpy(table.numel.copy())

    def choose(
        self, kernels: Kernels, scores: torch.Tensor, table: SegmentTable, draw: Draw
    ) -> tuple[torch.Tensor, torch.Tensor]:
        threshold = torch.full((len(table),), self.threshold * draw.loss_scale, dtype=torch.float32, device="cpu")
        return choose_above(kernels, scores, table, threshold, self.most(table))


def choose_above(
    kernels: Kernels, scores: torch.Tensor, table: SegmentTable, threshold: torch.Tensor, limit: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions at or above the threshold of their block, up to ``limit`` each, and their numbers."""
    room = torch.empty(int(limit.sum()), dtype=torch.int32, device="cpu")
    counts = torch.minimum(kernels.select_above(scores, table, threshold, limit, room), limit)
    return torch.cat([part[:n] for part, n in zip(room.split(limit.tolist()), counts.tolist())]), counts


@dataclass(eq=False)
class SparseSummary:
    """State of a decoder; nothing is measured before the units are chosen."""

    finite: bool = True
    shared: torch.Tensor | None = None

    def select(self, index: Constant, shared: torch.Tensor | None) -> SparseSummary:
        return SparseSummary()


class SparseCodec(MergeableCodec):
    """Codec of the positions of kept units, in the shortest of several formats, and the values of their elements.

    A payload is a header of 16 bytes, the positions of the kept units, zeros up to a multiple of 16, and the values. It
    is one section for all parameters of a bucket, which are not cut, so that the choice does not depend on chunks.

    Args:
        units: Units that are kept or left out.
        block: Number of units of a block, to which ``rule`` is applied; None: a segment.
        values: Encoding of the values.
    """

    grain = 1

    def __init__(
        self,
        kernels: Kernels,
        units: UnitTable,
        world_size: int,
        *,
        rule: Rule,
        block: int | None,
        values: KeptValues,
    ) -> None:
        if units.units > MOST_UNITS:
            raise IncompatibleError(
                f"{units.units} positions in one bucket do not fit 31 bits: use smaller buckets (bucket_cap_mb), or "
                "exclude= a parameter that alone is so long"
            )
        self.kernels, self.world_size, self.rule, self.values = kernels, world_size, rule, values
        self.table, self.units = units, units.units
        self.blocks = units.blocks(block)
        most = rule.most(self.blocks)
        bounds = torch.from_numpy(units.first)
        begins = self._numbers()
        per_segment = torch.zeros(len(units.segments), dtype=torch.int64, device="cpu")
        per_segment.index_add_(0, torch.bucketize(begins, bounds[1:], right=True), most)
        count = self._most = int(most.sum())
        self._index_bytes = most_index_bytes(count, self.units, fewer=not rule.fixed)
        counts = (per_segment * torch.from_numpy(units.length)).tolist()
        self._bound = HEAD.size + padded(self._index_bytes) + padded(values.bytes(counts))

    def use_coder(self, coder: Coder) -> None:
        # Only positions are coded, if that is shorter than every other format.
        self.coder = coder

    def packing(self, units: int) -> Packing:
        return Measured(self.payload_bytes(units))

    def payload_bytes(self, units: int) -> int:
        return self._bound

    def summarise(self, flat: torch.Tensor) -> SparseSummary:
        return SparseSummary()

    def remember(self, summary: Summary, flat: torch.Tensor, draw: Draw, wants_sent: bool) -> SparseSummary:
        return SparseSummary()

    def encode(self, flat: torch.Tensor, summary: Summary, draw: Draw, out: torch.Tensor) -> None:
        scores = self.table.score(self.kernels, flat)
        positions, counts = self.rule.choose(self.kernels, scores, self.blocks, draw)
        chosen = self._numbered(positions, counts)
        counted = {"density": self.table.elements, "elements": len(self.blocks)}
        for name in self.rule.gauges:
            draw.gauge(name, sum(self.table.counts(chosen)), counted[name])
        self.write(chosen, flat.index_select(0, self.table.places(chosen)), draw, out)

    def write(self, chosen: torch.Tensor, values: torch.Tensor, draw: Draw, out: torch.Tensor) -> None:
        """Write the payload of the units ``chosen`` (int32, ascending) and the values of their elements."""
        form = smallest_format(self.kernels.gap_statistics(chosen, self.units))
        coded = encode_gaps(chosen, self.coder) if self.coder is not None and len(chosen) else None
        begin, counts = HEAD.size, self.table.counts(chosen)
        if coded is not None and len(coded) < form.bytes:
            size, number, parameter = len(coded), CODED, 0
            out[begin : begin + size] = coded
        else:
            size, number, parameter = form.bytes, FORMATS.index(form.format), form.parameter
            self.kernels.encode_indices(chosen, self.units, form.format, parameter, out[begin : begin + size])
        end = begin + padded(size)
        out[begin + size : end] = 0
        used = end + self.values.bytes(counts)
        if used > MOST_BODY_BYTES:
            raise IncompatibleError(
                f"{len(chosen)} positions and their values take {used} bytes, and {MOST_BODY_BYTES} at most can be "
                "sent at once: use smaller buckets (bucket_cap_mb), or keep fewer"
            )
        self.values.write(values, counts, draw, out[end:used])
        head = HEAD.pack(used, len(chosen), size, number, parameter, 0)
        out[: HEAD.size] = torch.frombuffer(bytearray(head), dtype=torch.uint8)

    def read(self, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the units of a payload, int32, and the values of their elements.

        Raises:
            PayloadError: the payload is malformed.
        """
        used, count, size, form, parameter, nothing = HEAD.unpack(row[: HEAD.size].numpy().tobytes())
        end = HEAD.size + padded(size)
        known = form < CODED or (form == CODED and parameter == 0 and self.coder is not None)
        if nothing or not known or not end <= used <= len(row) or count > self._most:
            raise PayloadError(f"a sparse section of {used} bytes with {count} positions of format {form} is none")
        data = row[HEAD.size : HEAD.size + size]
        if form == CODED and self.coder is not None:
            chosen = decode_gaps(data, self.coder, count, self.units)
        else:
            chosen = torch.empty(count, dtype=torch.int32, device="cpu")
            self.kernels.decode_indices(data, FORMATS[form], parameter, count, self.units, chosen)
        counts = self.table.counts(chosen)
        if used - end != self.values.bytes(counts) or bool(row[HEAD.size + size : end].any()):
            raise PayloadError(f"a sparse section of {used} bytes does not hold {count} positions and their values")
        return chosen, self.values.read(row[end:used], counts)

    def merge(self, rows: Sequence[torch.Tensor], draw: Draw, out: torch.Tensor) -> LeftOut:
        """Add the values of equal units, and keep the largest of each block, as many as a rank may send.

        Units are single elements. Values of one unit are added in the order of the rows.
        """
        positions, kept = zip(*(self.read(row) for row in rows))
        chosen, where = torch.cat(positions).unique(return_inverse=True)
        values = torch.zeros(len(chosen), dtype=torch.float32, device="cpu").index_add_(0, where, torch.cat(kept))
        begins = torch.searchsorted(chosen, self._numbers().to(torch.int32)).tolist()
        counts = [b - a for a, b in itertools.pairwise([*begins, len(chosen)])]
        table = SegmentTable(begins, counts, [0] * len(counts), [(0, 0)] * len(counts))
        limit = torch.minimum(self.rule.most(self.blocks), torch.tensor(counts, device="cpu"))
        largest = torch.empty(int(limit.sum()), dtype=torch.int32, device="cpu")
        self.kernels.select_largest(values, table, limit, largest)
        stay = torch.repeat_interleave(torch.tensor(begins, dtype=torch.int64, device="cpu"), limit) + largest
        self.write(chosen[stay], values[stay], draw, out)
        values[stay] -= self.read(out)[1]
        places = self.table.places(chosen)

        def left_out(flat: torch.Tensor, weight: float) -> None:
            flat.index_add_(0, places, values, alpha=weight)

        return left_out

    def decode_rows(self, rows: torch.Tensor, summary: Summary, flat: torch.Tensor) -> None:
        ours = _as_sparse(summary)
        for a, n in self.table.runs:
            flat[a : a + n].zero_()
        for row in rows:
            ours.finite = self._add(row, 1.0 / self.world_size, flat) and ours.finite

    def add_own(self, data: torch.Tensor, summary: Summary, weight: float, flat: torch.Tensor) -> None:
        self._add(data, weight, flat)

    def _add(self, row: torch.Tensor, weight: float, flat: torch.Tensor) -> bool:
        """Add a payload's values times the weight, and return whether all of these are finite."""
        chosen, values = self.read(row)
        finite = True
        for run, index, origin in self.table.addresses(chosen):
            finite = self.kernels.add_at(flat, index, origin, values[run], weight) and finite
        return finite

    def is_finite(self, summary: Summary, flat: torch.Tensor) -> Flag:
        return _as_sparse(summary).finite

    def _numbered(self, positions: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Turn positions within blocks, so many of each, into numbers of units, in place."""
        first = self._numbers().to(torch.int32)
        if len(first) > FEW_BLOCKS:
            return positions.add_(torch.repeat_interleave(first, counts))
        for part, begin in zip(positions.split(counts.tolist()), first.tolist()):
            part.add_(begin)
        return positions

    def _numbers(self) -> torch.Tensor:
        """Return the number of the first unit of each block."""
        numel = torch.from_numpy(self.blocks.numel.copy())
        return numel.cumsum(0) - numel


def _as_sparse(summary: Summary) -> SparseSummary:
    if not isinstance(summary, SparseSummary):
        raise TypeError(f"a sparse codec cannot use a {type(summary).__name__}")
    return summary
