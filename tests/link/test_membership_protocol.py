"""The protocol of a membership, in all orders of its steps and with a fault at each of them."""

from __future__ import annotations

import pytest

from explorer import CRASH, LEAVE, SPURIOUS, SUSPECT, Case, Wrong, explored, member
from gradwire.link.membership import protocol, steps
from gradwire.link.membership.epochs import changed_epoch, next_epoch
from gradwire.link.membership.records import Epoch, EpochReport

CASES = {
    "a step, a crash": Case("abc", rounds=1, faults=(CRASH,)),
    "a step, two crashes": Case("abc", rounds=1, faults=(CRASH,), most=2),
    "two steps, one is stopped or cut off": Case("ab", rounds=2, faults=(SUSPECT,)),
    "a step, both are stopped or cut off": Case("ab", rounds=1, faults=(SUSPECT,), most=2),
    "two steps, one is stopped and comes again": Case("ab", rounds=2, faults=(SUSPECT,), again=True),
    "two steps, what one receives is spoilt": Case("ab", rounds=2, faults=(SPURIOUS,)),
    "two steps, one ends, the others may meet as they compute": Case("ab", rounds=2, faults=(CRASH,), looks=True),
    "two steps, one is cut off, and they may meet as they compute": Case("ab", rounds=2, faults=(SUSPECT,), looks=True),
    "a leave": Case("ab", rounds=2, faults=(LEAVE,)),
    "a leave, and a crash": Case("ab", rounds=1, faults=(LEAVE, CRASH), most=2),
    "a join": Case("ab", "c", rounds=2, faults=(CRASH,)),
    "a join, one is stopped or cut off": Case("ab", "c", rounds=1, faults=(SUSPECT,)),
    "a join and a leave": Case("ab", "c", rounds=2, faults=(LEAVE,)),
    "two found a training": Case("", "ab", rounds=1, faults=(CRASH,), least=2),
}
"""These run in half a minute. ``python tests/explorer.py`` explores larger ones, for minutes each."""


@pytest.mark.parametrize("name", CASES)
def test_no_order_and_no_fault_divides_the_members_or_makes_them_wait(name: str) -> None:
    case = CASES[name]
    found = explored(case)
    # The exploration is worth something only if it came everywhere.
    # In an epoch after the first, members meet after a fault, or one who comes.
    meets = {"Meet"} if case.most > 1 or len(case.comers) == case.rounds - 1 > 0 or not case.founded else set()
    assert {"Exchange", "Vote", "Count", "Propose", "Collect", "Put", "Break"} | meets <= found.steps
    assert {"Exchange", "Vote", "Propose", "Collect", "Put"} | meets <= found.faulted
    assert any("done" in ends for ends in found.ends)
    if CRASH in case.faults:
        assert any(CRASH in ends and "done" in ends for ends in found.ends)


def test_the_explorer_finds_a_member_that_meets_others_before_it_has_applied_a_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def early(self: protocol.Seat) -> steps.Steps[None]:
        yield from self.change()
        if not self._has_met:
            yield from self._meet()
        wanted = self.rounds + 1
        while self.rounds < wanted:
            words = None
            if (yield steps.Exchange(self.rounds)):
                self.held = wanted
                words = yield steps.Vote(self.rounds, (yield from self._word()))
            if words is not None:
                yield from self._count(wanted)
                return
            yield from self._recover()
            yield from self._meet()

    monkeypatch.setattr(protocol.Seat, "round", early)
    with pytest.raises(Wrong, match="begins with round"):
        explored(Case("ab", rounds=2, faults=(SUSPECT,)))


def test_the_explorer_finds_a_member_that_applies_a_round_before_the_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(self: protocol.Seat) -> steps.Steps[None]:
        wanted = self.rounds + 1
        while True:
            if (yield steps.Exchange(self.rounds)):
                self.held = wanted
                yield from self._count(wanted)
                return
            yield from self._recover()
            yield from self._meet()
            if self.rounds == wanted:
                return

    monkeypatch.setattr(protocol.Seat, "round", hasty)
    with pytest.raises(Wrong):
        explored(Case("abc", rounds=2, faults=(CRASH,)))


def test_the_explorer_finds_a_proposal_that_overwrites_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def overwriting(self: protocol.Seat, report: EpochReport) -> steps.Steps[None]:
        epoch = self.current
        keys = tuple(steps.report_key(epoch.number, id) for id in epoch.ids() if id != self.me.id)
        found = yield steps.Collect(keys)
        proposed = next_epoch(epoch, {told.id: told for told in (report, *found)})
        yield steps.Put(steps.epoch_key(proposed.number), proposed)
        yield from self._adopt(proposed)

    monkeypatch.setattr(protocol.Seat, "_agree", overwriting)
    with pytest.raises(Wrong):
        explored(Case("abc", rounds=1, faults=(CRASH,)))


A, B, C = (member(letter) for letter in "abc")


def report(of: str, held: int, **more: bool | tuple[str, ...] | int) -> EpochReport:
    return EpochReport(**({"number": 4, "id": of * 16, "held": held, "holds": True} | more))


def test_the_next_epoch_has_those_who_reported_and_begins_with_the_least_round() -> None:
    epoch = Epoch(4, (A, B, C), round=7)
    found = next_epoch(epoch, {A.id: report("a", 9, position=30), C.id: report("c", 8, position=20)})
    assert (found.number, found.members, found.round, found.position) == (5, (A, C), 8, 30)
    assert (found.previous, found.new) == (epoch.digest(), ())


def test_who_has_no_state_counts_neither_for_the_round_nor_as_a_source() -> None:
    epoch = Epoch(4, (A, B, C), new=(C.id,), round=7)
    found = next_epoch(epoch, {B.id: report("b", 7), C.id: report("c", 0, holds=False)})
    assert (found.members, found.new, found.round) == ((B, C), (C.id,), 7)


def test_without_state_nobody_goes_on_unless_nothing_was_learnt() -> None:
    told = {C.id: report("c", 0, holds=False)}
    assert next_epoch(Epoch(4, (A, C), new=(C.id,), round=7), told).members == ()
    first = next_epoch(Epoch(4, (A, C), new=(C.id,), round=0), told)
    assert (first.members, first.new) == ((C,), ())


def test_of_two_that_cannot_meet_the_later_one_goes() -> None:
    epoch = Epoch(4, (A, B, C), round=7)
    missing = {"met": False}
    told = {
        A.id: report("a", 7, **missing),
        B.id: report("b", 7, missed=(C.id,), **missing),
        C.id: report("c", 7, missed=(B.id,), **missing),
    }
    assert next_epoch(epoch, told).members == (A, B)


def test_who_reached_nobody_goes_and_not_all_that_it_did_not_reach() -> None:
    told = {
        A.id: report("a", 7, met=False, missed=(B.id, C.id)),
        B.id: report("b", 7, met=False),
        C.id: report("c", 7, met=False),
    }
    assert next_epoch(Epoch(4, (A, B, C), round=7), told).members == (B, C)


def test_who_has_the_state_stays_rather_than_newcomers_that_did_not_reach_it() -> None:
    told = {
        A.id: report("a", 7, met=False),
        B.id: report("b", 0, holds=False, met=False, missed=(A.id,)),
        C.id: report("c", 0, holds=False, met=False, missed=(A.id,)),
    }
    assert next_epoch(Epoch(4, (A, B, C), new=(B.id, C.id), round=7), told).members == (A,)


def test_who_leaves_stays_as_long_as_nobody_else_who_stays_has_the_state() -> None:
    epoch = Epoch(4, (A, B, C), new=(C.id,), round=7)
    leaves, new = report("a", 7, met=False, leaving=True), report("c", 0, holds=False, met=False)
    found = next_epoch(epoch, {A.id: leaves, C.id: new})
    assert (found.members, found.new, found.round) == ((A, C), (C.id,), 7)
    assert next_epoch(epoch, {A.id: leaves, B.id: report("b", 7, met=False), C.id: new}).members == (B, C)
    assert next_epoch(epoch, {A.id: leaves}).members == ()


@pytest.mark.parametrize("goes_on", [True, False])
def test_who_lacks_the_state_follows_those_who_have_it_or_says_that_it_does_not(goes_on: bool) -> None:
    seat = protocol.Seat(C)
    seat.epoch = Epoch(4, (A, C), new=(C.id,), round=7)
    found = seat.recover()
    assert isinstance(next(found), steps.Put)
    assert isinstance(found.send(None), steps.Break)
    assert isinstance(found.send(None), steps.Collect)
    assert found.send(()) == steps.Await(steps.epoch_key(5))
    if goes_on:
        following = Epoch(5, (A, C), new=(C.id,), round=7, previous=seat.epoch.digest())
        assert found.send(following) == steps.Put(steps.named_key(C.id), following)
        with pytest.raises(StopIteration):
            found.send(None)
        assert seat.epoch == following
    else:
        put = found.send(None)
        assert isinstance(put, steps.Put)
        assert put.key == steps.report_key(5, C.id)
        assert isinstance(put.record, EpochReport)
        assert (put.record.number, put.record.leaving) == (5, True)
        with pytest.raises(steps.LeftOut):
            found.send(None)


def test_a_change_keeps_the_order_and_appends_those_who_come() -> None:
    found = changed_epoch(Epoch(4, (A, B)), [A.id], [C, B], 3, 5)
    assert (found.number, found.members, found.new, found.round, found.position) == (5, (B, C), (C.id,), 3, 5)
