"""The base class of all families' operations, and the checks of arguments that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from gradwire.errors import HyperparameterError
from gradwire.kernels.table import SegmentTable

Family = Any
"""A namespace, such as a module, with a function for each operation of a family."""


class Front(ABC):
    """Base of the classes that state the operations of a family, once for all backends.

    An operation checks its arguments, allocates its results, and calls the backend's function of the same name. That
    function gets detached tensors, and neither checks nor documents anything again.
    """

    @abstractmethod
    def _serve(self, family: str) -> Family:
        """Return the backend's functions of a family."""


def check_vector(name: str, tensor: torch.Tensor, dtype: torch.dtype, numel: int, at_least: bool = False) -> None:
    """Refuse a tensor that would make a kernel read or write outside of it.

    Raises:
        HyperparameterError: it is not a contiguous vector of ``dtype`` with ``numel`` elements, or more if
            ``at_least``.
    """
    fits = tensor.numel() >= numel if at_least else tensor.numel() == numel
    if tensor.dtype != dtype or tensor.ndim != 1 or not tensor.is_contiguous() or not fits:
        raise HyperparameterError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}: a contiguous vector of {dtype} with "
            f"{'at least ' if at_least else ''}{numel} elements is needed"
        )


def check_matrix(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Refuse a tensor that is not a contiguous matrix of a dtype and a shape.

    Raises:
        HyperparameterError: it is no such matrix.
    """
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        raise HyperparameterError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} and stride {tensor.stride()}: a contiguous "
            f"matrix of {dtype}, {shape[0]} by {shape[1]}, is needed"
        )


def check_rows(rows: torch.Tensor, length: int) -> None:
    """Refuse a matrix whose rows are not ``length`` contiguous bytes each; rows may be any distance apart.

    Raises:
        HyperparameterError: it is no such matrix.
    """
    fits = rows.dtype == torch.uint8 and rows.ndim == 2 and rows.shape[0] > 0 and rows.shape[1] == length
    if not fits or rows.stride(0) < 0 or (length > 1 and rows.stride(1) != 1):
        raise HyperparameterError(
            f"rows is {rows.dtype} of shape {tuple(rows.shape)} and stride {rows.stride()}: uint8 rows of "
            f"{length} neighbouring bytes, at least one, are needed"
        )


def check_groups(table: SegmentTable, begin: int, end: int | None) -> int:
    """Return the end of a range of groups; None stands for the end of the table.

    Raises:
        HyperparameterError: the table has no such groups.
    """
    end = table.groups if end is None else end
    if not 0 <= begin <= end <= table.groups:
        raise HyperparameterError(f"groups {begin}..{end} are outside 0..{table.groups}, the groups of {table!r}")
    return end


def check_draw(round: int, stream: int) -> None:
    """Refuse a round or stream that does not fit the counter of the random words.

    Raises:
        HyperparameterError: ``round`` is outside its 64 bits or ``stream`` outside its 32.
    """
    if not (0 <= round < 2**64 and 0 <= stream < 2**32):
        raise HyperparameterError(f"round {round} or stream {stream} is outside its 64 or 32 bits")
