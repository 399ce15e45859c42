"""The base class of compressors: methods that are operators on one vector."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gradwire.errors import IncompatibleError
from gradwire.exchange.codecs import Codec
from gradwire.exchange.method import Method
from gradwire.exchange.protocols import REDUCE_SCATTER
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting, SectionPlan
from gradwire.exchange.segments import Segment

if TYPE_CHECKING:
    from gradwire.kernels import Kernels


@dataclass(frozen=True, kw_only=True)
class Compressor(Method):
    """A method that is an operator on one vector: no communication, no memory."""

    tag: ClassVar[int]
    """Unique number of the wire format, 1 to 127."""

    @property
    def scatters(self) -> bool:  # type: ignore[override]
        """Whether it can be gathered, one parameter at a time: then the owner of a shard can decode codes of it."""
        return "all_gather" in self.collectives and not self.whole_step

    def plan(self, setting: PlanSetting) -> BucketPlan:
        gathers = setting.collective == REDUCE_SCATTER and self.scatters
        if not gathers and setting.collective not in self.collectives:
            raise IncompatibleError(
                f"{self!r} cannot travel by {setting.collective}; use collective={self.collectives[0]!r} or 'auto'"
            )
        return SectionPlan(self, setting)

    def dense_plan(self, setting: PlanSetting) -> BucketPlan:
        return self.plan(setting.whole())

    @abstractmethod
    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> Codec:
        """Return the codec that encodes and decodes the segments of a bucket."""
