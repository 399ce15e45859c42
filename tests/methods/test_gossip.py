"""Gossip, by number of the property in the papers' summary (docs/properties.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import gradwire as gw
from cases import DIFFERING
from contributions import contributed
from gradwire.exchange.drivers import Meter, simulate_ranks
from gradwire.exchange.planning import Options, Planner
from gradwire.exchange.protocols import Context, Memory
from gradwire.methods.gossip.graphs import graph_of

SHAPES = {"a": (24, 12), "b": (7,), "c": (3, 5, 4)}
U = 2.0**-24
"""Half a unit in the last place of float32, relative."""

ONCE = [method for row in DIFFERING.values() for method in row if method.every == 1]


class Workers:
    """Workers with parameters of their own, and a simulated exchange between them."""

    def __init__(
        self,
        method: gw.Method | str,
        count: int = 6,
        *,
        seed: int = 0,
        alike: bool = False,
        shapes: Mapping[str, tuple[int, ...]] = SHAPES,
        **options: Any,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        draws = [{n: torch.randn(s, generator=generator) for n, s in shapes.items()} for _ in range(count)]
        sources = [draws[0]] * count if alike else draws
        self.parameters = [{n: torch.nn.Parameter(x.clone()) for n, x in source.items()} for source in sources]
        self.link = gw.SimulatedLocalSteps([w.items() for w in self.parameters], method, **{"min_numel": 0} | options)

    def rows(self) -> torch.Tensor:
        """All parameters, float64 ``[workers, numel]``."""
        return torch.stack([torch.cat([p.detach().reshape(-1) for p in w.values()]) for w in self.parameters]).double()

    def put(self, rows: torch.Tensor) -> None:
        with torch.no_grad():
            for worker, row in zip(self.parameters, rows.float()):
                for p, part in zip(worker.values(), row.split([p.numel() for p in worker.values()])):
                    p.copy_(part.view(p.shape))

    def consensus(self) -> float:
        """The distance of all workers from their mean."""
        rows = self.rows()
        return float((rows - rows.mean(0)).norm())


def drift_of(method: gw.Method, degree: int, largest: float) -> float:
    """How far one exchange may move an element of the mean, by rounding alone.

    Both ends of an edge add exactly opposite terms. What is rounded apart is a worker's sum of ``degree`` terms of at
    most twice the largest parameter, and the addition to the parameter itself, once or in each of the iterations.
    """
    return getattr(method, "iterations", 1) * (2 * degree + degree + 1) * U * largest


@pytest.mark.parametrize("method", ["dpsgd", "power_gossip"])
def test_float64_parameters_keep_what_float32_has_no_room_for(method: str) -> None:
    """An exchange rounds the change that it makes, and not the parameters."""
    workers = [torch.nn.Parameter(torch.ones(3, 40, dtype=torch.float64)) for _ in range(2)]
    steps = gw.SimulatedLocalSteps([[("x", x)] for x in workers], method, min_numel=0)
    for _ in range(20):
        with torch.no_grad():
            for x in workers:
                x.sub_(1e-9)
        steps.after_step()
    for x in workers:
        assert torch.allclose(x, torch.full_like(x, 1 - 20e-9), rtol=0, atol=1e-14)


@pytest.mark.parametrize("method", ONCE, ids=repr)
def test_the_mean_over_workers_stays(method: gw.Method) -> None:
    """1, to what float32 rounds in as many exchanges."""
    ours = Workers(method)
    degree = len(graph_of(method.graph, 6).neighbours(0))  # type: ignore[attr-defined]
    mean, bound = ours.rows().mean(0), 0.0
    for _ in range(30):
        ours.link.after_step()
        bound += drift_of(method, degree, float(ours.rows().abs().max()))
        assert float((ours.rows().mean(0) - mean).abs().max()) <= bound


@pytest.mark.parametrize("method", ONCE, ids=repr)
def test_workers_that_agree_stay_as_they_are(method: gw.Method) -> None:
    """Bit for bit: an exchange moves nobody who has what its neighbours have, and of no difference nothing is sent."""
    ours = Workers(method, alike=True)
    before = ours.rows()
    for _ in range(3):
        ours.link.after_step()
    assert torch.equal(ours.rows(), before)


@pytest.mark.parametrize("graph", ["ring", "torus", "exponential"])
def test_an_exchange_is_the_matrix_of_weights(graph: str) -> None:
    ours, weights = Workers(gw.DPSGD(graph=graph)), graph_of(graph, 6).weights
    for _ in range(3):
        expected = weights @ ours.rows()
        ours.link.after_step()
        assert torch.allclose(ours.rows(), expected, rtol=0, atol=drift_of(gw.DPSGD(), 5, 5.0))


@pytest.mark.parametrize("iterations", [1, 2])
def test_power_gossip_of_full_rank_is_uncompressed_gossip(iterations: int) -> None:
    """2: p p^T is the identity for an orthonormal basis of all; an iteration is an exchange of its own."""
    ours = Workers(gw.PowerGossip(matrix_rank=12, iterations=iterations), shapes={"w": (12, 12), "b": (7,)})
    weights, matrix = graph_of("ring", 6).weights, 12 * 12
    for _ in range(4):
        before = ours.rows()
        ours.link.after_step()
        expected = torch.linalg.matrix_power(weights, iterations) @ before
        expected[:, matrix:] = (weights @ before)[:, matrix:]
        # Two products with sums of 12 terms, of elements and of vectors of length 1: each rounds 12 times.
        bound = 2 * iterations * 12 * 12**0.5 * U * float(before.abs().max())
        assert torch.allclose(ours.rows(), expected, rtol=0, atol=bound)


def test_a_full_factor_of_the_shorter_side_is_uncompressed_gossip() -> None:
    """Of a matrix that is not square the exchanges that ask with that side are, which are every second one."""
    ours, weights = Workers(gw.PowerGossip(matrix_rank=12)), graph_of("ring", 6).weights
    for turn in range(4):
        before = ours.rows()
        ours.link.after_step()
        expected, bound = weights @ before, 2 * 24 * 24**0.5 * U * float(before.abs().max())
        for place, square in ((slice(0, 24 * 12), turn % 2 == 1), (slice(24 * 12 + 7, None), turn % 2 == 0)):
            assert torch.allclose(ours.rows()[:, place], expected[:, place], rtol=0, atol=bound) >= square


@pytest.mark.parametrize("method", [m for m in ONCE if m.name != "choco_sgd"], ids=repr)
def test_the_consensus_error_falls_in_every_exchange(method: gw.Method) -> None:
    """3: of DPSGD at least by the second eigenvalue; of PowerGossip by whatever projections take of the difference."""
    ours = Workers(method)
    factor = graph_of(method.graph, 6).second_eigenvalue if isinstance(method, gw.DPSGD) else 1.0
    for _ in range(20):
        before = ours.consensus()
        ours.link.after_step()
        assert ours.consensus() <= factor * before + 1e-5
        assert ours.consensus() < before or before < 1e-5


@pytest.mark.parametrize("method", [gw.PowerGossip(matrix_rank=2), gw.PowerGossip(iterations=3, graph="exponential")])
def test_both_ends_of_an_edge_hold_the_same_factors(method: gw.PowerGossip) -> None:
    """4: bit for bit, in every round."""
    ours, count = Workers(method), 0
    for _ in range(5):
        ours.link.after_step()
        state = ours.link.state_dict()
        for i in range(6):
            for key, held in state[f"rank {i}"].items():
                if key == "rank":
                    continue
                kind, _, name = key.partition("/")
                side, _, j = kind.partition("@")
                other = state[f"rank {j}"][f"{side}@{i}/{name}"]
                assert torch.equal(held.view(torch.int32), other.view(torch.int32))
                count += bool(held.count_nonzero())
    assert count > 5 * 6


def test_a_difference_of_rank_one_is_gone_after_two_exchanges() -> None:
    """The first finds its rows, whatever the factor that asks, and the second with these its columns."""
    ours = Workers(gw.PowerGossip(), 2)
    rows = ours.rows()
    rows[1] = rows[0]
    rows[1, : 24 * 12] += torch.outer(torch.arange(24.0), torch.ones(12)).reshape(-1)
    ours.put(rows)
    ours.link.after_step()
    assert float((ours.rows()[0] - ours.rows()[1]).abs().max()) > 1.0
    ours.link.after_step()
    # Half of the difference goes each way; products are rounded as those above.
    assert float((ours.rows()[0] - ours.rows()[1]).abs().max()) < 2 * 24 * 24**0.5 * U * 30


def plainly(method: gw.Method, rows: torch.Tensor, rounds: int) -> torch.Tensor:
    """Gossip without estimates, x_i <- x_i + sum_j w_ij (C(x_j) - C(x_i)), which keeps the mean."""
    weights, like = graph_of("ring", len(rows)).weights, [("0", torch.empty(rows.shape[1]))]
    links = [gw.SimulatedLink(like, method, 1, seed=i, min_numel=0) for i in range(len(rows))]
    for _ in range(rounds):
        sent = torch.stack([link.reduce_(x[None].float()) for link, x in zip(links, rows)])
        rows = rows + weights @ sent.double() - sent.double()
    return rows


UNBIASED, BIASED = gw.QSGDinf(levels=3, block_size=64), gw.TopK(density=0.2)


@pytest.mark.parametrize(("compressor", "gamma"), [(UNBIASED, 0.6), (BIASED, 0.3)], ids=repr)
def test_choco_reaches_the_mean_where_plain_compressed_gossip_stops(compressor: gw.Method, gamma: float) -> None:
    """5: of vectors that nobody changes."""
    ours = Workers(gw.ChocoSGD(compressor=compressor, gamma=gamma))
    rows, start = ours.rows(), ours.consensus()
    for _ in range(200):
        ours.link.after_step()
    assert ours.consensus() < 1e-4 * start
    left = plainly(compressor, rows, 200)
    assert float((left - left.mean(0)).norm()) > 0.05 * start


def test_estimates_are_the_sums_of_what_was_sent() -> None:
    """Of the neighbours' estimates a worker keeps the weighted sum, in float64, whatever the compressor does."""
    ours, weights = Workers("ChocoSGD(compressor=TopK(density=0.1), gamma=0.1)"), graph_of("ring", 6).weights
    for _ in range(40):
        ours.put(ours.rows() + 0.1 * torch.randn(6, ours.rows().shape[1], generator=torch.Generator().manual_seed(1)))
        ours.link.after_step()
    state = ours.link.state_dict()
    for name in SHAPES:
        estimates = torch.stack([state[f"rank {i}"][f"estimate/{name}"] for i in range(6)])
        sums = torch.stack([state[f"rank {i}"][f"neighbour_estimates/{name}"] for i in range(6)])
        assert estimates.dtype == sums.dtype == torch.float64
        others = weights - torch.diag(weights.diagonal())
        # Forty additions of two products, of numbers below 16.
        assert torch.allclose(sums, others @ estimates, rtol=0, atol=40 * 4 * 16 * 2**-53)


def test_an_estimate_moves_by_what_its_worker_says_that_it_sent() -> None:
    method = gw.method("ChocoSGD(compressor=TopK(density=0.1), gamma=0.1)")
    like = {name: torch.empty(shape) for name, shape in SHAPES.items()}
    plan, memories = Planner(method, like, 3, Options(min_numel=0)).plan(list(like), 0), [Memory() for _ in range(3)]
    first = torch.randn(3, 24 * 12 + 7 + 60, generator=torch.Generator().manual_seed(0))
    known = first.double()
    simulate_ranks([plan.whole(Context(r, 3, 0, memory=m), first[r]) for r, m in enumerate(memories)], [Meter()] * 3)
    for memory in memories:
        memory.commit()
    for round in (1, 2):
        rows = torch.randn(3, 24 * 12 + 7 + 60, generator=torch.Generator().manual_seed(round))
        sent = contributed(plan, rows, memories, round)
        states = [memory.state()["rank"] for memory in memories]
        estimates = torch.stack([torch.cat([state[f"estimate/{name}"] for name in SHAPES]) for state in states])
        assert torch.equal(estimates, known + sent)
        assert bool(sent.any(1).all())
        known = estimates


def test_the_first_exchange_of_choco_sends_parameters_whole() -> None:
    """And is uncompressed gossip; those after it send what the compressor makes of differences."""
    ours, plain = Workers("ChocoSGD(compressor=TopK(density=0.01), gamma=0.02)"), Workers("dpsgd")
    before = ours.rows()
    for link in (ours.link, plain.link):
        link.after_step()
    assert torch.equal(ours.rows(), plain.rows())
    state = ours.link.state_dict()
    held = torch.stack([torch.cat([state[f"rank {i}"][f"estimate/{name}"] for name in SHAPES]) for i in range(6)])
    assert torch.equal(held, before)
    first = ours.link.link.traffic().sent_bytes
    ours.link.after_step()
    assert first == plain.link.link.traffic().sent_bytes
    assert ours.link.link.traffic().sent_bytes - first < first / 4


def test_workers_draw_independently() -> None:
    """Each knows the others' draws by their rank, and none has another's."""
    ours = Workers("ChocoSGD(compressor=QSGDinf(levels=3, block_size=64))", alike=True)
    ours.link.after_step()
    ours.put(ours.rows() * 1.1)
    ours.link.after_step()
    state = ours.link.state_dict()
    held = [state[f"rank {i}"]["estimate/a"] for i in range(6)]
    assert all(not torch.equal(held[0], other) for other in held[1:])


@pytest.mark.parametrize("method", ["ChocoSGD(compressor=TopK(density=0.1), gamma=0.1)", "power_gossip"])
def test_what_is_not_compressed_is_averaged_as_it_is(method: str) -> None:
    ours, plain = Workers(method, exclude=["a"]), Workers("dpsgd")
    for _ in range(4):
        for link in (ours.link, plain.link):
            link.after_step()
    assert torch.equal(ours.rows()[:, : 24 * 12], plain.rows()[:, : 24 * 12])
    assert method == "power_gossip" or not torch.equal(ours.rows(), plain.rows())


def test_the_mean_of_workers_follows_descent_of_the_mean() -> None:
    """Where all have one curvature: gradients are linear then, and their mean is that of the mean parameters."""
    targets, ours = (
        torch.randn(6, 24 * 12 + 7 + 60, generator=torch.Generator().manual_seed(3)).double(),
        Workers("dpsgd"),
    )
    mean, largest = ours.rows().mean(0), 5.0
    for step in range(1, 41):
        ours.put(ours.rows() - 0.1 * (ours.rows() - targets))
        mean = mean - 0.1 * (mean - targets.mean(0))
        ours.link.after_step()
        bound = step * (drift_of(gw.DPSGD(), 2, largest) + 2 * U * largest)
        assert float((ours.rows().mean(0) - mean).abs().max()) <= bound
    assert float((mean - targets.mean(0)).norm()) < 0.03 * float(targets.norm())


def test_exchanges_are_every_so_many_steps() -> None:
    ours = Workers("DPSGD(every=3)")
    errors = []
    for _ in range(7):
        ours.link.after_step()
        errors.append(ours.consensus())
    assert [a != b for a, b in pairwise(errors)] == [False, True, False, False, True, False]
    assert ours.link.link.round == 2


@pytest.mark.parametrize("method", ONCE, ids=repr)
def test_synchronising_gives_all_workers_the_plain_mean(method: gw.Method) -> None:
    ours = Workers(method)
    for _ in range(3):
        ours.link.after_step()
    rows, total = ours.rows(), torch.zeros(24 * 12 + 7 + 60)
    for row in rows.float():
        total += row * torch.tensor(1 / 6, dtype=torch.float32)
    assert torch.equal(torch.cat(list(ours.link.global_parameters.values())), total)
    assert torch.equal(ours.rows(), rows)
    ours.link.synchronise()
    assert all(torch.equal(row.float(), total) for row in ours.rows())
    ours.link.after_step()
    assert ours.link.link.round == 4


@pytest.mark.parametrize("method", ONCE, ids=repr)
def test_workers_that_were_synchronised_do_not_part_by_themselves(method: gw.Method) -> None:
    """What is left of exchanges before the mean was set does not come back with those after it."""
    ours = Workers(method)
    for step in range(6):
        noise = torch.randn(ours.rows().shape, generator=torch.Generator().manual_seed(step))
        ours.put(ours.rows() + 0.1 * noise)
        ours.link.after_step()
    ours.link.synchronise()
    before = ours.rows()
    for _ in range(4):
        ours.link.after_step()
        assert torch.equal(ours.rows(), before)


def test_synchronising_starts_the_schedule_anew_and_averages_buffers() -> None:
    ours = Workers("DPSGD(every=4)", 2)
    ours.link.buffers = [[torch.full((2,), value)] for value in (1.0, 3.0)]
    for _ in range(3):
        ours.link.after_step()
    assert [own[0].tolist() for own in ours.link.buffers] == [[1.0, 1.0], [3.0, 3.0]]
    ours.link.synchronise()
    assert [own[0].tolist() for own in ours.link.buffers] == [[2.0, 2.0]] * 2
    rounds = []
    for _ in range(4):
        ours.link.after_step()
        rounds.append(ours.link.link.round)
    assert rounds == [0, 0, 0, 1]


@pytest.mark.parametrize("method", ONCE, ids=repr)
def test_a_simulation_is_resumed_exactly(method: gw.Method) -> None:
    whole, first = Workers(method, seed=1), Workers(method, seed=1)

    def go(ours: Workers, steps: Sequence[int]) -> None:
        for step in steps:
            noise = torch.randn(ours.rows().shape, generator=torch.Generator().manual_seed(step))
            ours.put(ours.rows() + 0.1 * noise)
            ours.link.after_step()

    go(whole, range(9))
    go(first, range(4))
    again = Workers(method, seed=2)
    again.put(first.rows())
    again.link.load_state_dict(first.link.state_dict())
    go(again, range(4, 9))
    assert torch.equal(again.rows(), whole.rows())


@pytest.mark.parametrize("spec", ["ChocoSGD(graph={!r})", "PowerGossip(graph={!r})"])
def test_what_is_remembered_of_another_graph_begins_anew(spec: str, caplog: pytest.LogCaptureFixture) -> None:
    first, fresh = Workers(spec.format("ring")), Workers(spec.format("exponential"))
    for _ in range(4):
        first.link.after_step()
    again = Workers(spec.format("exponential"))
    again.link.load_state_dict(first.link.state_dict())
    fresh.link.link.round = 4
    for ours in (again, fresh):
        ours.put(first.rows())
        ours.link.after_step()
        ours.link.after_step()
    assert torch.equal(again.rows(), fresh.rows())
    assert [text for text in caplog.messages if "another graph" in text]


def test_declared_bits_are_those_of_four_workers_on_a_ring() -> None:
    for kind in (gw.DPSGD, gw.ChocoSGD, gw.PowerGossip):
        like = [("w", torch.empty(1000, 1000))]
        link = gw.SimulatedLink(like, kind(), 4)
        before = 0
        for _ in range(2):
            before = link.traffic().sent_bytes
            link.exchange_(torch.randn(4, 10**6, generator=torch.Generator().manual_seed(0)))
        bits = 32 * (link.traffic().sent_bytes - before) / (8 * 10**6 * 3 / 4)
        # Headers, and scales of blocks that do not divide a million.
        assert bits == pytest.approx(kind.properties.bits_per_element, rel=0.02)


@pytest.mark.parametrize(
    "method", ["dpsgd", "ChocoSGD(compressor=Threshold(threshold=0.5), gamma=0.2)", "power_gossip"]
)
def test_bytes_are_counted_by_neighbour(method: str) -> None:
    """What a worker says it sent to a neighbour is what that one received, over all edges."""
    ours = Workers(method)
    for _ in range(3):
        ours.link.after_step()
    traffic = [ours.link.link.traffic(worker) for worker in range(6)]
    for worker, one in enumerate(traffic):
        assert set(one.sent_to) == {(worker + 1) % 6, (worker - 1) % 6}
        assert sum(one.sent_to.values()) == one.sent_bytes
        assert one.received_bytes == sum(other.sent_to.get(worker, 0) for other in traffic)


def test_a_parameter_that_is_not_finite_ends_the_exchange_before_anything_is_sent() -> None:
    ours = Workers("choco_sgd")
    ours.link.after_step()
    rows, state = ours.rows(), ours.link.state_dict()
    rows[4, 290] = torch.nan
    ours.put(rows)
    with pytest.raises(gw.ExchangeError, match="worker 4: parameter 'b' is not finite"):
        ours.link.after_step()
    assert torch.equal(ours.rows().nan_to_num(7.0), rows.float().double().nan_to_num(7.0))
    after = ours.link.state_dict()
    assert all(torch.equal(x, after[scope][key]) for scope in state for key, x in state[scope].items() if "/" in key)


def test_fields_and_uses_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    for spec, told in (
        ("DPSGD(every=0)", "every is at least 1"),
        ("DPSGD(graph='')", "graph is one of 'ring', 'torus', 'exponential', or the path"),
        ("ChocoSGD(gamma=0.0)", "gamma is above 0 and at most 1"),
        ("ChocoSGD(compressor=QSGDMaxNorm())", "has a scale that all workers share"),
        ("ChocoSGD(compressor=TopK(blocks='model'))", "works on all parameters as one vector"),
        ("ChocoSGD(compressor=RandK())", "use coordinates='private'"),
        ("ChocoSGD(compressor=QSGDinf(levels=1, block_size=512))", "is no contraction"),
        ("ChocoSGD(compressor=FP32())", "compressor is an operator on one vector"),
        ("ChocoSGD(compressor=DPSGD())", "compressor is an operator on one vector"),
        ("PowerGossip(matrix_rank=0)", "matrix_rank is at least 1"),
        ("PowerGossip(iterations=0)", "iterations is at least 1"),
        ("PowerGossip(least_saving=0.5)", "least_saving is at least 1"),
        ("LocalSGD(inner=DPSGD())", "whose outcome is a mean"),
        ("Coded(compressor=DPSGD())", "whose payload is its own"),
        ("Scheduled(compressor=ChocoSGD(), field='gamma', start=0.5)", "compressor is a method with a dial"),
        ("Auto(candidates=('fp32', 'dpsgd'))", "exchanges parameters and no gradients"),
    ):
        with pytest.raises(gw.HyperparameterError, match=told):
            gw.method(spec)
    with pytest.raises(gw.IncompatibleError, match="7 workers make no rectangle"):
        Workers("DPSGD(graph='torus')", 7)
    with pytest.raises(gw.IncompatibleError, match="check=True compares the bits of all ranks' outcomes"):
        Workers("dpsgd", check=True)
    with pytest.raises(gw.IncompatibleError, match="check=True compares the bits"):
        gw.check_options("power_gossip", check=True)
    with pytest.raises(gw.IncompatibleError, match="fallback= has no place here"):
        gw.check_options("choco_sgd", fallback="bf16", fallback_limit=2.0)
    with pytest.raises(gw.IncompatibleError, match="none that all share"):
        gw.simulate(torch.ones(3, 10), "dpsgd")
    assert {name for name in gw.methods() if gw.method(name).traits.outcomes_differ} == set(DIFFERING)


@pytest.mark.parametrize("method", ONCE, ids=repr)
def test_all_backends_give_the_same_bits(method: gw.Method) -> None:
    ours, reference = Workers(method), Workers(method, backend="reference")
    for _ in range(4):
        for link in (ours.link, reference.link):
            link.after_step()
    assert torch.equal(ours.rows(), reference.rows())
