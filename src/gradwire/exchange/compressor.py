"""The base class of compressors: methods that are operators on one vector."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from gradwire.errors import IncompatibleError
from gradwire.exchange.codecs import Codec
from gradwire.exchange.method import Method
from gradwire.exchange.protocols import REDUCE_SCATTER
from gradwire.exchange.protocols.bucket_plan import BucketPlan, Operator, PlanSetting, SectionPlan
from gradwire.exchange.segments import Segment
from gradwire.exchange.traits import Traits

if TYPE_CHECKING:
    from gradwire.kernels import Kernels


@dataclass(frozen=True, kw_only=True)
class Compressor(Method):
    """A method that is an operator on one vector, without communication or state."""

    tag: ClassVar[int]
    """Unique number of the wire format, 1 to 127."""

    @cached_property
    def traits(self) -> Traits:
        """The declared traits, with ``scatters`` set if payloads can be gathered one parameter at a time."""
        found = self._declared()
        # The owner of a shard would know the state of its own shard only.
        stateless = not (found.whole_step or found.remembers)
        return replace(found, scatters="all_gather" in found.collectives and stateless)

    @property
    def as_operator(self) -> Operator | None:
        return self

    def refusal_of_feedback(self, unseen: str) -> str | None:
        return None

    def check_between_two(self, owner: str) -> None:
        if self.traits.joined:
            raise IncompatibleError(f"{owner}: rows have no parameters to join: give {self!r} blocks='parameter'")
        if self.traits.needs_link_cost:
            raise IncompatibleError(f"{owner}: {self!r} needs to know what a message costs: give it a number")

    def codec_between_two(self, kernels: Kernels, segments: Sequence[Segment], seed: int) -> Codec:
        return self.codec(kernels, segments, 1, seed)

    def plan(self, setting: PlanSetting) -> BucketPlan:
        known = self.traits.collectives
        gathers = setting.collective == REDUCE_SCATTER and self.traits.scatters
        if not gathers and setting.collective not in known:
            raise IncompatibleError(
                f"{self!r} cannot travel by {setting.collective}; use collective={known[0]!r} or 'auto'"
            )
        return SectionPlan(self, setting)

    def dense_plan(self, setting: PlanSetting) -> BucketPlan:
        return self.plan(setting.whole())

    @abstractmethod
    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> Codec:
        """Return the codec that encodes and decodes the segments of a bucket."""
