"""Which steps of which optimizers count under local steps."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import gradwire as gw
from gradwire.link.failures import WarnOnce
from gradwire.link.found_optimizers import EveryStep, OptimizerSearch
from gradwire.link.step_counts import StepCount
from log_texts import LogTexts


class Counting:
    """Two parameters, and the count of the steps of their optimizers."""

    def __init__(self) -> None:
        self.parameters = [torch.nn.Parameter(torch.zeros(4)) for _ in range(2)]
        for p in self.parameters:
            p.grad = torch.ones(4)
        self.steps = 0
        self._counts = list[StepCount]()

    def begin(self, optimizer: Any) -> None:
        named = {str(i): p for i, p in enumerate(self.parameters)}
        self._counts.append(StepCount(optimizer, None, named, self._stepped, weakref.ref(self), WarnOnce()))

    def end(self) -> None:
        for count in self._counts:
            count.end()

    def _stepped(self) -> None:
        self.steps += 1

    def counted(self, *optimizers: Any) -> int:
        """Step optimizers in turn; return how many steps have counted so far."""
        for optimizer in optimizers:
            optimizer.step()
        return self.steps


@pytest.fixture
def counting() -> Iterator[Counting]:
    found = Counting()
    yield found
    found.end()


def sgd(*parameters: torch.Tensor) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("kept", [True, False])
def test_steps_of_later_stages_count(counting: Counting, given: bool, kept: bool) -> None:
    """Whether the program keeps the optimizers of stages that have ended or not."""
    optimizers = [sgd(*counting.parameters)]
    counting.begin(optimizers[0] if given else None)
    for stage in range(3):
        if stage:
            optimizers = [*(optimizers if kept else []), sgd(*counting.parameters)]
        for _ in range(6):
            optimizers[-1].step()
        assert counting.steps == 6 * (stage + 1)


@pytest.mark.parametrize("given", [True, False])
def test_of_two_optimizers_of_other_parameters_each_one_counts(counting: Counting, given: bool) -> None:
    one, other = sgd(counting.parameters[0]), sgd(counting.parameters[1])
    counting.begin(one if given else None)
    assert counting.counted(one, other, other, other, other, one, other) == 2


def test_after_the_one_of_two_optimizers_that_steps_last_the_whole_step_is_taken(counting: Counting) -> None:
    one, other, values = sgd(counting.parameters[0]), sgd(counting.parameters[1]), list[list[float]]()
    counting._stepped = lambda: values.append([p.tolist()[0] for p in counting.parameters])  # type: ignore[method-assign]
    counting.begin(other)
    counting.counted(one, other, one, other)
    assert [[round(-10 * value) for value in found] for found in values] == [[1, 1], [2, 2]]


class Around(torch.optim.Optimizer):
    """An optimizer around another one, with steps of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(100.0)


def test_of_an_optimizer_around_another_the_one_that_was_given_counts(counting: Counting) -> None:
    around, values = Around(sgd(*counting.parameters)), list[float]()
    counting._stepped = lambda: values.append(float(counting.parameters[0].detach()[0]))  # type: ignore[method-assign]
    counting.begin(around)
    for _ in range(3):
        around.step()
    assert [round(value) for value in values] == [100, 200, 300], "the whole step was taken"


class Wrapper(torch.optim.Optimizer):
    """An optimizer as a framework wraps it: PyTorch calls no hooks at its steps, and it has none."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def test_steps_inside_a_frameworks_wrapper_count_from_the_first(counting: Counting) -> None:
    wrapper, other = Wrapper(sgd(counting.parameters[0])), sgd(counting.parameters[1])
    counting.begin(wrapper)
    assert counting.counted(other, wrapper, other, wrapper, wrapper) == 3


def test_whoever_steps_other_parameters_than_an_optimizer_that_is_gone_is_warned(counting: Counting) -> None:
    one, other = sgd(counting.parameters[0]), sgd(counting.parameters[1])
    counting.begin(one)
    told = LogTexts()
    logging.getLogger("gradwire").addHandler(told)
    assert counting.counted(one, other) == 1
    assert not told.texts
    del one
    assert counting.counted(other, other) == 1
    logging.getLogger("gradwire").removeHandler(told)
    (text,) = told.texts
    assert "the optimizer whose steps were counted is gone" in text
    assert "nothing is exchanged until one steps that does" in text
    later = sgd(counting.parameters[0])
    assert counting.counted(later, other, later) == 3


def test_what_counts_is_called_by_a_compiled_step_and_not_compiled_with_it(counting: Counting) -> None:
    optimizer, compiling = sgd(*counting.parameters), list[bool]()
    counting._stepped = lambda: compiling.append(torch.compiler.is_compiling())  # type: ignore[method-assign]
    counting.begin(optimizer)
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(2):
        step()
    assert compiling == [False, False]


def test_a_link_that_ends_while_an_optimizer_goes_through_its_hooks_does_not_end_the_step() -> None:
    """A link may be collected at any time, and made or closed by another thread."""
    ours, other = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(4))
    other.grad = torch.ones(4)
    searches = list[OptimizerSearch]()
    hook = register_optimizer_step_pre_hook(lambda *_: searches[0].end())
    for _ in range(2):
        searches.append(OptimizerSearch(gw.method("fp32"), None, {"ours": ours}, [], cast(Any, None), WarnOnce()))
    try:
        sgd(other).step()
    finally:
        hook.remove()
        for search in searches:
            search.end()
    assert not torch.equal(other.detach(), torch.zeros(4))


class Cycle:
    """What is freed by a collection alone."""

    itself: Any = None


def test_a_link_that_is_collected_while_functions_are_listed_does_not_end_the_step() -> None:
    steps, told = EveryStep(lambda hook: None), list[Any]()
    for _ in range(1000):
        steps.add(told.append)
    optimizer, before = sgd(torch.nn.Parameter(torch.zeros(4))), gc.get_threshold()
    gc.collect()
    # Young enough for the next collection.
    link = Cycle()
    link.itself = link
    weakref.finalize(link, steps.add(told.append))
    del link
    try:
        # Python may collect when it makes any of the objects that hold others.
        gc.set_threshold(500)
        steps._tell(optimizer)
    finally:
        gc.set_threshold(*before)
    assert len(told) in (1000, 1001)
