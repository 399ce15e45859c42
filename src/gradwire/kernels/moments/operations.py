"""Exact statistics of segments, and inverses of scales: checked operations, defined in plain PyTorch or NumPy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from gradwire.errors import HyperparameterError
from gradwire.kernels.front import Front, check_vector
from gradwire.kernels.table import BLOCK_SIZE, SegmentTable


@dataclass(frozen=True, eq=False)
class Moments:
    """Statistics of each segment: ``max_abs`` float32, ``mean``, ``std`` (population), ``norm`` float64; ``[S]`` each.

    ``norm`` is the Euclidean norm. A segment that holds an infinity or a NaN has ``max_abs = +inf``, and zeros for the
    others; an empty segment has zeros.
    """

    max_abs: torch.Tensor
    mean: torch.Tensor
    std: torch.Tensor
    norm: torch.Tensor


class MomentOperations(Front):
    """The operations of the family ``moments``."""

    def moments(self, x: torch.Tensor, table: SegmentTable) -> Moments:
        """Compute max-abs, mean, standard deviation and norm of every segment of ``x`` (float32).

        A segment is cut into blocks of 4096 elements. With ``e`` the exponent of a block's largest magnitude (at least
        -104), every element becomes the integer ``q = trunc(x * 2^(23-e))``. The sums of ``q`` and ``q^2`` are exact,
        so their order does not matter; they are added over blocks in float64, first to last.
        """
        check_vector("x", x, torch.float32, table.extent, at_least=True)
        size, device = len(table), x.device
        max_abs = torch.empty(size, dtype=torch.float32, device=device)
        mean, std, norm = (torch.empty(size, dtype=torch.float64, device=device) for _ in range(3))
        out = Moments(max_abs, mean, std, norm)
        self._serve("moments").moments(x.detach(), table, out)
        return out

    def inverse_scale(self, scale: torch.Tensor) -> torch.Tensor:
        """Return ``2^24 / scale`` (float32), rounded up so that ``scale * inverse >= 2^24``; 0 for 0 and non-finite.

        The probability that a trit fires is then ``ceil(fl(|x| * inverse)) / 2^24``: within 2^-24 of ``|x| / scale``,
        and exactly one where ``|x| == scale``. A scale must be at least 2^-100, else its inverse would overflow. On a
        device the inverse of a smaller one is 0, since raising an error would have to read it back.

        Args:
            scale: A float32 vector.

        Raises:
            HyperparameterError: a finite scale in main memory, other than zero, is smaller than 2^-100.
        """
        check_vector("scale", scale, torch.float32, len(scale))
        if scale.device.type == "cpu":
            _refuse_small(scale.detach().numpy())
        out = torch.empty_like(scale)
        self._serve("moments").inverse(scale.detach(), out)
        return out


def inverse_scale(scale: torch.Tensor) -> torch.Tensor:
    """Return :meth:`MomentOperations.inverse_scale` of a tensor in main memory, of any shape."""
    _refuse_small(scale.detach().numpy())
    return torch.from_numpy(_inverses(scale.detach().numpy()))


def _refuse_small(values: npt.NDArray[np.float32]) -> None:
    with np.errstate(invalid="ignore"):
        small = (values > 0) & (values < _LEAST_SCALE)
    if small.any():
        raise HyperparameterError(f"scale {values[small].min()} is below 2^-100: treat such a segment as zero")


_LEAST_SCALE = np.float32(2.0**-100)


def inverse(scale: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(torch.from_numpy(_inverses(scale.numpy())))


def _inverses(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    # There is one scale for each parameter of a bucket. On so few numbers NumPy is several times as fast as PyTorch.
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        usable = (values >= _LEAST_SCALE) & (values < np.inf)
        found = (2.0**24 / values.astype(np.float64)).astype(np.float32)
        # Rounding to nearest may leave the product just below 2^24: the next larger float is the inverse then.
        found.view(np.int32)[...] += values * found < np.float32(2.0**24)
    found[~usable] = 0
    return found


_INFINITY_BITS = 0x7F800000
_MIN_EXPONENT = -104  # 2^(23 + 104) is the largest power of two in float32


def moments(x: torch.Tensor, table: SegmentTable, out: Moments) -> None:
    for segment, values in enumerate(segments_of(x, table)):
        out.max_abs[segment], out.mean[segment], out.std[segment], out.norm[segment] = _moments(values)


def segments_of(x: torch.Tensor, table: SegmentTable) -> list[torch.Tensor]:
    """Return the elements of each segment."""
    return [x[a : a + n] for a, n in zip(table.offset.tolist(), table.numel.tolist())]


def integer_blocks(x: torch.Tensor) -> tuple[list[int], torch.Tensor] | None:
    """Cut a vector into blocks of 4096 and turn each into integers ``trunc(x * 2^(23-e))``, e its largest exponent.

    Returns:
        The exponents (at least -104) and the integers, int64 ``[blocks, 4096]`` with zeros at the end; None if a
        value is not finite.
    """
    blocks = torch.zeros(-(-x.numel() // BLOCK_SIZE) * BLOCK_SIZE, dtype=torch.float32, device="cpu")
    blocks[: x.numel()] = x
    blocks = blocks.reshape(-1, BLOCK_SIZE)
    if not x.numel():
        return [], blocks.to(torch.int64)
    bits = (blocks.view(torch.int32) & 0x7FFFFFFF).amax(1)
    if int(bits.max()) >= _INFINITY_BITS:
        return None
    exponent = ((bits >> 23) - 127).clamp(min=_MIN_EXPONENT)
    # Exact in float64: powers of two and 24-bit significands.
    integers = torch.ldexp(blocks.to(torch.float64), 23 - exponent[:, None]).trunc().to(torch.int64)
    return exponent.tolist(), integers


def _moments(x: torch.Tensor) -> tuple[float, float, float, float]:
    """Return (max_abs, mean, std, norm) of one segment."""
    blocks = integer_blocks(x)
    if x.numel() == 0 or blocks is None:
        return math.inf if x.numel() else 0.0, 0.0, 0.0, 0.0
    exponent, integers = blocks
    sums, squares = integers.sum(1), (integers * integers).sum(1)
    first = second = 0.0
    for e, s1, s2 in zip(exponent, sums.tolist(), squares.tolist()):
        first += math.ldexp(float(s1), e - 23)
        second += math.ldexp(float(s2), 2 * (e - 23))
    mean = first / x.numel()
    variance = second / x.numel() - mean * mean
    return float(x.abs().max()), mean, math.sqrt(max(variance, 0.0)), math.sqrt(second)
