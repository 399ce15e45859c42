"""The texts of rates, times and shares, such as ``100mbit``, ``20ms`` and ``0.1%``; all read back as the same float."""

from __future__ import annotations

import re
from decimal import Decimal

from gradwire.errors import HyperparameterError

Rate = float | None
"""Bits per second; None: not limited."""

LEAST, MOST = 8e3, 6e11
"""Rates that a token bucket can limit to: above, 50 ms at the rate are more bytes than ``tc`` can count."""

_UNITS = {"bit": Decimal(1), "kbit": Decimal(10**3), "mbit": Decimal(10**6), "gbit": Decimal(10**9)}
# Decimal shifts the point exactly, so that a written rate reads back as the same float.
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)(bit|kbit|mbit|gbit)")


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


def check_rate(name: str, rate: Rate) -> None:
    """Refuse a rate that a token bucket cannot limit to.

    Raises:
        HyperparameterError: the rate is below 8 kbit/s or above 600 Gbit/s.
    """
    if rate is not None and not LEAST <= rate <= MOST:
        raise HyperparameterError(
            f"{name}={rate:g}: bits per second from {LEAST:g} (8kbit) to {MOST:g} (600gbit) are possible, or None for"
            " no limit"
        )


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


def parse_rates(text: str) -> tuple[Rate, Rate]:
    """Read the rates of a link: ``10mbit`` both ways, or ``10mbit:100mbit``, sends:receives."""
    send, _, receive = text.partition(":")
    return parse_rate(send), parse_rate(receive or send)


def parse_delay(text: str) -> float:
    """Read a delay such as ``5ms``, and return seconds.

    Raises:
        HyperparameterError: the text is not a number of milliseconds.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)ms", text.strip())
    if not found:
        raise HyperparameterError(f"delay {text!r}: milliseconds are needed, such as 5ms")
    return float(Decimal(found[1]) / 1000)


def format_delay(seconds: float) -> str:
    """Return a delay as text that :func:`parse_delay` reads back."""
    return f"{plain(Decimal(repr(seconds)) * 1000)}ms"


def parse_share(text: str) -> float:
    """Read a share such as ``0.1%``.

    Example:
        >>> parse_share("0.1%")
        0.001

    Raises:
        HyperparameterError: the text is not a number of per cent, or above 100 %.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)%", text.strip())
    share = float(Decimal(found[1]) / 100) if found else 2.0
    if share > 1.0:
        raise HyperparameterError(f"share {text!r}: per cent are needed, such as 0.1%, and at most 100%")
    return share


def format_share(share: float) -> str:
    """Return a share as text that :func:`parse_share` reads back."""
    return f"{plain(Decimal(repr(share)) * 100)}%"


def plain(number: Decimal) -> str:
    """Return a number as text without exponent or trailing zeros."""
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
