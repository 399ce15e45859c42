"""Count sketches, and estimates of elements from them: checked operations, defined in plain PyTorch."""

from __future__ import annotations

import torch

from gradwire.errors import HyperparameterError
from gradwire.kernels.front import Front, check_draw, check_vector
from gradwire.kernels.table import GroupIndex, SegmentTable

COLUMN_BITS = 23
"""Bits of a random integer that decide the column; the one above them is the sign."""

MOST_COLUMNS = 1 << COLUMN_BITS
"""Largest number of columns: the values of ``COLUMN_BITS`` bits."""

MOST_ROWS = 31
"""Largest number of rows, each of which gives an estimate of an element; the median is taken."""


class SketchOperations(Front):
    """The operations of the family ``sketch``: a count sketch is ``rows`` times ``columns`` float32 sums, row by row.

    In each row, element e of a parameter has a column and a sign, which depend on neither the vector nor the round.
    They follow from w, the element's 24-bit integer (:mod:`gradwire.kernels.philox`) for the parameter's key, the
    stream, and the row's number in place of the round::

        column = floor((w mod 2^23) columns / 2^23)        sign = -1 if w >= 2^23 else 1

    The elements of all segments go into one sketch, so that the sketch of a sum is the sum of the sketches.

    Source: M. Charikar, K. Chen, M. Farach-Colton, "Finding Frequent Items in Data Streams", ICALP 2002.
    """

    def sketch(
        self, x: torch.Tensor, table: SegmentTable, rows: int, columns: int, stream: int, out: torch.Tensor
    ) -> None:
        """Write the sums of ``sign * x`` by row and column into ``out`` (float32 ``[rows * columns]``).

        ``x`` is float32. Sums are made in float64, in the order of elements, and rounded once. Elements that are not
        finite, and sums too large for float32, give sums that are not finite.

        Raises:
            HyperparameterError: ``rows`` is no odd number up to 31, ``columns`` is outside 1 to 2^23, or ``stream`` is
                outside its 32 bits.
        """
        check_vector("x", x, torch.float32, table.extent, at_least=True)
        _check_size(rows, columns)
        check_draw(0, stream)
        check_vector("out", out, torch.float32, rows * columns)
        self._serve("sketch").sketch(x.detach(), table, rows, columns, stream, out)

    def unsketch(
        self, sums: torch.Tensor, table: SegmentTable, rows: int, columns: int, stream: int, x: torch.Tensor
    ) -> None:
        """Write each element's estimate into ``x`` (float32): the median over rows of ``sign * sum``.

        ``sums`` is float32 ``[rows * columns]``; where it is not finite, ``x`` is unspecified. Zeros are positive.

        Raises:
            HyperparameterError: ``rows`` is no odd number up to 31, ``columns`` is outside 1 to 2^23, or ``stream`` is
                outside its 32 bits.
        """
        _check_size(rows, columns)
        check_draw(0, stream)
        check_vector("sums", sums, torch.float32, rows * columns)
        check_vector("x", x, torch.float32, table.extent, at_least=True)
        family = self._serve("sketch")
        if table.groups:
            family.unsketch(sums.detach(), table, rows, columns, stream, x)


def _check_size(rows: int, columns: int) -> None:
    if rows % 2 == 0 or not 1 <= rows <= MOST_ROWS:
        raise HyperparameterError(f"a sketch has an odd number of rows from 1 to {MOST_ROWS}, not {rows}")
    if not 1 <= columns <= MOST_COLUMNS:
        raise HyperparameterError(f"a sketch has 1 to {MOST_COLUMNS} columns, not {columns}")


def sketch(x: torch.Tensor, table: SegmentTable, rows: int, columns: int, stream: int, out: torch.Tensor) -> None:
    where = GroupIndex(table)
    values = where.values(x).double()
    for row, sums in enumerate(out.view(rows, columns)):
        column, sign = _hashes(where, row, columns, stream)
        signed = (sign * values)[where.inside]
        # ``bincount`` adds in order, from zero on.
        sums.copy_(torch.bincount(column[where.inside], weights=signed, minlength=columns))


def unsketch(sums: torch.Tensor, table: SegmentTable, rows: int, columns: int, stream: int, x: torch.Tensor) -> None:
    where, estimates = GroupIndex(table), []
    for row, part in enumerate(sums.view(rows, columns)):
        column, sign = _hashes(where, row, columns, stream)
        estimates.append(sign * part[column])
    # Adding zero makes a negative zero positive.
    where.write(torch.stack(estimates).median(0).values + 0.0, x, accumulate=False)


def _hashes(where: GroupIndex, row: int, columns: int, stream: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each element's column, int64 ``[G, 80]``, and its sign, float32."""
    words = where.uniform(row, stream)
    column = (words % (1 << COLUMN_BITS)) * columns >> COLUMN_BITS
    return column, 1.0 - 2.0 * (words >> COLUMN_BITS).to(torch.float32)
