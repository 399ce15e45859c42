"""A run's seed decides the initial weights, the order of the data, augmentation and the method's draws."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from norm_worker import Normed

import gradwire as gw
from alone import group_of_one
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.distributed import DistributedEngine
from gradwire.tools.experiments.engine import build_model
from gradwire.tools.experiments.order import ShareOrder
from gradwire.tools.experiments.simulate import SimulatedEngine
from gradwire.tools.experiments.tasks import build
from gradwire.tools.experiments.tasks.images import Images

PLAN = RunConfig(task=Normed(), method="terngrad", workers=2, simulate=True, min_numel=0)
OPTIONS: dict[str, Any] = {
    "exclude": ("0.bias",),
    "min_numel": 7,
    "warmup_steps": 3,
    "collective": "all_gather",
    "seed": 5,
}
"""A value for each option of a link that differs from what it is by default."""


def weights(seed: int) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in build_model(replace(PLAN, seed=seed)).parameters()])


def test_the_seed_decides_the_initial_weights_and_the_global_generator_does_not() -> None:
    first = weights(0)
    torch.rand(1)
    state = torch.get_rng_state()
    assert torch.equal(weights(0), first)
    assert not torch.equal(weights(1), first)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("task", [build("digits"), build("logreg", data="x", batch=64)])
def test_the_seed_decides_the_order_of_the_data(task: Any) -> None:
    orders = [task.order(seed, 640, 2).indices(0).tolist() for seed in (0, 1, 0)]
    assert orders[0] == orders[2]
    assert orders[0] != orders[1]
    assert ShareOrder(1, 640, 0, 2).indices(0).tolist() == list(range(640)), "a batch of all rows needs no draw"


def test_the_seed_and_the_step_decide_augmentation() -> None:
    pixels = torch.arange(4 * 36, dtype=torch.uint8).view(4, 1, 6, 6)
    source = Images(pixels, torch.zeros(4), pixels, torch.zeros(4), scale=torch.ones(1), shift=torch.zeros(1), pad=2)

    def batch(seed: int, step: int) -> list[float]:
        return source.batch(torch.arange(4), slice(0, 4), seed=seed, step=step)[0].flatten().tolist()

    assert batch(0, 0) == batch(0, 0)
    assert len({tuple(batch(seed, step)) for seed in (0, 1) for step in (0, 1)}) == 4


@pytest.fixture
def group() -> Iterator[None]:
    """A group of this process alone."""
    with group_of_one():
        yield


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("kind", [SimulatedEngine, DistributedEngine])
def test_an_engine_hands_the_seed_and_all_options_on(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """To weights, order and augmentation, and to the link."""
    given: list[dict[str, Any]] = []
    simulated = gw.SimulatedLink

    def attach(module: Any, method: str, **options: Any) -> Any:
        given.append(options)
        return SimpleNamespace(close=lambda: None)

    def simulate(*words: Any, **options: Any) -> Any:
        given.append(options)
        return simulated(*words, **options)

    # A group of one has nothing to exchange.
    monkeypatch.setattr(gw, "attach", attach)
    monkeypatch.setattr(gw, "SimulatedLink", simulate)
    workers = 2 if kind is SimulatedEngine else 1
    plan = replace(PLAN, workers=workers, **OPTIONS)
    engine = kind(plan)
    assert {name: given[0][name] for name in OPTIONS} == OPTIONS
    assert given[0]["fallback"] is None
    expected = build_model(plan).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in engine.model.state_dict().items())
    assert torch.equal(engine.order.indices(0), plan.task.order(5, 64, workers).indices(0))
    seen: list[tuple[int, int]] = []
    taken = type(engine.source).batch

    def batch(self: Images, indices: torch.Tensor, part: slice, *, seed: int, step: int) -> Any:
        seen.append((seed, step))
        return taken(self, indices, part, seed=seed, step=step)

    monkeypatch.setattr(type(engine.source), "batch", batch)
    engine.backward(2)
    assert seen == [(5, 2)]
    engine.close()
