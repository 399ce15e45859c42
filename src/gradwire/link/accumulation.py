"""Gradients that are added to what an exchange has left, noticed before they are exchanged once more."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.method import Method
from gradwire.exchange.segments import is_sharded


class Accumulation:
    """Notices that a backward pass has added gradients to the outcome of the round before.

    Such a round exchanges outcome plus gradient. For a mean that is right, since the mean of equal outcomes is the
    outcome. A direction has not the unit of a gradient, and decides the signs of the sum alone; a momentum counts what
    was exchanged before a second time. One parameter is looked at when its gradient arrives. Usually its ``grad`` is
    None then, and the look costs nothing.

    Args:
        method: Method of the link.
        parameters: The parameters that are compressed, by name. They are not kept alive.
    """

    def __init__(self, method: Method, parameters: Mapping[str, torch.Tensor]) -> None:
        traits, self._method = method.traits, repr(method)
        matters = (traits.direction or traits.owns_momentum) and not traits.local_steps
        leaves = [p for p in parameters.values() if p.is_leaf and p.requires_grad and not is_sharded(p)]
        self._is_first, self._arrived, self._cleared = True, False, False
        self._stop = None
        if matters and leaves:
            smallest = min(leaves, key=lambda p: p.numel())
            self._held = weakref.ref(smallest)
            self._stop = smallest.register_hook(self._look).remove

    def _look(self, _: torch.Tensor) -> None:
        """Look at ``grad`` before a gradient is added to it."""
        p = self._held()
        if p is not None and not self._is_first and not self._cleared:
            # What follows zeros, as the micro-batches before the last one, is added to gradients of this rank.
            self._arrived, self._cleared = True, p.grad is None or not bool(p.grad.any())

    def refuse(self) -> None:
        """Raise if the gradients of the round that begins were added to an outcome.

        Raises:
            IncompatibleError: they were.
        """
        if self._arrived and not self._cleared:
            raise IncompatibleError(
                f"this backward pass has added gradients to the outcome of the exchange before, and {self._method} "
                "needs the gradients of a step alone: to accumulate over several passes, use module.no_sync() for all "
                "but the last, or call reduce_() after the last alone; otherwise clear gradients by "
                "optimizer.zero_grad()"
            )

    def begin_anew(self) -> None:
        """Note that a round has been started: what the parameters hold from now on is its outcome."""
        self._is_first = self._arrived = self._cleared = False

    def end(self) -> None:
        """Remove the hook."""
        stop, self._stop = self._stop, None
        if stop is not None:
            stop()
