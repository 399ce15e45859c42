"""The steps of the optimizer since a state was taken, logged by a member, and taken again by a newcomer.

Members of a training that exchanges gradients hold the same means, and their optimizers take the same steps. A step
needs the gradients that the optimizer sees (after the program has clipped them, for example) and its hyper-parameters.
The means of ternary and quantised methods have few distinct values, so that a step takes a fraction of the state's
bytes. Whether all went alike is decided by digests, not here: a program may change parameters otherwise.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from gradwire.errors import IncompatibleError, PayloadError
from gradwire.link.membership.snapshot import Snapshot

MOST_WAITING = 8
"""Steps that wait to be coded, at most: each holds a copy of all gradients."""


class StepLog:
    """Logs the steps of an optimizer, coded by a thread of its own.

    Args:
        optimizer: The optimizer.
        rounds: Returns the number of rounds that counted.
        key: Key of the digests.
        most_bytes: Bytes after which the log ends: a newcomer that is so far behind had better take the state.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, rounds: Callable[[], int], key: bytes, most_bytes: int
    ) -> None:
        self._rounds, self._key, self._most_bytes = rounds, key, most_bytes
        self._changed = threading.Condition()
        self._coded: list[bytes] = []
        self._taken, self._bytes = 0, 0
        self._ended = self._closed = False
        self._waiting: queue.SimpleQueue[Snapshot | None] = queue.SimpleQueue()
        self._remove: Callable[[], None] = optimizer.register_step_pre_hook(self._before).remove
        threading.Thread(target=self._code, name="gradwire steps", daemon=True).start()

    @property
    def goes_on(self) -> bool:
        """False once the log has ended."""
        return not self._ended

    def entry(self, number: int) -> bytes | None:
        with self._changed:
            # One that was taken is being coded.
            self._changed.wait_for(lambda: self._ended or not len(self._coded) <= number < self._taken)
            if number < len(self._coded):
                return self._coded[number]
            return b"" if number == self._taken and not self._ended else None

    def close(self) -> None:
        """Log nothing further, and drop what was logged."""
        self._remove()
        self._end()
        with self._changed:
            self._closed = True
            self._coded.clear()

    def _end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._waiting.put(None)

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._ended:
            return
        if self._taken - len(self._coded) >= MOST_WAITING or self._bytes > self._most_bytes:
            self._end()
            return
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        try:
            step = {"round": self._rounds(), "groups": groups, "gradients": [p.grad for p in _parameters(optimizer)]}
            made = Snapshot.of(step, copied=True)
        except IncompatibleError:
            self._end()
            return
        with self._changed:
            self._taken += 1
        self._waiting.put(made)

    def _code(self) -> None:
        while (step := self._waiting.get()) is not None:
            if self._ended:
                continue
            coded = step.packed(self._key)
            with self._changed:
                if self._closed:
                    continue
                self._coded.append(coded)
                self._bytes += len(coded)
                self._changed.notify_all()


def replay(optimizer: torch.optim.Optimizer, message: bytes, key: bytes) -> int:
    """Take a logged step, and return the number of the round that it applied.

    Raises:
        PayloadError: it is not a step of such an optimizer.
    """
    step = Snapshot.unpacked(message, key).state()
    parameters = list(_parameters(optimizer))
    try:
        groups, gradients, round = step["groups"], step["gradients"], int(step["round"])
        alike = len(groups) == len(optimizer.param_groups) and len(gradients) == len(parameters)
        if not alike or any(g is not None and g.shape != p.shape for g, p in zip(gradients, parameters)):
            raise ValueError("it is a step of another optimizer")
        for own, group in zip(optimizer.param_groups, groups):
            own.update({name: value for name, value in group.items() if name in own and name != "params"})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PayloadError(f"a logged step cannot be taken: {str(error)[:200]}") from None
    before = [p.grad for p in parameters]
    for p, gradient in zip(parameters, gradients):
        p.grad = gradient
    optimizer.step()
    for p, gradient in zip(parameters, before):
        p.grad = gradient
    return round


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])
