"""Base classes of methods around another method, and of their plans."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from gradwire.exchange.deferred_checks import Flag, all_finite, both
from gradwire.exchange.method import Method
from gradwire.exchange.ops import Exchange, Scope
from gradwire.exchange.protocols import Context, Outcome
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting
from gradwire.exchange.protocols.division import join
from gradwire.exchange.segments import Parameter, Segment, divide
from gradwire.exchange.traits import Traits
from gradwire.kernels import SegmentTable

PIECE = 1 << 16
"""Number of elements of a piece, whose temporaries stay in a cache and in memory that the allocator reuses."""


def as_sent(inner: Method) -> tuple[str, ...]:
    """Return the protocols with which an inner method's outcome is the mean of the values that ranks sent.

    Residuals and shifts need this: the error of an owner who encodes the mean again would be in no rank's state.
    """
    traits = inner.traits
    return tuple(found for found in traits.collectives if not (traits.re_encoding and found == "two_shot"))


class Around(Method):
    """Base of methods around another method, ``wrapped``, by whose protocols they are exchanged.

    Not a dataclass, so that each method names the field of the inner method.
    """

    @property
    @abstractmethod
    def wrapped(self) -> Method:
        """The inner method."""

    wrapped_field: ClassVar[str] = "compressor"
    """Name of the field of the inner method."""

    def declare(self) -> Traits:
        """Return the traits of the wrapped method, except for those of an operator on one vector."""
        own = super().declare()
        return replace(
            self.wrapped.traits,
            cut=own.cut,
            share_cut=own.share_cut,
            on_device=own.on_device,
            local_steps=own.local_steps,
            outcomes_differ=own.outcomes_differ,
            quantises_blocks=own.quantises_blocks,
            shares_scales=own.shares_scales,
            same_elements=own.same_elements,
            scatters=own.scatters,
            unbiased=own.unbiased,
            unbiased_note=own.unbiased_note,
            omega_formula=own.omega_formula,
            worst_step=own.worst_step,
            worst_error=own.worst_error,
        )

    def check_optimizer(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> None:
        self.wrapped.check_optimizer(optimizer, parameters)

    def with_coder(self, coder: str) -> Method:
        changed: dict[str, Any] = {self.wrapped_field: self.wrapped.with_coder(coder)}
        return replace(self, **changed)

    def terms(self, world_size: int) -> Mapping[str, object]:
        return self.wrapped.terms(world_size)

    def scopes(self, world_size: int) -> Sequence[Scope]:
        return self.wrapped.scopes(world_size)

    def kept_as(self, parameter: Parameter) -> Sequence[Parameter]:
        return self.wrapped.kept_as(parameter)

    def remembered_numel(self, kind: str, parameter: Parameter) -> int:
        return self.wrapped.remembered_numel(kind, parameter)

    def usual_collective(self, world_size: int) -> str | None:
        # With a single protocol there is no choice.
        return self.wrapped.usual_collective(world_size) if len(self.traits.collectives) > 1 else None

    def bind(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> Callable[[], None] | None:
        return self.wrapped.bind(optimizer, parameters)

    def wait_of(self, numel: int | None = None) -> float | None:
        return self.wrapped.wait_of(numel)

    def caution(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> str | None:
        return self.wrapped.caution(optimizer, parameters)

    def dense_plan(self, setting: PlanSetting) -> BucketPlan:
        return self.wrapped.dense_plan(setting)


@dataclass(frozen=True, kw_only=True)
class Wrapper(Around):
    """Base of methods around a compressor, which are exchanged as the compressor is."""

    compressor: Method = field(kw_only=False)

    @property
    def wrapped(self) -> Method:
        """Inner compressor."""
        return self.compressor


def pieces(runs: Iterable[tuple[int, int]], flat: torch.Tensor | None = None) -> Iterator[tuple[int, int]]:
    """Cut runs into pieces for arithmetic in several passes, so that the results of one are in a cache for the next.

    Runs of a vector ``flat`` on a device are not cut, since each pass over a piece would be a kernel launch.

    Example:
        >>> [b - a for a, b in pieces([(5, 100_005)])]
        [65536, 34464]
    """
    if flat is not None and flat.device.type != "cpu":
        yield from runs
        return
    for begin, end in runs:
        for a in range(begin, end, PIECE):
            yield a, min(a + PIECE, end)


class WrappedPlan(BucketPlan):
    """Base of plans that change a bucket before an inner plan exchanges it, or its outcome afterwards.

    ``segments`` are the bucket's, for the layout of state; ``all_runs`` are the runs of its compressed part.
    """

    def __init__(self, inner: BucketPlan, segments: Sequence[Segment]) -> None:
        self.inner, self.segments = inner, segments
        self.chunks, self.collective, self.runs = inner.chunks, inner.collective, inner.runs
        self.finishes = inner.finishes
        self.all_runs = sorted(run for chunk in inner.runs for run in chunk)

    def before(self, context: Context, flat: torch.Tensor) -> None:
        """Change the bucket before the exchange."""

    def after(self, context: Context, flat: torch.Tensor, outcome: Outcome) -> Outcome:
        """Process the sent values and change the mean, on ``runs[context.chunk]``, and return the outcome."""
        return outcome

    def finish(self, context: Context) -> Exchange[None]:
        return self.inner.finish(context)

    def prepare(self, context: Context, flat: torch.Tensor) -> Exchange[Any]:
        if not flat.is_meta:
            self.before(context, flat)
        return (yield from self.inner.prepare(context, flat))

    def run(self, context: Context, flat: torch.Tensor, prepared: Any) -> Exchange[Outcome]:
        outcome = yield from self.inner.run(replace(context, wants_sent=True), flat, prepared)
        if flat.is_meta:
            return outcome
        if outcome.finite is None:
            # A plain sum is not checked by the inner plan, and after an infinity, also in what is not compressed, the
            # state must not change.
            parts = outcome.unchecked or [flat[a:b] for a, b in self.runs[context.chunk]]
            outcome = replace(outcome, finite=all_finite(*parts), unchecked=())
        return self.after(context, flat, outcome)


class TransformedPlan(BucketPlan):
    """Base of plans that compute *slots* from compressed parameters, exchange these, and transform their mean back.

    The exchanged vector has the slots of all compressed segments, each as a parameter of the same name, then the dense
    segments. It is one chunk, even if the inner plan exchanges this vector in several, as a cast does: slots are
    transformed back once, when all have arrived. Slots may lose an infinity or NaN of the parameter. It is therefore
    written to the first slot, so that every rank sets the whole parameter to +inf.

    Args:
        method: The inner method; None: slots are sent in float32, with sums that do not depend on the layout.
        setting: Setting of the bucket, whose backend has the family "signs".
        slots: Number of slots of each compressed segment, at least one.
    """

    def __init__(self, method: Method | None, setting: PlanSetting, slots: Sequence[int]) -> None:
        self._kernels = setting.kernels
        self._light, dense = divide(setting.segments)
        offset, numel = [s.offset for s in self._light], [s.numel for s in self._light]
        self._table = SegmentTable(offset, numel, [0] * len(numel), [(0, 0)] * len(numel))
        self._slots = sum(slots)
        short: list[Segment] = []
        for s, count in zip(self._light, slots):
            short.append(Segment(Parameter(s.parameter.name, (count,), (1,)), _end(short), 0, count))
        self._first = torch.tensor([s.offset for s in short], dtype=torch.int64, device="cpu")
        self._dense: list[tuple[Segment, Segment]] = []
        for s in dense:
            short.append(replace(s, offset=_end(short)))
            self._dense.append((s, short[-1]))
        self._numel = _end(short)
        inner = replace(setting, segments=short, chunk_numel=max(1, self._numel))
        self._inner = inner.float32_plan() if method is None else method.plan(inner)
        # No chunk if the bucket has no element.
        self.chunks, self.collective = min(self._inner.chunks, 1), self._inner.collective
        self.runs = [join((s.offset, s.offset + s.numel) for s in self._light)][: self.chunks]

    @abstractmethod
    def gather(self, round: int, flat: torch.Tensor, slots: torch.Tensor) -> None:
        """Compute all slots of the bucket's compressed parameters."""

    @abstractmethod
    def scatter(self, round: int, slots: torch.Tensor, flat: torch.Tensor, add: bool) -> None:
        """Transform the slots back, and write or add the result to the parameters; slots may be overwritten."""

    def prepare(self, context: Context, flat: torch.Tensor) -> Exchange[Any]:
        short = context.workspace.get("slots", 4 * self._numel).view(torch.float32)
        if not flat.is_meta:
            slots = short[: self._slots]
            self.gather(context.round, flat, slots)
            finite = self._kernels.finite(flat, self._table)
            slots[self._first[~finite]] = torch.inf
            for s, at in self._dense:
                short[at.offset : at.offset + at.numel] = flat[s.offset : s.offset + s.numel]
        inner = yield from self._inner.prepare(context, short)
        return short, inner

    def run(self, context: Context, flat: torch.Tensor, prepared: Any) -> Exchange[Outcome]:
        short, inner = prepared
        finite: Flag | None = True
        contributions = []
        for chunk in range(self._inner.chunks):
            space = context.workspace.chunk(chunk)
            outcome = yield from self._inner.run(replace(context, chunk=chunk, workspace=space), short, inner)
            finite = both(finite, outcome.finite)
            contributions.append(outcome.sent)
        if flat.is_meta:
            return Outcome(finite)
        spoilt = ~torch.isfinite(short[self._first])
        self._back(context.round, short, flat, add=False)
        for i in torch.nonzero(spoilt).flatten().tolist():
            s = self._light[i]
            flat[s.offset : s.offset + s.numel] = torch.inf
        told = [own for own in contributions if own is not None]
        unchecked = [flat] if finite is None else []
        if len(told) < len(contributions):
            return Outcome(finite, unchecked=unchecked)

        def sent(out: torch.Tensor, weight: float) -> None:
            part = torch.zeros(self._numel, dtype=torch.float32, device="cpu")
            for own in told:
                own(part, weight)
            self._back(context.round, part, out, add=True)

        return Outcome(finite, sent, unchecked)

    def _back(self, round: int, short: torch.Tensor, flat: torch.Tensor, add: bool) -> None:
        self.scatter(round, short[: self._slots], flat, add)
        for s, at in self._dense:
            target, values = flat[s.offset : s.offset + s.numel], short[at.offset : at.offset + at.numel]
            target.add_(values) if add else target.copy_(values)


def _end(segments: Sequence[Segment]) -> int:
    return segments[-1].offset + segments[-1].numel if segments else 0
