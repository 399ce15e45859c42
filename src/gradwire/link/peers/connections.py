"""Connections between all processes of a training, by which each notices at once that another has ended.

When a process ends, in any way, the operating system closes its connections after all data that it has sent. So a peer
that reads the end of a connection has read all notices before. A process that is stopped closes nothing, and sends
nothing either.

Of two ranks the higher connects to the lower. Both prove that they have read the lower one's secret in the group's
store, without sending it, and that they know the key of the group if it has one: strangers may read the store, too.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import selectors
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist

from gradwire.errors import PayloadError
from gradwire.link.peers.addresses import PROOF_BYTES, Address, listening
from gradwire.link.peers.blame import BEAT, BECAUSE, FAILED, Inbox, Notice

BEAT_S = 0.5
"""Time between two signs of life of a rank."""

HANDSHAKE_S = 10.0
FIRST_TRY_S = 1.5
"""The longest that the first connection to a rank may take: one behind a silent network must not keep this rank from
those behind it in line. Each later try may take twice as long, up to :data:`HANDSHAKE_S`."""

LOOK_S = 0.05
"""Time between two reads of the store for the address of a rank that has not started yet, at first."""

MOST_UNSENT = 1 << 16
MOST_STRANGERS = 256
MOST_TOLD = 16
"""Largest number of failure notices that are kept for ranks that connect later."""

MOST_READ = 1 << 16

_HELLO = struct.Struct(">8sI")
_MAGIC, _WELCOME = b"gwpeers1", b"welcome"
_HELLO_BYTES = _HELLO.size + PROOF_BYTES

STRANGER = -1

_open: weakref.WeakSet[Connections] = weakref.WeakSet()


class _Line:
    """One connection: to a rank, or to a peer that has not proved yet which rank it is."""

    def __init__(self, made: socket.socket, rank: int = STRANGER) -> None:
        self.socket, self.rank = made, rank
        self.inbox, self.unsent, self.hello = Inbox(), bytearray(), bytearray()
        self.since_s = time.monotonic()
        self.met = False

    def send(self, data: bytes) -> None:
        """Send without waiting: keep the rest for later, unless too much is kept already."""
        if len(self.unsent) + len(data) > MOST_UNSENT:
            return
        self.unsent += data
        with contextlib.suppress(OSError):
            del self.unsent[: self.socket.send(self.unsent)]


class Connections:
    """This process's connections to other ranks, and the thread that reads them.

    Args:
        store: Store of the process group, with the addresses of all ranks.
        rank: This rank.
        world_size: Number of ranks in the group.
        heard: Called with a rank and a list of notices when data from it arrives.
        ended: Called with a rank and None when its process has ended, or with a rank and the reason when its connection
            cannot be read any further.
        tick: Called about twice a second.
        storeless: Called if the store is gone before the addresses of all ranks were found in it.
        key: Key that the ranks share; empty if they have none.

    Raises:
        OSError: no socket can listen.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        heard: Callable[[int, list[Notice]], None],
        ended: Callable[[int, str | None], None],
        tick: Callable[[], None],
        storeless: Callable[[], None],
        key: bytes = b"",
    ) -> None:
        self._store, self.rank, self.world_size, self._key = store, rank, world_size, key
        self._heard, self._ended, self._tick, self._storeless = heard, ended, tick, storeless
        self._listener, self._own = listening(store)
        store.set(_key(rank), self._own.to_bytes())
        self._lines: dict[int, _Line] = {}
        self._strangers: set[_Line] = set()
        self._new: deque[_Line] = deque()
        self._told: deque[bytes] = deque(maxlen=MOST_TOLD)
        # A garbage collection that begins while a thread has it may close a link, which tells the others.
        self._lock = threading.RLock()
        self._sought: set[int] = set()
        self._seeking = False
        self._closed = threading.Event()
        self._waker, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._loop, name="gradwire peers", daemon=True)
        self._thread.start()
        _open.add(self)

    def meet(self, ranks: Iterable[int]) -> None:
        """Connect to ranks in the background, as soon as they have started; keep existing connections."""
        with self._lock:
            # Higher ranks connect to this one.
            self._sought |= {r for r in ranks if r < self.rank and r not in self._lines}
            if not self._sought or self._seeking:
                return
            self._seeking = True
        threading.Thread(target=self._seek, name="gradwire introductions", daemon=True).start()

    def tell(self, notice: Notice) -> None:
        """Send a notice to all connected ranks, and one of a failure also to ranks that connect later; do not wait."""
        frame = notice.frame()
        with self._lock:
            if notice.kind in (FAILED, BECAUSE):
                self._told.append(frame)
            for line in tuple(self._lines.values()):
                line.send(frame)

    def close(self) -> None:
        """End the connections and the thread."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._waker.send(b"x")

    def forget(self) -> None:
        """Close inherited connections after a fork: copies in the child would hide the end of its parent from peers."""
        self._closed.set()
        lines = [*self._lines.values(), *self._strangers, *self._new]
        for held in (self._listener, self._waker, self._woken, *(line.socket for line in lines)):
            with contextlib.suppress(OSError):
                held.close()
        # The selector is shared with the parent: unregistering from it would stop the parent's thread from reading.
        with contextlib.suppress(OSError):
            self._selector.close()

    # ------------------------------------------------------------------ the thread that finds lower ranks

    def _seek(self) -> None:
        pause_s, tries = LOOK_S, dict[int, int]()
        while not self._closed.is_set():
            with self._lock:
                sought = sorted(self._sought)
                if not sought:
                    self._seeking = False
                    return
            try:
                addresses = self._addresses(sought)
            except (RuntimeError, dist.DistError):
                # Ranks that start from now on cannot be found any more.
                self._storeless()
                return
            for rank, found in addresses.items():
                line = self._connect(rank, found, min(FIRST_TRY_S * 2 ** tries.get(rank, 0), HANDSHAKE_S))
                tries[rank] = tries.get(rank, 0) + 1
                if line is not None:
                    with self._lock:
                        self._sought.discard(rank)
                    self._new.append(line)
                    with contextlib.suppress(OSError):
                        self._waker.send(b"x")
            self._closed.wait(pause_s)
            pause_s = min(1.5 * pause_s, 1.0)

    def _addresses(self, ranks: Sequence[int]) -> dict[int, bytes]:
        """Return the addresses of those ranks that have written theirs, by few questions to the store.

        Raises:
            RuntimeError, DistError: the store is gone.
        """
        keys = {rank: _key(rank) for rank in ranks}
        if len(ranks) > 1 and self._store.check(list(keys.values())) and self._store.has_extended_api():
            return dict(zip(keys, map(bytes, self._store.multi_get(list(keys.values())))))
        return {rank: bytes(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}

    def _connect(self, rank: int, found: bytes, patience_s: float) -> _Line | None:
        """Return a connection to a lower rank; None if it cannot be reached now, or not within a time."""
        try:
            address = Address.read(found)
            made = socket.create_connection((address.host, address.port), patience_s)
        except (OSError, PayloadError):
            return None
        try:
            hello = _HELLO.pack(_MAGIC, self.rank)
            made.sendall(hello + address.proof(hello, self._key))
            answer = bytearray()
            while len(answer) < PROOF_BYTES:
                part = made.recv(PROOF_BYTES - len(answer))
                if not part:
                    raise OSError("the connection was closed")
                answer += part
            if not hmac.compare_digest(answer, address.proof(_WELCOME + hello, self._key)):
                raise OSError("somebody else listens there")
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Until this arrives, the other side does not count this rank as connected.
            made.sendall(BEAT)
            made.setblocking(False)
        except OSError:
            made.close()
            return None
        return _Line(made, rank)

    # ------------------------------------------------------------------ the thread that reads

    def _loop(self) -> None:
        due_s = time.monotonic()
        while not self._closed.is_set():
            for key, _ in self._selector.select(max(due_s - time.monotonic(), 0.0)):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._woken:
                    self._welcome()
                else:
                    self._receive(key.data)
            if time.monotonic() >= due_s:
                self._beat()
                self._tick()
                due_s = time.monotonic() + BEAT_S
        self.forget()

    def _beat(self) -> None:
        with self._lock:
            for line in self._lines.values():
                line.send(b"" if line.unsent else BEAT)
        for line in [s for s in self._strangers if time.monotonic() - s.since_s > HANDSHAKE_S]:
            self._drop(line)

    def _accept(self) -> None:
        try:
            made, _ = self._listener.accept()
        except OSError:
            return
        if len(self._strangers) >= MOST_STRANGERS:
            made.close()
            return
        made.setblocking(False)
        line = _Line(made)
        self._strangers.add(line)
        self._selector.register(made, selectors.EVENT_READ, line)

    def _welcome(self) -> None:
        """Add the connections that the other thread has made."""
        with contextlib.suppress(OSError):
            self._woken.recv(MOST_READ)
        while self._new:
            line = self._new.popleft()
            self._selector.register(line.socket, selectors.EVENT_READ, line)
            self._meet(line)

    def _meet(self, line: _Line) -> None:
        rank, line.met = line.rank, True
        with self._lock:
            before = self._lines.pop(rank, None)
            self._lines[rank] = line
            # A training may fail in its first seconds, before all ranks are connected.
            for frame in tuple(self._told):
                line.send(frame)
        if before is not None:
            self._drop(before)
        self._heard(rank, [])

    def _receive(self, line: _Line) -> None:
        try:
            data = line.socket.recv(MOST_READ)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        except OSError as error:
            self._lose(line, f"the connection to it broke: {error.strerror}")
            return
        if not data:
            self._lose(line, None)
        elif line.rank == STRANGER:
            self._introduce(line, data)
        else:
            self._read(line, data)

    def _introduce(self, line: _Line, data: bytes) -> None:
        """Identify the rank of a peer."""
        line.hello += data
        if len(line.hello) < _HELLO_BYTES:
            return
        hello, proof = bytes(line.hello[: _HELLO.size]), bytes(line.hello[_HELLO.size : _HELLO_BYTES])
        magic, rank = _HELLO.unpack(hello)
        allowed = magic == _MAGIC and self.rank < rank < self.world_size
        if not allowed or not hmac.compare_digest(proof, self._own.proof(hello, self._key)):
            self._drop(line)
            return
        line.rank = rank
        line.send(self._own.proof(_WELCOME + hello, self._key))
        rest = bytes(line.hello[_HELLO_BYTES:])
        if rest:
            self._read(line, rest)

    def _read(self, line: _Line, data: bytes) -> None:
        if not line.met:
            self._strangers.discard(line)
            self._meet(line)
        try:
            notices = line.inbox.feed(data)
        except PayloadError as error:
            self._lose(line, f"what it sends cannot be read: {error}")
            return
        self._heard(line.rank, notices)

    def _lose(self, line: _Line, why: str | None) -> None:
        known = self._lines.get(line.rank) is line
        self._drop(line)
        if known:
            with self._lock:
                self._lines.pop(line.rank, None)
            self._ended(line.rank, why)

    def _drop(self, line: _Line) -> None:
        self._strangers.discard(line)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(line.socket)
        line.socket.close()


def _key(rank: int) -> str:
    return f"gradwire/peers/{rank}"


def _forget_all() -> None:
    for connections in list(_open):
        connections.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
