"""EASGD with Nesterov momentum in the workers' optimizer, beside EAMSGD as the paper writes it, in NumPy.

The paper's EAMSGD (Zhang, Choromanska, LeCun 2015, the update with momentum after equations 3 and 4), for all workers
at once, with velocity v_i, momentum delta, step eta and x the centre::

    v_i <- delta v_i - eta g_i(x_i + delta v_i)
    x_i <- x_i + v_i - alpha (x_i - x)                  x <- x + alpha sum_i (x_i - x)

where x_i and x on the right are those of before the step. ``torch.optim.SGD(nesterov=True)`` holds the point at which
the gradient is taken, y_i = x_i + delta v_i, and b_i = -v_i / eta. Without the elastic term both are the same. With it
they are not: the exchange comes after the step and sees y_i, so that with x_i and v_i as above it is::

    x_i <- x_i + v_i - alpha (x_i + v_i + delta v_i - x)
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

import gradwire as gw

Array = npt.NDArray[np.float64]
State = tuple[Array, Array, Array]
SIZE = 30
MOMENTUM = 0.9


class Workers:
    """Quadratics a_i (x - c_i)^2 / 2 of unlike workers, and one start."""

    def __init__(self, count: int) -> None:
        generator = np.random.default_rng(count)
        self.count = count
        self.curvature = generator.uniform(0.5, 1.5, (count, SIZE))
        self.target = generator.normal(size=(count, SIZE))
        self.start = generator.normal(size=SIZE)

    def gradients(self, at: Array) -> Array:
        return np.asarray(self.curvature * (at - self.target))

    def ours(self, method: gw.EASGD, lr: float, steps: int) -> tuple[Array, Array]:
        """Train by torch's optimizer and the method; return the workers' parameters and the centre."""
        held = [torch.nn.Parameter(torch.from_numpy(self.start).float()) for _ in range(self.count)]
        optimizers = [torch.optim.SGD([x], lr=lr, momentum=MOMENTUM, nesterov=True) for x in held]
        found = gw.SimulatedLocalSteps([[("x", x)] for x in held], method, min_numel=0)
        for _ in range(steps):
            slopes = self.gradients(np.stack([x.detach().double().numpy() for x in held]))
            for x, optimizer, slope in zip(held, optimizers, slopes):
                x.grad = torch.from_numpy(slope).float()
                optimizer.step()
            found.after_step()
        own = np.stack([x.detach().double().numpy() for x in held])
        return own, found.global_parameters["x"].double().numpy()

    def run(self, step: Callable[[State, bool], State], every: int, steps: int) -> State:
        """Apply a step, with an exchange in every ``every``-th, from the start with velocities of 0."""
        state = (np.tile(self.start, (self.count, 1)), np.zeros((self.count, SIZE)), self.start.copy())
        for index in range(1, steps + 1):
            state = step(state, index % every == 0)
        return state

    def paper(self, alpha: float, lr: float) -> Callable[[State, bool], State]:
        """Return the paper's step: the elastic term is that of x_i before the step."""

        def step(state: State, exchanged: bool) -> State:
            x, v, centre = state
            v = MOMENTUM * v - lr * self.gradients(x + MOMENTUM * v)
            pull = alpha * (x - centre) * exchanged
            return x + v - pull, v, centre + pull.sum(0)

        return step

    def after_the_step(self, alpha: float, lr: float) -> Callable[[State, bool], State]:
        """Return the step with the elastic term of the next point of a gradient, x_i + delta v_i, after the step."""

        def step(state: State, exchanged: bool) -> State:
            x, v, centre = state
            v = MOMENTUM * v - lr * self.gradients(x + MOMENTUM * v)
            x = x + v
            pull = alpha * (x + MOMENTUM * v - centre) * exchanged
            return x - pull, v, centre + pull.sum(0)

        return step


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_nesterov_momentum_with_an_elastic_term_after_the_step(count: int, every: int) -> None:
    """The velocity is EAMSGD's; the elastic term is that of the point at which the next gradient is taken."""
    ours, alpha, lr, steps = Workers(count), 0.2, 0.05, 24
    own, centre = ours.ours(gw.EASGD(every=every, alpha=alpha), lr, steps)
    x, v, expected = ours.run(ours.after_the_step(alpha, lr), every, steps)
    # Some roundings of float32 a step, of values up to 3.
    assert np.allclose(own, x + MOMENTUM * v, rtol=0, atol=2e-5)
    assert np.allclose(centre, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("count", [2, 4])
def test_before_an_exchange_it_is_the_papers_velocity(count: int) -> None:
    """Between exchanges both are Nesterov momentum, of y_i = x_i + delta v_i here."""
    ours, alpha, lr = Workers(count), 0.2, 0.05
    own, _ = ours.ours(gw.EASGD(every=20, alpha=alpha), lr, 19)
    x, v, _ = ours.run(ours.paper(alpha, lr), 20, 19)
    assert np.allclose(own, x + MOMENTUM * v, rtol=0, atol=2e-5)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("count", [2, 4])
def test_it_is_eamsgd_only_in_the_limit_of_small_steps(count: int, every: int) -> None:
    """With alpha = rho eta, a quarter of the step leaves less than half of the distance to the paper's values."""
    ours, apart = Workers(count), []
    for lr, steps in ((0.02, 60), (0.005, 240)):
        alpha = 5 * lr
        own, centre = ours.ours(gw.EASGD(every=every, alpha=alpha), lr, steps)
        x, v, expected = ours.run(ours.paper(alpha, lr), every, steps)
        moved = float(np.linalg.norm(x - ours.start))
        apart.append(float(np.linalg.norm(np.vstack([own - x - MOMENTUM * v, [centre - expected]]))) / moved)
    # Rounding of float32 alone is below 1e-4 of the way.
    assert apart[0] > 0.005
    assert apart[1] < 0.5 * apart[0]
