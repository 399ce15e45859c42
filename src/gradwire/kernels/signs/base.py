"""What every backend offers for signs, and the checks that all of them make before memory is touched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from gradwire.errors import HyperparameterError
from gradwire.kernels.packing.layout import MAX_WORLD_SIZE
from gradwire.kernels.table import GROUP_SIZE, SegmentTable

__all__ = [
    "SIGN_BYTES",
    "RunTable",
    "SignKernels",
    "SignSums",
    "check_sign_decode",
    "check_sign_encode",
    "check_sign_vote",
]

SIGN_BYTES = GROUP_SIZE // 8
"""Bytes of a group of signs."""


class RunTable:
    """Segments, and the runs of elements, anchored to the parameter, that share a pair of values.

    Args:
        table: The segments.
        length: Elements of a run, one number for each segment (int64 ``[S]``) or one for all: at least 1, any.

    Attributes:
        phase: Elements of its run that lie before each segment's first, int64 ``[S]``.
        first: Number of runs that begin in, or reach into, the segments before each one, int64 ``[S + 1]``.
        runs: Their number; a run cut by the end of a segment counts in each.
    """

    __slots__ = ("first", "length", "phase", "runs", "table")

    def __init__(self, table: SegmentTable, length: int | Sequence[int] | npt.NDArray[Any]) -> None:
        self.table = table
        self.length = np.array(np.broadcast_to(np.asarray(length, np.int64), len(table)))
        if np.any(self.length < 1):
            raise HyperparameterError(f"a run of {int(self.length.min())} elements: at least 1 is needed")
        self.phase = table.start % self.length
        counts = np.where(table.numel > 0, -(-(self.phase + table.numel) // self.length), 0)
        self.first = np.zeros(len(table) + 1, np.int64)
        np.cumsum(counts, out=self.first[1:])
        self.runs = int(self.first[-1])

    @property
    def owner(self) -> npt.NDArray[np.int64]:
        """The segment of each run, int64 ``[runs]``."""
        return np.repeat(np.arange(len(self.table)), np.diff(self.first))

    @property
    def number(self) -> npt.NDArray[np.int64]:
        """Each run's number within its parameter, int64 ``[runs]``."""
        owner = self.owner
        return np.arange(self.runs) - self.first[owner] + self.table.start[owner] // self.length[owner]

    def elements(self) -> SegmentTable:
        """Give the elements of each run, a segment each."""
        owner = self.owner
        within = (np.arange(self.runs) - self.first[owner]) * self.length[owner] - self.phase[owner]
        begin = np.maximum(within, 0)
        end = np.minimum(within + self.length[owner], self.table.numel[owner])
        nothing = np.zeros(self.runs, np.int64)
        return SegmentTable(self.table.offset[owner] + begin, end - begin, nothing, np.zeros((self.runs, 2)))


@dataclass(frozen=True, eq=False)
class SignSums:
    """Sums of each segment by sign: ``above`` of the elements x >= 0, ``below`` of -x of the others, and their number.

    ``above``, ``below`` are float64 ``[S]``; ``count`` (int64 ``[S]``) is the number of x >= 0. A segment that holds an
    infinity or a NaN has ``above = below = +inf`` and ``count = 0``.
    """

    above: torch.Tensor
    below: torch.Tensor
    count: torch.Tensor


class SignKernels(Protocol):
    """Arithmetic on signs. An element's bit is ``x >= 0``: 1 for zero of either sign, 0 for a NaN.

    Bit i of a group of 80 elements is bit ``i % 8`` of its byte ``i // 8``; elements past a segment's end have 0.
    """

    def finite(self, x: torch.Tensor, table: SegmentTable) -> torch.Tensor:
        """Tell for every segment of ``x`` (float32) whether all its elements are finite, bool ``[S]``."""
        ...

    def sign_sums(self, x: torch.Tensor, table: SegmentTable) -> SignSums:
        """Add up the elements of every segment of ``x`` (float32) by sign, exactly as defined.

        A segment is cut in blocks of 4096 elements. With ``e`` the exponent of a block's largest magnitude (at least
        -104), every element becomes the integer ``q = trunc(x * 2^(23-e))``. Sums of ``q`` and ``|q|`` are exact, hence
        free of order; half their sum and half their difference, times ``2^(e-23)``, are added up over blocks in
        float64, first to last.
        """
        ...

    def sign_encode(self, x: torch.Tensor, table: SegmentTable, begin: int, end: int, out: torch.Tensor) -> None:
        """Pack the bits of groups ``begin .. end`` of ``x`` (float32) into ``out`` (uint8 ``[10 * (end - begin)]``)."""
        ...

    def sign_vote(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Set each bit of ``out`` (uint8 ``[m]``) that at least half of the ``N`` rows (uint8 ``[N, m]``) have set.

        Rows may be any distance apart.
        """
        ...

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
        ...


def _refuse(name: str, tensor: torch.Tensor, wanted: str) -> None:
    raise HyperparameterError(f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}: {wanted} is needed")


def _check_vector(name: str, tensor: torch.Tensor, dtype: torch.dtype, numel: int, at_least: bool = False) -> None:
    fits = tensor.numel() >= numel if at_least else tensor.numel() == numel
    if tensor.dtype != dtype or tensor.ndim != 1 or not tensor.is_contiguous() or not fits:
        _refuse(name, tensor, f"a contiguous vector of {dtype} with {'at least ' * at_least}{numel} elements")


def _check_rows(rows: torch.Tensor, length: int) -> None:
    loose = rows.ndim != 2 or rows.shape[1] != length or (length > 1 and rows.stride(1) != 1)
    if rows.dtype != torch.uint8 or loose or (rows.shape[0] > 1 and rows.stride(0) < 0):
        _refuse("rows", rows, f"uint8 rows of {length} neighbouring bytes")
    if not 1 <= rows.shape[0] <= MAX_WORLD_SIZE:
        raise HyperparameterError(f"{rows.shape[0]} rows are outside 1..{MAX_WORLD_SIZE}")


def _check_groups(table: SegmentTable, begin: int, end: int) -> None:
    if not 0 <= begin <= end <= table.groups:
        raise HyperparameterError(f"groups {begin}..{end} are outside 0..{table.groups}, the groups of {table!r}")


def check_sign_encode(x: torch.Tensor, table: SegmentTable, begin: int, end: int, out: torch.Tensor) -> None:
    """Check the arguments of :meth:`SignKernels.sign_encode`."""
    _check_vector("x", x, torch.float32, table.extent, at_least=True)
    _check_groups(table, begin, end)
    _check_vector("out", out, torch.uint8, SIGN_BYTES * (end - begin))


def check_sign_vote(rows: torch.Tensor, out: torch.Tensor) -> None:
    """Check the arguments of :meth:`SignKernels.sign_vote`."""
    _check_rows(rows, rows.shape[-1])
    _check_vector("out", out, torch.uint8, rows.shape[1])


def check_sign_decode(
    rows: torch.Tensor, runs: RunTable, above: torch.Tensor, below: torch.Tensor, begin: int, end: int, x: torch.Tensor
) -> None:
    """Check the arguments of :meth:`SignKernels.sign_decode`."""
    _check_groups(runs.table, begin, end)
    _check_rows(rows, SIGN_BYTES * (end - begin))
    for name, values in (("above", above), ("below", below)):
        if values.dtype != torch.float32 or values.shape != (rows.shape[0], runs.runs) or not values.is_contiguous():
            _refuse(name, values, f"a contiguous float32 matrix of {rows.shape[0]} rows and {runs.runs} columns")
    _check_vector("x", x, torch.float32, runs.table.extent, at_least=True)
