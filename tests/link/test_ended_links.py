"""Links that end while others on the same scaler go on, and a link whose hooks cannot be removed."""

from __future__ import annotations

import gc
import logging
from typing import Any, cast

import pytest
import torch

import gradwire as gw
from gradwire.link.found_optimizers import on_updates
from gradwire.link.link_runtime import close_link
from log_texts import LogTexts
from ranks import Ranks


def opened(scaler: torch.amp.GradScaler) -> gw.Link:
    """Return a link that exchanges after each update of a scaler."""
    return gw.Link([("w", torch.nn.Parameter(torch.zeros(40)))], "LocalSGD(every=1)", grad_scaler=scaler, min_numel=0)


def updated(scaler: torch.amp.GradScaler, *links: gw.Link) -> list[int]:
    """Update a scaler twice, and return the rounds of links."""
    for _ in range(2):
        scaler.update()
    return [link.round for link in links]


def closed_in_turn(first: int) -> tuple[list[list[int]], bool]:
    """Close one of two links on a scaler, and then the other; return their rounds, and whether a hook is left."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    links = [opened(scaler), opened(scaler)]
    rounds = [updated(scaler, *links)]
    for number in (first, 1 - first):
        links[number].close()
        rounds.append(updated(scaler, *links))
    return rounds, "update" in vars(scaler)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.ranks
def test_of_two_links_on_one_scaler_either_may_be_closed_first(three_ranks: Ranks, first: int) -> None:
    after_first = [2, 4] if first == 0 else [4, 2]
    assert three_ranks(closed_in_turn, first) == [([[2, 2], after_first, after_first], False)] * 3


def rebound() -> tuple[list[int], bool]:
    """Replace a link again and again: the one before is collected when the new one is already open."""
    scaler, rounds = torch.amp.GradScaler("cpu", enabled=False), []
    for _ in range(3):
        link = opened(scaler)
        gc.collect()
        rounds += updated(scaler, link)
    link.close()
    return rounds, "update" in vars(scaler)


@pytest.mark.ranks
def test_a_link_that_replaces_another_on_its_scaler_exchanges(three_ranks: Ranks) -> None:
    assert three_ranks(rebound) == [([2, 2, 2], False)] * 3


def dropped(fate: str) -> list[list[str]]:
    """Drop a link that counts an optimizer's steps; return what each of three steps after that says."""
    parameter = torch.nn.Parameter(torch.zeros(40))
    parameter.grad = torch.ones(40)
    scaler = torch.amp.GradScaler("cpu", enabled=False) if fate == "scaler" else None
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    options: dict[str, Any] = {"grad_scaler": scaler, "optimizer": optimizer, "min_numel": 0}
    link: Any = gw.Link([("w", parameter)], "LocalSGD(every=1)", **options)
    if fate == "closed":
        link.close()
    del link
    gc.collect()
    other = gw.Link([("w", parameter)], "LocalSGD(every=1)", **options) if fate == "replaced" else None
    told, found = LogTexts(), []
    logging.getLogger("gradwire").addHandler(told)
    for _ in range(3):
        optimizer.step()
        if scaler:
            scaler.update()
        found.append(told.texts)
        told.texts = []
    logging.getLogger("gradwire").removeHandler(told)
    if other:
        other.close()
    return found


@pytest.mark.parametrize("fate", ["optimizer", "scaler", "closed", "replaced"])
@pytest.mark.ranks
def test_steps_that_a_collected_link_does_not_count_cause_a_warning(three_ranks: Ranks, fate: str) -> None:
    for rank, (first, *later) in enumerate(three_ranks(dropped, fate)):
        assert not any(later)
        if fate in ("closed", "replaced"):
            assert not first
        else:
            (text,) = first
            assert text.startswith(f"rank {rank}: the link that counted the steps of ")
            assert "was not kept" in text


def after_the_end(spec: str) -> list[str]:
    """Use a link with local steps that was closed, in each way that exchanges something; return what was said."""
    parameter, told = torch.nn.Parameter(torch.zeros(40)), list[str]()
    link = gw.Link([("w", parameter)], spec, min_numel=0)
    link.close()

    def mean_of_all() -> None:
        with link.global_parameters():
            parameter.detach()

    parameter.grad = torch.ones(40)
    for use in (link.synchronise, link.after_step, link.reduce_, mean_of_all):
        try:
            use()
            told.append("nothing")
        except gw.ExchangeError as error:
            told.append(str(error))
    return told


@pytest.mark.parametrize("spec", ["DiLoCo(every=2)", "DPSGD()"])
@pytest.mark.ranks
def test_a_link_that_was_closed_exchanges_no_local_steps_and_says_so(three_ranks: Ranks, spec: str) -> None:
    closed = "this link was closed: wrap the module anew and attach again"
    # Each rank has the global parameters; a mean over ranks needs all of them.
    expected = [closed] * 3 + (["nothing"] if spec.startswith("DiLoCo") else [closed])
    assert three_ranks(after_the_end, spec) == [expected] * 3


class Scaler:
    """Notes its updates."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def update(self) -> None:
        self.told.append("update")


def test_an_update_that_somebody_else_has_replaced_stays_replaced() -> None:
    scaler = Scaler()
    told = scaler.told

    def below() -> None:
        told.append("below")

    scaler.update = below  # type: ignore[method-assign]
    end = on_updates(scaler, lambda: told.append("first"))
    counted = scaler.update

    def above() -> None:
        counted()
        told.append("above")

    scaler.update = above  # type: ignore[method-assign]
    end_other = on_updates(scaler, lambda: told.append("second"))
    scaler.update()
    end()
    scaler.update()
    end_other()
    scaler.update()
    assert told == ["below", "first", "above", "second", "below", "above", "second", "below", "above"]
    assert scaler.update is above
    scaler.update = counted  # type: ignore[method-assign]
    on_updates(scaler, lambda: None)()
    assert scaler.update is below


def test_a_link_that_another_ends_in_an_update_is_not_called_in_it() -> None:
    scaler, ends = Scaler(), list[Any]()
    ends.append(on_updates(scaler, lambda: ends.pop(1)() if len(ends) > 1 else None))
    ends.append(on_updates(scaler, lambda: scaler.told.append("second")))
    scaler.update()
    ends.pop()()
    assert scaler.told == ["update"]
    assert "update" not in vars(scaler)


def test_a_hook_that_cannot_be_removed_leaves_no_other_hook_and_no_threads() -> None:
    ended = list[str]()

    def fails() -> None:
        ended.append("first hook")
        raise KeyError("boom")

    class Runtime:
        def close(self) -> None:
            ended.append("threads")

    with pytest.raises(KeyError, match="boom"):
        close_link(cast(Any, Runtime()), [fails, None, lambda: ended.append("second hook")])
    assert ended == ["first hook", "second hook", "threads"]
