"""What the thread that watches an epoch breaks off."""

from __future__ import annotations

import threading
import types
from typing import Any

import pytest

from gradwire.link.membership.membership_link import MembershipLink


@pytest.mark.parametrize("begins_meanwhile", [False, True])
def test_a_look_that_took_long_leaves_the_next_epoch_alone(begins_meanwhile: bool) -> None:
    old, new = types.SimpleNamespace(world_size=3), types.SimpleNamespace(world_size=2)
    lost: list[Any] = []
    broken: list[Any] = []

    def learn() -> None:
        """A member ends while the store is slow to answer; the training may have gone on without it since."""
        lost.append(old)
        if begins_meanwhile:
            link._epoch_group = new

    link: Any = types.SimpleNamespace(_epoch_group=old, _lock=threading.Lock(), _learn=learn)
    board = types.SimpleNamespace(try_again=lambda: None, freshen=lambda world_size: None)
    link._party = types.SimpleNamespace(board=board)
    link._has_lost = lambda group: group in lost
    link._is_deserted = lambda group: False
    link._abort = lambda: broken.append(link._epoch_group)
    # The thread that trains is in a round.
    link._lock.acquire()
    MembershipLink._look(link)
    assert broken == ([] if begins_meanwhile else [old])
