"""TernGrad: gradients rounded to three levels, with a scaler for each parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.codecs import check_workers
from gradwire.exchange.codecs.base import Constant, Draw, SummableCodec, Summary, usable
from gradwire.exchange.compressor import Compressor
from gradwire.exchange.deferred_checks import Flag, all_finite
from gradwire.exchange.method import Properties, is_number, require
from gradwire.exchange.segments import Segment
from gradwire.exchange.traits import Traits
from gradwire.exchange.wire import ALIGNMENT, padded
from gradwire.kernels import Coder, DigitLayout, SegmentTable, byte_layout, digit_layout, inverse_scale
from gradwire.methods.levels.worst_case import even_constant
from gradwire.seeds import parameter_key

if TYPE_CHECKING:
    from gradwire.kernels import Kernels


@dataclass(frozen=True)
class TernarySummary:
    """Scalers s and clipping thresholds of the segments, float32 ``[segments]`` each."""

    shared: torch.Tensor | None
    scale: torch.Tensor
    limit: torch.Tensor

    def select(self, index: Constant, shared: torch.Tensor | None) -> TernarySummary:
        scale = self.scale if shared is None else shared
        here = index.on(scale.device)
        return TernarySummary(self.shared, scale[here], self.limit[here])


class TernaryCodec(SummableCodec):
    """Codec of trits, with one scaler a segment; a unit is a group of 80 elements in sixteen bytes.

    Without shared scalers a payload consists of the float32 scalers, padded to sixteen bytes, and all trits, and only
    :meth:`decode_rows` decodes it.

    Args:
        clip: Clipping threshold in units of ``clip_by``, or None for no clipping.
        clip_by: "rms" or "std".
        shared: True if all workers use the largest scaler.
    """

    def __init__(
        self, kernels: Kernels, table: SegmentTable, world_size: int, *, clip: float | None, clip_by: str, shared: bool
    ) -> None:
        self.kernels, self.table, self.world_size = kernels, table, world_size
        self.clip, self.clip_by, self.shared = clip, clip_by, shared
        # Float64, so that a vector of equal entries has them as its root mean square once rounded to float32.
        self._root_numel = Constant(torch.from_numpy(table.numel.copy()).to(torch.float64).clamp(min=1).sqrt())
        self._first = Constant(table.offset[table.numel > 0])
        self.units = table.groups
        self._lay_out(digit_layout(2 * world_size + 1))
        self.side_bytes = 0 if self.shared else padded(4 * len(table.numel))

    def _lay_out(self, sums: DigitLayout) -> None:
        self.sums = sums
        self.grain = sums.digits // math.gcd(5, sums.digits)

    def use_coder(self, coder: Coder) -> None:
        self.coder = coder
        if self.shared:
            if self.world_size > 127:
                raise IncompatibleError(
                    f"sums over {self.world_size} workers do not fit the bytes that a coder takes: use at most 127 "
                    "workers, share_scaler=False, or no coder"
                )
            self._lay_out(byte_layout(2 * self.world_size + 1))

    def plain_payload_bytes(self, units: int) -> int:
        return self.side_bytes

    def plain_mean_bytes(self, units: int) -> int:
        return 0

    def summarise(self, flat: torch.Tensor) -> TernarySummary:
        moments = self.kernels.moments(flat, self.table)
        scale = moments.max_abs
        limit = torch.full_like(scale, math.inf)
        if self.clip is not None:
            sigma = moments.std if self.clip_by == "std" else moments.norm / self._root_numel.on(flat.device)
            limit = (sigma * self.clip).to(torch.float32)
            # A vector of equal entries has no deviation, and squares of subnormal numbers may be lost: clipping either
            # to zero would lose its gradient for good.
            limit = torch.where(limit > 0, limit, math.inf)
            scale = torch.where(torch.isfinite(scale), torch.minimum(scale, limit), scale)
        scale = usable(scale)
        return TernarySummary(scale if self.shared else None, scale, limit)

    def payload_bytes(self, units: int) -> int:
        return self.side_bytes + ALIGNMENT * units

    def mean_bytes(self, units: int) -> int:
        return self.sums.packed_bytes(80 * units)

    def encode(self, flat: torch.Tensor, summary: Summary, draw: Draw, out: torch.Tensor) -> None:
        ours = _ternary(summary)
        if self.side_bytes:
            out[: 4 * len(ours.scale)].view(torch.float32).copy_(ours.scale)
        inverse = inverse_scale(ours.scale)
        body = out[self.side_bytes : self.side_bytes + ALIGNMENT * self.units]
        self.kernels.ternary_encode(flat, self.table, ours.limit, inverse, draw.round, draw.stream, 0, self.units, body)

    def reduce(self, rows: torch.Tensor, begin: int, out: torch.Tensor) -> None:
        self.kernels.ternary_sum(rows, out, self.sums)

    def decode_mean(self, data: torch.Tensor, summary: Summary, begin: int, end: int, flat: torch.Tensor) -> None:
        scale = _ternary(summary).scale * torch.tensor(1.0 / self.world_size, dtype=torch.float32)
        words = data[: self.mean_bytes(end - begin)]
        self.kernels.decode(words, self.world_size, self.table, scale, begin, end, flat, layout=self.sums)

    def decode_rows(self, rows: torch.Tensor, summary: Summary, flat: torch.Tensor) -> None:
        if self.shared:
            total = torch.empty(self.mean_bytes(self.units), dtype=torch.uint8, device=rows.device)
            self.kernels.ternary_sum(rows, total, self.sums)
            self.decode_mean(total, summary, 0, self.units, flat)
            return
        weight = torch.tensor(1.0 / self.world_size, dtype=torch.float32)
        for sender, row in enumerate(rows):
            scale = row[: 4 * len(self.table.numel)].view(torch.float32) * weight
            self._decode_one(row[self.side_bytes :], scale, flat, accumulate=sender > 0)

    def add_own(self, data: torch.Tensor, summary: Summary, weight: float, flat: torch.Tensor) -> None:
        scale = _ternary(summary).scale * torch.tensor(weight, dtype=torch.float32)
        self._decode_one(data[self.side_bytes :], scale, flat, accumulate=True)

    def is_finite(self, summary: Summary, flat: torch.Tensor) -> Flag:
        if self.shared:
            return all_finite(_ternary(summary).scale)
        return all_finite(flat[self._first.on(flat.device)])

    def _decode_one(self, trits: torch.Tensor, scale: torch.Tensor, flat: torch.Tensor, accumulate: bool) -> None:
        body = trits[: ALIGNMENT * self.units]
        self.kernels.decode(body, 1, self.table, scale, 0, self.units, flat, accumulate)


def _ternary(summary: Summary) -> TernarySummary:
    if not isinstance(summary, TernarySummary):
        raise TypeError(f"a ternary codec cannot use a {type(summary).__name__}")
    return summary


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

    Args:
        clip: Clipping threshold c in units of sigma, above 0; None turns clipping off.
        clip_by: Definition of sigma: ``"rms"``, the root mean square, or ``"std"``, the population standard deviation,
            as in the paper. A vector whose sigma is zero is not clipped.
        share_scaler: True if all workers use the largest scaler.

    Raises:
        HyperparameterError: ``clip`` is not a positive number or None, or ``clip_by`` is neither "rms" nor "std".
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

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            # Trits with different scalers have no integer sum, so they can only be gathered.
            collectives=("two_shot", "all_gather") if self.share_scaler else ("all_gather",),
            kernels=("moments", "ternary"),
            on_device=True,
            unbiased=self.clip is None,
            # With clipping the outcome is unbiased for the clipped gradient.
            unbiased_note=None if (self.clip is None) else "for the clipped gradient",
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

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> TernaryCodec:
        check_workers("TernGrad", world_size)
        table = SegmentTable(
            offset=[s.offset for s in segments],
            numel=[s.numel for s in segments],
            start=[s.start for s in segments],
            key=[parameter_key(seed, s.parameter.name, "ternary") for s in segments],
        )
        return TernaryCodec(kernels, table, world_size, clip=self.clip, clip_by=self.clip_by, shared=self.share_scaler)
