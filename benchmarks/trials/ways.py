"""Kinds of links, each with a small training that uses it, for trials that disturb trainings.

A worker is a script as a user would write it: it runs on every rank after ``init_process_group``.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from benchmarks.trials.moments import ATTACH, BETWEEN, MOMENTS, WITHIN
from gradwire.graphs import GCN, Graph, partition, subgraphs, symmetrised

WIDTH, STEPS = 48, 60


@dataclass(frozen=True)
class Training:
    """A link that was built, and the module whose gradients or parameters it exchanges."""

    link: Any
    module: nn.Module

    def digest(self) -> int:
        """Return a checksum of the bits of this rank's parameters and gradients, or of its shards of them."""
        found = 0
        for tensor in (t for p in self.module.parameters() for t in (p, p.grad) if t is not None):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            found = zlib.crc32(local.detach().contiguous().numpy().tobytes(), found)
        return found


Worker = Iterator[Any]
"""Yields None when its link is to be built next, then the :class:`Training`, then once after each step."""


def network(width: int) -> nn.Sequential:
    """Build four layers."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))


def loss_of(module: nn.Module, width: int, rank: int, step: int) -> torch.Tensor:
    """Return the loss of a batch of its own."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    loss: torch.Tensor = module(torch.randn(8, width, generator=draw)).square().mean()
    return loss


def steps(module: nn.Module, width: int, optimizer: torch.optim.Optimizer, after: Callable[[], object] = int) -> Worker:
    """Take steps for ever; ``after`` is called behind each backward pass."""
    for step in itertools.count():
        optimizer.zero_grad()
        loss_of(module, width, dist.get_rank(), step).backward()
        after()
        optimizer.step()
        yield


def ddp(spec: str, **options: Any) -> Callable[[int], Worker]:
    """Train by DDP, in several buckets."""

    def worker(width: int) -> Worker:
        module = DistributedDataParallel(network(width), bucket_cap_mb=0.01)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        yield
        yield Training(gw.attach(module, spec, optimizer=optimizer, min_numel=1, **options), module)
        yield from steps(module, width, optimizer)

    return worker


def loop(spec: str) -> Callable[[int], Worker]:
    """Train in a loop without DDP."""

    def worker(width: int) -> Worker:
        module = network(width)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        yield
        link = gw.Link(module.named_parameters(), spec, optimizer=optimizer, min_numel=1)
        yield Training(link, module)
        yield from steps(module, width, optimizer, link.reduce_)

    return worker


def as_patient_as_the_default_group(mesh: DeviceMesh) -> None:
    """Give the groups of a mesh the default group's timeout: PyTorch gives them 30 minutes, whatever that has."""
    cpu = torch.device("cpu")
    timeout = dist.distributed_c10d._get_default_group()._get_backend(cpu).options._timeout
    for group in mesh.get_all_groups():
        backend = group._get_backend(cpu)
        backend._set_default_timeout(timeout)
        backend.options._timeout = timeout


def sharded(shape: tuple[int, ...], attach: Callable[[Any], Any]) -> Callable[[int], Worker]:
    """Train a module that FSDP2 shards over a mesh, each layer by itself."""

    def worker(width: int) -> Worker:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        as_patient_as_the_default_group(mesh)
        module = network(width)
        for part in (*module, module):
            fully_shard(part, mesh=mesh)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        yield
        yield Training(attach(module), module)
        yield from steps(module, width, optimizer)

    return worker


def halos(spec: str) -> Callable[[int], Worker]:
    """Train on the parts of a random graph."""

    def worker(width: int) -> Worker:
        draw = torch.Generator().manual_seed(0)
        edges, labels = torch.randint(0, 60, (2, 150), generator=draw), torch.randint(0, 3, (60,), generator=draw)
        training, features = torch.ones(60, dtype=torch.bool), torch.randn(60, 5, generator=draw)
        graph = Graph(symmetrised(edges, 60), features, labels, training, ~training)
        part = subgraphs(graph, partition(graph, dist.get_world_size(), "random", seed=1))[dist.get_rank()]
        torch.manual_seed(0)
        model = GCN(5, 3, width=8, layers=2)
        yield
        halo = gw.HaloLink(part.boundary, spec, steps=STEPS)
        yield Training(halo, model)
        while True:
            model.zero_grad()
            cross_entropy(model(part.features, part, halo), part.labels).backward()
            halo.next_round()
            yield

    return worker


@dataclass(frozen=True)
class Way:
    """A kind of link, and how many ranks train by it."""

    ranks: int
    worker: Callable[[int], Worker]
    moments: tuple[str, ...] = MOMENTS


WAYS = {
    "DDP, all-gather": Way(3, ddp("qsgd", collective="all_gather")),
    "DDP, two-shot": Way(3, ddp("terngrad", collective="two_shot")),
    "DDP, sums of the backend": Way(4, ddp("fp16")),
    "Link": Way(3, loop("diana")),
    "FSDP2": Way(4, sharded((4,), lambda module: gw.attach(module, "qsgd", min_numel=1))),
    "HSDP": Way(4, sharded((2, 2), lambda module: gw.attach(module, "terngrad", min_numel=1))),
    "weights": Way(4, sharded((4,), gw.compress_weights), (BETWEEN, WITHIN, ATTACH)),
    "gossip": Way(4, loop("DPSGD(graph='ring')")),
    "gTopK": Way(4, ddp("GTopK(density=0.05)")),
    "two levels": Way(4, ddp("Hierarchical(QSGDinf(), node_size=2)")),
    "DiLoCo": Way(3, ddp("DiLoCo(every=2)")),
    "streaming DiLoCo": Way(3, ddp("StreamingDiLoCo(every=4, fragments=2, delay=1)")),
    "halos": Way(3, halos("bf16"), (BETWEEN, WITHIN, ATTACH)),
}

MORE_WAYS = WAYS | {"gossip of changes": Way(4, loop("ChocoSGD(graph='ring')"))}
"""The ways, and those that trials of kills do not have."""
