"""Warnings and errors of a link.

Warnings go to the logger "gradwire": each once, and from one rank if all ranks know of it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import traceback
import weakref
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch.distributed as dist

from gradwire.errors import ExchangeError, GradwireError, PayloadError
from gradwire.exchange.drivers import Lane, WireError
from gradwire.link.peers.circle import Circle, Wait, brief

LONG_S = 1.0
"""Seconds of compilation from which on it is logged."""


class WarnOnce:
    """Warnings of one link: only the first of each kind, since the same problem returns in most rounds.

    Args:
        rank: This rank, among all of the program.
        speaker: The rank that logs warnings that concern all ranks: the lowest of those that take part.
    """

    def __init__(self, rank: int = 0, speaker: int = 0) -> None:
        self.take_place(rank, speaker)
        self._lock = threading.Lock()
        self._given: set[str] = set()

    def take_place(self, rank: int, speaker: int) -> None:
        """Set this rank, and the one that speaks for all."""
        self.rank, self._speaks = rank, rank == speaker

    def once(self, kind: str, text: str) -> None:
        """Log a warning that concerns all ranks, on one of them, unless one of that kind was logged before."""
        if self._first(kind) and self._speaks:
            logging.getLogger("gradwire").warning("%s", text)

    def here(self, kind: str, text: str) -> None:
        """Log a warning of this rank alone, with its number, unless one of that kind was logged before."""
        if self._first(kind):
            logging.getLogger("gradwire").warning("rank %d: %s", self.rank, text)

    def compiled(self, seconds: float) -> None:
        """Log the seconds of compilation if they are more than :data:`LONG_S`."""
        if seconds > LONG_S:
            self.once("compiled", f"compiled kernels in {seconds:.1f} s; they are kept on disk")

    def _first(self, kind: str) -> bool:
        with self._lock:
            is_first = kind not in self._given
            self._given.add(kind)
        return is_first


Error = TypeVar("Error", bound=BaseException)


def place(bucket: int, chunk: int | None, round: int, names: Sequence[str]) -> str:
    """Describe the place of an exchange, for messages."""
    part = "" if chunk is None else f", chunk {chunk}"
    first = names[0] if names else "nothing"
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"bucket {bucket}{part} ({first}{more}), round {round}"


class Failures:
    """The first error of a link; every later exchange raises it again.

    A copy is raised. An exception keeps the frames that it passes through, so that the link's own would keep the whole
    training alive: the module holds the link through C++, which the garbage collector does not see.
    """

    def __init__(self, circle: Circle, lanes: Sequence[Lane]) -> None:
        self._lock = threading.Lock()
        self.connect(circle, lanes)

    def connect(self, circle: Circle, lanes: Sequence[Lane]) -> None:
        """Begin anew without an error, over other connections."""
        self.error: GradwireError | None = None
        self.circle, self._lanes, self._parted = circle, lanes, False
        circle.break_by(weakref.WeakMethod(self.break_off))
        for lane in lanes:
            lane.on_failure(weakref.WeakMethod(self._failed_between))

    def forget(self) -> None:
        """Forget the error: these connections have ended, and others will be made in their place."""
        with self._lock:
            self.error, self._parted = None, True

    def break_off(self) -> None:
        """Break off what the lanes still wait for, after a rank was lost: Gloo may never end it."""
        for lane in self._lanes:
            if lane.busy:
                # A transport that has no such means ends its operations by itself.
                with contextlib.suppress(TypeError):
                    lane.abort()

    def record(self, error: Exception, where: str) -> GradwireError:
        """Turn an exception into the link's error, and report it to the other ranks."""
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
        """Turn the failure of a collective outside the link's lanes into the link's error.

        The context yields a function that waits for a collective; see :meth:`~gradwire.link.peers.circle.Circle.wait`.

        Raises:
            ExchangeError: the collective in the body broke; the message names the rank that broke it.
        """
        try:
            yield self.circle.wait
        except (RuntimeError, dist.DistError) as error:
            raise self.record(WireError(str(error)), where) from error

    def told(self) -> GradwireError | None:
        """Return a copy of the link's error, or None.

        A rank that has ended abnormally breaks the link, even if no exchange has failed yet.
        """
        if self.error is None and not self._parted and self.circle.lost():
            return self.record(WireError("no exchange was under way"), "its next exchange")
        return None if self.error is None else _without_frames(self.error)

    def refuse(self) -> None:
        """Raise the link's error, if it has one."""
        if self.error is not None:
            raise _without_frames(self.error)

    def _failed_between(self, lane: Lane, error: Exception) -> None:
        # A lane of other ranks, which this link has left, may still end.
        if not self._parted and any(lane is one for one in self._lanes):
            self.record(error, "the preparation of its next exchange")

    def _explain(self, error: Exception, where: str) -> GradwireError:
        rank = self.circle.rank
        if isinstance(error, WireError):
            said = f"rank {rank} could not go on at {where}: {self.circle.explain()} [{brief(error)}]"
            return ExchangeError(said)
        if isinstance(error, PayloadError):
            error = error.numbered(self.circle.ranks)
        place = _own_place(error)
        self.circle.failed(f"at {where}: {type(error).__name__}: {error}{place}")
        if isinstance(error, GradwireError):
            return type(error)(f"rank {rank}, {where}: {error}{place}")
        return ExchangeError(f"rank {rank} failed at {where}: {type(error).__name__}: {error}{place}")


_NOT_OWN = {"gradwire", "torch", "numpy", "numba", "triton", "threading", "contextlib"}
"""Top-level modules whose frames say nothing about the code of a method from elsewhere."""


def _own_place(error: Exception) -> str:
    """Return where an exception passed last through the code of a method from elsewhere, as a part of a message.

    The link's error crosses threads without its frames, and PyTorch keeps no more of it than its text.
    """
    places = [
        f" ({frame.f_code.co_filename}, line {line}, in {frame.f_code.co_name})"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _NOT_OWN
    ]
    return places[-1] if places else ""


def _without_frames(error: Error) -> Error:
    """Copy an exception and its causes without their tracebacks."""
    # copy.copy would call the constructor, which may format the message a second time.
    bare = type(error).__new__(type(error), *error.args)
    bare.args = error.args
    bare.__dict__.update(error.__dict__)
    if error.__cause__ is not None:
        bare.__cause__ = _without_frames(error.__cause__)
    return bare
