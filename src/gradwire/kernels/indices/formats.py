"""The formats of packed positions, and the number of bytes that each takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gradwire.errors import HyperparameterError

MOST_PARAMETER = {"bitmap": 0, "rice": 30, "width": 31}
"""The largest parameter of each format; the smallest is 0."""

FORMATS = tuple(MOST_PARAMETER)


class IndexFormat(NamedTuple):
    """A format, its parameter, and the number of bytes that it takes."""

    format: str
    parameter: int
    bytes: int


@dataclass(frozen=True)
class GapStatistics:
    """Statistics of ascending positions, from which the number of bytes in every format follows.

    The gap before a position is the number of positions left out before it: ``index[i] - index[i-1] - 1``, with
    ``index[-1] = -1``.

    Attributes:
        count: Number of positions.
        numel: Bound of the positions, which are below it.
        largest: The largest gap; 0 if there is none.
        shifted: The sums of ``gap >> r`` over all gaps, for r from 0 to 30.
    """

    count: int
    numel: int
    largest: int
    shifted: tuple[int, ...]


def check_format(format: str, parameter: int) -> None:
    """Refuse an unknown format or parameter.

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
    """Return the number of bytes that :meth:`~gradwire.kernels.Kernels.encode_indices` writes.

    Args:
        statistics: Statistics of the positions.
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
    """Return the format and parameter with the fewest bytes; of equals, the first in :data:`FORMATS`, then the least.

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
    """Return a bound of the bytes of :func:`smallest_format` for any ``count`` positions below ``numel``.

    With ``fewer`` the bound holds for fewer positions, too. The gaps sum to at most ``numel - count``. So no gap is
    larger, and the sum of ``gap >> r`` is at most ``(numel - count) >> r``. In the format ``rice``, one position less
    saves r + 1 bits and costs at most one; only in ``width`` may each gap need one bit more.

    Example:
        >>> most_index_bytes(1, 1000), most_index_bytes(500, 1000), most_index_bytes(1000, 1000, fewer=True)
        (2, 125, 125)
    """
    left = numel - count
    bits = min(numel, *(count * (r + 1) + (left >> r) for r in range(31)))
    return -(-(bits if fewer else min(bits, count * left.bit_length())) // 8)
