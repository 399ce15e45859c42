"""Signs, one bit an element: sums by sign, packing, votes, and back to one of two values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradwire.errors import HyperparameterError
from gradwire.kernels.front import Front, check_groups, check_rows, check_vector
from gradwire.kernels.packing.layout import MAX_WORLD_SIZE
from gradwire.kernels.signs.runs import RunTable
from gradwire.kernels.table import SIGN_BYTES, SegmentTable

__all__ = ["SignOperations", "SignSums"]


@dataclass(frozen=True, eq=False)
class SignSums:
    """Sums of each segment by sign: ``above`` of the elements x >= 0, ``below`` of -x of the others, and their number.

    ``above``, ``below`` are float64 ``[S]``; ``count`` (int64 ``[S]``) is the number of x >= 0. A segment that holds an
    infinity or a NaN has ``above = below = +inf`` and ``count = 0``.
    """

    above: torch.Tensor
    below: torch.Tensor
    count: torch.Tensor


class SignOperations(Front):
    """The family ``signs``. An element's bit is ``x >= 0``: 1 for zero of either sign, 0 for a NaN.

    Bit i of a group of 80 elements is bit ``i % 8`` of its byte ``i // 8``; elements past a segment's end have 0.
    """

    def finite(self, x: torch.Tensor, table: SegmentTable) -> torch.Tensor:
        """Tell for every segment of ``x`` (float32) whether all its elements are finite, bool ``[S]``."""
        check_vector("x", x, torch.float32, table.extent, at_least=True)
        out = torch.empty(len(table), dtype=torch.bool, device=x.device)
        self._serve("signs").finite(x.detach(), table, out)
        return out

    def sign_sums(self, x: torch.Tensor, table: SegmentTable) -> SignSums:
        """Add up the elements of every segment of ``x`` (float32) by sign, exactly as defined.

        A segment is cut in blocks of 4096 elements. With ``e`` the exponent of a block's largest magnitude (at least
        -104), every element becomes the integer ``q = trunc(x * 2^(23-e))``. Sums of ``q`` and ``|q|`` are exact, hence
        free of order; half their sum and half their difference, times ``2^(e-23)``, are added up over blocks in
        float64, first to last.
        """
        check_vector("x", x, torch.float32, table.extent, at_least=True)
        above, below = (torch.empty(len(table), dtype=torch.float64, device=x.device) for _ in range(2))
        out = SignSums(above, below, torch.empty(len(table), dtype=torch.int64, device=x.device))
        self._serve("signs").sign_sums(x.detach(), table, out)
        return out

    def sign_encode(self, x: torch.Tensor, table: SegmentTable, begin: int, end: int, out: torch.Tensor) -> None:
        """Pack the bits of groups ``begin .. end`` of ``x`` (float32) into ``out`` (uint8 ``[10 * (end - begin)]``)."""
        check_vector("x", x, torch.float32, table.extent, at_least=True)
        check_groups(table, begin, end)
        check_vector("out", out, torch.uint8, SIGN_BYTES * (end - begin))
        family = self._serve("signs")
        if begin < end:
            family.sign_encode(x.detach(), table, begin, end, out)

    def sign_vote(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Set each bit of ``out`` (uint8 ``[m]``) that at least half of the ``N`` rows (uint8 ``[N, m]``) have set.

        Rows may be any distance apart.
        """
        _check_bits(rows, rows.shape[-1])
        check_vector("out", out, torch.uint8, rows.shape[1])
        family = self._serve("signs")
        if out.numel():
            family.sign_vote(rows, out)

    def sign_decode(
        self,
        rows: torch.Tensor,
        runs: RunTable,
        above: torch.Tensor,
        below: torch.Tensor,
        begin: int,
        end: int,
        x: torch.Tensor,
        accumulate: bool = False,
    ) -> None:
        """Write the sum over ``N`` rows, first to last, of ``above`` where the bit is 1 and ``below`` where it is 0.

        ``rows`` (uint8 ``[N, 10 * (end - begin)]``, any distance apart) are the bits of groups ``begin .. end``, whose
        elements of ``x`` (float32) are written; ``above`` and ``below`` are float32 ``[N, runs]``. ``accumulate`` adds
        the rows' values to ``x``, one after the other.
        """
        check_groups(runs.table, begin, end)
        _check_bits(rows, SIGN_BYTES * (end - begin))
        for name, values in (("above", above), ("below", below)):
            fits = values.dtype == torch.float32 and values.shape == (rows.shape[0], runs.runs)
            if not fits or not values.is_contiguous():
                raise HyperparameterError(
                    f"{name} is {values.dtype} of shape {tuple(values.shape)}: a contiguous float32 matrix of "
                    f"{rows.shape[0]} rows and {runs.runs} columns is needed"
                )
        check_vector("x", x, torch.float32, runs.table.extent, at_least=True)
        family = self._serve("signs")
        if begin < end:
            family.sign_decode(rows, runs, above.detach(), below.detach(), begin, end, x.detach(), accumulate)


def _check_bits(rows: torch.Tensor, length: int) -> None:
    check_rows(rows, length)
    if rows.shape[0] > MAX_WORLD_SIZE:
        raise HyperparameterError(f"{rows.shape[0]} rows are outside 1..{MAX_WORLD_SIZE}")
