"""Gradients that are drawn as those of a profiled model were: their bytes by entropy coders, and the profile's file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import profile
from torch import nn

import gradwire as gw
from gradwire.model.exchange_profile import exchange_of
from gradwire.model.forecast import Scenario, forecast
from gradwire.model.gradients import (
    INTERVALS,
    MOST_RUNS,
    RUN,
    Gradients,
    GradientValues,
    drawn,
    probabilities,
    values_of,
)
from gradwire.model.machine import DEFAULT
from gradwire.model.profile import Profile, ReadyBucket
from gradwire.tools.bench.profile import profile_module

NUMEL = {"w": 1 << 16, "b": 1 << 14}


def gradient(name: str, seed: int) -> torch.Tensor:
    """Return a gradient of which one in a hundred elements is not zero ("w"), or a small one with long tails ("b")."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(NUMEL[name], generator=generator)
    if name == "w":
        return values * (torch.rand(NUMEL[name], generator=generator) < 0.01)
    return 1e-3 * values * torch.exp(torch.randn(NUMEL[name], generator=generator))


def test_quantiles_are_near_one_another_at_the_ends() -> None:
    found = probabilities()
    assert len(found) == INTERVALS + 1
    assert (float(found[0]), float(found[1]), float(found[-1])) == (0.0, 2.0**-17, 1.0)
    assert bool((found.diff() > 0).all())
    assert torch.allclose(found, 1.0 - found.flip(0))
    values = torch.arange(1001.0)
    assert values_of(values[torch.randperm(1001)]).quantiles == pytest.approx((found * 1000).round().tolist())


def test_what_is_drawn_has_the_zeros_the_extremes_and_the_moments() -> None:
    for name in NUMEL:
        one = gradient(name, 0)
        again = drawn({name: NUMEL[name]}, {name: values_of(one)}, torch.Generator().manual_seed(1))
        assert float((again == 0).float().mean()) == pytest.approx(float((one == 0).float().mean()), abs=0.005)
        low, high = (float(end) * (1 + 1e-4) for end in (one.min(), one.max()))
        assert low <= float(again.min()) < float(again.max()) <= high
        # Between two quantiles, of which one may be zero, are up to a fifth of the elements that are not.
        assert float(again.norm()) == pytest.approx(float(one.norm()), rel=0.2)
        assert float(again.abs().mean()) == pytest.approx(float(one.abs().mean()), rel=0.2)


def test_a_parameter_without_elements_hides_no_quantiles() -> None:
    known = {"w": values_of(gradient("w", 0)), "nothing": values_of(torch.empty(0))}
    one, both = ({"w": NUMEL["w"]}, {"nothing": 0, "w": NUMEL["w"]})
    found = [drawn(numel, known, torch.Generator().manual_seed(2)) for numel in (one, both)]
    assert torch.equal(*found)
    assert not len(drawn({"nothing": 0}, known, torch.Generator()))
    assert float((found[0] == 0).float().mean()) > 0.9


def test_of_a_large_gradient_the_extremes_are_kept() -> None:
    one = torch.zeros(3 << 20)
    one[1], one[2] = -7.0, 5.0
    found = values_of(one).quantiles
    assert (found[0], found[-1], set(found[1:-1])) == (-7.0, 5.0, {0.0})


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")]])
def test_where_nothing_is_known_values_are_normal(values: list[float]) -> None:
    assert values_of(torch.tensor(values)) == GradientValues()
    known = {"w": values_of(gradient("w", 0)), "b": values_of(torch.tensor(values))}
    expected = torch.randn(sum(NUMEL.values()), generator=torch.Generator().manual_seed(3))
    assert torch.equal(drawn(NUMEL, known, torch.Generator().manual_seed(3)), expected)


def counted(spec: str, rows: list[torch.Tensor]) -> int:
    """Return the bytes that rank 0 sends in a simulated exchange of these gradients."""
    shapes = {name: (count // 128, 128) for name, count in NUMEL.items()}
    link = gw.SimulatedLink([(n, torch.empty(s)) for n, s in shapes.items()], spec, len(rows), min_numel=0)
    link.reduce_(torch.stack(rows))
    return link.traffic().sent_bytes


def drawn_alike(known: Gradients, rank: int, workers: int) -> torch.Tensor:
    """Return a rank's gradients, drawn by their values; ranks have the order of each parameter from another element."""
    parts = drawn(NUMEL, known, torch.Generator().manual_seed(rank)).split(list(NUMEL.values()))
    return torch.cat([part.roll(rank * len(part) // workers) for part in parts])


def rehearsed(spec: str, workers: int, known: Gradients) -> float:
    """Return the bytes that the model predicts for it."""
    tensors = {name: torch.empty((count // 128, 128), device="meta") for name, count in NUMEL.items()}
    buckets = [ReadyBucket(names=tuple(NUMEL), numel=sum(NUMEL.values()), ready_s=0.0)]
    return exchange_of(spec, tensors, buckets, workers, repeats=1, gradients=known).sent_bytes


@pytest.mark.parametrize("coder", ["huffman", "rans"])
@pytest.mark.parametrize("workers", [2, 4])
def test_bytes_of_coders_are_those_of_such_gradients(workers: int, coder: str) -> None:
    """An element is not zero in TernGrad's code with the probability |g| / max|g|.

    The mean of |g| is met within a fifth (see above), and so is the number of such elements. Bytes grow no faster than
    it. Beside gradients that are drawn alike, only the draws differ: with 2, 4 and both coders, five draws had a
    standard deviation of 0.7 to 1.5 %.
    """
    spec = f"Coded(TernGrad(), coder={coder!r})"
    known = {name: values_of(gradient(name, 0)) for name in NUMEL}
    true = counted(
        spec, [torch.cat([gradient(n, 10 + 2 * w + i) for i, n in enumerate(NUMEL)]) for w in range(workers)]
    )
    alike = counted(spec, [drawn_alike(known, rank, workers) for rank in range(workers)])
    told = rehearsed(spec, workers, known)
    assert told == pytest.approx(true, rel=0.2)
    assert told == pytest.approx(alike, rel=0.05)
    assert rehearsed(spec, workers, {}) > 2 * true


def test_other_ranks_have_the_values_of_a_parameter_within_it() -> None:
    """Elsewhere, those of a parameter that is never zero would lie among the zeros of the other."""
    spec, workers = "Coded(TernGrad(), coder='rans')", 4
    known = {"w": values_of(gradient("w", 0)), "b": values_of(gradient("w", 1)[: NUMEL["b"]].sign() + 4.0)}
    alike = counted(spec, [drawn_alike(known, rank, workers) for rank in range(workers)])
    assert rehearsed(spec, workers, known) == pytest.approx(alike, rel=0.05)


@pytest.mark.parametrize("rows", [64, 1024])
def test_bytes_are_those_of_a_gradient_whose_rows_differ(rows: int) -> None:
    """Blocks of QSGD have scales of their own: of the same values in any other order, they take 30 to 60 % fewer bytes.

    Between two quantiles values are alike, which makes up to a tenth. The order is that of memory, here of columns.
    """
    generator = torch.Generator().manual_seed(0)
    scales = torch.exp(torch.randn(rows, 1, generator=generator)) * (torch.rand(rows, 1, generator=generator) < 0.5)
    one = (scales * torch.randn(rows, 256, generator=generator)).t()
    known = {"w": values_of(one)}
    assert len(known["w"].order) == 2 * min(one.numel(), RUN * MOST_RUNS)
    spec = "Coded(QSGDinf(), coder='rans')"
    link = gw.SimulatedLink([("w", one)], spec, 2, min_numel=0)
    link.reduce_(one.t().reshape(1, -1).repeat(2, 1))
    bucket = ReadyBucket(names=("w",), numel=one.numel(), ready_s=0.0)
    told = exchange_of(spec, {"w": one.to("meta")}, [bucket], 2, repeats=1, gradients=known).sent_bytes
    assert told == pytest.approx(link.traffic().sent_bytes, rel=0.1)


def profiled() -> Profile:
    """Profile a model of whose inputs most are always zero, and whose last layer begins with zeros."""
    torch.manual_seed(0)
    inputs = torch.randn(16, 256)
    inputs[:, 32:] = 0.0

    def make() -> nn.Module:
        last = nn.Linear(64, 8)
        nn.init.zeros_(last.weight)
        return nn.Sequential(nn.Linear(256, 64), nn.ReLU(), last)

    return profile_module("a model", make, lambda module, step: module(inputs).square().mean())


@pytest.mark.ranks
def test_a_profile_has_the_values_of_its_first_gradients_and_keeps_them(tmp_path: Path) -> None:
    known = profiled()
    assert set(known.gradients) == set(known.parameters)
    again = drawn({"0.weight": 1 << 14}, known.gradients, torch.Generator().manual_seed(0))
    # Of 256 columns 224 are zeros.
    assert float((again == 0).float().mean()) == pytest.approx(224 / 256, abs=0.05)
    known.save(tmp_path / "p.json")
    assert Profile.read(tmp_path / "p.json") == known
    record: dict[str, Any] = json.loads((tmp_path / "p.json").read_text())
    for wrong, said in (("quantiles", [0.0, 1.0]), "81 quantiles"), (("order", "AAAAAA=="), "ranks of 16384 elements"):
        values = {**record["gradients"]["0.weight"], wrong[0]: wrong[1]}
        (tmp_path / "p.json").write_text(json.dumps({**record, "gradients": {"0.weight": values}}))
        with pytest.raises(gw.HyperparameterError, match=said):
            Profile.read(tmp_path / "p.json")
    del record["gradients"]
    (tmp_path / "p.json").write_text(json.dumps(record))
    assert Profile.read(tmp_path / "p.json") == dataclasses.replace(known, gradients={})


def test_a_forecast_counts_the_bytes_of_the_profiles_gradients() -> None:
    known = profile()
    sparse = {}
    for name, (shape, _) in known.parameters.items():
        values = values_of(torch.zeros(shape))
        sparse[name] = dataclasses.replace(values, quantiles=(-1.0, *[0.0] * (INTERVALS - 1), 1.0))
    plain, _ = forecast(known, ["coded"], Scenario(hosts=2), DEFAULT, repeats=1)
    few, _ = forecast(dataclasses.replace(known, gradients=sparse), ["coded"], Scenario(hosts=2), DEFAULT, repeats=1)
    assert few[1].sent_bytes < 0.5 * plain[1].sent_bytes
