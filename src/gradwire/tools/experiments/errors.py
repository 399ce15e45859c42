"""Errors of the experiments, and checks of names."""

from __future__ import annotations

from collections.abc import Iterable

from gradwire.errors import GradwireError, unknown


class UsageError(GradwireError, ValueError):
    """A command or call asks for something that does not exist or cannot be done; nothing was started."""


class DataError(GradwireError):
    """A data file is missing, truncated or in another format; the message says what was expected and found."""


class RunError(GradwireError):
    """A run folder cannot be written, read or continued."""


class TrainingError(GradwireError):
    """A parameter or the loss is no longer finite; the message names it and the step."""


class WorkerError(GradwireError):
    """A worker process ended before it was done, and the others were ended."""


def check_known(what: str, value: str, known: Iterable[str], owner: str = "") -> None:
    """Refuse a value that is none of the known ones.

    Args:
        what: Name of the setting, for the message.
        value: The value that was given.
        known: The values that there are.
        owner: What the setting belongs to, for the message: "" or " of ...".

    Raises:
        UsageError: the value is not known; the message names the nearest one.
    """
    if value not in known:
        raise UsageError(unknown(what, value, known, owner))
