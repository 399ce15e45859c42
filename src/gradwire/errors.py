"""Exceptions that gradwire raises; each message has the cause, the parties involved and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

__all__ = [
    "BackendError",
    "ExchangeError",
    "GradwireError",
    "HyperparameterError",
    "IncompatibleError",
    "LeftOutError",
    "PayloadError",
    "RankMismatchError",
]


class GradwireError(Exception):
    """Base class of all errors that gradwire raises."""


class HyperparameterError(GradwireError, ValueError):
    """The name of a method or field is unknown, or a value is invalid."""


class IncompatibleError(GradwireError):
    """Requested features cannot be combined (a method, a module, a protocol, a mode of DDP)."""


class PayloadError(GradwireError):
    """Received bytes are not the expected payload; nothing was decoded from them.

    Args:
        message: Description of the error; its first ``{sender}`` is replaced by "rank R", with R the sender.
        sender: Rank that sent the bytes, in the group that exchanged them; None: the message has no sender.
    """

    def __init__(self, message: str, sender: int | None = None) -> None:
        super().__init__(message if sender is None else message.replace("{sender}", f"rank {sender}", 1))
        self._message, self.sender = message, sender

    def numbered(self, ranks: Sequence[int]) -> PayloadError:
        """Return the error with the sender, a place among the ranks of an exchange, replaced by its rank.

        Example:
            >>> print(PayloadError("payload from {sender}: too long", 1).numbered((1, 3)))
            payload from rank 3: too long
        """
        return self if self.sender is None else PayloadError(self._message, ranks[self.sender])


class BackendError(GradwireError, ImportError):
    """A kernel backend or an optional dependency is missing; the message has the command that installs it."""


class RankMismatchError(GradwireError):
    """Ranks were started with different versions, methods, options or parameter layouts."""


class ExchangeError(GradwireError):
    """An exchange failed on some rank; the message has the rank, the bucket and the round."""


class LeftOutError(ExchangeError):
    """The members of a training went on without this worker, and have taken it in again with their state.

    The gradient that it has belongs to parameters that it no longer has: compute it again.
    """


MOST_NAME = 100
"""Largest number of characters of an unknown name that are compared with known ones."""


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the part of a message that has the known name nearest to a wrong one, or "" if none is near.

    Capital letters make no difference.

    Example:
        >>> did_you_mean("terngrd", ["terngrad", "qsgd"]), did_you_mean("foo", ["terngrad", "qsgd"])
        ("; did you mean 'terngrad'?", '')
    """
    names = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name[:MOST_NAME].lower(), list(names), n=1, cutoff=cutoff)
    return f"; did you mean {names[near[0]]!r}?" if near else ""


def unknown(what: str, name: str, known: Iterable[str], where: str = "") -> str:
    """Return the message about an unknown name, with the nearest known one and a list of all.

    Args:
        what: What has the name, such as "method".
        name: The name.
        known: The known names.
        where: What the name belongs to, such as " of TernGrad".

    Example:
        >>> unknown("field", "clp", ["clip", "ahead"], " of TernGrad")
        "unknown field 'clp' of TernGrad; did you mean 'clip'? (known: clip, ahead)"
    """
    names = list(known)
    return f"unknown {what} {shortened(name)!r}{where}{did_you_mean(name, names)} (known: {', '.join(names) or 'none'})"


def shortened(text: str, most: int = 600) -> str:
    """Return a text for a message, without its middle if it is longer than ``most`` characters.

    Example:
        >>> shortened("a" * 100, 40)
        'aaaaaaaaaaaaaaaa... [80 characters] ...aaaa'
    """
    if len(text) <= most:
        return text
    head, tail = most * 2 // 5, most // 10
    return f"{text[:head]}... [{len(text) - head - tail} characters] ...{text[-tail:]}"
