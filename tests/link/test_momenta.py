"""A method that brings its own momentum finds the optimizer beside it by itself, and refuses another momentum."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.link.found_optimizers import BEFORE_STEPS
from gradwire.methods.feedback.optimizers import momentum_of
from ranks import Ranks, fresh_ranks, wait_until_watched

pytestmark = pytest.mark.ranks

DGC = "DGC(density=0.1)"


def adam(module: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(module.parameters(), lr=0.01)]


def fused(module: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5, fused=True)]


def plain(module: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(module.parameters(), lr=0.1)]


def second(module: nn.Module) -> list[torch.optim.Optimizer]:
    """The second of two optimizers has a momentum."""
    body, head = module.parameters(), nn.ParameterList()
    weight, *rest = body
    head.append(weight)
    return [torch.optim.SGD(rest, lr=0.1), torch.optim.SGD(head, lr=0.1, momentum=0.9)]


def of_rank_1(module: nn.Module) -> list[torch.optim.Optimizer]:
    momentum = 0.9 if dist.get_rank() == 1 else 0.0
    return [torch.optim.SGD(module.parameters(), lr=0.1, momentum=momentum)]


def elsewhere(module: nn.Module) -> list[torch.optim.Optimizer]:
    """A momentum of parameters that no link exchanges: in a group of its own, and in an optimizer of its own."""
    others = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    for p in others:
        p.grad = torch.ones(3)
    groups = [{"params": list(module.parameters())}, {"params": others[:1], "momentum": 0.9}]
    return [torch.optim.SGD(others[1:], lr=0.1, momentum=0.9), torch.optim.SGD(groups, lr=0.1)]


def trained(spec: str, made: str, kind: str, handed: bool = False) -> Any:
    """Train three steps, and return what was raised, and what is left of it; no optimizer is given but ``handed``."""
    before = len(BEFORE_STEPS)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))
    if kind == "fsdp":
        fully_shard(model)
    optimizers: list[torch.optim.Optimizer] = globals()[made](model)
    start = [p.detach().clone() for p in model.parameters()]
    given = {"optimizer": optimizers[0]} if handed else {}
    if kind != "link":
        module: Any = DistributedDataParallel(model) if kind == "ddp" else model
        link = gw.attach(module, spec, min_numel=0, **given)
    else:
        module, link = model, gw.Link(model.named_parameters(), spec, min_numel=0, **given)
    wait_until_watched()
    told, steps = "", 0
    try:
        for step in range(3):
            module(torch.randn(4, 20)).square().mean().backward()
            if kind == "link":
                link.reduce_()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            steps = step + 1
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    moved = any(not torch.equal(a, b) for a, b in zip(start, model.parameters()))
    during = len(BEFORE_STEPS) - before
    answer = {"told": told, "link": str(link.error), "steps": steps, "moved": moved, "hooks": during}
    kept = weakref.ref(link)
    link.close()
    del link, module, given
    gc.collect()
    return {**answer, "left": len(BEFORE_STEPS) - before, "kept": kept() is not None}


@pytest.mark.parametrize("kind", ["ddp", "link"])
@pytest.mark.parametrize(
    ("spec", "made", "setting"),
    [
        (DGC, "fused", "SGD has momentum=0.5"),
        ("signum", "adam", r"Adam has betas=(0.9, 0.999)"),
        ("ErrorFeedback(momentum=0.9)", "fused", "SGD has momentum=0.5"),
        ("GTopK(density=0.1, momentum=0.5)", "adam", "Adam has betas"),
        ("DIANA(momentum=0.5)", "fused", "SGD has momentum=0.5"),
        ("EF21(momentum=0.5)", "fused", "SGD has momentum=0.5"),
        ("sketched_amsgrad", "adam", "Adam would change it"),
    ],
)
def test_a_momentum_beside_the_methods_own_is_refused_at_the_first_step(
    three_ranks: Ranks, spec: str, made: str, setting: str, kind: str
) -> None:
    """No parameter has changed, whichever rank comes first, and every rank is told."""
    for found in three_ranks(trained, spec, made, kind):
        assert found["told"]
        assert setting in found["link"]
        assert (found["steps"], found["moved"]) == (0, False)
        assert (found["left"], found["kept"]) == (0, False)


def test_shards_of_a_module_are_the_optimizers_parameters(three_ranks: Ranks) -> None:
    for found in three_ranks(trained, "ErrorFeedback(momentum=0.9)", "fused", "fsdp"):
        assert "SGD has momentum=0.5" in found["link"]
        assert (found["steps"], found["moved"]) == (0, False)


def test_where_one_rank_alone_has_the_momentum_all_end_and_name_it() -> None:
    """In processes of their own: of others it is known what failed in them before."""
    with fresh_ranks(3) as ranks:
        found = ranks(trained, DGC, "of_rank_1", "link")
    for rank, one in enumerate(found):
        assert "rank 1" in one["link"]
        assert "brings its own momentum, and SGD has momentum=0.9" in one["link"]
        assert one["told"], "no rank trains on"
        assert one["steps"] <= (rank != 1)
        assert one["moved"] == (one["steps"] > 0)


def leaving() -> str:
    found = trained(DGC, "of_rank_1", "ddp")
    if dist.get_rank() == 1:
        os._exit(3)
    return str(found["told"])


def test_under_ddp_the_others_end_too_when_the_refused_rank_has_left() -> None:
    """What breaks there may be DDP's own collective, which does not ask the link."""
    with fresh_ranks(2) as ranks:
        ranks.start(leaving)
        (kind, told), (gone, code) = ranks.collect()
    assert (kind, gone, code) == ("ok", "gone", 3)
    assert told


def test_every_optimizer_that_steps_a_parameter_is_looked_at_once(three_ranks: Ranks) -> None:
    for handed in (False, True):
        for found in three_ranks(trained, DGC, "second", "ddp", handed):
            assert "SGD has momentum=0.9" in found["link"]
            assert found["steps"] == 0


@pytest.mark.parametrize(
    ("spec", "made", "hooks"), [(DGC, "plain", 1), (DGC, "elsewhere", 1), ("terngrad", "fused", 0)]
)
def test_what_needs_no_refusal_trains_and_leaves_no_hook(three_ranks: Ranks, spec: str, made: str, hooks: int) -> None:
    """Without a momentum of the method's own, the hook is gone once all parameters have been seen."""
    for found in three_ranks(trained, spec, made, "ddp"):
        assert found["told"] == ""
        assert (found["link"], found["steps"], found["moved"]) == ("None", 3, True)
        assert (found["hooks"], found["left"], found["kept"]) == (hooks, 0, False)


def later(spec: str, stage: str, handed: bool) -> tuple[str, int, bool]:
    """Train two steps without a momentum and more with one; return the error, its step, and whether it moved."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"optimizer": optimizer} if handed else {}
    link = gw.Link(model.named_parameters(), spec, min_numel=0, **given)
    for step in range(4):
        if step == 2 and stage == "another optimizer":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if step == 2 and stage == "a schedule":
            optimizer.param_groups[0]["momentum"] = 0.85
        model(torch.randn(4, 20)).square().mean().backward()
        start = [p.detach().clone() for p in model.parameters()]
        try:
            link.reduce_()
            optimizer.step()
        except gw.GradwireError as error:
            link.close()
            return str(error), step, any(not torch.equal(a, b) for a, b in zip(start, model.parameters()))
        optimizer.zero_grad()
    link.close()
    return "trained", 4, True


@pytest.mark.parametrize("handed", [False, True])
@pytest.mark.parametrize(("stage", "momentum"), [("another optimizer", 0.9), ("a schedule", 0.85)])
def test_a_momentum_of_a_later_stage_is_refused(three_ranks: Ranks, stage: str, momentum: float, handed: bool) -> None:
    """As OneCycleLR sets one; no optimizer has moved a parameter by both momenta."""
    for told, step, moved in three_ranks(later, DGC, stage, handed):
        assert f"brings its own momentum, and SGD has momentum={momentum} beside it" in told
        assert (step, moved) == (2, False)
    assert three_ranks(later, "terngrad", stage, handed) == [("trained", 4, True)] * 3


def taken_over(spec: str, handed: bool) -> tuple[str, int]:
    """Train by one SGD, then by another; return the error and its step."""
    model = nn.Linear(20, 5)
    optimizers = [torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.1, 0.01)]
    given = {"optimizer": optimizers[0]} if handed else {}
    link = gw.Link(model.named_parameters(), spec, min_numel=0, **given)
    for step in range(4):
        model(torch.ones(4, 20)).square().mean().backward()
        try:
            link.reduce_()
            optimizers[step // 2].step()
            model.zero_grad()
        except gw.GradwireError as error:
            link.close()
            return str(error), step
    link.close()
    return "trained", 4


@pytest.mark.parametrize("spec", ["DIANA(prox=L1(strength=0.1))", "sketched_amsgrad"])
def test_a_method_that_follows_an_optimizer_refuses_another_one(three_ranks: Ranks, spec: str) -> None:
    """Its steps had no operator after them, or the learning rates of the one that was given."""
    for told, step in three_ranks(taken_over, spec, True):
        assert "follows the SGD that was given, and another SGD steps parameter 'weight'" in told
        assert step == 2
    if not gw.method(spec).traits.needs_optimizer:
        assert three_ranks(taken_over, spec, False) == [("trained", 4)] * 3


def test_a_momentum_is_that_of_groups_that_hold_a_parameter() -> None:
    w, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))
    groups = [{"params": [w], "momentum": 0.0}, {"params": [b], "momentum": 0.9}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    assert momentum_of(optimizer, {"w": w}) is None
    assert momentum_of(optimizer, {"w": w, "b": b}) == ("momentum", 0.9)
    assert momentum_of(optimizer, {}) == ("momentum", 0.9), "of parameters that are not known yet, all count"
    assert momentum_of(torch.optim.Adam([w], betas=(0.0, 0.9)), {"w": w}) is None
    assert momentum_of(torch.optim.Adam([w], betas=(0.8, 0.9)), {"w": w}) == ("betas", (0.8, 0.9))
    assert momentum_of(torch.optim.Adagrad([w]), {"w": w}) is None
