"""The cost of a message on the network, and the number of messages that wait for one another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from gradwire.errors import HyperparameterError


@dataclass(frozen=True, kw_only=True)
class LinkCost:
    """The cost for every rank of a message to all others, while all of them send.

    ::

        seconds of a message of n bytes = message_s + n / bytes_per_s

    Attributes:
        message_s: Seconds of a message without its bytes.
        bytes_per_s: Bytes of a message per second. Each of the N - 1 other ranks gets a copy, and the ranks of a host
            share its network link: so this is the bandwidth of a host divided by the number of copies that leave it.

    Raises:
        HyperparameterError: a number is not finite, ``message_s`` is negative, or ``bytes_per_s`` is not above 0.

    Example:
        >>> LinkCost(message_s=0.001, bytes_per_s=12.5e6).fixed_bytes
        12500.0
    """

    message_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        for name, least in (("message_s", "from 0 on"), ("bytes_per_s", "above 0")):
            value = getattr(self, name)
            known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not known or value < 0 or (value == 0 and name == "bytes_per_s"):
                raise HyperparameterError(f"LinkCost: {name} is a finite number {least}, not {value!r}")
            object.__setattr__(self, name, float(value))

    @property
    def fixed_bytes(self) -> float:
        """Number of bytes whose time equals ``message_s``."""
        return self.message_s * self.bytes_per_s


@dataclass(frozen=True)
class Delays:
    """The critical path of an exchange in one-way delays, counted by :mod:`gradwire.exchange.drivers.delays`.

    It is the longest chain of messages over all ranks each of which can only leave when the one before has arrived, if
    every message takes one delay and everything else no time. A receiver's request for a row is such a message where
    the transport sends nothing without one, as Gloo does.

    Attributes:
        phases: Delays by phase, in the order in which the path passes them first: "agreement" (maxima and minima of a
            few values, such as scalers), "lengths" (of rows whose length depends on data), "rows to each" (another row
            for each rank, such as its shard), "rows to all", "sum" (the backend's all-reduce), "broadcast" and
            "neighbours" (rows between two ranks).

    Example:
        >>> Delays({"agreement": 2, "rows to each": 2, "rows to all": 2}).count
        6
    """

    phases: Mapping[str, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """One-way delays in all phases."""
        return sum(self.phases.values())

    def __str__(self) -> str:
        """Return the delays of each phase, such as ``2 agreement + 4 sum``."""
        return " + ".join(f"{delays} {phase}" for phase, delays in self.phases.items()) or "0"
