"""Topologies of emulated clusters, and their text: ``hosts=4,bandwidth=100mbit``."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

from gradwire.errors import HyperparameterError

Rate = float | None
"""Bits per second; None: not limited."""

LEAST, MOST = 8e3, 6e11
"""Rates that a token bucket can limit to: above, 50 ms at the rate are more bytes than ``tc`` can count."""

_UNITS = {"bit": Decimal(1), "kbit": Decimal(10**3), "mbit": Decimal(10**6), "gbit": Decimal(10**9)}
# Decimal shifts the point exactly, so that a written rate reads back as the same float.
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)(bit|kbit|mbit|gbit)")

MOST_HOSTS = 200
KEYS = ("hosts", "bandwidth", "asymmetric", "groups", "between", "delay")
_HOST = re.compile(r"host(\d+)")


def parse_rate(text: str) -> Rate:
    """Read a bandwidth.

    Example:
        >>> parse_rate("100mbit"), parse_rate("unlimited")
        (100000000.0, None)

    Raises:
        HyperparameterError: the text is not a number with the unit bit, kbit, mbit or gbit, or the rate is below 8
            kbit/s or above 600 Gbit/s.
    """
    if text == "unlimited":
        return None
    found = _PATTERN.fullmatch(text.strip().lower())
    rate = float(Decimal(found[1]) * _UNITS[found[2]]) if found else 0.0
    if not LEAST <= rate <= MOST:
        raise HyperparameterError(
            f"bandwidth {text!r}: a number with bit, kbit, mbit or gbit is needed, such as 100mbit (per second, from"
            " 8kbit to 600gbit), or unlimited"
        )
    return rate


def format_rate(rate: Rate) -> str:
    """Return a bandwidth as text that :func:`parse_rate` reads back.

    Example:
        >>> format_rate(2.5e9), format_rate(None)
        ('2.5gbit', 'unlimited')
    """
    if rate is None:
        return "unlimited"
    exact = Decimal(repr(float(rate)))
    unit = next((u for u in ("gbit", "mbit", "kbit") if exact >= _UNITS[u]), "bit")
    return f"{plain(exact / _UNITS[unit])}{unit}"


def plain(number: Decimal) -> str:
    """Return a number as text without exponent or trailing zeros."""
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


@dataclass(frozen=True, kw_only=True)
class Topology:
    """An emulated cluster. A rate is in bits per second, None for no limit, and acts both ways unless it says so.

    Attributes:
        hosts: Number of hosts; each is a network namespace.
        bandwidth: Rate of every host's link.
        asymmetric: Rate at which hosts send, if it differs from the rate at which they receive (``bandwidth``).
        overrides: Rates of single hosts, by number: (send, receive).
        groups: Number of switches over which the hosts are spread evenly, in order; 1: one flat network.
        between: Rate of each group's link to the other groups.
        delay_s: Delay in one direction on every host's link; needs the kernel's netem.

    Raises:
        HyperparameterError: a number is out of range.
    """

    hosts: int = 4
    bandwidth: Rate = None
    asymmetric: Rate = None
    overrides: dict[int, tuple[Rate, Rate]] = field(default_factory=dict, hash=False)
    groups: int = 1
    between: Rate = None
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= MOST_HOSTS:
            raise HyperparameterError(f"hosts={self.hosts}: 1 to {MOST_HOSTS} are possible")
        if self.groups < 1 or self.hosts % self.groups:
            raise HyperparameterError(f"groups={self.groups}: {self.hosts} hosts cannot be spread over them evenly")
        if self.between is not None and self.groups == 1:
            raise HyperparameterError("between=... limits the links between groups: give groups=2 or more too")
        for host in self.overrides:
            if not 0 <= host < self.hosts:
                raise HyperparameterError(f"host{host}: the hosts are 0 to {self.hosts - 1}")
        if self.delay_s < 0:
            raise HyperparameterError(f"delay={self.delay_s}: must not be negative")

    def send_rate(self, host: int) -> Rate:
        """Return the rate at which a host may send."""
        if host in self.overrides:
            return self.overrides[host][0]
        return self.bandwidth if self.asymmetric is None else self.asymmetric

    def receive_rate(self, host: int) -> Rate:
        """Return the rate at which a host may receive."""
        return self.overrides[host][1] if host in self.overrides else self.bandwidth

    def group(self, host: int) -> int:
        """Return the number of a host's group."""
        return host * self.groups // self.hosts

    def with_bandwidth(self, rate: Rate) -> Topology:
        """Return the cluster with another bandwidth on every host that has no rate of its own."""
        return replace(self, bandwidth=rate)

    @classmethod
    def parse(cls, text: str) -> Topology:
        """Read ``hosts=4,bandwidth=100mbit,...``, as ``--lab`` takes it.

        Keys: hosts, bandwidth, asymmetric, groups, between, delay (in ms, such as ``delay=5ms``), and ``host2=10mbit``
        or ``host2=10mbit:100mbit`` (sends:receives) for the rate of a single host.

        Raises:
            HyperparameterError: the text is empty, a key is unknown or given twice, or a value is wrong.
        """
        if not text.strip(" ,"):
            raise HyperparameterError("an empty lab: name at least hosts=N, such as hosts=4,bandwidth=100mbit")
        fields: dict[str, Any] = {}
        overrides: dict[int, tuple[Rate, Rate]] = {}
        seen: set[str] = set()
        for part in filter(None, text.split(",")):
            key, equals, value = (piece.strip() for piece in part.partition("="))
            host = _HOST.fullmatch(key)
            if not equals or not value or (key not in KEYS and not host):
                raise HyperparameterError(
                    f"lab {part!r}: KEY=VALUE is needed, with one of {', '.join(KEYS)}, host0, host1, ..."
                )
            name = f"host{int(host[1])}" if host else key
            if name in seen:
                raise HyperparameterError(f"lab {text!r}: {name} is given twice")
            seen.add(name)
            if host:
                send, _, receive = value.partition(":")
                overrides[int(host[1])] = (parse_rate(send), parse_rate(receive or send))
            elif key in ("hosts", "groups"):
                fields[key] = _whole(key, value)
            elif key == "delay":
                fields["delay_s"] = parse_delay(value)
            else:
                fields[key] = parse_rate(value)
        if "asymmetric" in fields and fields["asymmetric"] is None:
            raise HyperparameterError(
                "asymmetric=unlimited: a rate is needed; give hosts that may send without limit a link of their own,"
                " such as host0=unlimited:100mbit"
            )
        return cls(**fields, overrides=overrides)

    def spec(self) -> str:
        """Return the cluster as text that :meth:`parse` reads back."""
        parts = [f"hosts={self.hosts}", f"bandwidth={format_rate(self.bandwidth)}"]
        if self.asymmetric is not None:
            parts.append(f"asymmetric={format_rate(self.asymmetric)}")
        for host, (send, receive) in sorted(self.overrides.items()):
            parts.append(f"host{host}={format_rate(send)}:{format_rate(receive)}")
        if self.groups > 1:
            parts += [f"groups={self.groups}", f"between={format_rate(self.between)}"]
        if self.delay_s:
            parts.append(f"delay={plain(Decimal(repr(self.delay_s)) * 1000)}ms")
        return ",".join(parts)


def parse_delay(text: str) -> float:
    """Read a delay such as ``5ms``, and return seconds.

    Raises:
        HyperparameterError: the text is not a number of milliseconds.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)ms", text.strip())
    if not found:
        raise HyperparameterError(f"delay {text!r}: milliseconds are needed, such as 5ms")
    return float(Decimal(found[1]) / 1000)


def _whole(key: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise HyperparameterError(f"{key}={value}: a whole number is needed") from None
