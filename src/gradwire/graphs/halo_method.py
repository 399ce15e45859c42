"""What a method for the halo of a partitioned graph is, and how rows travel that are all sent in every step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from gradwire.errors import PayloadError
from gradwire.exchange.method import Method, require
from gradwire.exchange.protocols import Context
from gradwire.kernels import Kernels
from gradwire.methods.casts.cast import FP32
from gradwire.methods.gossip.vector_coder import VectorCoder, check_operator


@dataclass(frozen=True, kw_only=True)
class ChannelSetting:
    """One way that rows take: from one worker to one other, of one layer, in one direction.

    Attributes:
        name: Of the channel; random numbers and what it remembers are keyed by it.
        boundary: Of the rows: the same for those that go forward and for the gradients of them that come back.
        rows: Number of rows.
        width: Values of a row.
        seed: Of all random numbers.
        steps: That the training has; None where nobody said.
        kernels: That the operators of the method call.
    """

    name: str
    boundary: str
    rows: int
    width: int
    seed: int
    steps: int | None
    kernels: Kernels


class RowChannel(ABC):
    """Both ends of a channel: the sender encodes rows, and the receiver, who has the same setting, decodes them."""

    @abstractmethod
    def most_bytes(self, round: int) -> int:
        """Return the most bytes that the rows take in a round; no fewer where the setting has more rows."""

    @abstractmethod
    def encode(self, context: Context, rows: torch.Tensor) -> torch.Tensor:
        """Return the bytes of rows, float32 ``[rows, width]``; what is remembered of them is staged."""

    @abstractmethod
    def decode(self, context: Context, data: torch.Tensor) -> torch.Tensor:
        """Return the rows that the receiver uses; what is remembered of them is staged.

        Raises:
            PayloadError: these are not the bytes of so many rows.
        """


@dataclass(frozen=True, kw_only=True)
class HaloMethod(ABC):
    """Base of what may be done with the rows of a halo; subclasses are final, and ``repr`` is their spec."""

    name: ClassVar[str]
    """The lower-case name that stands for the defaults."""
    tag: ClassVar[int]
    """Unique number of the wire format, 1 to 126."""
    silent: ClassVar[bool] = False
    """Whether nothing is exchanged, and the rows of a halo are zeros."""
    gauges: ClassVar[tuple[str, ...]] = ()
    """Numbers that its channels report of every round."""

    @property
    def kernels(self) -> tuple[str, ...]:
        """The families of kernels that it calls."""
        return ()

    def check_steps(self, steps: int | None) -> None:  # noqa: B027
        """Refuse a training of so many steps; None where nobody said how many.

        Raises:
            IncompatibleError: the method needs to know, or cannot work with these.
        """

    @abstractmethod
    def channel(self, setting: ChannelSetting) -> RowChannel:
        """Return what encodes and decodes the rows of one way."""


def checked_operator(owner: str, values: object) -> Method:
    """Return a field that holds an operator on one vector.

    Raises:
        HyperparameterError: it is no method.
        IncompatibleError: it is none that one sender and one receiver can use.
    """
    require(isinstance(values, Method), owner, f"a method is needed, such as FP32() or QSGDinf(), not {values!r}")
    check_operator(owner, values)
    return values  # type: ignore[return-value]


class _AllRows(RowChannel):
    """All rows as one vector."""

    def __init__(self, operator: Method, setting: ChannelSetting) -> None:
        self._shape = setting.rows, setting.width
        self._numel = setting.rows * setting.width
        self._coder = VectorCoder(operator, setting.kernels, setting.name, setting.seed)

    def most_bytes(self, round: int) -> int:
        return self._coder.most_bytes(self._numel)

    def encode(self, context: Context, rows: torch.Tensor) -> torch.Tensor:
        return self._coder.encode(rows.reshape(-1), context.round)

    def decode(self, context: Context, data: torch.Tensor) -> torch.Tensor:
        return self._coder.decode(data, self._numel, context.round).view(self._shape)


@dataclass(frozen=True, kw_only=True)
class Halo(HaloMethod):
    """All rows in every step, encoded by an operator on one vector: those for one worker are one vector.

    ``Halo(compressor=FP32())`` is full communication. The operator's spec alone, such as ``"bf16"``, stands for this.

    Args:
        compressor: The operator: a cast, ``RandK`` or any method that is a compressor with scales of its own.

    Raises:
        IncompatibleError: one sender and one receiver cannot use it.

    Wire: the section of the operator for a parameter of rows times width elements (``docs/wire-format.md``).

    Example:
        >>> Halo()
        Halo(compressor=FP32())
    """

    compressor: Method = field(default_factory=FP32, kw_only=False)

    name: ClassVar[str] = "halo"
    tag: ClassVar[int] = 100

    def __post_init__(self) -> None:
        checked_operator("Halo", self.compressor)

    @property
    def kernels(self) -> tuple[str, ...]:
        """Those of the operator."""
        return self.compressor.kernels

    def channel(self, setting: ChannelSetting) -> RowChannel:
        return _AllRows(self.compressor, setting)


class _Nothing(RowChannel):
    """No bytes, and zeros at the receiver."""

    def __init__(self, setting: ChannelSetting) -> None:
        self._shape = setting.rows, setting.width

    def most_bytes(self, round: int) -> int:
        return 0

    def encode(self, context: Context, rows: torch.Tensor) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def decode(self, context: Context, data: torch.Tensor) -> torch.Tensor:
        if len(data):
            raise PayloadError(f"{len(data)} bytes where nothing is sent")
        return torch.zeros(self._shape)


@dataclass(frozen=True, kw_only=True)
class Isolated(HaloMethod):
    """Nothing is exchanged: rows of the halo are zeros, and so are the gradients that come back.

    The baseline that tells what the exchange is worth.
    """

    name: ClassVar[str] = "isolated"
    tag: ClassVar[int] = 103
    silent: ClassVar[bool] = True

    def channel(self, setting: ChannelSetting) -> RowChannel:
        return _Nothing(setting)
