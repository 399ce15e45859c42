"""Fourier transforms of blocks and back, sums in a stated order."""

from __future__ import annotations

import torch

from gradwire.kernels.fourier.blocks import FourierTable
from gradwire.kernels.front import Front, check_vector

__all__ = ["FourierOperations"]


class FourierOperations(Front):
    """The family ``fourier``.

    A block x of b real elements has the coefficients ``c_k = 1/b sum_j x_j e^(-2 pi i j k / b)``, so that
    ``x_j = sum_k c_k e^(2 pi i j k / b)``. Since x is real, c_0 and c_{b/2} are, and c_{b-k} is the conjugate of c_k:
    b real numbers tell the block. ``sqrt(b) c`` is the unitary transform.

    All is float32; each product is rounded before it is added; sums are made in this order. Of x / b come b / 2 = m
    complex numbers ``y_j = x_{2j} + i x_{2j+1}``. For h = m / 2, m / 4, ... 1 the values at j and j + h, j without the
    bit h, become their sum, and their difference times ``w = e^(-pi i (j mod h) / h)``, which leaves the transform Y of
    y at bit-reversed places. From Y at k and Y at m - k, with ``t = pi k / m``::

        E = (Y_k + conj Y_{m-k}) / 2    D = (Y_k - conj Y_{m-k}) / 2
        c_k = (Re E + (Im D cos t - Re D sin t)) + i (Im E - (Re D cos t + Im D sin t))

    and ``c_0, c_{b/2} = Re Y_0 +- Im Y_0``. The way back begins with ``E = c_k + conj c_{m-k}``,
    ``D = c_k - conj c_{m-k}`` and ``Y_k = (Re E - (Re D sin t + Im D cos t)) + i (Im E + (Re D cos t - Im D sin t))``.
    Then, for h = 1, 2, ... m / 2, the value at j + h is multiplied by the conjugate of w, and the two become their sum
    and their difference.
    """

    def fourier(self, x: torch.Tensor, table: FourierTable, z: torch.Tensor) -> None:
        """Write the coefficients of all blocks of ``x`` (float32) into ``z`` (float32 ``[coordinates]``).

        A block with an element that is not finite has no finite coefficient.
        """
        check_vector("x", x, torch.float32, table.extent, at_least=True)
        check_vector("z", z, torch.float32, table.coordinates)
        family = self._serve("fourier")
        if table.blocks:
            family.fourier(x.detach(), table, z)

    def inverse_fourier(self, z: torch.Tensor, table: FourierTable, x: torch.Tensor, accumulate: bool = False) -> None:
        """Write the blocks with the coefficients ``z`` (float32 ``[coordinates]``) into ``x`` (float32), or add."""
        check_vector("x", x, torch.float32, table.extent, at_least=True)
        check_vector("z", z, torch.float32, table.coordinates)
        family = self._serve("fourier")
        if table.blocks:
            family.inverse_fourier(z.detach(), table, x.detach(), accumulate)
