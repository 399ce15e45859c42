"""Warnings of a link, by the logger "gradwire": each once, and from one rank where all ranks know of it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch.distributed as dist

from gradwire.errors import ExchangeError, GradwireError, PayloadError
from gradwire.exchange.drivers import Lane, WireError
from gradwire.link.peers.circle import Circle, Wait, brief

LONG_S = 1.0
"""Seconds of compilation that are long enough to wonder about."""


class WarnOnce:
    """Warnings of one link: the first of each kind, since what goes wrong in one round does so in most.

    Args:
        rank: This rank, among all of the program.
        speaker: The rank that gives warnings of what all ranks know: the lowest of those that take part.
    """

    def __init__(self, rank: int = 0, speaker: int = 0) -> None:
        self.rank, self._speaks = rank, rank == speaker
        self._lock = threading.Lock()
        self._given: set[str] = set()

    def once(self, kind: str, text: str) -> None:
        """Warn of what all ranks know, on one of them, unless it was warned of that kind before."""
        if self._first(kind) and self._speaks:
            logging.getLogger("gradwire").warning("%s", text)

    def here(self, kind: str, text: str) -> None:
        """Warn of what this rank alone knows, with its number, unless it was warned of that kind before."""
        if self._first(kind):
            logging.getLogger("gradwire").warning("rank %d: %s", self.rank, text)

    def compiled(self, seconds: float) -> None:
        """Tell of a wait for the compiler that is long enough to wonder about."""
        if seconds > LONG_S:
            self.once("compiled", f"compiled kernels in {seconds:.1f} s; they are kept on disk")

    def _first(self, kind: str) -> bool:
        with self._lock:
            is_first = kind not in self._given
            self._given.add(kind)
        return is_first


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

    def __init__(self, circle: Circle, lanes: Sequence[Lane]) -> None:
        self.error: GradwireError | None = None
        self.circle, self._lanes = circle, lanes
        self._lock = threading.Lock()

    def record(self, error: Exception, where: str) -> GradwireError:
        """Turn an exception into the link's error, and tell the other ranks of it before they notice."""
        with self._lock:
            if self.error is None:
                self.error = self._explain(error, where)
                self.error.__cause__ = _without_frames(error)
                # Other ranks may be waiting in lanes that are idle here.
                for lane in self._lanes:
                    lane.hang_up()
            return _without_frames(self.error)

    @contextlib.contextmanager
    def naming(self, where: str) -> Iterator[Wait]:
        """Turn the failure of a collective that is none of the link's own lanes into the link's error.

        The body is given a function that waits for one; see :meth:`~gradwire.link.peers.circle.Circle.wait`.

        Raises:
            ExchangeError: the collective in the body broke; the message names the rank that broke it.
        """
        try:
            yield self.circle.wait
        except (RuntimeError, dist.DistError) as error:
            raise self.record(WireError(str(error)), where) from error

    def told(self) -> GradwireError | None:
        """Return the link's error, if it has one, to be raised or kept by others.

        A rank that has ended without order breaks the link, also where no exchange of it has failed yet.
        """
        if self.error is None and self.circle.lost():
            return self.record(WireError("no exchange was under way"), "its next exchange")
        return None if self.error is None else _without_frames(self.error)

    def refuse(self) -> None:
        """Raise the link's error, if it has one."""
        if self.error is not None:
            raise _without_frames(self.error)

    def _explain(self, error: Exception, where: str) -> GradwireError:
        rank = self.circle.rank
        if isinstance(error, WireError):
            said = f"rank {rank} could not go on at {where}: {self.circle.explain()} [{brief(error)}]"
            return ExchangeError(said)
        if isinstance(error, PayloadError):
            error = error.numbered(self.circle.ranks)
        self.circle.failed(f"at {where}: {type(error).__name__}: {error}")
        if isinstance(error, GradwireError):
            return type(error)(f"rank {rank}, {where}: {error}")
        return ExchangeError(f"rank {rank} failed at {where}: {type(error).__name__}: {error}")


def _without_frames(error: Error) -> Error:
    """Copy an exception, and what caused it, but not where they were raised."""
    # Not by copy.copy, which calls a constructor that may make the message anew.
    bare = type(error).__new__(type(error), *error.args)
    bare.args = error.args
    bare.__dict__.update(error.__dict__)
    if error.__cause__ is not None:
        bare.__cause__ = _without_frames(error.__cause__)
    return bare
