"""The formats that ascending positions are packed in, and the bytes that each takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gradwire.errors import HyperparameterError

MOST_PARAMETER = {"bitmap": 0, "rice": 30, "width": 31}
"""The largest parameter of each format; the smallest is 0."""

FORMATS = tuple(MOST_PARAMETER)


class IndexFormat(NamedTuple):
    """A format, its parameter, and the bytes that it takes."""

    format: str
    parameter: int
    bytes: int


@dataclass(frozen=True)
class GapStatistics:
    """What the bytes of ascending positions in every format depend on.

    The gap before a position is the number of positions that are left out there: ``index[i] - index[i-1] - 1``, with
    ``index[-1] = -1``.

    Attributes:
        count: Number of positions.
        numel: What they are below.
        largest: The largest gap, 0 where there is none.
        shifted: The sums of ``gap >> r`` over all gaps, for r from 0 to 30.
    """

    count: int
    numel: int
    largest: int
    shifted: tuple[int, ...]


def check_format(format: str, parameter: int) -> None:
    """Refuse what is no format.

    Raises:
        HyperparameterError: there is no such format, or it has no such parameter.
    """
    if format not in MOST_PARAMETER:
        raise HyperparameterError(f"no format of indices {format!r}: there are {', '.join(FORMATS)}")
    if not 0 <= parameter <= MOST_PARAMETER[format]:
        raise HyperparameterError(
            f"parameter {parameter} of the format {format!r} is outside 0..{MOST_PARAMETER[format]}"
        )


def index_bytes(statistics: GapStatistics, format: str, parameter: int = 0) -> int:
    """Return the bytes that :meth:`~gradwire.kernels.Kernels.encode_indices` writes.

    Args:
        statistics: Of the positions.
        format: ``bitmap`` takes numel bits, ``rice`` count (r + 1) + sum(gap >> r), ``width`` count w.
        parameter: r or w; 0 for ``bitmap``.

    Raises:
        HyperparameterError: there is no such format or parameter, or the largest gap does not fit ``w`` bits.

    Example:
        >>> statistics = GapStatistics(count=3, numel=100, largest=5, shifted=(7, 3, 1, *(0,) * 28))
        >>> [index_bytes(statistics, name, parameter) for name, parameter in (("bitmap", 0), ("rice", 1), ("width", 3))]
        [13, 2, 2]
    """
    check_format(format, parameter)
    if format == "width" and statistics.largest >> parameter:
        raise HyperparameterError(f"a gap of {statistics.largest} does not fit {parameter} bits")
    bits = {
        "bitmap": statistics.numel,
        "rice": statistics.count * (parameter + 1) + statistics.shifted[min(parameter, 30)],
        "width": statistics.count * parameter,
    }[format]
    return -(-bits // 8)


def smallest_format(statistics: GapStatistics) -> IndexFormat:
    """Return the format and parameter of the fewest bytes; of several the first of :data:`FORMATS`, then the least.

    Example:
        >>> smallest_format(GapStatistics(count=8, numel=8, largest=0, shifted=(0,) * 31))
        IndexFormat(format='width', parameter=0, bytes=0)
    """
    parameters = [("bitmap", 0), *(("rice", r) for r in range(31)), ("width", statistics.largest.bit_length())]
    return min(
        (
            IndexFormat(format, parameter, index_bytes(statistics, format, parameter))
            for format, parameter in parameters
        ),
        key=lambda choice: choice.bytes,
    )


def most_index_bytes(count: int, numel: int, *, fewer: bool = False) -> int:
    """Return a bound of what :func:`smallest_format` takes for any ``count`` positions below ``numel``, or ``fewer``.

    The gaps add up to at most ``numel - count``, so that no gap is larger and the sum of ``gap >> r`` is at most
    ``(numel - count) >> r``. A position less takes r + 1 bits and gives back one at most; only gaps of one width may
    grow by a bit each.

    Example:
        >>> most_index_bytes(1, 1000), most_index_bytes(500, 1000), most_index_bytes(1000, 1000, fewer=True)
        (2, 125, 125)
    """
    left = numel - count
    bits = min(numel, *(count * (r + 1) + (left >> r) for r in range(31)))
    return -(-(bits if fewer else min(bits, count * left.bit_length())) // 8)
