"""Gradients that are added to what an exchange has left, noticed before they are exchanged once more."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping

import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.method import Method
from gradwire.exchange.segments import is_sharded

SAMPLE = 1 << 16
"""Number of elements of a parameter whose values are looked at, if there is one: more take time, and of fewer a sparse
outcome may have none."""


class Accumulation:
    """Notices that a backward pass has added gradients to the outcome of the round before.

    Such a round exchanges outcome plus gradient. For a mean that is right, since the mean of equal outcomes is the
    outcome. A direction has not the unit of a gradient, and decides the signs of the sum alone; a momentum counts what
    was exchanged before a second time. Parameters are looked at when their gradients arrive, until one is found whose
    outcome was cleared: those that no optimizer steps, and nobody clears, may add up. Usually ``grad`` is None then,
    and a look costs nothing. Where it is not, one parameter's values tell whether they are zeros.

    Args:
        method: Method of the link.
        parameters: The parameters that are compressed, by name. They are not kept alive.
    """

    def __init__(self, method: Method, parameters: Mapping[str, torch.Tensor]) -> None:
        traits, self._method = method.traits, repr(method)
        self._outcomes, self._arrived = set[str](), set[str]()
        self._found = dict[str, bool]()
        self._was_added = self._was_cleared = False
        self._stops = list[Callable[[], None]]()
        if (traits.direction or traits.owns_momentum) and not traits.local_steps:
            filled = {n: p for n, p in parameters.items() if p.numel() and not is_sharded(p)}
            leaves = {n: p for n, p in filled.items() if p.is_leaf and p.requires_grad}
            sample = min(leaves, key=lambda name: abs(leaves[name].numel() - SAMPLE), default=None)
            for name, p in leaves.items():
                self._watch(name, p, in_full=name == sample)

    def _watch(self, name: str, p: torch.Tensor, *, in_full: bool) -> None:
        held = weakref.ref(p)

        def look(_: torch.Tensor) -> None:
            found = held()
            if found is None or name not in self._outcomes or self._was_cleared:
                return
            if found.grad is None or in_full:
                self._found[name] = found.grad is not None and bool(found.grad.any())

        def note(_: torch.Tensor) -> None:
            # torch.autograd.grad() calls the other hook alone, and adds its gradients to nothing.
            self._arrived.add(name)
            if (adds := self._found.pop(name, None)) is not None:
                # What follows zeros, as the micro-batches before the last one, is added to gradients of this rank.
                self._was_added, self._was_cleared = self._was_added or adds, self._was_cleared or not adds

        self._stops += [p.register_hook(look).remove, p.register_post_accumulate_grad_hook(note).remove]

    def refuse(self) -> None:
        """Raise if the gradients of the round that begins were added to an outcome.

        Raises:
            IncompatibleError: they were.
        """
        if self._was_added and not self._was_cleared:
            raise IncompatibleError(
                "this backward pass has added gradients to the outcome of the exchange before, or to what the program "
                f"has put in its place, and {self._method} needs the gradients of a step alone: to accumulate over "
                "several passes, use module.no_sync() for all but the last, or call reduce_() after the last alone; "
                "use no_sync() also for a pass whose gradients are not used, such as a generator's through its "
                "discriminator; otherwise clear gradients by module.zero_grad(), and add terms of your own to the loss"
            )

    def begin_anew(self) -> None:
        """Note that a round has been started: what its parameters hold from now on is its outcome."""
        # A round may be repeated, with the gradients that have arrived before.
        self._outcomes, self._arrived = self._arrived or self._outcomes, set()
        self._was_added = self._was_cleared = False

    def end(self) -> None:
        """Remove the hooks."""
        stops, self._stops = self._stops, []
        for stop in stops:
            stop()
