"""Tensors that stay as they are from round to round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.deferred_checks import Flag
from gradwire.exchange.network_cost import LinkCost
from gradwire.exchange.wire import Packing, packing
from gradwire.kernels import MAX_WORLD_SIZE, Coder


class Constant:
    """Values that do not change, kept on each device where they are needed.

    To copy them there in every round would make a thread wait for the device in every round: memory that is not
    page-locked can be copied in no other way.

    Args:
        values: In main memory; copied.
    """

    def __init__(self, values: npt.NDArray[Any] | torch.Tensor) -> None:
        self._here = values.clone() if isinstance(values, torch.Tensor) else torch.from_numpy(np.array(values))
        self._there: dict[torch.device, torch.Tensor] = {}

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the values on a device; not to be written to."""
        if device.type == "cpu":
            return self._here
        if device not in self._there:
            self._there[device] = self._here.to(device)
        return self._there[device]


SMALLEST_SCALE = 2.0**-100
"""A non-zero scale is at least this, so that its reciprocal times 2^24 is finite. A larger scale stays unbiased."""


def usable(scale: torch.Tensor) -> torch.Tensor:
    """Raise what is above zero to :data:`SMALLEST_SCALE`."""
    return torch.where(scale > 0, scale.clamp(min=SMALLEST_SCALE), scale)


def check_workers(owner: str, world_size: int) -> None:
    """Check that integers of that many workers add up within sixteen bits.

    Raises:
        IncompatibleError: there are more than :data:`gradwire.kernels.MAX_WORLD_SIZE`.
    """
    if world_size > MAX_WORLD_SIZE:
        raise IncompatibleError(
            f"{owner}: integers of {world_size} workers need more than 16 bits; use at most {MAX_WORLD_SIZE} workers, "
            "or a method whose values are added up as floats, such as bf16"
        )


def unread(name: str, total: float, count: float) -> None:
    """Take a gauge that nobody reads."""


@dataclass(frozen=True)
class Draw:
    """What an encoder is told of the moment.

    Attributes:
        round, stream: Which random numbers it uses; see :mod:`gradwire.seeds`.
        loss_scale: By which automatic mixed precision has multiplied the vector.
        link: What a message costs, the same on all ranks; None where nobody knows.
        gauge: ``gauge(name, total, count)`` adds to one of the numbers that the method declares in
            :class:`gradwire.Traits`.
    """

    round: int
    stream: int
    loss_scale: float = 1.0
    link: LinkCost | None = None
    gauge: Callable[[str, float, float], None] = unread


class Summary(Protocol):
    """What an encoder must know of whole parameters before it may encode a part of one.

    It is made once a bucket, over whole parameters, so that neither buckets nor chunks decide a code.
    """

    @property
    def shared(self) -> torch.Tensor | None:
        """Float32 values to be replaced by their maximum over all ranks; None where nothing is shared."""

    def select(self, index: Constant, shared: torch.Tensor | None) -> Summary:
        """Return the summary of a chunk whose segment i is a piece of segment ``index[i]`` of the bucket.

        ``shared`` is what came back of :attr:`shared`.
        """


class Codec(ABC):
    """A compressor bound to the segments it serves: one section of a payload.

    The section's *units* are the smallest runs that can be owned by different ranks. ``grain`` units and multiples
    of it can be reduced by one owner and decoded beside other owners' without gaps.

    A payload may begin with ``side_bytes`` that concern all units: every owner of a share of the units receives them
    before its codes. Codes of shares, one after the other, are the codes of all.
    """

    units: int
    grain: int
    side_bytes: int = 0
    coder: Coder | None = None
    checked: bool = False

    def use_coder(self, coder: Coder) -> None:
        """Lay digits out so that every byte is a symbol for an entropy coder, and say which coder it is.

        To be called once, before anything else.

        Raises:
            IncompatibleError: the codes are not made of digits that fit a byte.
        """
        raise IncompatibleError(
            "its payload has no digits that an entropy coder could shorten: use it without a coder, or a method of "
            "digits, such as TernGrad() or QSGDinf()"
        )

    def plain_payload_bytes(self, units: int) -> int:
        """Return the bytes at the start of a rank's codes that no coder touches: all, unless said otherwise."""
        return self.payload_bytes(units)

    def packing(self, units: int) -> Packing:
        """Return how a rank's codes of that many units become the bytes that travel: as they are, but for a coder's."""
        return packing(self.payload_bytes(units), self.plain_payload_bytes(units), self.coder)

    @abstractmethod
    def summarise(self, flat: torch.Tensor) -> Summary:
        """Measure the segments, which must be whole parameters."""

    @abstractmethod
    def payload_bytes(self, units: int) -> int:
        """Return the exact bytes of a rank's codes for that many units, or the most where :meth:`packing` varies."""

    @abstractmethod
    def encode(self, flat: torch.Tensor, summary: Summary, draw: Draw, out: torch.Tensor) -> None:
        """Write the codes of all units of ``flat``; ``out`` may be longer and is left alone beyond them."""

    @abstractmethod
    def decode_rows(self, rows: torch.Tensor, summary: Summary, flat: torch.Tensor) -> bool | None:
        """Write the mean over ranks into ``flat`` from every rank's codes of all units.

        Until then ``flat`` holds this rank's own vector, as it was encoded: a decoder may compare with it.

        Returns:
            Of a :class:`CheckedCodec`, whether this rank could read all rows.
        """

    def remember(self, summary: Summary, flat: torch.Tensor, draw: Draw, wants_sent: bool) -> Summary:
        """Return the summary that this rank's decoders need, before they overwrite ``flat``.

        It may hold the draw, and where ``wants_sent`` says that :meth:`add_own` will be called, what that needs.
        """
        return summary

    @abstractmethod
    def add_own(self, data: torch.Tensor, summary: Summary, weight: float, flat: torch.Tensor) -> None:
        """Add ``weight`` times what this rank itself contributed, from its own codes, to ``flat``."""

    @abstractmethod
    def is_finite(self, summary: Summary, flat: torch.Tensor) -> Flag:
        """Return whether the mean, just decoded into ``flat``, is finite in this section."""


LeftOut: TypeAlias = Callable[[torch.Tensor, float], None]
"""``left_out(flat, weight)`` adds ``weight`` times what a merge left out to ``flat``."""


class MergeableCodec(Codec):
    """A codec of which several ranks' codes can be made one of the same kind: along a tree, or by owners of shares."""

    @abstractmethod
    def merge(self, rows: Sequence[torch.Tensor], draw: Draw, out: torch.Tensor) -> LeftOut | None:
        """Write codes of the sum of what some codes of all units stand for, or of a part of it, into ``out``.

        It is a function of the codes and of ``draw``: all who merge the same ones in the same order get the same.

        Returns:
            What is left out of the sum; None where nothing is.
        """


class CheckedCodec(Codec):
    """A codec of which a rank may find that it cannot read rows that others can: all then agree, and spoil the section.

    One that looks has ``checked`` set.
    """

    @abstractmethod
    def spoil(self, flat: torch.Tensor) -> None:
        """Make this section of the mean +inf: some rank could not read it."""

    @abstractmethod
    def unread(self) -> str:
        """Describe in a sentence for people why some rank could not read this section, and what to change."""


class SummableCodec(Codec):
    """A codec whose codes an owner of a share can reduce to codes of the mean: these can travel in two phases."""

    def plain_mean_bytes(self, units: int) -> int:
        """Return the bytes at the start of reduced codes that no coder touches."""
        return self.mean_bytes(units)

    def mean_packing(self, units: int) -> Packing:
        """Return how reduced codes of that many units become the bytes that travel."""
        return packing(self.mean_bytes(units), self.plain_mean_bytes(units), self.coder)

    @abstractmethod
    def mean_bytes(self, units: int) -> int:
        """Return the exact bytes of the reduced codes for that many units (a multiple of ``grain``)."""

    @abstractmethod
    def reduce(self, rows: torch.Tensor, begin: int, out: torch.Tensor) -> None:
        """Reduce the codes of the same units from all ranks, ``[world_size, payload_bytes]``, to ``mean_bytes``.

        ``begin`` is the first of these units, a multiple of ``grain``.
        """

    @abstractmethod
    def decode_mean(self, data: torch.Tensor, summary: Summary, begin: int, end: int, flat: torch.Tensor) -> None:
        """Write the mean over ranks into ``flat`` from the reduced codes of units ``begin .. end``.

        ``begin`` is a multiple of ``grain``; ``data`` may be longer.
        """
