"""Casts: what is cast, what travels beside it in float32, and what that costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.exchange.protocols.bucket_plan import FEW_BYTES


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


def test_many_values_in_float32_travel_by_a_ring() -> None:
    gradients = workers(3, {"large": 4000, "kept": FEW_BYTES // 8 + 5})
    mean, traffic = exchanged("bf16", gradients, exclude=["kept"])
    expected = torch.stack([g["kept"] for g in gradients]).mean(0)
    torch.testing.assert_close(mean["kept"], expected, rtol=1e-6, atol=1e-6)
    assert traffic.sent_bytes == round(4 * 2 * 4000 / 3) + round(4 * 4 * (FEW_BYTES // 8 + 5) / 3)
