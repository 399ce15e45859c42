"""QUIC-FL: rotated blocks, quantised without bias within a bound by shared random numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from gradwire.exchange.compressor import Compressor
from gradwire.exchange.method import Properties, is_whole, require
from gradwire.exchange.segments import Segment
from gradwire.exchange.traits import Traits
from gradwire.methods.rotations.bounded_levels import FIRST, MOST_BITS, POINTS, SHARED_VALUES, BoundedSupportCodec
from gradwire.methods.rotations.eden import check_rotation

if TYPE_CHECKING:
    from gradwire.kernels import Kernels


@dataclass(frozen=True, kw_only=True)
class QUICFL(Compressor):
    r"""QUIC-FL: blocks rotated at random, with coordinates quantised without bias and the few largest sent exactly.

    For a block x of b = ``block_size`` elements, with D random signs and H the Walsh-Hadamard matrix::

        z = H D x / |x|_2        Q(x) = |x|_2 / b  D H q(z)

    Coordinates are nearly normal. One in 512 normal values is above T = 3.097 in magnitude and is sent exactly. The
    others are quantised with a random integer h that the receiver draws as well, and the value of a digit depends on h:
    E q(z) = z for every z, and the error of a normal z is 1.49, 0.219, 0.0432 and 0.0097 for 1 to 4 bits. So the
    estimate is unbiased for every block, while :class:`EDEN`, whose error is smaller, is unbiased over rotations only.

    All workers share the rotation of a round, so that a receiver adds up their coordinates and rotates back once; each
    worker has its own h. With N workers whose gradients have equal norms the relative squared error is divided by N.

    A block has room for b / 256 exact coordinates. If more are above T, which happens in some blocks that are not
    normal, all its coordinates are divided by a common number until they fit. The error is then larger, and the
    estimate stays unbiased.

    Args:
        bits: Bits of a coordinate, 1 to 4.
        block_size: Elements b that are rotated together, a power of two from 256 to 32768.

    Raises:
        HyperparameterError: a field is out of range.

    Wire: a float32 scale a block, exact coordinates with their places, then packed digits (``docs/wire-format.md``).
    Signs are drawn from the shared stream, everything else from the rank's.

    Reference: R. Ben Basat et al., "Accelerating Federated Learning with Quick Distributed Mean Estimation", ICML 2024,
    sections 3 and 4. The tables differ from the authors': see :mod:`gradwire.methods.rotations.bounded_levels`.

    Example:
        >>> import torch, gradwire as gw
        >>> g = torch.randn(1, 65536, generator=torch.Generator().manual_seed(0)).exp()
        >>> error = gw.simulate(g, gw.QUICFL(bits=2)).mean - g[0]
        >>> round(float(error.square().sum() / g.square().sum()), 2)
        0.22
    """

    bits: int = 4
    block_size: int = 4096

    name: ClassVar[str] = "quic_fl"
    tag: ClassVar[int] = 35
    properties: ClassVar[Properties] = Properties(
        summary="Rotated blocks quantised without bias within a bound, and exactly beyond it",
        paper="Ben Basat et al., QUIC-FL, ICML 2024",
        bit_stable=True,
        bits_per_element=2 * (4 + 48 / 256 + 32 / 4096),
        stream="shared, rank",
    )

    def __post_init__(self) -> None:
        fits = is_whole(self.bits, 1, MOST_BITS)
        require(fits, "QUICFL", f"bits is 1 to {MOST_BITS} a coordinate, not {self.bits!r}")
        check_rotation("QUICFL", self.block_size)

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            collectives=("all_gather",),
            # Blocks are not cut, and each cut is at the start of a group of the kernels.
            cut=math.lcm(self.block_size, 80),
            kernels=("moments", "rotation", "selection", "levels"),
            unbiased=True,
        )

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> BoundedSupportCodec:
        above, count = np.array(POINTS[self.bits]), SHARED_VALUES[self.bits]
        points = np.concatenate([-above[::-1], [0.0], above])
        # Row h: differences that the points jH - h add to the value before, for each digit j above 0.
        added = count * np.stack([np.diff(points)[count - h - 1 :: count][: 2**self.bits - 1] for h in range(count)])
        values = np.cumsum(np.concatenate([np.array(FIRST[self.bits])[:, None], added], 1), 1)
        return BoundedSupportCodec(
            kernels,
            segments,
            world_size,
            seed,
            points=points.tolist(),
            values=values,
            block_size=self.block_size,
        )
