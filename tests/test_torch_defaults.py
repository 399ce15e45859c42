"""A program may change torch's default dtype and default device: results are the same, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from alone import group_of_one
from gradwire.exchange.codecs import DenseCodec
from gradwire.exchange.segments import Parameter, lay_out
from gradwire.graphs import block_model
from gradwire.kernels import get_kernels, self_test

SETTINGS = ["float64", "bfloat16", "meta"]

SPECS = [
    "terngrad",
    "qsgd",
    "eden",
    "powersgd",
    "errorfeedback",
    "bf16",
    "natural",
    "topk",
    "sidco",
    "SketchedSGD(rows=3, columns=97, density=0.02)",
    "spectral_atomo",
    "Coded(compressor=Threshold(threshold=1.0), coder='huffman')",
]


@contextlib.contextmanager
def defaults(setting: str) -> Iterator[None]:
    """Change the default device if ``setting`` is "meta", else the default dtype to the one of that name."""
    if setting == "meta":
        # Tensors on "meta" have no values: whatever needs those of a tensor that is there by default, raises.
        torch.set_default_device("meta")
    else:
        torch.set_default_dtype(getattr(torch, setting))
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def told(value: Any) -> Any:
    """Return what is compared of a result: of each tensor its dtype, its device, and its bytes."""
    if isinstance(value, Mapping):
        return {name: told(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [told(part) for part in value]
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device, value.shape, value.contiguous().numpy(force=True).tobytes()
    return value


def rounds() -> list[list[dict[str, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (20, 16), "vector": (50,)}
    return [
        [{name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} for _ in range(3)]
        for _ in range(2)
    ]


def simulated(spec: str, given: list[list[dict[str, torch.Tensor]]]) -> Any:
    found, state = [], None
    for gradients in given:
        outcome = gw.simulate(gradients, spec, state=state)
        state = outcome.state
        found.append([outcome.mean, state, outcome.traffic.sent_bytes])
    return told(found)


@pytest.mark.parametrize("spec", SPECS)
def test_outcomes_and_states_are_the_same(spec: str) -> None:
    given = rounds()
    usual = simulated(spec, given)
    for setting in SETTINGS:
        with defaults(setting):
            found = simulated(spec, given)
        assert found == usual, setting


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("family", self_test.SELF_TESTS)
def test_self_tests_are_the_same(family: str, setting: str) -> None:
    """Else a first call in such a program refuses vectors that serve, for as long as the process lives."""
    kernels = get_kernels("reference")
    usual = told(self_test.SELF_TESTS[family](kernels))
    self_test._case.cache_clear()
    with defaults(setting):
        found = told(self_test.SELF_TESTS[family](kernels))
    self_test._case.cache_clear()
    assert found == usual


def test_kernels_are_warmed_up() -> None:
    with defaults("meta"):
        assert gw.warm_up("terngrad") >= 0.0


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_mean_of_narrow_values_is_added_in_float32(setting: str) -> None:
    codec = DenseCodec(lay_out([Parameter("x", (64,), (1,))]), 1, torch.bfloat16)
    rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    total = torch.zeros(64)
    for row in rows:
        total += row
    out = torch.empty(128, dtype=torch.uint8)
    with defaults(setting):
        codec.reduce(rows.view(torch.uint8), 0, out)
    assert torch.equal(out.view(torch.bfloat16), total.bfloat16())


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_graph_is_the_same(setting: str) -> None:
    usual = block_model(nodes=60, blocks=3, words=20)
    with defaults(setting):
        found = block_model(nodes=60, blocks=3, words=20)
    assert told(vars(found)) == told(vars(usual))


@pytest.mark.parametrize("method", ["terngrad", "QSGD(block_size=16)"])
def test_a_model_is_trained_as_usual(method: str) -> None:
    x = torch.randn(4, 30, generator=torch.Generator().manual_seed(0))

    def trained() -> Any:
        model = torch.nn.Linear(30, 2, dtype=torch.float32, device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
        module = DistributedDataParallel(model)
        link = gw.attach(module, method, min_numel=0)
        for _ in range(2):
            module(x).square().sum().backward()
        return told([[p.grad for p in model.parameters()], link.state_dict()])

    with group_of_one():
        usual = trained()
        for setting in SETTINGS:
            with defaults(setting):
                found = trained()
            assert found == usual, setting
