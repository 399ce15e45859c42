"""Optimizers that step a link's parameters, found by their steps where none was given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradwire.algorithms.optimizers import not_stepped
from gradwire.errors import IncompatibleError
from gradwire.methods import Method
from gradwire.runtime.checks import check_optimizer
from gradwire.runtime.failures import Failures

__all__ = ["MomentumSearch", "on_any_step"]


def on_any_step(
    parameters: Mapping[str, torch.Tensor],
    call: Callable[[torch.optim.Optimizer, dict[str, torch.Tensor]], None],
    *,
    before: bool = False,
) -> Callable[[], None]:
    """Call ``call`` at every step of every optimizer that holds one of the parameters; return what ends that.

    The parameters are not kept alive.

    Args:
        parameters: By name.
        call: Takes the optimizer and those of the parameters that it holds. It must not end the calls itself: PyTorch
            is going through the hooks meanwhile.
        before: Call before the step, when no parameter has changed, instead of after it.
    """
    names = {id(p): name for name, p in parameters.items()}

    def stepping(optimizer: torch.optim.Optimizer, *_: object) -> None:
        held = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"] if id(p) in names}
        if held:
            call(optimizer, held)

    register = register_optimizer_step_pre_hook if before else register_optimizer_step_post_hook
    return register(stepping).remove


class MomentumSearch:
    """Looks for an optimizer with a momentum beside a method that brings its own.

    Each optimizer is checked before its first step, as the one that was given is when a link is built: no parameter
    has changed then. What is refused breaks the link, so that the other ranks end with an error, too. The search ends
    when every parameter has been seen in an optimizer.

    Args:
        method: Of the link; there is nothing to look for where it has no momentum.
        optimizer: The one that was given and checked; None if none was.
        parameters: That are exchanged, by name.
        failures: Of the link.
    """

    def __init__(
        self, method: Method, optimizer: Any, parameters: Mapping[str, torch.Tensor], failures: Failures
    ) -> None:
        self._method, self._failures = method, failures
        unknown = parameters if optimizer is None else not_stepped(optimizer, parameters)
        self._unknown = set(unknown) if method.owns_momentum else set[str]()
        self._stop = on_any_step(parameters, self._check, before=True) if self._unknown else None

    def _check(self, optimizer: torch.optim.Optimizer, held: dict[str, torch.Tensor]) -> None:
        if self._unknown.isdisjoint(held):
            return
        try:
            check_optimizer(self._method, optimizer, held)
        except IncompatibleError as error:
            raise self._failures.record(error, f"the first step of {type(optimizer).__name__}") from None
        self._unknown.difference_update(held)

    def end_when_done(self) -> None:
        """End the search if nothing is left to look for; not to be called during an optimizer's step."""
        if not self._unknown:
            self.end()

    def end(self) -> None:
        """Take the hook away, if it is still there."""
        stop, self._stop = self._stop, None
        if stop is not None:
            stop()
