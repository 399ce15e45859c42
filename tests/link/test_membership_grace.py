"""How long members wait for the reports of others, which decides who is in the next epoch."""

from __future__ import annotations

import types
from typing import Any

import pytest

from gradwire.link.membership.membership_link import MembershipLink
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
