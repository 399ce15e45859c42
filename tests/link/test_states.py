"""States are taken whole or refused, before anything of them is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradwire as gw
from remembering import REMEMBERING

SIZE = 640


def learned() -> dict[str, dict[str, torch.Tensor]]:
    """Return a state of two workers whose shifts are not zero."""
    link = gw.SimulatedLink([("w", torch.empty(SIZE))], "diana", 2, min_numel=0)
    for _ in range(3):
        link.reduce_(gradients())
    return link.state_dict()


def gradients() -> torch.Tensor:
    return torch.randn(2, SIZE, generator=torch.Generator().manual_seed(0))


def without(state: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: part for name, part in state.items() if name not in names}


def of_one_rank(state: dict[str, Any]) -> dict[str, Any]:
    return {**without(state, "rank 0", "rank 1"), "rank": state["rank 0"]}


@pytest.mark.parametrize(
    ("broken", "part"),
    [
        (lambda state: {}, "no global round"),
        (lambda state: None, "no global round"),
        (lambda state: {**state, "global": {}}, "no global round"),
        (lambda state: without(state, "replicated"), "'replicated'"),
        (of_one_rank, "this one has 'rank'"),
        (lambda state: without(state, "rank 0"), "this one has 'rank 1'"),
        (lambda state: without(state, "rank 0", "rank 1"), "this one has none"),
        (lambda state: {**state, "rank": state["rank 0"]}, "'rank', 'rank 0', 'rank 1'"),
    ],
)
def test_a_simulation_refuses_what_is_not_a_simulations_whole_state(broken: Any, part: str) -> None:
    state = broken(learned())
    link = gw.SimulatedLink([("w", torch.empty(SIZE))], "diana", 2, min_numel=0)
    with pytest.raises(gw.IncompatibleError, match=part):
        link.load_state_dict(state)
    assert link.round == 0
    assert link.state_dict()["replicated"] == {}
    if state is not None:
        with pytest.raises(gw.IncompatibleError, match=part):
            gw.simulate(gradients(), "diana", state=state)


def changed(scope: str, key: str, value: Any) -> dict[str, Any]:
    state: dict[str, Any] = learned()
    state[scope] = {**state[scope], key: value}
    return state


@pytest.mark.parametrize(
    ("scope", "key", "value", "part"),
    [
        *(
            ("global", "round", value, "the state's 'round' is ")
            for value in (
                "3", -1, 3, 2.5, torch.tensor(-1), torch.tensor(2.5), torch.tensor(3.0), torch.tensor(2**62),
                torch.tensor(2**48), torch.tensor([3]), torch.tensor(3, dtype=torch.int32), torch.tensor(True), None,
            )
        ),
        ("global", "link", torch.tensor(-1), "the state's 'link' is -1"),
        ("global", "link", torch.tensor(1 << 16), "the state's 'link' is 65536"),
        ("global", "workers", 2, "'workers' in 'global' is a int, not a dense tensor"),
        ("rank 0", "shift/w", torch.zeros(SIZE - 1), r"float32 \[639\]: 640 floats are needed"),
        ("rank 0", "shift/w", torch.zeros(SIZE + 1), "640 floats are needed"),
        ("rank 0", "shift/w", torch.zeros(SIZE, dtype=torch.int64), "int64 .*640 floats are needed"),
        ("rank 0", "shift/w", torch.full((SIZE,), torch.nan), "holds a NaN or inf"),
        ("rank 0", "shift/w", [0.0] * SIZE, "is a list, not a dense tensor"),
        ("replicated", "mean_shift/w", torch.full((SIZE,), torch.inf), "holds a NaN or inf"),
        ("replicated", "mean_shift/v", torch.zeros(SIZE), "belongs to no parameter of this link"),
        ("replicated", "mean_shift", torch.zeros(SIZE), "belongs to no parameter of this link"),
        ("rank 1", 5, torch.zeros(SIZE), "is not a dict of tensors by name"),
    ],
    ids=repr,
)  # fmt: skip
def test_every_value_of_a_state_is_checked_before_anything_is_taken(
    scope: str, key: Any, value: Any, part: str
) -> None:
    link = gw.SimulatedLink([("w", torch.empty(SIZE))], "diana", 2, min_numel=0)
    with pytest.raises(gw.IncompatibleError, match=part):
        link.load_state_dict(changed(scope, key, value))
    assert link.round == 0
    assert link.state_dict()["replicated"] == {}


def test_a_state_without_the_number_of_its_link_is_refused() -> None:
    state = learned()
    del state["global"]["link"]
    link = gw.SimulatedLink([("w", torch.empty(SIZE))], "diana", 2, min_numel=0)
    with pytest.raises(gw.IncompatibleError, match="saved by an earlier version"):
        link.load_state_dict(state)


def test_the_largest_round_is_taken() -> None:
    link = gw.SimulatedLink([("w", torch.empty(SIZE))], "diana", 2, min_numel=0)
    link.load_state_dict(changed("global", "round", torch.tensor(2**48 - 1)))
    link.reduce_(gradients())
    assert link.round == 2**48


def trained(method: gw.Method | str) -> gw.SimulatedLink:
    link = gw.SimulatedLink([("w", torch.empty(SIZE // 32, 32))], method, 2, min_numel=0)
    for _ in range(2):
        link.exchange_(gradients())
    return link


def test_no_method_that_remembers_something_is_left_out_here() -> None:
    names = {name for name, info in gw.methods().items() if info.state != "none"}
    assert names == {method.name for method in REMEMBERING}


@pytest.mark.parametrize(
    "name", [name for name, info in gw.methods().items() if name not in ("hierarchical", "lgc", "rank_curve")]
)
def test_what_is_remembered_of_an_element_is_as_declared(name: str) -> None:
    """Four workers, a matrix so large that factors, values and learning rates do not count."""
    method = gw.method(name)
    parameter = torch.nn.Parameter(torch.empty(512, 512))
    options = {"link_cost": gw.LinkCost(1e-4, 1e-9)} if method.traits.needs_link_cost else {}
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    link = gw.SimulatedLink([("w", parameter)], method, 4, min_numel=0, optimizer=optimizer, **options)
    draw = torch.Generator().manual_seed(0)
    for _ in range(2):
        link.exchange_(torch.randn(4, parameter.numel(), generator=draw))
    state = link.state_dict()
    held = sum(v.numel() * v.element_size() for part in ("replicated", "rank 1") for v in state[part].values())
    if method.traits.local_steps and not method.traits.outcomes_differ:
        # Kept beside the exchange, by the part of a link that counts steps.
        held += 4 * parameter.numel() * len(method.remembers_beside)  # type: ignore[attr-defined]
    assert held / parameter.numel() == pytest.approx(method.properties.state_bytes_per_element, abs=0.1)


@pytest.mark.parametrize("method", REMEMBERING, ids=repr)
def test_a_methods_own_state_is_taken_whole(method: gw.Method, caplog: pytest.LogCaptureFixture) -> None:
    assert method.traits.remembers
    state = trained(method).state_dict()
    other = gw.SimulatedLink([("w", torch.empty(SIZE // 32, 32))], method, 2, min_numel=0)
    other.load_state_dict(state)
    after = other.state_dict()
    assert {scope: set(part) for scope, part in after.items()} == {scope: set(part) for scope, part in state.items()}
    assert caplog.messages == []


def test_what_another_method_remembered_is_dropped_and_named(caplog: pytest.LogCaptureFixture) -> None:
    link = gw.SimulatedLink([("w", torch.empty(SIZE))], "errorfeedback", 2, min_numel=0)
    link.load_state_dict(trained("diana").state_dict())
    (sentence,) = caplog.messages
    assert "'mean_shift', 'shift', 'workers'" in sentence
    assert "ErrorFeedback" in sentence
    link.reduce_(gradients())
    state = link.state_dict()
    assert (set(state["global"]), set(state["replicated"])) == ({"round", "link", "memory_order"}, set())
    assert set(state["rank 1"]) == {"residual/w"}
    assert int(state["global"]["round"]) == 3


def load_broken_states() -> list[str]:
    parameter = torch.nn.Parameter(torch.zeros(SIZE))
    link = gw.Link([("w", parameter)], "diana", min_numel=0)
    state, found = learned(), []
    for broken in (state, without(of_one_rank(state), "rank"), without(of_one_rank(state), "replicated"), {}):
        try:
            link.load_state_dict(broken)
        except gw.IncompatibleError as error:
            found.append(str(error))
        assert link.round == 0
    # A state that an earlier version saved does not say whose it is.
    link.load_state_dict({**of_one_rank(state), "rank": without(state["rank 0"], "rank")})
    assert link.round == 3
    if link.rank:
        with pytest.raises(gw.IncompatibleError, match=f"state of rank 0, and this is rank {link.rank}, .* 'shift'"):
            link.load_state_dict(of_one_rank(state))
    else:
        link.load_state_dict(of_one_rank(state))
    link.close()
    return found


@pytest.mark.ranks
def test_a_link_refuses_what_is_not_its_own_whole_state(three_ranks: Any) -> None:
    for found in three_ranks(load_broken_states):
        assert len(found) == 4
        for sentence, part in zip(found, ("has 'rank 0', 'rank 1'", "has none", "'replicated'", "no global round")):
            assert part in sentence


def rewind_over_a_skipped_round() -> tuple[bool, bool]:
    """Rewind a link to before a round that was skipped; give whether it then does what a fresh link does."""

    def go(link: gw.Link, parameter: torch.nn.Parameter, value: float = 0.0) -> torch.Tensor:
        draw = torch.Generator().manual_seed(1000 * link.round + link.rank)
        parameter.grad = torch.randn(SIZE, generator=draw)
        parameter.grad[0] += value
        link.reduce_()
        return parameter.grad.clone()

    def make() -> tuple[gw.Link, torch.nn.Parameter]:
        parameter = torch.nn.Parameter(torch.zeros(SIZE))
        return gw.Link([("w", parameter)], "errorfeedback", min_numel=0), parameter

    used, fresh = make(), make()
    go(*used)
    state = used[0].state_dict()
    go(*used, torch.nan)
    used[0].load_state_dict(state)
    fresh[0].load_state_dict(state)
    means = [torch.equal(go(*used), go(*fresh)) for _ in range(2)]
    residuals = [link.state_dict()["rank"]["residual/w"] for link, _ in (used, fresh)]
    used[0].close()
    fresh[0].close()
    return all(means), torch.equal(*residuals)


@pytest.mark.ranks
def test_a_skipped_round_is_not_skipped_again_after_rewinding(three_ranks: Any) -> None:
    assert three_ranks(rewind_over_a_skipped_round) == [(True, True)] * 3


@pytest.mark.parametrize("method", ["diana", "ef21", "choco_sgd", "power_gossip"])
def test_what_suits_one_rank_is_not_taken_for_anothers(method: str) -> None:
    """As where rank 0 alone saves its state, and all load that: the sums over all ranks would be wrong for ever."""
    link = trained(method)
    state = link.state_dict()
    with pytest.raises(gw.IncompatibleError, match="this is the state of rank 0, and this is rank 1, for which its "):
        link.load_state_dict({**state, "rank 1": state["rank 0"]})
    alone = trained("errorfeedback")
    state = alone.state_dict()
    alone.load_state_dict({**state, "rank 1": state["rank 0"]})


@pytest.mark.parametrize("method", REMEMBERING, ids=repr)
def test_what_is_a_ranks_own_is_as_declared(method: gw.Method) -> None:
    state, traits = trained(method).state_dict(), method.traits
    assert {*traits.own, *traits.of_ranks} <= set(traits.remembers)

    def kinds(scope: str) -> set[str]:
        keys = [key.removeprefix("value/") for key in state[scope]]
        return {key.partition("/")[0].partition("@")[0] for key in keys} & set(traits.remembers)

    assert kinds("rank 0") <= set(traits.own)
    assert not (kinds("replicated") | kinds("global")) & set(traits.own)
