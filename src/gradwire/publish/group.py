"""Weights by broadcast: rank 0 of a process group publishes, the others follow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gradwire.errors import ExchangeError, PayloadError
from gradwire.publish.container import Octets, view_of
from gradwire.publish.manifest import MAX_SPEC

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
    anchor; then rank 0 broadcasts the number of files, the method that patches may round differences by, and each
    file behind its length.

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
                for _ in self.receive(most_bytes)[1]:
                    pass
            raise

    def wants_anchor(self, own: bool) -> bool:
        """Return whether any rank needs an anchor."""
        self._agreed = True
        flag = torch.tensor([int(own)], device="cpu")
        with _calls():
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return bool(flag)

    def send(self, files: Sequence[Sequence[Octets | bytes]], lossy: str = "") -> None:
        """Broadcast files, each in pieces, of a run that rounds differences by a method of this spec; "": by none."""
        # Some pieces are made when they are asked for, which can fail: nothing has been announced by then.
        wholes = [_joined(pieces) for pieces in files]
        self._passed = True
        self._broadcast(torch.tensor([len(wholes), len(lossy)], device="cpu"))
        if lossy:
            self._broadcast(torch.frombuffer(bytearray(lossy, "ascii"), dtype=torch.uint8))
        for whole in wholes:
            self._broadcast(torch.tensor([len(whole)], device="cpu"))
            for begin in range(0, len(whole), _PART_BYTES):
                self._broadcast(whole[begin : begin + _PART_BYTES])

    def receive(self, most_bytes: int) -> tuple[str, Iterator[Octets]]:
        """Receive what rank 0 broadcasts: the spec of the method, and the files, one after the other.

        All files are to be taken, also unwanted ones.

        Args:
            most_bytes: Most bytes of a file.

        Raises:
            PayloadError: it announces a file of more bytes.
        """
        self._passed = True
        count, length = self._counts({"files": MOST_FILES, "characters of a method": MAX_SPEC})
        lossy = torch.empty(length, dtype=torch.uint8, device="cpu")
        if length:
            self._broadcast(lossy)
        return lossy.numpy().tobytes().decode("ascii", "replace"), self._files(count, most_bytes)

    def _files(self, count: int, most_bytes: int) -> Iterator[Octets]:
        for _ in range(count):
            (length,) = self._counts({"bytes": most_bytes})
            whole = torch.empty(length, dtype=torch.uint8, device="cpu")
            for begin in range(0, len(whole), _PART_BYTES):
                self._broadcast(whole[begin : begin + _PART_BYTES])
            yield whole.numpy()

    def _broadcast(self, data: torch.Tensor) -> None:
        with _calls():
            dist.broadcast(data, self._source, group=self._group)

    def _counts(self, most: Mapping[str, int]) -> list[int]:
        counts = torch.zeros(len(most), dtype=torch.int64, device="cpu")
        self._broadcast(counts)
        found: list[int] = counts.tolist()
        for count, (what, limit) in zip(found, most.items()):
            if not 0 <= count <= limit:
                raise PayloadError(f"rank {SOURCE} announces {count} {what}, more than {limit}")
        return found


def _joined(pieces: Sequence[Octets | bytes]) -> torch.Tensor:
    """Return the bytes of a file; those of one piece are not copied."""
    views = [np.frombuffer(view_of(piece), np.uint8) for piece in pieces]
    one = len(views) == 1 and views[0].flags.writeable
    return torch.from_numpy(views[0] if one else np.concatenate(views))


@contextlib.contextmanager
def _calls() -> Iterator[None]:
    """Raise errors of the backend as those of an exchange."""
    try:
        yield
    except RuntimeError as error:
        raise ExchangeError(f"a rank that publishes or follows weights has ended, or hangs: {error}") from error
