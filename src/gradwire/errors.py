"""Exceptions that gradwire raises; each message has the cause, the parties involved and the remedy."""

from __future__ import annotations

from collections.abc import Sequence

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
