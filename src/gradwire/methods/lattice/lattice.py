"""Lattice mean estimation: the error follows how far workers are apart, not how long their vectors are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gradwire.exchange.compressor import Compressor
from gradwire.exchange.method import Properties, is_whole, require
from gradwire.exchange.segments import Segment
from gradwire.methods.lattice.lattice_codec import LatticeCodec

if TYPE_CHECKING:
    from gradwire.kernels import Kernels

__all__ = ["Lattice"]

MOST_COLOURS = 1 << 15


@dataclass(frozen=True, kw_only=True)
class Lattice(Compressor):
    r"""Cubic-lattice mean estimation: the colour of a lattice point, decoded next to the receiver's own vector.

    With q = ``colours``, y = ``distance`` >= |x_u - x_v|_inf for all workers u, v, side s = 2 y / (q - 1), and an
    offset theta uniform in [-1/2, 1/2) for each element::

        u sends c = k mod q of k = round(x_u / s - theta_u)
        v reads k = c + q round((x_v / s - theta_u - c) / q), and takes s (k + theta_u) for x_u

    All workers find the same points, whose mean is the outcome. Unbiased; each error is uniform in [-s/2, s/2], so that
    E|Q(x) - x|^2 = d s^2 / 12 = d y^2 / (3 (q - 1)^2), whatever |x|: adding one vector to all inputs changes nothing.

    The offset is one shared draw, plus r / N for rank r: where workers nearly agree, their errors cancel (the mean of
    equal vectors has s^2 / (12 N^2)); where they are many sides apart, the mean has s^2 / (12 N); never more than
    s^2 / 12.

    Workers further apart than y would read points that are off by q s, in silence. So every payload carries 32 bits of
    check over what the colours leave out; a last, small reduction tells all ranks whether any of them read something
    else, and the chunk's mean then is +inf on all, and a link's first is warned of. Memories keep their state, and a
    GradScaler skips the step; without one, the optimizer steps with +inf, which no parameter recovers from: look for
    +inf before the step, or choose a distance that is never passed. With ``distance=None`` y is twice the largest
    magnitude on any worker, which no two vectors exceed: no check is needed, and nothing can fail, but there is no gain
    from workers being close either. Where that is less than ``distance``, it is used as well.

    Args:
        colours: Number q, a power of two from 4 to 32768; log2 q bits an element.
        distance: Largest distance y of two workers' values of one element, in units of the gradient as it is exchanged
            (a GradScaler has multiplied it by the loss scale); None: as above.

    Raises:
        HyperparameterError: a field is out of range.

    Wire: check and packed colours (``docs/wire-format.md``); every worker receives every worker's; the largest
    magnitude of each parameter by a maximum over the workers before. Draws from the shared stream.

    Reference: P. Davies et al., "New Bounds for Distributed Mean Estimation and Variance Reduction", ICLR 2021, the
    cubic lattice; the dither is what makes it unbiased.

    Example:
        >>> import torch, gradwire as gw
        >>> x = 100 + torch.linspace(0, 0.01, 200).view(2, 100)
        >>> bool((gw.simulate(x, gw.Lattice(distance=0.01)).mean - x.mean(0)).abs().max() < 0.01 / 15)
        True
    """

    colours: int = 16
    distance: float | None = None

    name: ClassVar[str] = "lattice"
    tag: ClassVar[int] = 25
    collectives: ClassVar[tuple[str, ...]] = ("all_gather",)
    kernels: ClassVar[tuple[str, ...]] = ("moments", "lattice")
    unbiased: ClassVar[bool] = True
    properties: ClassVar[Properties] = Properties(
        summary="Colours of lattice points, decoded next to the receiver's own vector",
        paper="Davies et al., New Bounds for Distributed Mean Estimation, ICLR 2021",
        bit_stable=True,
        bits_per_element=2 * 4,
        stream="shared",
    )

    def __post_init__(self) -> None:
        q, y = self.colours, self.distance
        whole = is_whole(q)
        require(
            whole and 4 <= q <= MOST_COLOURS and not q & (q - 1),
            "Lattice",
            f"colours is a power of two from 4 to {MOST_COLOURS}, not {q!r}",
        )
        if y is not None:
            number = isinstance(y, int | float) and not isinstance(y, bool)
            require(
                number and math.isfinite(y) and y > 0,
                "Lattice",
                f"distance is a positive number in units of the gradient, or None for what is always enough, not {y!r}",
            )
            object.__setattr__(self, "distance", float(y))

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> LatticeCodec:
        return LatticeCodec(kernels, segments, world_size, seed, colours=self.colours, distance=self.distance)
