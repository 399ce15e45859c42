"""Ranks that end while a sharded module trains: FSDP2's own collectives name them, too, by their global numbers."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradwire as gw
from ranks import Ranks, fresh_ranks, wait_until_watched
from sharded import batch, loss_of, meshes, plain, sharded

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]

KILLED = "rank 3 ended without a word (killed, or out of memory?)"


def train_until(kind: str, when: str) -> tuple[str, str, str]:
    """Train until rank 3 is killed; give the error, where it came from, and the link's own."""
    rank, (flat, mesh) = dist.get_rank(), meshes()
    model = sharded(mesh if kind == "HSDP" else flat)
    link = gw.attach(model, "terngrad" if kind == "HSDP" else "qsgd")
    wait_until_watched()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if when == "backward":
        block = model.blocks[0]
        block.register_full_backward_hook(lambda *_: end(link, rank))
    for step in range(4):
        optimizer.zero_grad()
        try:
            loss_of(model, rank, step).backward()
        except gw.ExchangeError as error:
            return str(error), type(error).__name__, str(link.error)
        optimizer.step()
        if when == "between steps":
            end(link, rank)
    return "no error", "", ""


def end(link: Any, rank: int) -> None:
    if rank == 3 and link.round == 2:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("kind", ["FSDP2", "HSDP"])
@pytest.mark.parametrize("when", ["between steps", "backward"])
def test_every_rank_names_the_one_that_was_killed_wherever_it_was(kind: str, when: str) -> None:
    with fresh_ranks(4, group_timeout_s=600) as ranks:
        ranks.start(train_until, kind, when)
        *found, (gone, _) = ranks.collect(60)
    assert gone == "gone"
    # In HSDP rank 0 has no exchange with rank 3, neither of FSDP2's nor of ours.
    for rank, (kind_, value) in enumerate(found):
        assert kind_ == "ok", value
        error, _, kept = value
        assert error.startswith(f"rank {rank} could not go on at ")
        assert f": {KILLED} [" in error
        assert kept == error


def lost_outside() -> str:
    """Let rank 3 end while no exchange is under way; give what the link of a rank says of it."""
    rank, (_, mesh) = dist.get_rank(), meshes()
    link = gw.attach(sharded(mesh), "terngrad")
    # Nobody is still about to attach.
    dist.barrier()
    if rank == 3:
        # Who has met nobody yet cannot be missed.
        while any(thread.name == "gradwire introductions" for thread in threading.enumerate()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(1000):
        if link.error is not None:
            return str(link.error)
        time.sleep(0.01)
    return "no error"


def test_a_links_error_is_set_though_no_exchange_was_under_way() -> None:
    with fresh_ranks(4, group_timeout_s=600) as ranks:
        ranks.start(lost_outside)
        *found, _ = ranks.collect(60)
    for rank, (kind, value) in enumerate(found):
        assert (kind, value) == (
            "ok",
            f"rank {rank} could not go on at its next exchange: {KILLED} [no exchange was under way]",
        )


def gathered(attaches: bool) -> list[torch.Tensor]:
    """Return outputs, with a gather that a user began early, before and after a second attachment."""
    rank, (_, mesh) = dist.get_rank(), meshes()
    model, outputs = sharded(mesh), []
    for _ in range(2):
        if attaches:
            link = gw.attach(model, "terngrad")
        model.blocks[0].unshard(async_op=True)
        outputs.append(model(batch(rank, 0)[:, :-1]).detach())
        if attaches:
            link.close()
    return outputs


def test_named_collectives_compute_what_fsdp2s_own_do(four_ranks: Ranks) -> None:
    for native, named in zip(four_ranks(gathered, False), four_ranks(gathered, True)):
        assert [torch.equal(a, b) for a, b in zip(native, named)] == [True, True]
    assert torch.equal(native[0], plain()(batch(3, 0)[:, :-1]).detach())


def chosen_before_and_after() -> str:
    """Choose another gather of weights after a method was attached; give what serves, module by module."""
    _, (_, mesh) = dist.get_rank(), meshes()
    model = sharded(mesh)
    link = gw.attach(model, "terngrad")
    weights = gw.compress_weights(model)
    served = {
        type(part._get_fsdp_state()._fsdp_param_group._all_gather_comm).__name__ for part in (model, *model.blocks)
    }
    weights.close()
    link.close()
    return " ".join(sorted(served))


def test_weights_are_compressed_beside_an_attached_method(four_ranks: Ranks) -> None:
    assert set(four_ranks(chosen_before_and_after)) == {"_Gather"}
