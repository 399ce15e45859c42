"""Compiled modules, and adapters beside frozen weights: the same exchanges as without.

The compiler's backends run graphs with PyTorch's own operations, so that no C++ compiler is needed.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from ranks import Ranks

pytestmark = pytest.mark.ranks

METHOD = "ErrorFeedback(compressor=TopK(density=0.2))"


def built() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 5))


def steps(module: Any, parameters: list[nn.Parameter], count: int = 4) -> None:
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    for step in range(count):
        draw = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
        optimizer.zero_grad()
        module(torch.randn(8, 20, generator=draw)).square().mean().backward()
        optimizer.step()


def with_ddp(when: str) -> tuple[torch.Tensor, set[str]]:
    """Train, compiled before or after the method is attached, or before it is wrapped, or not at all."""
    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    inside: Any = torch.compile(built(), backend="aot_eager") if when == "inside" else built()
    ddp = DistributedDataParallel(inside)
    module: Any = torch.compile(ddp, backend="aot_eager") if when == "before" else ddp
    link = gw.attach(ddp, METHOD, min_numel=0)
    if when == "after":
        module = torch.compile(ddp, backend="aot_eager")
    steps(module, list(ddp.parameters()))
    found = torch.cat([p.detach().reshape(-1) for p in ddp.parameters()]), set(link.state_dict()["rank"])
    link.close()
    return found


@pytest.mark.parametrize("when", ["before", "after", "inside"])
def test_a_compiled_ddp_module_has_the_bits_of_the_plain_one(three_ranks: Ranks, when: str) -> None:
    """And the names that it had: what is kept of it fits the plain module."""
    for (plain, kept), (compiled, again) in zip(three_ranks(with_ddp, "never"), three_ranks(with_ddp, when)):
        assert torch.equal(plain, compiled)
        assert kept == again
        assert "residual/0.weight" in kept


def test_what_compile_returned_is_refused_by_name() -> None:
    with pytest.raises(gw.IncompatibleError, match=r"before or after torch\.compile"):
        gw.attach(torch.compile(built(), backend="eager"), METHOD)  # type: ignore[arg-type]


def with_fsdp(compiled: bool) -> torch.Tensor:
    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    mesh, model = init_device_mesh("cpu", (3,)), built()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    sharded: Any = fully_shard(model, mesh=mesh)
    link = gw.attach(sharded, METHOD, min_numel=0)
    steps(torch.compile(sharded, backend="aot_eager") if compiled else sharded, list(sharded.parameters()))
    found = torch.cat([p.full_tensor().detach().reshape(-1) for p in sharded.parameters()])
    link.close()
    return found


def test_a_compiled_sharded_module_has_the_bits_of_the_plain_one(three_ranks: Ranks) -> None:
    for plain, compiled in zip(three_ranks(with_fsdp, False), three_ranks(with_fsdp, True)):
        assert torch.equal(plain, compiled)


class Adapted(nn.Module):
    """A frozen linear layer with a trained product of two narrow matrices beside it, as LoRA has it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / 10)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T  # type: ignore[no-any-return]


def with_adapters() -> tuple[bool, bool, int, int]:
    model = built()
    adapted = nn.Sequential(*(Adapted(part) if isinstance(part, nn.Linear) else part for part in model))
    frozen = [p.clone() for p in adapted.parameters() if not p.requires_grad]
    ddp = DistributedDataParallel(adapted)
    link = gw.attach(ddp, METHOD, min_numel=0, check=True)
    steps(ddp, [p for p in ddp.parameters() if p.requires_grad])
    traffic, kept = link.traffic(), link.state_dict()["rank"]
    link.close()
    same = all(torch.equal(a, b) for a, b in zip(frozen, (p for p in adapted.parameters() if not p.requires_grad)))
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    return same, all("base" not in key for key in kept), traffic.elements // 4, trained


def test_of_adapters_beside_frozen_weights_only_they_are_exchanged(three_ranks: Ranks) -> None:
    for same, none_kept, elements, trained in three_ranks(with_adapters):
        assert same
        assert none_kept
        assert elements == trained
