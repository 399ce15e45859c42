"""The ranks that one link depends on, and the explanation of the error if one of them breaks it."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, Protocol, TypeAlias, TypeVar

import torch.distributed as dist

from gradwire.errors import ExchangeError
from gradwire.exchange.drivers import Group
from gradwire.link.peers.blame import BECAUSE, CLOSED, FAILED, Blame, Notice
from gradwire.link.peers.watch import Watch, without_store

PATIENCE_S = 3.0
"""Time that a rank whose collective broke waits for the reason."""

STRANGE_S = 2.0
"""Time that it waits for the reason if it is not connected to all ranks."""

ORDER_S = 1.0
"""Time that it waits for another reason if it knows only of an orderly end of a rank, or of a silence."""

RECENT_S = 10.0
"""Largest age of a failure of another link that may explain why a rank is missing in this one."""

SLICE_S = 0.5
"""Time that a rank waits for a collective between two checks whether others have ended."""

Wait: TypeAlias = Callable[[dist.Work], None]
"""Waits for a collective."""

GIVE_UP_S = 4.0
"""Time after the loss of a rank after which its link's exchanges are broken off: those that notice it have ended."""

SETTLE_S = 0.1
"""Time that a rank waits, once it has a reason, for other ranks that end at the same time."""


class Closes(Protocol):
    """Connections that can be closed."""

    def close(self) -> object:
        """End the connections."""


C = TypeVar("C", bound=Closes)


class Circle:
    """The ranks of a group, which report failures and their end to each other, seen from one of them.

    Messages have global ranks, since places within the group are unknown to the user who started the processes.

    Args:
        group: The ranks of the link.
        beside: Global ranks outside the group whose end breaks the link, too.

    Attributes:
        ranks: Global ranks of the group, in the group's order.
        place: This rank within the group.
        rank: Global number of this rank.
        token: Token of the link; empty before the agreement.
    """

    def __init__(self, group: Group, beside: Iterable[int] = ()) -> None:
        self.ranks, self.place, self.world_size = group.ranks, group.place, group.world_size
        self.rank = group.rank
        self.token = ""
        self._group, self._store = group, group.store
        self._depends = {*self.ranks, *beside} - {self.rank}
        self._watch = Watch.of(group) if self._depends and group.meetings is None else None
        self._is_patient = group.explains
        self._lost_s: float | None = None
        self._break_off: Callable[[], Callable[[], object] | None] = _nothing
        if self._watch is not None:
            self._watch.meet(self._depends)
            self._watch.call(self)

    def break_by(self, break_off: weakref.WeakMethod[Callable[[], object]]) -> None:
        """Set the method that breaks exchanges off; it is called again and again once a rank has been lost."""
        self._break_off = break_off

    def tick(self, now_s: float) -> None:
        """Break the link's exchanges off if a rank was lost a while ago."""
        if not self.lost():
            self._lost_s = None
            return
        self._lost_s = now_s if self._lost_s is None else self._lost_s
        break_off = self._break_off()
        if now_s - self._lost_s >= GIVE_UP_S and break_off is not None:
            # It may wait for what this thread has to tell.
            threading.Thread(target=break_off, name="gradwire breaks off", daemon=True).start()

    def failed(self, text: str) -> None:
        """Report a failure on this rank to the others."""
        self._tell(Notice(FAILED, self.token, text=text))

    def close(self) -> None:
        """Report to the others that the link was closed here, and the exception that was being handled, if any."""
        handled = sys.exc_info()[1]
        text = "" if handled is None else f", handling {type(handled).__name__}: {handled}"
        self._tell(Notice(CLOSED, self.token, text=text))

    def explain(self) -> str:
        """Return why a collective broke, and report it to the others; wait up to :data:`PATIENCE_S` for the reason."""
        blame = self._blamed()
        self._tell(Notice(BECAUSE, self.token, blame.ranks, blame.text))
        return blame.text

    def lost(self) -> bool:
        """Return whether something other than an orderly end has broken the link so far, without waiting."""
        return self._watch is not None and self._watch.judge(self._depends, self.token, orderly=False) is not None

    def wait(self, work: dist.Work) -> None:
        """Wait for a gather in main memory, until shortly after the end of any rank at most.

        Otherwise ranks without a transfer to or from the ended rank would wait until others end, or for the timeout.

        Raises:
            RuntimeError: the gather broke, or a rank has ended.
        """
        while True:
            has_ended, began_s = self.lost(), time.monotonic()
            try:
                work.wait(timedelta(seconds=SLICE_S))
                return
            except RuntimeError:
                completed = work.is_completed()
                if not completed:
                    if time.monotonic() - began_s < SLICE_S:
                        raise
                    # Data that the rank sent before its end had one slice of time to arrive.
                    if has_ended:
                        raise RuntimeError("a rank has ended before it took part") from None
            if completed:
                # It may have ended in order after the slice did, before it was asked: only the work itself knows.
                work.wait()
                return

    def connected(self, purpose: str, *makes: Callable[[Any], C]) -> list[C]:
        """Make connections between the ranks, without waiting for a rank that has ended (collective call).

        A wait in a store, or for a rank's answer, cannot be interrupted. So ``makes`` run in threads of their own: all
        at the same time if the group has a connection to the store for each. If a rank has ended, the threads are
        abandoned, and end with the group's timeout for waits in the store, or the process.

        Args:
            purpose: Purpose of the connections, for messages.
            makes: Called with a store for the link alone, whose connection no other thread of this process uses. They
                use different keys.

        Raises:
            ExchangeError: a rank is gone.
        """
        with self.naming(purpose):
            prefix = f"gradwire/{self.token}"
            if self._watch is None:
                return [make(dist.PrefixStore(prefix, self._store)) for make in makes]
            made: list[Future[C]] = [Future() for _ in makes]
            tasks = list(zip(made, makes))
            for some in [[task] for task in tasks] if self._group.many_stores else [tasks]:
                words = (some, prefix, self._group)
                threading.Thread(target=_fulfil, args=words, name="gradwire connections", daemon=True).start()
            try:
                while True:
                    gone = self.lost() or self._left()
                    # A rank may have ended after all connections to it were made.
                    if not wait(made, SLICE_S).not_done:
                        return [one.result() for one in made]
                    if gone:
                        raise RuntimeError("a rank has ended before it was connected")
            except Exception:
                for one in made:
                    one.add_done_callback(_close)
                raise

    @contextlib.contextmanager
    def naming(self, where: str) -> Iterator[Wait]:
        """Turn the failure of a collective in the ``with`` block into an error that names the rank that broke it.

        The context yields a function that waits for a collective, :meth:`wait`.

        Raises:
            ExchangeError: the collective broke.
        """
        try:
            yield self.wait
        except (RuntimeError, dist.DistError) as error:
            said = f"rank {self.rank} could not go on at {where}: {self.explain()} [{brief(error)}]"
            raise ExchangeError(said) from error

    def _left(self) -> bool:
        """Return whether a rank has ended in any way; closing the link does not count."""
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
            # A silence may end while this rank waits for another reason.
            silent_s = _known(watch.quiet(self._depends, began_s))
            while watch.judge(self._depends, self.token, orderly=False) is None:
                # A rank that closed its link or ended in an orderly way may be about to send another notice.
                in_order = watch.judge(self._depends, self.token) is not None
                met = None not in watch.quiet(self._depends, began_s).values()
                # Ranks that hear both ends of a silence wait for these to tell them.
                patience_s = ORDER_S if in_order or silent_s else PATIENCE_S if met else STRANGE_S
                left_s = began_s + patience_s - time.monotonic()
                if left_s <= 0 or not self._is_patient:
                    break
                watch.changed.wait(left_s)
            else:
                if self._is_patient:
                    watch.changed.wait(SETTLE_S)
            found = watch.judge(self._depends, self.token, elsewhere_since_s=began_s - RECENT_S)
        return found or self._of_the_quiet(watch, silent_s)

    def _of_the_quiet(self, watch: Watch, before_s: Mapping[int, float]) -> Blame:
        """Blame the ranks without a sign of life now, or else those without one when the collective broke."""
        quiet = watch.quiet(self._depends, time.monotonic())
        met = _known(quiet) or before_s
        if not (quiet or met):
            alive = "all ranks are alive; the network between them broke, or the timeout of the group is too short"
            return Blame((), alive)
        if watch.storeless and not met:
            return Blame((), without_store())
        if met:
            parts = self._no_sign_of(met)
        else:
            parts = [_never_came(list(quiet), self.rank)]
        return Blame(tuple(met or quiet), "; ".join(parts))

    def _no_sign_of(self, silent_s: Mapping[int, float]) -> list[str]:
        """Return the explanations about ranks that gave no sign for some seconds, each with both ends of the silence.

        Others read them, too, and may hear the rank that this one does not hear.
        """
        if len(silent_s) == len(self._depends) > 1:
            told = ", ".join(map(str, sorted(silent_s)))
            return [
                f"rank {self.rank} hears no other rank: no sign of ranks {told} for {max(silent_s.values()):.0f} s, so "
                "that its own network is silent, or all of them are stopped"
            ]
        return [
            f"rank {rank} hangs, or the network between it and rank {self.rank} is silent: no sign of it for {s:.0f} s"
            for rank, s in silent_s.items()
        ]


def _known(quiet_s: Mapping[int, float | None]) -> dict[int, float]:
    """Return the quiet ranks that were connected once."""
    return {rank: silent_s for rank, silent_s in quiet_s.items() if silent_s is not None}


def _never_came(ranks: list[int], here: int) -> str:
    """Return the explanation about ranks that never connected to a rank, some of which may only be late."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} never came to rank {here} (it ended before, or is out of its reach)"
    told = ", ".join(map(str, ranks))
    return (
        f"one of ranks {told}, or several, ended before they came to rank {here}, or are out of its reach; others may "
        "be late"
    )


def _fulfil(tasks: Sequence[tuple[Future[C], Callable[[Any], C]]], prefix: str, group: Group) -> None:
    try:
        # A wait blocks the store for all other threads. If its host has ended, the backend keeps retrying on the copy.
        store = group.lend_store()
        # Gloo waits in it for all ranks at once.
        store.set_timeout(group.store_timeout)
        for number, (made, make) in enumerate(tasks, 1):
            found = make(dist.PrefixStore(prefix, store))
            if number == len(tasks):
                group.take_back(store)
            made.set_result(found)
    except Exception as error:
        for made, _ in tasks:
            if not made.done():
                made.set_exception(error)


def _close(made: Future[C]) -> None:
    if made.exception() is None:
        made.result().close()


def brief(error: Exception) -> str:
    """Return the first sentence of a backend's error, without the position in its source."""
    text = re.sub(r"\[/\S+\]\s*", "", str(error))
    return text.split(". ")[0].strip()


def _nothing() -> None:
    """Return no method."""
