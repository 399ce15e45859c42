"""How long members wait for the reports of others, which decides who is in the next epoch."""

from __future__ import annotations

import time
import types
from functools import partial
from typing import Any

import pytest

from gradwire.link.membership.membership_link import MembershipLink
from gradwire.link.membership.records import Epoch, EpochReport, Member, new_id
from gradwire.link.membership.steps import report_key
from gradwire.link.membership.store_steps import MINORITY_S, VANISHED_S

GRACE_S = 1.0


@pytest.mark.parametrize(
    ("reported", "members", "has_all_that_live", "waits_s"),
    [
        (5, 6, True, VANISHED_S),  # the sixth has ended
        (5, 6, False, GRACE_S),  # the sixth may be late
        (3, 6, False, GRACE_S),
        (1, 2, True, VANISHED_S),  # of two, neither is a minority
        (2, 6, False, GRACE_S + MINORITY_S),
        (1, 6, True, GRACE_S + MINORITY_S),  # it was cut off from all others at once
        (1, 3, True, GRACE_S + MINORITY_S),
    ],
)
def test_a_minority_waits_longer(reported: int, members: int, has_all_that_live: bool, waits_s: float) -> None:
    link: Any = types.SimpleNamespace(_party=types.SimpleNamespace(grace_s=GRACE_S))
    assert MembershipLink._grace_s(link, reported, members, has_all_that_live) == waits_s


def test_a_grace_of_less_is_kept() -> None:
    link: Any = types.SimpleNamespace(_party=types.SimpleNamespace(grace_s=0.1))
    assert MembershipLink._grace_s(link, 5, 6, True) == 0.1


@pytest.mark.parametrize("is_far", [False, True])
@pytest.mark.parametrize("gone", [0, 1])
def test_one_that_is_late_lets_a_majority_wait_for_a_grace_and_no_longer(is_far: bool, gone: int) -> None:
    epoch = Epoch(4, tuple(Member(new_id()) for _ in range(6)))
    keys = [report_key(4, id) for id in epoch.ids()[1:]]
    told = {key: EpochReport(4, id, 7, True) for key, id in zip(keys, epoch.ids()[1:])}
    # The last one neither reports nor has ended; the one before may have ended without a word.
    written = {key: told[key] for key in keys[: 4 - gone]}

    def get_all(wanted: list[str], kind: type[EpochReport], *, each: bool) -> dict[str, EpochReport]:
        there = {key: written[key] for key in wanted if key in written}
        return there if each or len(there) == len(wanted) else {}

    board = types.SimpleNamespace(is_far=is_far, get_all=get_all, get=lambda key, kind: None)
    party = types.SimpleNamespace(board=board, grace_s=0.1)
    link: Any = types.SimpleNamespace(
        _party=party,
        _seat=types.SimpleNamespace(current=epoch, holds=True),
        _vanished=frozenset(epoch.ids()[4 : 4 + gone]),
    )
    link._grace_s = partial(MembershipLink._grace_s, link)
    began_s = time.monotonic()
    assert MembershipLink._collect(link, keys) == tuple(written.values())
    assert time.monotonic() - began_s < MINORITY_S


@pytest.mark.parametrize("is_far", [False, True])
@pytest.mark.parametrize(
    ("vanished", "at_once", "later", "found"),
    [
        (4, 3, 1, 4),  # it was cut off from all others, of which one is late
        (3, 2, 1, 3),  # from three of four; the fourth is stopped
        (2, 2, 1, 2),  # from two of four: that they were cut off is as likely
    ],
)
def test_one_that_was_cut_off_leaves_it_to_the_others_who_is_late(
    is_far: bool, vanished: int, at_once: int, later: int, found: int
) -> None:
    epoch = Epoch(4, tuple(Member(new_id()) for _ in range(5)))
    keys = [report_key(4, id) for id in epoch.ids()[1:]]
    told = {key: EpochReport(4, id, 7, True) for key, id in zip(keys, epoch.ids()[1:])}
    # A busy machine may look once more after the time is over.
    later = later if found > at_once else 0
    began_s, seen = time.monotonic(), set[str]()

    def get_all(wanted: list[str], kind: type[EpochReport], *, each: bool) -> dict[str, EpochReport]:
        written = keys[: at_once + (later if time.monotonic() - began_s > 4 * VANISHED_S else 0)]
        there = {key: told[key] for key in wanted if key in written}
        there = there if each or len(there) == len(wanted) else {}
        seen.update(there)
        return there

    def get(key: str, kind: type[Epoch]) -> Epoch | None:
        # The others agree without the one that is stopped, after the one that is late has reported.
        return epoch if later and len(seen) == at_once + later else None

    board = types.SimpleNamespace(is_far=is_far, get_all=get_all, get=get)
    link: Any = types.SimpleNamespace(
        _party=types.SimpleNamespace(board=board, grace_s=2 * VANISHED_S),
        _seat=types.SimpleNamespace(current=epoch, holds=True),
        _vanished=frozenset(epoch.ids()[1 : 1 + vanished]),
    )
    link._grace_s = partial(MembershipLink._grace_s, link)
    assert len(MembershipLink._collect(link, keys)) == found
    assert time.monotonic() - began_s < MINORITY_S


@pytest.mark.parametrize("holds", [False, True])
def test_one_that_lacks_the_state_waits_longer_for_those_who_have_it(holds: bool) -> None:
    epoch = Epoch(4, tuple(Member(new_id()) for _ in range(3)), round=7)
    key, late = (report_key(4, id) for id in epoch.ids()[1:])
    told = {key: EpochReport(4, epoch.ids()[1], 0, False), late: EpochReport(4, epoch.ids()[2], 7, True)}
    began_s = time.monotonic()

    def get_all(wanted: list[str], kind: type[EpochReport], *, each: bool) -> dict[str, EpochReport]:
        # A busy machine may look once more after the time of one that has the state is over.
        written = (key, late) if not holds and time.monotonic() - began_s > 4 * VANISHED_S else (key,)
        there = {key: told[key] for key in wanted if key in written}
        return there if each or len(there) == len(wanted) else {}

    board = types.SimpleNamespace(is_far=False, get_all=get_all, get=lambda key, kind: None)
    link: Any = types.SimpleNamespace(
        _party=types.SimpleNamespace(board=board, grace_s=2 * VANISHED_S),
        _seat=types.SimpleNamespace(current=epoch, holds=holds),
        _vanished=frozenset({epoch.ids()[2]}),
    )
    link._grace_s = partial(MembershipLink._grace_s, link)
    assert len(MembershipLink._collect(link, [key, late])) == (1 if holds else 2)
    assert time.monotonic() - began_s < MINORITY_S
