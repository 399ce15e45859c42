"""One message of one rank changes on the way: always an error that names sender, bucket and round."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

import gradwire as gw
from benchmarks.lib.corruptions import CHANGES, Trials, WeightTrials
from benchmarks.trials.settings import settings
from cases import ALL, EVERY

pytestmark = pytest.mark.repository

DRAWS = 3

OTHER_WAYS = {
    "two levels": lambda: Trials(gw.Hierarchical(compressor=gw.TernGrad(), node_size=2), "two_shot", workers=4),
    "shards on two levels": lambda: Trials(gw.Hierarchical(compressor=gw.QSGD(), node_size=2), "all_gather", workers=4),
    "reduce-scatter": lambda: Trials(gw.EDEN(), "reduce_scatter"),
    "reduce-scatter of lengths": lambda: Trials(gw.TopK(), "reduce_scatter"),
    "differences of weights": lambda: WeightTrials(gw.QSGDinf(levels=7, block_size=128)),
    **{repr(m): (lambda m=m: Trials(m, "gossip")) for m in EVERY if m not in ALL},
}


@pytest.mark.parametrize(("method", "collective"), [(m, c) for m in ALL for c in m.traits.collectives], ids=repr)
def test_a_message_that_changes_is_an_error_that_names_sender_bucket_and_round(
    method: gw.Method, collective: str
) -> None:
    trials = Trials(method, collective)
    if collective == "all_reduce":
        # The backend adds on the way: there is no payload to check, as docs/wire-format.md says.
        assert not any(trials.exchanges)
        return
    # A leader's own elements do not travel to itself, and the sums of their values are the backend's.
    broadcast = method.name == "rank_curve"
    assert trials.exchanges.count(0) == (1 if broadcast else 0)
    found: Counter[str] = Counter()
    changed: Counter[str] = Counter()
    for number, (kind, draw) in enumerate(itertools.product(CHANGES, range(DRAWS))):
        outcome = trials.one(kind, 100 * number + draw)
        if outcome is not None:
            found[outcome] += 1
            changed[kind] += 1
    assert found.keys() == {"refused, named"}, found
    # A swap of equal blocks changes nothing, and neither does a length that is not told; along a tree and from a leader
    # there is one message at a time.
    others = {"swap ranks", "repeat a rank"} if collective != "tree" and not broadcast else set()
    assert {"flip a bit", "flip two bits", *others} <= changed.keys()
    assert ("announce another length" in changed) == trials.lengths_told


@pytest.mark.parametrize("way", OTHER_WAYS)
def test_a_changed_message_is_refused_by_its_senders_number_on_every_other_way(way: str) -> None:
    trials = OTHER_WAYS[way]()
    found = Counter(trials.one(kind, 100 * n + draw) for n, kind in enumerate(CHANGES) for draw in range(DRAWS))
    assert found.pop(None, 0) < len(CHANGES) * DRAWS
    assert found.keys() == {"refused, named"}, found


def test_what_changes_no_byte_is_no_trial_and_the_round_is_as_it_was() -> None:
    trials = Trials(gw.TernGrad(), "two_shot")
    assert trials.one("announce another length", 0) is None


def test_the_trial_of_messages_takes_every_method_in_each_of_these_settings() -> None:
    missing = {repr(method) for method in EVERY} - {repr(method) for method in settings()}
    assert missing == set(), "add them to benchmarks/trials/settings.py"
