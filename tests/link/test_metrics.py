"""``link.metrics()`` on real ranks, and ranges of lanes in a profile."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import gradwire as gw

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
