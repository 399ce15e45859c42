"""States name the order of elements in memory: a model with another memory format finds each at its own place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradwire as gw
from alone import group_of_one
from gradwire.exchange.segments import flat_view

State = dict[str, dict[str, torch.Tensor]]
SHAPE = (8, 4, 3, 3)
LAST, NATURAL = torch.channels_last, torch.contiguous_format


def parameter(memory_format: torch.memory_format) -> torch.Tensor:
    return torch.empty(SHAPE).to(memory_format=memory_format)


def simulated(spec: str, memory_format: torch.memory_format) -> gw.SimulatedLink:
    return gw.SimulatedLink([("w", parameter(memory_format)), ("b", torch.empty(8))], spec, 2, min_numel=0)


def exchanged(link: gw.SimulatedLink, memory_format: torch.memory_format, seed: int) -> torch.Tensor:
    """Exchange the same gradients, whatever their format; return the mean of "w" by its shape."""
    random = torch.Generator().manual_seed(seed)
    pairs = [(torch.randn(SHAPE, generator=random), torch.randn(8, generator=random)) for _ in range(2)]
    rows = [torch.cat([flat_view(parameter(memory_format).copy_(w)), b]) for w, b in pairs]
    return by_shape(link.reduce_(torch.stack(rows))[: torch.Size(SHAPE).numel()], memory_format)


def by_shape(vector: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    """Return a vector in memory order as a contiguous tensor."""
    found = parameter(memory_format).to(vector.dtype)
    flat_view(found).copy_(vector)
    return found.contiguous()


@pytest.mark.parametrize(("saved", "loaded"), [(NATURAL, LAST), (LAST, NATURAL), (LAST, LAST)])
def test_residuals_of_another_memory_format_find_their_places(saved: Any, loaded: Any) -> None:
    first, second = (simulated("ErrorFeedback(TopK(density=0.1))", each) for each in (saved, loaded))
    exchanged(first, saved, 0)
    second.load_state_dict(first.state_dict())
    assert torch.equal(exchanged(first, saved, 1), exchanged(second, loaded, 1))


@pytest.mark.parametrize("spec", ["DIANA()", "DIANA(momentum=0.5)", "Signum()", "SketchedAMSGrad()", "EF21()", "DGC()"])
def test_every_vector_with_one_value_an_element_is_put_into_the_order_of_the_model(spec: str) -> None:
    first, second = simulated(spec, NATURAL), simulated(spec, LAST)
    exchanged(first, NATURAL, 0)
    state = first.state_dict()
    second.load_state_dict(state)
    again = second.state_dict()
    assert again["global"]["memory_order/w"].tolist() == [0, 2, 3, 1]
    vectors = [(scope, key) for scope in state for key in state[scope] if key.endswith("/w")]
    assert vectors
    for scope, key in vectors:
        assert torch.equal(by_shape(again[scope][key], LAST), state[scope][key].view(SHAPE)), key
    first.load_state_dict(again)
    back = first.state_dict()
    assert all(torch.equal(back[scope][key], state[scope][key]) for scope in state for key in state[scope])


@pytest.mark.parametrize("spec", ["powersgd", "acp_sgd", "LocalSGD(every=1, inner=PowerSGD())"])
def test_a_factor_of_another_memory_format_is_refused_by_name(spec: str) -> None:
    first, second = simulated(spec, LAST), simulated(spec, NATURAL)
    exchanged(first, LAST, 0)
    state = first.state_dict()
    before = second.state_dict()
    with pytest.raises(gw.IncompatibleError, match="parameter 'w' is contiguous here, and was channels_last when"):
        second.load_state_dict(state)
    assert second.state_dict().keys() == before.keys()
    assert second.round == 0
    same = simulated(spec, LAST)
    same.load_state_dict(state)
    assert torch.equal(exchanged(first, LAST, 1), exchanged(same, LAST, 1))


@pytest.mark.parametrize("spec", ["terngrad", "ErrorFeedback()"])
def test_another_methods_factor_is_dropped_in_whatever_order_it_lies(spec: str) -> None:
    first, second = simulated("powersgd", LAST), simulated(spec, NATURAL)
    exchanged(first, LAST, 0)
    state = first.state_dict()
    second.load_state_dict(state)
    kept = second.state_dict()
    assert kept["replicated"] == {}
    if spec != "terngrad":
        assert torch.equal(kept["rank 1"]["residual/w"].view(SHAPE), by_shape(state["rank 1"]["residual/w"], LAST))


def test_a_state_of_an_earlier_version_is_taken_to_lie_as_the_parameters_do() -> None:
    first, second = simulated("powersgd", LAST), simulated("powersgd", LAST)
    exchanged(first, LAST, 0)
    state = first.state_dict()
    state["global"] = {key: x for key, x in state["global"].items() if not key.startswith("memory_order")}
    second.load_state_dict(state)
    assert torch.equal(exchanged(first, LAST, 1), exchanged(second, LAST, 1))


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("memory_order", torch.tensor(2), "this version of gradwire reads 1"),
        ("memory_order/w", torch.tensor([0, 2, 1]), r"in the order \[0, 2, 1\], and here it has the shape"),
        ("memory_order/w", torch.tensor([0, 0, 1, 2]), r"in the order \[0, 0, 1, 2\], and here it has the shape"),
    ],
)
def test_an_order_that_means_nothing_is_refused(key: str, value: torch.Tensor, part: str) -> None:
    link = simulated("ErrorFeedback()", LAST)
    exchanged(link, LAST, 0)
    state = link.state_dict()
    state["global"][key] = value
    with pytest.raises(gw.IncompatibleError, match=part):
        simulated("ErrorFeedback()", LAST).load_state_dict(state)


def test_dimensions_of_one_element_are_in_any_order() -> None:
    pointwise = torch.empty(8, 4, 1, 1)
    states = []
    for tensor in (pointwise, pointwise.to(memory_format=LAST)):
        link = gw.SimulatedLink([("w", tensor)], "powersgd", 2, min_numel=0)
        link.reduce_(torch.randn(2, 32, generator=torch.Generator().manual_seed(0)))
        states.append(link.state_dict())
        assert "memory_order/w" not in states[-1]["global"]
    link.load_state_dict(states[0])


@pytest.mark.parametrize(
    ("spec", "refused"), [("DiLoCo(every=1)", False), ("StreamingDiLoCo(every=2, fragments=2, delay=0)", True)]
)
def test_global_parameters_of_another_memory_format(spec: str, refused: bool) -> None:
    def made(memory_format: torch.memory_format) -> tuple[gw.SimulatedLocalSteps, list[torch.Tensor]]:
        value = torch.arange(64 * 4 * 9.0).view(64, 4, 3, 3)
        ws = [nn.Parameter(value.clone().to(memory_format=memory_format)) for _ in range(2)]
        return gw.SimulatedLocalSteps([[("w", w)] for w in ws], spec), ws

    def step(steps: gw.SimulatedLocalSteps, ws: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for rank, w in enumerate(ws):
                w.add_(torch.randn(w.shape, generator=torch.Generator().manual_seed(rank)))
        steps.after_step()

    (first, mine), (second, others) = made(NATURAL), made(LAST)
    step(first, mine)
    if refused:
        with pytest.raises(gw.IncompatibleError, match="parameter 'w' is channels_last here, and was contiguous"):
            second.load_state_dict(first.state_dict())
        return
    second.load_state_dict(first.state_dict())
    with torch.no_grad():
        for own, other in zip(mine, others):
            other.copy_(own)
    for steps, ws in ((first, mine), (second, others)):
        step(steps, ws)
    assert torch.equal(mine[0], others[0])


def test_a_link_names_the_order_that_it_was_made_with(tmp_path: Path) -> None:
    state: State = {}
    residual = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    with group_of_one():
        for memory_format in (NATURAL, LAST, NATURAL):
            w = nn.Parameter(torch.zeros(SHAPE).to(memory_format=memory_format))
            link = gw.Link([("w", w)], "ErrorFeedback()", min_numel=0)
            if state:
                gw.load(link, tmp_path)
            else:
                state = link.state_dict()
                state["rank"]["residual/w"] = residual.reshape(-1)
                link.load_state_dict(state)
            gw.save(link, tmp_path)
            state = link.state_dict()
            assert torch.equal(by_shape(state["rank"]["residual/w"], memory_format), residual)
            assert gw.integrations.StatefulLink(link).state_dict()
            link.close()
    assert state["global"]["memory_order"].item() == 1


def turned(spec: str) -> list[str]:
    """Change the memory format of a model whose link has exchanged; return what is said."""
    torch.manual_seed(0)
    module, told = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Conv2d(16, 8, 1)), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    link = gw.Link(module.named_parameters(), spec, min_numel=0, optimizer=optimizer)
    for memory_format in (NATURAL, LAST):
        module[1].to(memory_format=LAST)  # of which nothing lies elsewhere
        module[0].to(memory_format=memory_format)
        try:
            for _ in range(2):
                module(torch.ones(2, 8, 5, 5)).square().mean().backward()
                link.reduce_()
                optimizer.step()
        except gw.GradwireError as error:
            told.append(str(error))
    link.close()
    return told


@pytest.mark.ranks
@pytest.mark.parametrize(
    "spec", ["ErrorFeedback(TopK(density=0.1))", "terngrad", "LocalSGD(every=2)", "DiLoCo(every=2)"]
)
def test_a_format_that_changes_after_the_link_was_made_is_refused_by_name(three_ranks: Any, spec: str) -> None:
    for told in three_ranks(turned, spec):
        (sentence,) = told
        assert "parameter '0.weight' has another memory format than when the link was made" in sentence
