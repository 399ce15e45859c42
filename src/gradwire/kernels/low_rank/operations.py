"""Products of the matrices of a vector with thin factors, sums in a stated order."""

from __future__ import annotations

import torch

from gradwire.kernels.front import Front, check_vector
from gradwire.kernels.low_rank.matrices import MatrixTable

__all__ = ["PANEL", "VANISHED", "LowRankOperations"]

PANEL = 256
"""Rows whose products are added up by themselves, before they are added to those before."""

VANISHED = 1e-6
"""A vector of which at most this share is left, once its part along the earlier ones is taken away, is rounding."""


class LowRankOperations(Front):
    """The family ``low_rank``: with M a matrix of ``rows`` by ``columns``, P its left and Q its right factor.

    Factors lie vector by vector: P is float32 ``[rank, rows]`` and Q float32 ``[rank, columns]``, so that a product
    with M reads it row by row. Every product of two floats is rounded to float32 before it is added, and sums have a
    stated order: the bits depend neither on the machine nor on what else lies in the vector.
    """

    def multiply_right(self, x: torch.Tensor, table: MatrixTable, right: torch.Tensor, left: torch.Tensor) -> None:
        """Write P = M Q of all matrices, ``left[k, i] = sum_j M[i, j] right[k, j]``, into ``left``.

        ``x`` is float32, ``right`` float32 ``[right_numel]`` and ``left`` float32 ``[left_numel]``. Sixteen sums, each
        of the columns with one remainder of division by 16, start at zero and are made in the order of columns. Sum l
        is added to sum l + 8, then those of the first eight to those four further, and so on.

        Raises:
            HyperparameterError: a vector has another type or size.
        """
        self._check(x, table, left, right)
        if table.matrices:
            self._serve("low_rank").multiply_right(x.detach(), table, right.detach(), left)

    def multiply_left(self, x: torch.Tensor, table: MatrixTable, left: torch.Tensor, right: torch.Tensor) -> None:
        """Write Q = M^T P of all matrices, ``right[k, j] = sum_i M[i, j] left[k, i]``, into ``right``.

        ``x`` is float32, ``left`` float32 ``[left_numel]`` and ``right`` float32 ``[right_numel]``. The products of 256
        rows are added in their order, from zero on, and the sums of such panels in theirs.

        Raises:
            HyperparameterError: a vector has another type or size.
        """
        self._check(x, table, left, right)
        if table.matrices:
            self._serve("low_rank").multiply_left(x.detach(), table, left.detach(), right)

    def multiply_out(
        self, left: torch.Tensor, right: torch.Tensor, table: MatrixTable, x: torch.Tensor, weight: float | None = None
    ) -> None:
        """Write M = P Q^T of all matrices, ``sum_k left[k, i] right[k, j]`` in the order of k, into ``x``.

        ``left`` is float32 ``[left_numel]``, ``right`` float32 ``[right_numel]``, and ``x`` float32; what lies between
        matrices stays.

        Args:
            weight: Add the float32 product of it and M to ``x`` instead; None: replace what is there.

        Raises:
            HyperparameterError: a vector has another type or size.
        """
        self._check(x, table, left, right)
        if table.matrices:
            self._serve("low_rank").multiply_out(left.detach(), right.detach(), table, x, weight)

    def orthonormalise(self, factors: torch.Tensor, table: MatrixTable, side: str) -> torch.Tensor:
        """Return factors with the same spans, orthonormal, by the modified Gram-Schmidt process in float64.

        ``factors`` is float32 ``[left_numel]`` where ``side`` is "left", or ``[right_numel]`` where it is "right". A
        vector that is a combination of those before, up to rounding, becomes zero. Sums are made by halves: elements i
        and i + n/2 of n, a power of two with zeros behind a vector, are added until one is left.

        Raises:
            HyperparameterError: the vector has another type or size.
        """
        check_vector("factors", factors, torch.float32, table.left_numel if side == "left" else table.right_numel)
        found = torch.empty_like(factors)
        if table.matrices:
            self._serve("low_rank").orthonormalise(factors.detach(), table, side, found)
        return found

    @staticmethod
    def _check(x: torch.Tensor, table: MatrixTable, left: torch.Tensor, right: torch.Tensor) -> None:
        check_vector("x", x, torch.float32, table.extent, at_least=True)
        check_vector("left", left, torch.float32, table.left_numel)
        check_vector("right", right, torch.float32, table.right_numel)
