"""A finite spike costs no more than an infinity: one round, of which nothing is remembered."""

from __future__ import annotations

import logging
import math
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch

import gradwire as gw
from cases import ALL, DIFFERING, adds_up
from fake_gpu import fake_gpu, there
from gradwire.exchange.protocols.bucket_plan import LARGEST

SHAPES = {"first": (48, 24), "vector": (300,), "last": (20, 30)}
NUMEL = sum(torch.Size(shape).numel() for shape in SHAPES.values())
FIRST, LAST = 7, NUMEL - 2
MOST = torch.finfo(torch.float32).max
WORKERS = 3

REMEMBERING = [method for method in ALL if adds_up(method)]
OTHERS = [method for method in ALL if not adds_up(method)]


def simulated(method: gw.Method | str) -> gw.SimulatedLink:
    cost = gw.LinkCost(message_s=1e-4, bytes_per_s=1e8)
    parameters = [(name, torch.empty(shape)) for name, shape in SHAPES.items()]
    return gw.SimulatedLink(parameters, method, WORKERS, min_numel=0, link_cost=cost)


def gradients(round: int) -> torch.Tensor:
    return torch.randn(WORKERS, NUMEL, generator=torch.Generator().manual_seed(round))


@cache
def rounds_around(method: gw.Method, value: float | None, place: int) -> tuple[list[torch.Tensor], int]:
    """Return the means of five rounds, and how many were skipped; in the third, worker 1 has ``value`` in one place."""
    link, means = simulated(method), []
    for round in range(5):
        g = gradients(round)
        if round == 2 and value is not None:
            g[1, place] = value
        means.append(link.reduce_(g).clone())
    return means, link.skipped_rounds


@pytest.mark.parametrize("method", REMEMBERING, ids=repr)
def test_a_spike_costs_what_an_infinity_costs(method: gw.Method) -> None:
    """The same round is skipped, and all later means have the same bits."""
    for value, place in ((1e20, FIRST), (-1e30, LAST), (1e38, LAST), (-MOST, FIRST)):
        (means, skipped), (expected, as_many) = (rounds_around(method, v, place) for v in (value, math.inf))
        assert not bool(torch.isfinite(means[2]).all())
        assert all(torch.equal(mean, other) for mean, other in zip(means[3:], expected[3:]))
        assert all(bool(torch.isfinite(mean).all()) for mean in means[3:])
        assert skipped == as_many <= 1


@pytest.mark.parametrize("method", OTHERS, ids=repr)
def test_a_spike_leaves_no_trace_where_nothing_is_added_up(method: gw.Method) -> None:
    expected, _ = rounds_around(method, None, FIRST)
    for value, place in ((1e20, FIRST), (MOST, LAST)):
        means, _ = rounds_around(method, value, place)
        assert all(torch.equal(mean, other) for mean, other in zip(means[3:], expected[3:]))


@pytest.mark.parametrize("name", ["ALQ", "ALQN", "AMQ", "AMQN"])
def test_levels_that_are_fitted_to_a_spike_serve_as_well(name: str) -> None:
    """They are shares of the scales of all blocks, and only one block has the spike."""
    errors = []
    for spike in (None, 1e20, 1e30):
        link, off = gw.SimulatedLink([("w", torch.empty(40_000))], f"{name}(updates=(0,))", 4), 0.0
        for round in range(3):
            g = torch.randn(4, 40_000, generator=torch.Generator().manual_seed(round))
            if round == 0 and spike is not None:
                g[1, FIRST] = spike
            mean = g.mean(0)
            off = float((link.reduce_(g) - mean).norm() / mean.norm())
        errors.append(off)
    assert errors[1:] == pytest.approx([errors[0]] * 2, rel=0.02)


@pytest.mark.parametrize("method", REMEMBERING, ids=repr)
def test_what_rounds_of_the_largest_gradients_leave_behind_makes_no_later_round_overflow(method: gw.Method) -> None:
    """All elements of all workers are as large as may be, with signs of their own, round after round."""
    link = simulated(method)
    for round in range(12):
        g = gradients(round).sign_() * LARGEST if round < 8 else gradients(round)
        assert bool(torch.isfinite(link.reduce_(g)).all())
    assert link.skipped_rounds == 0


def test_the_largest_number_counts_and_the_next_is_an_overflow(caplog: pytest.LogCaptureFixture) -> None:
    link, g = simulated("TopK(density=0.01)"), gradients(0)
    g[1, FIRST] = MOST
    link.reduce_(g)
    assert not caplog.records  # it remembers nothing
    link, above = simulated("ErrorFeedback(TopK(density=0.01))"), math.nextafter(LARGEST, math.inf)
    for value, skipped in ((LARGEST, 0), (-LARGEST, 0), (torch.tensor(above).nextafter(torch.tensor(MOST)), 1)):
        g = gradients(0)
        g[1, LAST] = value
        mean = link.reduce_(g)
        assert bool(torch.isfinite(mean).all()) == (not skipped)
        assert link.skipped_rounds == skipped
    assert [record.message for record in caplog.records] == [
        "rank 1: round 2: 'last' has values beyond 2^40 (1, up to 1.1e+12), which ErrorFeedback does not take: the "
        "round counts as overflowed, so that its mean is infinite on all ranks and nothing of it is remembered; skip "
        "such a step, and scale the loss down if it happens again"
    ]


def test_infinities_are_no_spikes(caplog: pytest.LogCaptureFixture) -> None:
    """A GradScaler provokes them, so nothing is said."""
    link, g = simulated("powersgd"), gradients(0)
    g[1, FIRST], g[2, LAST] = math.inf, math.nan
    link.reduce_(g)
    assert link.skipped_rounds == 1
    assert not caplog.records


# ---------------------------------------------------------------------- local steps and gossip


LOCAL = ["LocalSGD(every=1)", "diloco", "StreamingDiLoCo(every=4, fragments=2, delay=1)", "sparse_loco", "easgd"]


def stepped(method: str, value: float) -> list[torch.Tensor]:
    """Return worker 0's and worker 1's parameters after exchanges before one of which worker 1's have a spike."""
    workers = [[(n, torch.nn.Parameter(torch.zeros(shape))) for n, shape in SHAPES.items()] for _ in range(WORKERS)]
    steps = gw.SimulatedLocalSteps(workers, method, min_numel=0)
    for round in range(5):
        for worker, g in zip(workers, gradients(round)):
            for (_, p), part in zip(worker, g.split([p.numel() for _, p in worker])):
                p.data.add_(part.view_as(p), alpha=-0.1)
        if round == 2:
            workers[1][-1][1].data.view(-1)[-2] = value
        steps.after_step()
        steps.synchronise()
    return [p.detach() for worker in workers[:2] for _, p in worker]


@pytest.mark.parametrize("method", LOCAL)
def test_a_spike_in_a_parameter_makes_all_go_on_from_the_global_ones_as_an_infinity_does(method: str) -> None:
    expected = stepped(method, math.inf)
    for value in (1e20, -MOST):
        found = stepped(method, value)
        assert all(torch.equal(p, other) and float(p.abs().max()) < 10 for p, other in zip(found, expected))


@pytest.mark.parametrize("method", [method for row in DIFFERING.values() for method in row], ids=repr)
def test_gossip_passes_on_no_spike(method: gw.Method) -> None:
    workers = [[("w", torch.nn.Parameter(torch.zeros(20, 20)))] for _ in range(4)]
    steps = gw.SimulatedLocalSteps(workers, method, min_numel=0)
    workers[2][0][1].data[3, 3] = 1e20
    for _ in range(method.traits.local_steps - 1):
        steps.after_step()
    with pytest.raises(gw.ExchangeError, match=r"parameter 'w' is not finite here, or beyond 2\^40"):
        steps.after_step()


# ---------------------------------------------------------------------- real ranks


def trained(method: str, value: float, layer: int, scale: float | None, half: bool) -> tuple[Any, ...]:
    """Train on this rank, with ``value`` in a gradient of rank 1 at step 2.

    Returns:
        Skipped rounds, which steps had finite gradients, the last parameters, and what was warned of.
    """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from oracle import batch, layers

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradwire").addHandler(handler)
    module = layers(4).bfloat16() if half else layers(4)
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.0163)
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    link = gw.attach(ddp, method, grad_scaler=scaler, min_numel=0)
    optimizer, finite = torch.optim.SGD(module.parameters(), lr=0.05), []
    for step in range(6):
        optimizer.zero_grad()
        inputs = batch(dist.get_rank(), step)
        loss = ddp(inputs.bfloat16() if half else inputs).float().square().mean()
        if step == 2 and dist.get_rank() == 1:
            # Of one element; the scale is in it.
            loss = loss + module[layer].weight.view(-1)[5] * (value if scaler is None else value / scaler.get_scale())
        (loss if scaler is None else scaler.scale(loss)).backward()
        finite.append(all(bool(p.grad.isfinite().all()) for p in module.parameters()))
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        elif finite[-1]:
            optimizer.step()
    skipped = link.skipped_rounds
    link.close()
    logging.getLogger("gradwire").removeHandler(handler)
    last = torch.cat([p.detach().float().reshape(-1) for p in module.parameters()])
    return skipped, finite, last, [text for text in said if "beyond" in text]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("method", "scale", "half"),
    [
        ("powersgd", None, False),
        ("acp_sgd", None, False),
        ("Hierarchical(PowerSGD(), node_size=2)", None, False),
        ("powersgd", 1024.0, False),
        ("ef_signsgd", None, True),
    ],
)
def test_a_spike_on_one_rank_costs_one_round_in_ddp(
    four_ranks: Any, method: str, scale: float | None, half: bool
) -> None:
    for layer in (0, 3):
        found, expected = (four_ranks(trained, method, v, layer, scale, half) for v in (1e20, math.inf))
        for rank, ((skipped, finite, last, said), (as_many, _, other, _)) in enumerate(zip(found, expected)):
            assert (skipped, as_many) == (1, 1)
            assert finite == [True, True, False, True, True, True]
            assert torch.equal(last, other)
            # Said where it is, and nowhere else.
            assert [text[:16] for text in said] == (["rank 1: round 2:"] if rank == 1 else [])


def on_device(method: str, value: float, gpu: bool) -> tuple[list[torch.Tensor], int, list[Any]]:
    import torch.distributed as dist

    with fake_gpu() if gpu else nullcontext() as noted:
        parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
        link = gw.Link(parameters.items(), method, min_numel=95, seed=4)
        draw, found = torch.Generator().manual_seed(dist.get_rank()), []
        for round in range(4):
            for p in parameters.values():
                gradient = torch.randn(p.shape, generator=draw)
                if round == 1 and dist.get_rank() == 2:
                    gradient.view(-1)[3] = value
                p.grad = there(gradient) if gpu else gradient
            if gpu and round == 1:
                noted.waits_for.clear()
            link.reduce_()
            found.append(torch.cat([p.grad.reshape(-1).cpu() for p in parameters.values()]).clone())
        waits = [where for where, stream in noted.waits_for if stream == "link"] if gpu else []
        skipped = link.skipped_rounds
        link.close()
    return found, skipped, waits


@pytest.mark.ranks
def test_a_spike_on_a_device_costs_the_same_and_nobody_waits_for_it(three_ranks: Any) -> None:
    method = "ErrorFeedback(compressor=QSGDinf())"
    expected = three_ranks(on_device, method, math.inf, False)
    for (means, _, _), (others, skipped, waits) in zip(expected, three_ranks(on_device, method, 1e20, True)):
        assert skipped == 1
        assert not waits
        assert all(torch.equal(mean, other) for mean, other in zip(means, others))
