"""The operator of SparseLoCo: the largest elements, rounded to the means of a few bins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gradwire.exchange.compressor import Compressor
from gradwire.exchange.method import Properties, is_whole, require
from gradwire.methods.sparse.sparse_codec import LargestRule, SparseCodec
from gradwire.methods.sparse.sparse_values import BinnedValues
from gradwire.methods.sparse.top_k import check_density
from gradwire.methods.sparse.units import UnitTable

if TYPE_CHECKING:
    from gradwire.exchange.segments import Segment
    from gradwire.kernels import Kernels

__all__ = ["BinnedTopK"]

WIDTH = 6.0
"""Standard deviations that all bins cover together."""


@dataclass(frozen=True, kw_only=True)
class BinnedTopK(Compressor):
    """The largest elements of each block, in 2^bits bins about their mean, each sent as the mean of its bin.

    See :class:`gradwire.SparseLoCo`, which alone uses it. Rounding to means of bins takes nothing from the sum of a
    parameter's values.

    Args:
        density: Share of the elements that is kept, at least one of each block.
        block_size: Elements of a block.
        bits: Of a value.
    """

    density: float = 1 / 64
    block_size: int = 4096
    bits: int = 2

    name: ClassVar[str] = "sparse_loco"
    tag: ClassVar[int] = 45
    collectives: ClassVar[tuple[str, ...]] = ("all_gather",)
    cut: ClassVar[int] = 1 << 40
    kernels: ClassVar[tuple[str, ...]] = ("selection", "indices")
    unbiased: ClassVar[bool] = False
    properties: ClassVar[Properties] = Properties(
        summary="The largest elements of each block, rounded to the means of a few bins",
        paper="SparseLoCo, 2025",
        bit_stable=True,
        bits_per_element=2 / 64 * (2 + 7.4),
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "density", check_density("SparseLoCo", self.density))
        size, bits = self.block_size, self.bits
        require(is_whole(size) and size > 0, "SparseLoCo", f"block_size is a number of elements above 0, not {size!r}")
        require(is_whole(bits) and 1 <= bits <= 8, "SparseLoCo", f"bits is a number from 1 to 8, not {bits!r}")

    def delta_of(self, numel: int | None = None) -> float | None:
        """Return what is kept of the worst vector: at least one element of N, and of the values kept 7 / 16 / N.

        Of values with the deviation s, those within 3/4 s of the mean have at most 9/16 of the square sum about it, and
        bins beside these hold values on one side of the mean, of which the bin's mean keeps 1 / N at least.
        """
        if numel is None:
            # The bound for all lengths: the error is never longer than the vector, and little more is known.
            return 0.0
        most = max(1, int(self.density * min(numel, self.block_size)))
        kept = most * -(-numel // self.block_size)
        return most / min(numel, self.block_size) * 7 / 16 / kept

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> SparseCodec:
        return SparseCodec(
            kernels,
            UnitTable(segments, [1] * len(segments)),
            world_size,
            rule=LargestRule(self.density),
            block=self.block_size,
            values=BinnedValues(self.bits, WIDTH),
        )
