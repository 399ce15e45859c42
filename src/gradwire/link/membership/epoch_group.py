"""The members of one epoch as a group of ranks, with connections of their own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from gradwire.exchange.digests import digest_of
from gradwire.exchange.drivers import Group, break_off
from gradwire.link.membership.board import Board
from gradwire.link.membership.records import Epoch
from gradwire.link.peers.circle import Circle
from gradwire.link.peers.watch import Watch

TIMEOUT = timedelta(minutes=30)
"""Timeout of a collective, PyTorch's own: members that are gone are noticed long before."""

STORE_TIMEOUT = timedelta(seconds=5)
"""Time after which a thread that waits in the store for others looks whether all of them may still come. One that
computes may take long, and a newcomer that has ended before it came never does: for each of these a few threads, and
connections to the coordinator, would wait on."""

ABSENCES = 2.0
"""A member that has not come yet, since it agrees with others or looks for the coordinator, has so much more time."""

LINGER_S = 1.0
"""Time that messages of a member have to arrive after it has gone on to the next epoch: it may have needed no other."""

LOOK_S = 0.25
"""Time between two looks for members that are gone, for an epoch that others have begun, and for requests."""

LATE_S = 0.5
"""Time after which members look whether one that has not come has left."""

GIVE_UP_S = 1.0
"""Time that a message has to end after the connections were broken. Gloo forgets one of which a part was sent or
received when its connection breaks, and who waits for it waits until :data:`TIMEOUT`."""

NEWS_S = 0.25
"""Time after a broken message in which a member that has ended is known to have ended: another thread hears of it."""


class EpochGroup(Group):
    """The members of an epoch, seen from one of them; ranks are places in the epoch.

    Members watch one another from the moment that the group is made. :meth:`connect` makes the connections for
    agreements and for state, before a link makes its lanes.

    Args:
        epoch: The epoch.
        place: Place of this member in it.
        board: The store of the membership.
        silence_s: Seconds without a sign of life after which a member counts as gone.
        key: Key of this epoch, which its members alone know; empty: their messages have no keyed digests.
        prefix: What the keys of its connections begin with, after the epoch's number.
    """

    many_stores = True
    # Members that wait for a reason would report too late to be in the next epoch.
    explains = False
    parting: frozenset[int] = frozenset()
    """Places of members that leave by their votes, and hand over what they have not sent before they end."""
    # They have compared their versions before. A second message would take as long as the network's delay.
    table_bytes = 2048

    def __init__(
        self, epoch: Epoch, place: int, board: Board, silence_s: float, key: bytes = b"", prefix: str = ""
    ) -> None:
        self.epoch, self.place, self._board, self._key = epoch, place, board, key
        self._prefix = f"links/{epoch.number}{prefix}"
        self.store = board.store(self._prefix)
        self.ranks, self.timeout = tuple(range(len(epoch.members))), TIMEOUT
        self.has_nccl, self.device = False, torch.device("cpu")
        self._backend: Any = None
        self._spare: dict[int, Any] = {}
        self._began_s = time.monotonic()
        self._parted_s: float | None = None
        self._is_over = False
        self._begun: dist.Work | None = None
        self.watch: Watch | None = None
        if len(self.ranks) > 1:
            self.watch = Watch.of(self)
            self.watch.limit_s, self.watch.absence_s = silence_s, ABSENCES * silence_s
            self.watch.meet(self.ranks)
        self.circle = Circle(self)

    @property
    def store_timeout(self) -> timedelta:
        return STORE_TIMEOUT

    def waits_on(self) -> bool:
        return not self._is_over and (self.watch is None or self.watch.judge(self.ranks, "") is None)

    def lend_store(self) -> Any:
        return self._board.lend(self._prefix)

    def take_back(self, store: Any) -> None:
        self._board.take_back(store)

    def connect(self, lanes: int) -> None:
        """Connect the members, if they are not (collective call).

        Args:
            lanes: Number of the lanes that a link opens next. Their connections are made at the same time as these:
                over a long link, one set of them takes as long as ten and more messages.

        Raises:
            ExchangeError: a member is gone.
        """
        if self.world_size > 1 and self._backend is None:
            makes = [partial(self._made, number) for number in range(1 + lanes)]
            own, *spare = self.circle.connected("the connections of an epoch", *makes)
            self._backend, self._spare = own.backend, {number: made.backend for number, made in enumerate(spare)}

    def _made(self, number: int, store: Any) -> _Backend:
        return _Backend(super().gloo(number, dist.PrefixStore(f"{number}", store), self.place, self.world_size))

    def gloo(self, number: int, store: Any, rank: int, world_size: int) -> Any:
        made = self._spare.pop(number, None) if world_size == self.world_size else None
        return super().gloo(number, store, rank, world_size) if made is None else made

    def key(self, purpose: str) -> bytes:
        return digest_of(purpose.encode(), self._key) if self._key else b""

    def gone(self) -> bool:
        """Return whether a member has ended or given no sign of life, or has left the epoch :data:`LINGER_S` ago.

        Gloo does not always end a send to a member that has closed its connections while this process was stopped.
        """
        if self.watch is None:
            return False
        if self.watch.judge(self.ranks, "", orderly=False) is not None:
            return True
        # Those that leave in one round hand over one after the other. All members can tell that this goes on, since the
        # last of them has not ended. If one of the others broke off the epoch meanwhile, what it has would be lost.
        hands_over = not all(map(self._has_left, self.parting))
        if self.watch.judge({*self.ranks} - self.parting if hands_over else self.ranks, "", orderly=True) is None:
            return False
        if self._parted_s is None:
            self._parted_s = time.monotonic()
        return time.monotonic() - self._parted_s > LINGER_S

    def _has_left(self, place: int) -> bool:
        return self.watch is not None and self.watch.judge((place,), "") is not None

    def vanished(self) -> frozenset[str]:
        """Return the ids of members that ended or fell silent without a word about it."""
        return self._ids(() if self.watch is None else self.watch.vanished(self.ranks))

    def hear_who_vanished(self) -> None:
        """Wait after a message broke, for :data:`NEWS_S` at most, until a member is known to have vanished.

        The thread of the messages may be told of an end before the one that reads signs of life. Members wait far
        longer for the report of one that is not known to have ended.
        """
        watch = self.watch
        if watch is not None:
            with watch.changed:
                watch.changed.wait_for(lambda: watch.vanished(self.ranks), NEWS_S)

    def disconnected(self) -> frozenset[str]:
        """Return the ids of members that vanished after they were connected: they may live on."""
        return self._ids(() if self.watch is None else self.watch.disconnected(self.ranks))

    def _ids(self, ranks: Iterable[int]) -> frozenset[str]:
        return frozenset(self.epoch.members[rank].id for rank in ranks)

    def absent(self) -> tuple[str, ...]:
        """Return the ids of members that have not come within :data:`LATE_S`."""
        if self.watch is None or time.monotonic() - self._began_s < LATE_S:
            return ()
        return tuple(self.epoch.members[rank].id for rank in self.watch.absent(self.ranks))

    def count_out(self, id: str) -> None:
        """Count a member as gone."""
        if self.watch is not None:
            self.watch.count_out(self.epoch.ids().index(id), "left before it came")

    def all_gather(self, rows: torch.Tensor, own: torch.Tensor) -> dist.Work:
        # Gloo's own gather goes round a ring, with the network's delay for each member.
        self._begun = self._backend.alltoall_base(rows.view(-1), own.repeat(self.world_size), [], [])
        return self._begun

    def broadcast(self, row: torch.Tensor, source: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        self._finish(self._backend.broadcast([row], options))

    def send(self, to: int, *tensors: torch.Tensor) -> None:
        """Send tensors in main memory to one member, all at once, and wait until they have left.

        Raises:
            RuntimeError: the connection broke.
        """
        self._finish(*(self._backend.send([tensor], to, tag) for tag, tensor in enumerate(tensors)), to=to)

    def receive(self, source: int, *tensors: torch.Tensor) -> None:
        """Receive as many tensors from one member as it sends at once.

        Raises:
            RuntimeError: the connection broke.
        """
        self._finish(*(self._backend.recv([tensor], source, tag) for tag, tensor in enumerate(tensors)), source=source)

    def _finish(self, *works: dist.Work, to: int | None = None, source: int | None = None) -> None:
        """Wait for messages, by a thread that is given up where one never ends.

        Args:
            to: The place of the member that receives them, if they are sent: one that has gone on receives no more.
            source: The place of the member that sends them, if they are received: what one has sent before it has gone
                on has :data:`LINGER_S` to arrive.
        """
        ended: queue.SimpleQueue[str | None] = queue.SimpleQueue()

        def wait() -> None:
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                ended.put(str(error))
            else:
                ended.put(None)

        threading.Thread(target=wait, name="gradwire message", daemon=True).start()
        broken_s: float | None = None
        left_s: float | None = None
        while broken_s is None or time.monotonic() - broken_s < GIVE_UP_S:
            try:
                problem = ended.get(timeout=LOOK_S)
            except queue.Empty:
                if left_s is None and source is not None and self._has_left(source):
                    left_s = time.monotonic()
                is_late = left_s is not None and time.monotonic() - left_s > LINGER_S
                if is_late or self.gone() or (to is not None and self._has_left(to)):
                    broken_s = time.monotonic() if broken_s is None else broken_s
                    self.abort()
                continue
            if problem is not None:
                raise RuntimeError(problem)
            return
        raise RuntimeError("the connections broke while a message was on its way")

    def abort(self) -> None:
        """Break the connections from any thread: what waits for a message raises."""
        break_off(self._backend)

    def leave(self, how: str) -> None:
        """End the connections, after a word to the others."""
        self._is_over = True
        if self.watch is not None:
            self.watch.leave(how)
        begun, held, self._begun = self._begun, [self._backend, *self._spare.values()], None
        if begun is not None and not begun.is_completed():
            self.abort()
        self._backend, self._spare = None, {}
        # Gloo takes milliseconds to end a connection, for which nobody needs to wait.
        threading.Thread(target=held.clear, name="gradwire hangs up", daemon=True).start()


class _Backend:
    """A backend of a group, which ends with its last reference."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def close(self) -> None:
        """End the connections."""
        self.backend = None
