"""Laws of stochastic rounding, in float64, from the papers' formulas: what the package is held against."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable

import torch

import gradwire as gw
from gradwire.kernels import block_sizes
from gradwire.methods.levels.level_fitting import powers

__all__ = [
    "Law",
    "atoms",
    "behind_rotation",
    "bounded",
    "exactly",
    "fitted",
    "frequencies",
    "lattice",
    "levels",
    "multi_scale",
    "natural",
    "natural_of_mean",
    "rotated",
    "ternary",
]

Law = Callable[[torch.Tensor], torch.Tensor]


def exactly(g: torch.Tensor) -> torch.Tensor:
    return g


def ternary(clip: float | None, shared: bool = True, clip_by: str = "rms") -> tuple[Law, Law]:
    """Return what TernGrad is unbiased for, and the variance s |f| - f^2 of each worker's element."""

    def target(g: torch.Tensor) -> torch.Tensor:
        if clip is None:
            return g
        x = g.double()
        centre = x.mean(1, keepdim=True) if clip_by == "std" else 0.0
        limit = ((x - centre).square().mean(1, keepdim=True).sqrt() * clip).float()
        return g.clamp(-limit, limit)

    def variance(g: torch.Tensor) -> torch.Tensor:
        f = target(g).double()
        scale = f.abs().amax(1, keepdim=True)
        scale = scale.max().expand_as(scale) if shared else scale
        return (scale * f.abs() - f.square()).clamp(min=0)

    return target, variance


def levels(magnitudes: Iterable[float], block_size: int | None, norm: str, shared: bool = False) -> Law:
    """The variance (h - r) (r - l) R^2 of rounding |g| / R between neighbours l < h of the magnitudes.

    R is each worker's own, or the largest of all workers' if ``shared``.
    """
    ends = torch.tensor([float(m) for m in magnitudes], dtype=torch.float64)
    ends = ends / ends[-1]

    def variance(g: torch.Tensor) -> torch.Tensor:
        out = torch.empty(g.shape, dtype=torch.float64)
        size = block_size or g.shape[1]
        for begin in range(0, g.shape[1], size):
            v = g[:, begin : begin + size].double()
            scale = torch.linalg.vector_norm(v, {"max": math.inf, "l2": 2, "l1": 1}[norm], dim=1, keepdim=True)
            scale = scale.max().expand_as(scale) if shared else scale
            r = v.abs() / scale.clamp(min=1e-300)
            upper = torch.searchsorted(ends, r, right=True).clamp(1, len(ends) - 1)
            out[:, begin : begin + size] = (ends[upper] - r) * (r - ends[upper - 1]) * scale.square()
        return out.clamp(min=0)

    return variance


def kept(sizes: torch.Tensor, budget: float) -> torch.Tensor:
    """Return p = min(1, size / c) for rows of sizes, the c of each row by bisection."""
    low, high = torch.full((len(sizes), 1), 1e-9).double(), sizes.sum(1, keepdim=True)
    for _ in range(100):
        c = (low + high) / 2
        many = (sizes / c).clamp(max=1).sum(1, keepdim=True) > budget
        low, high = torch.where(many, c, low), torch.where(many, high, c)
    return (sizes / high).clamp(max=1)


def atoms(density: float) -> Law:
    """The variance x^2 (1 / p - 1) of elements kept with the best p for a budget."""

    def variance(g: torch.Tensor) -> torch.Tensor:
        x = g.abs().double()
        return x.square() * (1 / kept(x, density * g.shape[1]) - 1)

    return variance


def frequencies(density: float, block_size: int) -> Law:
    """The variance of pairs of frequencies of blocks kept with the best p: of an element, that of its share of each.

    A pair with the coefficient c contributes 2 Re(c w^j) to element j, w = e^(2 pi i k / b), and the square of that is
    2 |c|^2 + 2 Re(c^2 w^(2j)).
    """

    def variance(g: torch.Tensor) -> torch.Tensor:
        sizes = block_sizes(g.shape[1], block_size)
        blocks = [torch.fft.rfft(x, norm="forward") for x in g.double().split(sizes, 1)]
        # How many frequencies of the full spectrum an atom stands for.
        twice = [torch.tensor([1.0 if k in (0, b / 2) else 2.0 for k in range(b // 2 + 1)]) for b in sizes]
        coefficients = [(b * t).sqrt() * c.abs() for b, t, c in zip(sizes, twice, blocks)]
        together = torch.cat(coefficients, 1)
        p = kept(together, max(1.0, density * together.shape[1]))
        found = []
        for b, t, c, q in zip(sizes, twice, blocks, (1 / p - 1).split([len(t) for t in twice], 1)):
            spectrum = torch.zeros(len(g), b, dtype=c.dtype)
            spectrum.index_add_(1, 2 * torch.arange(b // 2 + 1) % b, t * q * c.square())
            constant = ((t - 1) * 2 * q * c.abs().square()).sum(1, keepdim=True)
            found.append(torch.fft.ifft(spectrum, norm="forward").real + constant)
        return torch.cat(found, 1)

    return variance


def multi_scale(counts: tuple[int, ...], block_size: int | None) -> Law:
    """The variance (R / s)^2 p (1 - p), p = frac(|g| s / R), with the largest s whose level fits on every worker."""

    def variance(g: torch.Tensor) -> torch.Tensor:
        out = torch.empty(g.shape, dtype=torch.float64)
        for begin in range(0, g.shape[1], block_size or g.shape[1]):
            v = g[:, begin : begin + (block_size or g.shape[1])].abs()
            scale = v.max()
            s = torch.full((v.shape[1],), counts[0])
            for count in counts[1:]:
                s = torch.where((v * torch.tensor(count / counts[0]) <= scale).all(0), count, s)
            a = v.double() * s / scale.double()
            p = a - a.floor()
            out[:, begin : begin + v.shape[1]] = (scale.double() / s).square() * p * (1 - p)
        return out

    return variance


def lattice(colours: int, distance: float | None) -> Law:
    """The variance of the mean of points s (k + theta) next to each worker's g, theta a shared draw plus r / N.

    Workers draw alike, so their errors do not add up as if independent; what is returned adds up to the right sum.
    """

    def variance(g: torch.Tensor) -> torch.Tensor:
        world_size, draws = len(g), 233
        largest = float(g.abs().max())
        side = 2 * min(2 * largest, distance or math.inf) / (colours - 1)
        z = g.double() / side
        total = torch.zeros(g.shape[1], dtype=torch.float64)
        for draw in range(draws):
            # Evenly spread, with no period in common with the shifts.
            theta = (draw * 0.6180339887498949 + torch.arange(world_size, dtype=torch.float64) / world_size) % 1
            shifted = z - theta[:, None]
            total += (shifted.round() - shifted).mean(0).square()
        return (total / draws * side * side * world_size).expand(g.shape)

    return variance


def natural(g: torch.Tensor) -> torch.Tensor:
    """The variance (2^(a+1) - |t|) (|t| - 2^a) of rounding to a neighbouring power of two."""
    t = g.double().abs()
    low = torch.ldexp(torch.ones_like(t), torch.frexp(t).exponent - 1)
    return torch.where(t > 0, (2 * low - t) * (t - low), 0.0)


def natural_of_mean(g: torch.Tensor) -> torch.Tensor:
    """The expected variance of rounding the mean of the workers' powers of two once more.

    It is exact over all draws of up to eight workers, and the mean over 256 draws of more.
    """
    t = g.double().abs()
    low = torch.ldexp(torch.ones_like(t), torch.frexp(t).exponent - 1)
    high = torch.where(t > 0, t / low - 1, 0.0)
    found = torch.zeros(g.shape[1], dtype=torch.float64)
    if len(g) > 8:
        draw = torch.Generator().manual_seed(0)
        draws = (torch.rand(g.shape, generator=draw, dtype=torch.float64) < high for _ in range(256))
        weighted = ((up, torch.tensor(1 / 256, dtype=torch.float64)) for up in draws)
    else:
        every = (torch.tensor(ups)[:, None] for ups in itertools.product((False, True), repeat=len(g)))
        weighted = ((up, torch.where(up, high, 1 - high).prod(0)) for up in every)
    for up, weight in weighted:
        mean = torch.where(t > 0, torch.where(up, 2 * low, low) * g.double().sign(), 0.0).mean(0, keepdim=True)
        found += weight * natural(mean)[0]
    return found


def fitted(method: gw.ALQ | gw.AMQ) -> Law:
    """The variance of rounding to the levels, with their signs, that a first round fits to the gradients, or finds."""

    def variance(g: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor(powers(0.5, 2**method.bits), dtype=torch.float64)
        if not method.overlap:
            ends = gw.simulate(g, method).state["global"]["levels"]
        found = []
        for v in g.double().split(method.block_size or g.shape[1], dim=1):
            scale = torch.linalg.vector_norm(v, {"max": math.inf, "l2": 2}[method.norm], dim=1, keepdim=True)
            r = v / scale.clamp(min=1e-300)
            upper = torch.searchsorted(ends, r, right=True).clamp(1, len(ends) - 1)
            found.append(((ends[upper] - r) * (r - ends[upper - 1])).clamp(min=0) * scale.square())
        return torch.cat(found, 1)

    return variance


def rotated(relative: float, block_size: int) -> tuple[Law, Law]:
    """Return the variance of each worker's element, and of each element of the mean that an owner encodes once more.

    The error of a block, ``relative`` of its squared norm, is spread evenly over its coordinates, those of zeros behind
    a parameter's end among them.
    """
    variance = spread_evenly(relative, block_size)

    def mean_variance(g: torch.Tensor) -> torch.Tensor:
        arrived = g.double().mean(0).square() + variance(g).sum(0) / len(g) ** 2
        return variance(arrived.sqrt()[None])[0]

    return variance, mean_variance


def spread_evenly(relative: float, block_size: int) -> Law:
    """Return that share of each block's squared norm, spread evenly over its coordinates."""

    def variance(g: torch.Tensor) -> torch.Tensor:
        out = torch.empty(g.shape, dtype=torch.float64)
        for begin in range(0, g.shape[1], block_size):
            part = g[:, begin : begin + block_size].double().square()
            size = max(256, 2 ** math.ceil(math.log2(part.shape[1])))
            out[:, begin : begin + block_size] = relative * part.sum(1, keepdim=True) / size
        return out

    return variance


def bounded(bits: int, block_size: int) -> Law:
    """Return the variance of each worker's element: a block's error, spread evenly over its coordinates."""
    return spread_evenly({1: 1.488, 2: 0.2192, 3: 0.04316, 4: 0.009698}[bits], block_size)


def behind_rotation(of_coordinates: Law, block_size: int, draws: int = 20) -> Law:
    """Return the variance behind rotations that workers share: of a block's coordinates, spread over it evenly.

    It depends on the rotation by the largest coordinate, and is the mean over some of them.
    """

    def variance(g: torch.Tensor) -> torch.Tensor:
        generator, parts = torch.Generator().manual_seed(7), g.double().split(block_size, dim=1)
        sizes = [max(256, 2 ** math.ceil(math.log2(part.shape[1]))) for part in parts]
        total = torch.zeros(g.shape, dtype=torch.float64)
        for _ in range(draws):
            z = torch.cat([hadamard(part, size, generator) for part, size in zip(parts, sizes)], 1)
            spread = [v.mean(1, keepdim=True) for v in of_coordinates(z.float()).split(sizes, dim=1)]
            total += torch.cat([v.expand(part.shape) for v, part in zip(spread, parts)], 1)
        return total / draws

    return variance


def hadamard(part: torch.Tensor, size: int, generator: torch.Generator) -> torch.Tensor:
    """Return the coordinates of a block with random signs, the same in all rows, and zeros behind it."""
    signs = torch.randint(0, 2, (part.shape[1],), generator=generator) * 2 - 1
    z = torch.nn.functional.pad(part * signs, (0, size - part.shape[1]))
    for k in range(size.bit_length() - 1):
        pairs = z.view(len(z), -1, 2, 1 << k)
        z = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2).view(len(z), size)
    return z / math.sqrt(size)
