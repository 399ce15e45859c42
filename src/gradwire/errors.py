"""The exceptions that gradwire raises on purpose; each message names both parties and the remedy."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "BackendError",
    "ExchangeError",
    "GradwireError",
    "HyperparameterError",
    "IncompatibleError",
    "PayloadError",
    "RankMismatchError",
]


class GradwireError(Exception):
    """Base of every error that gradwire raises on purpose."""


class HyperparameterError(GradwireError, ValueError):
    """A method's name, field or value is not one that exists or makes sense."""


class IncompatibleError(GradwireError):
    """Two things that were asked for cannot work together (a method, a module, a protocol, a mode of DDP)."""


class PayloadError(GradwireError):
    """Bytes that arrived are not the payload that was expected; nothing was decoded from them.

    Args:
        message: What is wrong; its first ``{sender}`` stands for "rank R", with R the sender.
        sender: Rank that sent the bytes, as the group that exchanged them numbers its ranks; None: nobody is named.
    """

    def __init__(self, message: str, sender: int | None = None) -> None:
        super().__init__(message if sender is None else message.replace("{sender}", f"rank {sender}", 1))
        self._message, self.sender = message, sender

    def numbered(self, ranks: Sequence[int]) -> PayloadError:
        """Return the error of an exchange among some ranks with its sender's place among them replaced by its rank.

        Example:
            >>> print(PayloadError("payload from {sender}: too long", 1).numbered((1, 3)))
            payload from rank 3: too long
        """
        return self if self.sender is None else PayloadError(self._message, ranks[self.sender])


class BackendError(GradwireError, ImportError):
    """A kernel backend or an optional dependency is missing; the message holds the command that installs it."""


class RankMismatchError(GradwireError):
    """Ranks were started with different versions, methods, options or parameter layouts."""


class ExchangeError(GradwireError):
    """An exchange failed on some rank; the message names the rank, the bucket and the round."""
