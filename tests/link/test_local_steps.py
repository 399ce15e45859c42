"""Local steps of real ranks: DDP's hook, the optimizer's steps, checkpoints, failures."""

from __future__ import annotations

import copy
import itertools
import logging
import math
import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.link.buffers import FEW, mean_of_finite
from log_texts import LogTexts
from ranks import Ranks, fresh_ranks

COUNT = 3
SPECS = (
    "LocalSGD(every=4)",
    "DiLoCo(every=3, inner=EDEN(bits=4))",
    "EASGD(every=2, inner=ErrorFeedback())",
    "StreamingDiLoCo(every=4, fragments=2, delay=2, inner=ErrorFeedback())",
    "SparseLoCo(every=3, density=0.1)",
)


def built(*, norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), *([nn.BatchNorm1d(30)] if norm else []), nn.ReLU(), nn.Linear(30, 5))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 20, generator=torch.Generator().manual_seed(1000 * rank + step))


def flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def trained(spec: str, steps: int, norm: bool = False, warmup_steps: int = 0) -> dict[str, Any]:
    """Train through DDP; rank 0 gives no optimizer, so that it is found by its parameters."""
    rank = torch.distributed.get_rank()
    module = DistributedDataParallel(built(norm=norm))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    given = {"optimizer": optimizer} if rank else {}
    link = gw.attach(module, spec, min_numel=0, check=True, warmup_steps=warmup_steps, **given)
    gradients, found = [], []
    for step in range(steps):
        optimizer.zero_grad()
        module(batch(rank, step)).square().mean().backward()
        gradients.append(torch.cat([p.grad.reshape(-1) for p in module.parameters()]))
        optimizer.step()
        found.append(flat(module))
    with link.global_parameters():
        held = flat(module.module)
    buffers = [b.clone() for b in module.module.buffers()]
    answer = {
        "rows": found, "gradients": gradients, "global": held, "round": link.round, "buffers": buffers,
        "sent": link.traffic().sent_bytes, "elements": link.traffic().elements, "state": link.state_dict(),
        "broadcasts": module.broadcast_buffers, "own": flat(module.module),
    }  # fmt: skip
    link.close()
    # Steps after the link has been closed exchange nothing.
    optimizer.step()
    return answer


def simulated(spec: str, steps: int) -> list[dict[str, Any]]:
    modules = [built() for _ in range(COUNT)]
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.01) for module in modules]
    link = gw.SimulatedLocalSteps([module.named_parameters() for module in modules], spec, min_numel=0)
    rows: list[list[torch.Tensor]] = [[] for _ in modules]
    for step in range(steps):
        for rank, (module, optimizer) in enumerate(zip(modules, optimizers)):
            optimizer.zero_grad()
            module(batch(rank, step)).square().mean().backward()
            optimizer.step()
        link.after_step()
        for found, module in zip(rows, modules):
            found.append(flat(module))
    return [{"rows": found, "global": torch.cat(list(link.global_parameters.values()))} for found in rows]


@pytest.mark.parametrize("spec", SPECS[1:])
def test_real_ranks_have_the_simulations_bits(three_ranks: Ranks, spec: str) -> None:
    """9, and 3: the same global parameters on all ranks, and between exchanges parameters of their own."""
    found, expected = three_ranks(trained, spec, 10), simulated(spec, 10)
    for real, ours in zip(found, expected):
        assert all(torch.equal(a, b) for a, b in zip(real["rows"], ours["rows"]))
        assert torch.equal(real["global"], ours["global"])
        assert torch.equal(real["global"], found[0]["global"])
    assert not torch.equal(found[0]["rows"][0], found[1]["rows"][0])


def test_between_exchanges_nothing_travels_and_gradients_stay_ones_own(three_ranks: Ranks) -> None:
    found = three_ranks(trained, SPECS[0], 11)
    assert {one["round"] for one in found} == {2}
    assert not torch.equal(found[0]["gradients"][0], found[1]["gradients"][0])
    whole = three_ranks(trained, "LocalSGD(every=1)", 11)
    assert whole[0]["sent"] * 2 == found[0]["sent"] * 11
    # What DDP would have sent counts in every step.
    assert whole[0]["elements"] == found[0]["elements"]
    for step, alike in ((2, False), (3, True), (4, False), (7, True)):
        assert torch.equal(found[0]["rows"][step], found[1]["rows"][step]) == alike


def test_rounds_of_warm_up_are_synchronous_steps_and_local_ones_follow(three_ranks: Ranks) -> None:
    """Post-local SGD: four steps of gradients in float32, then an exchange every fourth step."""
    found = three_ranks(trained, SPECS[0], 9, False, 4)
    for step, alike in ((0, True), (3, True), (4, False), (6, False), (7, True), (8, False)):
        assert torch.equal(found[0]["rows"][step], found[1]["rows"][step]) == alike
    assert torch.equal(found[0]["gradients"][3], found[1]["gradients"][3])
    assert not torch.equal(found[0]["gradients"][4], found[1]["gradients"][4])
    assert found[0]["round"] == 4 + 1
    # The first difference is of local steps alone.
    early = three_ranks(trained, SPECS[0], 6, False, 4)
    assert all(torch.equal(one["global"], one["rows"][3]) for one in early)


def accumulated(warmup_steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Take steps of two backward passes that both synchronise; return global and own parameters after each."""
    rank, found = torch.distributed.get_rank(), []
    module = DistributedDataParallel(built())
    link = gw.attach(module, "LocalSGD(every=2)", min_numel=0, warmup_steps=warmup_steps)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        for part in (0, 1):
            module(batch(rank, 2 * step + part)).square().mean().backward()
        optimizer.step()
        with link.global_parameters():
            held = flat(module.module)
        found.append((held, flat(module.module)))
    link.close()
    return found


def test_a_step_in_whose_passes_warm_up_ends_is_a_local_one(three_ranks: Ranks) -> None:
    found = three_ranks(accumulated, 3)
    for of_ranks in zip(*found):
        assert all(torch.equal(held, of_ranks[0][0]) for held, _ in of_ranks)
    own = [[torch.equal(one, of_ranks[0][1]) for _, one in of_ranks[1:]] for of_ranks in zip(*found)]
    # One step of two rounds of warm-up, two local ones, an exchange, and a local one.
    assert own == [[True] * 2, [False] * 2, [True] * 2, [False] * 2]


def test_buffers_are_averaged_with_the_parameters_and_not_broadcast(three_ranks: Ranks) -> None:
    found = three_ranks(trained, SPECS[0], 8, True)
    assert not any(one["broadcasts"] for one in found)
    mean, variance, count = found[0]["buffers"]
    for other in found[1:]:
        assert torch.equal(other["buffers"][0], mean)
        assert torch.equal(other["buffers"][1], variance)
    assert int(count) == 8
    later = three_ranks(trained, SPECS[0], 9, True)
    assert not torch.equal(later[0]["buffers"][0], later[1]["buffers"][0])


def masked(numel: int) -> tuple[int, bool]:
    """Train with a buffer that is the same on all ranks; return what was sent, and whether it is as it was."""
    rank, module = torch.distributed.get_rank(), built(norm=True)
    mask = torch.full((numel,), -torch.inf)
    module.register_buffer("mask", mask.clone())
    ddp = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    link = gw.attach(ddp, "LocalSGD(every=2)", min_numel=0)
    for step in range(2):
        ddp(batch(rank, step)).square().mean().backward()
        optimizer.step()
    sent = link.traffic().sent_bytes
    link.close()
    return sent, torch.equal(module.mask, mask)


def test_buffers_that_are_equal_on_all_ranks_are_not_sent(three_ranks: Ranks) -> None:
    assert three_ranks(masked, 10_000) == three_ranks(masked, 10)
    assert all(same for _, same in three_ranks(masked, 10))


def of_two(module: nn.Module) -> list[torch.optim.Optimizer]:
    """Return an optimizer of the matrices, and one of all else."""
    parameters = list(module.parameters())
    return [
        torch.optim.SGD([p for p in parameters if (p.dim() > 1) == matrices], lr=0.05) for matrices in (True, False)
    ]


def buffers_of(module: nn.Module) -> list[torch.Tensor]:
    return [b for b in module.buffers() if b.is_floating_point()]


def one_step(module: nn.Module, optimizers: list[torch.optim.Optimizer], rank: int, step: int) -> None:
    module.zero_grad()
    module(batch(rank, step)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()


def interrupted(spec: str, at: int, steps: int) -> list[torch.Tensor]:
    """Synchronise between two exchanges, and go on; return parameters and buffers after each step and in between."""
    module = DistributedDataParallel(built(norm=True))
    optimizers, rows = of_two(module), []
    link = gw.attach(module, spec, min_numel=0)
    for step in range(steps):
        one_step(module, optimizers, link.rank, step)
        rows.append(torch.cat([flat(module), *buffers_of(module)]))
        if step == at:
            link.synchronise()
            rows.append(torch.cat([flat(module), *buffers_of(module)]))
    link.close()
    return rows


@pytest.mark.parametrize(
    ("spec", "at"),
    [
        ("DiLoCo(every=4, inner=EDEN(bits=4))", 5),
        # The exchange has been made after the fourth step of the first optimizer, and the second one steps after it.
        ("DiLoCo(every=4, inner=EDEN(bits=4))", 3),
        ("EASGD(every=4, inner=ErrorFeedback())", 5),
        # Fragments are exchanged after steps 4 and 8, and take effect three steps later: one is in flight.
        ("StreamingDiLoCo(every=8, fragments=2, delay=3, inner=EDEN(bits=4))", 5),
    ],
)
def test_synchronised_between_exchanges_real_ranks_have_the_simulations_bits(
    three_ranks: Ranks, spec: str, at: int
) -> None:
    """Then the count begins anew. Of two optimizers the first one's steps count, and buffers go with the last part."""
    steps = 17
    modules = [built(norm=True) for _ in range(COUNT)]
    optimizers = [of_two(module) for module in modules]
    link = gw.SimulatedLocalSteps([module.named_parameters() for module in modules], spec, min_numel=0)
    link.buffers = [buffers_of(module) for module in modules]
    expected: list[list[torch.Tensor]] = [[] for _ in modules]

    def note() -> None:
        for rows, module in zip(expected, modules):
            rows.append(torch.cat([flat(module), *buffers_of(module)]))

    for step in range(steps):
        for rank, (module, pair) in enumerate(zip(modules, optimizers)):
            # The first one's step is the one that is counted, and the other's changes go with the next exchange.
            module.zero_grad()
            module(batch(rank, step)).square().mean().backward()
            pair[0].step()
        link.after_step()
        for _, other in optimizers:
            other.step()
        note()
        if step == at:
            link.synchronise()
            note()
    for found, rows in zip(three_ranks(interrupted, spec, at, steps), expected):
        assert [i for i, (real, ours) in enumerate(zip(found, rows)) if not torch.equal(real, ours)] == []
    assert spec.startswith("EASGD") or all(torch.equal(rows[at + 1], expected[0][at + 1]) for rows in expected)


def changed_on_one() -> tuple[list[int], torch.Tensor]:
    """Change a parameter on one rank alone after an exchange, and synchronise twice; return rounds and parameters."""
    module = built()
    link = gw.Link(module.named_parameters(), "DiLoCo(every=2)", min_numel=0)
    rounds = []
    for change in (float(link.rank == 1), 0.0):
        with torch.no_grad():
            next(module.parameters()).add_(change)
        link.synchronise()
        rounds.append(link.round)
    link.close()
    return rounds, flat(module)


def test_synchronise_exchanges_what_changed_on_one_rank_alone(three_ranks: Ranks) -> None:
    found = three_ranks(changed_on_one)
    assert [rounds for rounds, _ in found] == [[1, 1]] * 3
    assert all(torch.equal(values, found[0][1]) for _, values in found)
    assert not torch.equal(found[0][1], flat(built()))


def in_stages(given: bool) -> tuple[list[int], torch.Tensor]:
    """Train in three stages with an optimizer each; return the rounds after each, and the parameters."""
    rank, module = torch.distributed.get_rank(), DistributedDataParallel(built())
    optimizer, rounds = torch.optim.SGD(module.parameters(), lr=0.1), []
    link = gw.attach(module, "DiLoCo(every=3)", min_numel=0, **({"optimizer": optimizer} if given else {}))
    for stage in range(3):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1) if stage else optimizer
        for step in range(6):
            one_step(module, [optimizer], rank, 6 * stage + step)
        rounds.append(link.round)
    link.close()
    return rounds, flat(module)


@pytest.mark.parametrize("given", [True, False])
def test_a_later_stage_with_another_optimizer_exchanges_as_well(three_ranks: Ranks, given: bool) -> None:
    found = three_ranks(in_stages, given)
    assert [rounds for rounds, _ in found] == [[2, 4, 6]] * 3
    assert all(torch.equal(values, found[0][1]) for _, values in found)


def peaks(spec: str) -> list[int]:
    """Return the bytes that this rank sends after each step."""
    parameters = [("e", torch.nn.Parameter(torch.zeros(900, 64))), ("w", torch.nn.Parameter(torch.zeros(64, 300)))]
    link = gw.Link(parameters, spec, min_numel=0)
    sent = [0]
    for _ in range(16):
        link.after_step()
        sent.append(link.traffic().sent_bytes)
    link.close()
    return [after - before for before, after in itertools.pairwise(sent)]


def test_fragments_send_a_share_each_of_what_one_exchange_sends(three_ranks: Ranks) -> None:
    """5: at most a fourth a step, but for the rows where runs end, and as much in all."""
    for inner, header in (("FP32()", 0), ("TernGrad(clip=None)", 16 * 100)):
        whole = three_ranks(peaks, f"DiLoCo(every=8, inner={inner})")[0]
        parts = three_ranks(peaks, f"StreamingDiLoCo(every=8, delay=0, inner={inner})")[0]
        assert sum(n > 0 for n in parts) == 8
        assert max(parts) <= max(whole) / 4 + header + 4 * 4 * 300
        assert sum(whole) <= sum(parts) <= sum(whole) + 8 * header


def resumed(spec: str, cut: int, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the parameters of a training that does not stop, and of one that another link goes on with."""
    rank = torch.distributed.get_rank()

    def run(module: Any, optimizer: Any, link: Any, first: int, last: int) -> None:
        for step in range(first, last):
            optimizer.zero_grad()
            module(batch(rank, step)).square().mean().backward()
            optimizer.step()

    def started() -> tuple[Any, Any, Any]:
        module = DistributedDataParallel(built())
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        return module, optimizer, gw.attach(module, spec, optimizer=optimizer, min_numel=0)

    whole = started()
    run(*whole, 0, steps)
    wanted = flat(whole[0])
    # Links that are open at the same time draw numbers of their own.
    whole[2].close()
    first = started()
    run(*first, 0, cut)
    saved = copy.deepcopy((first[0].module.state_dict(), first[1].state_dict(), first[2].state_dict()))
    first[2].close()
    module, optimizer, link = started()
    module.module.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    link.load_state_dict(saved[2])
    run(module, optimizer, link, cut, steps)
    link.close()
    return wanted, flat(module)


@pytest.mark.parametrize("spec", SPECS[1:])
@pytest.mark.parametrize("cut", [3, 4])
def test_a_training_is_resumed_between_exchanges_and_after_one(three_ranks: Ranks, spec: str, cut: int) -> None:
    """Streaming, an exchange is in flight: after step 2 until step 4, and after step 4 until step 6."""
    for whole, again in three_ranks(resumed, spec, cut, 9):
        assert torch.equal(whole, again)


def scaled() -> tuple[int, list[torch.Tensor]]:
    """Overflow on one rank alone: its scaler skips a step, which counts all the same."""
    rank = torch.distributed.get_rank()
    module = DistributedDataParallel(built())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    link = gw.attach(module, "LocalSGD(every=3)", optimizer=optimizer, grad_scaler=scaler, min_numel=0)
    rows = []
    for step in range(6):
        optimizer.zero_grad()
        loss = module(batch(rank, step)).square().mean()
        scaler.scale(loss * (torch.inf if rank == 1 and step == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        rows.append(flat(module))
    link.close()
    return link.round, rows


def test_a_step_that_one_scaler_skips_counts_on_all_ranks(three_ranks: Ranks) -> None:
    found = three_ranks(scaled)
    assert [rounds for rounds, _ in found] == [2, 2, 2]
    for step, alike in ((1, False), (2, True), (4, False), (5, True)):
        assert torch.equal(found[0][1][step], found[1][1][step]) == alike


def spoilt(kind: type[torch.optim.Optimizer], spec: str) -> dict[str, Any]:
    """Train with some losses on rank 1 that are not numbers; return what the link counted and said, and its error."""
    rank, told = torch.distributed.get_rank(), LogTexts()
    logging.getLogger("gradwire").addHandler(told)
    module = DistributedDataParallel(built())
    optimizer = kind(module.parameters(), lr=0.01)  # type: ignore[call-arg]
    link = gw.attach(module, spec, min_numel=0, optimizer=optimizer)
    error = None
    try:
        for step in range(12):
            optimizer.zero_grad()
            loss = module(batch(rank, step)).square().mean()
            (loss * (torch.nan if rank == 1 and step in (2, 6, 10) else 1.0)).backward()
            optimizer.step()
    except gw.ExchangeError as raised:
        error = str(raised)
    logging.getLogger("gradwire").removeHandler(told)
    link.close()
    texts = [text for text in told.texts if "not finite" in text]
    return {"skipped": link.skipped_rounds, "round": link.round, "texts": texts, "error": error}


@pytest.mark.parametrize("spec", ["DiLoCo(every=2)", "DiLoCo(every=2, inner=EDEN(bits=4))"])
def test_a_value_that_is_not_finite_is_counted_and_its_rank_warned(three_ranks: Ranks, spec: str) -> None:
    found = three_ranks(spoilt, torch.optim.SGD, spec)
    assert [(one["skipped"], one["round"], one["error"]) for one in found] == [(3, 6, None)] * 3
    common = "after the local steps before exchange 2 a parameter was not finite on some rank"
    assert [[text.split(":")[0] for text in one["texts"]] for one in (found[0], found[2])] == [[common], []]
    (own,) = found[1]["texts"]
    assert own.startswith("rank 1: after the local steps before exchange 2 parameter '0.weight' was not finite here")


def test_an_optimizer_that_spoils_all_steps_breaks_the_link_on_all_ranks(three_ranks: Ranks) -> None:
    for one in three_ranks(spoilt, torch.optim.AdamW, "DiLoCo(every=2)"):
        assert "before 3 exchanges in a row a parameter was not finite on some rank" in one["error"]
        assert (one["skipped"], one["round"]) == (3, 4)


def averaged_statistics() -> list[float]:
    """Average buffers of which rank 1 has one value that is not finite, and all ranks another."""
    rank = torch.distributed.get_rank()
    module = DistributedDataParallel(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)), broadcast_buffers=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    link = gw.attach(module, "LocalSGD(every=1)", min_numel=0, optimizer=optimizer)
    mean = module.module[1].running_mean
    with torch.no_grad():
        mean.copy_(torch.tensor([rank, rank, torch.nan, 0.0]))
        if rank == 1:
            mean[1] = torch.inf
    optimizer.step()
    link.close()
    return mean.tolist()


def test_a_statistic_that_is_not_finite_on_a_rank_does_not_reach_the_others(three_ranks: Ranks) -> None:
    for of_rank in three_ranks(averaged_statistics):
        assert [*of_rank[:2], of_rank[3]] == [1.0, 1.0, 0.0]
        assert math.isnan(of_rank[2])


def table_of(rank: int) -> torch.Tensor:
    """Return a buffer of so many elements that it is not sent by all to all; two of them are not finite."""
    table = torch.randn(FEW + 3, generator=torch.Generator().manual_seed(rank))
    table[5 : 5 + 2 * (rank == 1)] = torch.nan
    table[9] = torch.inf
    return table


def averaged_table() -> torch.Tensor:
    link = gw.Link([("x", nn.Parameter(torch.zeros(4)))], "LocalSGD(every=1)", min_numel=0)
    link.local.buffers = [table_of(link.rank), torch.full((2,), float(link.rank))]
    link.after_step()
    link.close()
    return torch.cat(link.local.buffers)


def test_large_buffers_are_averaged_as_parameters_are(three_ranks: Ranks) -> None:
    """With the simulation's bits, and without what is not finite, as small ones."""
    workers = [nn.Parameter(torch.zeros(4)) for _ in range(COUNT)]
    steps = gw.SimulatedLocalSteps([[("x", x)] for x in workers], "LocalSGD(every=1)", min_numel=0)
    steps.buffers = [[table_of(rank), torch.full((2,), float(rank))] for rank in range(COUNT)]
    before = torch.stack([torch.cat(own) for own in steps.buffers])
    steps.after_step()
    simulated = torch.cat(steps.buffers[0])
    torch.testing.assert_close(simulated, mean_of_finite(before.double()).float(), rtol=1e-5, atol=1e-6)
    assert torch.nonzero(~simulated.isfinite()).flatten().tolist() == [9]
    for found in three_ranks(averaged_table):
        assert torch.equal(found, simulated)


def test_simulated_local_steps_count_what_they_discard_and_give_up_after_three_in_a_row() -> None:
    workers = [nn.Parameter(torch.zeros(4)) for _ in range(2)]
    steps = gw.SimulatedLocalSteps([[("x", x)] for x in workers], "LocalSGD(every=1)", min_numel=0)
    steps.buffers = [[torch.tensor([1.0, 1.0])], [torch.tensor([3.0, torch.nan])]]

    def step(value: float) -> None:
        with torch.no_grad():
            workers[1].add_(value)
        steps.after_step()

    for value in (torch.nan, torch.nan, 1.0, torch.nan, torch.nan):
        step(value)
    steps.synchronise()  # nothing has changed since, so that nothing is exchanged, and the count goes on
    assert [buffer.tolist() for (buffer,) in steps.buffers] == [[2.0, 1.0]] * 2
    assert steps.link.skipped_rounds == 4
    state = steps.state_dict()
    for _ in range(2):
        for _ in range(2):
            with pytest.raises(gw.ExchangeError, match="before 3 exchanges in a row"):
                step(torch.nan)
        steps.load_state_dict(state)
        step(torch.nan)
        step(torch.nan)


def one_used() -> tuple[list[bool], torch.Tensor]:
    """Step with a parameter that no loss uses, after a round of warm-up; return which have no gradient, and it."""
    used, unused = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = torch.optim.SGD([used, unused], lr=0.1, weight_decay=0.1)
    options: dict[str, Any] = {"optimizer": optimizer, "min_numel": 0, "warmup_steps": 1}
    link = gw.Link([("used", used), ("unused", unused)], "LocalSGD(every=4)", **options)
    for _ in range(2):
        optimizer.zero_grad()
        used.sum().backward()
        link.reduce_()
        optimizer.step()
    link.close()
    return [p.grad is None for p in (used, unused)], unused.detach()


def test_a_parameter_that_no_loss_uses_is_not_stepped_between_exchanges(three_ranks: Ranks) -> None:
    for missing, unused in three_ranks(one_used):
        assert missing == [False, True]
        # In the round of warm-up it takes part with zeros, as its peers' gradients may not be.
        assert torch.allclose(unused, torch.full((3,), 0.99))


def by_hand() -> tuple[torch.Tensor, list[str]]:
    """A loop without DDP, which counts its steps itself; and uses that make no sense."""
    rank, module, told = torch.distributed.get_rank(), built(), []
    link = gw.Link(module.named_parameters(), "LocalSGD(every=2)", min_numel=0, optimizer=None)
    # Its optimizer was not given to the link, which must not count its steps a second time.
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    for step in range(2):
        for p in module.parameters():
            p.grad = torch.full_like(p, -float(rank))
        optimizer.step()
        link.after_step()
        if link.round != step:
            told.append(f"{link.round} exchanges after {step + 1} steps")
    plain = gw.Link(built().named_parameters(), "terngrad")
    for use in (plain.after_step, plain.synchronise, plain.global_parameters):
        try:
            use()
        except gw.IncompatibleError as error:
            told.append(str(error))
    for one in (link, plain):
        one.close()
    return flat(module), told


def test_a_loop_without_ddp_counts_its_steps_itself(three_ranks: Ranks) -> None:
    found = three_ranks(by_hand)
    assert torch.allclose(found[0][0], flat(built()) + 2.0, rtol=0, atol=1e-6)
    assert torch.equal(found[0][0], found[1][0])
    assert all("no local steps" in sentence for sentence in found[0][1])
    assert len(found[0][1]) == 3


def refused(spec: str) -> str:
    """Return the error of opening a link."""
    try:
        gw.Link(built().named_parameters(), spec, min_numel=0).close()
    except gw.GradwireError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def test_real_ranks_refuse_what_a_simulation_refuses(three_ranks: Ranks) -> None:
    """A method inside that goes by the number of the round, with fragments that are exchanged in turn."""
    for inner in ("ACPSGD()", "CLTk()", "ErrorFeedback(GRandK())"):
        spec = f"StreamingDiLoCo(every=8, delay=0, inner={inner})"
        with pytest.raises(gw.HyperparameterError, match="use fragments=1") as told:
            gw.SimulatedLocalSteps([built().named_parameters() for _ in range(COUNT)], spec)
        assert three_ranks(refused, spec) == [f"HyperparameterError: {told.value}"] * COUNT
        assert three_ranks(refused, spec.replace("delay", "fragments=1, delay")) == ["not refused"] * COUNT


def leaving(spec: str, last: int) -> str:
    rank = torch.distributed.get_rank()
    module = DistributedDataParallel(built())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    link = gw.attach(module, spec, optimizer=optimizer, min_numel=0)
    before = flat(module)
    # Up to the end of a third exchange: on a busy machine the second one may have been whole before rank 1 was gone.
    for step in range(13):
        # Not before DDP has laid out its buckets anew, in the second forward, for which it needs all ranks.
        if rank == 1 and step == last:
            os._exit(0)
        try:
            with link.global_parameters():
                before = flat(module)
            optimizer.zero_grad()
            module(batch(rank, step)).square().mean().backward()
            optimizer.step()
        except Exception:
            # Raised where DDP's hook refuses, it is only a RuntimeError.
            with link.global_parameters():
                same = torch.equal(flat(module), before)
            return f"{link.error} {type(link.error).__name__} {same}"
    return "no error"


LEFT = [
    ("DiLoCo(every=2)", 3),
    # Fragments are exchanged after steps 3 and 6: rank 1 begins the second exchange, and leaves while it is in flight;
    # or it never begins it, and the others wait for it two steps later.
    ("StreamingDiLoCo(every=6, fragments=2, delay=3)", 6),
    ("StreamingDiLoCo(every=6, fragments=2, delay=3)", 5),
]


@pytest.mark.parametrize(("spec", "last"), LEFT)
def test_a_rank_that_is_gone_is_named_and_global_parameters_stay(spec: str, last: int) -> None:
    with fresh_ranks(3) as ranks:
        ranks.start(leaving, spec, last)
        answers = ranks.collect(60)
    assert answers[1] == ("gone", 0)
    for kind, value in (answers[0], answers[2]):
        assert kind == "ok", value
        assert "rank 1" in value
        assert value.endswith("True")
