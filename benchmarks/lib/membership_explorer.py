"""Explores the protocol of a membership exhaustively: all orders of its steps, and a fault at each of them.

Members run the protocol itself (``Seat``). What they ask for is answered from a model of a store and of connections
that breaks in every way that real ones can: a phase that all members of an epoch have entered may end well for some and
break for others as soon as one of them is gone. A state is where each member stands, and what store and connections
hold; the same state is looked at once.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from typing import Any

from benchmarks.lib.membership_states import ALL, Explored, State, Wrong, put
from benchmarks.lib.membership_workers import (
    CRASH,
    GIVES_UP,
    LEAVE,
    LEAVES,
    PART,
    SPURIOUS,
    SUSPECT,
    Apply,
    Asked,
    Case,
    Look,
    Pause,
    Place,
    Workers,
)
from gradwire.link.membership.quorum import Presence
from gradwire.link.membership.records import Epoch
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
    Meet,
    Propose,
    Put,
    Requests,
    Rest,
    Roll,
    Serve,
    Undo,
    Vote,
    Word,
    epoch_key,
    named_key,
)

__all__ = ["Explorer", "explored"]

ALONE = (Count, Apply, Undo, Break, Hand, Rest, Serve)
"""Steps of which the order does not matter: they concern one member alone, or only allow others more."""


class Explorer:
    """Explores one case.

    Args:
        case: What is explored.
        merges: False: what members were told so far is part of a state, also where it makes no difference any more.
    """

    def __init__(self, case: Case, *, merges: bool = True) -> None:
        self.case, self.letters = case, case.letters
        self.found = Explored(faulted={fault: set() for fault in case.faults})
        self._workers = Workers(case, merges=merges)
        self._before: dict[State, State | None] = {}

    def explore(self) -> Explored:
        """Visit all states, those after the fewest steps first.

        Raises:
            Wrong: a promise does not hold in one of them; the message has the shortest way to it.
        """
        n = len(self.letters)
        first = State(self._workers.begin(), (None,) * n, ((),) * n, (None,) * n, left=self.case.most)
        if self.case.founded:
            first = first._replace(store=frozenset({(FIRST, self.case.first())}))
        waiting, self._before = deque([first]), {first: None}
        collects = gc.isenabled()
        # It would look at all states again and again, of which none can go.
        gc.disable()
        try:
            while waiting:
                for following in self._judged(state := waiting.popleft()):
                    if following not in self._before:
                        self._before[following] = state
                        waiting.append(following)
        finally:
            self.found.states = len(self._before)
            if collects:
                gc.enable()
        return self.found

    def _judged(self, state: State) -> list[State]:
        """Return the states that may follow."""
        try:
            found = [self._settled(following) for following in self._after(state)]
            if not found:
                self._judge_end(state)
        except Wrong as wrong:
            raise Wrong("\n".join([str(wrong), *self._way(state)])) from None
        return found

    def _at(self, state: State, i: int) -> Place:
        return self._workers[state.places[i]]

    # ------------------------------------------------------------------ transitions

    def _after(self, state: State) -> Iterator[State]:
        running = [i for i, end in enumerate(state.ended) if end is None]
        for i in running:
            if isinstance(self._at(state, i).step, Pause):
                # It concerns this member alone.
                yield from self._answered(state, i)
                return
        for i in running:
            yield from self._answered(state, i)
        if state.left:
            for i in running:
                yield from self._faulted(state, i)

    def _settled(self, state: State) -> State:
        """Take the steps that concern a member alone, or only allow others more: their order does not matter."""
        for i in range(len(state.places)):
            while state.ended[i] is None and isinstance(self._at(state, i).step, ALONE):
                (state,) = self._answered(state, i)
        return state

    def _tell(self, state: State, i: int, reply: Any, **changes: Any) -> State:
        """Give a member its reply."""
        number = self._workers.after(state.places[i], reply)
        place = self._workers[number]
        made = state._replace(places=put(state.places, i, number), **changes)
        seat, end = place.seat, place.end
        if end == "left" and seat.left and self.case.quorum and seat.me.id not in made.data[i][-1][1]:
            raise Wrong(f"{seat.me.id[0]} leaves by its own word, and has not contributed to its last round")
        if end is not None:
            # The process ends, and its connections with it.
            made = made._replace(ended=put(made.ended, i, end), gone=made.gone | {(ALL, seat.me.id)})
        return made

    def _answered(self, state: State, i: int) -> Iterator[State]:
        """Give a member each of the replies that it may get now."""
        place = self._at(state, i)
        step, seat = place.step, place.seat
        self.found.steps.add(type(step).__name__)
        me, number = seat.me.id, seat.epoch.number if seat.epoch else 0
        if isinstance(step, Count):
            yield self._counted(state, i, step)
        elif isinstance(step, Apply):
            data = state.data[i] if state.draft[i] is None else (*state.data[i], state.draft[i])
            yield self._tell(state, i, None, data=put(state.data, i, data), draft=put(state.draft, i, None))
        elif isinstance(step, Undo):
            if len(state.data[i]) != step.round:
                raise Wrong(f"{me[0]} takes back round {step.round}, which it has applied")
            yield self._tell(state, i, None, draft=put(state.draft, i, None))
        elif isinstance(step, Break):
            yield self._tell(state, i, None, gone=state.gone | {(number, me)})
        elif isinstance(step, Hand | Rest | Serve):
            yield self._tell(state, i, None)
        elif isinstance(step, Pause):
            yield self._tell(state, i, False)
            if state.left:
                self.found.faulted[PART].add("Pause")
                yield self._tell(state, i, True, left=state.left - 1)
        elif isinstance(step, Exchange):
            if len(state.data[i]) != step.round:
                raise Wrong(f"{me[0]} exchanges round {step.round} after {len(state.data[i])} rounds")
            yield from self._phase(state, i, "exchange", step.round, step.present, seat.current)
        elif isinstance(step, Roll):
            self._judge_age(state, i, step)
            yield from self._phase(state, i, "roll", step.number, None, seat.current)
        elif isinstance(step, Vote):
            yield from self._phase(state, i, "vote", step.round, step.word, seat.current)
        elif isinstance(step, Meet):
            yield from self._phase(state, i, "meet", 0, state.data[i], step.epoch)
        else:
            yield from self._answered_by_the_store(state, i, number)

    def _answered_by_the_store(self, state: State, i: int, number: int) -> Iterator[State]:
        place = self._at(state, i)
        step, seat, store = place.step, place.seat, dict(state.store)
        following = store.get(epoch_key(number + 1))
        if isinstance(step, Put):
            store[step.key] = step.record
            yield self._tell(state, i, None, store=frozenset(store.items()))
        elif isinstance(step, Propose):
            if not step.epoch.members:
                raise Wrong(f"{seat.me.id[0]} ends the training for all: it proposes an epoch that nobody belongs to")
            if self.case.forgets and epoch_key(step.epoch.number + 1) in store:
                self.found.steps.add("forgotten")
                yield self._tell(state, i, None)
            there = store.setdefault(step.key, step.epoch)
            yield self._tell(state, i, there, store=frozenset(store.items()))
        elif isinstance(step, Collect):
            yield self._tell(state, i, tuple(store[key] for key in step.keys if key in store))
            if self.case.forgets and following is not None:
                yield self._tell(state, i, ())
        elif isinstance(step, Await):
            if step.key in store:
                yield self._tell(state, i, store[step.key])
            elif step.for_ever and seat.leaving:
                yield self._tell(state, i, GIVES_UP)
            elif not step.for_ever and state.closed(seat.epoch):
                yield self._tell(state, i, None)
        elif isinstance(step, Ask):
            yield self._tell(state, i, None, asks=(*state.asks, step.member))
        elif isinstance(step, Founders):
            if FIRST in store:
                yield self._tell(state, i, ())
            elif len(state.asks) >= self.case.least:
                yield self._tell(state, i, state.asks)
            elif seat.leaving:
                yield self._tell(state, i, GIVES_UP)
        elif isinstance(step, Requests):
            known = seat.current.ids()
            asking = (a for a in state.asks if named_key(a.id) not in store and a.id not in known)
            yield self._tell(state, i, tuple(asking))
        elif isinstance(step, Look):
            yield self._tell(state, i, False)
            if following is not None:
                self.found.steps.add("follow")
                yield self._tell(state, i, following)
            elif state.closed(seat.epoch):
                yield self._tell(state, i, True)

    def _phase(self, state: State, i: int, phase: str, round: int, message: Any, epoch: Epoch) -> Iterator[State]:
        """Enter a phase with all members of an epoch; then end it, well or not."""
        me, gone = self._at(state, i).seat.me.id, state.closed(epoch)
        if phase == "meet":
            gone |= state.deserters(epoch)
        known = {id: said for n, p, r, id, said in state.entered if (n, p, r) == (epoch.number, phase, round)}
        broke = {"meet": tuple(sorted(gone - {me})), "exchange": False, "vote": None, "roll": None}[phase]
        if me not in known and gone and phase in ("exchange", "roll"):
            # It may notice between two rounds.
            yield self._tell(state, i, broke)
        if me not in known:
            for said in self._answers(state, i, epoch) if phase == "roll" else (message,):
                yield state._replace(entered=state.entered | {(epoch.number, phase, round, me, said)})
            return
        if gone:
            yield self._tell(state, i, broke)
        if set(epoch.ids()) <= set(known):
            yield self._went_well(state, i, phase, known, epoch)

    def _went_well(self, state: State, i: int, phase: str, known: dict[str, Any], epoch: Epoch) -> State:
        seat = self._at(state, i).seat
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
            return self._tell(state, i, True, draft=put(state.draft, i, (epoch.number, frozenset(merged))))
        if phase == "vote":
            words: tuple[Word, ...] = tuple(known[id] for id in epoch.ids())
            return self._tell(state, i, words)
        source = next((known[id] for id in epoch.ids() if id not in epoch.new), ())
        if len(source) != epoch.round:
            raise Wrong(f"epoch {epoch.number} begins with round {epoch.round}, its state has {len(source)}")
        if seat.me.id not in epoch.new and state.data[i] != source:
            raise Wrong(f"epoch {epoch.number} begins with states {state.data[i]} and {source}")
        return self._tell(state, i, None, data=put(state.data, i, source))

    def _answers(self, state: State, i: int, epoch: Epoch) -> Iterator[Presence]:
        """Yield what a member may answer to a roll call: it has taken all its steps, or still computes."""
        place = self._at(state, i)
        age = place.step.age if isinstance(place.step, Roll) else 0
        absent = sum(p == "roll" and id == place.seat.me.id and not said.weight for _, p, _, id, said in state.entered)
        yield Presence(1.0, True, age, late=True)
        if absent < self.case.absences:
            yield Presence(0.0, False, age, late=True)

    def _judge_age(self, state: State, i: int, step: Roll) -> None:
        """Judge that a member knows since when it computes from the same global parameters."""
        me = self._at(state, i).seat.me.id
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
        place = self._at(state, i)
        step, seat = place.step, place.seat
        number = seat.epoch.number if seat.epoch else 0
        less, of = state._replace(left=state.left - 1), set[str]()
        if CRASH in self.case.faults:
            of.add(CRASH)
            yield less._replace(ended=put(state.ended, i, CRASH), gone=state.gone | {(ALL, seat.me.id)})
        if SUSPECT in self.case.faults and number:
            of.add(SUSPECT)
            yield less._replace(gone=state.gone | {(number, seat.me.id)})
        if LEAVE in self.case.faults and not seat.leaving:
            of.add(LEAVE)
            yield less._replace(places=put(state.places, i, self._workers.after(state.places[i], LEAVES)))
        if SPURIOUS in self.case.faults and isinstance(step, Exchange | Vote | Meet | Roll):
            of.add(SPURIOUS)
            yield self._tell(less, i, {Exchange: False, Vote: None, Meet: (), Roll: None}[type(step)])
        for fault in of:
            self.found.faulted[fault].add(type(step).__name__)

    # ------------------------------------------------------------------ ends

    def _judge_end(self, state: State) -> None:
        """Judge a state in which nothing can happen any more."""
        self.found.ends[state.ended] += 1
        if set(state.ended) == {"out"}:
            raise Wrong("all members are left out, and nobody goes on")
        self._judge_last_epoch(state)
        done = {state.data[i] for i, end in enumerate(state.ended) if end == "done"}
        if len(done) > 1 or any(len(data) != self.case.rounds for data in done):
            raise Wrong(f"members ended with the states {done}")
        running = [i for i, end in enumerate(state.ended) if end is None]
        for i in running:
            if not all(_waits_outside(self._at(state, j).step) for j in running):
                raise Wrong(f"{self.letters[i]} waits for ever in {self._at(state, i).step}; the others: {state.ended}")

    def _judge_last_epoch(self, state: State) -> None:
        """Judge that somebody goes on with the state where a member is left out that had it, or that began with all."""
        epochs = [record for key, record in state.store if key == epoch_key(record.number)]
        last = max(epochs, key=lambda epoch: epoch.number, default=None)
        out = [i for i, end in enumerate(state.ended) if end == "out" or (end is None and state.data[i])]
        if last is None or not any(state.data[i] or not last.round for i in out):
            return
        for i, end in enumerate(state.ended):
            seat = self._at(state, i).seat
            if end in (CRASH, "done") or (seat.epoch == last and seat.holds):
                return
        raise Wrong(f"{[self.letters[i] for i in out]} are left out of {last}, to which nobody comes")

    def _way(self, state: State | None) -> Iterator[str]:
        """Yield the shortest way to a state, a line a transition."""
        way = []
        while state is not None:
            way.append(state)
            state = self._before[state]
        for number, (state, following) in enumerate(zip(way[::-1], way[-2::-1]), 1):
            for i, letter in enumerate(self.letters):
                before, after = self._at(state, i), self._at(following, i)
                if before is not after:
                    told = "is told to leave" if before.step == after.step else f"then {after.step or after.end}"
                    yield f"{number}. {letter}: {before.step}; {told}"
                elif state.ended[i] != following.ended[i]:
                    yield f"{number}. {letter}: {before.step}; {following.ended[i]}"
            sent = [(*entry[:3], entry[3][0], entry[4]) for entry in following.entered - state.entered]
            lost = [(number, id[0]) for number, id in following.gone - state.gone if number != ALL]
            yield from (f"{number}. sent: {entry}" for entry in sent)
            yield from (f"{number}. connections of epoch {epoch} end: {letter}" for epoch, letter in lost)


def _waits_outside(step: Asked | None) -> bool:
    return isinstance(step, Founders) or (isinstance(step, Await) and step.for_ever)


def explored(case: Case) -> Explored:
    """Explore a case.

    Raises:
        Wrong: a promise of the protocol does not hold.
    """
    return Explorer(case).explore()
