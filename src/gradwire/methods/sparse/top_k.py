"""Top-k and hard threshold: the elements of the largest magnitude."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from gradwire.exchange.method import Method, Properties, cast_of, is_number, is_whole, require
from gradwire.exchange.traits import Traits
from gradwire.methods.casts.cast import FP32
from gradwire.methods.feedback.waiting import share_of_largest
from gradwire.methods.sparse.sparse import Sparse
from gradwire.methods.sparse.sparse_codec import AboveRule, LargestRule


def check_density(owner: str, density: float) -> float:
    """Return a density as a float, after checking it.

    Raises:
        HyperparameterError: it is not a number above 0 and at most 1.
    """
    require(
        is_number(density, above=0, most=1), owner, f"density is a share of the elements, above 0 to 1, not {density!r}"
    )
    return float(density)


@dataclass(frozen=True, kw_only=True)
class TopK(Sparse):
    r"""Top-k: the elements of the largest magnitude; the others become zero.

    For a parameter with d elements, k = max(1, floor(density d)) are kept::

        C(x)_i = x_i  where |x_i| is among the k largest,  0 elsewhere       |C(x) - x|^2 <= (1 - k/d) |x|^2

    The selection is exact; among equal magnitudes, the first elements are kept. A worker sends positions and values,
    and receives those of every other worker, so traffic grows with the number of workers. The operator is biased and
    does not converge without error feedback: use ``ErrorFeedback(compressor=TopK(density=0.01))``.

    Args:
        density: Share k/d of units that are kept, above 0 to 1.
        block_size: Number of units of a block, of which each keeps its k largest (SparseLoCo: 64 of 4096); None: one
            block a parameter.
        unit: Unit that is kept or left out, by its Euclidean norm: "element", "row" (one index of a parameter's first
            dimension) or "kernel" (one index of each of its first two, if there are three or more).
        blocks: "parameter"; or "model", the largest elements of all parameters together, which needs the whole
            gradient and ``unit="element"``.
        values: Encoding of values: ``FP32()``, ``BF16()``, or an operator with levels, which is applied to the vector
            of a parameter's kept values.

    Raises:
        HyperparameterError: a field is out of range.
        IncompatibleError: when attached, if the elements of a unit are not adjacent in memory.

    Wire: positions as the shortest of a bitmap, Golomb-Rice codes of gaps and gaps of one width, then the values
    (``docs/wire-format.md``). The length depends on the data. A random position takes about log2(d / k) + 1.5 bits.

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
        """Return the share kept of the worst block, times the share kept by the encoding of values.

        If units are not single elements or ``numel`` is None, the number of units is not known. The bound is then half
        of the density, since floor(y) / y > 1/2 for y = density d of at least 1, and a single unit is kept.
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

    def typical_delta_of(self, numel: int | None = None) -> float | None:
        """Return the share in the largest elements, or the share of the units, which differ less from each other."""
        values = self.values.typical_delta_of()
        share = self.density if numel is None else max(self.density, 1 / numel)
        return None if values is None else values * (share_of_largest(share) if self.unit == "element" else share)


@dataclass(frozen=True, kw_only=True)
class Threshold(Sparse):
    r"""Hard threshold: the elements whose magnitude is at least a threshold; the others become zero.

    ::

        C(x)_i = x_i  where |x_i| >= threshold,  0 elsewhere       |C(x) - x|_inf < threshold

    The error is bounded by the threshold, not by the vector, so this is not a contraction for small vectors. Under
    error feedback no element's residual reaches the threshold. Payloads are long while gradients are large, and empty
    when they are small.

    Args:
        threshold: Smallest magnitude, or Euclidean norm of a unit, that is kept, in the gradient's unit.
        unit: "element", "row" or "kernel", as for :class:`TopK`.
        blocks: "parameter"; or "model", all parameters as one vector, which matters only for ``values``.
        values: Encoding of values, as for :class:`TopK`.

    Raises:
        HyperparameterError: a field is out of range.
        IncompatibleError: when attached, if the elements of a unit are not adjacent in memory.

    Gauges: ``density``, the share of the elements that this rank kept.

    Wire: as :class:`TopK`. Buffers have room for the longest payload, one bit and one value an element.

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
            # The threshold, if values are sent in float32.
            worst_error=self.threshold if cast_of(self.values) == torch.float32 else None,
        )

    def rule(self) -> AboveRule:
        return AboveRule(self.threshold)
