"""Checks of what arrives on a device, whose results nobody waits for while a round is under way."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from gradwire.exchange.deferred_checks import Checks, Flag
from gradwire.exchange.drivers.devices import Device

__all__ = ["LateChecks", "Verdict"]


class LateChecks(Checks):
    """Keeps the results of checks on the device until a :class:`Verdict` takes them.

    A thread that reads a result waits until the device has done all work before it, and meanwhile enqueues none. So
    decoders go on, whatever the bytes are, and :meth:`so_far` says whether what they wrote is a mean.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: list[tuple[torch.Tensor, Callable[[], Exception]]] = []
        self._so_far: Flag = True

    def require(self, holds: Flag, explain: Callable[[], Exception]) -> None:
        if not isinstance(holds, torch.Tensor):
            super().require(holds, explain)
            return
        with self._lock:
            self._made.append((holds, explain))
            self._so_far = self._so_far & holds

    def so_far(self) -> Flag:
        with self._lock:
            return self._so_far

    def take(self) -> list[tuple[torch.Tensor, Callable[[], Exception]]]:
        """Return the results that nobody has taken, each with what explains it, and begin anew."""
        with self._lock:
            made, self._made, self._so_far = self._made, [], True
        return made


class Verdict:
    """What a device has to say of a round: enqueued at the round's end, read when the next one needs to know.

    Args:
        device: On whose current stream the round was worked on.
        finite: Whether the round's means are finite; None where nobody looked.
        checks: Of what arrived since the last verdict; taken.
    """

    def __init__(self, device: Device, finite: Flag | None, checks: LateChecks) -> None:
        self._finite, self._made = finite, checks.take()
        flags = [holds for holds, _ in self._made]
        if isinstance(finite, torch.Tensor):
            flags.append(finite)
        self._read = torch.zeros(0, dtype=torch.bool)
        if flags:
            together = torch.stack(flags)
            self._read = device.pinned(together)
            device.copy_async(self._read, together)
        self._mark = device.mark()

    def reached(self) -> bool:
        """Return whether the device has ended the round, so that :meth:`read` would not wait."""
        return self._mark.query()

    def read(self) -> bool:
        """Wait until the device has ended the round; return False if a mean was not finite.

        Raises:
            Exception: what explains the first check that failed.
        """
        self._mark.synchronize()
        values = self._read.tolist()
        for holds, (_, explain) in zip(values, self._made):
            if not holds:
                raise explain()
        return bool(values[-1]) if isinstance(self._finite, torch.Tensor) else self._finite is not False
