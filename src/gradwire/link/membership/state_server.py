"""A member's state for newcomers, over connections of its own, while the member goes on.

A connection begins with proofs that both sides know the secret. Then the newcomer asks, and the server answers:

- the table of the state, with the digest of each piece;
- a piece;
- an entry of the log of what has changed since: empty if there is none yet.

A request is one byte for its kind and four for a number, an answer four bytes with its length and the answer itself.
All answers verify under the secret: pieces by the digests of the table.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Protocol

from gradwire.errors import PayloadError
from gradwire.link.membership.snapshot import Snapshot
from gradwire.link.peers.addresses import listening

MAGIC = b"gwstate1"
NONCE_BYTES = PROOF_BYTES = 32
REQUEST, LENGTH = struct.Struct(">BI"), struct.Struct(">I")
TABLE, PIECE, ENTRY = 1, 2, 3

HANDSHAKE_S = 5.0
"""Time that a connection has for its proofs, all together."""

IDLE_S = 30.0
"""Time without a request after which a server closes a connection, and ends if it was the last."""

MOST_CONNECTIONS, MOST_UNPROVEN = 16, 32
"""Largest numbers of connections with a proof, and of those that have not given theirs yet."""


class Log(Protocol):
    """What has changed since the state was taken."""

    def entry(self, number: int) -> bytes | None:
        """Return an entry; empty if there is none yet, None if there will be none."""

    def close(self) -> None:
        """Log nothing further."""


def served_key(secret: str, run: str) -> bytes:
    """Return the key under which state is served in a run."""
    return hashlib.blake2b(f"gradwire served state\0{run}".encode(), key=secret.encode(), digest_size=32).digest()


def proof(key: bytes, who: bytes, nonces: bytes) -> bytes:
    """Return the proof of one side that it knows the key."""
    return hmac.digest(key, b"gradwire " + who + b"\0" + nonces, "sha256")


def receive(made: socket.socket, size: int, end_s: float | None = None) -> bytes:
    """Return so many bytes from a connection.

    Args:
        end_s: When all of them must be there, by ``time.monotonic``; None: no part may take longer than the timeout.

    Raises:
        OSError: it has ended, or took too long.
    """
    found = bytearray(size)
    view, at = memoryview(found), 0
    while at < size:
        if end_s is not None:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise OSError("the connection takes too long")
            made.settimeout(left_s)
        part = made.recv_into(view[at:])
        if not part:
            raise OSError("the connection has ended")
        at += part
    return bytes(found)


class StateServer:
    """Serves one state, by threads of its own.

    It ends by itself when nobody has asked for :data:`IDLE_S`, and then holds neither the state nor its log.

    Args:
        store: Store of the members, towards which this machine's address is found.
        snapshot: The state. It must not change.
        key: See :func:`served_key`.
        log: What has changed since.

    Attributes:
        host, port: Address.
        alive: True until the server has ended.

    Raises:
        OSError: no socket can listen.
    """

    def __init__(self, store: object, snapshot: Snapshot, key: bytes, log: Log | None = None) -> None:
        self._snapshot: Snapshot | None = snapshot
        self._key, self._log = key, log
        self._listener, address = listening(store)
        self.host, self.port = address.host, address.port
        self._listener.setblocking(True)
        self._listener.settimeout(1.0)
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._unproven: set[socket.socket] = set()
        self._table: bytes | None = None
        self._asked_s = time.monotonic()
        self.alive = True
        threading.Thread(target=self._accept, name="gradwire state", daemon=True).start()

    def close(self) -> None:
        """End all connections."""
        self.alive = False
        with self._lock:
            for made in (self._listener, *self._connections, *self._unproven):
                with contextlib.suppress(OSError):
                    made.shutdown(socket.SHUT_RDWR)
        if self._log is not None:
            self._log.close()

    def _accept(self) -> None:
        try:
            while self.alive:
                if not self._connections and time.monotonic() - self._asked_s > IDLE_S:
                    break
                try:
                    made, _ = self._listener.accept()
                except TimeoutError:
                    continue
                except OSError:
                    break
                with self._lock:
                    if len(self._unproven) >= MOST_UNPROVEN:
                        # Strangers shall keep no newcomer out: any of those that wait makes room.
                        with contextlib.suppress(OSError):
                            secrets.choice(list(self._unproven)).shutdown(socket.SHUT_RDWR)
                    self._unproven.add(made)
                threading.Thread(target=self._serve, args=(made,), name="gradwire state", daemon=True).start()
        finally:
            self.alive = False
            self._listener.close()
            if self._log is not None:
                self._log.close()
            # It may be as large as the model, and who asked for it may keep the server until it serves again.
            self._snapshot = self._table = None

    def _serve(self, made: socket.socket) -> None:
        with contextlib.suppress(OSError), self._closing(made):
            end_s = time.monotonic() + HANDSHAKE_S
            made.settimeout(HANDSHAKE_S)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            hello = receive(made, len(MAGIC) + NONCE_BYTES, end_s)
            theirs, ours = hello[len(MAGIC) :], secrets.token_bytes(NONCE_BYTES)
            if hello[: len(MAGIC)] != MAGIC:
                return
            made.sendall(ours)
            told = receive(made, PROOF_BYTES, end_s)
            if not hmac.compare_digest(told, proof(self._key, b"newcomer", theirs + ours)) or not self._admits(made):
                return
            made.sendall(proof(self._key, b"member", theirs + ours))
            made.settimeout(IDLE_S)
            while self.alive:
                kind, number = REQUEST.unpack(receive(made, REQUEST.size))
                self._asked_s = time.monotonic()
                answer = self._answer(kind, number)
                if answer is None:
                    return
                made.sendall(LENGTH.pack(len(answer)))
                made.sendall(answer)
                self._asked_s = time.monotonic()

    def _admits(self, made: socket.socket) -> bool:
        """Count a connection with a proof, unless there are too many."""
        with self._lock:
            self._unproven.discard(made)
            admitted = len(self._connections) < MOST_CONNECTIONS
            if admitted:
                self._connections.add(made)
        return admitted

    @contextlib.contextmanager
    def _closing(self, made: socket.socket) -> Iterator[None]:
        try:
            yield
        finally:
            with self._lock:
                self._connections.discard(made)
                self._unproven.discard(made)
            made.close()

    def _answer(self, kind: int, number: int) -> bytes | None:
        """Return the answer to a request; None ends the connection."""
        snapshot = self._snapshot
        if snapshot is None:
            return None
        if kind == TABLE:
            with self._lock:
                table = self._table = self._table or snapshot.table(self._key)
            return table
        if kind == PIECE and number < len(snapshot.pieces):
            return snapshot.coded(snapshot.pieces[number])
        if kind == ENTRY and self._log is not None:
            return self._log.entry(number)
        return None


class StateConnection:
    """A newcomer's connection to one server.

    Args:
        host, port: Address of the server.
        key: See :func:`served_key`.
        timeout_s: Time without a byte after which the server counts as gone.

    Raises:
        OSError: it cannot be reached.
        PayloadError: it does not know the secret.
    """

    def __init__(self, host: str, port: int, key: bytes, timeout_s: float) -> None:
        self._made = socket.create_connection((host, port), HANDSHAKE_S)
        try:
            self._made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ours = secrets.token_bytes(NONCE_BYTES)
            self._made.sendall(MAGIC + ours)
            nonces = ours + receive(self._made, NONCE_BYTES)
            self._made.sendall(proof(key, b"newcomer", nonces))
            if not hmac.compare_digest(receive(self._made, PROOF_BYTES), proof(key, b"member", nonces)):
                raise PayloadError(f"who serves state at {host}:{port} does not know the secret")
            self._made.settimeout(timeout_s)
        except (OSError, PayloadError):
            self._made.close()
            raise

    def ask(self, kind: int, number: int = 0) -> None:
        """Send a request."""
        self._made.sendall(REQUEST.pack(kind, number))

    def answer(self, most: int) -> bytes:
        """Return the answer to the earliest request without one.

        Raises:
            OSError: the connection has ended.
            PayloadError: it is longer than ``most`` bytes.
        """
        (size,) = LENGTH.unpack(receive(self._made, LENGTH.size))
        if size > most:
            raise PayloadError(f"a member announced {size} bytes of state where at most {most} are expected")
        return receive(self._made, size)

    def close(self) -> None:
        """End the connection, from any thread."""
        with contextlib.suppress(OSError):
            self._made.shutdown(socket.SHUT_RDWR)
        self._made.close()
