"""Save and load the state of a link, by all ranks together."""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from gradwire.errors import GradwireError, HyperparameterError, IncompatibleError
from gradwire.exchange.digests import DIGEST_BYTES, pack, unpack
from gradwire.exchange.drivers.tables import all_gather_tables
from gradwire.link.link import Link
from gradwire.link.parameters import described
from gradwire.link.state import of_another_size

State = dict[str, dict[str, torch.Tensor]]

SEEN_S = 10.0
"""Seconds in which a file that another machine has written must be seen: network file systems may show it late."""

_RANK_FILE = re.compile(r"rank-\d+-([0-9a-f]{16})\.pt(?:\.partial)?")


def write_atomically(value: object, path: Path) -> None:
    """Save with :func:`torch.save` so that the file is always either the whole old one or the whole new one.

    Raises:
        GradwireError: the disk is full or the folder cannot be written; the old file does not change.
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
    """Save a link's state (collective call): a file of each rank, then ``common.pt`` of rank 0, which names them.

    If it is interrupted at any point, the folder still holds a whole save: the previous one, or this one if
    ``common.pt`` was already replaced. Ranks' files bear the number of their save, and are removed when a later save is
    complete.

    Args:
        link: The link.
        folder: A folder that all ranks see.
        own: Further state of this rank alone, in types that ``torch.load`` reads with ``weights_only=True``. With local
            steps and gossip pass the state of the model and the optimizer, which differ between ranks.

    Raises:
        HyperparameterError: ``link`` is no link.
        IncompatibleError: a file could not be written, or the last round broke, on this rank or on another; or rank 0
            does not see the file of another rank.
        PayloadError: a rank sent an invalid message; the error names the rank.
        ExchangeError: a rank is gone; the link is broken then.
    """
    target = _folder_of(link, folder)
    problem: str | None = None
    state: State = {}
    try:
        # The last round on a device may have ended in an error of this rank alone.
        state = link.state_dict()
        target.mkdir(parents=True, exist_ok=True)
    except (OSError, GradwireError) as error:
        problem = str(error)
    number = _share(link, problem, uuid.uuid4().int >> 65)[0]
    path = _own(target, link.rank, number)
    part = {
        "rank": state.pop("rank"),
        "number": torch.tensor(number, device="cpu"),
        "of": torch.tensor(link.rank, device="cpu"),
    }
    try:
        packed, digest = pack(part if own is None else {**part, "own": dict(own)})
        digests = [told[1] for told in _tell(link, _problem(packed, path), number, digest)]
        # All ranks' files are written. Replacing common.pt completes this save.
        unseen = _unseen(link, target, number) if link.rank == 0 else None
        common = {
            "save": {"number": torch.tensor(number, device="cpu")},
            "world_size": {"value": torch.tensor(link.world_size, device="cpu")},
            "digests": {
                str(rank): torch.tensor(list(found), dtype=torch.uint8, device="cpu")
                for rank, found in enumerate(digests)
            },
        }
        complete = link.rank == 0 and unseen is None
        _share(link, _problem(pack({**common, **state})[0], target / "common.pt") if complete else unseen)
    except IncompatibleError:
        # A rank told all others of a problem, so rank 0 has not replaced common.pt. After any other error it may have,
        # and common.pt then names this file; if it does not, a later save removes the file.
        path.unlink(missing_ok=True)
        raise
    if link.rank == 0:
        _sweep(target, number)


def _folder_of(link: Link, folder: str | os.PathLike[str]) -> Path:
    part = getattr(link, "part", None)
    if not isinstance(part, str):
        raise HyperparameterError(f"link: what gw.attach or gw.Link returned is needed, not {described(link)}")
    return Path(folder, part)


def load(link: Link, folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Load a link's state (collective call).

    If the world size has changed, global and replicated state is loaded as it is; the state of one rank is loaded by
    the ranks that still exist, and new ranks start without it. State that depends on the former ranks, such as the
    shifts of DIANA and gossip's copies of neighbours, is reset, and so is, with fewer ranks, what waits to be sent of
    methods that subtract the mean from it, such as PowerSGD with narrow factors. With local steps all ranks continue
    from the global parameters, whatever was loaded into their models; under gossip, from the mean of the parameters
    that were loaded.

    Returns:
        The value that this rank passed to :func:`save` as ``own``, with its tensors in main memory; None if it passed
        none or the world size has changed.

    Raises:
        HyperparameterError: ``link`` is no link.
        IncompatibleError: on this rank or another, the state does not exist, is not whole, cannot be read, or does not
            suit the link.
        PayloadError: a rank sent an invalid message; the error names the rank.
        ExchangeError: a rank is gone; the link is broken then.
    """
    source = _folder_of(link, folder)
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


def seen_alike(link: Link, path: Path) -> bool:
    """Return whether all ranks see a file (collective call).

    Raises:
        IncompatibleError: only some of them do; the message names two.
    """
    seen, ranks = _share(link, None, int(os.path.exists(path))), link.group.ranks
    if len(set(seen)) > 1:
        raise IncompatibleError(
            f"{path} is seen by rank {ranks[seen.index(1)]} and not by rank {ranks[seen.index(0)]}: give a folder that "
            "all ranks share"
        )
    return bool(seen[0])


def take(link: Link, state: State, problem: str | None, number: int, world_size: int, source: str) -> None:
    """Load a saved state on all ranks, or on none (collective call).

    Args:
        link: The link.
        state: A state of :meth:`Link.state_dict`; without values of this rank if it did not exist then.
        problem: The reason why this rank could not read the state; None if it did.
        number: Number of the save.
        world_size: World size of the link that saved it.
        source: Origin of the state, for the error.

    Raises:
        IncompatibleError: on every rank alike, naming the first rank that has a problem.
    """
    if problem is None:
        # Check on all ranks before any rank loads: otherwise the others would load a state that one rank refuses.
        problem = _refused(link.check_state_dict, state, source)
    if len(set(_share(link, problem, number))) > 1:
        raise IncompatibleError(f"ranks read different saves from {source}: load when saving has ended on all of them")
    if link.world_size != world_size:
        state = of_another_size(state, link.method, world_size, link.world_size, link._warnings.once)
    _share(link, _refused(link.load_state_dict, state, source))
    if link.method.traits.local_steps and world_size != link.world_size:
        link.local.agree()


def _refused(taking: Callable[[State], None], state: State, source: str) -> str | None:
    """Return a link's objection to a state; None if it has none."""
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
        IncompatibleError: it is not a whole number, or not from ``least`` to below ``above``.
    """
    whole = isinstance(value, torch.Tensor) and value.dtype == torch.int64 and value.dim() == 0
    if not whole or not least <= int(value) < above:  # type: ignore[call-overload]
        raise IncompatibleError(f"the {what} in the checkpoint is {value!r}: a whole number from {least} on is needed")
    return int(value)  # type: ignore[call-overload, no-any-return]


def _sweep(folder: Path, number: int) -> None:
    """Remove the ranks' files of all other saves, also of incomplete ones."""
    for path in folder.glob("rank-*"):
        found = _RANK_FILE.fullmatch(path.name)
        if found and int(found[1], 16) != number:
            with contextlib.suppress(OSError):
                path.unlink()


def _problem(value: object, path: Path) -> str | None:
    """Write a file; return the problem if that fails, else None."""
    try:
        write_atomically(value, path)
    except GradwireError as error:
        return str(error)
    return None


def _unseen(link: Link, folder: Path, number: int) -> str | None:
    """Return the problem if this rank does not see all ranks' files of a save, else None."""
    end = time.monotonic() + SEEN_S
    for place, rank in enumerate(link.group.ranks):
        path = _own(folder, place, number)
        # Path.exists() may raise, which the other ranks would not learn of.
        while not os.path.exists(path):
            if time.monotonic() >= end:
                return (
                    f"{path}, which rank {rank} has written, is not seen here: give a folder that all ranks share, "
                    "such as one of a network file system; what was saved before is untouched"
                )
            time.sleep(0.05)
    return None


def _share(link: Link, problem: str | None, number: int = 0) -> list[int]:
    """Gather the problems and numbers of all ranks, and return the numbers by rank (collective call).

    Raises:
        IncompatibleError: on every rank alike, naming the first rank that has a problem.
    """
    return [theirs for theirs, _ in _tell(link, problem, number, b"")]


def _tell(link: Link, problem: str | None, number: int, digest: bytes) -> list[tuple[int, bytes]]:
    """Gather the problems, numbers and digests of all ranks, and return the latter two by rank (collective call).

    Raises:
        IncompatibleError: on every rank alike, naming the first rank that has a problem.
        PayloadError: a rank sent an invalid message; the error names the rank.
        ExchangeError: a rank is gone; the link is broken then.
    """
    with link.naming("gradwire.save or load") as wait:
        told = all_gather_tables([problem, number, digest], "save", link.group, _told, wait=wait)
    for rank, (found, _, _) in zip(link.group.ranks, told):
        if found is not None:
            raise IncompatibleError(f"rank {rank}: {found}")
    return [(theirs, found) for _, theirs, found in told]


def _told(table: Any) -> tuple[str | None, int, bytes]:
    """Return the problem, number and digest of a table.

    Raises:
        TypeError, ValueError: the table has another form.
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
