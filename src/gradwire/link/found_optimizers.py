"""Optimizers and scalers of a link: found by their steps if none was given, checked, and read."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradwire.errors import HyperparameterError, IncompatibleError
from gradwire.exchange.method import Method
from gradwire.exchange.segments import is_sharded
from gradwire.link.checks import caution_about_rate, check_not_in_backward, check_optimizer
from gradwire.link.failures import Failures, WarnOnce
from gradwire.link.parameters import described


def uncompiled(hook: Callable[..., None]) -> Any:
    """Return a hook of an optimizer's steps that ``torch.compile(optimizer.step)`` calls and does not trace.

    An exchange holds locks, and searches for scalers; compiled, its arithmetic would have other bits.
    """
    return torch.compiler.disable(hook, reason="gradwire's exchanges are not compiled")


class EveryStep:
    """Functions that are called at the steps of all optimizers, by a hook that stays for ever.

    PyTorch goes through its hooks while it calls them: with one for each function, a link that is made, closed or
    collected meanwhile, as while an optimizer of another thread steps, would end that step.

    Args:
        register: Registers a hook of all optimizers' steps.
    """

    def __init__(self, register: Callable[[Any], Any]) -> None:
        self._register, self._is_heard = register, False
        self._calls: dict[object, Callable[[torch.optim.Optimizer], None]] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: Callable[[torch.optim.Optimizer], None]) -> Callable[[], None]:
        """Call a function with each optimizer, after those that were added before; return a function to end that."""
        if not self._is_heard:
            self._is_heard = True
            self._register(uncompiled(self._tell))
        key = object()
        self._calls[key] = call

        def end() -> None:
            self._calls.pop(key, None)

        return end

    def _tell(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        # Not of items: the tuples that are made for them may set off a collection, and so the end of a link's call.
        for key in list(self._calls):
            # The call before may have ended this one.
            if (call := self._calls.get(key)) is not None:
                call(optimizer)


BEFORE_STEPS = EveryStep(register_optimizer_step_pre_hook)
"""What is called before steps, when no parameter has changed."""

AFTER_STEPS = EveryStep(register_optimizer_step_post_hook)
"""What is called after steps."""


class _Updates:
    """A scaler's ``update()`` that also calls functions of the links that count its calls.

    All links of a scaler share one, so that each can end without regard to the others.

    Args:
        grad_scaler: The scaler.

    Attributes:
        calls: Called after each update, in this order.
    """

    def __init__(self, grad_scaler: Any) -> None:
        self.calls: list[Callable[[], None]] = []
        self._update, self._replaced = grad_scaler.update, vars(grad_scaler).get("update")

    def __call__(self, *arguments: Any, **options: Any) -> None:
        self._update(*arguments, **options)
        for call in tuple(self.calls):
            # The call before may have ended this one's link.
            if call in self.calls:
                call()

    def __reduce__(self) -> Any:
        # A copy of the scaler has its own update(): links count that of this one.
        return _given_back, (self._update,)

    def remove(self, grad_scaler: Any) -> None:
        """Give the scaler its former ``update()`` again, unless somebody else has replaced it since."""
        if vars(grad_scaler).get("update") is not self:
            return
        if self._replaced is None:
            del grad_scaler.update
        else:
            grad_scaler.update = self._replaced


def _given_back(update: Any) -> Any:
    return update


def on_updates(grad_scaler: Any, call: Callable[[], None]) -> Callable[[], None]:
    """Call ``call`` after every ``update()`` of a scaler; return a function to end that."""
    updates = vars(grad_scaler).get("update")
    if not isinstance(updates, _Updates):
        updates = grad_scaler.update = _Updates(grad_scaler)
    updates.calls.append(call)

    def end() -> None:
        updates.calls.remove(call)
        if not updates.calls:
            updates.remove(grad_scaler)

    return end


class OptimizerSearch:
    """Finds optimizers that do not suit a link's method.

    Each optimizer is checked before it steps, when no parameter has changed: by the checks of a given optimizer, and
    that it does not step during the backward pass. An unsuitable one breaks the link, so that the other ranks end
    with an error, too. If the method's outcome is a direction, the learning rate is also checked.

    With a method that brings its own momentum, takes local steps, or follows the optimizer that was given, every step
    is looked at as long as the link is open: another optimizer may take over in a later stage of a training, and a
    schedule may set a momentum. Otherwise the search ends when every parameter has been seen in a step.

    Args:
        method: Method of the link.
        optimizer: The optimizer that was given; None if none was.
        parameters: The parameters that are exchanged, by name.
        compressed: Names of the parameters that are not sent in float32.
        failures: Failures of the link.
        warnings: Warnings of the link.
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
        traits = method.traits
        # Of several candidates those that follow one are left out where another kind of optimizer was given.
        follows = traits.needs_optimizer or (traits.needs_learning_rates and not traits.tries)
        self._followed = optimizer if follows else None
        self._lasts = bool(traits.owns_momentum or traits.local_steps or self._followed is not None)
        # The learning rate is checked at the first step, since a schedule may have set it after the link was made.
        self._rated = set(compressed) if method.traits.direction else set[str]()
        # FSDP2 reduces a gradient before an optimizer can use it.
        self._unseen = {name for name, p in parameters.items() if not is_sharded(p)}
        searches = self._lasts or self._unseen or self._rated
        # The parameters are not kept alive.
        self._names = {id(p): name for name, p in parameters.items()}
        self._stop = BEFORE_STEPS.add(self._look) if searches else None

    def _look(self, optimizer: torch.optim.Optimizer) -> None:
        names = self._names
        held = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"] if id(p) in names}
        if held:
            self._check(optimizer, held)

    def _check(self, optimizer: torch.optim.Optimizer, held: dict[str, torch.Tensor]) -> None:
        try:
            if not self._unseen.isdisjoint(held):
                check_not_in_backward(self._method, optimizer, held)
            if self._followed not in (None, optimizer):
                raise IncompatibleError(
                    f"{self._method!r} follows the {type(self._followed).__name__} that was given, and another "
                    f"{type(optimizer).__name__} steps parameter {next(iter(held))!r}: close the link, and attach to "
                    "the module, wrapped anew, with that one"
                )
            if self._lasts:
                check_optimizer(self._method, optimizer, held)
        except IncompatibleError as error:
            raise self._failures.record(error, f"a step of {type(optimizer).__name__}") from None
        rated = {name: p for name, p in held.items() if name in self._rated}
        caution_about_rate(self._method, optimizer, rated, self._warnings)
        self._rated.difference_update(held)
        self._unseen.difference_update(held)

    def end_when_done(self) -> None:
        """End the search if every parameter has been seen, and later steps need no look."""
        if not (self._lasts or self._unseen or self._rated):
            self.end()

    def end(self) -> None:
        """Look at no further steps."""
        stop, self._stop = self._stop, None
        if stop is not None:
            stop()


class LearningRates:
    """Reads the learning rate of each parameter from the optimizer that steps after the exchange.

    Args:
        method: Method of the link.
        optimizer: The optimizer; None if none was given.
        parameters: The parameters that are exchanged, by name.
    """

    def __init__(self, method: Method, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> None:
        self._method = method
        self._optimizer = optimizer if method.traits.needs_learning_rates else None
        self._names = {id(p): name for name, p in parameters.items()}

    def read(self) -> dict[str, float] | None:
        """Return the learning rates by name, as the optimizer's groups hold them now.

        Returns:
            None if the method does not use them, or there is no optimizer.

        Raises:
            IncompatibleError: one is negative or not finite, or a group with one of the parameters has none.
        """
        if self._optimizer is None:
            return None
        found: dict[str, float] = {}
        for group in self._optimizer.param_groups:
            ours = [name for p in group["params"] if (name := self._names.get(id(p))) is not None]
            if not ours:
                continue
            if group.get("lr") is None:
                raise IncompatibleError(
                    f"parameter {ours[0]!r} has no learning rate, which {self._method!r} uses: its group in "
                    f"{type(self._optimizer).__name__} has lr=None; give it a rate, or use another optimizer"
                )
            rate = float(group["lr"])
            if not 0 <= rate < math.inf:
                raise IncompatibleError(
                    f"the learning rate of parameter {ours[0]!r} is {rate}: a finite number of at least 0 is needed"
                )
            found.update(dict.fromkeys(ours, rate))
        return found


def check_scaler(grad_scaler: Any) -> None:
    """Raise if an object is not a gradient scaler.

    Raises:
        HyperparameterError: it is neither None nor False, and has no ``get_scale()``.
    """
    if grad_scaler is None or grad_scaler is False or callable(getattr(grad_scaler, "get_scale", None)):
        return
    raise HyperparameterError(
        f"grad_scaler: the torch.amp.GradScaler that scales the loss is needed, or None, or False for a loss that none "
        f"scales, not {grad_scaler!r}"
    )


def check_kinds(grad_scaler: Any, optimizer: Any, *, counts: bool = False) -> None:
    """Raise if an object is no scaler, or another one no optimizer.

    Args:
        counts: True if the steps of the optimizer are counted, unless there is a scaler, whose updates are.

    Raises:
        HyperparameterError: as :func:`check_scaler`, or the optimizer is not None, and has no ``param_groups`` or no
            ``step()``.
        IncompatibleError: its steps would be counted, and PyTorch does not tell of them.
    """
    check_scaler(grad_scaler)
    if optimizer is None:
        return
    if not hasattr(optimizer, "param_groups") or not callable(getattr(optimizer, "step", None)):
        raise HyperparameterError(
            "optimizer: the torch optimizer of the parameters is needed, or None, not "
            f"{described(optimizer)}; of several, the one of the parameters that the method compresses"
        )
    if counts and not grad_scaler and not (hasattr(optimizer, "register_step_post_hook") or _holds_one(optimizer)):
        raise IncompatibleError(
            f"{type(optimizer).__name__} is no torch optimizer and holds none, so that its steps cannot be counted: "
            "leave it out, and call link.after_step() after each of them"
        )


def _holds_one(found: object, levels: int = 3) -> bool:
    """Return whether an object is a torch optimizer or holds one, also in a list, a mapping or another object."""
    if isinstance(found, torch.optim.Optimizer):
        return True
    inside = found if isinstance(found, Mapping) else getattr(found, "__dict__", {})
    held = found if isinstance(found, list | tuple) else inside.values()
    return levels > 0 and any(_holds_one(one, levels - 1) for one in held)


def scale_of(grad_scaler: Any) -> float:
    """Return the loss scale of this round's gradients."""
    return float(grad_scaler.get_scale()) if grad_scaler else 1.0


def check_unscaled(method: Method, grad_scaler: Any) -> None:
    """Raise if gradients are those of a scaled loss and no scaler was given; call it with the first gradients.

    A communication hook does not learn that a loss was scaled. But before the end of the first backward pass, only a
    program that trains with scaled losses holds a scaler that has scaled one. A scaler that ``gc.freeze`` hides is not
    found.

    Raises:
        IncompatibleError: there is such a scaler, and neither it nor False was given.
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
    """Return whether a scaler has scaled a loss; one that waits for garbage collection counts, too."""
    # Not gc.get_objects(): its list would hold tuples that other threads are just building, whose growth fails then.
    kinds = tuple(_with_subclasses(torch.amp.GradScaler))
    # type(), since reading the class of some proxy objects has side effects.
    scalers = (o for o in gc.get_referrers(*kinds) if issubclass(type(o), kinds))
    return any(scaler.is_enabled() and getattr(scaler, "_scale", None) is not None for scaler in scalers)


def _with_subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for derived in kind.__subclasses__():
        yield from _with_subclasses(derived)
