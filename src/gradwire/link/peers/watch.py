"""A process's view of the other ranks: their notices, signs of life and ends; and the store by which they connect."""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from typing import Any, ClassVar, Protocol

import torch.distributed as dist

from gradwire.errors import ExchangeError
from gradwire.exchange.drivers import Group, TorchGroup
from gradwire.link.peers.blame import BECAUSE, ENDED, FAILED, Blame, Notice, Standing, judge
from gradwire.link.peers.connections import Connections


def store_host() -> int | None:
    """Return the rank whose process holds the store of the default group; None if it is unknown or not a rank.

    With ``env://`` and ``tcp://`` rank 0 holds it, unless the launcher does, which torchrun announces by a variable. A
    store that a program passed to ``init_process_group`` may be anywhere.
    """
    method = getattr(dist.distributed_c10d, "_default_pg_init_method", None)
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    return 0 if str(method).startswith(("env://", "tcp://")) and not by_launcher else None


def without_store() -> str:
    """Return the explanation why further ranks cannot be found any more."""
    host = store_host()
    if host is None:
        return "the process group's store is gone: the process that holds it ended, or is out of reach"
    return f"rank {host} ended, or is out of reach, and with it the process group's store, which it holds"


QUIET_S = 2.5
"""If a collective broke without a notice or an end of a rank, ranks without a sign of life for this long are named."""

SILENCE_S = 10.0
"""Time without a sign of life of a rank after which a warning about it is logged."""

MEET_S = 2.0
"""The longest that a rank whose exception nobody caught waits for ranks that have not connected to it yet."""

OWN_PAUSE_S = 2.0
"""If this process itself was stopped for this long, missing signs of life are not the others' fault."""


class Ticked(Protocol):
    """Looks at the ranks from time to time."""

    def tick(self, now_s: float) -> None:
        """Look, without waiting."""


class Watch:
    """A process's view of the other ranks, shared by all its links.

    Args:
        store: Store of the ranks.
        rank: This rank.
        world_size: Number of ranks.
        hosted: True if a rank may hold the store, as in a process group.
        key: Key that the ranks share; empty if they have none.

    Attributes:
        limit_s: Seconds without a sign of life after which a rank counts as ended; None: it never does.
        absence_s: The same for a rank that has never connected.
        changed: Condition that is notified after each change.
        storeless: True if the store was gone before the addresses of all ranks were found in it.
    """

    _now: Watch | None = None
    _others: ClassVar[weakref.WeakKeyDictionary[Group, Watch]] = weakref.WeakKeyDictionary()
    _making = threading.Lock()

    def __init__(self, store: Any, rank: int, world_size: int, hosted: bool = True, key: bytes = b"") -> None:
        self.store, self.rank, self.pid = store, rank, os.getpid()
        self.limit_s: float | None = None
        self.absence_s = math.inf
        self._hosted, self._began_s = hosted, time.monotonic()
        self.changed = threading.Condition()
        self._standings: dict[int, Standing] = {}
        self._warned: set[int] = set()
        self._blamed: set[int] = set()
        self._ticked_s = time.monotonic()
        self._in_trouble = self.storeless = False
        self._ticked: weakref.WeakSet[Ticked] = weakref.WeakSet()
        told = (self._heard, self._ended, self._tick, self._alone)
        self._connections = Connections(store, rank, world_size, *told, key)

    @classmethod
    def current(cls) -> Watch:
        """Return this process's watch over the default group; the first call starts it.

        Raises:
            ExchangeError: the store is gone.
        """
        store = dist.distributed_c10d._get_default_store()
        with cls._making:
            now = cls._now
            if now is None or now.store is not store or now.pid != os.getpid():
                if now is None:
                    atexit.register(_say_goodbye)
                elif now.pid == os.getpid():
                    now.leave("has left its process group")
                rank = dist.get_rank()
                try:
                    now = cls._now = cls(store, rank, dist.get_world_size())
                except (RuntimeError, dist.DistError) as error:
                    raise ExchangeError(f"rank {rank} could not meet the others: {without_store()}") from error
            return now

    @classmethod
    def of(cls, group: Group) -> Watch:
        """Return this process's watch over the ranks of a group: a group that is no process group has its own."""
        if isinstance(group, TorchGroup):
            return cls.current()
        with cls._making:
            found = cls._others.get(group)
            if found is None:
                key = group.key("signs of life")
                found = cls._others[group] = cls(group.store, group.rank, group.world_size, hosted=False, key=key)
            return found

    def meet(self, ranks: Iterable[int]) -> None:
        """Start to watch ranks."""
        others = {rank for rank in ranks if rank != self.rank}
        with self.changed:
            for rank in others:
                self._standings.setdefault(rank, Standing())
        self._connections.meet(others)

    def call(self, ticked: Ticked) -> None:
        """Call an object's ``tick`` about twice a second from now on, as long as it exists."""
        self._ticked.add(ticked)

    def tell(self, notice: Notice) -> None:
        """Send a notice to all connected ranks."""
        self._in_trouble = self._in_trouble or notice.kind in (FAILED, BECAUSE)
        if notice.kind == BECAUSE:
            self._blamed.update(notice.ranks)
        self._connections.tell(notice)

    def leave(self, how: str) -> None:
        """Report to the others that this process ends, with the exception if one was not caught."""
        raised = getattr(sys, "last_value", None)
        if raised is not None:
            self._wait_until_met()
        if raised is not None and not self._in_trouble:
            # If ranks have ended before, one of them is the most likely cause of a later exception.
            blamed = self.judge(self._standings, "", orderly=False)
            if blamed is None:
                self.tell(Notice(FAILED, text=f"with {type(raised).__name__}: {raised}, which nobody caught"))
            else:
                self.tell(Notice(BECAUSE, "", blamed.ranks, blamed.text))
        self.tell(Notice(ENDED, text=how))
        self._connections.close()

    def _wait_until_met(self) -> None:
        """Give the ranks that this one depends on time to connect: an end before it would be one without a word.

        Those that this rank has named as the cause of a failure may never come.
        """
        with self.changed:
            waited_for = [standing for rank, standing in self._standings.items() if rank not in self._blamed]
            self.changed.wait_for(
                lambda: all(s.heard_s is not None or s.ended_s is not None for s in waited_for), MEET_S
            )

    def judge(
        self, ranks: Iterable[int], link: str, *, orderly: bool = True, elsewhere_since_s: float = math.inf
    ) -> Blame | None:
        """Return which ranks broke a link that depends on some ranks, or None without evidence; see :func:`judge`."""
        with self.changed:
            standings = {rank: self._standings[rank] for rank in ranks if rank in self._standings}
            return judge(standings, link, orderly=orderly, elsewhere_since_s=elsewhere_since_s)

    def vanished(self, ranks: Iterable[int]) -> list[int]:
        """Return which ranks ended or fell silent without a word about it."""
        with self.changed:
            return [r for r in sorted(set(ranks) & set(self._standings)) if self._standings[r].has_vanished]

    def disconnected(self, ranks: Iterable[int]) -> list[int]:
        """Return which ranks vanished after they were connected: they have ended, or can be reached again."""
        return [rank for rank in self.vanished(ranks) if self._standings[rank].heard_s is not None]

    def quiet(self, ranks: Iterable[int], now_s: float) -> dict[int, float | None]:
        """Return ranks without a sign of life for :data:`QUIET_S`, and for how many seconds; None: never connected."""
        found: dict[int, float | None] = {}
        with self.changed:
            for rank in sorted(set(ranks) & set(self._standings)):
                heard_s = self._standings[rank].heard_s
                if heard_s is None:
                    found[rank] = None
                elif now_s - heard_s >= QUIET_S:
                    found[rank] = now_s - heard_s
        return found

    def absent(self, ranks: Iterable[int]) -> list[int]:
        """Return which ranks have not connected yet, and have not ended either."""
        with self.changed:
            known = {rank: self._standings[rank] for rank in sorted(set(ranks) & set(self._standings))}
            return [rank for rank, found in known.items() if found.heard_s is None and found.ended_s is None]

    def count_out(self, rank: int, why: str) -> None:
        """Count a rank as ended: somebody has learnt it elsewhere."""
        self._ended(rank, why)

    def look_around(self, now_s: float) -> list[int]:
        """Warn once about each rank without a sign of life; return the ranks of new warnings.

        Args:
            now_s: Time by ``time.monotonic``.
        """
        silent = []
        with self.changed:
            paused_s, self._ticked_s = now_s - self._ticked_s, now_s
            for rank, standing in self._standings.items():
                if standing.heard_s is None or standing.ended_s is not None:
                    continue
                if paused_s > OWN_PAUSE_S:
                    standing.heard_s = now_s
                elif self.limit_s is not None:
                    continue
                elif now_s - standing.heard_s >= SILENCE_S and rank not in self._warned:
                    self._warned.add(rank)
                    silent.append((rank, now_s - standing.heard_s))
        for rank, silent_s in silent:
            logging.getLogger("gradwire").warning(
                "rank %d: rank %d has given no sign for %.0f s: it is stopped, its machine is gone, or its program "
                "keeps Python's lock; look at it, or end the run",
                self.rank,
                rank,
                silent_s,
            )
        return [rank for rank, _ in silent]

    def give_up(self, now_s: float) -> None:
        """Count ranks as ended that have given no sign of life for :attr:`limit_s`, or have not come."""
        if self.limit_s is None:
            return
        with self.changed:
            for standing in self._standings.values():
                never = standing.heard_s is None
                silent_s = now_s - (self._began_s if standing.heard_s is None else standing.heard_s)
                if standing.ended_s is None and silent_s >= (self.absence_s if never else self.limit_s):
                    said = "has not come" if never else "has given no sign of life"
                    standing.ended_s, standing.unheard = now_s, f"{said} for {silent_s:.1f} s"
                    self.changed.notify_all()

    # ------------------------------------------------------------------ called by the connections' thread

    def _heard(self, rank: int, notices: list[Notice]) -> None:
        now_s = time.monotonic()
        with self.changed:
            standing = self._standings.setdefault(rank, Standing())
            met, standing.heard_s = standing.heard_s is None, now_s
            for notice in notices:
                standing.take(notice, now_s)
            if notices or met:
                self.changed.notify_all()

    def _ended(self, rank: int, why: str | None) -> None:
        with self.changed:
            standing = self._standings.setdefault(rank, Standing())
            standing.ended_s, standing.unheard = time.monotonic(), why
            self.changed.notify_all()

    def _alone(self) -> None:
        host = store_host() if self._hosted else None
        with self.changed:
            self.storeless = True
            standing = None if host is None else self._standings.get(host)
            if standing is not None and standing.heard_s is None and standing.ended_s is None:
                standing.ended_s, standing.unheard = time.monotonic(), "ended with the process group's store"
            self.changed.notify_all()

    def _tick(self) -> None:
        now_s = time.monotonic()
        self.look_around(now_s)
        self.give_up(now_s)
        for ticked in list(self._ticked):
            ticked.tick(now_s)


def _say_goodbye() -> None:
    now = Watch._now
    if now is not None and now.pid == os.getpid():
        now.leave("ended by itself: its program came to its end, or called sys.exit")
