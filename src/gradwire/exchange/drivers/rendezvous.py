"""The store through which Gloo's connections find one another: few questions to it, and none answered by nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")

_OF_RANK = re.compile(r"(.*?)([0-9]+)")


class Rendezvous(dist.Store):
    """A store that asks for what all ranks write when it is asked for what one of them writes.

    Gloo waits for each rank's address and then asks for it: to torch's TCPStore these are three round trips for each
    rank, before it connects to any. Addresses are under keys that end in the ranks' numbers, and Gloo needs them all.
    So the first question waits for all of them, and takes them by one question; further ones are answered from memory.
    That is right for values that are written once.

    TCPStore answers with an empty value if a key is removed between the two steps of a question, as happens to a member
    of a training that the others have left behind. Gloo reads beyond the end of such a value, which ends the process.

    Args:
        store: The store; it waits for as long as its own timeout says.
        world_size: Number of ranks.
        waits_on: Called after that time; True to wait again.
    """

    def __init__(self, store: Any, world_size: int, waits_on: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self._store, self._world_size, self._waits_on = store, world_size, waits_on
        self._many: bool = store.has_extended_api()
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        """Write a value."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Wait for a value and return it.

        Raises:
            RuntimeError: it was removed.
        """
        self._learn(key)
        return self._known[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for values, as long as the store's own timeout says.

        Raises:
            RuntimeError: one was removed.
        """
        for key in keys:
            self._learn(key)

    def _learn(self, key: str) -> None:
        if key in self._known:
            return
        parts = _OF_RANK.fullmatch(key)
        if self._many and parts is not None and int(parts[2]) < self._world_size:
            family = [f"{parts[1]}{rank}" for rank in range(self._world_size)]
            found = dict(zip(family, map(bytes, self._waited(partial(self._store.multi_get, family)))))
        else:
            found = {key: bytes(self._waited(partial(self._store.get, key)))}
        if not all(found.values()):
            raise RuntimeError("the store has no longer what other ranks wrote to be found: they have gone on")
        self._known |= found

    def _waited(self, ask: Callable[[], T]) -> T:
        while True:
            try:
                return ask()
            except dist.DistStoreError as error:
                if "timeout" not in str(error) or not self._waits_on():
                    raise
