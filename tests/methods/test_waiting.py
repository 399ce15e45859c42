"""How long gradients wait in a residual: expected, measured, and what momentum beside it does to steps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import gradwire as gw
from gradwire.methods.feedback.waiting import (
    LONG_WAIT,
    expected_wait,
    share_of_largest,
    stable_rate,
    wait_over_cycle,
)
from gradwire.methods.sparse.random_places import FeistelPermutation

NUMEL = 20_000


def sgd(momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1, momentum=momentum)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def measured(spec: str, changing: bool, rounds: int = 360) -> float:
    """Return the wait by the sums over rounds once a residual has settled, of gradients that change or do not.

    Each round's wait is checked, too. In random blocks it differs much from round to round: neighbours wait alike.
    """
    link = gw.SimulatedLink([("w", torch.empty(NUMEL)), ("b", torch.empty(10))], spec, 1)
    link._diagnostics.interval = 1
    sums, numel = np.zeros(2), NUMEL + 10
    for round in range(rounds):
        # What is small and travels in float32 does not wait, however large it is.
        gradient = gaussian(1, numel, seed=round if changing else 0)
        gradient[0, NUMEL:] = 1000.0
        link.reduce_(gradient)
        if round >= 60:
            found = link.diagnostics()
            squares = [found["parameters"]["w"][name] ** 2 for name in ("residual_norm", "sent_norm")]
            assert found["wait"]["measured_rounds"] == pytest.approx(squares[0] / squares[1])
            sums += squares
    return float(sums[0] / sums[1])


@pytest.mark.parametrize("changing", [False, True])
@pytest.mark.parametrize("contiguous", [False, True])
def test_the_measured_wait_of_random_elements_is_the_expected_one(changing: bool, contiguous: bool) -> None:
    """9 rounds with a tenth of the elements.

    Scattered, 300 rounds of 2000 elements deviate by less than a percent; a block is one draw a round, whose square has
    twice its mean as deviation, so that 300 deviate by an eighth.
    """
    spec = f"ErrorFeedback(RandK(density=0.1, contiguous={contiguous}))"
    assert gw.method(spec).wait_of(NUMEL) == pytest.approx(9.0)
    assert measured(spec, changing) == pytest.approx(9.0, rel=0.4 if contiguous else 0.03)


def test_the_expected_wait_of_the_largest_elements_is_that_of_one_gaussian_vector() -> None:
    """Later, large elements are rarer than in a Gaussian vector, since those were sent: the wait grows."""
    for spec, density in (("ErrorFeedback(TopK(density=0.1))", 0.1), ("GTopK(density=0.05)", 0.05)):
        link = gw.SimulatedLink([("w", torch.empty(200_000))], spec, 1)
        link._diagnostics.interval = 1
        # The first round of a simulation is not measured.
        link.reduce_(torch.zeros(1, 200_000))
        link.reduce_(gaussian(1, 200_000))
        found = link.diagnostics()["wait"]
        assert found["measured_rounds"] == pytest.approx(expected_wait(share_of_largest(density)), rel=0.02)
        assert found["expected_rounds"] == pytest.approx(found["measured_rounds"], rel=0.02)


@pytest.mark.parametrize("parts", [1, 2, 8])
def test_over_a_cycle_the_wait_is_that_of_counted_rounds(parts: int) -> None:
    """Each element, in each of many rounds: how many rounds until the next that sends it."""
    shuffle, cycles = FeistelPermutation([64 * parts], [(3, 4)], parts), 400
    rounds = cycles * parts
    sent = np.zeros((rounds, 64 * parts), bool)
    for round in range(rounds):
        sent[round, shuffle.part(*divmod(round, parts))[0]] = True
    waits = np.zeros(64 * parts)
    total = []
    for round in reversed(range(rounds)):
        waits = np.where(sent[round], 0, waits + 1)
        if 2 * parts <= round < rounds - 2 * parts:
            total.append(waits.mean())
    assert np.mean(total) == pytest.approx(wait_over_cycle(parts), abs=0.02 * parts)
    assert gw.ErrorFeedback(compressor=gw.GRandK(cycle=parts)).wait_of() == wait_over_cycle(parts)


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.5, 1.0])
def test_the_share_of_the_largest_is_that_of_a_long_gaussian_vector(density: float) -> None:
    x = gaussian(1_000_000).square().sort(descending=True).values
    assert float(x[: int(density * len(x))].sum() / x.sum()) == pytest.approx(share_of_largest(density), rel=0.01)


def radius(rate: float, wait: float, beta: float) -> float:
    """Return the largest magnitude of the roots of the characteristic polynomial."""
    delta = 1 / (1 + wait)
    polynomial = np.polymul(np.polymul([1, -1], [1, -beta]), [1, delta - 1])
    polynomial[1] += rate * delta
    return float(np.abs(np.roots(polynomial)).max())


@pytest.mark.parametrize(("wait", "beta"), list(itertools.product((0.0, 0.1, 1.0, 9.0, 100.0), (0.0, 0.5, 0.9, 0.99))))
def test_below_the_bound_on_the_rate_the_mean_is_stable_and_above_it_is_not(wait: float, beta: float) -> None:
    bound = stable_rate(wait, beta)
    assert radius(0.99 * bound, wait, beta) < 1 < radius(1.01 * bound, wait, beta)


def test_the_polynomial_is_that_of_an_exchange_with_momentum_before_or_after() -> None:
    """The mean of RandK's exchanges, by iteration: 1 % below the bound it shrinks, 1 % above it grows."""

    def distance(rate: float, delta: float, before: bool) -> float:
        x, e, v = 1.0, 0.0, 0.0
        for _ in range(6000):
            if before:
                v = 0.9 * v + x
                p = v + e
                e, x = (1 - delta) * p, x - rate * delta * p
            else:
                p = x + e
                e, v = (1 - delta) * p, 0.9 * v + delta * p
                x -= rate * v
        return abs(x)

    bound = stable_rate(9.0, 0.9)
    for before in (False, True):
        assert distance(0.99 * bound, 0.1, before) < 0.5
        assert distance(1.01 * bound, 0.1, before) > 2.0
    assert stable_rate(9.0, 0.0) > 10 * stable_rate(9.0, 0.9)


@pytest.mark.parametrize(
    ("spec", "wait"),
    [
        ("ErrorFeedback(RandK(density=0.25))", 3.0),
        ("ErrorFeedback(RandK(density=0.5), decay=0.5)", 1 / 3),
        ("errorfeedback", 0.0),
        ("ErrorFeedback(QSGDMaxNorm())", 0.0),
        ("Coded(ErrorFeedback(TopK(density=0.1)))", expected_wait(share_of_largest(0.1))),
        # What a worker keeps cancels in the mean, or is not known of usual vectors.
        ("powersgd", None),
        ("acp_sgd", None),
        ("ef_signsgd", None),
        ("onebit", None),
        ("ErrorFeedback(Threshold())", None),
        ("diloco", None),
        # These keep no residual.
        ("terngrad", None),
        ("topk", None),
        ("ef21", None),
    ],
)
def test_a_method_says_how_long_it_lets_gradients_wait(spec: str, wait: float | None) -> None:
    found = gw.method(spec).wait_of(100_000)
    assert found == (None if wait is None else pytest.approx(wait))


def test_advice_is_the_warning_at_attach_or_what_is_measured_and_only_beside_momentum() -> None:
    w = torch.nn.Parameter(torch.zeros(NUMEL))

    def told(spec: str, optimizer: torch.optim.Optimizer | None, gradient: torch.Tensor) -> list[str | None]:
        link = gw.SimulatedLink([("w", w)], spec, 1, optimizer=optimizer)
        link._diagnostics.interval = 4
        found = [link.diagnostics()["wait"]["advice"]]
        for _ in range(9):
            link.reduce_(gradient.clone()[None])
        return [*found, link.diagnostics()["wait"]["advice"]]

    flat = torch.ones(NUMEL)
    hundredth = "ErrorFeedback(TopK())"
    before, after = told(hundredth, sgd(), flat)
    assert before == after == gw.method(hundredth).caution(sgd(), {"w": w})
    assert after is not None
    assert after.count("\n") == 0
    assert "without momentum at 10 times the learning rate" in after
    assert told(hundredth, sgd(0.0), flat) == told(hundredth, None, flat) == [None, None]
    # Of elements of one magnitude they have 0.03 of the square, where they have 0.19 of a Gaussian vector's.
    expected, measured = told("ErrorFeedback(TopK(density=0.03))", sgd(), flat)
    assert expected is None
    assert measured is not None
    assert "rounds late" in measured
    # The residual of a worker says nothing of the mean's.
    assert told("powersgd", sgd(), gaussian(NUMEL)) == [None, None]
    assert 2.6 < LONG_WAIT < 9.0
