"""Counts of an optimizer's steps for a link, and the warning that nobody counts them any more."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from gradwire.link.failures import WarnOnce
from gradwire.link.found_optimizers import AFTER_STEPS, on_updates, uncompiled


class StepCount:
    """The count of the steps of a link's optimizer, or of the updates of a scaler.

    It sees the steps of all optimizers. With several, the steps of one are counted: the one that was given, or the
    first that holds one of the parameters. Later changes by the others are sent in the next exchange. An optimizer that
    shares parameters with it and steps twice without a step of it between has taken its place, as in another stage of a
    training: both steps count, and all later ones. So ranks decide alike, whenever Python frees the former one.

    A link that is collected exchanges nothing any more. If it was not closed, the program may not know of that: a step
    of the optimizer that was given, which no other link counts either, causes a warning.

    Args:
        optimizer: The optimizer, or a framework's wrapper of it; None for the first that holds one of the parameters.
        grad_scaler: A scaler whose calls of ``update()`` are counted instead. It skips steps on ranks that overflowed,
            and these must count as on the other ranks.
        parameters: The parameters that are exchanged, by name. They are not kept alive.
        stepped: Called after every step that counts.
        link: The link that counts.
        warnings: Its warnings.
    """

    _open: ClassVar[dict[int, StepCount]] = {}

    def __init__(
        self,
        optimizer: Any,
        grad_scaler: Any,
        parameters: Mapping[str, torch.Tensor],
        stepped: Callable[[], None],
        link: weakref.ref[Any],
        warnings: WarnOnce,
    ) -> None:
        self._stepped, self._link, self._warnings = stepped, link, warnings
        self._names = {id(p): name for name, p in parameters.items()}
        self._is_scaler, self._was_given = bool(grad_scaler), bool(grad_scaler) or optimizer is not None
        self._counted: Callable[[], Any] = _nobody
        self._held = self._names_of(optimizer) if optimizer is not None else set(self._names.values())
        self._others: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        if grad_scaler:
            self._counted, self._remove = weakref.ref(grad_scaler), on_updates(grad_scaler, stepped)
        else:
            if optimizer is not None and _tells_of_steps(optimizer):
                self._counted = weakref.ref(optimizer)
            # Links are told in the order in which they were made, which is the same on all ranks.
            self._remove = AFTER_STEPS.add(self._after_step)
        self._open[id(self)] = self

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._counted() is not optimizer:
            held = self._names_of(optimizer)
            if not held or not self._takes_over(optimizer, held):
                return
        self._others.clear()
        self._stepped()

    def _takes_over(self, optimizer: torch.optim.Optimizer, held: set[str]) -> bool:
        """Return whether the steps of another optimizer count from now on, and count the one before this."""
        counted = self._counted()
        if self._held.isdisjoint(held):
            if counted is None and self._counted is not _nobody:
                self._warnings.here(
                    "uncounted",
                    "the optimizer whose steps were counted is gone, and the one that steps now holds none of its "
                    "parameters: nothing is exchanged until one steps that does: without such, make a new link",
                )
            return False
        if self._counted is not _nobody:
            if optimizer not in self._others:
                self._others.add(optimizer)
                return False
            self._stepped()
        self._counted, self._held = weakref.ref(optimizer), held
        return True

    def _names_of(self, optimizer: Any) -> set[str]:
        """Return the names of the link's parameters that an optimizer holds."""
        groups = getattr(optimizer, "param_groups", ())  # a scaler has none
        return {self._names[id(p)] for group in groups for p in group["params"] if id(p) in self._names}

    def end(self) -> None:
        """End the count; if the link was collected, warn at the next step."""
        self._open.pop(id(self), None)
        self._remove()
        counted = self._counted()
        # A collection clears the references to a link before its finalizer is called; close() finds it alive.
        if not self._was_given or self._link() is not None or counted is None or self._is_counted_by_others():
            return
        if self._is_scaler:
            on_updates(counted, self._warn)
        else:
            counted.register_step_post_hook(uncompiled(lambda *_: self._warn()))

    def _is_counted_by_others(self) -> bool:
        counted = self._counted()
        return any(other._may_count(counted) for other in list(self._open.values()))

    def _may_count(self, counted: Any) -> bool:
        if self._counted is not _nobody:
            return self._counted() is counted
        return bool(self._names_of(counted))

    def _warn(self) -> None:
        if not self._is_counted_by_others():
            self._warnings.here(
                "collected",
                f"the link that counted the steps of {type(self._counted()).__name__} was not kept, so that Python has "
                "collected it, and nothing is exchanged any more: keep the link as long as the training lasts, or end "
                "it by link.close()",
            )


def _tells_of_steps(optimizer: Any) -> bool:
    """Return whether PyTorch calls hooks at an optimizer's own steps, and not at those of one that it wraps alone."""
    return bool(getattr(type(optimizer).step, "hooked", False))


def _nobody() -> None:
    """Return no optimizer."""
