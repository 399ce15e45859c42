"""The process that keeps the store of a membership."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import secrets
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gradwire.errors import GradwireError, IncompatibleError
from gradwire.link.membership.board import ASKS, REMOVED, address_of
from gradwire.link.membership.records import MOST_BYTES, Epoch, Removed, RunRecord, Seal, new_id
from gradwire.link.membership.spare_stores import RUN
from gradwire.link.membership.steps import FIRST, epoch_key
from gradwire.link.membership.store_connections import another, brief_lookups, forget_name_servers

LOOK_S = 0.25
"""Time between two looks for a new epoch."""

BEGIN, ANSWER = timedelta(seconds=60), timedelta(seconds=5)
"""Time that the store has to begin, on however busy a machine, and to answer later on."""

KEPT_EPOCHS = 3
"""Number of epochs whose keys stay in the store."""

MOST_STATE_BYTES = 4 * MOST_BYTES

BACKLOG = 1024
"""Number of connections that wait to be accepted: strangers' among them."""

AHEAD = 8
"""Number of epochs by which members may be ahead of the latest one that the coordinator has found."""

MOST_DIGITS = 18
"""Digits of the largest number of requests. The store counts up to nineteen."""

KINDS = frozenset({RUN, ASKS, REMOVED, "ask", "invited", "named", "told"})
"""First parts of the keys that are written for a whole run."""

KINDS_OF_EPOCHS = frozenset({"candidate", "epoch", "links", "offer", "ready", "report"})
"""First parts of the keys that members write for one epoch, whose number follows. Others are removed."""


class Coordinator:
    """Keeps the store of a membership, torch's TCPStore, and a little of it in a file; computes nothing.

    The store is in memory. What must outlive the process is the run's number and secret and its first and latest
    epoch: the coordinator looks for new epochs that verify under the secret, and writes each into its file, which is
    always either the old or the new one. Everything else is written again by the members when they find it missing.

    Whoever reaches the port can write into the store and remove from it, since TCPStore knows no password. The
    coordinator writes again what it knows to be right, and removes keys that no member writes.

    Args:
        listen: Address to listen at: ``":29400"`` for all IPv4 addresses of this machine, ``"10.0.0.1:29400"`` for one
            of them, or ``"[::]:29400"``; port 0 chooses a free one.
        secret: The secret that members share; None: drawn at random, or read from the file.
        state: File to go on from, and to write; it holds the secret, and only its owner can read it. None: a
            coordinator that is started again begins another run.
        finds_names: False, in a process that does nothing else: from now on, this process finds the names of other
            machines in its own table alone (``/etc/hosts``). torch's store has the name of each client looked up for
            its log, and serves nobody until a name server has answered.

    Attributes:
        port: Port of the store.
        secret: The secret.
        epoch: The latest epoch; None before the first.

    Raises:
        HyperparameterError: the address or the secret is wrong.
        IncompatibleError: the file is not a coordinator's, or has another secret.
        GradwireError: the port is taken, or the file cannot be written.
    """

    def __init__(
        self,
        listen: str = ":29400",
        *,
        secret: str | None = None,
        state: str | os.PathLike[str] | None = None,
        finds_names: bool = True,
    ) -> None:
        host, port = address_of(listen)
        self._path = None if state is None else Path(state)
        kept = self._read()
        if kept is not None and secret is not None and secret != kept["secret"]:
            raise IncompatibleError(f"{self._path} is of a run with another secret: give that one, or another file")
        self.secret: str = kept["secret"] if kept else secret or secrets.token_urlsafe(24)
        self._run = RunRecord(kept["run"] if kept else new_id())
        self._seal = Seal(self.secret, self._run.id)
        self._first: str | None = kept["first"] if kept else None
        self._latest: str | None = kept["latest"] if kept else None
        self.epoch = self._opened(kept) if kept else None
        # A store that begins anew has no epoch between the first and the latest one.
        self._removed = 0 if self.epoch is None else self.epoch.number - 1
        # Torch's own socket would take all interfaces. It would also take IPv6, over which this machine's own workers
        # have addresses that /etc/hosts does not name: torch looks up the name of each client, which takes 0.1 s where
        # a name server does not answer, and the store stands still meanwhile.
        self._store: Any
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
            own, its_port = listening.getsockname()[:2]
            own = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(own, own)
            if not finds_names:
                forget_name_servers()
            with brief_lookups():
                self._store = dist.TCPStore(
                    own, its_port, is_master=True, wait_for_workers=False, timeout=BEGIN,
                    master_listen_fd=listening.detach(),
                )  # fmt: skip
            self._client: Any = another(self._store)
        except (OSError, RuntimeError, dist.DistError) as error:
            raise GradwireError(f"the coordinator cannot listen at {listen}: {error}") from error
        self.port: int = self._store.port
        for store in (self._store, self._client):
            store.set_timeout(ANSWER)
        self._write()
        self._is_written, self._has_warned = True, False
        self._keys = 0
        # Workers wait for the key of the run, and find all others then: it is the last one.
        self._guard()
        # A signal handler may close it while this thread waits, which would then hold the lock of an event.
        self._closed: queue.SimpleQueue[None] = queue.SimpleQueue()

    def serve(self) -> None:
        """Keep the store until :meth:`close` is called."""
        while not self._is_closed():
            try:
                self.look()
            except (RuntimeError, dist.DistError) as error:
                # Strangers may keep the store busy for longer than a look waits. Members still find what is in it.
                logging.getLogger("gradwire").warning("the store of the membership did not answer: %s", error)
                with contextlib.suppress(RuntimeError, dist.DistError):
                    self._client = another(self._store)

    def close(self) -> None:
        """End :meth:`serve`. Signal handlers may call it."""
        self._closed.put(None)

    def _is_closed(self) -> bool:
        """Wait until the next look is due, and return whether there is none."""
        try:
            self._closed.put(self._closed.get(timeout=LOOK_S))
        except queue.Empty:
            return False
        return True

    def look(self) -> None:
        """Write new epochs into the file, and remove what belongs to old ones from the store.

        If the file cannot be written, warn of it once, and try again at the next look: members need the store alone.
        """
        found = self.epoch
        while True:
            number = 1 if found is None else found.number + 1
            value = self._value(epoch_key(number))
            epoch = None if value is None else self._seal.open(epoch_key(number), value, Epoch)
            if epoch is None or value is None:
                break
            found, self._latest = epoch, value.decode("ascii")
            self._first = self._first or self._latest
        if found is not self.epoch:
            self.epoch, self._is_written = found, False
            if found is not None:
                self._removed = max(self._removed, found.number - KEPT_EPOCHS)
        if not self._is_written:
            self._try_to_write()
        self._guard()
        self._sweep()

    def _guard(self) -> None:
        """Write what the coordinator knows to be right, unless it is there."""
        known = {} if self.epoch is None else {FIRST: self._first, epoch_key(self.epoch.number): self._latest}
        # Before keys are removed: a worker that was stopped for long must not write an epoch that has been.
        known[REMOVED] = self._seal.close(REMOVED, Removed(self._removed))
        for key, value in {**known, RUN: Seal(self.secret).close(RUN, self._run)}.items():
            if value is not None and self._value(key) != value.encode():
                self._client.set(key, value)

        asks = self._value(ASKS)
        if asks is not None and not (len(asks) <= MOST_DIGITS and asks.isdigit()):
            # The store would add to it beyond its range, or to what is no number.
            self._client.set(ASKS, "0")

    def _value(self, key: str) -> bytes | None:
        return bytes(self._client.get(key)) if self._client.check([key]) else None

    def _sweep(self) -> None:
        """Remove the keys of old epochs, which the store would keep for ever, and those that no member writes."""
        list_keys = getattr(self._client, "list_keys", None)
        if list_keys is None or self._client.num_keys() == self._keys:
            return
        for key in list_keys():
            if self._is_left_over(key):
                self._client.delete_key(key)
        self._keys = self._client.num_keys()

    def _is_left_over(self, key: str) -> bool:
        kind, _, rest = key.partition("/")
        if kind in KINDS:
            return False
        number, latest = rest.partition("/")[0], 0 if self.epoch is None else self.epoch.number
        if kind not in KINDS_OF_EPOCHS or not (number.isascii() and number.isdecimal()):
            return True
        return not (number == "1" or latest - KEPT_EPOCHS < int(number[:18]) <= latest + AHEAD)

    # ------------------------------------------------------------------ the file

    def _read(self) -> dict[str, Any] | None:
        if self._path is None or not self._path.exists():
            return None
        try:
            with self._path.open("rb") as file:
                kept = json.loads(file.read(MOST_STATE_BYTES))
            texts = ("secret", "run", "first", "latest")
            whole = isinstance(kept, dict) and kept.keys() == set(texts)
            if not whole or not all(isinstance(kept[t], str) or (kept[t] is None and t in texts[2:]) for t in texts):
                raise ValueError("it has other fields")
            RunRecord.read({"id": kept["run"]})
        except (OSError, ValueError, RecursionError) as error:
            raise IncompatibleError(f"{self._path} is not the state of a coordinator: {error}") from None
        return dict(kept)

    def _opened(self, kept: dict[str, Any]) -> Epoch | None:
        """Return the latest epoch of a file."""
        if kept["latest"] is None:
            return None
        for number in self._numbers(kept["latest"]):
            found = self._seal.open(epoch_key(number), kept["latest"].encode(), Epoch)
            if found is not None:
                return found
        raise IncompatibleError(f"{self._path} has changed since it was written: its epoch does not verify")

    @staticmethod
    def _numbers(value: str) -> list[int]:
        """Return the number that an epoch's text names: the seal is that of its key."""
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            return [int(json.loads(value[64:])["number"])]
        return []

    def _try_to_write(self) -> None:
        try:
            self._write()
        except GradwireError as error:
            if not self._has_warned:
                told = "%s: started again, the coordinator would not know the latest epoch; it goes on to try"
                logging.getLogger("gradwire").warning(told, error)
            self._has_warned = True
        else:
            self._is_written, self._has_warned = True, False

    def _write(self) -> None:
        if self._path is None:
            return
        kept = {"secret": self.secret, "run": self._run.id, "first": self._first, "latest": self._latest}
        partial = self._path.with_name(self._path.name + ".partial")
        try:
            # It holds the secret: what is there, such as another user's file or a link, is not written through.
            partial.unlink(missing_ok=True)
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                json.dump(kept, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self._path)
        except OSError as error:
            raise GradwireError(f"the coordinator cannot write {self._path}: {error}") from error
