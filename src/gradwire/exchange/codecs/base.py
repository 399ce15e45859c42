"""The interface of codecs, and constants and summaries that they use."""

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
from gradwire.exchange.fields import is_whole
from gradwire.exchange.network_cost import LinkCost
from gradwire.exchange.wire import Packing, packing
from gradwire.kernels import MAX_WORLD_SIZE, Coder


class Constant:
    """A constant tensor, kept on each device that uses it.

    A copy in every round would make a thread wait for the device each time, since the values are not in page-locked
    memory.

    Args:
        values: Values in main memory, which are copied.
    """

    def __init__(self, values: npt.NDArray[Any] | torch.Tensor) -> None:
        self._here = values.clone() if isinstance(values, torch.Tensor) else torch.from_numpy(np.array(values))
        self._there: dict[torch.device, torch.Tensor] = {}

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the values on a device; read only."""
        if device.type == "cpu":
            return self._here
        if device not in self._there:
            self._there[device] = self._here.to(device)
        return self._there[device]


SMALLEST_SCALE = 2.0**-100
"""Least non-zero scale: its reciprocal times 2^24 is finite. Raising a scale to it keeps a method unbiased."""


def usable(scale: torch.Tensor) -> torch.Tensor:
    """Raise positive scales to :data:`SMALLEST_SCALE` at least."""
    return torch.where(scale > 0, scale.clamp(min=SMALLEST_SCALE), scale)


def check_workers(owner: str, world_size: int) -> None:
    """Check that the sum of integers over workers fits sixteen bits.

    Raises:
        IncompatibleError: there are more than :data:`gradwire.kernels.MAX_WORLD_SIZE` workers.
    """
    if world_size > MAX_WORLD_SIZE:
        raise IncompatibleError(
            f"{owner}: integers of {world_size} workers need more than 16 bits; use at most {MAX_WORLD_SIZE} workers, "
            "or a method whose values are added up as floats, such as bf16"
        )


def unread(name: str, total: float, count: float) -> None:
    """Ignore a gauge."""


@dataclass(frozen=True)
class Draw:
    """Inputs of an encoder besides the vector.

    Attributes:
        round, stream: Keys of its random numbers; see :mod:`gradwire.seeds`.
        loss_scale: Factor by which automatic mixed precision has multiplied the vector.
        link: Cost of a message, the same on all ranks; None if unknown.
        gauge: ``gauge(name, total, count)`` adds to one of the numbers that the method declares in
            :class:`gradwire.Traits`.
    """

    round: int
    stream: int
    loss_scale: float = 1.0
    link: LinkCost | None = None
    gauge: Callable[[str, float, float], None] = unread


class Summary(Protocol):
    """Statistics of whole parameters that an encoder needs before it can encode a part of one.

    It is computed once for each bucket, over whole parameters, so that codes depend on neither buckets nor chunks.
    """

    @property
    def shared(self) -> torch.Tensor | None:
        """Float32 values to replace by their maximum over all ranks; None if nothing is shared."""

    def select(self, index: Constant, shared: torch.Tensor | None) -> Summary:
        """Return the summary of a chunk whose segment i is a piece of segment ``index[i]`` of the bucket.

        ``shared`` is the maximum over ranks of :attr:`shared`.
        """


class Codec(ABC):
    """A compressor bound to segments: it encodes and decodes one section of a payload.

    The *units* of a section are the smallest runs that different ranks can own. An owner reduces a multiple of
    ``grain`` units, so that its codes join those of other owners without gaps.

    A payload may begin with ``side_bytes`` bytes that concern all units: every owner of a share of the units receives
    them before its codes. The codes of all shares, joined in order, are the codes of all units.
    """

    units: int
    grain: int
    side_bytes: int = 0
    coder: Coder | None = None
    checked: bool = False

    def use_coder(self, coder: Coder) -> None:
        """Set the entropy coder, and pack digits so that every byte is a symbol for it.

        Call it once, before any other method.

        Raises:
            IncompatibleError: the codes are not made of digits that fit a byte.
        """
        raise IncompatibleError(
            "its payload has no digits that an entropy coder could shorten: use it without a coder, or a method of "
            "digits, such as TernGrad() or QSGDinf()"
        )

    def plain_payload_bytes(self, units: int) -> int:
        """Return the number of bytes at the start of a rank's codes that no coder shortens; all by default."""
        return self.payload_bytes(units)

    def packing(self, units: int) -> Packing:
        """Return the packing of a rank's codes of ``units`` units: that of the coder, or the codes unchanged."""
        return packing(self.payload_bytes(units), self.plain_payload_bytes(units), self.coder)

    @abstractmethod
    def summarise(self, flat: torch.Tensor) -> Summary:
        """Measure the segments, which must be whole parameters."""

    def summarise_mean(self, flat: torch.Tensor, summary: Summary) -> Summary:
        """Measure the mean of the segments, which their owner encodes again; ``summary`` is that of this rank's vector.

        All ranks decode the mean with the summary of their own vector. So whatever decoding needs and the payload does
        not contain must be taken from ``summary``.
        """
        return self.summarise(flat)

    @abstractmethod
    def payload_bytes(self, units: int) -> int:
        """Return the exact bytes of a rank's codes of ``units`` units, or the most if :meth:`packing` varies."""

    @abstractmethod
    def encode(self, flat: torch.Tensor, summary: Summary, draw: Draw, out: torch.Tensor) -> None:
        """Write the codes of all units of ``flat`` to the start of ``out``, which may be longer."""

    @abstractmethod
    def decode_rows(self, rows: torch.Tensor, summary: Summary, flat: torch.Tensor) -> bool | None:
        """Write the mean over ranks into ``flat`` from every rank's codes of all units.

        Before the call ``flat`` holds this rank's own vector, as it was encoded: a decoder may compare with it.

        Returns:
            For a :class:`CheckedCodec`, True if this rank could read all rows.
        """

    def remember(self, summary: Summary, flat: torch.Tensor, draw: Draw, wants_sent: bool) -> Summary:
        """Return the summary for this rank's decoders, before they overwrite ``flat``.

        It may keep the draw, and, if ``wants_sent`` is set, the data for :meth:`add_own`.
        """
        return summary

    @abstractmethod
    def add_own(self, data: torch.Tensor, summary: Summary, weight: float, flat: torch.Tensor) -> None:
        """Add ``weight`` times this rank's own contribution, decoded from its codes, to ``flat``."""

    @abstractmethod
    def is_finite(self, summary: Summary, flat: torch.Tensor) -> Flag:
        """Return whether the mean, just decoded into ``flat``, is finite in this section."""


def check_codec(owner: str, codec: object) -> None:
    """Check what buffers and protocols need to know of a codec.

    Raises:
        IncompatibleError: ``owner`` returned something else, or the numbers of units or bytes are not usable.
    """
    if not isinstance(codec, Codec):
        raise IncompatibleError(f"{owner}: codec() returned {codec!r}: return a gradwire.exchange.codecs.Codec")
    name = type(codec).__name__
    for attribute, least in (("units", 0), ("grain", 1), ("side_bytes", 0)):
        value = getattr(codec, attribute, None)
        if not is_whole(value, least):
            need = f"a whole number of at least {least}"
            raise IncompatibleError(f"{owner}: attribute {attribute!r} of {name} is {need}, not {value!r}")
    size = codec.payload_bytes(codec.units)
    if not is_whole(size, 0):
        raise IncompatibleError(f"{owner}: {name}.payload_bytes returned {size!r}: return a whole number of bytes")


LeftOut: TypeAlias = Callable[[torch.Tensor, float], None]
"""``left_out(flat, weight)`` adds ``weight`` times the part that a merge left out to ``flat``."""


class MergeableCodec(Codec):
    """A codec that can merge codes of several ranks to codes of the same kind: along a tree, or by share owners."""

    @abstractmethod
    def merge(self, rows: Sequence[torch.Tensor], draw: Draw, out: torch.Tensor) -> LeftOut | None:
        """Write codes of the sum of the decoded rows, or of a part of it, into ``out``.

        The result depends on the codes, their order and ``draw`` only, so that all ranks that merge the same get the
        same.

        Returns:
            The part of the sum that is left out; None if there is none.
        """


class CheckedCodec(Codec):
    """A codec with rows that one rank may be unable to read and others not. All ranks then agree to spoil the section.

    ``checked`` is set if the codec checks rows.
    """

    @abstractmethod
    def spoil(self, flat: torch.Tensor) -> None:
        """Set this section of the mean to +inf, after some rank could not read it."""

    @abstractmethod
    def unread(self) -> str:
        """Return a sentence for a message: why some rank could not read this section, and what to change."""


class SummableCodec(Codec):
    """A codec whose codes the owner of a share can reduce to codes of the mean, for exchanges in two phases."""

    def plain_mean_bytes(self, units: int) -> int:
        """Return the number of bytes at the start of reduced codes that no coder shortens."""
        return self.mean_bytes(units)

    def mean_packing(self, units: int) -> Packing:
        """Return the packing of reduced codes of ``units`` units."""
        return packing(self.mean_bytes(units), self.plain_mean_bytes(units), self.coder)

    @abstractmethod
    def mean_bytes(self, units: int) -> int:
        """Return the exact number of bytes of the reduced codes of ``units`` units (a multiple of ``grain``)."""

    def heard(self, rows: torch.Tensor, summary: Summary) -> Summary:
        """Return the summary for this rank's decoders, now that all ranks' codes of its own share are here.

        The first ``side_bytes`` bytes of a row are the same for all owners, so that all ranks hear the same.
        """
        return summary

    @abstractmethod
    def reduce(self, rows: torch.Tensor, begin: int, out: torch.Tensor) -> None:
        """Reduce the codes of the same units from all ranks, ``[world_size, payload_bytes]``, to ``mean_bytes`` bytes.

        ``begin`` is the first of these units, a multiple of ``grain``.
        """

    @abstractmethod
    def decode_mean(self, data: torch.Tensor, summary: Summary, begin: int, end: int, flat: torch.Tensor) -> None:
        """Write the mean over ranks into ``flat`` from the reduced codes of units ``begin .. end``.

        ``begin`` is a multiple of ``grain``; ``data`` may be longer.
        """
