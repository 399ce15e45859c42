"""SparseLoCo: local steps whose changes are sent as the largest elements, rounded to the means of bins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch

from gradwire.exchange.compressor import Compressor
from gradwire.exchange.method import Properties, is_number, is_whole, require
from gradwire.exchange.traits import Traits
from gradwire.methods.feedback.error_feedback import ErrorFeedback
from gradwire.methods.local_steps.local_sgd import LocalStepsMethod
from gradwire.methods.sparse.sparse_codec import LargestRule, SparseCodec
from gradwire.methods.sparse.sparse_values import BinnedValues, UnitTable
from gradwire.methods.sparse.top_k import check_density

if TYPE_CHECKING:
    from gradwire.exchange.segments import Segment
    from gradwire.kernels import Kernels


WIDTH = 6.0
"""Width of all bins together, in standard deviations."""


@dataclass(frozen=True, kw_only=True)
class BinnedTopK(Compressor):
    """Operator of the largest elements of each block, in 2^bits bins about their mean, each sent as its bin's mean.

    It is used only by :class:`gradwire.SparseLoCo`. Rounding to means of bins does not change the sum of a parameter's
    values.

    Args:
        density: Share of the elements that is kept, at least one element of each block.
        block_size: Number of elements of a block.
        bits: Bits of a value.
    """

    density: float = 1 / 64
    block_size: int = 4096
    bits: int = 2

    name: ClassVar[str] = "sparse_loco"
    tag: ClassVar[int] = 45
    properties: ClassVar[Properties] = Properties(
        summary="The largest elements of each block, rounded to the means of a few bins",
        paper="SparseLoCo, 2025",
        bit_stable=True,
        bits_per_element=2 / 64 * (2 + 7.4),
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "density", check_density("SparseLoCo", self.density))
        size, bits = self.block_size, self.bits
        require(is_whole(size, 1), "SparseLoCo", f"block_size is a number of elements above 0, not {size!r}")
        # With one bit nearly all values of both signs would share a bin, whose mean is about 0.
        require(is_whole(bits, 2, 8), "SparseLoCo", f"bits is a number from 2 to 8, not {bits!r}")

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            collectives=("all_gather",),
            cut=1 << 40,
            kernels=("selection", "indices"),
            unbiased=False,
        )

    def delta_of(self, numel: int | None = None) -> float | None:
        """Return the share kept of the worst vector: one element of N, and of the kept values 7 / 16 / N.

        Values within 3/4 of a standard deviation of the mean have at most 9/16 of the sum of squares about it. All
        other bins have values on one side of the mean, of which the bin's mean keeps at least 1 / N.
        """
        if numel is None:
            # For an unknown length the only bound is that the error is not longer than the vector.
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


@dataclass(frozen=True, kw_only=True)
class SparseLoCo(LocalStepsMethod):
    r"""SparseLoCo: local steps, where each worker sends the largest elements of its change in two bits.

    With x the global parameters, x_i worker i's after ``every`` optimizer steps from x, and m_i its residual::

        m_i <- decay m_i + (x - x_i)        s_i = Q(TopK(m_i))        m_i <- m_i - s_i
        x <- x - outer_lr (1 / N) sum_i s_i        x_i <- x

    The decayed residual m_i replaces an outer momentum. TopK keeps ``density`` of each block of ``block_size`` adjacent
    elements of a parameter. Q divides the kept values of a parameter into 2^bits bins, together six standard deviations
    wide, with open outer bins, and sends each value as the mean of its bin.

    Values of m_i are sent with the changes of the rounds in between, so rounds that go most of the way to a minimum
    overshoot.

    Args:
        every: Optimizer steps from one exchange to the next.
        density: Share of the elements that is sent, above 0 to 1; at least one element of each block.
        block_size: Number of elements of a block.
        bits: Bits of a value, 2 to 8.
        decay: Share of the residual that is kept, above 0 and below 1.
        outer_lr: Learning rate of the outer step, above 0.

    Raises:
        HyperparameterError: a field is out of range.

    Wire: sparse sections, whose values are the bins' means and numbers (``docs/wire-format.md``), by a gather, whose
    traffic grows with the number of workers. About 0.15 bits an element and worker.

    Memory: the global parameters and the residual, 8 bytes an element.

    Reference: SparseLoCo, 2025 (arXiv:2508.15706). Bins are as in the authors' program (tplr-ai/templar,
    ``src/tplr/compress.py``), with four of them. Positions are coded as for :class:`TopK`, where the program takes 12
    bits for each. Blocks are adjacent in memory, where the program cuts matrices into squares, and may keep an odd
    number.

    Example:
        >>> import gradwire as gw
        >>> gw.SparseLoCo(every=30).inner.decay
        0.95
    """

    every: int = 30
    density: float = 1 / 64
    block_size: int = 4096
    bits: int = 2
    decay: float = 0.95
    outer_lr: float = 1.0

    name: ClassVar[str] = "sparse_loco"
    properties: ClassVar[Properties] = Properties(
        summary="Workers step by themselves and send few elements of what they changed, in two bits",
        paper="SparseLoCo, 2025",
        bit_stable=True,
        bits_per_element=2 / 64 * (2 + 7.4),
        state="the global parameters, a residual per parameter and rank",
        state_bytes_per_element=8.0,
    )

    def __post_init__(self) -> None:
        decay = self.decay
        require(
            is_number(decay, above=0, below=1),
            "SparseLoCo",
            f"decay is above 0 and below 1, not {decay!r}: of a residual that is kept whole no bound is known",
        )
        self.check_inner()
        rate = self.outer_lr
        require(is_number(rate, above=0), "SparseLoCo", f"outer_lr is above 0, not {rate!r}")
        object.__setattr__(self, "outer_lr", float(rate))
        for name in ("density", "decay"):
            object.__setattr__(self, name, float(getattr(self, name)))

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            unbiased=False,
            unbiased_note="no; what decays is lost",
        )

    @cached_property
    def inner(self) -> ErrorFeedback:  # type: ignore[override]
        """Error feedback around :class:`BinnedTopK`."""
        operator = BinnedTopK(density=self.density, block_size=self.block_size, bits=self.bits)
        return ErrorFeedback(compressor=operator, decay=self.decay)

    def step_(
        self, own: torch.Tensor, held: torch.Tensor, mean: torch.Tensor, velocity: torch.Tensor | None, workers: int
    ) -> None:
        held.sub_(held - mean, alpha=self.outer_lr)
        own.copy_(held)
