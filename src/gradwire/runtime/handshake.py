"""Before anything is exchanged, ranks compare what they are about to do."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist

from gradwire.errors import GradwireError, IncompatibleError, RankMismatchError

__all__ = ["Terms", "agreement", "default_group"]


@dataclass
class Terms:
    """What a rank brings to an agreement, and the token that all ranks take from it.

    Attributes:
        fields: To be the same on all ranks; lists are compared item by item.
        token: Unique to this agreement, the same on all ranks; set when it is reached.
    """

    fields: dict[str, object] = field(default_factory=dict)
    token: str = ""


@contextmanager
def agreement(group: dist.ProcessGroup) -> Iterator[Terms]:
    """Prepare terms in the body, then compare them over the ranks of a group (collective).

    A rank whose preparations fail still takes part, so that the others learn of it instead of waiting for it.

    Raises:
        Exception: what this rank's body raised.
        IncompatibleError: another rank's body failed; the message names the rank and holds its reason.
        RankMismatchError: on every rank alike, naming the first rank and field that differ from rank 0.
    """
    terms = Terms()
    own: Exception | None = None
    try:
        yield terms
    except Exception as error:
        own = error
    if group.size() == 1:
        if own is not None:
            raise own
        return
    everyone: list[tuple[str, dict[str, object], str]] = [("", {}, "") for _ in range(group.size())]
    dist.all_gather_object(everyone, (uuid.uuid4().hex, terms.fields, _text(own)), group=group)
    if own is not None:
        raise own
    for rank, (_, _, problem) in enumerate(everyone):
        if problem:
            raise IncompatibleError(f"rank {rank}: {problem}")
    terms.token, first, _ = everyone[0]
    for rank, (_, theirs, _) in enumerate(everyone[1:], start=1):
        for name, wanted in first.items():
            if theirs.get(name) != wanted:
                raise RankMismatchError(_sentence(rank, name, theirs.get(name), wanted))


def _text(error: Exception | None) -> str:
    if error is None:
        return ""
    return str(error) if isinstance(error, GradwireError) else f"{type(error).__name__}: {error}"


def _sentence(rank: int, name: str, found: object, wanted: object) -> str:
    if isinstance(found, list) and isinstance(wanted, list):
        if len(found) != len(wanted):
            found, wanted = f"{len(found)} entries", f"{len(wanted)} entries"
        else:
            found, wanted = next((f, w) for f, w in zip(found, wanted) if f != w)
    return (
        f"rank {rank} differs from rank 0 in {name!r}: rank {rank} has {found}, rank 0 has {wanted}; "
        "start all ranks with the same"
    )


def default_group() -> dist.ProcessGroup:
    """Return the group of all ranks.

    Raises:
        IncompatibleError: there is none, or this process is not in it.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise IncompatibleError("no process group: call torch.distributed.init_process_group first")
    group = dist.group.WORLD
    if group is None:
        raise IncompatibleError("this process is in no group")
    return group
