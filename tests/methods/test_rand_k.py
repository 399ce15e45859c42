"""RandK, by number of the property in the papers' summary (docs/properties.md)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import gradwire as gw
from contributions import contributed
from gradwire.errors import HyperparameterError
from gradwire.exchange.planning import Options, Planner
from gradwire.exchange.protocols import Memory
from gradwire.methods.sparse.random_places import RandomElements
from ranks import Ranks


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def linked(numel: int, method: gw.Method, workers: int) -> gw.SimulatedLink:
    return gw.SimulatedLink([("w", torch.empty(numel))], method, workers, min_numel=0)


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize(("numel", "count"), [(1, 1), (7, 7), (500, 20), (5000, 4999)])
def test_elements_are_drawn_without_repetition_anew_each_round(contiguous: bool, numel: int, count: int) -> None:
    elements = RandomElements([3, numel], [(1, 2), (3, 4)], [1, count], contiguous)
    alone = RandomElements([numel], [(3, 4)], [count], contiguous)
    draws = [elements.draw(round, 5)[1:].tolist() for round in range(4)]
    for round, draw in enumerate(draws):
        assert len(set(draw)) == count
        assert 0 <= min(draw) <= max(draw) < numel
        assert draw == alone.draw(round, 5).tolist()
        if contiguous:
            assert all((b - a) % numel == 1 for a, b in itertools.pairwise(draw))
    if 1 < count < numel:
        assert len({tuple(draw) for draw in draws}) == 4
        assert alone.draw(0, 5).tolist() != alone.draw(0, 6).tolist()


@pytest.mark.parametrize("contiguous", [False, True])
def test_each_element_is_kept_with_the_same_probability(contiguous: bool) -> None:
    """k/d, whatever the element: 1000 draws of 10 of 50, with a deviation of 0.0126."""
    elements = RandomElements([50], [(7, 8)], [10], contiguous)
    counts = torch.zeros(50)
    for round in range(1000):
        counts[torch.from_numpy(elements.draw(round, 0))] += 1
    assert float((counts / 1000 - 0.2).abs().max()) < 4.5 * 0.0126


@pytest.mark.parametrize("coordinates", ["shared", "private"])
@pytest.mark.parametrize("contiguous", [False, True])
def test_what_is_left_out_is_one_minus_k_over_d_on_average(coordinates: str, contiguous: bool) -> None:
    """1: of one worker's vector, over 400 rounds; a round has a deviation of 0.05 or less."""
    x = gaussian(1, 300, seed=1)
    link = linked(300, gw.RandK(density=0.1, coordinates=coordinates, contiguous=contiguous), 1)
    lost = [float((link.reduce_(x.clone()) - x).square().sum() / x.square().sum()) for _ in range(400)]
    assert sum(lost) / 400 == pytest.approx(0.9, abs=4.5 * 0.05 / 20)


@pytest.mark.parametrize("workers", [1, 3, 4])
@pytest.mark.parametrize("contiguous", [False, True])
def test_shared_elements_are_the_mean_restricted_to_them(workers: int, contiguous: bool) -> None:
    """7."""
    g = gaussian(workers, 2000, seed=2)
    found = gw.simulate(g, gw.RandK(density=0.05, contiguous=contiguous)).mean
    kept = found != 0
    assert int(kept.sum()) == 100
    assert torch.allclose(found[kept], g.mean(0)[kept], atol=1e-6)


def test_private_elements_are_each_workers_own() -> None:
    g = gaussian(4, 2000, seed=3)
    method = gw.RandK(density=0.05, coordinates="private")
    found = gw.simulate(g, method).mean
    # 400 draws of 2000, of which some meet.
    assert 330 < int(found.count_nonzero()) < 400
    wanted = torch.zeros(2000)
    fed_back = gw.simulate(g, gw.ErrorFeedback(compressor=method))
    for rank in range(4):
        wanted += (g[rank] - fed_back.state[f"rank {rank}"]["residual/0"]) / 4
    assert torch.allclose(found, wanted, atol=1e-6)
    assert torch.equal(found, fed_back.mean)


@pytest.mark.parametrize("coordinates", ["shared", "private"])
@pytest.mark.parametrize("values", [gw.FP32(), gw.BF16(), gw.QSGDinf(block_size=16)], ids=repr)
def test_nothing_is_lost_under_error_feedback(coordinates: str, values: gw.Method) -> None:
    """2."""
    g = gaussian(3, 1000, seed=4)
    method = gw.ErrorFeedback(compressor=gw.RandK(density=0.1, coordinates=coordinates, values=values))
    link, before = linked(1000, method, 3), torch.zeros(3, 1000)
    for _ in range(3):
        mean = link.reduce_(g.clone())
        state = link.state_dict()
        after = torch.stack([state[f"rank {rank}"]["residual/w"] for rank in range(3)])
        # The backend's sum in sixteen bits is not the sum of what ranks sent: eight bits of numbers of a few units.
        exact = not (coordinates == "shared" and isinstance(values, gw.BF16))
        assert torch.allclose(mean, (before + g - after).mean(0), atol=1e-5 if exact else 0.05)
        before = after


CASTS = [pytest.param(gw.BF16(), 2.0**-8, id="bf16"), pytest.param(gw.FP16(), 2.0**-10, id="fp16")]
"""Casts, with the largest relative difference between two steps of their numbers."""

BESIDE = {"w": 1000, "b": 10}
"""A parameter that is compressed, and one that is sent in float32 in the same bucket."""


def rounds(method: gw.Method, scale: float) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[Memory]]]:
    """Yield the gradients of two workers, what each sent, the mean, and their states, after each of six rounds."""
    like = {name: torch.empty(numel) for name, numel in BESIDE.items()}
    planner, memories = Planner(method, like, 2, Options(min_numel=100)), [Memory(), Memory()]
    for round in range(6):
        g = gaussian(2, 1010, seed=round)
        rows = scale * g
        sent = contributed(planner.plan(list(like), round), rows, memories, round, loss_scale=scale)
        assert torch.equal(rows[0], rows[1])
        yield g, sent / scale, rows[0] / scale, memories


def held(memories: list[Memory], kind: str) -> torch.Tensor:
    return torch.stack([memory.state()["rank"][f"{kind}/w"].float() for memory in memories])


@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize(("values", "step"), CASTS)
def test_what_was_sent_and_the_residual_are_all_gradients_beside_float32(
    values: gw.Method, step: float, scale: float
) -> None:
    """2, in each element on each worker: a cast sends the float32 part of a bucket apart from the rest."""
    method = gw.ErrorFeedback(compressor=gw.RandK(density=0.1, values=values))
    added, told = torch.zeros(2, 1010), torch.zeros(2, 1010)
    for g, sent, mean, memories in rounds(method, scale):
        added, told = added + g, told + sent
        residual = held(memories, "residual")
        # Sums of few numbers below 16 in float32.
        torch.testing.assert_close(told[:, :1000] + residual, added[:, :1000], rtol=0, atol=1e-5)
        torch.testing.assert_close(told[:, 1000:], added[:, 1000:], rtol=0, atol=1e-5)
        assert int(sent[0, :1000].count_nonzero()) == 100
        # The backend rounds the sum of two workers.
        torch.testing.assert_close(mean, sent.mean(0), rtol=step, atol=1e-6)
    assert "residual/b" not in memories[0].state()["rank"]


def test_estimates_refuse_values_whose_sum_loses_what_no_rank_knows() -> None:
    for values in (gw.BF16(), gw.FP16()):
        with pytest.raises(HyperparameterError, match="drifts by what that loses: use values=FP32"):
            gw.EF21(compressor=gw.RandK(density=0.1, values=values))
    # Private elements are gathered, and each rank adds them up in float32.
    gw.EF21(compressor=gw.RandK(density=0.1, values=gw.BF16(), coordinates="private"))


def kept_by_hand(cast: torch.dtype, rank: int, count: int) -> torch.Tensor:
    """Return a rank's residual of the compressed parameter after so many rounds."""
    link, kept = linked(1000, gw.RandK(density=0.1), 1), torch.zeros(1000)
    for round in range(count):
        drawn, g = link.reduce_(torch.ones(1, 1000)) != 0, gaussian(3, 1010, seed=round)[rank, :1000]
        kept = g + kept
        kept = kept - torch.where(drawn, kept.to(cast).float(), 0.0)
    return kept


def on_lanes(spec: str, lanes: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    rank = torch.distributed.get_rank()
    parameters = {name: torch.zeros(numel, requires_grad=True) for name, numel in BESIDE.items()}
    link = gw.Link(parameters.items(), spec, min_numel=100, lanes=lanes, check=True)
    for round in range(4):
        for parameter, part in zip(parameters.values(), gaussian(3, 1010, seed=round)[rank].split([*BESIDE.values()])):
            parameter.grad = part.clone()
        link.reduce_()
    mean = torch.cat([parameter.grad for parameter in parameters.values() if parameter.grad is not None])
    state = link.state_dict()["rank"]
    link.close()
    return mean, state


@pytest.mark.ranks
@pytest.mark.parametrize("values", [gw.BF16(), gw.FP16()], ids=repr)
def test_in_any_lanes_a_round_is_kept_once_beside_float32(three_ranks: Ranks, values: Any) -> None:
    spec = f"ErrorFeedback(RandK(density=0.1, values={values!r}))"
    link = gw.SimulatedLink([(name, torch.empty(n)) for name, n in BESIDE.items()], spec, 3, min_numel=100)
    for round in range(4):
        mean = link.reduce_(gaussian(3, 1010, seed=round))
    expected: Any = link.state_dict()
    for lanes in (1, 2, 3):
        for rank, (found, state) in enumerate(three_ranks(on_lanes, spec, lanes)):
            # What a rank keeps depends on its own values. Of the mean, three numbers add up in another order.
            assert set(state) == set(expected[f"rank {rank}"])
            assert all(torch.equal(state[key], value) for key, value in expected[f"rank {rank}"].items())
            torch.testing.assert_close(found, mean, rtol=2**-6, atol=2**-6)
            by_hand = kept_by_hand(values.dtype, rank, 4)
            # A number below 8 may be rounded to the next of bfloat16.
            torch.testing.assert_close(state["residual/w"].float(), by_hand, rtol=0, atol=2**-5)


def test_rescaled_elements_diverge_under_error_feedback_and_are_refused() -> None:
    """6: |x|^2 / 2 in 100 dimensions, ten of them a round: with d/k = 10 the residual grows, without it is solved."""
    with pytest.raises(HyperparameterError, match="diverges"):
        gw.ErrorFeedback(compressor=gw.RandK(rescale=True))

    def distance(factor: float) -> float:
        elements, x, residual = RandomElements([100], [(1, 1)], [10], False), torch.ones(100), torch.zeros(100)
        for round in range(600):
            p, kept = residual + 0.02 * x, torch.from_numpy(elements.draw(round, 0))
            sent = torch.zeros(100).index_copy_(0, kept, factor * p[kept])
            x, residual = x - sent, p - sent
        return float(x.norm())

    assert distance(1.0) < 0.1
    assert not distance(10.0) < 1e10


@pytest.mark.parametrize("coordinates", ["shared", "private"])
@pytest.mark.parametrize("values", [gw.FP32(), gw.QSGDinf(levels=1, block_size=16)], ids=repr)
def test_the_declared_variance_is_that_of_rescaled_elements(coordinates: str, values: gw.Method) -> None:
    method = gw.RandK(density=0.25, coordinates=coordinates, rescale=True, values=values)
    x, noise = gaussian(1, 200, seed=5), 0.0
    link = linked(200, method, 1)
    for _ in range(300):
        noise += float((link.reduce_(x.clone()) - x).square().sum() / x.square().sum()) / 300
    bound = method.omega_of(200)
    assert bound is not None
    # Float32 values: exactly 3, a round has a deviation of 0.6. Levels: up to the worst vector's.
    if isinstance(values, gw.FP32):
        assert noise == pytest.approx(bound, abs=4.5 * 0.6 / 300**0.5)
    assert 3 - 0.16 < noise < bound + 0.16


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
@pytest.mark.parametrize("coordinates", ["shared", "private"])
def test_what_is_not_sent_is_seen(coordinates: str, bad: float) -> None:
    g = gaussian(3, 500, seed=6)
    g[1, 321] = bad
    found = gw.simulate(g, gw.RandK(density=0.004, coordinates=coordinates)).mean
    assert bool((found == torch.inf).all())


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("RandK(density=2)", "density"),
        ("RandK(coordinates='own')", "coordinates"),
        ("RandK(contiguous=1)", "contiguous"),
        ("RandK(rescale=0)", "rescale"),
        ("RandK(values=ErrorFeedback())", "values"),
        ("RandK(values=QSGD(blocks='model'))", "values"),
        ("RandK(coordinates='private', values=FP16())", "values"),
        ("RandK(coordinates='private', values=TernGrad())", "values"),
    ],
)
def test_fields_are_checked(spec: str, says: str) -> None:
    with pytest.raises(HyperparameterError, match=says):
        gw.method(spec)


def test_what_the_values_need_to_know_the_method_needs() -> None:
    """A threshold is in the gradient's unit, and the cost of a message may decide how many values are sent."""
    plain = gw.RandK().traits
    threshold = gw.RandK(values=gw.Threshold(threshold=0.1)).traits
    measured = gw.RandK(values=gw.CAT(fixed_bytes=None, blocks="parameter")).traits
    needs = [(traits.needs_loss_scale, traits.needs_link_cost) for traits in (plain, threshold, measured)]
    assert needs == [(False, False), (True, False), (False, True)]
