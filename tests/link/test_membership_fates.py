"""What becomes of each kind of state when a member is lost, leaves or comes: each cell of the page's table."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire.link.membership import passing_link
from gradwire.link.membership.method_rules import ADDED, ANEW, FIRST_LOST, GIVEN, LOST, STAYS, ZEROS, fates, refusal
from gradwire.link.membership.replayed_link import ReplayedLink
from remembering import REMEMBERING

ALL = [method for method in (*REMEMBERING, gw.TernGrad(ahead=True)) if refusal(method) is None]
AT = 3
"""Rounds before the change; all gradients are zero after it."""

METHODS = [method for method in ALL if getattr(method, "full_rounds", 0) < AT]

State = dict[str, torch.Tensor]
CHANGES = {"is lost": "c", "leaves": "c", "joins": "d"}


def train(membership: gw.Membership, method: gw.Method, ended: dict[tuple[str, int], State]) -> None:
    """Train one matrix for a round more than :data:`AT`, and note the state after each round."""
    torch.set_num_threads(1)
    x = nn.Parameter(torch.zeros(16, 64))
    optimizer = torch.optim.SGD([x], lr=0.1)
    link = gw.Link([("x", x)], method, group=membership, optimizer=optimizer, min_numel=0)
    while not membership.left and link.round <= AT:
        before = link.round
        draw = torch.Generator().manual_seed(1000 * ord(membership.name) + before)
        x.grad = torch.randn(16, 64, generator=draw) * (before < AT)
        if not method.traits.local_steps:
            link.reduce_()
        optimizer.step()
        if link.round != before:
            ended[membership.name, link.round] = flat(link)


def flat(link: gw.Link) -> State:
    state = link.state_dict()
    parts = [state[scope] for scope in ("global", "replicated", "rank")]
    return {key.removeprefix("value/"): x.clone() for part in parts for key, x in part.items()}


def of_kind(state: State, kind: str) -> State:
    return {key: x for key, x in state.items() if key.partition("/")[0].partition("@")[0] == kind}


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, b[key]) for key, x in a.items())


def is_zero(state: State) -> bool:
    return all(not x.any() for x in state.values())


@functools.cache
def undisturbed(method: gw.Method) -> dict[tuple[str, int], State]:
    ended: dict[tuple[str, int], State] = {}
    gw.replay(gw.MembershipTrace.scripted("abc"), train, method, ended)
    return ended


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("change", CHANGES)
def test_each_kind_of_state_meets_its_fate(change: str, method: gw.Method, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: dict[tuple[str, int], State] = {}
    begun: dict[str, State] = {}
    old = {name: undisturbed(method)[name, AT] for name in "abc"}
    usual = ReplayedLink.exchange_all

    def exchange_all(link: Any, start: Callable[[], Any]) -> Any:
        def seen() -> Any:
            if link.round == AT:
                begun[link._seat.me.name] = flat(link)
            return start()

        return usual(link, seen)

    monkeypatch.setattr(ReplayedLink, "exchange_all", exchange_all)
    gw.replay(gw.MembershipTrace.scripted("abc", (AT, change, CHANGES[change])), train, method, ended)
    stay = [name for name in "abc" if change == "joins" or name != "c"]
    declared = fates(method)
    assert set(begun) == {*stay, *("d" if change == "joins" else "")}
    assert any(of_kind(old["c"], kind) for kind in declared)
    for kind, fate in declared.items():
        was, now = ({name: of_kind(states[name], kind) for name in states} for states in (old, begun))
        due = {"is lost": fate.lost, "leaves": fate.leaves, "joins": fate.comes}[change]
        if due == ANEW:
            after = {name: of_kind(ended[name, AT + 1], kind) for name in begun}
            if kind == "workers":
                assert [int(x) for state in after.values() for x in state.values()] == len(begun) * [len(begun)]
            elif kind.startswith("rank_curve"):
                # That of the first round after it, which sends what was waiting.
                assert {int(ended[name, AT + 1]["rank_curve_rounds"]) for name in begun} == {1}
            else:
                assert not is_zero(was["a"])
                # What begins anew and is followed by zero gradients stays zero, unless there is a momentum.
                assert "momentum" in declared or all(map(is_zero, after.values()))
            if kind == "mean_shift":
                shifts = [ended[name, AT + 1]["shift/x"] for name in begun]
                torch.testing.assert_close(after["a"]["mean_shift/x"], torch.stack(shifts).mean(0), rtol=0, atol=1e-6)
            continue
        heir = "a" if due == ADDED else None
        for name in stay:
            if name == heir:
                sums = {key: was[name][key] + was["c"][key] for key in was["c"]}
                assert same(now[name], sums), (kind, name)
            else:
                assert same(now[name], was[name]), (kind, name)
        if due == GIVEN:
            assert same(now["d"], was["a"]), kind
        elif due == ZEROS:
            assert is_zero(now["d"]), kind
        else:
            assert due in (STAYS, LOST, ADDED, FIRST_LOST)


def test_every_kind_of_the_table_is_seen_in_some_method() -> None:
    known = {kind for method in ALL for kind in fates(method)}
    every = {kind for name in gw.methods() if refusal(gw.method(name)) is None for kind in fates(gw.method(name))}
    assert every <= known
    assert {fate for method in METHODS for fate in fates(method).values()} >= {
        fate for name in gw.methods() for fate in fates(gw.method(name)).values()
    }


@pytest.mark.parametrize("instance", ["all_reduce", "parameter_server"])
@pytest.mark.parametrize("change", ["is lost", "leaves"])
def test_an_autoencoder_of_which_the_trainer_goes_begins_anew(change: str, instance: str) -> None:
    method = gw.LGC(density=0.1, instance=instance, full_rounds=0, training_rounds=AT + 1)
    ended: dict[tuple[str, int], State] = {}
    gw.replay(gw.MembershipTrace.scripted("abc", (AT, change, "a"), (AT, "joins", "d")), train, method, ended)
    assert int(ended["a", AT]["autoencoder_steps"]) == AT
    assert int(ended["b", AT + 1]["autoencoder_steps"]) == 1
    assert "autoencoder" not in ended["c", AT + 1]
    # It is used after as many rounds of the new trainer.
    assert [int(ended[name, AT + 1]["autoencoder_rounds"]) for name in "bcd"] == [1, 1, 1]


def test_an_autoencoder_that_all_members_have_outlives_its_trainer() -> None:
    method = gw.LGC(density=0.1, full_rounds=0, training_rounds=AT - 1)
    ended: dict[tuple[str, int], State] = {}
    gw.replay(gw.MembershipTrace.scripted("abc", (AT, "is lost", "a")), train, method, ended)
    for name in "bc":
        assert same(of_kind(ended[name, AT], "autoencoder"), of_kind(ended[name, AT + 1], "autoencoder"))
        assert int(ended[name, AT + 1]["autoencoder_told"]) == AT - 1


def test_what_waits_begins_anew_on_all_where_a_part_of_it_was_not_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    method, usual = gw.PowerSGD(values=gw.BF16()), passing_link.receive_state

    def receive_state(*given: Any) -> Any:
        state = usual(*given)
        if "residual/x" in state:
            raise gw.PayloadError("it changed on the way")
        return state

    monkeypatch.setattr(passing_link, "receive_state", receive_state)
    ended: dict[tuple[str, int], State] = {}
    gw.replay(gw.MembershipTrace.scripted("abc", (AT, "leaves", "c")), train, method, ended)
    for name in "ab":
        assert not is_zero(of_kind(ended[name, AT], "residual"))
        # All gradients are zero from then on.
        assert is_zero(of_kind(ended[name, AT + 1], "residual"))


@pytest.mark.parametrize("method", [gw.DIANA(), gw.EF21()], ids=repr)
def test_shifts_begin_anew_where_one_leaves_and_another_comes(method: gw.Method) -> None:
    """The number of members is then the same as before."""
    ended: dict[tuple[str, int], State] = {}
    gw.replay(gw.MembershipTrace.scripted("abc", (AT, "leaves", "b"), (AT, "joins", "d")), train, method, ended)
    assert not is_zero(of_kind(ended["a", AT], "mean_shift"))
    for name in "acd":
        assert is_zero(of_kind(ended[name, AT + 1], "shift"))
        assert is_zero(of_kind(ended[name, AT + 1], "mean_shift"))
