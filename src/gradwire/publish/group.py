"""Weights by broadcast: rank 0 of a process group publishes, the others follow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gradwire.errors import ExchangeError, PayloadError
from gradwire.publish.container import Octets, view_of

SOURCE = 0
"""Rank that publishes, in the group."""

_PART_BYTES = 1 << 26
MOST_FILES = 1 << 10
"""Files that are broadcast for one step at most."""


def is_group(where: object) -> bool:
    """Return whether ``where`` is a process group."""
    return dist.is_available() and isinstance(where, dist.ProcessGroup)


class GroupChannel:
    """Broadcasts of files in a process group.

    Each :meth:`~gradwire.WeightPublisher.publish` of the group's rank 0 meets one
    :meth:`~gradwire.WeightSubscriber.update` of every other rank. First the ranks agree whether one of them needs an
    anchor; then rank 0 broadcasts the length of the file, and the file.

    Args:
        group: The process group, on a backend that serves CPU tensors.

    Raises:
        ExchangeError: by each method: another rank has ended, or hangs.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._agreed = self._passed = False
        self._source = dist.get_global_rank(group, SOURCE)

    @property
    def is_source(self) -> bool:
        """Whether this is the rank that publishes."""
        return dist.get_rank(self._group) == SOURCE

    @contextlib.contextmanager
    def turn(self, most_bytes: int = 0) -> Iterator[None]:
        """Take part in a step to its end, also if the body raises before it has done so: the other ranks wait for it.

        Args:
            most_bytes: Most bytes of a file; for the ranks that receive.
        """
        self._agreed = self._passed = False
        try:
            yield
        except Exception:
            if not self._agreed:
                self.wants_anchor(False)
            if not self._passed and self.is_source:
                self.send([])
            elif not self._passed:
                for _ in self.receive(most_bytes):
                    pass
            raise

    def wants_anchor(self, own: bool) -> bool:
        """Return whether any rank needs an anchor."""
        self._agreed = True
        flag = torch.tensor([int(own)], device="cpu")
        with _calls():
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return bool(flag)

    def send(self, files: Sequence[Sequence[Octets | bytes]]) -> None:
        """Broadcast files, each in pieces."""
        self._passed = True
        self._broadcast(torch.tensor([len(files)], device="cpu"))
        for pieces in files:
            whole = torch.from_numpy(np.concatenate([np.frombuffer(view_of(piece), np.uint8) for piece in pieces]))
            self._broadcast(torch.tensor([len(whole)], device="cpu"))
            for begin in range(0, len(whole), _PART_BYTES):
                self._broadcast(whole[begin : begin + _PART_BYTES])

    def receive(self, most_bytes: int) -> Iterator[Octets]:
        """Receive the files that rank 0 broadcasts, one after the other; all are to be taken, also unwanted ones.

        Args:
            most_bytes: Most bytes of a file.

        Raises:
            PayloadError: it announces a file of more bytes.
        """
        self._passed = True
        for _ in range(self._count("files", MOST_FILES)):
            whole = torch.empty(self._count("bytes", most_bytes), dtype=torch.uint8, device="cpu")
            for begin in range(0, len(whole), _PART_BYTES):
                self._broadcast(whole[begin : begin + _PART_BYTES])
            yield whole.numpy()

    def _broadcast(self, data: torch.Tensor) -> None:
        with _calls():
            dist.broadcast(data, self._source, group=self._group)

    def _count(self, what: str, most: int) -> int:
        length = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._broadcast(length)
        if not 0 <= int(length) <= most:
            raise PayloadError(f"rank {SOURCE} announces {int(length)} {what}, more than {most}")
        return int(length)


@contextlib.contextmanager
def _calls() -> Iterator[None]:
    """Raise errors of the backend as those of an exchange."""
    try:
        yield
    except RuntimeError as error:
        raise ExchangeError(f"a rank that publishes or follows weights has ended, or hangs: {error}") from error
