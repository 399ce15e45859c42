"""Saving and loading the state of a link, by all ranks together."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from gradwire.adapters.link import Link
from gradwire.errors import GradwireError, IncompatibleError

__all__ = ["load", "save", "write_atomically"]


def write_atomically(value: object, path: Path) -> None:
    """Save with :func:`torch.save` so that the file is either the old one or the new one, whole.

    Raises:
        GradwireError: the disk is full or the folder cannot be written; what was there before is untouched.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            torch.save(value, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except (OSError, RuntimeError) as error:
        partial.unlink(missing_ok=True)
        raise GradwireError(f"could not write {path}: {error}; what was saved before is untouched") from error


def save(link: Link, folder: str | os.PathLike[str]) -> None:
    """Save a link's state (collective): ``common.pt`` by rank 0, ``rank-R.pt`` by every rank.

    Raises:
        IncompatibleError: a file could not be written, on this rank or on another.
    """
    target = Path(folder)
    problem: str | None = None
    try:
        target.mkdir(parents=True, exist_ok=True)
        state = link.state_dict()
        own = {"rank": state.pop("rank")}
        write_atomically(own, target / f"rank-{link.rank}.pt")
        if link.rank == 0:
            world_size = {"value": torch.tensor(link.world_size)}
            write_atomically({"world_size": world_size, **state}, target / "common.pt")
    except (GradwireError, OSError) as error:
        problem = str(error)
    _share(link, problem)


def load(link: Link, folder: str | os.PathLike[str]) -> None:
    """Load a link's state (collective).

    The policy where the world size has changed: what is global or replicated is taken as it is; what belongs to one
    rank alone stays with the ranks that still exist, and the others start without.

    Raises:
        IncompatibleError: there is no such state, or it cannot be read, on this rank or on another.
    """
    source = Path(folder)
    problem: str | None = None
    state: dict[str, dict[str, torch.Tensor]] = {}
    try:
        state = _read(source / "common.pt")
        if link.rank < int(state.pop("world_size")["value"]):
            state["rank"] = _read(source / f"rank-{link.rank}.pt")["rank"]
        else:
            state["rank"] = {}
    except GradwireError as error:
        problem = str(error)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"{source} does not hold the state of a link: {error!r}"
    _share(link, problem)
    link.load_state_dict(state)


def _share(link: Link, problem: str | None) -> None:
    """Tell all ranks of one another's problems (collective).

    Raises:
        IncompatibleError: on every rank alike, naming the first rank that has one.
    """
    problems: list[str | None] = [None] * link.world_size
    dist.all_gather_object(problems, problem, group=link.group)
    for rank, found in enumerate(problems):
        if found is not None:
            raise IncompatibleError(f"rank {rank}: {found}")


def _read(path: Path) -> dict[str, dict[str, torch.Tensor]]:
    try:
        state: dict[str, dict[str, torch.Tensor]] = torch.load(path, weights_only=True)
    except FileNotFoundError:
        raise IncompatibleError(f"{path} does not exist: save the link's state with gradwire.save first") from None
    except Exception as error:
        raise IncompatibleError(f"{path} is not a whole state of a link: {error}") from error
    return state
