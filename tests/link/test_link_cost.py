"""What a message costs on a link: stated, measured by all ranks together, or from a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.link.selection.link_cost import CostKeeper
from gradwire.methods.sparse.descent_per_byte import MessageCost
from gradwire.model.machine import DEFAULT
from gradwire.model.probing import Probed

SIZE = 3000
MEASURED = gw.CAT(fixed_bytes=None)
AROUND = gw.Rotated(compressor=MEASURED)
COST = gw.LinkCost(message_s=0.001, bytes_per_s=12.5e6)


def gradients(workers: int = 2) -> torch.Tensor:
    """Two degrees of freedom: heavy tails, of which a dearer message sends more."""
    generator = torch.Generator().manual_seed(3)
    normal, pairs = (torch.randn(k, workers, SIZE, generator=generator) for k in (1, 2))
    return normal[0] / (pairs.square().sum(0) / 2).sqrt()


def simulated(method: gw.Method = MEASURED, **options: Any) -> gw.SimulatedLink:
    return gw.SimulatedLink([("w", torch.empty(SIZE))], method, 2, min_numel=0, **options)


def kept(mean: torch.Tensor) -> int:
    return int(mean.count_nonzero())


@pytest.mark.parametrize("scheme", ["topk", "sign", "stochastic"])
@pytest.mark.parametrize("blocks", ["model", "parameter"])
def test_a_stated_cost_is_the_same_number_of_bytes(scheme: str, blocks: str) -> None:
    by_link = gw.CAT(fixed_bytes=None, scheme=scheme, blocks=blocks)
    by_bytes = gw.CAT(fixed_bytes=12500.0, scheme=scheme, blocks=blocks)
    found = [simulated(by_link, link_cost=COST).reduce_(gradients()), simulated(by_bytes).reduce_(gradients())]
    assert torch.equal(*found)
    once = [gw.simulate(gradients(), by_link, link_cost=COST).mean, gw.simulate(gradients(), by_bytes).mean]
    assert torch.equal(*once)
    assert kept(found[0]) > kept(simulated(gw.CAT(fixed_bytes=100.0, scheme=scheme)).reduce_(gradients()))


def test_a_number_of_bytes_holds_whatever_the_link_costs() -> None:
    found = [simulated(gw.CAT(), **told).reduce_(gradients()) for told in ({}, {"link_cost": COST})]
    assert torch.equal(*found)
    assert MessageCost(7.0, 16).on(COST) == MessageCost(7.0, 16)
    assert MessageCost(None, 16).on(COST) == MessageCost(12500.0, 16)


@pytest.mark.parametrize("method", [MEASURED, AROUND])
def test_a_simulation_has_no_link_to_measure(method: gw.Method) -> None:
    assert method.traits.needs_link_cost
    with pytest.raises(gw.IncompatibleError, match=r"link_cost=gw\.LinkCost"):
        simulated(method).reduce_(gradients())


def test_who_needs_to_know() -> None:
    assert not gw.CAT().traits.needs_link_cost
    assert not gw.ErrorFeedback(compressor=gw.TopK()).traits.needs_link_cost
    assert gw.Auto(candidates=("fp32", "CAT(fixed_bytes=None)")).traits.needs_link_cost
    assert gw.method(repr(MEASURED)) == MEASURED


@pytest.mark.parametrize("cost", [12500.0, "measured", (0.1, 1.0)])
def test_an_option_that_is_no_cost_is_refused(cost: Any) -> None:
    with pytest.raises(gw.HyperparameterError, match="link_cost: a LinkCost is needed"):
        simulated(link_cost=cost)


@pytest.mark.parametrize(
    "fields",
    [
        {"message_s": -1.0, "bytes_per_s": 1.0},
        {"message_s": 0.0, "bytes_per_s": 0.0},
        {"message_s": float("inf"), "bytes_per_s": 1.0},
        {"message_s": 0.0, "bytes_per_s": float("nan")},
        {"message_s": True, "bytes_per_s": 1.0},
    ],
)
def test_a_cost_is_of_finite_numbers(fields: dict[str, float]) -> None:
    with pytest.raises(gw.HyperparameterError, match="LinkCost: "):
        gw.LinkCost(**fields)


def test_a_cost_is_what_two_times_tell() -> None:
    """A link of a millisecond a message and ten million bytes of a row a second."""

    def probed(rows_s: float) -> Probed:
        large_s = 0.001 + 2 * DEFAULT.round_s + rows_s
        return Probed(
            world_size=4, ranks_per_host=2, small_bytes=256, small_s=0.001, large_bytes=1_000_000, large_s=large_s
        )

    found = probed(0.1).cost
    # Half of what its own round and bytes leave is the delay of the request, which training does not wait for.
    message_s, bytes_s = 0.001 - (0.001 - DEFAULT.round_s) / 2, 256 / 1e7 / DEFAULT.efficiency
    assert message_s < found.message_s < message_s + bytes_s
    assert found.bytes_per_s == pytest.approx(1e7)
    assert found.fixed_bytes == pytest.approx(found.message_s * 1e7)
    # Bytes that take no time that a clock could tell: a rate all the same, fifty times the rows over all of it.
    assert probed(0.0).cost.bytes_per_s == pytest.approx(50 * 1e6 / (0.001 + 2 * DEFAULT.round_s))


class Counted:
    """Measures, and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def cost(self) -> gw.LinkCost:
        self.calls += 1
        return COST


@pytest.mark.parametrize(
    ("method", "stated", "calls"), [(MEASURED, None, 1), (MEASURED, COST, 0), (gw.CAT(), None, 0), (gw.TopK(), None, 0)]
)
def test_only_what_is_needed_and_not_stated_is_measured(
    method: gw.Method, stated: gw.LinkCost | None, calls: int
) -> None:
    keeper, meter = CostKeeper(method, stated), Counted()
    keeper.measure(meter)
    assert meter.calls == calls
    assert keeper.state().keys() == ({"link_cost"} if calls else set())
    assert keeper.value == (COST if calls or stated else None)


def test_a_checkpoint_goes_before_what_was_measured_and_after_what_is_stated() -> None:
    first = CostKeeper(MEASURED, None)
    first.measure(Counted())
    other = gw.LinkCost(message_s=1.0, bytes_per_s=2.0)
    again, stated, without = CostKeeper(MEASURED, None), CostKeeper(MEASURED, other), CostKeeper(gw.CAT(), None)
    for keeper in (again, stated, without):
        keeper.load(first.state())
    assert (again.value, stated.value, without.value) == (COST, other, None)
    record = again.record()
    assert record == {"message_s": 0.001, "bytes_per_s": 12.5e6, "source": "taken from a checkpoint"}
    assert again.state()["link_cost"].tolist() == [0.001, 12.5e6]


def test_a_simulation_continues_with_the_cost_of_a_checkpoint() -> None:
    link = simulated()
    link.load_state_dict({**link.state_dict(), "global": {**link.state_dict()["global"], "link_cost": as_state()}})
    assert torch.equal(link.reduce_(gradients()), simulated(link_cost=COST).reduce_(gradients()))
    assert link.record()["link_cost"]["source"] == "taken from a checkpoint"


def as_state(message_s: float = COST.message_s, bytes_per_s: float = COST.bytes_per_s) -> torch.Tensor:
    return torch.tensor([message_s, bytes_per_s], dtype=torch.float64)


@pytest.mark.parametrize(
    "value", [as_state().float(), as_state()[:1], as_state(-1.0), as_state(0.0, 0.0), as_state(float("nan"))]
)
def test_a_state_that_holds_no_cost_is_refused(value: torch.Tensor) -> None:
    link = simulated()
    state = link.state_dict()
    with pytest.raises(gw.IncompatibleError, match="'link_cost'"):
        link.load_state_dict({**state, "global": {**state["global"], "link_cost": value}})


def on_ranks() -> tuple[dict[str, Any], torch.Tensor, bool, list[float], float]:
    """Measure the link, exchange, and go on with what a checkpoint holds."""
    import torch.distributed as dist

    rows, rank = gradients(3), dist.get_rank()

    def exchanged(link: gw.Link) -> torch.Tensor:
        parameter.grad = rows[rank].clone()
        link.reduce_()
        return parameter.grad.clone()

    parameter = torch.zeros(SIZE, requires_grad=True)
    first = gw.Link([("w", parameter)], MEASURED, min_numel=0)
    record, mean, state = first.record()["link_cost"], exchanged(first), first.state_dict()
    gauge = first.gauges()["elements"]
    first.close()
    second = gw.Link([("w", parameter)], MEASURED, min_numel=0)
    second.load_state_dict({**state, "global": {**state["global"], "round": torch.tensor(0)}})
    same = torch.equal(exchanged(second), mean)
    second.close()
    return record, mean, same, state["global"]["link_cost"].tolist(), gauge


@pytest.mark.ranks
def test_all_ranks_measure_the_same_and_a_checkpoint_holds_it(three_ranks: Any) -> None:
    found = three_ranks(on_ranks)
    records = [record for record, *_ in found]
    assert records[0] == records[1] == records[2]
    cost = gw.LinkCost(message_s=records[0]["message_s"], bytes_per_s=records[0]["bytes_per_s"])
    assert cost.message_s > 0
    assert records[0]["source"] == "measured when the link was built"
    link = gw.SimulatedLink([("w", torch.empty(SIZE))], MEASURED, 3, min_numel=0, link_cost=cost)
    expected = link.reduce_(gradients(3))
    assert all(torch.equal(mean, expected) for _, mean, *_ in found)
    assert all(same for _, _, same, *_ in found)
    assert all(held == [cost.message_s, cost.bytes_per_s] for *_, held, _ in found)
    assert [{"elements": gauge} for *_, gauge in found] == link.gauges()
