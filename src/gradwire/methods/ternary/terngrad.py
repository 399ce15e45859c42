"""TernGrad: three levels, one scaler a parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gradwire.exchange.codecs import check_workers
from gradwire.exchange.compressor import Compressor
from gradwire.exchange.method import Properties, require
from gradwire.exchange.segments import Segment
from gradwire.kernels import SegmentTable
from gradwire.methods.levels.worst_case import even_constant
from gradwire.methods.ternary.ternary_codec import TernaryCodec
from gradwire.seeds import parameter_key

if TYPE_CHECKING:
    from gradwire.kernels import Kernels

__all__ = ["TernGrad"]


@dataclass(frozen=True, kw_only=True)
class TernGrad(Compressor):
    r"""Ternary gradients with layer-wise scalers, clipping and scaler sharing.

    For a worker's gradient g of one parameter of d elements (weight and bias are two parameters), with
    sigma = sqrt(sum_k g_k^2 / d), its root mean square::

        f(g)_k = g_k if |g_k| <= clip * sigma else sign(g_k) * clip * sigma
        s_i    = max_k |f(g)_k|                 s = max_i s_i where the scaler is shared, else s_i
        b_k    ~ Bernoulli(|f(g)_k| / s)        g~_k = s * sign(g_k) * b_k
        mean   = (s / N) * sum_i trits_i        (shared: an exact integer sum, 2N+1 levels on the way back)

    Sharing makes the sum exact and both directions narrow, so traffic does not grow with N; a worker whose own scaler
    is smaller pays (s - s_i) |g_i|_1 of variance for it. Without sharing each worker's scaler travels with its trits
    and all workers gather all payloads, so that traffic grows with N while the variance is the worker's own.

    The paper takes sigma as the standard deviation, about the mean, although the clip acts about zero. For a gradient
    with mean zero both are the same. A gradient with mean m and a small deviation, as biases, gains of normalisation
    layers and embeddings of rare tokens often have, is clipped far below m by the paper's rule and nearly lost:
    1 + 0.01 n with n ~ N(0, 1) comes back as 0.025. About zero, ``clip >= 1`` keeps every such gradient.
    ``clip_by="std"`` restores the paper's rule.

    Args:
        clip: Clipping threshold c in units of sigma, above 0; None turns clipping off.
        clip_by: What sigma is: ``"rms"``, the root mean square, or ``"std"``, the standard deviation (population, mean
            removed), as in the paper. A vector whose sigma is zero is not clipped.
        share_scaler: Whether all workers use the largest scaler.

    Raises:
        HyperparameterError: ``clip`` is not a positive number or None, or ``clip_by`` is not one of the two words.
        IncompatibleError: when attached to more than 32767 workers.

    Guarantees: unbiased for f(g), variance exactly s |f(g)|_1 - |f(g)|_2^2 for each worker; a vector with entries in
    {-s, 0, s} that the clip leaves alone comes back exactly; the same bits for every layout, world order, backend and
    driver. Draws from the rank's stream.

    Wire: five trits a byte, sixteen bytes for 80 elements; the sum in base 2N+1, packed (``docs/wire-format.md``).

    Reference: W. Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning",
    NeurIPS 2017, algorithm 1, equations 3, 4 and 8. Where paper and code differ, see ``docs/methods/ternary.md``: the
    clip is explicit, at each worker's own threshold, and the scaler is the maximum of the clipped vector, both as in
    the paper. To keep the last layer in float use ``attach(..., exclude=...)``, for small tensors ``min_numel``.

    Example:
        >>> import torch, gradwire as gw
        >>> g = torch.tensor([[0.0, 3.0, -3.0, 3.0], [3.0, 3.0, -3.0, 0.0]])
        >>> gw.simulate(g, gw.TernGrad(clip=None)).mean
        tensor([ 1.5000,  3.0000, -3.0000,  1.5000])
    """

    clip: float | None = 2.5
    clip_by: str = "rms"
    share_scaler: bool = True

    name: ClassVar[str] = "terngrad"
    on_device: ClassVar[bool] = True
    tag: ClassVar[int] = 1
    kernels: ClassVar[tuple[str, ...]] = ("moments", "ternary")
    properties: ClassVar[Properties] = Properties(
        summary="Ternary gradients, one scaler a parameter, exact integer sums",
        paper="Wen et al., TernGrad, NeurIPS 2017",
        bit_stable=True,
        bits_per_element=2.4,
        stream="rank",
    )

    def __post_init__(self) -> None:
        if self.clip is not None:
            number = isinstance(self.clip, int | float) and not isinstance(self.clip, bool)
            require(
                number and math.isfinite(self.clip) and self.clip > 0,
                "TernGrad",
                f"clip is a positive number in units of clip_by, or None for no clipping, not {self.clip!r}",
            )
            # A plain float, so that the repr is a spec and 2 is 2.0 on every rank.
            object.__setattr__(self, "clip", float(self.clip))
        require(
            self.clip_by in ("rms", "std"),
            "TernGrad",
            f"clip_by is 'rms' (root mean square) or 'std' (standard deviation), not {self.clip_by!r}",
        )
        require(
            isinstance(self.share_scaler, bool),
            "TernGrad",
            f"share_scaler is True or False, not {self.share_scaler!r}",
        )

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        """Whether nothing is clipped."""
        return self.clip is None

    @property
    def unbiased_note(self) -> str | None:  # type: ignore[override]
        """That the outcome is unbiased for the clipped gradient, where something is clipped."""
        return None if self.unbiased else "for the clipped gradient"

    @property
    def omega_formula(self) -> str | None:  # type: ignore[override]
        """The bound without clipping and sharing; a shared scaler may be any number of times a worker's own."""
        return None if self.share_scaler or not self.unbiased else "(sqrt(d) - 1) / 2"

    def omega_of(self, numel: int | None = None) -> float | None:
        own = self.unbiased and not self.share_scaler
        return even_constant(1, max(1, numel), "max") if own and numel is not None else None

    @property
    def collectives(self) -> tuple[str, ...]:  # type: ignore[override]
        """The protocols: trits with different scalers have no integer sum, so only a gather can carry them."""
        return ("two_shot", "all_gather") if self.share_scaler else ("all_gather",)

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> TernaryCodec:
        check_workers("TernGrad", world_size)
        table = SegmentTable(
            offset=[s.offset for s in segments],
            numel=[s.numel for s in segments],
            start=[s.start for s in segments],
            key=[parameter_key(seed, s.parameter.name, "ternary") for s in segments],
        )
        return TernaryCodec(kernels, table, world_size, clip=self.clip, clip_by=self.clip_by, shared=self.share_scaler)
