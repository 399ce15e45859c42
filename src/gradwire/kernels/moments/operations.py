"""Exact statistics of segments."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradwire.kernels.front import Front, check_vector
from gradwire.kernels.table import SegmentTable

__all__ = ["MomentOperations", "Moments"]


@dataclass(frozen=True, eq=False)
class Moments:
    """Statistics of each segment: ``max_abs`` float32, ``mean``, ``std`` (population), ``norm`` float64; ``[S]`` each.

    ``norm`` is the Euclidean one. A segment that holds an infinity or a NaN has ``max_abs = +inf`` and zeros for the
    rest; an empty one has zeros.
    """

    max_abs: torch.Tensor
    mean: torch.Tensor
    std: torch.Tensor
    norm: torch.Tensor


class MomentOperations(Front):
    """The family ``moments``."""

    def moments(self, x: torch.Tensor, table: SegmentTable) -> Moments:
        """Compute max-abs, mean, standard deviation and norm of every segment of ``x`` (float32), exactly as defined.

        A segment is cut in blocks of 4096 elements. With ``e`` the exponent of a block's largest magnitude (at least
        -104), every element becomes the integer ``q = trunc(x * 2^(23-e))``; ``sum q`` and ``sum q^2`` are exact, hence
        free of order, and are added up over blocks in float64, first to last.
        """
        check_vector("x", x, torch.float32, table.extent, at_least=True)
        size, device = len(table), x.device
        max_abs = torch.empty(size, dtype=torch.float32, device=device)
        mean, std, norm = (torch.empty(size, dtype=torch.float64, device=device) for _ in range(3))
        out = Moments(max_abs, mean, std, norm)
        self._serve("moments").moments(x.detach(), table, out)
        return out
