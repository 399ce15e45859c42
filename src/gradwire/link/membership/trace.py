"""Traces of a membership: which workers took part in which rounds, as a worker recorded it or as a user wrote it."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from gradwire.errors import HyperparameterError, IncompatibleError, PayloadError
from gradwire.exchange.method import is_whole
from gradwire.link.membership.records import MOST_MEMBERS, MOST_NAME, MOST_ROUNDS, Epoch

FORMAT = "gradwire membership trace 1"
"""First entry of a file."""

MOST_LISTED = 1 << 15
"""Members that a history lists, over all its epochs: about 2 MB in the state of a new member."""

MOST_FILE_BYTES = 1 << 26

JOINS, LEAVES, IS_LOST = "joins", "leaves", "is lost"
"""Words of :meth:`MembershipTrace.scripted`."""


@dataclass(frozen=True)
class Adopted:
    """An epoch that a member adopted.

    Attributes:
        epoch: The epoch.
        left: Ids of the members before it that left by their own word.
        met: True if all its members met.
    """

    epoch: Epoch
    left: tuple[str, ...] = ()
    met: bool = False


class History:
    """The epochs that a member adopted, and those before it came in, as the others told it."""

    def __init__(self) -> None:
        self._adopted: deque[Adopted] = deque()
        self._listed = 0

    def __iter__(self) -> Any:
        return iter(self._adopted)

    def members(self, epochs: int) -> set[str]:
        """Return the ids of the members of so many last epochs."""
        return {id for one in islice(reversed(self._adopted), epochs) for id in one.epoch.ids()}

    def add(self, epoch: Epoch, left: tuple[str, ...] = ()) -> None:
        """Add the epoch that was adopted; the oldest ones are dropped beyond :data:`MOST_LISTED` members."""
        self._take(Adopted(epoch, left))

    def _take(self, adopted: Adopted) -> None:
        self._adopted.append(adopted)
        self._listed += len(adopted.epoch.members)
        while self._listed > MOST_LISTED and len(self._adopted) > 1:
            self._listed -= len(self._adopted.popleft().epoch.members)

    def met(self) -> None:
        """Note that all members of the last epoch have met."""
        if self._adopted:
            self._adopted[-1] = replace(self._adopted[-1], met=True)

    def state(self) -> list[Any]:
        """Return the history as plain values, for a new member."""
        return [[asdict(one.epoch), list(one.left), one.met] for one in self._adopted]

    def load(self, state: Any) -> None:
        """Take over the history of another member.

        Raises:
            PayloadError: it is not one.
        """
        try:
            found = [
                Adopted(Epoch.read(_listed(epoch)), tuple(str(id) for id in left), bool(met))
                for epoch, left, met in state
            ]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise PayloadError(f"the history of the members has not the expected form: {str(error)[:200]}") from None
        self._adopted.clear()
        self._listed = 0
        for one in found:
            self._take(one)


def _listed(table: Any) -> Any:
    """Return the table of an epoch with lists where its fields are tuples."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in table.items()}


@dataclass(frozen=True, kw_only=True)
class TracedEpoch:
    """One epoch of a trace. A worker that was left out and came again is named alike.

    Attributes:
        epoch: Number of the epoch.
        round: Number of rounds that count when it begins.
        members: Names of the members by rank.
        new: Names of those that received the state from the first member that is not new.
        left: Names of members of the epoch before that left by their own word. What these had not sent was added to
            what the first member that stayed had not sent.
        position: Samples of the data that were handed out when it began; None: those that the workers have drawn.
        reserved: Samples among them that are for each of the new members.
        met: False if a member was lost before all had met, so that another epoch followed at the same round.
    """

    epoch: int
    round: int
    members: tuple[str, ...]
    new: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    position: int | None = None
    reserved: int = 0
    met: bool = True


@dataclass(frozen=True)
class MembershipTrace:
    """Who took part in which rounds of a training; :func:`gradwire.replay` repeats the training in one process.

    ``membership.trace()`` returns that of a real training. A member receives the trace so far when it comes in, so that
    each that stays to the end has all of it.

    Attributes:
        epochs: The epochs, in order.

    Raises:
        IncompatibleError: the epochs do not follow one another.

    Example:
        >>> import gradwire as gw
        >>> trace = gw.MembershipTrace.scripted("abc", (5, "is lost", "b"), (9, "joins", "d"))
        >>> [(epoch.round, epoch.members) for epoch in trace.epochs]
        [(0, ('a', 'b', 'c')), (5, ('a', 'c')), (9, ('a', 'c', 'd'))]
    """

    epochs: tuple[TracedEpoch, ...]

    def __post_init__(self) -> None:
        before: TracedEpoch | None = None
        for row in self.epochs:
            problem = _problem(row, before)
            if problem is not None:
                raise IncompatibleError(f"a trace's epoch {row.epoch}: {problem}")
            before = row
        if before is None or not before.met:
            raise IncompatibleError("a trace has at least one epoch, and in the last one all members have met")

    @staticmethod
    def scripted(founders: Iterable[str], *changes: tuple[int, str, str]) -> MembershipTrace:
        """Return a trace that is written by hand.

        Args:
            founders: Names of the workers that begin, by rank.
            changes: ``(round, word, name)``, in the order of rounds. The word is "joins", "leaves" or "is lost": the
                worker takes part from that round on, or up to the round before. A worker that is lost and joins later
                is one that was left out and comes again. Losses come before other changes of the same round.

        Raises:
            HyperparameterError: a word or a round is wrong.
            IncompatibleError: a worker that is there joins, or one that is not leaves.
        """
        names = tuple(founders)
        rows = [TracedEpoch(epoch=1, round=0, members=names, new=names[1:])]
        for round, word, name in changes:
            if word not in (JOINS, LEAVES, IS_LOST) or not is_whole(round, rows[-1].round):
                raise HyperparameterError(
                    f"changes: (round, {JOINS!r}, {LEAVES!r} or {IS_LOST!r}, name) in the order of rounds are needed, "
                    f"not {(round, word, name)!r}"
                )
            last = rows[-1]
            if (name in last.members) is (word == JOINS):
                there = "is there already" if word == JOINS else "is not there"
                raise IncompatibleError(f"round {round}: {name!r} {word}, and {there}")
            same = last.round == round and len(rows) > 1 and word != IS_LOST and not _loses(rows)
            if same and word == JOINS:
                rows[-1] = replace(last, members=(*last.members, name), new=(*last.new, name))
                continue
            stay = tuple(member for member in last.members if member != name)
            if same:
                kept = tuple(member for member in last.new if member != name)
                rows[-1] = replace(last, members=stay, new=kept, left=(*last.left, name))
                continue
            more = (name,) if word == JOINS else ()
            gone = (name,) if word == LEAVES else ()
            rows.append(TracedEpoch(epoch=last.epoch + 1, round=round, members=(*stay, *more), new=more, left=gone))
        return MembershipTrace(tuple(rows))

    @staticmethod
    def of(history: Iterable[Adopted]) -> MembershipTrace:
        """Return the trace of a history.

        Raises:
            IncompatibleError: it has no epoch in which all members met.
        """
        labels: dict[str, str] = {}
        rows: list[TracedEpoch] = []
        for one in history:
            epoch = one.epoch
            taken = {*(rows[-1].members if rows else ()), *(labels[id] for id in epoch.ids() if id in labels)}
            for member in epoch.members:
                if member.id not in labels:
                    label, number = member.name or member.id, 1
                    while label in taken:
                        number += 1
                        label = f"{member.name or member.id} ({number})"
                    labels[member.id] = label
                    taken.add(label)
            rows.append(
                TracedEpoch(
                    epoch=epoch.number,
                    round=epoch.round,
                    members=tuple(labels[id] for id in epoch.ids()),
                    new=tuple(labels[id] for id in epoch.new),
                    left=tuple(labels[id] for id in one.left if id in labels),
                    position=epoch.position,
                    reserved=epoch.reserved,
                    met=one.met,
                )
            )
        while rows and not rows[-1].met:
            rows.pop()
        return MembershipTrace(tuple(rows))

    def lost(self, index: int) -> tuple[str, ...]:
        """Return the names of the members that were lost before an epoch, by its index."""
        if index == 0:
            return ()
        row, before = self.epochs[index], self.epochs[index - 1]
        return tuple(name for name in before.members if name not in (*row.members, *row.left))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace to a JSON file."""
        table = {"format": FORMAT, "epochs": [asdict(row) for row in self.epochs]}
        Path(path).write_text(json.dumps(table, indent=1) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> MembershipTrace:
        """Read the file that :meth:`save` wrote.

        Raises:
            IncompatibleError: the file does not exist, or holds no trace.
        """
        source = Path(path)
        try:
            if source.stat().st_size > MOST_FILE_BYTES:
                raise ValueError(f"it has more than {MOST_FILE_BYTES} bytes")
            table: Any = json.loads(source.read_text())
            if table["format"] != FORMAT:
                raise ValueError(f"its format is {table['format']!r}, not {FORMAT!r}")
            return MembershipTrace(tuple(_read(row) for row in table["epochs"]))
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise IncompatibleError(f"{source} holds no trace of a membership: {str(error)[:200]}") from None


def _loses(rows: Sequence[TracedEpoch]) -> bool:
    before, last = rows[-2:]
    return any(name not in (*last.members, *last.left) for name in before.members)


def _read(row: Any) -> TracedEpoch:
    lists = {key: tuple(row[key]) for key in ("members", "new", "left") if key in row}
    if any(isinstance(row.get(key), str) for key in lists):
        raise ValueError("lists of names are needed")
    return TracedEpoch(**{**row, **lists})


def _problem(row: TracedEpoch, before: TracedEpoch | None) -> str | None:
    """Return what is wrong with an epoch after another one; None if nothing is."""
    numbers = (row.epoch, row.round, row.reserved, 0 if row.position is None else row.position)
    if not all(is_whole(number, 0, MOST_ROUNDS) for number in numbers) or not isinstance(row.met, bool):
        return "its number, round, position and reserved samples are whole numbers, and met is true or false"
    names = (*row.members, *row.new, *row.left)
    if not all(isinstance(name, str) and 0 < len(name) <= 2 * MOST_NAME and name.isprintable() for name in names):
        return "names are printable texts"
    if not 0 < len(row.members) <= MOST_MEMBERS or len(set(row.members)) < len(row.members):
        return f"1 to {MOST_MEMBERS} members of different names are needed"
    if len(row.new) == len(row.members):
        return "a member that is not new is needed, from which new ones receive the state"
    if not set(row.members) >= set(row.new):
        return "new ones are members"
    if before is None:
        return None if not row.left else "nobody can have left before the first epoch"
    if row.epoch != before.epoch + 1 or row.round < before.round:
        return f"it follows epoch {before.epoch}, which began at round {before.round}"
    if not before.met and row.round != before.round:
        return f"epoch {before.epoch} was not met, so that no round counted in it"
    unknown = set(row.members) - set(before.members) - set(row.new)
    if unknown:
        return f"{min(unknown)!r} was not there before, and is not new"
    if set(row.left) & set(row.members):
        return f"{min(set(row.left) & set(row.members))!r} has left, and is there"
    return None
