"""Links that are open at the same time draw independently; each draws the same in every run."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.link import site as open_links
from gradwire.seeds import LinkNumber, link_seed
from log_texts import LogTexts

SIZE, WORKERS = 800, 3


def gradients(round: int) -> torch.Tensor:
    return torch.randn(WORKERS, SIZE, generator=torch.Generator().manual_seed(round))


def attach(method: str = "terngrad") -> tuple[torch.nn.Parameter, gw.Link]:
    parameter = torch.nn.Parameter(torch.zeros(SIZE))
    return parameter, gw.Link([("w", parameter)], method, min_numel=0)


def go(parameter: torch.nn.Parameter, link: gw.Link, rounds: int = 2) -> list[torch.Tensor]:
    """Exchange rounds of gradients that depend on rank and round, and return the means."""
    means = []
    for _ in range(rounds):
        parameter.grad = gradients(int(link.state_dict()["global"]["round"]))[link.rank].clone()
        link.reduce_()
        means.append(parameter.grad.clone())
    return means


def simulated(number: int, rounds: int = 2) -> list[torch.Tensor]:
    link = gw.SimulatedLink([("w", torch.zeros(SIZE))], "terngrad", WORKERS, min_numel=0)
    state = link.state_dict()
    state["global"]["link"] = torch.tensor(number)
    link.load_state_dict(state)
    return [link.reduce_(gradients(r)).clone() for r in range(rounds)]


def open_two_links() -> dict[str, Any]:
    """Open two links of the same names, close both, open one; save the second and go on with it alone."""
    first, second = attach(), attach()
    found: dict[str, Any] = {"numbers": [link.number.value for _, link in (first, second)]}
    found["first"], found["second"] = go(*first), go(*second)
    found["record"] = second[1].record()["link_number"]
    state = second[1].state_dict()
    found["later"] = go(*second)
    first[1].close()
    third = attach()
    found["of a number that is free again"] = (third[1].number.value, go(*third))
    second[1].close()
    third[1].close()
    alone = attach()
    found["alone"] = alone[1].number.value
    alone[1].load_state_dict(state)
    found["loaded"] = (alone[1].number.value, go(*alone))
    alone[1].close()
    return found


@pytest.mark.ranks
def test_two_open_links_of_the_same_names_draw_independently(three_ranks: Any) -> None:
    for found in three_ranks(open_two_links):
        assert found["numbers"] == [0, 1]
        assert found["record"] == 1
        assert not torch.equal(found["first"][0], found["second"][0]), "two links drew the same random numbers"
        for name, number in (("first", 0), ("second", 1)):
            assert all(map(torch.equal, found[name], simulated(number))), f"link {number} differs from its simulation"
        number, means = found["of a number that is free again"]
        assert number == 0
        assert all(map(torch.equal, means, found["first"]))
        assert found["alone"] == 0
        number, means = found["loaded"]
        assert number == 1
        assert all(map(torch.equal, means, found["later"])), "a loaded link does not go on with its own random numbers"


def attach_beside_what_one_rank_still_holds() -> int:
    """Let rank 1 alone still hold a link, as one that the others' collectors have taken already."""
    import torch.distributed as dist

    held = NumberedThing(0)
    if dist.get_rank() == 1:
        open_links.register(held)
    _, link = attach()
    number = link.number.value
    link.close()
    held.close()
    return number


def load_a_number_in_use(early: bool) -> list[str]:
    """Load the state of an open link into another, before its first round or later; return what that says."""
    first, second = attach(), attach()
    told = LogTexts()
    if not early:
        go(*second)
    second[1].load_state_dict(first[1].state_dict())
    logging.getLogger("gradwire").addHandler(told)
    go(*second)
    logging.getLogger("gradwire").removeHandler(told)
    for _, link in (first, second):
        link.close()
    return told.texts


@pytest.mark.ranks
@pytest.mark.parametrize("early", [True, False])
def test_a_number_that_is_loaded_twice_is_told_once(three_ranks: Any, early: bool) -> None:
    (text,), *others = three_ranks(load_a_number_in_use, early)
    assert text.startswith("two open links have the number 0, one of them from a checkpoint")
    assert others == [[], []]


class NumberedThing:
    """A link as far as its number goes."""

    def __init__(self, number: int) -> None:
        self.number = LinkNumber(number)
        self.close = weakref.finalize(self, int)


@pytest.mark.ranks
def test_ranks_agree_on_a_number_though_one_of_them_still_holds_another_link(three_ranks: Any) -> None:
    assert three_ranks(attach_beside_what_one_rank_still_holds) == [1, 1, 1]


def test_the_lowest_number_that_is_free_is_next() -> None:
    assert [open_links.lowest_free(used) for used in ([], [0], [1], [0, 2], [0, 1, 2])] == [0, 1, 0, 1, 3]


def test_a_closed_link_uses_no_number_and_one_of_another_number_shares_none() -> None:
    links = [NumberedThing(7), NumberedThing(8)]
    for link in links:
        open_links.register(link)
    assert {7, 8} <= open_links.numbers_in_use()
    assert open_links.share_a_number(links[0]) is None
    links[1].number.value = 7
    sentence = open_links.share_a_number(links[0])
    assert sentence is not None
    assert "attach links in the order" in sentence
    links[1].close()
    assert open_links.share_a_number(links[0]) is None
    assert 8 not in open_links.numbers_in_use()
    links[0].close()
    assert 7 not in open_links.numbers_in_use()


def test_seeds_of_links_differ_and_the_first_has_the_users() -> None:
    found = {link_seed(seed, number) for seed in range(20) for number in range(20)}
    assert len(found) == 400
    assert [link_seed(seed, 0) for seed in (0, 1, -5)] == [0, 1, -5]
