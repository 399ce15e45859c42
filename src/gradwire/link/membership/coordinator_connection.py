"""A member's connection to the coordinator, which may be away for a while."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from gradwire.errors import ExchangeError, IncompatibleError
from gradwire.link.membership.records import RunRecord, Seal
from gradwire.link.membership.spare_stores import RUN
from gradwire.link.membership.store_connections import connect

CONNECT_S = 2.0
"""Time of one attempt to reach the coordinator."""

PAUSE_S = 0.2
"""Time between two attempts."""

PATIENCE_S = 120.0
"""Time that the coordinator may be away before a member that needs it gives up."""

SLICE_S = 0.05
"""Time between two looks whether the coordinator is away, for those that do not wait for it."""

MOST_KEPT = 32
"""Number of records that a member writes again after the coordinator was started again."""

BROKEN = (RuntimeError, dist.DistError, OSError)
"""What is raised where a connection has broken, or cannot be made."""

T = TypeVar("T")


class CoordinatorConnection:
    """One connection to the coordinator, for one thread at a time.

    Args:
        host, port: Address of the coordinator.
        secret: The secret that members share.
        patience_s: Time that the coordinator may be away before :meth:`do` raises.
        lost: Called when the connection has broken.

    Attributes:
        lock: Held while a thread uses the connection.
        seal: Seals the records of the run that the coordinator keeps.
        store: The connection; None while there is none.
        heed: Called while a question waits for the coordinator to be back; what it raises ends the wait.
        is_away: True from a question without an answer, or an attempt to connect again that failed, until the next one
            that succeeds.
    """

    def __init__(self, host: str, port: int, secret: str, patience_s: float, lost: Callable[[], object]) -> None:
        self._host, self._port, self._patience_s, self._lost = host, port, patience_s, lost
        self._secret, self.seal = secret, Seal(secret)
        self.lock = threading.RLock()
        self.store: Any = None
        self.heed: Callable[[], None] = lambda: None
        self.is_away = self._has_warned = self._is_closed = False
        self._run = ""
        self._again: OrderedDict[str, str] = OrderedDict()

    def do(self, work: Callable[[Any], T]) -> T:
        """Do some work on the store; connect again, and do it again, as long as it is away.

        Raises:
            ExchangeError: it is away for too long, or this connection was closed.
            IncompatibleError: the secret is not that of the run, or the coordinator keeps another run now.
        """
        began_s = time.monotonic()
        with self.lock:
            while True:
                if self._is_closed:
                    raise ExchangeError("this worker has closed its connection to the coordinator")
                broke = self.store is not None
                try:
                    return self._done(work)
                except BROKEN as error:
                    self._drop()
                    if broke:
                        continue  # the connection alone may have ended
                    self.is_away = True
                    self._warn()
                    if time.monotonic() - began_s > self._patience_s:
                        raise ExchangeError(
                            f"the coordinator at {self._host}:{self._port} was out of reach for "
                            f"{self._patience_s:.0f} s: start it again with the same --state file, and look at the "
                            "network"
                        ) from error
                self.heed()
                time.sleep(PAUSE_S)

    def do_unless_away(self, work: Callable[[Any], T]) -> T | None:
        """Do some work on the store; return None at once if it is away, or ends meanwhile.

        It waits for an answer as long as the operating system takes the connection to be there.

        Raises:
            IncompatibleError: as :meth:`do`.
        """
        began_s = time.monotonic()
        while not self.is_away and not self._is_closed:
            # Another thread that has the lock may be waiting for the coordinator, or for an answer that never comes.
            if self.lock.acquire(timeout=SLICE_S):
                try:
                    return None if self.is_away else self._done(work)
                except BROKEN:
                    self._drop()
                    self.is_away = True
                finally:
                    self.lock.release()
            elif time.monotonic() - began_s > CONNECT_S:
                self.is_away = True
        return None

    def try_again(self) -> None:
        """Try once to reach a coordinator that is away, unless another thread does.

        Raises:
            IncompatibleError: as :meth:`do`.
        """
        if self.is_away and not self._is_closed and self.lock.acquire(blocking=False):
            try:
                self._done(lambda store: None)
            except BROKEN:
                self._warn()
            finally:
                self.lock.release()

    def keep(self, key: str, value: str) -> None:
        """Write a value when the connection is made again, if the coordinator lacks it then."""
        self._again[key] = value
        self._again.move_to_end(key)
        while len(self._again) > MOST_KEPT:
            self._again.popitem(last=False)

    def close(self) -> None:
        """End the connection, from any thread: what waits for the coordinator raises."""
        self._is_closed, self.store = True, None

    def _done(self, work: Callable[[Any], T]) -> T:
        if self.store is None:
            self.store = self._connect()
        done = work(self.store)
        self.is_away = False
        if self._has_warned:
            self._has_warned = False
            logging.getLogger("gradwire").warning("the coordinator at %s:%d is back", self._host, self._port)
        return done

    def _drop(self) -> None:
        self.store = None
        self._lost()

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            logging.getLogger("gradwire").warning(
                "the coordinator at %s:%d is out of reach: nobody can come in, and when a member leaves or is lost all "
                "others wait for it; until then rounds go on; start it again with the same --state file",
                self._host, self._port,
            )  # fmt: skip

    def _connect(self) -> Any:
        store = connect(self._host, self._port, CONNECT_S)
        store.wait([RUN], timedelta(seconds=CONNECT_S))
        run = Seal(self._secret).open(RUN, bytes(store.get(RUN)), RunRecord)
        if run is None:
            raise IncompatibleError(
                f"the secret is not that of the run at {self._host}:{self._port}: take the one that `gradwire "
                "coordinate` printed there, or its --secret-file"
            )
        if self._run and run.id != self._run:
            raise IncompatibleError(
                f"the coordinator at {self._host}:{self._port} keeps another run now: it was started again without its "
                "--state file; start all workers again, from a checkpoint"
            )
        self._run, self.seal = run.id, Seal(self._secret, run.id)
        # A coordinator that was started again has lost all but the first and the latest epoch in its file.
        for key, value in list(self._again.items()):
            store.compare_set(key, "", value)
        return store
