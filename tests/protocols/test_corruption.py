"""One message of one rank changes on the way: always an error that names sender, bucket and round."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

import gradwire as gw
from cases import ALL
from corruptions import CHANGES, Trials

DRAWS = 3


@pytest.mark.parametrize(("method", "collective"), [(m, c) for m in ALL for c in m.collectives], ids=repr)
def test_a_message_that_changes_is_an_error_that_names_sender_bucket_and_round(
    method: gw.Method, collective: str
) -> None:
    trials = Trials(method, collective)
    if collective == "all_reduce":
        # The backend adds on the way: there is no payload to check, as docs/wire-format.md says.
        assert not any(trials.exchanges)
        return
    assert all(trials.exchanges)
    found: Counter[str] = Counter()
    changed: Counter[str] = Counter()
    for number, (kind, draw) in enumerate(itertools.product(CHANGES, range(DRAWS))):
        outcome = trials.one(kind, 100 * number + draw)
        if outcome is not None:
            found[outcome] += 1
            changed[kind] += 1
    assert found.keys() == {"refused, named"}, found
    # A swap of equal blocks changes nothing, and neither does a length that is not told; along a tree there is one
    # message at a time.
    others = {"swap ranks", "repeat a rank"} if collective != "tree" else set()
    assert {"flip a bit", "flip two bits", *others} <= changed.keys()
    assert ("announce another length" in changed) == trials.lengths_told


def test_what_changes_no_byte_is_no_trial_and_the_round_is_as_it_was() -> None:
    trials = Trials(gw.TernGrad(), "two_shot")
    assert trials.one("announce another length", 0) is None
