"""Proximal operators are the minimisers they claim to be; the optimizer steps, schedules and resumes as torch's do."""

from __future__ import annotations

import io
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gradwire as gw

numbers = st.floats(-5, 5, allow_nan=False, width=32)


def brute_force(prox: gw.L1 | gw.Box, point: float, lr: float) -> tuple[float, float]:
    """Minimise ``R(u) + (u - point)^2 / (2 lr)`` over a grid; give the minimiser and the grid's spacing."""
    grid = torch.linspace(-6, 6, 2401, dtype=torch.float64)
    penalty = torch.tensor([prox.value(u) for u in grid], dtype=torch.float64)
    best = int((penalty + (grid - point).square() / (2 * lr)).argmin())
    return float(grid[best]), 12 / 2400


@pytest.mark.parametrize("prox", [gw.L1(strength=0.7), gw.L1(strength=0.0), gw.Box(low=-1.0, high=0.5)])
@pytest.mark.parametrize("point", [-3.0, -0.3, 0.0, 0.2, 4.0])
def test_an_operator_minimises_its_penalty_plus_the_distance(prox: gw.L1 | gw.Box, point: float) -> None:
    found = torch.tensor([point], dtype=torch.float64)
    prox.apply_(found, 0.9)
    expected, spacing = brute_force(prox, point, 0.9)
    # A strictly convex function's minimiser on a grid lies within one spacing of its minimiser.
    assert abs(float(found) - expected) <= spacing


@given(values=st.lists(numbers, min_size=1, max_size=20), lr=st.floats(0, 2), strength=st.floats(0, 2))
def test_shrinking_is_that_of_the_formula_and_its_zeros_are_exact(
    values: list[float], lr: float, strength: float
) -> None:
    x = torch.tensor(values, dtype=torch.float64)
    found = x.clone()
    gw.L1(strength=strength).apply_(found, lr)
    assert torch.equal(found, x.sign() * (x.abs() - lr * strength).clamp_min(0))
    assert bool((found[x.abs() <= lr * strength] == 0).all())


def test_values_and_numbers_that_are_none() -> None:
    assert gw.L1(strength=0.5).value(torch.tensor([[1.0, -3.0]])) == 2.0
    box = gw.Box(low=0.0, high=math.inf)
    assert box.value(torch.tensor([0.0, 7.0])) == 0.0
    assert box.value(torch.tensor([-1e-3])) == math.inf
    for prox in (gw.L1(strength=1.0), box):
        broken = torch.tensor([math.nan, 2.0])
        prox.apply_(broken, 0.1)
        assert math.isnan(broken[0]), "a non-finite weight must stay visible"


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        (gw.L1, {"strength": -1.0}, "L1: strength is -1.0"),
        (gw.L1, {"strength": math.inf}, "L1: strength is inf"),
        (gw.L1, {"strength": "1"}, "L1: strength is '1'"),
        (gw.Box, {"low": 1.0, "high": 0.0}, "Box: low is 1.0 and high is 0.0"),
        (gw.Box, {"low": math.nan, "high": 0.0}, "Box: low is nan"),
        (gw.Box, {"low": math.inf, "high": math.inf}, "Box: low is inf"),
    ],
)
def test_operators_that_make_no_sense_are_refused(kind: type, fields: dict[str, object], words: str) -> None:
    with pytest.raises(gw.HyperparameterError, match=words):
        kind(**fields)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -0.1}, "lr is -0.1"),
        ({"lr": math.nan}, "lr is nan"),
        ({"lr": 0.1, "momentum": 1.0}, "momentum is 1.0"),
        ({"lr": 0.1, "prox": "l1"}, "prox is 'l1': .*L1.*Box"),
    ],
)
def test_settings_of_the_optimizer_that_make_no_sense_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(gw.HyperparameterError, match=words):
        gw.ProximalSGD([nn.Parameter(torch.zeros(1))], **options)  # type: ignore[arg-type]


def steps(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, count: int) -> None:
    for step in range(count):
        draw = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        parameter.grad = torch.randn(parameter.shape, generator=draw)
        optimizer.step()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_without_an_operator_it_is_sgd_bit_for_bit(momentum: float) -> None:
    ours, torchs = nn.Parameter(torch.ones(50)), nn.Parameter(torch.ones(50))
    steps(gw.ProximalSGD([ours], lr=0.1, momentum=momentum), ours, 5)
    steps(torch.optim.SGD([torchs], lr=0.1, momentum=momentum), torchs, 5)
    assert torch.equal(ours, torchs)


def test_the_step_is_momentum_then_descent_then_the_operator() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = gw.ProximalSGD([parameter], lr=0.5, prox=gw.L1(strength=0.2), momentum=0.5)
    x, v = [1.0, -2.0], [0.0, 0.0]
    for gradient in ([1.0, 1.0], [1.9, -3.0], [0.1, 0.0]):
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
        v = [0.5 * a + g for a, g in zip(v, gradient)]
        x = [p - 0.5 * a for p, a in zip(x, v)]
        x = [math.copysign(max(abs(p) - 0.1, 0.0), p) for p in x]
        # Three steps of a few roundings each, on numbers of at most 4.
        torch.testing.assert_close(parameter.detach(), torch.tensor(x, dtype=torch.float64), rtol=0, atol=1e-14)


def test_it_ends_at_the_solution_that_the_conditions_of_optimality_give() -> None:
    """min (x - c)^2 / 2 + strength |x|_1 is solved by shrinking c."""
    target = torch.tensor([2.0, 0.1, -1.0, -0.3], dtype=torch.float64)
    parameter = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    optimizer = gw.ProximalSGD([parameter], lr=0.5, prox=gw.L1(strength=0.4))
    for _ in range(60):  # Contracts by 1/2 a step: 2^-60 < 1e-17.
        optimizer.zero_grad()
        ((parameter - target).square().sum() / 2).backward()
        optimizer.step()
    expected = torch.tensor([1.6, 0.0, -0.6, 0.0], dtype=torch.float64)
    torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=1e-15)


def test_groups_have_their_own_operator_and_a_schedule_moves_the_threshold() -> None:
    free, boxed, shrunk = (nn.Parameter(torch.full((2,), 2.0)) for _ in range(3))
    optimizer = gw.ProximalSGD(
        [
            {"params": [free], "prox": None},
            {"params": [boxed], "prox": gw.Box(low=0.0, high=1.0)},
            {"params": [shrunk]},
        ],
        lr=1.0,
        prox=gw.L1(strength=0.5),
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for parameter in (free, boxed, shrunk):
        parameter.grad = torch.zeros(2)
    for expected in (1.5, 1.25, 1.125):
        optimizer.step()
        schedule.step()
        assert free.tolist() == [2.0, 2.0]
        assert boxed.tolist() == [1.0, 1.0]
        assert shrunk.tolist() == [expected, expected]
    with pytest.raises(gw.HyperparameterError, match="prox is 3"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "prox": 3})


def test_a_parameter_without_gradient_stays() -> None:
    parameter = nn.Parameter(torch.ones(2))
    gw.ProximalSGD([parameter], lr=1.0, prox=gw.L1(strength=0.5)).step()
    assert parameter.tolist() == [1.0, 1.0]


def test_the_closure_is_called_with_gradients_on() -> None:
    parameter = nn.Parameter(torch.tensor([3.0]))
    optimizer = gw.ProximalSGD([parameter], lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == 9.0
    assert float(parameter.detach()) == pytest.approx(2.4)


@pytest.mark.parametrize("prox", [None, gw.L1(strength=0.01), gw.Box(low=-0.5, high=math.inf)])
def test_a_saved_optimizer_continues_in_the_same_bits(prox: gw.L1 | gw.Box | None) -> None:
    whole, half = nn.Parameter(torch.ones(9)), nn.Parameter(torch.ones(9))
    first = gw.ProximalSGD([whole], lr=0.1, prox=prox, momentum=0.9)
    steps(first, whole, 4)
    file = io.BytesIO()
    torch.save({"optimizer": first.state_dict(), "x": whole.detach()}, file)
    assert first.param_groups[0]["prox"] == prox
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    half.data.copy_(saved["x"])
    second = gw.ProximalSGD([half], lr=7.0)
    second.load_state_dict(saved["optimizer"])
    assert second.param_groups[0]["prox"] == prox
    steps(first, whole, 3)
    steps(second, half, 3)
    assert torch.equal(whole, half)


def test_a_state_of_another_version_is_refused() -> None:
    optimizer = gw.ProximalSGD([nn.Parameter(torch.ones(1))], lr=0.1, prox=gw.L1(strength=1.0))
    state = optimizer.state_dict()
    state["param_groups"][0]["prox"] = {"name": "L7", "strength": 1.0}
    with pytest.raises(gw.HyperparameterError, match=r"L7.*L1, Box"):
        optimizer.load_state_dict(state)


def test_the_state_of_another_optimizer_is_refused_by_name_of_what_it_lacks() -> None:
    optimizer = gw.ProximalSGD([nn.Parameter(torch.ones(1))], lr=0.1)
    for kind, lacks in ((torch.optim.SGD, "'prox'"), (torch.optim.Adam, "'momentum', 'prox'")):
        state = kind([nn.Parameter(torch.ones(1))], lr=0.1).state_dict()
        with pytest.raises(gw.IncompatibleError, match=f"another optimizer's state: its groups have no {lacks}, and"):
            optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(
    ("setting", "value"), [("lr", -1.0), ("momentum", 1.0), ("prox", {"name": "L1", "strength": -1.0})]
)
def test_a_saved_state_is_checked_as_settings_are(setting: str, value: object) -> None:
    optimizer = gw.ProximalSGD([nn.Parameter(torch.ones(2))], lr=0.5)
    state = optimizer.state_dict()
    state["param_groups"][0][setting] = value
    with pytest.raises(gw.HyperparameterError):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_sparse_gradients_are_refused() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.zeros(3).to_sparse()
    with pytest.raises(gw.IncompatibleError, match="sparse"):
        gw.ProximalSGD([parameter], lr=0.1).step()
