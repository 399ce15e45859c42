"""Optimizers that step a link's parameters, found by their steps where none was given."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradwire.errors import HyperparameterError, IncompatibleError
from gradwire.exchange.method import Method
from gradwire.exchange.segments import is_sharded
from gradwire.link.checks import caution_about_rate, check_not_in_backward, check_optimizer
from gradwire.link.failures import Failures, WarnOnce
from gradwire.methods.feedback.optimizers import not_stepped


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


class OptimizerSearch:
    """Looks for optimizers that a link's method cannot work with.

    Each is checked before its first step: as the one that was given is when a link is built, and that it does not step
    during the backward pass. No parameter has changed then. What is refused breaks the link, so that the other ranks
    end with an error, too. The search ends when every parameter has been seen in a step. The learning rate beside a
    method that gives a direction is looked at there as well.

    Args:
        method: Of the link.
        optimizer: The one that was given and checked; None if none was.
        parameters: That are exchanged, by name.
        compressed: Names of those that do not travel in float32.
        failures: Of the link.
        warnings: Of the link.
    """

    def __init__(
        self,
        method: Method,
        optimizer: Any,
        parameters: Mapping[str, torch.Tensor],
        compressed: Iterable[str],
        failures: Failures,
        warnings: WarnOnce,
    ) -> None:
        self._method, self._failures, self._warnings = method, failures, warnings
        unknown = parameters if optimizer is None else not_stepped(optimizer, parameters)
        self._unknown = set(unknown) if method.traits.owns_momentum or method.traits.local_steps else set[str]()
        # The learning rate is looked at where the first step is taken: a schedule may have set it since.
        self._rated = set(compressed) if method.traits.direction else set[str]()
        # FSDP2 has reduced a gradient before anybody can step by it.
        self._unseen = {name for name, p in parameters.items() if not is_sharded(p)}
        searches = self._unknown or self._unseen or self._rated
        self._stop = on_any_step(parameters, self._check, before=True) if searches else None

    def _check(self, optimizer: torch.optim.Optimizer, held: dict[str, torch.Tensor]) -> None:
        try:
            if not self._unseen.isdisjoint(held):
                check_not_in_backward(self._method, optimizer, held)
            if not self._unknown.isdisjoint(held):
                check_optimizer(self._method, optimizer, held)
        except IncompatibleError as error:
            raise self._failures.record(error, f"the first step of {type(optimizer).__name__}") from None
        rated = {name: p for name, p in held.items() if name in self._rated}
        caution_about_rate(self._method, optimizer, rated, self._warnings)
        self._rated.difference_update(held)
        self._unknown.difference_update(held)
        self._unseen.difference_update(held)

    def end_when_done(self) -> None:
        """End the search if nothing is left to look for; not to be called during an optimizer's step."""
        if not (self._unknown or self._unseen or self._rated):
            self.end()

    def end(self) -> None:
        """Take the hook away, if it is still there."""
        stop, self._stop = self._stop, None
        if stop is not None:
            stop()


class LearningRates:
    """Reads the learning rate of each parameter from the optimizer that steps after the exchange.

    Args:
        method: Of the link.
        optimizer: None if none was given.
        parameters: That are exchanged, by name.
    """

    def __init__(self, method: Method, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> None:
        self._optimizer = optimizer if method.traits.needs_learning_rates else None
        self._names = {id(p): name for name, p in parameters.items()}

    def read(self) -> dict[str, float] | None:
        """Return the learning rates by name, as the optimizer's groups hold them now.

        Returns:
            None where the method need not know them, or there is no optimizer.

        Raises:
            IncompatibleError: one is negative or not finite.
        """
        if self._optimizer is None:
            return None
        found: dict[str, float] = {}
        for group in self._optimizer.param_groups:
            rate = float(group["lr"])
            ours = [name for p in group["params"] if (name := self._names.get(id(p))) is not None]
            if ours and not 0 <= rate < math.inf:
                raise IncompatibleError(
                    f"the learning rate of parameter {ours[0]!r} is {rate}: a finite number of at least 0 is needed"
                )
            found.update(dict.fromkeys(ours, rate))
        return found


def check_scaler(grad_scaler: Any) -> None:
    """Refuse what cannot say by how much gradients are scaled.

    Raises:
        HyperparameterError: it is neither None nor False nor has a ``get_scale()``.
    """
    if grad_scaler is None or grad_scaler is False or callable(getattr(grad_scaler, "get_scale", None)):
        return
    raise HyperparameterError(
        f"grad_scaler: the torch.amp.GradScaler that scales the loss is needed, or None, or False for a loss that none "
        f"scales, not {grad_scaler!r}"
    )


def scale_of(grad_scaler: Any) -> float:
    """Return the factor that is in this round's gradients."""
    return float(grad_scaler.get_scale()) if grad_scaler else 1.0


def check_unscaled(method: Method, grad_scaler: Any) -> None:
    """Refuse gradients of a scaled loss where the method was not told; to be called with the first gradients.

    Nothing tells a communication hook that a loss was scaled. But a scaler that has scaled one is alive, and before the
    first backward pass only a program that trains with scaled losses has such a thing. One that ``gc.freeze`` hides is
    not found.

    Raises:
        IncompatibleError: there is one, and neither it nor False was handed over.
    """
    if not method.traits.needs_loss_scale or grad_scaler is not None:
        return
    if not _scaling():
        return
    gc.collect()
    if _scaling():
        raise IncompatibleError(
            f"a GradScaler scales losses in this program, and {method!r} needs to know by how much: hand it over, "
            "grad_scaler=scaler, or say grad_scaler=False where these gradients are not scaled when exchanged: it is "
            "another module's, or has unscaled them before"
        )


def _scaling() -> bool:
    """Return whether there is a scaler that has scaled a loss; one that waits for collection counts, too."""
    # type(), since some objects are proxies whose class is not to be asked.
    scalers = (o for o in gc.get_objects() if issubclass(type(o), torch.amp.GradScaler))
    return any(scaler.is_enabled() and getattr(scaler, "_scale", None) is not None for scaler in scalers)
