"""What methods around another have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from gradwire.exchange.deferred_checks import all_finite
from gradwire.exchange.method import Inherited, Method
from gradwire.exchange.ops import Exchange, Scope
from gradwire.exchange.protocols import Context, Outcome
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting
from gradwire.exchange.segments import Parameter, Segment

__all__ = ["Around", "AsSent", "WrappedPlan", "Wrapper", "pieces"]

PIECE = 1 << 16
"""Elements: temporaries of a piece stay in a cache, and in memory that the allocator keeps."""


class AsSent(Inherited):
    """The inner method's protocols by which the outcome is the mean of what ranks sent: a residual or a shift needs it.

    The error of an owner who encodes the mean once more would be in no rank's memory.
    """

    def __get__(self, instance: Method | None, owner: type[Method]) -> Any:
        found = super().__get__(instance, owner)
        if instance is None or not getattr(instance, self._field).re_encoding:
            return found
        return tuple(collective for collective in found if collective != "two_shot")


class Around(Method):
    """A method around another, its ``wrapped`` one, as which it travels.

    No dataclass, so that each method names the field that holds the other.
    """

    @property
    @abstractmethod
    def wrapped(self) -> Method:
        """The method inside."""

    wrapped_field: ClassVar[str] = "compressor"
    """The field that holds it."""

    collectives: ClassVar[Inherited] = Inherited("wrapped")
    re_encoding: ClassVar[Inherited] = Inherited("wrapped", False)
    whole_step: ClassVar[Inherited] = Inherited("wrapped")
    joined: ClassVar[Inherited] = Inherited("wrapped")
    kernels: ClassVar[Inherited] = Inherited("wrapped")
    direction: ClassVar[Inherited] = Inherited("wrapped")
    owns_momentum: ClassVar[Inherited] = Inherited("wrapped")
    needs_loss_scale: ClassVar[Inherited] = Inherited("wrapped")
    remembers: ClassVar[Inherited] = Inherited("wrapped")
    waiting: ClassVar[Inherited] = Inherited("wrapped", "residual")
    min_numel: ClassVar[Inherited] = Inherited("wrapped")
    sharded: ClassVar[Inherited] = Inherited("wrapped", False)
    needs_optimizer: ClassVar[Inherited] = Inherited("wrapped")
    needs_learning_rates: ClassVar[Inherited] = Inherited("wrapped")
    needs_link_cost: ClassVar[Inherited] = Inherited("wrapped")
    gauges: ClassVar[Inherited] = Inherited("wrapped")

    def check_optimizer(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> None:
        self.wrapped.check_optimizer(optimizer, parameters)

    @property
    def open_coders(self) -> tuple[str, ...]:  # type: ignore[override]
        """Those of the wrapped method."""
        return self.wrapped.open_coders

    def with_coder(self, coder: str) -> Method:
        changed: dict[str, Any] = {self.wrapped_field: self.wrapped.with_coder(coder)}
        return replace(self, **changed)

    def terms(self, world_size: int) -> Mapping[str, object]:
        return self.wrapped.terms(world_size)

    def scopes(self, world_size: int) -> Sequence[Scope]:
        return self.wrapped.scopes(world_size)

    def kept_as(self, parameter: Parameter) -> Sequence[Parameter]:
        return self.wrapped.kept_as(parameter)

    def usual_collective(self, world_size: int) -> str | None:
        # One alone leaves nothing to differ.
        return self.wrapped.usual_collective(world_size) if len(self.collectives) > 1 else None

    def bind(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> Callable[[], None] | None:
        return self.wrapped.bind(optimizer, parameters)

    def caution(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> str | None:
        return self.wrapped.caution(optimizer, parameters)

    def dense_plan(self, setting: PlanSetting) -> BucketPlan:
        return self.wrapped.dense_plan(setting)


@dataclass(frozen=True, kw_only=True)
class Wrapper(Around):
    """A method around a compressor, which travels as the compressor does."""

    compressor: Method = field(kw_only=False)

    @property
    def wrapped(self) -> Method:
        """The compressor."""
        return self.compressor


def pieces(runs: Iterable[tuple[int, int]], flat: torch.Tensor | None = None) -> Iterator[tuple[int, int]]:
    """Cut runs into pieces for arithmetic of several passes, so that what one writes is in a cache for the next.

    Runs of a vector ``flat`` on a device stay whole: there each pass over a piece would be a launch.

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
    """A plan that changes a bucket before an inner plan exchanges it, or its outcome afterwards.

    ``segments`` are the bucket's, for the layout of memories; ``all_runs`` says where its compressed part lies.
    """

    def __init__(self, inner: BucketPlan, segments: Sequence[Segment]) -> None:
        self.inner, self.segments = inner, segments
        self.chunks, self.collective, self.runs = inner.chunks, inner.collective, inner.runs
        self.finishes = inner.finishes
        self.all_runs = sorted(run for chunk in inner.runs for run in chunk)

    def before(self, context: Context, flat: torch.Tensor) -> None:
        """Change the bucket."""

    def after(self, context: Context, flat: torch.Tensor, outcome: Outcome) -> Outcome:
        """Note what was sent, and change the mean, on ``runs[context.chunk]``; give what all of this did."""
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
            # A plain sum is not looked at; what is remembered must not take up an infinity.
            parts = (flat[a:b] for a, b in self.runs[context.chunk])
            outcome = replace(outcome, finite=all_finite(*parts))
        return self.after(context, flat, outcome)
