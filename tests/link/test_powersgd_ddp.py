"""PowerSGD and ACP-SGD under DDP: PyTorch's hook on one bucket, the same bits on all ranks on many."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.exchange.segments import Parameter, lay_out
from gradwire.methods.low_rank.factors import draw_factor, matrices
from modes import train
from oracle import batch, digest, layers, square_loss
from ranks import fresh_ranks

pytestmark = pytest.mark.ranks

DENSE_STEPS, STEPS = 2, 8
ONE_BUCKET_MB = 100


def gradients(ddp: nn.Module, module: nn.Module, rank: int) -> list[torch.Tensor]:
    """The gradients of each step, at parameters that stay as they are."""
    found = []
    for step in range(STEPS):
        module.zero_grad()
        square_loss(ddp, rank, step).backward()
        found.append(torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None]))
    return found


def of_the_hook(rank_of_matrix: int) -> list[torch.Tensor]:
    """PyTorch's hook, which starts from the factors that ours draws."""
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    module = layers()
    ddp = DistributedDataParallel(module, bucket_cap_mb=ONE_BUCKET_MB)
    names = {id(p): name for name, p in module.named_parameters()}
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=rank_of_matrix, start_powerSGD_iter=DENSE_STEPS, min_compression_rate=2
    )

    def hook(state: Any, bucket: Any) -> Any:
        # Not before: DDP lays its bucket out anew after the first step.
        if state.iter == DENSE_STEPS and bucket.index() not in state.q_memory_dict:
            described = [Parameter.of(names[id(p)], p) for p in bucket.parameters()]
            found = matrices(lay_out(described), rank_of_matrix, 2.0)
            factors = [
                draw_factor(m.segment.parameter.name, m.columns, m.rank, 0, DENSE_STEPS).t().reshape(-1) for m in found
            ]
            state.q_memory_dict[bucket.index()] = torch.cat(factors)
            state.p_memory_dict[bucket.index()] = torch.empty(sum(m.rows * m.rank for m in found))
        return powerSGD_hook.powerSGD_hook(state, bucket)

    ddp.register_comm_hook(state, lambda state, bucket: hook(state, bucket))
    return gradients(ddp, module, dist.get_rank())


def ours(rank_of_matrix: int) -> list[torch.Tensor]:
    import torch.distributed as dist

    module = layers()
    ddp = DistributedDataParallel(module, bucket_cap_mb=ONE_BUCKET_MB)
    link = gw.attach(ddp, gw.PowerSGD(matrix_rank=rank_of_matrix), warmup_steps=DENSE_STEPS)
    found = gradients(ddp, module, dist.get_rank())
    link.close()
    return found


@pytest.mark.parametrize("rank_of_matrix", [1, 2, 4])
def test_one_bucket_gives_the_gradients_of_pytorchs_hook(three_ranks: Any, rank_of_matrix: int) -> None:
    """Within rounding, over warm-started rounds with residuals."""
    theirs, found = three_ranks(of_the_hook, rank_of_matrix)[0], three_ranks(ours, rank_of_matrix)[0]
    assert len(theirs) == len(found) == STEPS
    for expected, got in zip(theirs, found):
        assert torch.allclose(got, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    # Not by chance: rounds differ from one another by far more.
    assert float((theirs[-1] - theirs[-2]).norm()) > 0.1 * float(theirs[-1].norm())


def twelve_buckets(steps: int, method: str) -> tuple[str, int, float, float]:
    """Train, and return the digest, the buckets of a step, the first loss and the last."""
    import torch.distributed as dist

    module, rank = layers(12), dist.get_rank()
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.001)
    link = gw.attach(ddp, method)
    with torch.no_grad():
        first = float(module(batch(rank, 0)).square().mean())
    train(module, ddp, square_loss, rank, steps)
    with torch.no_grad():
        last = float(module(batch(rank, 0)).square().mean())
    chosen = sum(link.record()["collectives"].values())
    link.close()
    return digest(module), chosen, first, last


@pytest.mark.parametrize("method", ["powersgd", "acp_sgd"])
def test_twelve_buckets_on_four_ranks_stay_equal(method: str) -> None:
    """PyTorch's hook needs one bucket on Gloo: with more, its collectives start in another order on each rank."""
    with fresh_ranks(4) as ranks:
        found = ranks(twelve_buckets, 15, method)
    assert len({row[0] for row in found}) == 1
    assert all(row[1] >= 12 for row in found)
    assert all(row[3] < 0.5 * row[2] for row in found)
