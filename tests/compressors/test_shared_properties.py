"""What every method promises, over every row of the case table."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradwire as gw
from cases import ALL, COMPRESSORS

WORLD_SIZES = [1, 2, 3, 4, 5, 8, 17, 64]


def gradients(world_size: int, numel: int, seed: int = 0, tail: float = 0.5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(world_size, numel, generator=generator)
    return g * torch.exp(tail * torch.randn(world_size, numel, generator=generator))


def clipped(g: torch.Tensor, method: gw.Method) -> torch.Tensor:
    """What an unbiased method is unbiased for."""
    clip = getattr(method, "clip", None)
    if clip is None:
        return g
    limit = (g.double().std(dim=1, correction=0, keepdim=True) * clip).float()
    return g.clamp(-limit, limit)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("method", ALL, ids=repr)
def test_error_is_what_is_declared(method: gw.Method, world_size: int) -> None:
    """Above a floor as well as below a ceiling, so that a method which does nothing fails."""
    g = gradients(world_size, 5000)
    found = gw.simulate(g, method)
    error = float((found.mean - g.mean(0)).norm() / g.mean(0).norm())
    if isinstance(method, gw.TernGrad):
        f = clipped(g, method).double()
        scale = f.abs().amax(1)
        if method.share_scaler:
            scale = scale.max().expand_as(scale)
        # E |g~ - f|^2 = s |f|_1 - |f|_2^2 for each worker (the sheet, property 2); workers are independent.
        variance = float((scale * f.abs().sum(1) - f.square().sum(1)).sum()) / world_size**2
        noise = float((found.mean.double() - f.mean(0)).square().sum())
        # The squared error is a sum of 5000 independent terms of that mean; its relative deviation is below 10 %.
        assert noise == pytest.approx(variance, rel=0.35)
    else:
        limit = {"fp32": 2e-7, "fp16": 2e-3, "bf16": 2e-2}[method.name] * math.sqrt(world_size)
        assert error <= limit
        assert error > 0 or method.name == "fp32"


@pytest.mark.parametrize("method", [m for m in ALL if m.properties.unbiased], ids=repr)
def test_unbiased(method: gw.Method) -> None:
    """The mean over rounds tends to the (clipped) mean; tolerance from the variance and the number of draws."""
    world_size, numel, draws = 3, 400, 600
    g = gradients(world_size, numel)
    total = torch.zeros(numel, dtype=torch.float64)
    for round in range(draws):
        total += gw.simulate(g, method, round=round).mean.double()
    f = clipped(g, method).double()
    scale = f.abs().amax(1, keepdim=True)
    if getattr(method, "share_scaler", True):
        scale = scale.max().expand_as(scale)
    deviation = ((scale * f.abs() - f.square()).clamp(min=0).sum(0) / world_size**2 / draws).sqrt()
    if method.name == "fp32":
        deviation = torch.full_like(deviation, 1e-7)
    z = (total / draws - f.mean(0)) / deviation.clamp(min=1e-7)
    # 400 standard normal values: the largest beyond 4.8 has probability 6e-4, the mean of squares is 1 +- 0.07.
    assert float(z.abs().max()) < 4.8
    if method.name != "fp32":
        assert 0.7 < float(z.square().mean()) < 1.35


@pytest.mark.parametrize("world_size", [1, 2, 4, 5])
@pytest.mark.parametrize("method", ALL, ids=repr)
def test_symmetric_under_a_change_of_sign(method: gw.Method, world_size: int) -> None:
    g = gradients(world_size, 777)
    assert torch.equal(gw.simulate(-g, method).mean, -gw.simulate(g, method).mean)


@pytest.mark.parametrize("method", ALL, ids=repr)
def test_same_seed_and_round_same_bits(method: gw.Method) -> None:
    g = gradients(4, 3000)
    one = gw.simulate(g, method, seed=5, round=9).mean
    assert torch.equal(one, gw.simulate(g, method, seed=5, round=9).mean)
    if method.properties.stream != "none":
        assert not torch.equal(one, gw.simulate(g, method, seed=6, round=9).mean)
        assert not torch.equal(one, gw.simulate(g, method, seed=5, round=10).mean)


@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize("method", ALL, ids=repr)
def test_edges(method: gw.Method, world_size: int) -> None:
    for numel in (0, 1, 2, 79, 80, 81, 160, 4095, 4097):
        for g in (torch.zeros(world_size, numel), torch.full((world_size, numel), 0.25)):
            # Zero, and a constant whose every entry is at the scaler, come back exactly.
            assert torch.equal(gw.simulate(g, method).mean, g.mean(0))
    tiny = torch.full((world_size, 100), 1e-42)
    assert bool(torch.isfinite(gw.simulate(tiny, method).mean).all())
    huge = torch.full((world_size, 100), 1e38)
    if method.name != "fp16":
        assert bool(torch.isfinite(gw.simulate(huge, method).mean).all())
    shapes = [{"a": torch.ones(3, 5), "b": torch.ones(()), "c": torch.ones(2, 0)} for _ in range(world_size)]
    mean = gw.simulate(shapes, method).mean
    assert {n: tuple(t.shape) for n, t in mean.items()} == {"a": (3, 5), "b": (), "c": (2, 0)}
    assert torch.equal(mean["a"], torch.ones(3, 5))


def test_simulate_takes_any_memory_order_and_refuses_other_shapes() -> None:
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    workers = [{"w": x.to(memory_format=torch.channels_last)}, {"w": x}]
    assert torch.equal(gw.simulate(workers, "fp32").mean["w"], x)
    gaps = torch.arange(60.0).view(6, 10).t()[:5]
    assert torch.equal(gw.simulate([{"w": gaps}, {"w": gaps}], "fp32").mean["w"], gaps)
    with pytest.raises(gw.IncompatibleError, match="different shapes"):
        gw.simulate([{"w": torch.ones(2, 3)}, {"w": torch.ones(3, 2)}], "fp32")
    with pytest.raises(gw.HyperparameterError, match="unknown option 'lane'"):
        gw.SimulatedLink([("w", x)], "fp32", 2, lane=3)


@pytest.mark.parametrize("method", ALL, ids=repr)
def test_half_precision_input(method: gw.Method) -> None:
    g = gradients(3, 500, tail=0).bfloat16()
    workers = [{"w": row} for row in g]
    mean = gw.simulate(workers, method).mean["w"]
    assert mean.dtype == torch.bfloat16
    assert float((mean.float() - g.float().mean(0)).norm()) < 3 * float(g.float().norm())


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(COMPRESSORS),
    st.lists(st.integers(1, 700), min_size=1, max_size=5),
    st.integers(1, 6),
    st.permutations(range(5)),
    st.integers(1, 500),
    st.sampled_from(["reference", "cpu", "cpu-plain"]),
)
def test_bit_stable_methods_do_not_depend_on_layout(
    method: gw.Method, sizes: list[int], world_size: int, order: list[int], chunk_numel: int, backend: str
) -> None:
    """Parameters in another order, other chunks, another backend: the same bits for each parameter."""
    generator = torch.Generator().manual_seed(sum(sizes))
    grads = [{f"p{i}": torch.randn(n, generator=generator) for i, n in enumerate(sizes)} for _ in range(world_size)]

    def exchange(names: list[str], **options: object) -> dict[str, torch.Tensor]:
        like = [(n, torch.empty_like(grads[0][n], requires_grad=True)) for n in names]
        link = gw.SimulatedLink(like, method, world_size, min_numel=100, **options)
        mean = link.reduce_(torch.stack([torch.cat([g[n] for n in names]) for g in grads]))
        return dict(zip(names, mean.split([grads[0][n].numel() for n in names])))

    names = list(grads[0])
    shuffled = [names[i] for i in order if i < len(names)]
    first = exchange(names, backend="reference")
    second = exchange(shuffled, chunk_numel=chunk_numel, backend=backend)
    for name in names:
        assert torch.equal(first[name], second[name])


@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 64])
@pytest.mark.parametrize("method", ALL, ids=repr)
def test_declared_bits(method: gw.Method, world_size: int) -> None:
    """Measured bytes against the formula of the method, on a million elements, headers included."""
    numel = 1_000_000 if world_size < 64 else 100_000
    found = gw.simulate(torch.ones(world_size, numel), method).traffic
    if isinstance(method, gw.TernGrad):
        gather = 1.6 * (world_size - 1)
        if method.share_scaler:
            per_value = {2: 32 / 13, 3: 32 / 11, 4: 16 / 5, 8: 32 / 7, 64: 8}[world_size]
            two_shot = (1.6 + per_value) * (world_size - 1) / world_size
            gather = min(gather, two_shot)
        bits = gather * numel / 8
    else:
        bits = 2 * (world_size - 1) / world_size * {"fp32": 4, "fp16": 2, "bf16": 2}[method.name] * numel
    assert found.sent_bytes == pytest.approx(bits, rel=0.01 if numel == 1_000_000 else 0.05)
    assert found.received_bytes == found.sent_bytes
    if world_size == 4 and getattr(method, "share_scaler", True):
        assert found.bits_per_element == pytest.approx(method.properties.bits_per_element, rel=0.01)
