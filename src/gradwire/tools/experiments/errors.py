"""Errors of the experiments: what was asked for, what the data held, what a run ended with."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from gradwire.errors import GradwireError


class UsageError(GradwireError, ValueError):
    """The command or call asks for something that does not exist or cannot be done; nothing was started."""


class DataError(GradwireError):
    """A data file is missing, truncated or not what its name says; the message holds expected and found."""


class RunError(GradwireError):
    """A run folder cannot be written, read or continued."""


class TrainingError(GradwireError):
    """Training left the finite numbers; the message names the step and the parameter or loss."""


class WorkerError(GradwireError):
    """A worker process ended before its work was done; the others were ended too."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the tail of a sentence: the known name nearest to a wrong one, and the list of all.

    Example:
        >>> nearest("digts", ["digits", "text"])
        'did you mean digits? Known: digits, text'
    """
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{hint}Known: {', '.join(names)}"
