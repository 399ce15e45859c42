"""Counts of an optimizer's steps for a link, and the warning that nobody counts them any more."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from gradwire.link.failures import WarnOnce
from gradwire.link.found_optimizers import on_any_step, on_updates


def on_steps(
    optimizer: Any, grad_scaler: Any, parameters: Mapping[str, torch.Tensor], stepped: Callable[[], None]
) -> Callable[[], None]:
    """Call ``stepped`` after every step of an optimizer, and return a function that ends that.

    Args:
        optimizer: The optimizer; None for any optimizer that holds one of the parameters.
        grad_scaler: A scaler whose calls of ``update()`` are counted instead. It skips steps on ranks that overflowed,
            and these must count as on the other ranks.
        parameters: The parameters that are exchanged.
    """
    if grad_scaler:
        return on_updates(grad_scaler, stepped)
    if optimizer is not None:
        return optimizer.register_step_post_hook(lambda *_: stepped()).remove  # type: ignore[no-any-return]
    first: list[int] = []

    def any_stepped(found: torch.optim.Optimizer, _: object) -> None:
        # With several optimizers, the steps of the first are counted. Later changes by the others are sent in the next
        # exchange.
        if not first:
            first.append(id(found))
        if first == [id(found)]:
            stepped()

    return on_any_step(parameters, any_stepped)


class StepCount:
    """The count of the steps of an optimizer that was given, or of the updates of a scaler.

    A link that is collected exchanges nothing any more. If it was not closed, the program may not know of that: a step
    that no other link counts either causes a warning.

    Args:
        optimizer, grad_scaler: See :func:`on_steps`; one of them is given.
        stepped: Called after every step.
        link: The link that counts.
        warnings: Its warnings.
    """

    _open: ClassVar[weakref.WeakSet[StepCount]] = weakref.WeakSet()

    def __init__(
        self,
        optimizer: Any,
        grad_scaler: Any,
        stepped: Callable[[], None],
        link: weakref.ref[Any],
        warnings: WarnOnce,
    ) -> None:
        self._counted, self._is_scaler = weakref.ref(grad_scaler or optimizer), bool(grad_scaler)
        self._link, self._warnings = link, warnings
        self._remove = on_steps(optimizer, grad_scaler, {}, stepped)
        self._open.add(self)

    def end(self) -> None:
        """End the count; if the link was collected, warn at the next step."""
        self._open.discard(self)
        self._remove()
        counted = self._counted()
        # A collection clears the references to a link before its finalizer is called; close() finds it alive.
        if self._link() is None and counted is not None and not self._counted_by_others():
            optimizer, grad_scaler = (None, counted) if self._is_scaler else (counted, None)
            on_steps(optimizer, grad_scaler, {}, self._warn)

    def _counted_by_others(self) -> bool:
        counted = self._counted()
        return any(other._counted() is counted for other in tuple(self._open))

    def _warn(self) -> None:
        if not self._counted_by_others():
            self._warnings.here(
                "collected",
                f"the link that counted the steps of {type(self._counted()).__name__} was not kept, so that Python has "
                "collected it, and nothing is exchanged any more: keep the link as long as the training lasts, or end "
                "it by link.close()",
            )
