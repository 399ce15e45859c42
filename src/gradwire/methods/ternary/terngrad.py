"""TernGrad: gradients rounded to three levels, with a scaler for each parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from gradwire.errors import IncompatibleError
from gradwire.exchange.codecs import check_workers
from gradwire.exchange.compressor import Compressor
from gradwire.exchange.method import Properties, is_number, require
from gradwire.exchange.protocols.bucket_plan import BucketPlan, Operator, PlanSetting
from gradwire.exchange.segments import Segment
from gradwire.exchange.traits import Traits
from gradwire.kernels import SegmentTable
from gradwire.methods.levels.worst_case import even_constant
from gradwire.methods.ternary.ahead import SCALER, AheadCodec, AheadPlan
from gradwire.methods.ternary.ternary_codec import TernaryCodec
from gradwire.seeds import parameter_key

if TYPE_CHECKING:
    from gradwire.kernels import Kernels


@dataclass(frozen=True, kw_only=True)
class TernGrad(Compressor):
    r"""Ternary gradients with layer-wise scalers, clipping and scaler sharing.

    For a worker's gradient g of one parameter of d elements (weight and bias are two parameters), with
    sigma = sqrt(sum_k g_k^2 / d), its root mean square::

        f(g)_k = g_k if |g_k| <= clip * sigma else sign(g_k) * clip * sigma
        s_i    = max_k |f(g)_k|                 s = max_i s_i where the scaler is shared, else s_i
        b_k    ~ Bernoulli(|f(g)_k| / s)        g~_k = s * sign(g_k) * b_k
        mean   = (s / N) * sum_i trits_i        (shared: an exact integer sum, 2N+1 levels on the way back)

    With a shared scaler the sum is exact and both directions are narrow, so traffic does not grow with N, but a worker
    whose own scaler is smaller has (s - s_i) |g_i|_1 more variance. Without sharing, each worker sends its scaler with
    its trits and all workers gather all payloads, so that traffic grows with N while each worker has the variance of
    its own scaler.

    In the paper sigma is the standard deviation about the mean, although values are clipped about zero. For a gradient
    with mean zero both are the same. A gradient with mean m and a small deviation, which biases, gains of normalisation
    layers and embeddings of rare tokens often have, is clipped far below m by the paper's rule and nearly lost:
    1 + 0.01 n with n ~ N(0, 1) becomes 0.025. With the root mean square, ``clip >= 1`` keeps every such gradient.
    ``clip_by="std"`` restores the paper's rule.

    **Scalers of the round before.** Workers must know the shared scaler before they encode, so that a round waits for
    three one-way delays: scalers, trits, sums. With ``ahead=True`` round t uses the scaler of round t - 1,
    s = max_i s_i(t - 1), and each worker sends s_i(t) with its trits: two delays, which counts on links with delays of
    milliseconds. An element beyond s is clipped to s, so that a gradient that grows suddenly is shortened in one round,
    and the variance of one that shrinks is s |f(g)|_1 - |f(g)|_2^2 with the larger s. Scalers are exchanged first, as
    without ``ahead``, in the first round, after one in which a parameter's gradient was zero, and in no other. They are
    part of the link's state, the same on all ranks.

    Args:
        clip: Clipping threshold c in units of sigma, above 0; None turns clipping off.
        clip_by: Definition of sigma: ``"rms"``, the root mean square, or ``"std"``, the population standard deviation,
            as in the paper. A vector whose sigma is zero is not clipped.
        share_scaler: True if all workers use the largest scaler.
        ahead: True to use the shared scaler of the round before.

    Raises:
        HyperparameterError: ``clip`` is not a positive number or None, or ``clip_by`` is neither "rms" nor "std", or
            ``ahead`` is True without a shared scaler.
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
    ahead: bool = False

    name: ClassVar[str] = "terngrad"
    tag: ClassVar[int] = 1
    properties: ClassVar[Properties] = Properties(
        summary="Ternary gradients, one scaler a parameter, exact integer sums",
        paper="Wen et al., TernGrad, NeurIPS 2017",
        bit_stable=True,
        bits_per_element=2.4,
        stream="rank",
    )

    def __post_init__(self) -> None:
        if self.clip is not None:
            require(
                is_number(self.clip, above=0),
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
        require(isinstance(self.ahead, bool), "TernGrad", f"ahead is True or False, not {self.ahead!r}")
        require(
            self.share_scaler or not self.ahead,
            "TernGrad",
            "ahead=True uses the shared scaler of the round before, and share_scaler=False has none",
        )

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            # Trits with different scalers have no integer sum, so they can only be gathered.
            collectives=("two_shot", "all_gather") if self.share_scaler else ("all_gather",),
            kernels=("moments", "ternary"),
            # Whether a scaler of the round before is zero is read in main memory.
            on_device=not self.ahead,
            remembers=(SCALER,) if self.ahead else (),
            shares_scales=self.share_scaler,
            needs_loss_scale=self.ahead,
            unbiased=self.clip is None and not self.ahead,
            # With clipping the outcome is unbiased for the clipped gradient.
            unbiased_note=None if self.clip is None and not self.ahead else "for the clipped gradient",
            # A bound exists only without clipping and sharing: a shared scaler may be any number of times a worker's
            # own.
            omega_formula=None if self.share_scaler or self.clip is not None else "(sqrt(d) - 1) / 2",
        )

    def omega_of(self, numel: int | None = None) -> float | None:
        own = self.traits.unbiased and not self.share_scaler
        return even_constant(1, max(1, numel), "max") if own and numel is not None else None

    def check_between_two(self, owner: str) -> None:
        super().check_between_two(owner)
        if self.share_scaler:
            raise IncompatibleError(
                f"{owner}: {self!r} has a scaler that all workers share, which one sender and one receiver cannot "
                "know: give it share_scaler=False"
            )

    @property
    def as_operator(self) -> Operator | None:
        return None if self.ahead else self

    def plan(self, setting: PlanSetting) -> BucketPlan:
        return AheadPlan(self, setting) if self.ahead else super().plan(setting)

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> TernaryCodec:
        check_workers("TernGrad", world_size)
        table = SegmentTable(
            offset=[s.offset for s in segments],
            numel=[s.numel for s in segments],
            start=[s.start for s in segments],
            key=[parameter_key(seed, s.parameter.name, "ternary") for s in segments],
        )
        if self.ahead:
            return AheadCodec(kernels, table, world_size, clip=self.clip, clip_by=self.clip_by)
        return TernaryCodec(kernels, table, world_size, clip=self.clip, clip_by=self.clip_by, shared=self.share_scaler)
