"""Cases in which the protocol of a membership is explored exhaustively: those that the tests run, and larger ones."""

from __future__ import annotations

from benchmarks.lib.membership_workers import CRASH, LEAVE, PART, SPURIOUS, SUSPECT, Case

__all__ = ["LARGE", "QUORUM", "SMALL"]

SMALL = {
    "a step, a crash": Case("abc", rounds=1, faults=(CRASH,)),
    "a step, two crashes": Case("abc", rounds=1, faults=(CRASH,), most=2),
    "a step, one is stopped or cut off": Case("abc", rounds=1, faults=(SUSPECT,)),
    "a step, what one receives is spoilt": Case("abc", rounds=1, faults=(SPURIOUS,)),
    "two steps, one is stopped or cut off": Case("ab", rounds=2, faults=(SUSPECT,)),
    "a step, both are stopped or cut off": Case("ab", rounds=1, faults=(SUSPECT,), most=2),
    "a step, both are stopped, and records are removed": Case(
        "ab", rounds=1, faults=(SUSPECT,), most=2, again=True, forgets=True
    ),
    "two steps, one is stopped and comes again": Case("ab", rounds=2, faults=(SUSPECT,), again=True),
    "two steps, what one receives is spoilt": Case("ab", rounds=2, faults=(SPURIOUS,)),
    "two steps, one ends, the others may meet as they compute": Case("ab", rounds=2, faults=(CRASH,), looks=True),
    "two steps, one is cut off, and they may meet as they compute": Case("ab", rounds=2, faults=(SUSPECT,), looks=True),
    "two steps, a program ends between them": Case("abc", rounds=2, faults=(PART,)),
    "a leave": Case("ab", rounds=2, faults=(LEAVE,)),
    "a leave, and a crash": Case("ab", rounds=1, faults=(LEAVE, CRASH), most=2),
    "three, a leave, and a crash": Case("abc", rounds=2, faults=(LEAVE, CRASH), most=2),
    "three, the first leaves, one is stopped or cut off": Case("abc", leavers="a", rounds=2, faults=(SUSPECT,)),
    "three, the last leaves, one is stopped or cut off": Case("abc", leavers="c", rounds=2, faults=(SUSPECT,)),
    "three, a leave, the others may follow as they compute": Case("abc", rounds=2, faults=(LEAVE,), looks=True),
    "three, a leave, and a program ends": Case("abc", rounds=2, faults=(LEAVE, PART), most=2),
    "a join": Case("ab", "c", rounds=2, faults=(CRASH,)),
    "a join, one is stopped or cut off": Case("ab", "c", rounds=2, faults=(SUSPECT,)),
    "a join, what one receives is spoilt": Case("ab", "c", rounds=2, faults=(SPURIOUS,)),
    "a join and a leave": Case("ab", "c", rounds=2, faults=(LEAVE,)),
    "a join, and a program ends": Case("ab", "c", rounds=2, faults=(PART,)),
    "two found a training": Case("", "ab", rounds=1, faults=(CRASH,), least=2),
    "two found a training, and a program ends": Case("", "ab", rounds=1, faults=(PART,), least=2),
}
"""Members that all take part in every round."""

QUORUM = {
    "two steps, a crash": Case("ab", rounds=2, faults=(CRASH,), quorum=1),
    "a step, one is stopped or cut off": Case("ab", rounds=1, faults=(SUSPECT,), quorum=1),
    "a step, what one receives is spoilt": Case("ab", rounds=1, faults=(SPURIOUS,), quorum=1),
    "a leave": Case("ab", rounds=2, faults=(LEAVE,), quorum=1),
    "a join": Case("a", "b", rounds=2, faults=(CRASH,), quorum=1),
    "three steps, nobody may be late": Case("ab", rounds=3, quorum=1, staleness=0),
    "three members": Case("abc", rounds=1, quorum=2),
}
"""Rounds that go on with a quorum."""

LARGE = {
    "two steps of three, one is stopped or cut off": Case("abc", rounds=2, faults=(SUSPECT,)),
    "two steps of three, one is stopped and comes again": Case("abc", rounds=2, faults=(SUSPECT,), again=True),
    "two steps of three, two crashes": Case("abc", rounds=2, faults=(CRASH,), most=2),
    "two join at once, a crash": Case("a", "bc", rounds=2, faults=(CRASH,)),
    "two join at once, one is stopped or cut off": Case("a", "bc", rounds=2, faults=(SUSPECT,)),
    "two join at once, what one receives is spoilt": Case("a", "bc", rounds=2, faults=(SPURIOUS,)),
    "a join, two crashes": Case("ab", "c", rounds=2, faults=(CRASH,), most=2),
    "a join, a crash, the others may follow as they compute": Case("ab", "c", rounds=2, faults=(CRASH,), looks=True),
    "a join, one is stopped and comes again": Case("ab", "c", rounds=2, faults=(SUSPECT,), again=True),
    "a join, one is cut off, and they may follow as they compute": Case(
        "ab", "c", rounds=2, faults=(SUSPECT,), looks=True
    ),
    "a join, the first leaves, one is stopped or cut off": Case("ab", "c", leavers="a", rounds=2, faults=(SUSPECT,)),
    "a join, the other leaves, one is stopped or cut off": Case("ab", "c", leavers="b", rounds=2, faults=(SUSPECT,)),
    "a join, a leave, and a crash": Case("ab", "c", rounds=2, faults=(LEAVE, CRASH), most=2),
    "two steps of three, a crash, the others may meet as they compute": Case(
        "abc", rounds=2, faults=(CRASH,), looks=True
    ),
    "a leave, and one is stopped or cut off": Case("ab", rounds=2, faults=(LEAVE, SUSPECT), most=2),
    "a leave, and what one receives is spoilt": Case("ab", rounds=2, faults=(LEAVE, SPURIOUS), most=2),
    "three, the first leaves, what one receives is spoilt": Case("abc", leavers="a", rounds=2, faults=(SPURIOUS,)),
    "three, the last leaves, what one receives is spoilt": Case("abc", leavers="c", rounds=2, faults=(SPURIOUS,)),
    "three, two crashes, and records are removed": Case("abc", rounds=1, faults=(CRASH,), most=2, forgets=True),
    "three found a training": Case("", "abc", rounds=1, faults=(CRASH,), least=2),
    "three, a quorum of one, a crash": Case("abc", rounds=1, faults=(CRASH,), quorum=1),
    "three, a quorum of two, one is stopped or cut off": Case("abc", rounds=1, faults=(SUSPECT,), quorum=2),
    "a join, a quorum of two, a crash": Case("ab", "c", rounds=2, faults=(CRASH,), quorum=2),
    "two steps with a quorum, one is stopped or cut off": Case("ab", rounds=2, faults=(SUSPECT,), quorum=1),
    "two steps with a quorum, what one receives is spoilt": Case("ab", rounds=2, faults=(SPURIOUS,), quorum=1),
    "a step with a quorum, one is stopped and comes again": Case(
        "ab", rounds=1, faults=(SUSPECT,), quorum=1, again=True
    ),
    "three steps with a quorum, two absences, a leave": Case("ab", rounds=3, faults=(LEAVE,), quorum=1, absences=2),
}
"""Further ones, for which the tests have no time."""
