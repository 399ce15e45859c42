"""The protocol of a membership, in all orders of its steps and with a fault at each of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.lib.membership_cases import SMALL
from benchmarks.lib.membership_explorer import Explorer, explored
from benchmarks.lib.membership_states import Wrong
from benchmarks.lib.membership_workers import CRASH, LEAVE, PART, SPURIOUS, SUSPECT, Case, member
from gradwire.link.membership import protocol, steps
from gradwire.link.membership.epochs import changed_epoch, next_epoch
from gradwire.link.membership.records import Epoch, EpochReport

MESSAGES = {"Exchange", "Vote", "Propose", "Collect", "Put"}
"""Messages of every training in which a round breaks."""

ENDS = {CRASH: CRASH, LEAVE: "left", PART: "parted"}
"""How a member ends at which one of these faults occurs."""


def faulted(case: Case, fault: str) -> set[str]:
    """Return steps at which a fault has to occur, so that it has occurred everywhere."""
    # In an epoch after the first, members meet after a fault, or one who comes.
    others = case.most > 1 or len(case.comers) == case.rounds - 1 > 0 or not case.founded or case.leavers
    meets = {"Meet"} if others else set()
    if fault == PART:
        return {"Pause"}
    if fault == SPURIOUS:
        return {"Exchange", "Vote"} | meets
    comes = {"Ask", "Founders", "Await"} if case.comers and fault in (CRASH, LEAVE) else set()
    # When one of three leaves, the others wait for the first of them, who takes others in.
    leaves = len(case.founded) == 3 and (case.leavers or {LEAVE, CRASH} <= {*case.faults})
    changes = {"Requests", "Await"} if leaves else set()
    return MESSAGES | meets | comes | changes


@pytest.mark.parametrize("name", SMALL)
def test_no_order_and_no_fault_divides_the_members_or_makes_them_wait(name: str) -> None:
    case = SMALL[name]
    found = explored(case)
    # The exploration is worth something only if it came everywhere.
    assert MESSAGES | {"Count", "Break"} <= found.steps
    assert {fault: faulted(case, fault) - at for fault, at in found.faulted.items()} == {f: set() for f in case.faults}
    assert any("done" in ends for ends in found.ends)
    kinds = {ENDS[fault] for fault in case.faults if fault in ENDS} | {"left" for _ in case.leavers}
    # All faults in one history, if somebody is left then.
    together = [kinds] if len(kinds) < len(case.letters) else [{kind} for kind in kinds]
    assert all(any({"done"} | some <= {*ends} for ends in found.ends) for some in together)
    for place in range(len(case.founded), len(case.letters)):
        assert any(ends[place] == "done" for ends in found.ends), "a worker that comes is never taken in"
    # Who is alone has nobody to follow.
    assert ("follow" in found.steps) == (case.looks and (len(case.founded) > 2 or CRASH not in case.faults))
    assert ("forgotten" in found.steps) == case.forgets


@pytest.mark.parametrize(
    "case",
    [
        Case("ab", rounds=1, faults=(CRASH, SUSPECT, LEAVE, SPURIOUS), looks=True),
        Case("ab", rounds=2, faults=(LEAVE, CRASH), most=2),
        Case("a", "b", rounds=2, faults=(CRASH, LEAVE, PART)),
        Case("ab", rounds=1, faults=(SUSPECT,), again=True, forgets=True),
        Case("ab", rounds=2, faults=(LEAVE,), quorum=1),
    ],
)
def test_what_no_longer_makes_a_difference_to_a_worker_is_no_part_of_a_state(case: Case) -> None:
    merged, whole = explored(case), Explorer(case, merges=False).explore()
    assert merged.states < whole.states
    assert (merged.ends.keys(), merged.steps, merged.faulted) == (whole.ends.keys(), whole.steps, whole.faulted)


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


def test_the_explorer_finds_an_epoch_that_has_only_those_that_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def deserted(epoch: Epoch, reports: dict[str, EpochReport]) -> Epoch:
        found = next_epoch(epoch, reports)
        stay = any(report.holds and not report.leaving for report in reports.values())
        left = tuple(m for m in epoch.members if m.id in reports and reports[m.id].leaving)
        return found if stay or not left else replace(found, members=left, new=())

    monkeypatch.setattr(protocol, "next_epoch", deserted)
    with pytest.raises(Wrong, match="to which nobody comes") as caught:
        explored(Case("ab", "c", rounds=2, faults=(PART,)))
    # The message tells how that comes about.
    _, *way = str(caught.value).split("\n")
    assert way[0].startswith("1. ")
    assert any(line.endswith("; then parted") for line in way)
    assert way[-1].endswith("; then out")


def test_the_explorer_finds_a_member_that_begins_an_epoch_that_has_been(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = protocol.Seat._agree

    def stubborn(self: protocol.Seat, report: EpochReport) -> steps.Steps[None]:
        agreeing, reply = usual(self, report), None
        while True:
            try:
                step = agreeing.send(reply)
            except StopIteration:
                return
            reply = yield step
            if isinstance(step, steps.Propose) and reply is None:
                reply = step.epoch

    monkeypatch.setattr(protocol.Seat, "_agree", stubborn)
    with pytest.raises(Wrong):
        explored(SMALL["a step, both are stopped, and records are removed"])


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
    # One whose program has ended tells that nobody can take the state from it.
    assert next_epoch(epoch, {A.id: replace(leaves, holds=False), C.id: new}).members == ()


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
