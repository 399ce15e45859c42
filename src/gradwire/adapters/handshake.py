"""Before anything is exchanged, ranks compare what they are about to do."""

from __future__ import annotations

import uuid

import torch.distributed as dist

from gradwire.errors import RankMismatchError

__all__ = ["agree"]


def agree(mine: dict[str, object], group: dist.ProcessGroup) -> str:
    """Compare fields over the ranks of a group (collective).

    Args:
        mine: This rank's fields; lists are compared item by item.

    Returns:
        A token that no other agreement has, the same on all ranks.

    Raises:
        RankMismatchError: on every rank alike, naming the first rank and field that differ from rank 0.
    """
    everyone: list[tuple[str, dict[str, object]]] = [("", {}) for _ in range(group.size())]
    dist.all_gather_object(everyone, (uuid.uuid4().hex, mine), group=group)
    token, first = everyone[0]
    for rank, (_, theirs) in enumerate(everyone[1:], start=1):
        for field, wanted in first.items():
            found = theirs.get(field)
            if found != wanted:
                raise RankMismatchError(_sentence(rank, field, found, wanted))
    return token


def _sentence(rank: int, field: str, found: object, wanted: object) -> str:
    if isinstance(found, list) and isinstance(wanted, list):
        if len(found) != len(wanted):
            found, wanted = f"{len(found)} entries", f"{len(wanted)} entries"
        else:
            found, wanted = next((f, w) for f, w in zip(found, wanted) if f != w)
    return (
        f"rank {rank} differs from rank 0 in {field!r}: rank {rank} has {found}, rank 0 has {wanted}; "
        "start all ranks with the same"
    )
