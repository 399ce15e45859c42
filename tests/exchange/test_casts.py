"""Casts: what is cast, what travels beside it in float32, and what that costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.exchange.drivers import Meter, simulate_ranks
from gradwire.exchange.protocols import Context
from gradwire.exchange.protocols.bucket_plan import FEW_BYTES
from gradwire.exchange.segments import Parameter, lay_out
from gradwire.kernels import get_kernels
from plans import make_plan


def workers(count: int, sizes: dict[str, int]) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [{n: torch.randn(size, generator=generator) for n, size in sizes.items()} for _ in range(count)]


def exchanged(
    method: str, gradients: list[dict[str, torch.Tensor]], **options: Any
) -> tuple[dict[str, torch.Tensor], gw.Traffic]:
    first = gradients[0]
    link = gw.SimulatedLink(((n, torch.zeros(g.shape)) for n, g in first.items()), method, len(gradients), **options)
    mean = link.reduce_(torch.stack([torch.cat(list(g.values())) for g in gradients]))
    return dict(zip(first, mean.split([g.numel() for g in first.values()]))), link.traffic()


@pytest.mark.parametrize("method", ["bf16", "fp16"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_small_parameters_are_the_float32_mean_in_the_order_of_ranks(method: str, world_size: int) -> None:
    gradients = workers(world_size, {"large": 4000, "small": 100, "other": 37})
    mean, traffic = exchanged(method, gradients, min_numel=1024)
    for name in ("small", "other"):
        total = gradients[0][name].clone()
        for g in gradients[1:]:
            total += g[name]
        assert torch.equal(mean[name], total * (1.0 / world_size))
    exact = torch.stack([g["large"] for g in gradients]).mean(0)
    assert not torch.equal(mean["large"], exact)
    assert float((mean["large"] - exact).abs().max()) < 0.05
    ring = round(2 * (2 * 4000) * (world_size - 1) / world_size)
    # The header, and 137 values rounded up to 140.
    assert traffic.sent_bytes == ring + (world_size - 1) * (32 + 4 * 140)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("world_size", [3, 8])
def test_sixteen_bits_that_are_kept_have_the_mean_and_not_its_sums(dtype: torch.dtype, world_size: int) -> None:
    """The sum of float16 gradients, scaled as they are, overflows; those of bfloat16 lose a bit with each doubling."""
    generator = torch.Generator().manual_seed(4)
    parameters = [Parameter("large", (4000,), (1,), dtype), Parameter("kept", (100,), (1,), dtype)]
    large, kept = lay_out(parameters)
    plan = make_plan(
        gw.FP16(), [large, replace(kept, dense=True)], kernels=get_kernels(), world_size=world_size,
        collective="all_reduce", seed=0, chunk_numel=1 << 20,
    )  # fmt: skip
    rows = (40_000 + 20_000 * torch.rand(world_size, 4100, generator=generator)).to(dtype)
    expected = rows[:, 4000:].double().mean(0)
    runs = [plan.run(Context(r, world_size, 0, chunk=1), row, None) for r, row in enumerate(rows)]
    simulate_ranks(runs, [Meter(r) for r in range(world_size)])
    # Half a unit in the last place, and what float32 rounds.
    assert float((rows[0, 4000:] / expected - 1).abs().max()) < 0.501 * torch.finfo(dtype).eps


def test_many_values_in_float32_travel_by_a_ring() -> None:
    gradients = workers(3, {"large": 4000, "kept": FEW_BYTES // 8 + 5})
    mean, traffic = exchanged("bf16", gradients, exclude=["kept"])
    expected = torch.stack([g["kept"] for g in gradients]).mean(0)
    torch.testing.assert_close(mean["kept"], expected, rtol=1e-6, atol=1e-6)
    assert traffic.sent_bytes == round(4 * 2 * 4000 / 3) + round(4 * 4 * (FEW_BYTES // 8 + 5) / 3)
