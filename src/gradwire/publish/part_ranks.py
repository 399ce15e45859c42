"""What the ranks that publish the parts of sharded weights tell one another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist

from gradwire.errors import ExchangeError, IncompatibleError

_MOST_TEXT = 2000


class PartRanks(Protocol):
    """Ranks that publish together; each calls the same methods in the same order."""

    rank: int
    size: int

    def gather(self, data: bytes) -> list[bytes]:
        """Return what each rank gave."""
        ...


class Alone:
    """The only rank."""

    rank, size = 0, 1

    def gather(self, data: bytes) -> list[bytes]:
        return [data]


class GroupRanks:
    """The ranks of a process group.

    Args:
        group: The group, on a backend that serves CPU tensors; None: the default group, or, if that serves none, a new
            one over Gloo, which all its ranks make together.

    Raises:
        IncompatibleError: there is no process group, or it serves no CPU tensors.
    """

    def __init__(self, group: Any = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise IncompatibleError("sharded weights are published by the ranks of a process group: none was started")
        if group is None and not _serves_cpu(None):
            group = dist.new_group(backend="gloo")
        if not _serves_cpu(group):
            raise IncompatibleError("the process group serves no CPU tensors: give group= one of the backend gloo")
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, data: bytes) -> list[bytes]:
        try:
            lengths = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.size)]
            dist.all_gather(lengths, torch.tensor([len(data)], device="cpu"), group=self._group)
            longest = max(1, *(int(length) for length in lengths))
            own = torch.zeros(longest, dtype=torch.uint8, device="cpu")
            own[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
            rows = [torch.zeros(longest, dtype=torch.uint8, device="cpu") for _ in range(self.size)]
            dist.all_gather(rows, own, group=self._group)
        except RuntimeError as error:
            raise ExchangeError(f"a rank that publishes a part has ended, or hangs: {error}") from error
        return [row.numpy().tobytes()[: int(length)] for row, length in zip(rows, lengths)]


def _serves_cpu(group: Any) -> bool:
    group = dist.group.WORLD if group is None else group
    return torch.device("cpu") in getattr(group, "_device_types", ())


def any_of(ranks: PartRanks, flag: bool) -> bool:
    """Return whether a rank gave true."""
    return any(found == b"1" for found in ranks.gather(b"1" if flag else b"0"))


@contextlib.contextmanager
def together(ranks: PartRanks, what: str) -> Iterator[None]:
    """Raise on all ranks if the body raises on one: what it raised there, and on the others an error that names it.

    Args:
        ranks: The ranks.
        what: What the body does, for the message.

    Raises:
        ExchangeError: the body raised on another rank.
    """
    try:
        yield
    except Exception as error:
        with contextlib.suppress(ExchangeError):
            ranks.gather(f"{type(error).__name__}: {error}".encode()[:_MOST_TEXT])
        raise
    for rank, text in enumerate(ranks.gather(b"")):
        if text:
            raise ExchangeError(f"rank {rank} could not {what}: {text.decode(errors='replace')}")
