"""What tests of sharded modules run on each of four ranks."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire as gw

warnings.filterwarnings("ignore", module="torch")

VOCABULARY, WIDTH, LENGTH = 31, 24, 12


class Block(nn.Module):
    """A layer of a transformer: attention and a network of two linear maps, each behind a norm."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A small language model; no number of ranks above one divides its vocabulary."""

    def __init__(self, blocks: int = 2, width: int = WIDTH) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


def plain(blocks: int = 2, seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(blocks)


def sharded(mesh: DeviceMesh, blocks: int = 2, wrap: bool = True, seed: int = 0, **options: Any) -> Any:
    """Return the model sharded over a mesh, each of its blocks by itself."""
    model = plain(blocks, seed)
    if wrap:
        for block in model.blocks:
            fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


@cache
def kept_mesh(*dimensions: tuple[str, int]) -> DeviceMesh:
    """Return the mesh of the four ranks with some dimensions, the same one each time.

    Every mesh has groups of its own, which last as long as the process, and of which each has a thread that looks for
    messages a hundred times a second: hundreds of them would take all of the processor.
    """
    names, sizes = zip(*dimensions)
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def meshes() -> tuple[DeviceMesh, DeviceMesh]:
    """Return four ranks in a row, and two replicas of two shards."""
    return kept_mesh(("shard", 4)), kept_mesh(("replicate", 2), ("shard", 2))


def batch(rank: int, step: int, size: int = 4) -> torch.Tensor:
    """Return sequences in which each token is twice the one before, and one more."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    rows = [torch.randint(0, VOCABULARY, (size,), generator=draw)]
    for _ in range(LENGTH):
        rows.append((2 * rows[-1] + 1) % VOCABULARY)
    return torch.stack(rows, 1)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = batch(rank, step)
    return nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


def local_gradients(rank: int, step: int = 0, blocks: int = 2) -> dict[str, torch.Tensor]:
    """Return one rank's gradients of all parameters, by name, computed without any sharding."""
    model = plain(blocks)
    loss_of(model, rank, step).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def shards_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return this rank's part of every gradient."""
    return {n: p.grad.to_local().clone() for n, p in model.named_parameters() if p.grad is not None}  # type: ignore[attr-defined]


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter, whole."""
    return {n: p.detach().full_tensor().clone() for n, p in model.named_parameters()}  # type: ignore[attr-defined]


def mean_of(workers: list[dict[str, torch.Tensor]], spec: str, **options: Any) -> dict[str, torch.Tensor]:
    """Return the mean that a simulation of these workers gives in its first round."""
    link = gw.SimulatedLink(list(workers[0].items()), spec, len(workers), **options)
    rows = torch.stack([torch.cat([g.reshape(-1) for g in worker.values()]) for worker in workers])
    parts = link.reduce_(rows).split([g.numel() for g in workers[0].values()])
    return {name: part.view(g.shape) for part, (name, g) in zip(parts, workers[0].items())}


def train(model: nn.Module, rank: int, steps: range, learning_rate: float = 0.05) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=learning_rate), []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def refusal(build: Any) -> str:
    try:
        build()
    except gw.GradwireError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"
