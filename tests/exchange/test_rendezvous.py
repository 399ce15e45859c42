"""How Gloo's connections find one another in a store."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradwire.exchange.drivers.rendezvous import Rendezvous

TIMEOUT = timedelta(seconds=20)


class Noting:
    """A store that notes the questions to it, and answers with nothing if its keys were removed."""

    def __init__(self, inner: Any, *, many: bool = True, removed: bool = False) -> None:
        self._inner, self._many, self._removed = inner, many, removed
        self.asked: list[Any] = []

    def has_extended_api(self) -> bool:
        """Return whether several values can be asked for at once."""
        return self._many

    def set(self, key: str, value: Any) -> None:
        """Write a value."""
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        """Return a value."""
        self.asked.append(key)
        return b"" if self._removed else bytes(self._inner.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return several values."""
        self.asked.append(tuple(keys))
        return [b"" if self._removed else bytes(value) for value in self._inner.multi_get(list(keys))]


def connect(stores: Sequence[Any]) -> list[Any]:
    """Connect as many ranks as there are stores, and return what they added up, or their errors."""
    found: list[Any] = [None] * len(stores)

    def rank(number: int) -> None:
        try:
            backend = dist.ProcessGroupGloo(Rendezvous(stores[number], len(stores)), number, len(stores), TIMEOUT)
            value = torch.tensor([float(number)])
            backend.allreduce([value], dist.AllreduceOptions()).wait()
            found[number] = value.item()
        except RuntimeError as error:
            found[number] = error

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("many", [True, False])
def test_ranks_are_found_by_one_question_for_all(many: bool) -> None:
    inner = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # Who waits in a connection keeps others from using it.
    stores = [Noting(inner.clone(), many=many) for _ in range(3)]
    assert connect(stores) == [3.0] * 3
    assert [len(store.asked) for store in stores] == [1 if many else 3] * 3


def test_keys_that_were_removed_are_an_error_and_not_the_end_of_the_process() -> None:
    for many in (True, False):
        inner = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store = Noting(inner, many=many, removed=True)
        for rank in range(2):
            inner.set(f"0/{rank}", "an address")
        with pytest.raises(RuntimeError, match="they have gone on"):
            dist.ProcessGroupGloo(Rendezvous(store, 2), 0, 2, TIMEOUT)


def test_other_keys_are_asked_for_one_by_one() -> None:
    inner = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = Noting(inner)
    for key in ("name", "number/7", "0/1", "0/0"):
        inner.set(key, key)
    made = Rendezvous(store, 2)
    made.wait(["name"])
    assert [made.get(key) for key in ("name", "number/7", "0/1", "0/0")] == [b"name", b"number/7", b"0/1", b"0/0"]
    assert store.asked == ["name", "number/7", ("0/0", "0/1")]
