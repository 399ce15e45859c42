"""Bandwidths as iproute2 writes them: ``100mbit``, ``1gbit``, ``unlimited``."""

from __future__ import annotations

import re

from gradwire.errors import HyperparameterError

__all__ = ["Rate", "format_rate", "parse_rate"]

Rate = float | None
"""Bits per second; None is not limited."""

_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)(bit|kbit|mbit|gbit)")


def parse_rate(text: str) -> Rate:
    """Read a bandwidth.

    Example:
        >>> parse_rate("100mbit"), parse_rate("unlimited")
        (100000000.0, None)

    Raises:
        HyperparameterError: it is not a number with one of the units bit, kbit, mbit, gbit, or below 8 kbit/s.
    """
    if text == "unlimited":
        return None
    found = _PATTERN.fullmatch(text.strip().lower())
    rate = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if rate < 8000:
        raise HyperparameterError(
            f"bandwidth {text!r}: a number with bit, kbit, mbit or gbit is needed, such as 100mbit (per second, at"
            " least 8kbit), or unlimited"
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
    for unit in ("gbit", "mbit", "kbit"):
        if rate >= _UNITS[unit]:
            return f"{rate / _UNITS[unit]:g}{unit}"
    return f"{rate:g}bit"
