"""What is said of residuals: at attach, beside an optimizer's momentum, and in measured rounds, when they are old."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.link.diagnostics import LATE_COSINE, OLD
from ranks import Ranks

NUMEL = 4096

Parameters = list[torch.nn.Parameter]


def sgd(momentum: float) -> Callable[[Parameters], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=momentum)


def parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(shape))


@pytest.mark.parametrize(
    ("spec", "optimizer", "told"),
    [
        ("ef_signsgd", sgd(0.9), "SGD with momentum=0.9 carries too far"),
        ("ErrorFeedback(ScaledSign())", sgd(0.5), "momentum=0.5"),
        ("ef_signsgd", torch.optim.Adam, r"Adam with betas=\(0\.9, 0\.999\)"),
        ("onebit", sgd(0.9), "OneBit"),
        ("ErrorFeedback(GRandK())", sgd(0.9), "about 37 rounds late on average"),
        ("ef_signsgd", sgd(0.0), None),
        ("ef_signsgd", lambda p: torch.optim.Adam(p, betas=(0.0, 0.999)), None),
        ("ef_signsgd", lambda p: None, None),
        ("EFSignSGD(block_size=64)", sgd(0.9), None),
        ("OneBit(block_size=64)", sgd(0.9), None),
        ("errorfeedback", sgd(0.9), None),
        ("ErrorFeedback(QSGDMaxNorm())", sgd(0.9), None),
        ("ErrorFeedback(GRandK(cycle=1))", sgd(0.9), None),
        ("scaledsign", sgd(0.9), None),
        ("diana", sgd(0.9), None),
        ("Coded(ErrorFeedback(GRandK()))", sgd(0.9), "37 rounds late"),
        ("ErrorFeedback(TopK())", sgd(0.9), "11 rounds late.* at 10 times the learning rate, or send more"),
        ("ErrorFeedback(RandK(density=0.1))", sgd(0.5), "9 rounds late.* at 2 times the learning rate"),
        ("GTopK(density=0.01)", torch.optim.Adam, "11 rounds late"),
        ("sketched_sgd", sgd(0.9), "11 rounds late"),
        ("CLTk(density=0.01)", sgd(0.9), "11 rounds late"),
        ("Scheduled(ErrorFeedback(TopK(density=0.01)), start=0.25)", sgd(0.9), "11 rounds late"),
        ("ErrorFeedback(TopK())", sgd(0.0), None),
        ("ErrorFeedback(TopK(), momentum=0.9)", sgd(0.0), None),
        *((spec, sgd(0.9), None) for spec in ("gtopk", "clt_k", "powersgd", "acp_sgd", "ErrorFeedback(SIDCo())")),
        ("ErrorFeedback(TopK(density=0.05))", sgd(0.9), None),
        ("ErrorFeedback(Threshold())", sgd(0.9), None),
    ],
)
def test_an_optimizers_momentum_beside_a_large_residual_is_told(spec: str, optimizer: Any, told: str | None) -> None:
    w = parameter(2, NUMEL)
    sentence = gw.method(spec).caution(optimizer([w]), {"w": w})
    if told is None:
        assert sentence is None
    else:
        assert sentence is not None
        with pytest.raises(AssertionError, match=told):
            raise AssertionError(sentence)


def test_short_parameters_and_short_columns_have_no_large_residual() -> None:
    """The worst contraction of a run of d elements is 1/d: 1024 of them are not warned of, 1040 are."""
    for spec in ("ef_signsgd", "onebit"):
        for numel, warned in ((1024, False), (1040, True)):
            w = parameter(numel)
            assert (gw.method(spec).caution(sgd(0.9)([w]), {"w": w}) is not None) == warned
    wide = parameter(4096, 16)
    assert gw.method("onebit").caution(sgd(0.9)([wide]), {"w": wide}) is None
    assert gw.method("ef_signsgd").caution(sgd(0.9)([wide]), {"w": wide}) is not None


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("gradwire").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if "compiled kernels" not in record.getMessage():
            self.texts.append(record.getMessage())

    def close(self) -> None:
        logging.getLogger("gradwire").removeHandler(self)
        super().close()


def attached(spec: str, momentum: float) -> list[str]:
    w = parameter(NUMEL)
    said = Said()
    gw.Link([("w", w)], spec, optimizer=torch.optim.SGD([w], lr=0.1, momentum=momentum)).close()
    said.close()
    return said.texts


@pytest.mark.ranks
def test_a_link_tells_on_its_first_rank_alone(three_ranks: Ranks) -> None:
    first, *others = three_ranks(attached, "ef_signsgd", 0.9)
    assert len(first) == 1
    assert "block_size=64" in first[0]
    assert others == [[], []]
    assert three_ranks(attached, "ef_signsgd", 0.0) == [[], [], []]


def first_steps(spec: str, rate: float, is_given: bool) -> list[str]:
    """Two steps of an optimizer, whose learning rate is set after it was handed over, as a schedule does."""
    w = torch.nn.Parameter(torch.full((NUMEL,), 0.5))
    optimizer = torch.optim.SGD([w], lr=1e-5)
    said = Said()
    link = gw.Link([("w", w)], spec, optimizer=optimizer if is_given else None, min_numel=0)
    optimizer.param_groups[0]["lr"] = rate
    for _ in range(2):
        w.grad = torch.ones(NUMEL)
        link.reduce_()
        optimizer.step()
    link.close()
    said.close()
    return [text for text in said.texts if "learning rate of" in text]


@pytest.mark.ranks
@pytest.mark.parametrize("is_given", [True, False])
def test_a_learning_rate_of_gradients_beside_a_direction_is_told_at_the_first_step(
    three_ranks: Ranks, is_given: bool
) -> None:
    for spec in ("signsgd", "signum"):
        (sentence,), *others = three_ranks(first_steps, spec, 0.06, is_given)
        assert others == [[], []]
        assert "rate, 0.06" in sentence
        assert "elements of 'w' are 0.5" in sentence
        assert "Try a learning rate of 0.005" in sentence
        assert sentence.count("\n") == 2
        assert three_ranks(first_steps, spec, 0.04, is_given) == [[], [], []]
    assert three_ranks(first_steps, "terngrad", 0.06, is_given) == [[], [], []]


def grown(spec: str) -> tuple[list[str], dict[str, float]]:
    """Eleven rounds, every fifth measured; one element is large, and a scale that all share is that of the small."""
    p = parameter(NUMEL)
    link = gw.Link([("long", p)], spec)
    link._runtime.diagnostics.interval = 5
    said, generator = Said(), torch.Generator().manual_seed(link.rank)
    for _ in range(11):
        p.grad = 1e-3 * torch.randn(NUMEL, generator=generator)
        p.grad[7] = 1.0
        link.reduce_()
    said.close()
    link.close()
    row: dict[str, float] = link.diagnostics()["parameters"]["long"]
    return said.texts, row


@pytest.mark.ranks
def test_what_is_late_is_warned_of_once_by_one_rank(three_ranks: Ranks) -> None:
    (texts, row), *others = three_ranks(grown, "ef_signsgd")
    (sentence,) = texts
    assert "gradients long" in sentence
    assert "block_size=64" in sentence
    assert row["residual_norm"] > OLD * row["gradient_norm"]
    assert row["cosine"] < LATE_COSINE
    assert [texts for texts, _ in others] == [[], []]
    for texts, _ in three_ranks(grown, "errorfeedback"):
        assert texts == []


def measured(spec: str, scale: float | None) -> dict[str, dict[str, float]]:
    """Three rounds of gradients of one magnitude in each parameter, the last one measured."""
    parameters = {"w": parameter(NUMEL), "bias": parameter(10)}
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    link = gw.Link(list(parameters.items()), spec, grad_scaler=False if scaler is None else scaler)
    link._runtime.diagnostics.interval = 2
    for _ in range(3):
        for p in parameters.values():
            p.grad = torch.full_like(p, scale or 1.0)
        link.reduce_()
    link.close()
    found: dict[str, dict[str, float]] = link.diagnostics()["parameters"]
    return found


@pytest.mark.ranks
def test_norms_are_those_of_unscaled_gradients(three_ranks: Ranks) -> None:
    """A residual is kept unscaled: beside the norm of a scaled gradient it would look short."""
    plain, scaled = (three_ranks(measured, "errorfeedback", scale) for scale in (None, 1024.0))
    assert plain == scaled
    assert plain[0]["w"]["gradient_norm"] == 64.0


@pytest.mark.ranks
def test_with_a_momentum_before_compression_what_is_sent_is_compared_with_that(three_ranks: Ranks) -> None:
    """1 + 1/2 + 1/4 in the third round; what is sent is that: exactly in signs, and rounded to float32 as a third."""
    for scale in (None, 1024.0):
        for rows in three_ranks(measured, "EFSignSGD(momentum=0.5)", scale):
            assert rows["w"]["gradient_norm"] == pytest.approx(1.75 * 64)
            assert rows["bias"]["gradient_norm"] == pytest.approx(1.75 * 10**0.5)
            assert rows["w"]["relative_error"] == 0.0
            assert rows["bias"]["relative_error"] <= 2.0**-22
            assert rows["w"]["residual_norm"] == 0.0
            assert "residual_norm" not in rows["bias"]
