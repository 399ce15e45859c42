"""The store of a membership as a member uses it: sealed records, found again after the coordinator was restarted.

torch's TCPStore knows no password: whoever reaches its port can read, write and delete every key. So members believe
only records that verify under their secret, and nothing else of what is in the store names a member or an epoch.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from gradwire.errors import ExchangeError, HyperparameterError
from gradwire.link.membership.coordinator_connection import CONNECT_S, PATIENCE_S, CoordinatorConnection
from gradwire.link.membership.records import (
    Epoch,
    EpochReport,
    Member,
    Offer,
    R,
    Ready,
    Removed,
    Request,
    Seal,
)
from gradwire.link.membership.spare_stores import SpareStores, answers
from gradwire.link.membership.steps import named_key
from gradwire.link.membership.store_connections import another

PORT = 29400
"""Default port of the coordinator, that of torchrun's rendezvous."""

ASKS = "asks"
"""Key of the number of requests that were written since the coordinator was started."""

REMOVED = "removed"
"""Key of the number of the last epoch whose keys the store may no longer have."""

MOST_ASKS = 256
"""Largest number of requests that are read at once: anybody can write some."""

FRESH_S = 5.0
"""Time for which a request counts after its beat has changed."""

MOST_ATTEMPTS = 100

ABSENT = "-"
"""What no sealed record is."""

FAR_S = 0.005
"""Time of a question from which on several are asked at the same time, each by a connection of its own."""

MOST_AT_ONCE = 16
"""Largest number of keys that are read at the same time where all of them, or none, are wanted."""

SPARE = 8
"""Number of spare connections of a member that is far from the coordinator."""

MOST_SPARE = 512
"""Largest number of spare connections of all members together."""

T = TypeVar("T")


def address_of(text: str) -> tuple[str, int]:
    """Return host and port of an address such as ``"10.0.0.1:29400"``, ``"host"`` or ``"[::1]:29400"``.

    Raises:
        HyperparameterError: it is not an address.
    """
    host, colon, port = text.rpartition(":") if ":" in text.rpartition("]")[2] else (text, "", "")
    host = host.removeprefix("[").removesuffix("]")
    if colon and not (port.isascii() and port.isdecimal() and int(port) < 1 << 16):
        raise HyperparameterError(f"address: host:port is needed, such as '10.0.0.1:{PORT}', not {text!r}")
    return host, int(port) if colon else PORT


def _set_where(store: Any, key: str, expected: Any, value: str) -> bytes:
    """Write a value where the expected one is, or none; return the one that is there then."""
    return bytes(store.compare_set(key, expected, value))


def ask_key(number: int) -> str:
    """Return the key of a request."""
    return f"ask/{number}"


class Board:
    """The records of one run, in a store that may be away for a while.

    Args:
        host, port: Address of the coordinator.
        secret: The secret that members share.
        patience_s: Time that the coordinator may be away before an operation raises.

    Raises:
        ExchangeError: the coordinator cannot be reached.
        IncompatibleError: the secret is not that of the run.
    """

    def __init__(self, host: str, port: int, secret: str, patience_s: float = PATIENCE_S) -> None:
        self.host, self.port = host or "127.0.0.1", port
        self._spare = SpareStores(self._another)
        self._connection = CoordinatorConnection(self.host, self.port, secret, patience_s, self._lost)
        self._shared: Any = None
        self._took_s: deque[float] = deque([0.0], maxlen=8)
        self._asked = 0, "", 0
        self._read_anew()
        self._do(lambda store: None)

    @property
    def seal(self) -> Seal:
        """What seals the records of this run."""
        return self._connection.seal

    # ------------------------------------------------------------------ connections

    def _lost(self) -> None:
        self._spare.drop()
        self._read_anew()

    def store(self, prefix: str) -> Any:
        """Return a store whose keys begin with a prefix. Nobody may wait in it for a key."""
        with self._connection.lock:
            if self._shared is None or not answers(self._shared):
                self._shared = self._do(another)
            return dist.PrefixStore(prefix, self._shared)

    def lend(self, prefix: str) -> Any:
        """Return a connection of its own to the store, whose keys begin with a prefix, for one thread."""
        return dist.PrefixStore(prefix, self._spare.lend())

    def take_back(self, store: Any) -> None:
        """Take back a connection of :meth:`lend` in which nobody waits any more."""
        self._spare.take_back(store.underlying_store)

    @property
    def is_far(self) -> bool:
        """True if the coordinator is at the end of a long link, by the quickest of the last questions."""
        return min(self._took_s) >= FAR_S

    def freshen(self, members: int) -> None:
        """Keep the connections alive that a meeting of so many members will need; call it again and again."""
        if not self._connection.is_away:
            self._spare.freshen(min(SPARE, members, MOST_SPARE // members) if self.is_far else 0)

    @property
    def is_away(self) -> bool:
        """True while the coordinator is out of reach: :meth:`try_again` looks whether it is back."""
        return self._connection.is_away

    @contextlib.contextmanager
    def heeding(self, look: Callable[[], None]) -> Iterator[None]:
        """Call a function while a question in the body waits for the coordinator; what it raises ends the wait.

        Questions of other threads wait as ever.
        """
        own = threading.get_ident()
        before = self._connection.heed
        self._connection.heed = lambda: look() if threading.get_ident() == own else before()
        try:
            yield
        finally:
            self._connection.heed = before

    def try_again(self) -> None:
        """Try once to reach a coordinator that is away.

        Raises:
            IncompatibleError: it keeps another run now.
        """
        self._connection.try_again()

    def _another(self) -> Any:
        """Return another connection, and let others use the store meanwhile."""
        store = self._connection.store
        with contextlib.suppress(RuntimeError, dist.DistError, AttributeError):
            return another(store)
        return self._do(another)

    def _do(self, work: Callable[[Any], T]) -> T:
        return self._connection.do(work)

    # ------------------------------------------------------------------ records

    def put(self, key: str, record: Epoch | EpochReport | Offer | Ready) -> None:
        """Write a record."""
        value = self.seal.close(key, record)
        with self._connection.lock:
            self._connection.keep(key, value)
            self._do(lambda store: store.set(key, value))

    def put_unless_away(self, key: str, record: Epoch | EpochReport | Offer) -> None:
        """Write a record; if the coordinator is away, write it when it is back."""
        value = self.seal.close(key, record)
        self._connection.keep(key, value)
        self._connection.do_unless_away(lambda store: store.set(key, value))

    def get(self, key: str, kind: type[R]) -> R | None:
        """Return the record at a key; None if there is none that verifies."""
        return self._do(lambda store: self._read(store, key, kind))

    def glance(self, key: str, kind: type[R]) -> R | None:
        """Return the record at a key; None if there is none that verifies, or if the coordinator is away."""
        return self._connection.do_unless_away(lambda store: self._read(store, key, kind))

    def get_all(self, keys: Collection[str], kind: type[R], *, each: bool = False) -> dict[str, R]:
        """Return the records at keys if all of them have been written; without those that do not verify.

        Over a long link, several connections read a few of them each.

        Args:
            each: Return those that have been written even if others have not.
        """
        if not keys:
            return {}
        if len(keys) > 1 and (each or len(keys) <= MOST_AT_ONCE) and self.is_far:
            values = self._values(keys)
            return self._opened(values, kind) if each or len(values) == len(keys) else {}

        def read(store: Any) -> dict[str, R]:
            if store.check(list(keys)):
                return self._opened(dict(zip(keys, map(bytes, store.multi_get(list(keys))))), kind)
            found = {key: self._value(store, key) for key in keys} if each else {}
            return self._opened({key: value for key, value in found.items() if value is not None}, kind)

        return self._do(read)

    def _opened(self, values: Mapping[str, bytes], kind: type[R]) -> dict[str, R]:
        found = {key: self.seal.open(key, value, kind) for key, value in values.items()}
        return {key: record for key, record in found.items() if record is not None}

    def _values(self, keys: Collection[str]) -> dict[str, bytes]:
        """Return what has been written at some keys, read by all connections at hand and by this thread."""
        left, found = deque(keys), dict[str, bytes | None]()

        def ask(store: Any) -> None:
            while True:
                try:
                    key = left.popleft()
                except IndexError:
                    self._spare.take_back(store)
                    return
                try:
                    found[key] = self._value(store, key)
                except (RuntimeError, dist.DistError):
                    return

        helpers = [threading.Thread(target=ask, args=(s,), daemon=True) for s in self._spare.at_hand(len(keys) - 1)]
        for helper in helpers:
            helper.start()
        with contextlib.suppress(IndexError):
            while True:
                key = left.popleft()
                found[key] = self._do(partial(self._value, key=key))
        # A connection may have broken, or wait for an answer that never comes.
        end_s = time.monotonic() + CONNECT_S
        for helper in helpers:
            helper.join(max(0.0, end_s - time.monotonic()))
        for key in [key for key in keys if key not in found]:
            found[key] = self._do(partial(self._value, key=key))
        return {key: value for key in keys if (value := found[key]) is not None}

    def _read(self, store: Any, key: str, kind: type[R]) -> R | None:
        value = self._value(store, key)
        return None if value is None else self.seal.open(key, value, kind)

    def _value(self, store: Any, key: str) -> bytes | None:
        # The store answers a comparison at once: with the value that is there, or else with the one expected. To ask
        # whether there is one and then for it, as `get` waits for it first, would be three round trips.
        began_s = time.monotonic()
        value = bytes(store.compare_set(key, ABSENT, ABSENT))
        self._took_s.append(time.monotonic() - began_s)
        return None if value == ABSENT.encode() else value

    def propose(self, key: str, epoch: Epoch) -> Epoch | None:
        """Write an epoch unless one is there, and return the one that is there then.

        Return None if there was one whose key has been removed: others have gone on from it without this member.

        Raises:
            ExchangeError: somebody without the secret keeps writing at the key.
        """
        value = self.seal.close(key, epoch)
        expected: Any = ""
        for _ in range(MOST_ATTEMPTS):
            there = self._do(partial(_set_where, key=key, expected=expected, value=value))
            found = self.seal.open(key, there, Epoch)
            if found is not None and found.number == epoch.number:
                # The coordinator writes this word before it removes keys. So it must be read after the key was found
                # free; and whoever finds an epoch there may find what a member wrote that had not read it yet.
                if epoch.number > 1 and self._has_removed(epoch.number):
                    return None
                with self._connection.lock:
                    self._connection.keep(key, there.decode("ascii"))
                return found
            # Somebody without the secret has written here: it counts as absent.
            expected = there
        raise ExchangeError(f"somebody without the secret keeps writing into the store at {self.host}:{self.port}")

    def _has_removed(self, number: int) -> bool:
        removed = self.get(REMOVED, Removed)
        return removed is not None and number <= removed.number

    # ------------------------------------------------------------------ requests

    def _read_anew(self) -> None:
        """Read all requests again: a coordinator that was started again counts them from the first."""
        self._seen = 0
        self._unread: set[int] = set()
        self._waiting: dict[str, tuple[int, Request, float | None]] = {}

    def ask(self, request: Request) -> None:
        """Write a request to be named; call it again and again as long as it holds, since others look for its beat."""

        def write(store: Any) -> None:
            number, id, beat = self._asked
            # Nobody reads one beyond the count, or below the first: somebody has set the count, and it was set back.
            is_read = id == request.member.id and 0 < number <= store.add(ASKS, 0)
            found = self._read(store, ask_key(number), Request) if is_read else None
            # After the coordinator was started again, the number may be that of another worker.
            if found is None or found.member.id != id:
                number = store.add(ASKS, 1)
            store.set(ask_key(number), self.seal.close(ask_key(number), replace(request, beat=beat + 1)))
            self._asked = number, request.member.id, beat + 1

        self._do(write)

    def withdraw(self) -> None:
        """Take back this worker's request, if it waits no longer."""
        number = self._asked[0]
        if number:
            self._connection.do_unless_away(lambda store: store.delete_key(ask_key(number)))

    def requests(self) -> list[Request]:
        """Return the requests of workers that wait and were not named yet, the earliest first.

        Return none if the coordinator is away.
        """
        return self._connection.do_unless_away(self._requests) or []

    def _requests(self, store: Any) -> list[Request]:
        count = store.add(ASKS, 0)
        if count < self._seen:
            self._read_anew()  # somebody has set it back
        # A worker takes a number first and writes under it then: until that, the number stays unread.
        oldest = max(1, count - MOST_ASKS + 1)
        self._unread.update(range(max(self._seen + 1, oldest), count + 1))
        self._unread = {number for number in self._unread if number >= oldest}
        for number in sorted(self._unread):
            request = self._read(store, ask_key(number), Request)
            if request is not None:
                self._waiting[request.member.id] = (number, request, None)
                self._unread.remove(number)
        self._seen = count
        now_s = time.monotonic()
        for id, (number, request, changed_s) in list(self._waiting.items()):
            found = self._read(store, ask_key(number), Request)
            if found is None or self._read(store, named_key(id), Epoch) is not None:
                del self._waiting[id]
            elif found.beat != request.beat:
                self._waiting[id] = (number, found, now_s)
            elif changed_s is not None and now_s - changed_s > FRESH_S:
                self._waiting[id] = (number, found, None)
        return [request for _, request, changed_s in self._waiting.values() if changed_s is not None]

    def named(self, member: Member) -> Epoch | None:
        """Return the epoch that named a worker for the first time; None as long as none does."""
        return self.get(named_key(member.id), Epoch)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
        self._shared = None
        self._spare.close()
