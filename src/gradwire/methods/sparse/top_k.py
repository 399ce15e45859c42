"""TopK: the elements of the largest magnitude."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from gradwire.exchange.method import Method, Properties, cast_of, is_number, is_whole, require
from gradwire.exchange.traits import Traits
from gradwire.methods.casts.cast import FP32
from gradwire.methods.sparse.sparse import Sparse
from gradwire.methods.sparse.sparse_codec import AboveRule, LargestRule


def check_density(owner: str, density: float) -> float:
    """Return a density as a float.

    Raises:
        HyperparameterError: it is not above 0 and at most 1.
    """
    require(
        is_number(density, above=0, most=1), owner, f"density is a share of the elements, above 0 to 1, not {density!r}"
    )
    return float(density)


@dataclass(frozen=True, kw_only=True)
class TopK(Sparse):
    r"""Top-k: the elements of the largest magnitude, and zeros in place of the others.

    Of a parameter with d elements, k = max(1, floor(density d)) are kept::

        C(x)_i = x_i  where |x_i| is among the k largest,  0 elsewhere       |C(x) - x|^2 <= (1 - k/d) |x|^2

    Exact; of equal magnitudes, the first elements are kept. A worker sends positions and values, and receives those of
    every other worker, so that traffic grows with their number. By itself it is biased and does not converge:
    use ``ErrorFeedback(compressor=TopK(density=0.01))``.

    Args:
        density: Share k/d of the units that is kept, above 0 to 1.
        block_size: Units of a block, in each of which k is counted by itself (SparseLoCo keeps 64 of 4096); None: one
            block a parameter.
        unit: What is kept or left out as a whole, by its Euclidean norm: "element", "row" (one index of a parameter's
            first dimension) or "kernel" (one index of its first two, where there are three or more).
        blocks: "parameter", or "model": the largest elements of all parameters together. This needs the whole step.
        values: How values travel: ``FP32()``, ``BF16()``, or an operator with levels, for whose blocks the values kept
            of a parameter are a vector.

    Raises:
        HyperparameterError: a field is out of range.
        IncompatibleError: when attached: the elements of a unit are not neighbours in memory.

    Wire: positions in the shortest of a bitmap, Golomb-Rice codes of the gaps between them and gaps of one width, then
    the values (``docs/wire-format.md``). The length depends on the data. At random positions, a position takes about
    log2(d / k) + 1.5 bits.

    Reference: S. U. Stich, J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with Memory", NeurIPS 2018; units and blocks
    after N. Foroutan Eghlidi, M. Jaggi, "Sparse Communication for Training Deep Networks", 2020.

    Example:
        >>> import torch, gradwire as gw
        >>> gw.simulate(torch.tensor([[1.0, -4.0, 2.0, 0.5], [1.0, 0.0, 0.0, 0.0]]), gw.TopK(density=0.25)).mean
        tensor([ 0.5000, -2.0000,  0.0000,  0.0000])
    """

    density: float = 0.01
    block_size: int | None = None
    unit: str = "element"
    blocks: str = "parameter"
    values: Method = field(default_factory=FP32)

    name: ClassVar[str] = "topk"
    tag: ClassVar[int] = 32
    properties: ClassVar[Properties] = Properties(
        summary="The elements of the largest magnitude, exactly, with their positions",
        paper="Stich et al., Sparsified SGD with Memory, NeurIPS 2018",
        bit_stable=True,
        bits_per_element=2 * 0.01 * (32 + 8.14),
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "density", check_density("TopK", self.density))
        size = self.block_size
        require(
            size is None or is_whole(size, 1),
            "TopK",
            f"block_size is a number of units above 0, or None, not {size!r}",
        )
        self.check_sparse()

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            unbiased=False,
        )

    def rule(self) -> LargestRule:
        return LargestRule(self.density)

    def block(self) -> int | None:
        return self.block_size

    @property
    def delta_formula(self) -> str | None:
        return "k/d" if cast_of(self.values) == torch.float32 else "k/d times that of the values"

    def delta_of(self, numel: int | None = None) -> float | None:
        """Return the share kept of the worst block, times what the values keep.

        The number of units is not known here: where they are not single elements, as where ``numel`` is not given, the
        bound is floor(y) / y > 1/2 of the density for whatever y = density d, or all of a single unit.
        """
        size = self.block_size
        if numel is None or self.unit != "element" or self.blocks == "model":
            share, kept = self.density / 2 if self.density < 1 else 1.0, None
        else:
            lengths = [numel] if size is None or numel <= size else [size, *([numel % size] * (numel % size > 0))]
            share = min(max(1, int(self.density * n)) / n for n in lengths)
            kept = sum(max(1, int(self.density * n)) for n in lengths[:1])
        values = self.values.delta_of(kept if size is None else None)
        return None if values is None else share * values


@dataclass(frozen=True, kw_only=True)
class Threshold(Sparse):
    r"""Hard threshold: the elements whose magnitude is at least a threshold, and zeros in place of the others.

    ::

        C(x)_i = x_i  where |x_i| >= threshold,  0 elsewhere       |C(x) - x|_inf < threshold

    Its error is bounded by the threshold, not by the vector: no contraction of small vectors, but under error feedback
    no element's residual reaches the threshold, and what is sent is as long as there is to send: much while gradients
    are large, nothing when they are small.

    Args:
        threshold: Smallest magnitude that is kept, in the gradient's unit; of a unit its Euclidean norm.
        unit: "element", "row" or "kernel", as for :class:`TopK`.
        blocks: "parameter", or "model": all parameters are one vector; for a threshold that makes no difference but to
            ``values``.
        values: How values travel, as for :class:`TopK`.

    Raises:
        HyperparameterError: a field is out of range.
        IncompatibleError: when attached: the elements of a unit are not neighbours in memory.

    Gauges: ``density``, the share of the elements that this rank kept.

    Wire: as for :class:`TopK`. At most a bit and a value an element: that is the room set aside.

    Reference: A. Dutta et al., "On the Discrepancy between the Theoretical Analysis and Practical Implementations of
    Compressed Communication for Distributed Deep Learning", AAAI 2020; A. Sahu et al., "Rethinking gradient
    sparsification as total error minimization", NeurIPS 2021.

    Example:
        >>> import torch, gradwire as gw
        >>> gw.simulate(torch.tensor([[1.0, -4.0, 2.0, 0.5]]), gw.Threshold(threshold=2.0)).mean
        tensor([ 0., -4.,  2.,  0.])
    """

    threshold: float = 0.001
    unit: str = "element"
    blocks: str = "parameter"
    values: Method = field(default_factory=FP32)

    name: ClassVar[str] = "threshold"
    tag: ClassVar[int] = 33
    properties: ClassVar[Properties] = Properties(
        summary="All elements from a magnitude on, with their positions",
        paper="Sahu et al., NeurIPS 2021",
        bit_stable=True,
        bits_per_element=2 * 32.0,
    )

    def __post_init__(self) -> None:
        value = self.threshold
        require(is_number(value, above=0), "Threshold", f"threshold is a magnitude above 0, not {value!r}")
        object.__setattr__(self, "threshold", float(value))
        self.check_sparse()

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            needs_loss_scale=True,
            gauges=("density",),
            unbiased=False,
            # The threshold, where values travel as they are.
            worst_error=self.threshold if cast_of(self.values) == torch.float32 else None,
        )

    def rule(self) -> AboveRule:
        return AboveRule(self.threshold)
