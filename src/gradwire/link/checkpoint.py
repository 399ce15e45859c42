"""Saving and loading the state of a link, by all ranks together."""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradwire.errors import GradwireError, IncompatibleError
from gradwire.exchange.digests import DIGEST_BYTES, pack, unpack
from gradwire.exchange.drivers.tables import all_gather_tables
from gradwire.link.link import Link

State = dict[str, dict[str, torch.Tensor]]

_RANK_FILE = re.compile(r"rank-\d+-([0-9a-f]{16})\.pt(?:\.partial)?")


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


def save(link: Link, folder: str | os.PathLike[str], own: Mapping[str, Any] | None = None) -> None:
    """Save a link's state (collective): every rank a file of its own, then rank 0 ``common.pt``, which names them.

    Where it ends halfway, whatever the reason, the folder still holds what was saved before, whole: ranks' files bear
    the number of their save, and go when a later save is complete.

    Args:
        link: Whose state it is.
        folder: Which all ranks see.
        own: What else belongs to this rank alone, in types that ``torch.load`` reads with ``weights_only=True``. With
            local steps, and with gossip, that is the model and the optimizer, since a checkpoint of rank 0 has its own.

    Raises:
        IncompatibleError: a file could not be written, or the last round broke, on this rank or on another.
    """
    target = Path(folder, link.part)
    problem: str | None = None
    state: State = {}
    try:
        # What a device has to say of the last round may be an error of this rank alone.
        state = link.state_dict()
        target.mkdir(parents=True, exist_ok=True)
    except (OSError, GradwireError) as error:
        problem = str(error)
    number = _share(link, problem, uuid.uuid4().int >> 65)[0]
    path = _own(target, link.rank, number)
    part = {"rank": state.pop("rank"), "number": torch.tensor(number), "of": torch.tensor(link.rank)}
    try:
        packed, digest = pack(part if own is None else {**part, "own": dict(own)})
        digests = [told[1] for told in _tell(link, _problem(packed, path), number, digest)]
        # All ranks' files are there. From its replacement on, common.pt stands for this save instead of the last one.
        common = {
            "save": {"number": torch.tensor(number)},
            "world_size": {"value": torch.tensor(link.world_size)},
            "digests": {str(rank): torch.tensor(list(found), dtype=torch.uint8) for rank, found in enumerate(digests)},
        }
        _share(link, _problem(pack({**common, **state})[0], target / "common.pt") if link.rank == 0 else None)
    except GradwireError:
        path.unlink(missing_ok=True)
        raise
    if link.rank == 0:
        _sweep(target, number)


def load(link: Link, folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Load a link's state (collective).

    The policy where the world size has changed: what is global or replicated is taken as it is; what belongs to one
    rank alone stays with the ranks that still exist, and the others start without. What holds for the former ranks
    alone, as the shifts of DIANA and what gossip knows of its neighbours, begins anew. With local steps all ranks go on
    from the global parameters, whatever was loaded into their models; where each rank has parameters of its own, from
    the mean of what was loaded.

    Returns:
        What this rank passed to :func:`save` as ``own``; None where it passed nothing, and where the world size has
        changed.

    Raises:
        IncompatibleError: there is no such state, it is not whole, it cannot be read, or it is none that this link can
            take, on this rank or on another.
    """
    source = Path(folder, link.part)
    problem: str | None = None
    state: State = {}
    own: dict[str, Any] | None = None
    number, world_size = 0, link.world_size
    try:
        state = _read(source / "common.pt")
        number = _whole(state.pop("save")["number"], "save's number", 0, 1 << 63)
        world_size = _whole(state.pop("world_size")["value"], "world size", 1, 1 << 31)
        digests = state.pop("digests")
        state["rank"] = {}
        if link.rank < world_size:
            path = _own(source, link.rank, number)
            if not path.exists():
                raise IncompatibleError(
                    f"{path} does not exist, though {source / 'common.pt'} was saved with it: copy such a folder whole"
                )
            part: dict[str, Any] = _read(path, bytes(digests[str(link.rank)].tolist()))
            state["rank"], own = part["rank"], part.get("own")
    except GradwireError as error:
        problem = str(error)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"{source} does not hold the state of a link: {error!r}"
    take(link, state, problem, number, world_size, str(source))
    return own if world_size == link.world_size else None


def take(link: Link, state: State, problem: str | None, number: int, world_size: int, source: str) -> None:
    """Let all ranks take a state that was saved, or none of them (collective).

    Args:
        link: That takes it.
        state: As of :meth:`Link.state_dict`; without values of this rank where it did not exist.
        problem: What kept this rank from reading it.
        number: Of the save.
        world_size: Of the link that saved it.
        source: Where it is from, for the error.

    Raises:
        IncompatibleError: on every rank alike, naming the first rank that has a problem.
    """
    if problem is None:
        # Before any rank takes anything: what only one of them refuses would be taken by the others.
        problem = _refused(link.check_state_dict, state, source)
    if len(set(_share(link, problem, number))) > 1:
        raise IncompatibleError(f"ranks read different saves from {source}: load when saving has ended on all of them")
    _share(link, _refused(link.load_state_dict, state, source))
    if link.method.traits.local_steps and world_size != link.world_size:
        link.local.agree()


def _refused(taking: Callable[[State], None], state: State, source: str) -> str | None:
    """Return what a link says against a state."""
    try:
        taking(state)
    except GradwireError as error:
        return str(error)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return f"{source} does not hold the state of a link: {error!r}"
    return None


def _own(folder: Path, rank: int, number: int) -> Path:
    """Return the file of one rank in one save."""
    return folder / f"rank-{rank}-{number:016x}.pt"


def _whole(value: object, what: str, least: int, above: int) -> int:
    """Return a whole number that a file holds.

    Raises:
        IncompatibleError: it is none, or not from ``least`` to below ``above``.
    """
    whole = isinstance(value, torch.Tensor) and value.dtype == torch.int64 and value.dim() == 0
    if not whole or not least <= int(value) < above:  # type: ignore[call-overload]
        raise IncompatibleError(f"the {what} in the checkpoint is {value!r}: a whole number from {least} on is needed")
    return int(value)  # type: ignore[call-overload, no-any-return]


def _sweep(folder: Path, number: int) -> None:
    """Remove the ranks' files of all other saves, also of those that came to nothing."""
    for path in folder.glob("rank-*"):
        found = _RANK_FILE.fullmatch(path.name)
        if found and int(found[1], 16) != number:
            with contextlib.suppress(OSError):
                path.unlink()


def _problem(value: object, path: Path) -> str | None:
    """Write a file; say what went wrong."""
    try:
        write_atomically(value, path)
    except GradwireError as error:
        return str(error)
    return None


def _share(link: Link, problem: str | None, number: int = 0) -> list[int]:
    """Tell all ranks of one another's problems and numbers, and give the numbers by rank (collective).

    Raises:
        IncompatibleError: on every rank alike, naming the first rank that has a problem.
    """
    return [theirs for theirs, _ in _tell(link, problem, number, b"")]


def _tell(link: Link, problem: str | None, number: int, digest: bytes) -> list[tuple[int, bytes]]:
    """Tell all ranks of one another's problems, numbers and digests, and return the latter two by rank (collective).

    Raises:
        IncompatibleError: on every rank alike, naming the first rank that has a problem.
        PayloadError: a rank sent something else; the message names it.
        ExchangeError: a rank is gone; the link is broken then.
    """
    with link.naming("gradwire.save or load") as wait:
        told = all_gather_tables([problem, number, digest], "save", link.group, _told, wait=wait)
    for rank, (found, _, _) in zip(dist.get_process_group_ranks(link.group), told):
        if found is not None:
            raise IncompatibleError(f"rank {rank}: {found}")
    return [(theirs, found) for _, theirs, found in told]


def _told(table: Any) -> tuple[str | None, int, bytes]:
    """Return the problem, number and digest of a table.

    Raises:
        TypeError, ValueError: it has not the form of these.
    """
    problem, number, digest = table
    if not isinstance(problem, str | None) or not isinstance(number, int) or not isinstance(digest, bytes):
        raise TypeError("a problem, a number and a digest are expected")
    if not 0 <= number < 1 << 63 or len(digest) not in (0, DIGEST_BYTES):
        raise ValueError(f"number {number}, digest of {len(digest)} bytes")
    return problem, number, digest


def _read(path: Path, expected: bytes | None = None) -> dict[str, dict[str, torch.Tensor]]:
    """Read a file of a save, and verify its digest.

    Raises:
        IncompatibleError: it does not exist, is not whole, or has changed since it was saved.
    """
    try:
        packed = torch.load(path, weights_only=True)
    except FileNotFoundError:
        raise IncompatibleError(f"{path} does not exist: save the link's state with gradwire.save first") from None
    except Exception as error:
        raise IncompatibleError(f"{path} is not a whole state of a link: {error}") from error
    try:
        state: dict[str, dict[str, torch.Tensor]] = unpack(packed, str(path), expected)
    except GradwireError:
        raise
    except Exception as error:
        raise IncompatibleError(f"{path} is not a whole state of a link: {error}") from error
    return state
