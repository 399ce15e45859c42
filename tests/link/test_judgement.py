"""What a link says of a method by what it measures: what is late, lost or noise, with what to try."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

import gradwire as gw
from cases import TABLE
from gradwire.exchange.protocols import Memory
from gradwire.exchange.segments import Parameter, lay_out
from gradwire.link.diagnostics import (
    EARLY,
    ELEMENTS,
    ERROR,
    INTERVAL,
    KEPT,
    LATE_COSINE,
    OLD,
    Comparison,
    Diagnostics,
    judge,
)

FINE = Comparison(relative_error=1.0, cosine=0.9, kept=0.9, density=1.0, age=1.0)
LATE = replace(FINE, age=OLD + 0.1, cosine=LATE_COSINE - 0.01)
AT_ONCE = replace(FINE, age=None)
LOST = replace(AT_ONCE, density=ELEMENTS - 0.01, kept=KEPT - 0.05, cosine=(KEPT - 0.05) ** 0.5)
NOISE = replace(AT_ONCE, relative_error=ERROR + 0.1)


@pytest.mark.parametrize(
    ("spec", "measured", "told"),
    [
        ("gtopk", LATE, "waits to be sent is 1.6 gradients long"),
        ("dgc", LATE, "about so many rounds late"),
        # Old, and yet what the workers have in common: nothing is lost by it.
        ("powersgd", replace(LATE, age=13.0, cosine=LATE_COSINE), None),
        ("ef_signsgd", replace(LATE, age=OLD), None),
        ("errorfeedback", replace(FINE, density=0.01, cosine=0.5), None),
        ("cat", LOST, "so that 30 % of the gradient is lost"),
        ("cat", replace(LOST, kept=KEPT), None),
        ("drive", replace(LOST, density=ELEMENTS), None),
        # Few elements, but drawn, and so long that no more is lost than is clipped.
        ("terngrad", replace(LOST, cosine=0.75), None),
        ("randk", replace(LOST, cosine=0.1, kept=0.95), None),
        # What is left out is in the next difference.
        ("ChocoSGD(compressor=TopK(density=0.01), gamma=0.02)", LOST, None),
        ("EF21(compressor=TopK(density=0.01))", LOST, None),
        ("atomo", NOISE, "errs by 4.1 times the gradient"),
        ("qsgd", replace(NOISE, relative_error=ERROR), None),
        ("errorfeedback", replace(NOISE, age=1.0), None),
        # A direction has neither the length nor the angle of a gradient.
        ("signsgd", NOISE, None),
        ("sketched_amsgrad", LATE, "rounds late"),
        # What a rank sends for its node is one shard.
        ("Hierarchical(compressor=TopK(), node_size=8)", LOST, None),
    ],
)
def test_what_costs_accuracy_is_told_and_nothing_else(spec: str, measured: Comparison, told: str | None) -> None:
    sentence = judge(gw.method(spec), measured, 10)
    if told is None:
        assert sentence is None
    else:
        assert sentence is not None
        assert told in sentence


@pytest.mark.parametrize("name", TABLE)
def test_a_warning_has_three_lines_and_specs_that_can_be_taken_as_they_are(name: str) -> None:
    method = gw.method(name)
    for measured in (LATE, LOST, NOISE):
        sentence = judge(method, measured, 30)
        if sentence is None:
            continue
        wrong, cost, advice = sentence.split("\n")
        assert wrong.startswith(f"{method!r}, round 30: ")
        assert "loses accuracy" in cost
        specs = re.match(r"Try (.*?); link\.diagnostics\(\)", advice)
        assert specs is not None
        for found in specs[1].split(", or ")[:-1]:
            if found.startswith((f"{type(method).__name__}(", "ErrorFeedback(")):
                assert gw.method(found) != method


def test_more_elements_are_advised_where_few_are_sent_and_momentum_where_a_residual_is_kept() -> None:
    sentence = judge(gw.method("ErrorFeedback(TopK(density=0.001))"), LATE, 10) or ""
    assert "TopK(density=0.05" in sentence
    for density, more in ((0.03, "0.3"), (0.2, "0.5"), (0.5, None)):
        told = judge(gw.method(f"TopK(density={density})"), NOISE, 10) or ""
        assert re.findall(r"Try TopK\(density=([\d.]+), block_size=None", told) == ([more] if more else [])
    assert "momentum=0.9 of the method in place of the optimizer's" in sentence
    assert "momentum=0.9 of the method" not in (judge(gw.method("dgc"), LATE, 10) or "")
    assert "ErrorFeedback(compressor=TopK(density=0.01" in (judge(gw.method("TopK(density=0.01)"), LOST, 10) or "")


def test_rounds_are_measured_early_and_then_now_and_then() -> None:
    diagnostics = Diagnostics()
    assert [r for r in range(2 * INTERVAL + 1) if diagnostics.wanted(r)] == [0, *EARLY, INTERVAL, 2 * INTERVAL]
    diagnostics.interval = 0
    assert not any(diagnostics.wanted(round) for round in range(INTERVAL + 1))


def test_long_vectors_are_measured_as_exactly_as_short_ones() -> None:
    """Sums in float32 lose percents of a norm or a product of ten million equal elements."""
    numel, measured, memory = 10_000_000, Diagnostics(), Memory()
    segments = lay_out([Parameter("w", (numel,), (1,))])
    gradient = torch.full((numel,), 1e-3)
    measured.measure(gradient, 2 * gradient, segments, 0)
    row = measured.rows()["w"]
    norm = float(gradient[0]) * numel**0.5
    assert row["gradient_norm"] == pytest.approx(norm, rel=1e-9)
    assert row["sent_norm"] == pytest.approx(2 * norm, rel=1e-9)
    assert (row["relative_error"], row["cosine"]) == pytest.approx((1.0, 1.0), rel=1e-9)
    memory.stage("residual", segments).copy_(gradient)
    memory.commit()
    assert memory.norm("residual") == pytest.approx(norm, rel=1e-9)


def test_what_is_measured_is_that_of_all_parameters_together() -> None:
    gradient, sent = torch.tensor([3.0, 4.0, 0.0, 12.0]), torch.tensor([3.0, 0.0, 0.0, 6.0])
    parts = {"a": gradient[:2], "b": gradient[2:]}
    diagnostics = Diagnostics()
    diagnostics.measure(gradient, sent, lay_out(Parameter.of(n, g) for n, g in parts.items()), 10)
    found = diagnostics.over_all(10, 26.0)
    assert found is not None
    assert found.age == 2.0
    assert found.density == 0.5
    assert found.relative_error == pytest.approx((16 + 36) ** 0.5 / 13)
    assert found.kept == pytest.approx((9 + 72) / 169)
    assert found.cosine == pytest.approx((9 + 72) / (13 * 45**0.5))
    assert diagnostics.over_all(30, None) is None, "nothing was measured"
    diagnostics.measure(0 * gradient, sent, lay_out(Parameter.of(n, g) for n, g in parts.items()), 30)
    assert diagnostics.over_all(30, None) is None, "no multiple is too much of a gradient that is zero"


def test_all_that_waits_counts_whatever_the_names_that_it_is_kept_by() -> None:
    memory, x = Memory(), torch.tensor([3.0, 4.0])
    assert memory.norm("residual") is None
    memory.load({"rank": {"residual/(model)": x, "residual/w[0]": 2 * x, "momentum/w": x}})
    assert memory.norm("residual") == pytest.approx(125**0.5)
    assert memory.norm("residual", "(model)") == 5.0
    assert memory.norm("residual", "w") is None


def rounds(spec: str, count: int = 32) -> gw.SimulatedLink:
    """Exchange the same gradients, of rank 2, in every round."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(100, 2, generator=generator) for _ in range(2))
    gradient = (left @ right.T).reshape(-1)
    link = gw.SimulatedLink([("w", torch.empty(100, 100))], spec, 2)
    for _ in range(count):
        link.reduce_(gradient.repeat(2, 1))
    return link


@pytest.mark.parametrize(
    "spec",
    [
        "GTopK(density=0.001)", "DGC(density=0.001)", "SketchedSGD(density=0.001)", "CLTk(density=0.001)",
        "CAT(fixed_bytes=1500.0)", "TopK(density=0.01)", "ErrorFeedback(RandK(density=0.01))",
        "Coded(ErrorFeedback(TopK(density=0.001)))",
    ],
)  # fmt: skip
def test_every_kind_of_waiting_is_warned_of_once(spec: str, caplog: pytest.LogCaptureFixture) -> None:
    """A residual by parameter, one of all joined, and an accumulated momentum; and what keeps nothing."""
    link = rounds(spec)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"{link.method!r}, round {EARLY[0]}: ")


@pytest.mark.parametrize("spec", ["fp32", "powersgd", "errorfeedback", "terngrad", "eden"])
def test_what_serves_the_training_is_not_warned_of(spec: str, caplog: pytest.LogCaptureFixture) -> None:
    rounds(spec)
    assert caplog.messages == []


def test_a_simulation_tells_of_worker_0_what_a_link_tells() -> None:
    found = rounds("DGC(density=0.5)").diagnostics()["parameters"]["w"]
    assert found["round"] == EARLY[-1]
    assert found["density"] == pytest.approx(0.5, abs=1e-3)
    assert found["residual_norm"] > 0
