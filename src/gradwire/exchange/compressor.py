"""The base class of compressors: methods that are operators on one vector."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gradwire.exchange.codecs import Codec
from gradwire.exchange.method import Method
from gradwire.exchange.segments import Segment

if TYPE_CHECKING:
    from gradwire.kernels import Kernels

__all__ = ["Compressor"]


@dataclass(frozen=True, kw_only=True)
class Compressor(Method):
    """A method that is an operator on one vector: no communication, no memory."""

    tag: ClassVar[int]
    """Unique number of the wire format, 1 to 127."""

    @property
    def scatters(self) -> bool:  # type: ignore[override]
        """Whether it can be gathered, one parameter at a time: then the owner of a shard can decode codes of it."""
        return "all_gather" in self.collectives and not self.whole_step

    @abstractmethod
    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> Codec:
        """Return the codec that encodes and decodes the segments of a bucket."""
