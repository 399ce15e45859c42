"""Sharded weights, gathered by what changed of them: four real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import gradwire as gw
from gradwire.errors import ExchangeError, IncompatibleError
from ranks import Ranks
from sharded import loss_of, meshes, sharded

pytestmark = pytest.mark.ranks

OPERATOR = "QSGDinf(levels=7, block_size=64)"


def gathered(model: Any) -> list[torch.Tensor]:
    """Return the root's and the blocks' parameters as forward computes with them."""
    found: list[torch.Tensor] = []
    for part in (model, *model.blocks):
        part.unshard()
        found += [p.detach().clone() for p in part.parameters(recurse=part is not model)]
        part.reshard()
    return found


def steps(model: Any, optimizer: torch.optim.Optimizer, rank: int, which: range) -> None:
    for step in which:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def followed(operator: str) -> dict[str, Any]:
    """Train, and tell how far what is gathered is from the weights, and from what other ranks gather."""
    rank, (flat, _) = dist.get_rank(), meshes()
    model, plain = sharded(flat), sharded(flat)
    link = gw.compress_weights(model, operator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    first = all(torch.equal(a, b) for a, b in zip(gathered(model), gathered(plain)))
    at_first = link.traffic().sent_bytes
    drifts, sent = [], []
    for step in range(12):
        before = link.traffic().sent_bytes
        steps(model, optimizer, rank, range(step, step + 1))
        sent.append(link.traffic().sent_bytes - before)
        drifts.append(max(link.drift().values()))
    whole = torch.cat([p.reshape(-1) for p in gathered(model)])
    everyone = [torch.empty_like(whole) for _ in range(4)]
    dist.all_gather(everyone, whole)
    moved = [
        (p.full_tensor().detach() - q.full_tensor().detach()).norm()
        for p, q in zip(model.parameters(), plain.parameters())
    ]
    size = [q.full_tensor().detach().norm() for q in plain.parameters()]
    link.close()
    return {
        "first": first,
        "first bytes": at_first,
        "drifts": drifts,
        "sent": sent,
        "alike": all(torch.equal(everyone[0], other) for other in everyone),
        "moved": float(torch.stack(moved).norm() / torch.stack(size).norm()),
        "elements": sum(p.numel() for p in plain.parameters()),
    }


@pytest.mark.parametrize("operator", [OPERATOR, "EDEN(bits=4, block_size=256)"])
def test_all_ranks_know_the_same_and_it_follows_the_weights(four_ranks: Ranks, operator: str) -> None:
    """The first gather is exact. Later ones err by a part of one step's difference, however many came before."""
    for found in four_ranks(followed, operator):
        assert found["first"]
        assert found["alike"]
        # With four bits the error of a difference is below a third of it, and all steps together moved this far.
        assert 0 < max(found["drifts"]) < found["moved"] / 3
        assert max(found["drifts"][6:]) < 2 * max(found["drifts"][1:6])


def test_of_four_bits_an_eighth_is_sent_and_nothing_where_nothing_changed(four_ranks: Ranks) -> None:
    """Forward gathers what the step before changed. Backward's gather, of the same weights, sends its flag alone."""
    for found in four_ranks(followed, OPERATOR):
        exact = 4 * found["elements"] * 3 / 4
        assert found["first bytes"] == pytest.approx(exact, rel=0.1)
        # The first step's forward finds nothing changed either.
        assert found["sent"][0] < exact / 20
        # Four bits, scales of blocks of 64, headers, lengths and flags of three units, twice.
        for sent in found["sent"][1:]:
            assert exact / 8 < sent < exact / 8 * 1.5


def with_floats() -> list[float]:
    """Return the losses of a training whose differences travel in float32, and of one without."""
    rank, (flat, _) = dist.get_rank(), meshes()
    found = []
    for operator in (None, "FP32()"):
        model = sharded(flat)
        link = None if operator is None else gw.compress_weights(model, operator)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        steps(model, optimizer, rank, range(5))
        found.append(loss_of(model, rank, 5).item())
        if link is not None:
            link.close()
    return found


def test_differences_in_float32_lose_nothing_but_roundings(four_ranks: Ranks) -> None:
    for native, ours in four_ranks(with_floats):
        assert ours == pytest.approx(native, rel=1e-5)


def replicas() -> dict[str, Any]:
    """Train two replicas of two shards, with the gradients' exchange compressed as well; then close and go on."""
    rank, (_, mesh) = dist.get_rank(), meshes()
    model = sharded(mesh)
    weights, link = gw.compress_weights(model, OPERATOR), gw.attach(model, "terngrad", min_numel=256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    steps(model, optimizer, rank, range(4))
    whole = torch.cat([p.reshape(-1) for p in gathered(model)])
    everyone = [torch.empty_like(whole) for _ in range(4)]
    dist.all_gather(everyone, whole)
    weights.close()
    again = gw.compress_weights(model, OPERATOR)
    exact = torch.cat([p.reshape(-1) for p in gathered(model)])
    link.close()
    again.close()
    closed = ""
    try:
        gathered(model)
    except ExchangeError as error:
        closed = str(error)
    return {
        "alike": all(torch.equal(everyone[0], other) for other in everyone),
        "off": float((exact - whole).norm() / exact.norm()),
        "closed": closed,
    }


def test_replicas_know_the_same_and_a_new_link_begins_exactly(four_ranks: Ranks) -> None:
    for found in four_ranks(replicas):
        assert found["alike"]
        assert 0 < found["off"] < 0.02
        assert "was closed" in found["closed"]


def with_a_nan() -> list[bool]:
    """Put a NaN into one rank's shard, gather, and put a number in its place."""
    rank, (flat, _) = dist.get_rank(), meshes()
    model = sharded(flat)
    link = gw.compress_weights(model, OPERATOR)
    gathered(model)
    shard = model.blocks[0].up.weight.detach().to_local()
    kept = shard[0, 0].item()
    if rank == 2:
        shard[0, 0] = float("nan")
    seen = [bool(torch.isnan(torch.cat([p.reshape(-1) for p in gathered(model)])).any())]
    shard[0, 0] = kept
    exact = gathered(sharded(flat))
    seen.append(all(torch.equal(a, b) for a, b in zip(gathered(model), exact)))
    link.close()
    return seen


def test_what_is_not_finite_is_seen_and_leaves_no_trace(four_ranks: Ranks) -> None:
    assert four_ranks(with_a_nan) == [[True, True]] * 4


def refused() -> list[str]:
    _, (flat, _) = dist.get_rank(), meshes()
    found = []
    cases: list[tuple[Any, str]] = [
        (nn.Linear(2, 2), OPERATOR),
        (sharded(flat), "terngrad"),
        (sharded(flat), "ErrorFeedback()"),
    ]
    twice = sharded(flat)
    link = gw.compress_weights(twice)
    cases.append((twice, OPERATOR))
    by_two = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(by_two[0], mesh=flat, reshard_after_forward=2)
    cases.append((fully_shard(by_two, mesh=flat), OPERATOR))
    for module, operator in cases:
        try:
            gw.compress_weights(module, operator)
        except IncompatibleError as error:
            found.append(str(error))
    link.close()
    return found


def test_what_cannot_be_is_refused_by_name(four_ranks: Ranks) -> None:
    for found in four_ranks(refused):
        words = (
            "sharded by torch.distributed.fsdp",
            "share_scaler=False",
            "an operator on one vector",
            "close that link",
            "module '0' is resharded after forward over fewer ranks",
        )
        assert len(found) == len(words)
        assert all(word in sentence for word, sentence in zip(words, found))
