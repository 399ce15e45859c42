"""The state of others for a newcomer, from several of them at once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence

from gradwire.errors import ExchangeError, PayloadError
from gradwire.kernels.pieces import PIECE_BYTES, Octets
from gradwire.link.membership.snapshot import MOST_TABLE_BYTES, Snapshot, StatePiece
from gradwire.link.membership.state_server import PIECE, TABLE, StateConnection

AHEAD = 3
"""Requests of a connection that are on their way at a time: while a piece travels, the next one is coded."""

MOST_PIECE_BYTES = PIECE_BYTES + 64

Address = tuple[str, int]


class StateFetch:
    """Takes a state from the members that serve it: each piece from the next one that is free.

    The first member says what there is. A piece of which each member has a version of its own comes from it alone, and
    so does one that another member has otherwise. If a member is lost, the others give its pieces.

    Args:
        addresses: Addresses of the servers; the first one is needed until it has sent its table.
        key: See :func:`gradwire.link.membership.state_server.served_key`.
        have: Bytes that need not be sent, by their digests.
        kept: State that was taken before: its versions of what each member has of its own are kept.
        timeout_s: Time without a byte after which a member counts as gone.

    Attributes:
        snapshot: The state, complete after :meth:`run`.
        received_bytes: Bytes of pieces that came.
        reused_bytes: Bytes that were there already.
        sources: Number of members that sent a piece.
    """

    def __init__(
        self, addresses: Sequence[Address], key: bytes, have: Mapping[bytes, Octets] | None = None,
        kept: Snapshot | None = None, *, timeout_s: float = 10.0,
    ) -> None:  # fmt: skip
        self._addresses, self._key, self._timeout_s = list(addresses), key, timeout_s
        self._have = have or {}
        own = () if kept is None else [piece for piece in kept.pieces if piece.own]
        self._kept = {(p.tensor, p.begin, p.stop): kept.octets(p) for p in own} if kept is not None else {}
        self._lock = threading.Condition()
        self._common: deque[StatePiece] = deque()
        self._first: deque[StatePiece] = deque()
        self._left, self._lost_first = 0, False
        self._problems: list[Exception] = []
        self._numbers: dict[StatePiece, int] = {}
        self.received_bytes = self.reused_bytes = self.sources = 0

    def run(self) -> Snapshot:
        """Take the state.

        Raises:
            ExchangeError: the members that have it are gone.
            PayloadError: the first member sent something else.
        """
        try:
            first = StateConnection(*self._addresses[0], self._key, self._timeout_s)
        except OSError as error:
            raise ExchangeError(f"the member that has the state cannot be reached: {error}") from error
        try:
            first.ask(TABLE)
            self.snapshot = Snapshot.from_table(first.answer(MOST_TABLE_BYTES), self._key)
        except OSError as error:
            first.close()
            raise ExchangeError(f"the member that has the state is gone: {error}") from error
        self._plan()
        threads = [threading.Thread(target=self._take, args=(first, True), name="gradwire state", daemon=True)]
        threads += [
            threading.Thread(target=self._take_from, args=(address,), name="gradwire state", daemon=True)
            for address in self._addresses[1:]
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._left:
            raise ExchangeError(f"the members that have the state are gone: {self._problems[-1:]}")
        return self.snapshot

    def _plan(self) -> None:
        for number, piece in enumerate(self.snapshot.pieces):
            self._numbers[piece] = number
            held = self._kept.get((piece.tensor, piece.begin, piece.stop)) if piece.own else None
            held = self._have.get(piece.digest) if held is None else held
            if held is not None and len(held) == piece.stop - piece.begin:
                self.snapshot.keep(piece, held)
                self.reused_bytes += len(held)
            else:
                (self._first if piece.own else self._common).append(piece)
                self._left += 1

    def _take_from(self, address: Address) -> None:
        if not self._common:
            return
        try:
            made = StateConnection(*address, self._key, self._timeout_s)
        except (OSError, PayloadError) as error:
            self._tell(error)
            return
        self._take(made, False)

    def _take(self, made: StateConnection, is_first: bool) -> None:
        """Take pieces over one connection until there are none left for it."""
        asked: deque[StatePiece] = deque()
        came = 0
        try:
            while True:
                while len(asked) < AHEAD and (piece := self._next(is_first, wait=not asked)) is not None:
                    asked.append(piece)
                    made.ask(PIECE, self._numbers[piece])
                if not asked:
                    return
                coded = made.answer(MOST_PIECE_BYTES)
                try:
                    self.snapshot.put(asked[0], coded, self._key)
                except PayloadError:
                    if is_first:
                        raise
                    self._give(self._first, asked.popleft())
                    continue
                asked.popleft()
                came += 1
                with self._lock:
                    self._left -= 1
                    self.received_bytes += len(coded)
                    self._lock.notify_all()
        except (OSError, PayloadError) as error:
            for piece in asked:
                self._give(self._first if piece.own else self._common, piece)
            self._lost_first = self._lost_first or is_first
            self._tell(error)
        finally:
            made.close()
            with self._lock:
                self.sources += came > 0
                self._lock.notify_all()

    def _next(self, is_first: bool, wait: bool) -> StatePiece | None:
        """Return a piece to ask for; None if there is none, and if ``wait``, none will come."""
        queues = (self._first, self._common) if is_first else (self._common,)
        with self._lock:
            while True:
                for queue in queues:
                    if queue:
                        return queue.popleft()
                # Another member may be lost, and its pieces come back.
                if not wait or not self._left or (self._lost_first and self._first):
                    return None
                self._lock.wait(0.1)

    def _give(self, queue: deque[StatePiece], piece: StatePiece) -> None:
        with self._lock:
            queue.append(piece)
            self._lock.notify_all()

    def _tell(self, error: Exception) -> None:
        with self._lock:
            self._problems.append(error)
            self._lock.notify_all()
