"""What a link does when an exchange breaks: name the rank and the bucket, tell the others, never hang."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import TypeVar

from gradwire.drivers import Lane, WireError
from gradwire.errors import ExchangeError, GradwireError
from gradwire.runtime.heartbeat import Failure, Heartbeat

__all__ = ["Failures", "place"]

Error = TypeVar("Error", bound=BaseException)


def place(bucket: int, chunk: int | None, round: int, names: Sequence[str]) -> str:
    """Describe where an exchange was, for people."""
    part = "" if chunk is None else f", chunk {chunk}"
    first = names[0] if names else "nothing"
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"bucket {bucket}{part} ({first}{more}), round {round}"


class Failures:
    """The first failure of a link; every later exchange is refused with it.

    What is raised is a copy. An exception gathers the frames that it passes, and the one that a link keeps would keep
    the whole program that it broke: its module holds the link, through C++, where no collector looks.
    """

    def __init__(self, heartbeat: Heartbeat, lanes: Sequence[Lane]) -> None:
        self.error: GradwireError | None = None
        self._rank, self._heartbeat, self._lanes = heartbeat.rank, heartbeat, lanes
        self._lock = threading.Lock()

    def record(self, error: Exception, where: str) -> GradwireError:
        """Turn an exception into the link's error, and report it to the other ranks if it began here."""
        with self._lock:
            if self.error is None:
                self.error = self._explain(error, where)
                self.error.__cause__ = _without_frames(error)
                # Other ranks may be waiting in lanes that are idle here.
                for lane in self._lanes:
                    lane.hang_up()
            return _without_frames(self.error)

    def told(self) -> GradwireError | None:
        """Return the link's error, if it has one, to be raised or kept by others."""
        return None if self.error is None else _without_frames(self.error)

    def refuse(self) -> None:
        """Raise the link's error, if it has one."""
        if self.error is not None:
            raise _without_frames(self.error)

    def _explain(self, error: Exception, where: str) -> GradwireError:
        if isinstance(error, WireError):
            why = f"{self._heartbeat.explain()} [{_brief(error)}]"
            return ExchangeError(f"rank {self._rank} could not go on at {where}: {why}")
        self._heartbeat.report(Failure(self._rank, where, f"{type(error).__name__}: {error}"))
        if isinstance(error, GradwireError):
            return type(error)(f"rank {self._rank}, {where}: {error}")
        return ExchangeError(f"rank {self._rank} failed at {where}: {type(error).__name__}: {error}")


def _without_frames(error: Error) -> Error:
    """Copy an exception, and what caused it, but not where they were raised."""
    # Not by copy.copy, which calls a constructor that may make the message anew.
    bare = type(error).__new__(type(error), *error.args)
    bare.args = error.args
    bare.__dict__.update(error.__dict__)
    if error.__cause__ is not None:
        bare.__cause__ = _without_frames(error.__cause__)
    return bare


def _brief(error: Exception) -> str:
    """Keep the first sentence of what the backend said, without the place in its source."""
    text = re.sub(r"\[/\S+\]\s*", "", str(error))
    return text.split(". ")[0].strip()
