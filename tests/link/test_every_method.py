"""Every method of the case table on real ranks, under DDP: the bits of the simulation, memory and all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from cases import TABLE
from modes import MODES, STEPS, run_mode, train
from oracle import digest, layers, simulated_run, square_loss

pytestmark = pytest.mark.ranks

# With local steps gradients stay as they are: see tests/link/test_local_steps.py.
STABLE = [m for m in (row[0].method for row in TABLE.values()) if m.properties.bit_stable and not m.traits.local_steps]
STABLE += [gw.ErrorFeedback(compressor=gw.GRandK(cycle=4)), gw.GRandK(compressor=gw.MultiScale(), cycle=5)]
# Levels that are fitted before, between and after the rounds at which a checkpoint is taken.
STABLE += [gw.ALQ(model="histogram", norm="max", block_size=64, updates=(0, 2, 4))]
# And such as are fitted at the end of a round.
STABLE += [gw.AMQ(blocks="parameter", block_size=64, updates=(0, 2, 4), overlap=True)]
# A server that decodes for all, with an autoencoder that it trains until after the checkpoint.
STABLE += [gw.LGC(instance="parameter_server", density=0.05, innovation=0.01, full_rounds=1, training_rounds=2)]
REMEMBERING = [m for m in STABLE if m.properties.state != "none"]
# What a mode changes about when and where a bucket is exchanged matters to what a method remembers. Modes that act on
# different parts of a step share a run; each of them by itself is tried in test_ddp_modes.py.
VIEWS = MODES["gradient_as_bucket_view"][0]
BUCKETS, LANES, _ = MODES["four lanes, small chunks"]
# Three chunks of each bucket are enough to take a lane more than once in a step.
LANES = LANES | {"chunk_numel": 5000}
OF_MEMORY = {
    "gradient_as_bucket_view, no_sync": (VIEWS, {}, MODES["no_sync"][2]),
    "four lanes, small chunks, checked": (BUCKETS, LANES | MODES["checked"][1], 1),
}
# The others meet the two modes that change the bucket itself, together, until buckets have been rebuilt, which is at
# the second step.
WITHOUT = {"gradient_as_bucket_view, four lanes, small chunks": (VIEWS | BUCKETS, LANES, 1)}
CROSSED = [(m, mode) for m in STABLE for mode in (OF_MEMORY if m in REMEMBERING else WITHOUT)]


@pytest.mark.parametrize(("method", "mode"), CROSSED, ids=repr)
def test_ddp_gives_the_bits_of_the_simulation(three_ranks: Any, method: gw.Method, mode: str) -> None:
    ddp_options, options, micro_steps = {**OF_MEMORY, **WITHOUT}[mode]
    steps = STEPS if method in REMEMBERING else 2
    found = three_ranks(run_mode, repr(method), ddp_options, options, micro_steps, steps)
    expected = digest(simulated_run(layers(), square_loss, method, 3, steps, micro_steps=micro_steps))
    assert {d for d, _ in found} == {expected}


def resume(method: str, folder: str, stop: int) -> str:
    """Train, save, start anew from what was saved, train on."""
    import torch.distributed as dist

    rank = dist.get_rank()
    module = layers()
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.05)
    link = gw.attach(ddp, method)
    train(module, ddp, square_loss, rank, stop)
    gw.save(link, folder)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    link.close()
    module = layers(seed=9)
    module.load_state_dict(state)
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.02)
    link = gw.attach(ddp, method)
    gw.load(link, folder)
    train(module, ddp, square_loss, rank, STEPS - stop, start=stop)
    link.close()
    return digest(module)


@pytest.mark.parametrize("method", REMEMBERING, ids=repr)
def test_memory_survives_a_checkpoint(three_ranks: Any, method: gw.Method, tmp_path: Path) -> None:
    """Bit for bit, into other buckets."""
    found = three_ranks(resume, repr(method), str(tmp_path), 3)
    link_state: dict[str, Any] = {}
    module = layers()
    for part in range(2):
        link = gw.SimulatedLink(list(module.named_parameters()), method, 3)
        if part:
            link.load_state_dict(link_state)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        for step in range(3 * part, 3 * part + 3):
            rows = []
            for rank in range(3):
                optimizer.zero_grad()
                square_loss(module, rank, step).backward()
                rows.append(torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None]))
            link.scatter_(link.reduce_(torch.stack(rows)))
            optimizer.step()
        link_state = link.state_dict()
    assert set(found) == {digest(module)}


def scaled(method: str, bad_step: int) -> tuple[str, list[float], int, bool]:
    """Train under a GradScaler; one rank's gradient overflows in one step."""
    import torch.distributed as dist

    rank, module = dist.get_rank(), layers(2)
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    link = gw.attach(ddp, method, grad_scaler=scaler)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    sizes, kept = [], True
    for step in range(6):
        optimizer.zero_grad()
        loss = square_loss(ddp, rank, step) * (torch.inf if step == bad_step and rank == 1 else 1.0)
        before = {k: v.clone() for k, v in link.state_dict()["rank"].items()}
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        after = link.state_dict()["rank"]
        if step == bad_step:
            kept = set(before) == set(after) and all(torch.equal(before[k], after[k]) for k in after)
        sizes.append(max((float(v.abs().max()) for k, v in after.items() if k != "rank"), default=0.0))
    link.close()
    return digest(module), sizes, link.skipped_rounds, kept


@pytest.mark.parametrize(
    "method",
    ["errorfeedback", "diana", "ErrorFeedback(compressor=GRandK(cycle=4))", "ErrorFeedback(momentum=0.5)"],
)
def test_memory_is_unscaled_and_an_overflow_changes_none(three_ranks: Any, method: str) -> None:
    found = three_ranks(scaled, method, 3)
    assert len({d for d, _, _, _ in found}) == 1
    for _, sizes, skipped, kept in found:
        assert kept
        assert skipped == 1
        # Gradients of this loss are below one; times the scale of 1024 they would not be.
        assert 0 < max(sizes) < 1.0


def freeze_after_attach() -> str:
    module = layers(3)
    ddp = DistributedDataParallel(module)
    link = gw.Link(list(module.named_parameters()), "QSGDinf(blocks='model')")
    try:
        names = ["0.weight"]
        link.exchange(0, names, torch.zeros(64 * 64), last=True)
    except gw.GradwireError as error:
        return str(error)
    finally:
        link.close()
    del ddp
    return ""


def test_a_step_that_leaves_a_parameter_out_is_refused(three_ranks: Any) -> None:
    for sentence in three_ranks(freeze_after_attach):
        assert "needs the whole step" in sentence
