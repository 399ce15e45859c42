"""What a simulation takes: floats, a row or a dict a worker, and names for parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradwire as gw


@pytest.mark.parametrize(
    ("gradients", "part"),
    [
        (torch.tensor([[1, 2], [2, 3]]), "'0' is torch.int64: give floats"),
        ([{"w": torch.ones(2)}, {"w": torch.ones(2, dtype=torch.int32)}], "'w' is torch.int32: give floats"),
        (torch.ones(2, 2, dtype=torch.bool), "'0' is torch.bool: give floats"),
        (torch.ones(4), "a row a worker, not [4]"),
        (torch.tensor(1.0), "a row a worker, not []"),
        ([torch.ones(2), torch.ones(2)], "dicts of tensors by name"),
    ],
)
def test_what_are_no_gradients_of_workers_is_refused(gradients: Any, part: str) -> None:
    with pytest.raises(gw.IncompatibleError) as caught:
        gw.simulate(gradients, "fp32")
    assert part in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_floats_come_back_as_they_were_given(dtype: torch.dtype) -> None:
    found = gw.simulate(torch.tensor([[1.0, 2.0], [2.0, 3.0]], dtype=dtype), "fp32").mean
    assert torch.equal(found, torch.tensor([1.5, 2.5], dtype=dtype))


@pytest.mark.parametrize(
    ("parameters", "part"),
    [
        ([torch.empty(3), torch.empty(2)], "model.named_parameters(), not Tensor"),
        ((p for p in torch.nn.Linear(2, 2).parameters()), "model.named_parameters(), not Parameter"),
        ([("w", 3)], "pairs are needed"),
        ([("w", torch.empty(2)), ("w", torch.empty(3))], "two have the same name"),
    ],
)
def test_parameters_without_names_of_their_own_are_refused(parameters: Any, part: str) -> None:
    with pytest.raises(gw.HyperparameterError) as caught:
        gw.SimulatedLink(parameters, "fp32", 2)
    assert part in str(caught.value)


def test_a_round_of_which_no_state_could_go_on_is_refused() -> None:
    ones = torch.ones(1, 2)
    last = gw.simulate(ones, "fp32", round=2**48 - 2)
    with pytest.raises(gw.HyperparameterError, match=r"round: a whole number from 0 to 2\^48 - 2 is needed"):
        gw.simulate(ones, "fp32", round=2**48 - 1)
    gw.simulate(ones, "fp32", state=last.state)


def test_pairs_may_be_a_dict() -> None:
    link = gw.SimulatedLink({"w": torch.empty(3)}, "fp32", 2)  # type: ignore[arg-type]
    assert link.numel == 3


def test_bytes_are_those_of_worker_0_over_all_rounds() -> None:
    """With a coder, workers send different numbers of bytes."""
    rows = torch.randn(3, 3000, generator=torch.Generator().manual_seed(0)) ** torch.tensor([[1], [3], [5]])
    one = gw.SimulatedLink([("w", torch.empty(3000))], gw.Coded(compressor=gw.QSGDinf()), 3, backend="reference")
    one.reduce_(rows.clone())
    first = one.traffic()
    assert (first.rounds, first.elements, first.dense_bytes) == (1, 3000, 16_000)
    one.reduce_(rows.clone())
    second = one.traffic()
    assert (second.rounds, second.elements, second.dense_bytes) == (2, 6000, 32_000)
    # What one worker sends to each of two others is half of what it sends; the others' is what it receives.
    sent = [meter.sent_bytes for meter in one._meters]
    assert second.sent_bytes == sent[0] != sent[1]
    assert second.received_bytes == (sent[1] + sent[2]) // 2


@pytest.mark.parametrize("method", ["gtopk", "PowerSGD()", "terngrad"])
def test_names_are_in_the_order_of_the_row(method: str) -> None:
    pairs = [("a", torch.empty(2000)), ("b", torch.empty(30, 100)), ("c", torch.empty(10))]
    rows = torch.randn(2, 5010, generator=torch.Generator().manual_seed(0))
    a, b, c = gw.SimulatedLink(pairs, method, 2).reduce_(rows.clone()).split([2000, 3000, 10])
    turned = torch.cat(rows.split([2000, 3000, 10], dim=1)[::-1], dim=1)
    found = gw.SimulatedLink(pairs, method, 2).reduce_(turned, names=["c", "b", "a"])
    assert torch.equal(found, torch.cat([c, b, a]))


@pytest.mark.parametrize(
    ("method", "names", "part"),
    [
        ("terngrad", ["b", "z"], "'z' is no parameter of this link"),
        ("terngrad", ["b", "a", "b"], "'b' is there twice"),
        ("gtopk", ["b"], "'a' is missing, and GTopK"),
    ],
)
def test_names_that_make_no_round_are_refused(method: str, names: list[str], part: str) -> None:
    link = gw.SimulatedLink([("a", torch.empty(20)), ("b", torch.empty(30))], method, 2, min_numel=0)
    with pytest.raises(gw.IncompatibleError, match=part):
        link.exchange_(torch.zeros(2, 30), names=names)
    assert link.round == 0


@pytest.mark.parametrize("method", ["bf16", "fp16"])
def test_large_values_beside_a_cast_have_their_mean(method: str) -> None:
    pairs = [("kept", torch.empty(64)), ("cast", torch.empty(4096))]
    rows = torch.randn(3, 4160, generator=torch.Generator().manual_seed(0))
    usual = gw.SimulatedLink(pairs, method, 3, exclude=("kept",)).reduce_(rows.clone())
    assert torch.equal(usual[:64], ((rows[0] + rows[1]) + rows[2])[:64] * (1 / 3)), "ordinary values keep their bits"
    rows[:, :2] = torch.tensor([[2e38, -3e38], [2e38, -3e38], [2e38, 1e38]])
    rows[1, 2] = torch.inf
    found = gw.SimulatedLink(pairs, method, 3, exclude=("kept",)).reduce_(rows)
    assert found[:2].tolist() == pytest.approx([2e38, -5e38 / 3], rel=1e-6)
    assert found[2] == torch.inf
    assert torch.equal(found[3:64], usual[3:64])
