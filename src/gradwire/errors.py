"""The exceptions that gradwire raises on purpose; each message names both parties and the remedy."""

from __future__ import annotations

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
    """Bytes that arrived are not the payload that was expected; nothing was decoded from them."""


class BackendError(GradwireError, ImportError):
    """A kernel backend or an optional dependency is missing; the message holds the command that installs it."""


class RankMismatchError(GradwireError):
    """Ranks were started with different versions, methods, options or parameter layouts."""


class ExchangeError(GradwireError):
    """An exchange failed on some rank; the message names the rank, the bucket and the round."""
