"""ATOMO: elements kept at random, with a given mean number or as many as descend most for their cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch

from gradwire.exchange.codecs.base import SMALLEST_SCALE, Draw
from gradwire.exchange.compressor import Compressor
from gradwire.exchange.method import Properties, require
from gradwire.exchange.segments import Segment
from gradwire.exchange.traits import Traits
from gradwire.methods.atoms.atom_codec import AtomElementCodec, kept_magnitude
from gradwire.methods.levels.worst_case import even_constant
from gradwire.methods.sparse.descent_per_byte import MessageCost, best_count, element_bits, largest_magnitudes
from gradwire.methods.sparse.top_k import check_density

if TYPE_CHECKING:
    from gradwire.kernels import Kernels


class AdaptiveAtomCodec(AtomElementCodec):
    """Codec of ATOMO's elements with a budget chosen for the vector, times the share of guaranteed descent."""

    def __init__(
        self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int, *, cost: MessageCost
    ) -> None:
        super().__init__(kernels, segments, world_size, seed, density=1.0, norm=None)
        self.cost = cost

    def magnitudes(self, sizes: torch.Tensor, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
        moments, sums = self.kernels.moments(sizes, self.drawn), self.kernels.sign_sums(sizes, self.drawn)
        scale = torch.zeros(len(self.drawn), dtype=torch.float32, device="cpu")
        factor = torch.ones_like(scale)
        cost = self.cost.on(draw.link)
        for i, (at, n) in enumerate(zip(self.drawn.offset.tolist(), self.drawn.numel.tolist())):
            if not bool(torch.isfinite(moments.max_abs[i])):
                scale[i] = torch.inf
                continue
            norms = float(sums.above[i] + sums.below[i]), float(moments.norm[i])
            largest = partial(largest_magnitudes, self.kernels, sizes, at, n)
            bits = element_bits("stochastic", n)
            count, factor[i] = best_count("stochastic", bits, 0.0, cost, *norms, n, largest)
            draw.gauge("elements", count, 1)
            c = kept_magnitude(largest(count), norms[0], float(count))
            scale[i] = max(c, SMALLEST_SCALE) if c else 0.0
        return scale, factor


@dataclass(frozen=True, kw_only=True)
class ATOMO(Compressor):
    r"""ATOMO with elements as atoms, each kept at random and divided by its probability.

    With independent t_i, 1 with the probability p_i and else 0::

        Q(x)_i = x_i t_i / p_i      p_i = min(1, |x_i| / c)      sum_i p_i = s = density d

    Unbiased. Of all p that keep s elements on average these have the least variance, sum_i x_i^2 (1 / p_i - 1). If no
    p_i is cut off at 1, all values sent of a parameter are c or -c, and the variance is |x|_1^2 / s - |x|_2^2.

    ``norm`` sets c to a norm of the parameter instead of using a density: "l2" is QSGD with one level,
    s = |x|_1 / |x|_2, and "max" is TernGrad without clipping, s = |x|_1 / |x|_inf, with the same bits. Then c is sent
    once, and every element takes its position and one bit.

    Args:
        density: Share s/d of the elements that is kept on average, above 0 to 1; at least one element of each
            parameter.
        norm: None, "l2" or "max".

    Raises:
        HyperparameterError: a field is out of range.

    Wire: a sparse section (``docs/wire-format.md``), whose number of elements is random. Draws from the rank's stream.

    Reference: H. Wang et al., "ATOMO: Communication-efficient Learning via Atomic Sparsification", NeurIPS 2018,
    algorithm 1, theorem 5 and section 4. The same probabilities: J. Wangni et al., "Gradient Sparsification for
    Communication-Efficient Distributed Optimization", NeurIPS 2018.

    Example:
        >>> import torch, gradwire as gw
        >>> x = torch.tensor([[4.0, 0.0, -1.0, 1.0]])
        >>> found = gw.simulate(x, gw.ATOMO(density=0.5)).mean
        >>> float(found[0]), float(found[1]), set(found[2:].abs().tolist()) <= {0.0, 2.0}
        (4.0, 0.0, True)
    """

    density: float = 0.01
    norm: str | None = None

    name: ClassVar[str] = "atomo"
    tag: ClassVar[int] = 37
    properties: ClassVar[Properties] = Properties(
        summary="Elements kept at random with the probabilities of the least variance",
        paper="Wang et al., ATOMO, NeurIPS 2018",
        bit_stable=True,
        bits_per_element=2 * 0.01 * (32 + 8.14),
        stream="rank",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "density", check_density("ATOMO", self.density))
        require(self.norm in (None, "l2", "max"), "ATOMO", f"norm is None, 'l2' or 'max', not {self.norm!r}")

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            collectives=("all_gather",),
            cut=1 << 40,
            # Kernels of norms, trits and positions; for a budget, of the sum of magnitudes.
            kernels=("moments", *(() if self.norm else ("signs",)), "ternary", "selection", "indices"),
            unbiased=True,
            omega_formula="d / s - 1 for one budget; sqrt(d) - 1 for the l2 norm",
        )

    def omega_of(self, numel: int | None = None) -> float | None:
        """Return the variance of the worst vector, which for a budget or the l2 norm has equal magnitudes."""
        if self.norm is not None:
            return None if numel is None else even_constant(1, max(1, numel), self.norm)
        if numel is None:
            return 1 / self.density - 1
        return max(0.0, max(1, numel) / max(1.0, self.density * numel) - 1)

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> AtomElementCodec:
        density = None if self.norm else self.density
        return AtomElementCodec(kernels, segments, world_size, seed, density=density, norm=self.norm)
