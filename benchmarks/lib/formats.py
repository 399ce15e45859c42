"""Number formats and quantisers of others, as their specifications and papers define them, to measure beside ours.

Each works on a float32 matrix whose rows are vectors, and gives the values that a receiver decodes. Nothing is packed:
the bits of an element follow from the definition, scales and padding included, and are the ``bits`` of each format.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["ELEMENTS", "MX", "NVFP4", "Element", "TurboQuant", "hadamard", "lloyd_max", "nearest", "round_to"]


@dataclass(frozen=True)
class Element:
    """A small floating-point number: sign, ``exponent`` bits with ``bias``, ``mantissa`` bits, subnormals, no infinity.

    ``largest`` is stated, because the codes above it are NaN or infinity in two of the formats.
    """

    exponent: int
    mantissa: int
    bias: int
    largest: float

    @property
    def bits(self) -> int:
        """Bits of a number."""
        return 1 + self.exponent + self.mantissa

    @property
    def magnitudes(self) -> list[float]:
        """All magnitudes, ascending.

        Example:
            >>> ELEMENTS["E2M1"].magnitudes
            [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
        """
        found = {
            (m / 2**self.mantissa + (e > 0)) * 2.0 ** (max(e, 1) - self.bias)
            for e in range(2**self.exponent)
            for m in range(2**self.mantissa)
        }
        return sorted(x for x in found if x <= self.largest)


ELEMENTS = {
    "E2M1": Element(2, 1, 1, 6.0),
    "E2M3": Element(2, 3, 1, 7.5),
    "E3M2": Element(3, 2, 3, 28.0),
    "E4M3": Element(4, 3, 7, 448.0),
    "E5M2": Element(5, 2, 15, 57344.0),
}
"""Elements of the OCP Microscaling Formats specification v1.0, section 5.3."""


def round_to(x: Tensor, element: Element, generator: torch.Generator | None = None) -> Tensor:
    """Round to an element: to the nearest, ties to the even mantissa, or at random without bias; saturate beyond.

    Between 2^e and 2^(e+1) neighbours are 2^(e - mantissa) apart, and below 2^(1 - bias) as far as just above it. So
    rounding to a multiple of that distance is rounding to the element.
    """
    power = torch.frexp(x).exponent - 1
    step = torch.ldexp(torch.ones_like(x), power.clamp(min=1 - element.bias) - element.mantissa)
    steps = x / step
    if generator is None:
        steps = steps.round()
    else:
        steps = (steps + torch.rand(x.shape, generator=generator)).floor()
    return (steps * step).clamp(-element.largest, element.largest)


def blocks_of(x: Tensor, size: int) -> Tensor:
    """Return ``[rows, blocks, size]``, the last block filled with zeros."""
    return pad(x, (0, -x.shape[1] % size)).view(len(x), -1, size)


@dataclass(frozen=True)
class MX:
    """A microscaling format: blocks of 32 elements that share a power of two of eight bits (E8M0).

    With the elements' largest power of two 2^emax, a block is divided by 2^(floor(log2 max|x|) - emax) and rounded to
    the nearest element; what is beyond the largest element becomes that. With ``stochastic`` elements are rounded at
    random, and the shared power is the least with which no value is beyond the largest element: otherwise the estimate
    would be biased all the same.

    Source: Open Compute Project, Microscaling Formats (MX) Specification v1.0, 2023, sections 5 and 6.3; B. Rouhani et
    al., "Microscaling Data Formats for Deep Learning", arXiv 2310.10537, algorithm 1.
    """

    element: str
    stochastic: bool = False
    size = 32

    def bits(self, numel: int) -> float:
        """Return the bits of an element of a vector."""
        return (ELEMENTS[self.element].bits * self.size + 8) * -(-numel // self.size) / numel

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        element, blocks = ELEMENTS[self.element], blocks_of(x, self.size)
        largest = blocks.abs().amax(2, keepdim=True)
        if self.stochastic:
            ratio = torch.frexp(largest / element.largest)
            # frexp gives a fraction from 1/2 to below 1: only an exact power of two is one less than its exponent.
            power = ratio.exponent - (ratio.mantissa == 0.5).int()
        else:
            power = torch.frexp(largest).exponent - 1 - math.floor(math.log2(element.largest))
        scale = torch.ldexp(torch.ones_like(largest), power.clamp(-127, 127))
        found = round_to(blocks / scale, element, generator if self.stochastic else None) * scale
        return found.view(len(x), -1)[:, : x.shape[1]]


@dataclass(frozen=True)
class NVFP4:
    """E2M1 elements in blocks of 16 with an E4M3 scale each, and a float32 scale for the whole vector.

    The vector's scale is max|x| / (6 * 448), so that the largest block's scale is E4M3's largest number; a block's is
    max|block| / 6 over the vector's, rounded to the nearest E4M3. Elements are rounded to the nearest, or at random as
    NVIDIA's recipe does for gradients. A scale that was rounded down lets a block's largest value saturate.

    Source: NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv 2509.25149, 2025, section 2 and appendix B.
    """

    stochastic: bool = False
    size = 16

    def bits(self, numel: int) -> float:
        """Return the bits of an element of a vector."""
        return ((4 * self.size + 8) * -(-numel // self.size) + 32) / numel

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        element, scales, blocks = ELEMENTS["E2M1"], ELEMENTS["E4M3"], blocks_of(x, self.size)
        whole = (x.abs().amax(1) / (element.largest * scales.largest)).view(-1, 1, 1).clamp(min=1e-38)
        own = round_to(blocks.abs().amax(2, keepdim=True) / element.largest / whole, scales) * whole
        ratio = torch.where(own > 0, blocks / own.clamp(min=1e-45), 0.0)
        found = round_to(ratio, element, generator if self.stochastic else None) * own
        return found.view(len(x), -1)[:, : x.shape[1]]


def hadamard(x: Tensor) -> Tensor:
    """Return the Walsh-Hadamard transform of the last dimension, a power of two, divided by the root of its length.

    It is its own inverse. H of length a b is the Kronecker product of those of a and b, which makes it two products
    with small matrices.
    """
    size = x.shape[-1]
    if size <= 64:
        return x @ _matrix(size)
    first = 1 << (size.bit_length() // 2)
    parts = x.reshape(*x.shape[:-1], first, size // first)
    return hadamard(hadamard(parts).transpose(-1, -2)).transpose(-1, -2).reshape(x.shape)


@functools.cache
def _matrix(size: int) -> Tensor:
    found = torch.ones(1, 1)
    while len(found) < size:
        found = torch.cat((torch.cat((found, found), 1), torch.cat((found, -found), 1))) / math.sqrt(2)
    return found


def signs(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return random signs."""
    return 2.0 * torch.randint(2, shape, generator=generator) - 1.0


@functools.cache
def lloyd_max(levels: int) -> tuple[Tensor, float]:
    """Return the levels with the least squared error for a standard normal value, and that error.

    A level is the mean of the values nearest to it, which Lloyd's iteration reaches from levels as dense as the cube
    root of the density. Source: S. Lloyd, 1957; J. Max, "Quantizing for minimum distortion", 1960, table I.
    """
    normal = torch.distributions.Normal(torch.tensor(0.0, dtype=torch.float64), 1.0)
    found = math.sqrt(3) * normal.icdf((torch.arange(levels, dtype=torch.float64) + 0.5) / levels)
    infinite = torch.tensor([math.inf], dtype=torch.float64)
    for _ in range(100 * levels):
        borders = torch.cat((-infinite, (found[1:] + found[:-1]) / 2, infinite))
        density = torch.exp(-borders.square() / 2) / math.sqrt(2 * math.pi)
        share = normal.cdf(borders).diff()
        mean = -density.diff() / share
        change, found = float((mean - found).abs().max()), mean
        if change < 1e-9:
            break
    return found.float(), 1 - float((share * found.square()).sum())


def nearest(x: Tensor, levels: Tensor) -> Tensor:
    """Round to the nearest of ascending levels."""
    return levels[torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)]


@dataclass(frozen=True)
class TurboQuant:
    """TurboQuant: vectors of ``dim`` elements rotated at random, coordinates rounded to the nearest Lloyd-Max level.

    ``kind`` "mse" (the paper's algorithm 1)::

        u = x / |x|     z = sqrt(dim) R u     Q(x) = |x| R^T c(z) / sqrt(dim)

    with c the 2^b levels for a coordinate of a random unit vector, which is Beta distributed: normal but for terms of
    1 / dim, so that the normal levels are taken. ``kind`` "prod" (algorithm 2) does so with b - 1 bits and sends the
    signs of S r for the residual r = u - Q(u), with S of independent normal numbers, and |r|; the receiver adds
    sqrt(pi / 2) / dim |r| S^T sign(S r), which makes products with x, and so x itself, unbiased.

    R is random signs and a Hadamard transform instead of a random orthogonal matrix, drawn anew for every vector: the
    paper's R is drawn once, which would let all workers err alike. Lengths are float32.

    Source: A. Zandieh et al., "TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate", arXiv
    2504.19874, 2025, algorithms 1 and 2 and theorems 1 and 2.
    """

    width: int
    kind: str = "mse"
    dim: int = 1024
    projection: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        drawn = torch.randn(self.dim, self.dim, generator=torch.Generator().manual_seed(0))
        object.__setattr__(self, "projection", drawn)

    def bits(self, numel: int) -> float:
        """Return the bits of an element of a vector."""
        lengths = 32 if self.kind == "mse" else 64
        return (self.width * self.dim + lengths) * -(-numel // self.dim) / numel

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        blocks = blocks_of(x, self.dim)
        length = blocks.norm(dim=2, keepdim=True)
        unit = blocks / length.clamp(min=1e-38)
        turn = signs(tuple(blocks.shape), generator)
        bits = self.width if self.kind == "mse" else self.width - 1
        z = hadamard(unit * turn) * math.sqrt(self.dim)
        kept = nearest(z, lloyd_max(2**bits)[0]) if bits else torch.zeros_like(z)
        # The residual stays rotated: normal projections of it are as normal.
        found, rest = kept / math.sqrt(self.dim), (z - kept) / math.sqrt(self.dim)
        if self.kind == "prod":
            projected = torch.sign(rest @ self.projection.T) @ self.projection
            found = found + math.sqrt(math.pi / 2) / self.dim * rest.norm(dim=2, keepdim=True) * projected
        return (hadamard(found) * turn * length).view(len(x), -1)[:, : x.shape[1]]
