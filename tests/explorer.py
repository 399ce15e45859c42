"""Explores the protocol of a membership exhaustively: all orders of its steps, and a fault at each of them.

Members run the protocol itself (``Seat``). What they ask for is answered from a model of a store and of connections
that breaks in every way that real ones can: a phase that all members of an epoch have entered may end well for some and
break for others as soon as one of them is gone. A state is what each member was told so far; the same state is looked
at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from gradwire.link.membership.protocol import Seat
from gradwire.link.membership.quorum import Presence, Quorum
from gradwire.link.membership.records import Epoch, Member
from gradwire.link.membership.steps import (
    FIRST,
    Ask,
    Await,
    Break,
    Collect,
    Count,
    Exchange,
    Founders,
    Hand,
    LeftOut,
    Meet,
    Propose,
    Put,
    Requests,
    Rest,
    Roll,
    Step,
    Undo,
    Vote,
    Word,
    named_key,
)

CRASH, SUSPECT, LEAVE, SPURIOUS = "crash", "suspect", "leave", "spurious"
"""Faults: a member ends; the others lose it while it lives on (stopped, cut off); it is told to leave; what it receives
is not what was sent."""

LEAVES = "told to leave"


@dataclass(frozen=True)
class Apply:
    """A member applies the round that counts for it: what the optimizer does after the exchange has returned."""


@dataclass(frozen=True)
class Look:
    """A member that computes may notice that others are gone; the reply tells whether it does."""


ALL = 0
"""Number that stands for all epochs: the process has ended."""


def member(letter: str) -> Member:
    """Return a member by a letter."""
    return Member(letter * 16, letter)


@dataclass(frozen=True)
class Case:
    """What is explored.

    Attributes:
        founded: Letters of the members of an epoch that has begun.
        comers: Letters of workers that come in.
        rounds: Number of rounds after which a member ends.
        faults: Kinds of faults.
        most: Number of faults in one history.
        again: True if a member that was left out comes again, once.
        least: Number of workers that found a training.
        quorum: Members with which a round goes on; 0: all.
        staleness: Under a quorum, the largest age of a difference.
        absences: Under a quorum, how often each member still computes when the roll is called.
        looks: True if members may notice between two rounds, before and after they apply, that others are gone, and
            meet again at once.
    """

    founded: str
    comers: str = ""
    rounds: int = 2
    faults: tuple[str, ...] = ()
    most: int = 1
    again: bool = False
    least: int = 1
    quorum: int = 0
    staleness: int = 1
    absences: int = 1
    looks: bool = False

    def rule(self) -> Quorum | None:
        """Return the rule by which rounds begin."""
        return Quorum(self.quorum, self.staleness) if self.quorum else None


Mean: TypeAlias = tuple[int, frozenset[str]]
"""A round's outcome: the epoch in which it was exchanged, and the ids of those that contributed."""


@dataclass(frozen=True)
class State:
    """A state of all members, of their store and of their connections.

    Attributes:
        told: For each member, what it was told so far.
        ended: For each member, how it ended; None while it runs.
        data: For each member, the state that it has: for each round the epoch in which it was exchanged, and who
            contributed.
        draft: For each member, the same of the round that it holds and has not applied.
        store: Records by key.
        asks: Workers that have asked, in order.
        entered: What members have sent in a phase of an epoch: (epoch, phase, round, id) and the message.
        gone: Members whose connections of an epoch are closed: (epoch, id).
        left: Number of faults that may still occur.
    """

    told: tuple[tuple[Any, ...], ...]
    ended: tuple[str | None, ...]
    data: tuple[tuple[Mean, ...], ...]
    draft: tuple[Mean | None, ...]
    store: frozenset[tuple[str, Any]] = frozenset()
    asks: tuple[Member, ...] = ()
    entered: frozenset[tuple[int, str, int, str, Any]] = frozenset()
    gone: frozenset[tuple[int, str]] = frozenset()
    counted: frozenset[tuple[int, Mean]] = frozenset()
    left: int = 0


@dataclass
class Explored:
    """What an exploration found.

    Attributes:
        states: Number of states.
        ends: How often histories ended so, by the members' ends.
        steps: Kinds of steps that were taken.
        faulted: Kinds of steps at which a fault occurred.
    """

    states: int = 0
    ends: Counter[tuple[str | None, ...]] = field(default_factory=Counter)
    steps: set[str] = field(default_factory=set)
    faulted: set[str] = field(default_factory=set)


class Wrong(AssertionError):
    """A promise of the protocol does not hold."""


class Explorer:
    """Explores one case."""

    def __init__(self, case: Case) -> None:
        self.case, self.letters = case, case.founded + case.comers
        self.found = Explored()
        self._known: dict[tuple[int, tuple[Any, ...]], tuple[Step | Apply | Look | None, Seat, str | None]] = {}

    def explore(self) -> Explored:
        """Visit all states.

        Raises:
            Wrong: a promise does not hold in one of them.
        """
        n = len(self.letters)
        founded = len(self.case.founded)
        first = State(((),) * n, (None,) * n, ((),) * n, (None,) * n, left=self.case.most)
        if founded:
            first = replace(first, store=frozenset({(FIRST, self._first())}))
        waiting, seen = [first], {first}
        while waiting:
            state = waiting.pop()
            found = list(self._after(state))
            if not found:
                self._judge_end(state)
            for following in found:
                if following not in seen:
                    seen.add(following)
                    waiting.append(following)
        self.found.states = len(seen)
        return self.found

    def _first(self) -> Epoch:
        return Epoch(1, tuple(member(letter) for letter in self.case.founded))

    # ------------------------------------------------------------------ members

    def _life(self, seat: Seat, comes: bool) -> Generator[Any, Any, str]:
        entering, chances = comes, 1 + self.case.again
        while chances:
            try:
                if entering:
                    yield from seat.enter()
                while seat.rounds < self.case.rounds and not seat.left:
                    yield from seat.round()
                    if self.case.looks and not seat.left and (yield Look()):
                        yield from seat.recover()
                    yield Apply()
                    if self.case.looks and not seat.left and (yield Look()):
                        yield from seat.recover()
                        yield from seat.meet()
            except LeftOut:
                if seat.leaving:
                    return "left"
                chances -= 1
                if not chances:
                    return "out"
                seat.again(chr(ord(seat.me.id[0]) - 32) * 16)
                entering = True
                continue
            return "left" if seat.left else "done"
        return "out"

    def _at(self, index: int, told: tuple[Any, ...]) -> tuple[Step | Apply | Look | None, Seat, str | None]:
        """Return what a member asks for after it was told something, its seat, and how it ended."""
        key = (index, told)
        if key not in self._known:
            seat = Seat(member(self.letters[index]), self.case.rule())
            comes = index >= len(self.case.founded)
            if not comes:
                seat.epoch, seat.holds, seat._has_met = self._first(), True, True
            life, step, end = self._life(seat, comes), None, None
            try:
                step = next(life)
                for reply in told:
                    if reply == (LEAVES,):
                        seat.leaving = True
                    else:
                        step = life.send(reply)
            except StopIteration as stop:
                end = stop.value
            self._known[key] = (None if end else step, seat, end)
        return self._known[key]

    # ------------------------------------------------------------------ transitions

    def _after(self, state: State) -> Iterator[State]:
        running = [i for i, end in enumerate(state.ended) if end is None]
        for i in running:
            step, _, _ = self._at(i, state.told[i])
            # These concern the member alone, or only allow others more: their order does not matter.
            if isinstance(step, Count | Apply | Undo | Break | Hand | Rest):
                yield from self._answered(state, i)
                return
        for i in running:
            yield from self._answered(state, i)
        if state.left:
            for i in running:
                yield from self._faulted(state, i)

    def _tell(self, state: State, i: int, reply: Any, **changes: Any) -> State:
        """Give a member its reply."""
        told = state.told[i] + (reply,)
        _, seat, end = self._at(i, told)
        made = replace(state, told=_put(state.told, i, told), **changes)
        if end == "left" and seat.left and self.case.quorum and seat.me.id not in made.data[i][-1][1]:
            raise Wrong(f"{seat.me.id[0]} leaves by its own word, and has not contributed to its last round")
        if end is not None:
            # The process ends, and its connections with it.
            made = replace(made, ended=_put(made.ended, i, end), gone=made.gone | {(ALL, seat.me.id)})
        return made

    def _answered(self, state: State, i: int) -> Iterator[State]:
        step, seat, _ = self._at(i, state.told[i])
        self.found.steps.add(type(step).__name__)
        store, me = dict(state.store), seat.me.id
        number = seat.epoch.number if seat.epoch else 0
        ids = seat.epoch.ids() if seat.epoch else ()
        gone = {id for n, id in state.gone if n in (number, ALL) and id in ids}
        if isinstance(step, Put):
            yield self._tell(state, i, None, store=frozenset({**store, step.key: step.record}.items()))
        elif isinstance(step, Propose):
            if not step.epoch.members:
                raise Wrong(f"{me[0]} ends the training for all: it proposes an epoch that nobody belongs to")
            there = store.setdefault(step.key, step.epoch)
            yield self._tell(state, i, there, store=frozenset(store.items()))
        elif isinstance(step, Collect):
            yield self._tell(state, i, tuple(store[key] for key in step.keys if key in store))
        elif isinstance(step, Await):
            if step.key in store:
                yield self._tell(state, i, store[step.key])
            elif gone and not step.for_ever:
                yield self._tell(state, i, None)
        elif isinstance(step, Ask):
            yield self._tell(state, i, None, asks=(*state.asks, step.member))
        elif isinstance(step, Founders):
            if FIRST in store:
                yield self._tell(state, i, ())
            elif len(state.asks) >= self.case.least:
                yield self._tell(state, i, state.asks)
        elif isinstance(step, Requests):
            yield self._tell(state, i, tuple(a for a in state.asks if named_key(a.id) not in store and a.id not in ids))
        elif isinstance(step, Break):
            yield self._tell(state, i, None, gone=state.gone | {(number, me)})
        elif isinstance(step, Count):
            yield self._counted(state, i, step)
        elif isinstance(step, Apply):
            data = state.data[i] if state.draft[i] is None else (*state.data[i], state.draft[i])
            yield self._tell(state, i, None, data=_put(state.data, i, data), draft=_put(state.draft, i, None))
        elif isinstance(step, Undo):
            if len(state.data[i]) != step.round:
                raise Wrong(f"{me[0]} takes back round {step.round}, which it has applied")
            yield self._tell(state, i, None, draft=_put(state.draft, i, None))
        elif isinstance(step, Hand | Rest):
            yield self._tell(state, i, None)
        elif isinstance(step, Look):
            yield self._tell(state, i, False)
            if gone:
                yield self._tell(state, i, True)
        elif isinstance(step, Meet):
            yield from self._phase(state, i, "meet", 0, state.data[i], gone, step.epoch)
        elif isinstance(step, Exchange):
            if len(state.data[i]) != step.round:
                raise Wrong(f"{me[0]} exchanges round {step.round} after {len(state.data[i])} rounds")
            yield from self._phase(state, i, "exchange", step.round, step.present, gone, seat.current)
        elif isinstance(step, Roll):
            self._judge_age(state, i, step)
            yield from self._phase(state, i, "roll", step.number, None, gone, seat.current)
        elif isinstance(step, Vote):
            yield from self._phase(state, i, "vote", step.round, step.word, gone, seat.current)

    def _phase(
        self, state: State, i: int, phase: str, round: int, message: Any, gone: set[str], epoch: Epoch
    ) -> Iterator[State]:
        """Enter a phase with all members of an epoch; then end it, well or not."""
        me = self._at(i, state.told[i])[1].me.id
        known = {id: said for n, p, r, id, said in state.entered if (n, p, r) == (epoch.number, phase, round)}
        broke = {"meet": tuple(sorted(gone - {me})), "exchange": False, "vote": None, "roll": None}[phase]
        if me not in known and gone and phase in ("exchange", "roll"):
            # It may notice between two rounds.
            yield self._tell(state, i, broke)
        if me not in known:
            message = state.data[i] if phase == "meet" else message
            for said in self._answers(state, i, epoch) if phase == "roll" else (message,):
                yield replace(state, entered=state.entered | {(epoch.number, phase, round, me, said)})
            return
        if gone:
            yield self._tell(state, i, broke)
        if set(epoch.ids()) <= set(known):
            yield self._went_well(state, i, phase, known, epoch)

    def _went_well(self, state: State, i: int, phase: str, known: dict[str, Any], epoch: Epoch) -> State:
        seat = self._at(i, state.told[i])[1]
        if phase == "roll":
            return self._tell(state, i, tuple(known[id] for id in epoch.ids()))
        if phase == "exchange":
            present, *others = set(known.values())
            if others:
                raise Wrong(f"members of epoch {epoch.number} begin a round by {present} and {others}")
            late = [member for member in present if member.weight and member.age > self.case.staleness]
            if late:
                raise Wrong(f"epoch {epoch.number} merges {late}")
            merged = {id for id, m in zip(epoch.ids(), present) if m.weight} if present else epoch.ids()
            return self._tell(state, i, True, draft=_put(state.draft, i, (epoch.number, frozenset(merged))))
        if phase == "vote":
            words: tuple[Word, ...] = tuple(known[id] for id in epoch.ids())
            return self._tell(state, i, words)
        source = next((known[id] for id in epoch.ids() if id not in epoch.new), ())
        if len(source) != epoch.round:
            raise Wrong(f"epoch {epoch.number} begins with round {epoch.round}, its state has {len(source)}")
        if seat.me.id not in epoch.new and state.data[i] != source:
            raise Wrong(f"epoch {epoch.number} begins with states {state.data[i]} and {source}")
        return self._tell(state, i, None, data=_put(state.data, i, source))

    def _answers(self, state: State, i: int, epoch: Epoch) -> Iterator[Presence]:
        """Yield what a member may answer to a roll call: it has taken all its steps, or still computes."""
        step, seat, _ = self._at(i, state.told[i])
        age = step.age if isinstance(step, Roll) else 0
        absent = sum(p == "roll" and id == seat.me.id and not said.weight for _, p, _, id, said in state.entered)
        yield Presence(1.0, True, age, late=True)
        if absent < self.case.absences:
            yield Presence(0.0, False, age, late=True)

    def _judge_age(self, state: State, i: int, step: Roll) -> None:
        """Judge that a member knows since when it computes from the same global parameters."""
        me = self._at(i, state.told[i])[1].me.id
        merged = [round for round, (_, ids) in enumerate(state.data[i]) if me in ids]
        if i < len(self.case.founded) and me.islower():
            since = merged[-1] + 1 if merged else 0
            if step.age != len(state.data[i]) - since:
                raise Wrong(f"{me[0]} says age {step.age} in round {step.round}, and computes since {since}")

    def _counted(self, state: State, i: int, step: Count) -> State:
        draft = state.draft[i]
        if draft is None or len(state.data[i]) != step.round:
            raise Wrong(f"round {step.round} counts for a member that does not hold it")
        other = [mean for round, mean in state.counted if round == step.round and mean != draft]
        if other:
            raise Wrong(f"round {step.round} counts as it was exchanged as {draft} and {other}")
        return self._tell(state, i, None, counted=state.counted | {(step.round, draft)})

    def _faulted(self, state: State, i: int) -> Iterator[State]:
        step, seat, _ = self._at(i, state.told[i])
        self.found.faulted.add(type(step).__name__)
        number = seat.epoch.number if seat.epoch else 0
        less = replace(state, left=state.left - 1)
        if CRASH in self.case.faults:
            yield replace(less, ended=_put(state.ended, i, CRASH), gone=state.gone | {(ALL, seat.me.id)})
        if SUSPECT in self.case.faults and number:
            yield replace(less, gone=state.gone | {(number, seat.me.id)})
        if LEAVE in self.case.faults and not seat.leaving:
            yield self._told_to_leave(less, i)
        if SPURIOUS in self.case.faults and isinstance(step, Exchange | Vote | Meet | Roll):
            reply = {Exchange: False, Vote: None, Meet: (), Roll: None}[type(step)]
            yield self._tell(less, i, reply)

    def _told_to_leave(self, state: State, i: int) -> State:
        return replace(state, told=_put(state.told, i, (*state.told[i], (LEAVES,))))

    # ------------------------------------------------------------------ ends

    def _judge_end(self, state: State) -> None:
        """Judge a state in which nothing can happen any more."""
        self.found.ends[state.ended] += 1
        if set(state.ended) == {"out"}:
            raise Wrong("all members are left out, and nobody goes on")
        done = {state.data[i] for i, end in enumerate(state.ended) if end == "done"}
        if len(done) > 1 or any(len(data) != self.case.rounds for data in done):
            raise Wrong(f"members ended with the states {done}")
        running = [i for i, end in enumerate(state.ended) if end is None]
        for i in running:
            step, _, _ = self._at(i, state.told[i])
            outside = isinstance(step, Founders) or (isinstance(step, Await) and step.for_ever)
            others = [j for j in running if j != i]
            if not outside or any(not _waits_outside(self._at(j, state.told[j])[0]) for j in others):
                raise Wrong(f"{self.letters[i]} waits for ever in {step}; the others: {state.ended}")


def _waits_outside(step: Step | Apply | Look | None) -> bool:
    return isinstance(step, Founders) or (isinstance(step, Await) and step.for_ever)


def _put(values: tuple[Any, ...], i: int, value: Any) -> tuple[Any, ...]:
    return (*values[:i], value, *values[i + 1 :])


def explored(case: Case) -> Explored:
    """Explore a case."""
    return Explorer(case).explore()


LARGE = {
    "three, a step, one is stopped or cut off": Case("abc", rounds=1, faults=(SUSPECT,)),
    "three, a step, what one receives is spoilt": Case("abc", rounds=1, faults=(SPURIOUS,)),
    "three, a leave": Case("abc", rounds=2, faults=(LEAVE,)),
    "two steps and a join, one is stopped or cut off": Case("ab", "c", rounds=2, faults=(SUSPECT,)),
    "three found a training": Case("", "abc", rounds=1, faults=(CRASH,), least=2),
    "three, a quorum of one, a crash": Case("abc", rounds=1, faults=(CRASH,), quorum=1),
    "two steps with a quorum, one is stopped or cut off": Case("ab", rounds=2, faults=(SUSPECT,), quorum=1),
    "two steps with a quorum, what one receives is spoilt": Case("ab", rounds=2, faults=(SPURIOUS,), quorum=1),
    "a step with a quorum, one is stopped and comes again": Case(
        "ab", rounds=1, faults=(SUSPECT,), quorum=1, again=True
    ),
    "three steps with a quorum, two absences, a leave": Case("ab", rounds=3, faults=(LEAVE,), quorum=1, absences=2),
}

if __name__ == "__main__":
    for name, case in LARGE.items():
        print(name, explored(case).states, flush=True)
