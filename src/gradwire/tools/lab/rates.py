"""Bandwidths as iproute2 writes them: ``100mbit``, ``1gbit``, ``unlimited``."""

from __future__ import annotations

import re
from decimal import Decimal

from gradwire.errors import HyperparameterError

__all__ = ["Rate", "format_rate", "parse_rate"]

Rate = float | None
"""Bits per second; None is not limited."""

LEAST, MOST = 8e3, 6e11
"""What a token bucket can do: above, 50 ms of the rate are more bytes than ``tc`` can count."""

_UNITS = {"bit": Decimal(1), "kbit": Decimal(10**3), "mbit": Decimal(10**6), "gbit": Decimal(10**9)}
# Decimal shifts the point exactly, so that what is written reads back as the same float.
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)(bit|kbit|mbit|gbit)")


def parse_rate(text: str) -> Rate:
    """Read a bandwidth.

    Example:
        >>> parse_rate("100mbit"), parse_rate("unlimited")
        (100000000.0, None)

    Raises:
        HyperparameterError: it is not a number with one of the units bit, kbit, mbit, gbit, or below 8 kbit/s, or above
            600 Gbit/s.
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
    """Write a bandwidth so that :func:`parse_rate` reads it back.

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
    """Write a number without exponent or trailing zeros."""
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
