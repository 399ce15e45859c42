"""NCCL between ranks that share a GPU: operations, links, DistributedDataParallel and FSDP2."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from real_gpu import GPU, real_gpu
from test_devices import ON_DEVICE, plain
from test_nccl_transport import operations
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.exchange.deferred_checks import AT_ONCE
from gradwire.exchange.drivers.transports import GlooTransport, NCCLTransport
from gradwire.exchange.ops import Op

pytestmark = pytest.mark.ranks

WAIT = timedelta(seconds=60)


def moved(op: Op) -> Op:
    """Return an operation with its payloads on the GPU; lengths stay in main memory."""
    for name in ("value", "send", "recv"):
        if isinstance(getattr(op, name, None), torch.Tensor):
            object.__setattr__(op, name, getattr(op, name).to(GPU))
    return op


def carried() -> list[tuple[str, bool, bool]]:
    """Tell of each operation whether the reply, and what arrived, is that of Gloo's transport."""
    rank, n = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    gloo, host = (GlooTransport(dist.PrefixStore(name, store), rank, n, WAIT) for name in ("gloo", "host"))
    found = []
    with real_gpu() as gpu:
        nccl = NCCLTransport.of(dist.PrefixStore("nccl", store), rank, n, WAIT, host, gpu, AT_ONCE)
        for ours, theirs in zip(operations(rank, n), operations(rank, n)):
            reply = nccl.execute(moved(ours), nullcontext).cpu()
            expected = gloo.execute(theirs, nullcontext)
            told = [
                torch.equal(getattr(ours, name), getattr(theirs, name))
                for name in ("arrived", "length")
                if isinstance(getattr(ours, name, None), torch.Tensor)
            ]
            found.append((type(ours).__name__, torch.equal(reply, expected), all(told)))
    nccl.close(broken=False)
    for transport in (gloo, host):
        transport.close(broken=False)
    return found


def test_every_operation_brings_what_it_brings_by_gloo(nccl_ranks: Any) -> None:
    for found in nccl_ranks(carried):
        assert found == [(name, True, True) for name, *_ in found]
        assert len(found) == 12


def by_nccl(method: str) -> tuple[list[torch.Tensor], Any]:
    from real_gpu import on_the_gpu

    found, record, _ = on_the_gpu("on_gpu", method, {})
    return found, record


@pytest.mark.parametrize("method", ON_DEVICE)
def test_payloads_go_by_nccl_with_the_bits_of_main_memory(nccl_ranks: Any, method: str) -> None:
    found = nccl_ranks(by_nccl, method)
    for (means, record), (others, other) in zip(nccl_ranks(plain, method, {}), found):
        assert (other["transport"], other["kernels_on"]) == ("nccl", "cuda:0")
        assert other["sent_bytes"] == record["sent_bytes"]
        for mean, theirs, first in zip(means, others, found[0][0]):
            assert torch.equal(theirs, first)
            # The casts are the backend's own sums, in its own order. Three values take two additions on each side.
            # Partial sums are below 8, so that each rounding errs by at most half of a last place: 2^-6 with bfloat16's
            # 8 bits, 2^-22 with float32's 24.
            unit = {"bf16": 4 * 2.0**-6, "fp32": 4 * 2.0**-22}.get(method, 0.0)
            assert float((mean - theirs).abs().max()) <= unit


def steps_of(
    model: Any, steps: int, scaler: torch.amp.GradScaler | None = None, dtype: torch.dtype | None = None
) -> list[float]:
    """Train a module on this rank's data, in mixed precision if a dtype is given; return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = scaler or torch.amp.GradScaler("cuda", enabled=False)
    draw, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(steps):
        x = torch.randn(16, 30, generator=draw).to(GPU)
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            loss = F.cross_entropy(model(x), x[:, :7].argmax(1))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss))
    return losses


def trained(method: str, options: dict[str, Any], steps: int = 12) -> tuple[list[float], list[float], dict[str, Any]]:
    """Train under DDP on the GPU; return losses, parameters and the link's record."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 7)).to(GPU)
    ddp = DistributedDataParallel(model)
    link = gw.attach(ddp, method, seed=3, check=True, **options)
    losses = steps_of(ddp, steps)
    found, record = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist(), link.record()
    link.close()
    return losses, found, record


@pytest.mark.parametrize("method", ["TernGrad(clip=2.5)", "EDEN(bits=4)", "ErrorFeedback(compressor=QSGDinf())"])
def test_a_training_by_nccl_has_the_bits_of_one_in_main_memory(nccl_ranks: Any, method: str) -> None:
    options: list[dict[str, Any]] = [{"backend": "cpu"}, {"transport": "staged"}, {"transport": "nccl"}]
    expected, *others = [nccl_ranks(trained, method, chosen) for chosen in options]
    for found, (kernels, transport) in zip(others, [("cuda:0", "staged"), ("cuda:0", "nccl")]):
        for (losses, parameters, _), (others_losses, others_parameters, record) in zip(expected, found):
            assert (record["kernels_on"], record["transport"]) == (kernels, transport)
            assert losses == others_losses
            assert parameters == others_parameters
    assert len({tuple(parameters) for _, parameters, _ in expected}) == 1
    assert sum(expected[0][0][-4:]) < sum(expected[0][0][:4])


@pytest.mark.parametrize("method", ["powersgd", "ErrorFeedback(TopK(density=0.1))", "acp_sgd"])
def test_methods_that_compute_in_main_memory_train(nccl_ranks: Any, method: str) -> None:
    found = nccl_ranks(trained, method, {}, 30)
    assert {record["kernels_on"] for *_, record in found} == {"cpu"}
    assert len({tuple(parameters) for _, parameters, _ in found}) == 1
    assert sum(found[0][0][-4:]) < sum(found[0][0][:4])


def sharded(method: str, replicas: int, options: dict[str, Any]) -> tuple[list[float], list[float], dict[str, Any]]:
    """Train a sharded module on the GPU; return losses, parameters and the link's record."""
    torch.backends.cuda.matmul.allow_tf32 = False
    n = dist.get_world_size()
    names, sizes = ("shard",), (n,)
    if replicas > 1:
        names, sizes = ("replicate", "shard"), (replicas, n // replicas)  # type: ignore[assignment]
    mesh = init_device_mesh("cuda", sizes, mesh_dim_names=names)
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 7)).to(GPU)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    link = gw.attach(model, method, seed=3, **options)
    losses = steps_of(model, 10)
    found: list[float] = torch.cat([p.detach().full_tensor().reshape(-1) for p in model.parameters()]).tolist()  # type: ignore[attr-defined]
    record = link.record()
    link.close()
    return losses, found, record


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("method", ["terngrad", "EDEN(bits=4)", "errorfeedback"])
def test_a_sharded_training_has_the_bits_of_one_in_main_memory(
    four_nccl_ranks: Any, method: str, replicas: int
) -> None:
    options: list[dict[str, Any]] = [{"backend": "cpu"}, {"transport": "staged"}, {"transport": "nccl"}]
    expected, *others = [four_nccl_ranks(sharded, method, replicas, chosen) for chosen in options]
    for found, transport in zip(others, ("staged", "nccl")):
        for (losses, parameters, _), (others_losses, others_parameters, record) in zip(expected, found):
            assert record["transport"] == transport
            assert losses == others_losses
            assert parameters == others_parameters
    assert sum(expected[0][0][-4:]) < sum(expected[0][0][:4])


def scaled(dtype: torch.dtype) -> tuple[list[float], int]:
    """Train in mixed precision, with a scaler where float16 needs one; return losses and skipped rounds."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 7)).to(GPU)
    ddp = DistributedDataParallel(model)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24, enabled=dtype == torch.float16)
    link = gw.attach(ddp, "terngrad", seed=3, grad_scaler=scaler if scaler.is_enabled() else None)
    losses = steps_of(ddp, 40, scaler, dtype)
    skipped = link.skipped_rounds
    link.close()
    return losses, skipped


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_mixed_precision_trains(nccl_ranks: Any, dtype: torch.dtype) -> None:
    found = nccl_ranks(scaled, dtype)
    for losses, skipped in found:
        assert sum(losses[-8:]) < sum(losses[:8])
        # 2^24 times a gradient is beyond float16 at first.
        assert (skipped > 0) == (dtype == torch.float16)
