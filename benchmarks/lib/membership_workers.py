"""A model of the workers of a membership: each runs the protocol itself, and stands somewhere in it."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from types import GeneratorType
from typing import Any, TypeAlias

from gradwire.link.membership.protocol import Seat
from gradwire.link.membership.quorum import Quorum
from gradwire.link.membership.records import Epoch, Member
from gradwire.link.membership.steps import Break, LeftOut, Put, Step, report_key

__all__ = ["Apply", "Asked", "Case", "Look", "Pause", "Place", "Workers", "member"]

CRASH, SUSPECT, LEAVE, SPURIOUS, PART = "crash", "suspect", "leave", "spurious", "part"
"""Faults: a member ends; the others lose it while it lives on (stopped, cut off); it is told to leave; what it receives
is not what was sent; its program ends between two rounds, and says so by its reports."""

LEAVES, GIVES_UP = "told to leave", "gives up"
"""In place of replies: a worker is told to leave; a worker that was told to leave waits no longer to be named."""

WRITTEN_ONLY = ("adopted", "history")
"""Attributes of a seat that the protocol writes and never reads."""


@dataclass(frozen=True)
class Apply:
    """A member applies the round that counts for it: what the optimizer does after the exchange has returned."""


@dataclass(frozen=True)
class Look:
    """A member that computes may notice what has changed.

    The reply is False if it notices nothing, True if it notices that others are gone, or the next epoch if others have
    begun it.
    """


@dataclass(frozen=True)
class Pause:
    """A member stands between two rounds; the reply tells whether its program ends here."""


Asked: TypeAlias = Step | Apply | Look | Pause


@dataclass(frozen=True)
class Case:
    """What is explored.

    Attributes:
        founded: Letters of the members of an epoch that has begun.
        comers: Letters of workers that come in.
        leavers: Letters of those among all that were told to leave before they began.
        rounds: Number of rounds after which a member ends.
        faults: Kinds of faults. With ``PART`` members that have taken all rounds report, too, that they end.
        most: Number of faults in one history.
        again: True if a member that was left out comes again, once.
        least: Number of workers that found a training.
        quorum: Members with which a round goes on; 0: all.
        staleness: Under a quorum, the largest age of a difference.
        absences: Under a quorum, how often each member still computes when the roll is called.
        looks: True if members may notice between two rounds, before and after they apply, that others are gone or have
            begun the next epoch, and meet again at once.
        forgets: True if the store may have removed what was written about an epoch as soon as the next one is there: a
            member that was stopped for long asks for it in vain.
    """

    founded: str
    comers: str = ""
    leavers: str = ""
    rounds: int = 2
    faults: tuple[str, ...] = ()
    most: int = 1
    again: bool = False
    least: int = 1
    quorum: int = 0
    staleness: int = 1
    absences: int = 1
    looks: bool = False
    forgets: bool = False

    @property
    def letters(self) -> str:
        """Letters of all workers."""
        return self.founded + self.comers

    def rule(self) -> Quorum | None:
        """Return the rule by which rounds begin."""
        return Quorum(self.quorum, self.staleness) if self.quorum else None

    def first(self) -> Epoch:
        """Return the epoch that has begun."""
        return Epoch(1, tuple(member(letter) for letter in self.founded))


def member(letter: str) -> Member:
    """Return a member by a letter."""
    return Member(letter * 16, letter)


@dataclass(frozen=True, eq=False)
class Place:
    """Where a worker stands.

    Attributes:
        worker: Place of the worker among all.
        told: Replies that lead here, by one of the ways that do.
        step: What it asks for; None if it has ended.
        seat: What it knows.
        end: How it ended; None while it runs.
    """

    worker: int
    told: tuple[Any, ...]
    step: Asked | None
    seat: Seat
    end: str | None


class Workers:
    """The workers of a case, and where each can stand.

    Two series of replies lead to the same place if what a worker knows is the same after both, and if its program
    stands at the same line of the protocol with the same local variables.

    Args:
        case: What is explored.
        merges: False: two series of replies never lead to the same place.
    """

    def __init__(self, case: Case, *, merges: bool = True) -> None:
        self.case, self._merges = case, merges
        self._places: list[Place] = []
        self._numbers: dict[Any, int] = {}
        self._next: dict[tuple[int, Any], int] = {}

    def begin(self) -> tuple[int, ...]:
        """Return the numbers of the places at which all begin."""
        return tuple(self._number(worker, ()) for worker in range(len(self.case.letters)))

    def __getitem__(self, number: int) -> Place:
        """Return a place by its number."""
        return self._places[number]

    def after(self, number: int, reply: Any) -> int:
        """Return the number of the place to which a reply leads."""
        found = self._next.get((number, reply))
        if found is None:
            place = self._places[number]
            found = self._next[number, reply] = self._number(place.worker, (*place.told, reply))
        return found

    def _number(self, worker: int, told: tuple[Any, ...]) -> int:
        letter, comes = self.case.letters[worker], worker >= len(self.case.founded)
        seat = Seat(member(letter), self.case.rule())
        seat.leaving = letter in self.case.leavers
        if not comes:
            seat.epoch, seat.holds, seat._has_met = self.case.first(), True, True
        life, end = self._life(seat, comes), None
        step: Asked | None = None
        try:
            step = next(life)
            for reply in told:
                if reply == LEAVES:
                    seat.leaving = True
                else:
                    step = life.throw(LeftOut()) if reply == GIVES_UP else life.send(reply)
        except StopIteration as stop:
            step, end = None, stop.value
        key = (worker, end, step, _known(seat), *_lines(life)) if self._merges else (worker, told)
        number = self._numbers.setdefault(key, len(self._places))
        if number == len(self._places):
            self._places.append(Place(worker, told, step, seat, end))
        return number

    def _life(self, seat: Seat, comes: bool) -> Generator[Asked, Any, str]:
        entering, chances, parts = comes, 1 + self.case.again, PART in self.case.faults
        while True:
            try:
                if entering:
                    yield from seat.enter()
                while seat.rounds < self.case.rounds and not seat.left:
                    if parts and (yield Pause()):
                        yield from _part(seat)
                        return "parted"
                    yield from seat.round()
                    yield from self._look(seat, meets=False)
                    yield Apply()
                    yield from self._look(seat, meets=True)
            except LeftOut:
                chances -= 1
                if seat.leaving or not chances:
                    return "left" if seat.leaving else "out"
                seat.again(chr(ord(seat.me.id[0]) - 32) * 16)
                entering = True
                continue
            if seat.left:
                return "left"
            if parts:
                yield from _part(seat)
            return "done"

    def _look(self, seat: Seat, meets: bool) -> Generator[Asked, Any, None]:
        """Between two rounds, notice what has changed."""
        if not self.case.looks or seat.left:
            return
        news = yield Look()
        if news:
            yield from seat.recover() if news is True else seat.follow(news)
            if meets:
                yield from seat.meet()


def _part(seat: Seat) -> Generator[Asked, Any, None]:
    """End between two rounds, as the ``with`` block of a membership does."""
    for report in seat.part():
        yield Put(report_key(report.number, report.id), report, waits=False)
    yield Break()


def _known(seat: Seat) -> tuple[Any, ...]:
    """Return all that a worker knows and that can decide what it does."""
    return tuple(value for name, value in vars(seat).items() if name not in WRITTEN_ONLY)


def _lines(life: Any) -> list[Any]:
    """Return where a generator stands, and those to which it has delegated: instruction and local variables of each.

    A frame also has intermediate values of the expression in which it stands. These follow from what is returned, in
    code that yields within expressions of its attributes and variables alone.
    """
    found = []
    while isinstance(life, GeneratorType) and life.gi_frame is not None:
        frame = life.gi_frame
        values = ((name, value) for name, value in frame.f_locals.items() if not isinstance(value, Seat | Workers))
        held = tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in values)
        found.append((frame.f_code, frame.f_lasti, held))
        life = life.gi_yieldfrom
    return found
