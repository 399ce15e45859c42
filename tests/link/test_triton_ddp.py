"""Whole training steps under DDP with Triton's kernels, interpreted on CPU tensors: the bits of the backend cpu."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.kernels import CODERS
from gradwire.kernels.triton_core.backend import SERVED
from gradwire.methods.registry import METHODS
from triton_interpreter import interpreted

# NumPy warns of products with an infinity, which kernels compute and do not use.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


STEPS, INTERPRETED = 12, 6
"""Steps in which the loss falls, and those that are few enough for an interpreter."""


def train(method: str, backend: str, steps: int) -> tuple[list[float], list[float], str]:
    """Return the losses, the parameters at the end, and who computed."""
    if backend == "triton":
        interpreted()
    rank = torch.distributed.get_rank()
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 7))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    link = gw.attach(ddp, method, min_numel=0, seed=3, backend=backend, check=True)
    generator, losses = torch.Generator().manual_seed(rank), []
    for _ in range(steps):
        x = torch.randn(16, 30, generator=generator)
        loss = F.cross_entropy(ddp(x), x[:, :7].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    found = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()
    return losses, found, link.record()["backend"]


@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_a_training_has_the_bits_of_the_backend_cpu(three_ranks: Any) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    learned = three_ranks(train, "TernGrad(clip=2.5)", "cpu", STEPS)
    expected = three_ranks(train, "TernGrad(clip=2.5)", "cpu", INTERPRETED)
    three_ranks.start(train, "TernGrad(clip=2.5)", "triton", INTERPRETED)
    answers = three_ranks.collect(timeout_s=500)
    assert [status for status, _ in answers] == ["ok"] * 3, answers
    found = [value for _, value in answers]
    assert [backend for _, _, backend in found] == ["triton"] * 3
    for (losses, parameters, _), (other_losses, other_parameters, _) in zip(expected, found):
        assert losses == other_losses
        assert parameters == other_parameters
    assert learned[0][0][:INTERPRETED] == expected[0][0]
    assert sum(learned[0][0][-5:]) < sum(learned[0][0][:5])


SERVABLE = [kind() for kind in METHODS if {"moments"} <= set(kind().traits.kernels) <= {*SERVED, *CODERS}]


@pytest.mark.parametrize(
    "method",
    [m for m in SERVABLE if not (m.traits.needs_optimizer or m.traits.outcomes_differ or m.traits.sharded)],
    ids=repr,
)
def test_a_method_whose_families_are_served_has_the_bits_of_the_backend_cpu(method: gw.Method) -> None:
    interpreted()
    x = torch.randn(2, 700, generator=torch.Generator().manual_seed(1))
    means = []
    for backend in ("cpu", "triton"):
        like = {"a": torch.empty(20, 30), "b": torch.empty(100)}.items()
        link = gw.SimulatedLink(like, method, 2, min_numel=0, seed=3, backend=backend)
        # What a method remembers acts on the next round.
        rounds = 1 if method.properties.state == "none" else 2
        means.append(torch.stack([link.reduce_(x.clone()).clone() for _ in range(rounds)]))
    assert torch.equal(*means)


def test_a_method_that_needs_another_family_is_refused_by_name() -> None:
    interpreted()
    link = gw.SimulatedLink({"a": torch.empty(900)}.items(), "TopK(density=0.1)", 2, min_numel=0, backend="triton")
    with pytest.raises(gw.BackendError, match="has no kernels of the family 'indices'"):
        link.reduce_(torch.ones(2, 900))
