"""Learning rates as a method is told them: of every parameter, of the step that follows, the same in every driver."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.exchange.method import Method, Properties
from gradwire.exchange.protocols import Context
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting
from gradwire.exchange.traits import Traits
from gradwire.methods.feedback.optimizers import not_stepped
from gradwire.methods.wrappers.wrapper import WrappedPlan
from ranks import Ranks

SEEN: list[tuple[int, Mapping[str, float] | None]] = []
PARTS: list[list[tuple[str, int, int]]] = []


@dataclass(frozen=True, kw_only=True)
class Told(Method):
    """Sends gradients as they are, and notes what it was told."""

    name: ClassVar[str] = "told"
    properties: ClassVar[Properties] = Properties(summary="", paper="", bit_stable=True, bits_per_element=1.6)

    def declare(self) -> Traits:
        return Traits(collectives=("two_shot",), kernels=("ternary",), unbiased=True, needs_learning_rates=True)

    def plan(self, setting: PlanSetting) -> BucketPlan:
        PARTS.append([(s.parameter.name, s.offset, s.numel) for s in setting.compressed])
        return _Noting(setting.float32_plan(), setting.segments)


class Joined(Told):
    """The same, of all parameters as one vector."""

    def declare(self) -> Traits:
        return replace(super().declare(), joined=True, whole_step=True)


class Untold(Told):
    """The same, without asking."""

    def declare(self) -> Traits:
        return replace(super().declare(), needs_learning_rates=False)


class _Noting(WrappedPlan):
    def before(self, context: Context, flat: torch.Tensor) -> None:
        SEEN.append((context.round, context.learning_rates))


def parameters() -> dict[str, nn.Parameter]:
    return {"a": nn.Parameter(torch.zeros(30)), "b": nn.Parameter(torch.zeros(7)), "c": nn.Parameter(torch.zeros(50))}


def grouped(named: Mapping[str, nn.Parameter]) -> torch.optim.SGD:
    groups = [{"params": [named["c"], named["a"]]}, {"params": [named["b"]], "lr": 0.5}]
    return torch.optim.SGD(groups, lr=0.1)


def go(link: Any, optimizer: torch.optim.SGD, exchange: Any) -> list[Any]:
    """Exchange three rounds, with a schedule that acts after a step; return what was told, once a round."""
    SEEN.clear()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(3):
        exchange()
        optimizer.step()
        scheduler.step()
    told = dict[int, Mapping[str, float] | None]()
    for round, rates in SEEN:
        # Of each bucket, and in the simulation of each worker.
        assert told.setdefault(round, rates) == rates
    return [told[round] for round in sorted(told)]


EXPECTED = [{"a": 0.1 * f, "b": 0.5 * f, "c": 0.1 * f} for f in (1.0, 0.5, 0.25)]


@pytest.mark.parametrize("method", [Told(), Joined()], ids=repr)
def test_a_simulation_tells_the_rates_that_the_groups_hold(method: gw.Method) -> None:
    named = parameters()
    optimizer = grouped(named)
    link = gw.SimulatedLink(named.items(), method, 2, optimizer=optimizer, min_numel=0)
    assert go(link, optimizer, lambda: link.reduce_(torch.ones(2, 87))) == EXPECTED


def test_who_does_not_ask_and_who_has_no_optimizer_is_told_nothing() -> None:
    named = parameters()
    optimizer = grouped(named)
    for method, given in ((Untold(), optimizer), (Told(), None)):
        link = gw.SimulatedLink(named.items(), method, 2, optimizer=given, min_numel=0)
        assert go(link, optimizer, lambda link=link: link.reduce_(torch.ones(2, 87))) == [None] * 3  # type: ignore[misc]
    SEEN.clear()
    gw.simulate(torch.ones(2, 5), Told())
    assert SEEN == [(0, None)] * 2


def test_who_needs_to_know() -> None:
    assert Told().traits.needs_learning_rates
    assert not gw.Coded(compressor=gw.TernGrad()).traits.needs_learning_rates
    assert not gw.Auto().traits.needs_learning_rates


@pytest.mark.parametrize("rate", [-0.1, math.inf, math.nan])
def test_a_rate_that_no_step_could_have_is_refused(rate: float) -> None:
    named = parameters()
    optimizer = grouped(named)
    link = gw.SimulatedLink(named.items(), Told(), 2, optimizer=optimizer, min_numel=0)
    optimizer.param_groups[1]["lr"] = rate
    with pytest.raises(gw.IncompatibleError, match="learning rate of parameter 'b' is"):
        link.reduce_(torch.ones(2, 87))


class Relative(torch.optim.Optimizer):
    """Computes the lengths of its steps itself and has no learning rate, as an Adafactor with relative steps."""

    def __init__(self, given: Any) -> None:
        super().__init__(given, {"lr": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=0.01)


def test_a_method_that_needs_a_rate_refuses_a_parameter_without_one() -> None:
    named = parameters()
    optimizer = Relative([named["c"], named["a"], named["b"]])
    link = gw.SimulatedLink(named.items(), Told(), 2, optimizer=optimizer, min_numel=0)
    with pytest.raises(gw.IncompatibleError, match=r"parameter 'c' has no learning rate.* in Relative has lr=None"):
        link.reduce_(torch.ones(2, 87))


def test_parameters_of_others_need_no_rate() -> None:
    named = parameters()
    optimizer = grouped(named)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))], "lr": 0.0})
    optimizer.param_groups[-1]["lr"] = None
    link = gw.SimulatedLink(named.items(), Told(), 2, optimizer=optimizer, min_numel=0)
    SEEN.clear()
    link.reduce_(torch.ones(2, 87))
    assert [rates for _, rates in SEEN] == [EXPECTED[0]] * 2


def directed(spec: str, is_given: bool) -> float:
    """Train two steps by a direction, and an optimizer that has no rate."""
    w = nn.Parameter(torch.full((40,), 0.5))
    optimizer = Relative([w])
    link = gw.Link([("w", w)], spec, optimizer=optimizer if is_given else None, min_numel=0)
    for _ in range(2):
        w.grad = torch.ones(40)
        link.reduce_()
        optimizer.step()
    link.close()
    return float(w.detach().max())


@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.ranks
def test_a_direction_needs_no_rate(three_ranks: Ranks, is_given: bool) -> None:
    for spec in ("signsgd", "signum"):
        for found in three_ranks(directed, spec, is_given):
            assert found == pytest.approx(0.48)


def test_joined_parameters_are_known_one_by_one() -> None:
    named = parameters()
    PARTS.clear()
    gw.SimulatedLink(named.items(), Joined(), 2, min_numel=10).reduce_(torch.ones(2, 87))
    gw.SimulatedLink(named.items(), Told(), 2, min_numel=10).reduce_(torch.ones(2, 87))
    assert PARTS[0] == PARTS[1] == [("a", 0, 30), ("c", 30, 50)]
    assert PARTS[-1] == [("a", 0, 30), ("c", 37, 50)]


def test_what_an_optimizer_leaves_out_is_named() -> None:
    named = parameters()
    assert not_stepped(grouped(named), named) == []
    assert not_stepped(torch.optim.SGD([named["b"]], lr=0.1), named) == ["a", "c"]


class Three(nn.Module):
    """The same three parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = parameters().values()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.a.sum() + self.b.sum() + self.c.sum())


def told_on_ranks(joined: bool) -> tuple[list[Any], list[Any]]:
    """Exchange through DDP's hook and through a link in a plain loop."""
    kind = Joined if joined else Told
    module = Three()
    ddp, optimizer = DistributedDataParallel(module, bucket_cap_mb=0.0002), grouped(dict(module.named_parameters()))
    link = gw.attach(ddp, kind(), optimizer=optimizer, min_numel=0)
    hooked = go(link, optimizer, lambda: ddp(torch.ones(1)).sum().backward())
    link.close()
    named = parameters()
    optimizer = grouped(named)
    link = gw.Link(named.items(), kind(), optimizer=optimizer, min_numel=0)
    looped = go(link, optimizer, link.reduce_)
    link.close()
    return hooked, looped


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.ranks
def test_links_tell_the_same(three_ranks: Ranks, joined: bool) -> None:
    assert three_ranks(told_on_ranks, joined) == [(EXPECTED, EXPECTED)] * 3


def attach_with_other_rates() -> str:
    named = parameters()
    optimizer = torch.optim.SGD(named.values(), lr=0.1 * (1 + torch.distributed.get_rank()))
    gw.Link(named.items(), Untold(), optimizer=optimizer, min_numel=0).close()
    try:
        gw.Link(named.items(), Told(), optimizer=optimizer, min_numel=0)
    except gw.RankMismatchError as error:
        return str(error)
    return "attached"


@pytest.mark.ranks
def test_ranks_with_other_rates_are_refused(three_ranks: Ranks) -> None:
    for sentence in three_ranks(attach_with_other_rates):
        assert "learning rates" in sentence
