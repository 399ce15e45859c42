"""Threshold: all elements from a magnitude on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from gradwire.exchange.method import Method, Properties, require
from gradwire.methods.casts.cast import FP32
from gradwire.methods.sparse.sparse import Sparse
from gradwire.methods.sparse.sparse_codec import AboveRule

__all__ = ["Threshold"]


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
    unbiased: ClassVar[bool] = False
    gauges: ClassVar[tuple[str, ...]] = ("density",)
    needs_loss_scale: ClassVar[bool] = True
    properties: ClassVar[Properties] = Properties(
        summary="All elements from a magnitude on, with their positions",
        paper="Sahu et al., NeurIPS 2021",
        bit_stable=True,
        bits_per_element=2 * 32.0,
    )

    def __post_init__(self) -> None:
        value = self.threshold
        known = isinstance(value, int | float) and not isinstance(value, bool)
        require(known and 0 < value < float("inf"), "Threshold", f"threshold is a magnitude above 0, not {value!r}")
        object.__setattr__(self, "threshold", float(value))
        self.check_sparse()

    @property
    def worst_error(self) -> float | None:  # type: ignore[override]
        """The threshold, where values travel as they are."""
        return self.threshold if isinstance(self.values, FP32) else None

    def rule(self) -> AboveRule:
        return AboveRule(self.threshold)
