"""The interface of methods for the rows of halos, and the methods that send all rows or none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from gradwire.errors import PayloadError
from gradwire.exchange.method import Method, require
from gradwire.exchange.protocols import Context, Memory
from gradwire.kernels import Kernels
from gradwire.methods.casts.cast import FP32
from gradwire.methods.gossip.vector_coder import VectorCoder, check_operator


@dataclass(frozen=True, kw_only=True)
class ChannelSetting:
    """A channel for rows of one layer, from one worker to another, in the forward or backward pass.

    Attributes:
        name: Name of the channel, the key of its random numbers and of its memory.
        boundary: Name of the rows, the same for those that go forward and for their gradients that come back.
        rows: Number of rows.
        width: Number of values in a row.
        seed: Seed of all random numbers.
        steps: Number of steps of the training; None if unknown.
        kernels: Kernels that the operators of the method call.
        drawn: What the channels of a plan have drawn for the current step, for other channels that need the same.
    """

    name: str
    boundary: str
    rows: int
    width: int
    seed: int
    steps: int | None
    kernels: Kernels
    drawn: dict[Hashable, torch.Tensor] = field(default_factory=dict)


class RowChannel(ABC):
    """Both ends of a channel: the sender encodes rows, and the receiver, with the same setting, decodes them."""

    @abstractmethod
    def most_bytes(self, round: int) -> int:
        """Return the most bytes that the rows take in a round; more rows never have fewer."""

    @abstractmethod
    def encode(self, context: Context, rows: torch.Tensor) -> torch.Tensor:
        """Return the bytes of rows, float32 ``[rows, width]``, and stage what the channel remembers of them."""

    @abstractmethod
    def decode(self, context: Context, data: torch.Tensor) -> torch.Tensor:
        """Return the rows that the receiver uses, and stage what the channel remembers of them.

        Raises:
            PayloadError: the bytes are not those of so many rows.
        """


@dataclass(frozen=True, kw_only=True)
class HaloMethod(ABC):
    """Base of the methods for the rows of halos. Subclasses are final, and ``repr`` is their spec."""

    name: ClassVar[str]
    """The lower-case name that stands for the defaults."""
    tag: ClassVar[int]
    """Unique number in the wire format, 1 to 126."""
    silent: ClassVar[bool] = False
    """Whether nothing is exchanged, so that the rows of a halo are zeros."""
    gauges: ClassVar[tuple[str, ...]] = ()
    """Names of the numbers that its channels report in every round."""

    @property
    def kernels(self) -> tuple[str, ...]:
        """The families of kernels that it calls."""
        return ()

    def check_steps(self, steps: int | None) -> None:  # noqa: B027
        """Refuse a number of steps of the training; None if it is unknown.

        Raises:
            IncompatibleError: the method needs to know it, or cannot work with this one.
        """

    @property
    def follows_loss(self) -> bool:
        """Whether it needs the loss of every step, summed over the workers."""
        return False

    def follow(self, memory: Memory, loss: float) -> None:  # noqa: B027
        """Update the state that is the same on all workers by the loss of a step; by default do nothing.

        The changes are staged in ``memory``.

        Args:
            memory: State of one worker.
            loss: Sum of the workers' losses of the step, the same bits on all of them.
        """

    @abstractmethod
    def channel(self, setting: ChannelSetting) -> RowChannel:
        """Return the channel for a setting."""


def checked_operator(owner: str, values: object) -> Method:
    """Return a field that holds an operator on one vector.

    Raises:
        HyperparameterError: the field does not hold a method.
        IncompatibleError: one sender and one receiver cannot use the method.
    """
    require(isinstance(values, Method), owner, f"a method is needed, such as FP32() or QSGDinf(), not {values!r}")
    check_operator(owner, values)
    return values  # type: ignore[return-value]


class _AllRows(RowChannel):
    """Sends all rows as one vector."""

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
    """All rows in every step, encoded by an operator on one vector; the rows for one worker are one vector.

    ``Halo(compressor=FP32())`` is full communication. The spec of an operator, such as ``"bf16"``, stands for this
    method around it.

    Args:
        compressor: The operator: a cast, ``RandK`` or any method that is a compressor with scales of its own.

    Raises:
        HyperparameterError: ``compressor`` is not a method.
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
        """Families of kernels that the operator calls."""
        return self.compressor.traits.kernels

    def channel(self, setting: ChannelSetting) -> RowChannel:
        return _AllRows(self.compressor, setting)


class _Nothing(RowChannel):
    """Sends nothing; the receiver gets zeros."""

    def __init__(self, setting: ChannelSetting) -> None:
        self._shape = setting.rows, setting.width

    def most_bytes(self, round: int) -> int:
        return 0

    def encode(self, context: Context, rows: torch.Tensor) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device="cpu")

    def decode(self, context: Context, data: torch.Tensor) -> torch.Tensor:
        if len(data):
            raise PayloadError(f"{len(data)} bytes have arrived, but nothing is sent")
        return torch.zeros(self._shape, dtype=torch.float32, device="cpu")


@dataclass(frozen=True, kw_only=True)
class Isolated(HaloMethod):
    """Nothing is exchanged: rows of the halo are zeros, and so are the gradients that come back.

    This is the baseline that shows the value of the exchange.
    """

    name: ClassVar[str] = "isolated"
    tag: ClassVar[int] = 103
    silent: ClassVar[bool] = True

    def channel(self, setting: ChannelSetting) -> RowChannel:
        return _Nothing(setting)
