"""``link.metrics()`` on real ranks, and ranges of lanes in a profile."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import gradwire as gw
from gradwire.exchange.segments import Parameter, lay_out

pytestmark = pytest.mark.ranks

SIZES = {"w": 3000, "b": 20, "v": 500}


def exchanged(spec: str, rounds: int) -> tuple[dict[str, float], dict[str, Any], int, dict[str, float]]:
    parameters = {name: torch.nn.Parameter(torch.zeros(numel)) for name, numel in SIZES.items()}
    link = gw.Link(parameters.items(), spec, min_numel=0)
    before = link.metrics()
    for _ in range(rounds):
        draw = torch.Generator().manual_seed(1000 * link.round + link.rank)
        for p in parameters.values():
            p.grad = torch.randn(p.numel(), generator=draw)
        link.reduce_()
    answer = link.metrics(), link.diagnostics(), link.traffic().sent_bytes, before
    link.close()
    return answer


@pytest.mark.parametrize("spec", ["terngrad", "ErrorFeedback()", "CAT()", "fp32"])
def test_metrics_are_the_reports_in_numbers(three_ranks: Any, spec: str) -> None:
    for found, report, sent, before in three_ranks(exchanged, spec, 3):
        assert all(type(value) is float for value in found.values())
        assert found["rounds"] == 3
        assert found["sent_bytes"] == sent > 0
        assert before["rounds"] == before["sent_bytes"] == 0
        assert "gradient_norm" not in before
        assert found["bits_per_element"] == pytest.approx(32 / found["compression_factor"])
        rows = report["parameters"].values()
        if rows:
            norm = math.sqrt(sum(row["gradient_norm"] ** 2 for row in rows))
            off = math.sqrt(sum((row["relative_error"] * row["gradient_norm"]) ** 2 for row in rows))
            assert found["gradient_norm"] == pytest.approx(norm)
            assert found["relative_error"] == pytest.approx(off / norm)
        assert ("residual_norm" in found) == (spec == "ErrorFeedback()")
        gauges = {name.removeprefix("gauge/"): v for name, v in found.items() if name.startswith("gauge/")}
        assert gauges == report["gauges"]
        assert bool(gauges) == (spec == "CAT()")


def measured(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Return the metrics of a link of one rank that measured these gradients and vectors sent, and the rows."""
    link = gw.Link({str(i): torch.nn.Parameter(torch.zeros(len(g))) for i, (g, _) in enumerate(rows)}.items(), "fp32")
    segments = lay_out([Parameter.of(str(i), g) for i, (g, _) in enumerate(rows)])
    gradients, sent = (torch.cat(parts) for parts in zip(*rows))
    link._runtime.diagnostics.measure(gradients, sent, segments, 0)
    answer = link.metrics(), link.diagnostics()["parameters"]
    link.close()
    return answer


def of_one_rank() -> list[tuple[dict[str, float], dict[str, dict[str, float]]]]:
    one, four = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 4.0])
    infinite = torch.tensor([math.inf, 1.0])
    return [
        measured([(one, four), (0 * one, one)]),
        measured([(infinite, one), (one, one)]),
        measured([(0 * one, one)]),
    ]


def test_errors_of_a_parameter_without_a_gradient_count_and_what_is_not_known_is_left_out(three_ranks: Any) -> None:
    beside, infinite, zero = three_ranks(of_one_rank)[0]
    # The first parameter lacks 3 of 5, and the second sends 5 of nothing.
    assert beside[0]["relative_error"] == pytest.approx(math.sqrt(9 + 25) / 5)
    assert infinite[0]["gradient_norm"] == math.inf
    assert "relative_error" not in infinite[0]
    assert math.isnan(infinite[1]["0"]["cosine"]), "it does not point the other way"
    assert not {"gradient_norm", "relative_error"} & zero[0].keys()


def profiled(all_threads: bool) -> set[str]:
    parameter = torch.nn.Parameter(torch.zeros(5000))
    link = gw.Link([("w", parameter)], "terngrad", min_numel=0)
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=all_threads)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as found:
        for _ in range(2):
            parameter.grad = torch.ones(5000)
            link.reduce_()
    link.close()
    return {event.name for event in found.events() if event.name.startswith("gradwire::")}


@pytest.mark.parametrize("all_threads", [True, False])
def test_a_profile_shows_what_lanes_do(three_ranks: Any, all_threads: bool) -> None:
    """Of its own thread alone it shows where a bucket is handed over."""
    lanes = {"gradwire::encode", "gradwire::wire", "gradwire::decode"} if all_threads else set()
    assert three_ranks(profiled, all_threads) == [{"gradwire::bucket"} | lanes] * 3
