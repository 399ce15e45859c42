"""The ranks that one link depends on, and what to say where one of them breaks it."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, TypeAlias

import torch.distributed as dist

from gradwire.errors import ExchangeError
from gradwire.exchange.drivers import Lane
from gradwire.link.peers.blame import BECAUSE, CLOSED, FAILED, Blame, Notice
from gradwire.link.peers.watch import Watch, group_store, without_store

PATIENCE_S = 3.0
"""How long a rank whose collective broke waits for what says why."""

STRANGE_S = 2.0
"""How long it waits for that where there are ranks that it has not met."""

ORDER_S = 1.0
"""How long it waits for more where all that it knows is that a rank ended in order."""

RECENT_S = 10.0
"""For how long a failure of another link may be why a rank is missing in this one."""

SLICE_S = 0.5
"""How long a rank waits for a collective before it looks whether others have ended."""

Wait: TypeAlias = Callable[[dist.Work], None]
"""Waits for a collective."""

SETTLE_S = 0.1
"""How long it then waits for ranks that end at the same time."""


class Circle:
    """A process group, seen from one of its ranks, that the others' ends are told of.

    All numbers that people see are global ranks: those within the group mean nothing to who started the processes.

    Args:
        group: Of the link.
        beside: Global ranks beyond those of the group whose end breaks the link, too.

    Attributes:
        ranks: Global ranks of the group, in the order of its own.
        place: This rank within the group.
        rank: This rank's global number.
        token: Of the link; empty before it has one.
    """

    def __init__(self, group: dist.ProcessGroup, beside: Iterable[int] = ()) -> None:
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.place, self.world_size = group.rank(), group.size()
        self.rank = self.ranks[self.place]
        self.token = ""
        self._depends = {*self.ranks, *beside} - {self.rank}
        self._watch = Watch.current() if self._depends else None
        if self._watch is not None:
            self._watch.meet(self._depends)

    def failed(self, text: str) -> None:
        """Tell the others what failed here."""
        self._tell(Notice(FAILED, self.token, text=text))

    def close(self) -> None:
        """Tell the others that the link was closed here, and what was being handled, if that was an exception."""
        handled = sys.exc_info()[1]
        text = "" if handled is None else f", handling {type(handled).__name__}: {handled}"
        self._tell(Notice(CLOSED, self.token, text=text))

    def explain(self) -> str:
        """Say why a collective broke, and tell the others; waits up to :data:`PATIENCE_S` seconds for the reason."""
        blame = self._blamed()
        self._tell(Notice(BECAUSE, self.token, blame.ranks, blame.text))
        return blame.text

    def lost(self) -> bool:
        """Return whether something other than an orderly end has broken the link by now; does not wait."""
        return self._watch is not None and self._watch.judge(self._depends, self.token, orderly=False) is not None

    def wait(self, work: dist.Work) -> None:
        """Wait for a gather in main memory, but not much longer than until a rank has ended.

        Ranks that exchange nothing with that one would wait for those that do to end, or for the timeout.

        Raises:
            RuntimeError: it broke, or a rank has ended.
        """
        while True:
            has_ended, began_s = self.lost(), time.monotonic()
            try:
                work.wait(timedelta(seconds=SLICE_S))
                return
            except RuntimeError:
                if work.is_completed() or time.monotonic() - began_s < SLICE_S:
                    raise
                # What the rank had sent before its end has had a slice's time to arrive.
                if has_ended:
                    raise RuntimeError("a rank has ended before it took part") from None

    def connected(self, purpose: str, make: Callable[[Any], list[Lane]]) -> list[Lane]:
        """Make connections between the ranks (collective), but wait for none that has ended.

        Who waits for a rank in a store, or for its answer, can be interrupted by nothing. So ``make`` runs in a thread
        of its own, which is left alone where a rank has ended, and then ends with the group's timeout or the process.

        Args:
            purpose: For people.
            make: Takes a store of the link alone, by connections that nothing else of this process waits for.

        Raises:
            ExchangeError: a rank is gone.
        """
        with self.naming(purpose):
            prefix = f"gradwire/{self.token}"
            if self._watch is None:
                return make(dist.PrefixStore(prefix, group_store()))
            made: Future[list[Lane]] = Future()
            making = threading.Thread(
                target=_fulfil, args=(made, make, prefix), name="gradwire connections", daemon=True
            )
            making.start()
            while True:
                gone = self.lost() or self._left()
                # A rank may have ended after all connections to it were made.
                if wait([made], SLICE_S).done:
                    return made.result()
                if gone:
                    made.add_done_callback(_close)
                    raise RuntimeError("a rank has ended before it was connected")

    @contextlib.contextmanager
    def naming(self, where: str) -> Iterator[Wait]:
        """Turn the failure of a collective in the body into an error that names who broke it.

        The body is given a function that waits for a collective, see :meth:`wait`.

        Raises:
            ExchangeError: the collective broke.
        """
        try:
            yield self.wait
        except (RuntimeError, dist.DistError) as error:
            said = f"rank {self.rank} could not go on at {where}: {self.explain()} [{brief(error)}]"
            raise ExchangeError(said) from error

    def _left(self) -> bool:
        """Return whether a rank has ended in whichever way; one that closed the link again has not."""
        return self._watch is not None and self._watch.judge(self._depends, "") is not None

    def _tell(self, notice: Notice) -> None:
        if self._watch is not None:
            self._watch.tell(notice)

    def _blamed(self) -> Blame:
        watch = self._watch
        if watch is None:
            return Blame((), "it has no other ranks")
        began_s = time.monotonic()
        with watch.changed:
            while watch.judge(self._depends, self.token, orderly=False) is None:
                # One that closed its link, or ended in order, may be about to say more.
                in_order = watch.judge(self._depends, self.token) is not None
                met = None not in watch.quiet(self._depends, began_s).values()
                patience_s = ORDER_S if in_order else PATIENCE_S if met else STRANGE_S
                left_s = began_s + patience_s - time.monotonic()
                if left_s <= 0:
                    break
                watch.changed.wait(left_s)
            else:
                watch.changed.wait(SETTLE_S)
            found = watch.judge(self._depends, self.token, elsewhere_since_s=began_s - RECENT_S)
        return found or self._of_the_quiet(watch)

    def _of_the_quiet(self, watch: Watch) -> Blame:
        quiet = watch.quiet(self._depends, time.monotonic())
        if not quiet:
            alive = "all ranks are alive; the network between them broke, or the timeout of the group is too short"
            return Blame((), alive)
        met = {rank: silent_s for rank, silent_s in quiet.items() if silent_s is not None}
        if watch.storeless and not met:
            return Blame((), without_store())
        if met:
            why = "(stopped, or its machine is gone)"
            parts = [f"rank {rank} hangs: no sign of it for {s:.0f} s {why}" for rank, s in met.items()]
        else:
            parts = [_never_came(list(quiet))]
        return Blame(tuple(met or quiet), "; ".join(parts))


def _never_came(ranks: list[int]) -> str:
    """Say why ranks that were never met are named, of which some may only be late."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} never came here (it ended before, or is out of reach)"
    told = ", ".join(map(str, ranks))
    return f"one of ranks {told}, or several, ended before they came here, or are out of reach; others may be late"


def _fulfil(made: Future[list[Lane]], make: Callable[[Any], list[Lane]], prefix: str) -> None:
    try:
        # What waits in a store keeps all others from it. Where its host has ended, a copy is asked for again and again.
        made.set_result(make(dist.PrefixStore(prefix, group_store().clone())))
    except Exception as error:
        made.set_exception(error)


def _close(made: Future[list[Lane]]) -> None:
    for lane in made.result() if made.exception() is None else []:
        lane.close()


def brief(error: Exception) -> str:
    """Keep the first sentence of what the backend said, without the place in its source."""
    text = re.sub(r"\[/\S+\]\s*", "", str(error))
    return text.split(". ")[0].strip()
