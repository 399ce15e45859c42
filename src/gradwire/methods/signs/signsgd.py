"""SignSGD and Signum: signs, combined by majority vote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from gradwire.exchange.codecs.base import Constant, Draw, SummableCodec, Summary, check_workers
from gradwire.exchange.deferred_checks import Flag, all_finite
from gradwire.exchange.method import Method, Properties
from gradwire.exchange.protocols import Context, Outcome
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting, SectionPlan
from gradwire.exchange.segments import Segment, divide
from gradwire.exchange.traits import Traits
from gradwire.exchange.wire import padded
from gradwire.kernels import SIGN_BYTES, WHOLE, RunTable, SegmentTable
from gradwire.methods.feedback.local_momentum import checked_momentum
from gradwire.methods.signs.sign_codec import sign_table
from gradwire.methods.wrappers.wrapper import WrappedPlan

if TYPE_CHECKING:
    from gradwire.kernels import Kernels


_EIGHT = Constant(torch.arange(8, dtype=torch.uint8, device="cpu"))

_PIECE = 1 << 14


def zero_throughout(kernels: Kernels, flat: torch.Tensor, table: SegmentTable) -> torch.Tensor:
    """Return whether each segment is all zeros, bool ``[S]``.

    Stops reading at the first piece that is not.

    Example:
        >>> from gradwire.kernels import get_kernels
        >>> flat = torch.tensor([0.0, -0.0, 0.0, torch.nan])
        >>> zero_throughout(get_kernels("reference"), flat, SegmentTable([0, 2], [2, 2], [0, 0], [(0, 0)] * 2))
        tensor([ True, False])
    """
    if flat.device.type != "cpu":
        sums = kernels.sign_sums(flat, table)
        return (sums.above == 0) & (sums.below == 0)
    found = torch.zeros(len(table), dtype=torch.bool, device="cpu")
    if len(flat):
        # The first element is nearly always enough.
        first = flat[torch.from_numpy(table.offset.clip(max=len(flat) - 1))]
        for i in (first == 0).nonzero().flatten().tolist():
            begin = int(table.offset[i])
            parts = flat[begin : begin + int(table.numel[i])].split(_PIECE)
            found[i] = not any(bool(part.any()) for part in parts)
    return found


@dataclass(frozen=True, eq=False)
class MajorityVoteSummary:
    """Flags of each segment, bool ``[2, segments]``: it has a value that is not finite; it is all zeros."""

    flags: torch.Tensor
    shared: torch.Tensor | None = None

    def select(self, index: Constant, shared: torch.Tensor | None) -> MajorityVoteSummary:
        return replace(self, flags=self.flags[:, index.on(self.flags.device)])


class MajorityVoteCodec(SummableCodec):
    """Codec of signs and of their majority among the ranks that vote.

    A payload, like a reduced one, is two flag bits a segment, first all of one kind and then all of the other, padded
    to sixteen bytes, and then the bits of all groups of 80 elements, padded likewise. Flags describe the whole
    parameter, even if the segment is a part of it. The first is set if it has an infinity or a NaN, which signs cannot
    express. The second is set if it is all zeros, for example because the rank had no gradient: that rank does not vote
    on it. The outcome is -1 or 1; +inf in the whole of a parameter that any rank flags as not finite; 0 in one on which
    no rank votes.
    """

    grain = 8

    def __init__(self, kernels: Kernels, segments: Sequence[Segment], world_size: int) -> None:
        check_workers("a majority vote", world_size)
        self.kernels, self.table, self.world_size = kernels, sign_table(segments), world_size
        self.runs = RunTable(self.table, WHOLE)
        self.units = self.table.groups
        self.side_bytes = padded(-(-2 * len(self.table) // 8))
        self._owner = Constant(self.runs.owner)
        self._first = Constant(self.table.offset[self.table.numel > 0])
        self._segment_of: dict[tuple[int, int], Constant] = {}

    def summarise(self, flat: torch.Tensor) -> MajorityVoteSummary:
        if flat.is_meta:
            return MajorityVoteSummary(torch.zeros(2, len(self.table), dtype=torch.bool, device="cpu"))
        lost = self.kernels.finite(flat, self.table).logical_not()
        return MajorityVoteSummary(torch.stack([lost, zero_throughout(self.kernels, flat, self.table)]))

    def payload_bytes(self, units: int) -> int:
        return self.side_bytes + padded(SIGN_BYTES * units)

    def mean_bytes(self, units: int) -> int:
        return self.payload_bytes(units)

    def encode(self, flat: torch.Tensor, summary: Summary, draw: Draw, out: torch.Tensor) -> None:
        if not isinstance(summary, MajorityVoteSummary):
            raise TypeError(f"a codec of votes cannot use a {type(summary).__name__}")
        self._write_flags(summary.flags, out)
        self.kernels.sign_encode(flat, self.table, 0, self.units, self._bits(out, self.units))

    def reduce(self, rows: torch.Tensor, begin: int, out: torch.Tensor) -> None:
        flags = self._flags(rows)
        bits = self._stand_in(flags[:, 1], rows[:, self.side_bytes :], begin)
        self._write_flags(torch.stack([flags[:, 0].any(0), flags[:, 1].all(0)]), out)
        self.kernels.sign_vote(bits, out[self.side_bytes :])

    def decode_mean(self, data: torch.Tensor, summary: Summary, begin: int, end: int, flat: torch.Tensor) -> None:
        self._decode(data, 1.0, begin, end, flat, accumulate=False)

    def decode_rows(self, rows: torch.Tensor, summary: Summary, flat: torch.Tensor) -> None:
        total = torch.empty(rows.shape[1], dtype=torch.uint8, device=rows.device)
        self.reduce(rows, 0, total)
        self.decode_mean(total, summary, 0, self.units, flat)

    def add_own(self, data: torch.Tensor, summary: Summary, weight: float, flat: torch.Tensor) -> None:
        self._decode(data, weight, 0, self.units, flat, accumulate=True)

    def is_finite(self, summary: Summary, flat: torch.Tensor) -> Flag:
        return all_finite(flat[self._first.on(flat.device)])

    def _bits(self, data: torch.Tensor, units: int) -> torch.Tensor:
        return data[..., self.side_bytes : self.side_bytes + SIGN_BYTES * units]

    def _flags(self, data: torch.Tensor) -> torch.Tensor:
        """Read the flags of payloads ``[..., bytes]``, bool ``[..., 2, segments]``."""
        flags = (data[..., : self.side_bytes, None] >> _EIGHT.on(data.device) & 1).flatten(-2)
        return flags[..., : 2 * len(self.table)].bool().reshape(*data.shape[:-1], 2, len(self.table))

    def _write_flags(self, flags: torch.Tensor, out: torch.Tensor) -> None:
        bits = torch.zeros(8 * self.side_bytes, dtype=torch.uint8, device=out.device)
        bits[: flags.numel()] = flags.reshape(-1)
        out[: self.side_bytes] = (bits.reshape(-1, 8) << _EIGHT.on(out.device)).sum(1, dtype=torch.uint8)

    def _stand_in(self, silent: torch.Tensor, bits: torch.Tensor, begin: int) -> torch.Tensor:
        """Fill in the bits of ranks that do not vote, so that they do not change the majority of the others.

        Half of k such ranks vote +1 and half -1. With k odd, the remaining one votes +1 if the number of voters is
        even, whose ties are +1 anyway, and -1 if it is odd, when there are no ties: either way it decides nothing.

        Args:
            silent: bool ``[ranks, segments]``.
            bits: Bits from group ``begin`` on, one row a rank; not changed in place, since other code may read them.
        """
        if bits.device.type != "cpu":
            return self._stand_in_there(silent, bits, begin)
        if not bool(silent.any()):
            return bits
        bits = bits.clone()
        # Adjacent segments mostly agree: a rank that has run out of data has a gradient for none.
        patterns, counts = silent.unique_consecutive(dim=1, return_counts=True)
        ends = counts.cumsum(0)
        for pattern, end, count in zip(patterns.unbind(1), ends.tolist(), counts.tolist()):
            first, last = (SIGN_BYTES * (int(self.table.first_group[at]) - begin) for at in (end - count, end))
            ranks = pattern.nonzero().flatten().tolist()
            if not ranks or last <= 0 or first >= bits.shape[1]:
                continue
            above = (len(ranks) + ((len(bits) - len(ranks)) % 2 == 0)) // 2
            for k, rank in enumerate(ranks):
                bits[rank, max(first, 0) : last] = 255 if k < above else 0
        return bits

    def _stand_in_there(self, silent: torch.Tensor, bits: torch.Tensor, begin: int) -> torch.Tensor:
        """Do the same on a device, for every segment: checking which ones need it would synchronise with the device."""
        number = silent.cumsum(0)
        absent = number[-1]
        above = (absent + ((len(bits) - absent) % 2 == 0)) // 2
        votes = torch.where(number <= above, 255, 0).to(torch.uint8)
        key = (begin, bits.shape[1])
        if key not in self._segment_of:
            groups = begin + np.arange(bits.shape[1]) // SIGN_BYTES
            # The bits after the last group are padding, and are not used.
            found = np.searchsorted(self.table.first_group, groups, side="right") - 1
            self._segment_of[key] = Constant(found.clip(0, len(self.table) - 1))
        segment = self._segment_of[key].on(bits.device)
        return torch.where(silent[:, segment], votes[:, segment], bits)

    def _decode(
        self, data: torch.Tensor, weight: float, begin: int, end: int, flat: torch.Tensor, accumulate: bool
    ) -> None:
        lost, silent = self._flags(data)[:, self._owner.on(data.device)]
        # Multiplied, since selecting from constants would copy them to the device in every call.
        size = (~silent).to(torch.float32) * torch.tensor(weight, dtype=torch.float32, device="cpu")
        above, below = (torch.where(lost, torch.inf, side)[None] for side in (size, -size))
        bits = self._bits(data[None], end - begin)
        self.kernels.sign_decode(bits, self.runs, above, below, begin, end, flat, accumulate)


@dataclass(frozen=True, kw_only=True)
class SignSGD(Method):
    r"""signSGD with majority vote: one bit an element in each direction.

    With g_i worker i's gradient and sign(0) = +1::

        outcome = sign(sum_i sign(g_i))        a tie gives +1

    A worker whose gradient of a parameter is all zeros, because it did not use the parameter or its data has run out,
    does not vote on that parameter. If no worker votes the outcome is 0.

    The outcome is a *direction* with entries -1 and 1, or 0 where no worker votes, not the mean of the gradients: every
    element moves by the learning rate. Use ``torch.optim.SGD`` without momentum, with a learning rate of the order of
    1e-4 (where SGD has 0.1). Its ``weight_decay`` is added after the exchange, p <- p - lr (outcome + decay p), and so
    is decoupled. Clipping by norm would only scale the learning rate.

    Scaling a worker's gradient changes nothing. The vote resembles a median: if workers differ much it is not the sign
    of the mean, and signSGD may ascend where noise is skewed; :class:`EFSignSGD` does not. Fewer than half of the
    workers cannot overturn a vote in which the others agree.

    Parameters that are sent in float32 receive the mean, not a direction. So ``min_numel`` is 0 unless given, and
    parameters in ``exclude``, and all parameters in warm-up rounds, need their own learning rate. Under mixed precision
    pass ``grad_scaler=`` to ``attach``: the direction is then multiplied by the loss scale, by which the scaler
    divides.

    Raises:
        IncompatibleError: when attached to more than 32767 workers.

    Wire: bits, 80 elements in ten bytes, and two flag bits a parameter; the vote likewise (``docs/wire-format.md``). A
    parameter with an infinity or a NaN on any rank comes back as +inf on all. Draws nothing.

    Reference: J. Bernstein et al., "signSGD: Compressed Optimisation for Non-Convex Problems", ICML 2018; J. Bernstein
    et al., "signSGD with Majority Vote is Communication Efficient and Fault Tolerant", ICLR 2019, algorithm 1.

    Example:
        >>> import torch, gradwire as gw
        >>> g = torch.tensor([[5.0, -0.1, 2.0], [-1.0, -3.0, 0.5], [-1.0, 9.0, 1.0]])
        >>> gw.simulate(g, gw.SignSGD()).mean
        tensor([-1., -1.,  1.])
    """

    name: ClassVar[str] = "signsgd"
    tag: ClassVar[int] = 17
    properties: ClassVar[Properties] = Properties(
        summary="The sign that most workers have; a direction, not a mean",
        paper="Bernstein et al., signSGD with majority vote, ICLR 2019",
        bit_stable=True,
        bits_per_element=1.0,
    )

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            collectives=("two_shot", "all_gather"),
            direction=True,
            needs_loss_scale=True,
            kernels=("signs",),
            on_device=True,
            min_numel=0,
            unbiased=False,
        )

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> MajorityVoteCodec:
        return MajorityVoteCodec(kernels, segments, world_size)

    def plan(self, setting: PlanSetting) -> BucketPlan:
        return _Vote(SectionPlan(self, setting), setting.segments)


@dataclass(frozen=True, kw_only=True)
class Signum(SignSGD):
    r"""Signum with majority vote: :class:`SignSGD` on each worker's momentum.

    With v_i worker i's momentum, zero at first::

        v_i <- momentum v_i + (1 - momentum) g_i        outcome = sign(sum_i sign(v_i))

    A worker whose gradient of a parameter is all zeros does not vote on it; its momentum decays.

    The method applies the momentum, so the optimizer must have none. The momentum is state of this rank, without the
    loss scale under mixed precision, and a round with a non-finite value does not change it.

    Args:
        momentum: beta, at least 0 and below 1; 0 is signSGD.

    Raises:
        HyperparameterError: ``momentum`` is out of range.

    Reference: J. Bernstein et al., ICLR 2019, algorithm 1.

    Example:
        >>> import torch, gradwire as gw
        >>> link = gw.SimulatedLink([("w", torch.empty(2))], gw.Signum(momentum=0.5), 1)
        >>> for g in ([4.0, 4.0], [-1.0, -9.0]):
        ...     print(link.reduce_(torch.tensor([g])))
        tensor([1., 1.])
        tensor([ 1., -1.])
    """

    momentum: float = 0.9

    name: ClassVar[str] = "signum"
    tag: ClassVar[int] = 18
    properties: ClassVar[Properties] = Properties(
        summary="The sign that most workers' momentum has; a direction, not a mean",
        paper="Bernstein et al., signSGD with majority vote, ICLR 2019",
        bit_stable=True,
        bits_per_element=1.0,
        state="a momentum per parameter and rank",
        state_bytes_per_element=4.0,
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "momentum", checked_momentum("Signum", self.momentum))

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            owns_momentum=True,
            remembers=("momentum",),
            own=("momentum",),
        )

    def plan(self, setting: PlanSetting) -> BucketPlan:
        return _MomentumVote(SectionPlan(self, setting), setting.segments, self.momentum, setting.kernels)


class _Vote(WrappedPlan):
    def after(self, context: Context, flat: torch.Tensor, outcome: Outcome) -> Outcome:
        if context.loss_scale != 1.0:
            for a, b in self.runs[context.chunk]:
                flat[a:b].mul_(context.loss_scale)
        return outcome


class _MomentumVote(_Vote):
    def __init__(self, inner: BucketPlan, segments: Sequence[Segment], momentum: float, kernels: Kernels) -> None:
        super().__init__(inner, segments)
        self._momentum, self._kernels = momentum, kernels
        self._table = sign_table(divide(segments)[0])

    def before(self, context: Context, flat: torch.Tensor) -> None:
        silent = zero_throughout(self._kernels, flat, self._table)
        held = context.memory.read("momentum", self.segments)
        staged = context.memory.stage("momentum", self.segments)
        for a, b in self.all_runs:
            torch.mul(held[a:b], self._momentum, out=staged[a:b])
            staged[a:b].add_(flat[a:b], alpha=(1 - self._momentum) / context.loss_scale)
            flat[a:b].copy_(staged[a:b])
        # A momentum that only decays would keep its signs forever, so this rank does not vote.
        is_here = flat.device.type == "cpu"
        for i, (begin, numel) in enumerate(zip(self._table.offset.tolist(), self._table.numel.tolist())):
            if not is_here or silent[i]:
                flat[begin : begin + numel].masked_fill_(silent[i], 0.0)
