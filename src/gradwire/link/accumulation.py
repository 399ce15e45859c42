"""Gradients that are added to what an exchange has left, noticed before they are exchanged once more."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping

import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.method import Method
from gradwire.exchange.segments import is_sharded
from gradwire.link.failures import WarnOnce
from gradwire.link.found_optimizers import AFTER_STEPS

SAMPLE = 1 << 16
"""Number of elements of a parameter whose values are looked at, if there is one: more take time, and of fewer a sparse
outcome may have none."""

LOOKS = 32
"""Number of rounds in which values tell whether an outcome was cleared: a program that sets gradients to zero, and not
to None, does so always, and on a device a look waits."""


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
        warnings: Warnings of the link.
    """

    def __init__(
        self, method: Method, parameters: Mapping[str, torch.Tensor], warnings: WarnOnce | None = None
    ) -> None:
        traits, self._method = method.traits, repr(method)
        self._outcomes, self._arrived = set[str](), set[str]()
        self._found = dict[str, bool]()
        self._was_added = self._was_cleared = False
        self._stops = list[Callable[[], None]]()
        self._used: UsedOutcome | None = None
        self._warnings = warnings or WarnOnce()
        filled = {n: p for n, p in parameters.items() if p.numel() and not is_sharded(p)}
        leaves = {n: p for n, p in filled.items() if p.is_leaf and p.requires_grad}
        sample = min(leaves, key=lambda name: abs(leaves[name].numel() - SAMPLE), default=None)
        if sample is None or traits.local_steps:
            return
        if not (traits.direction or traits.owns_momentum):
            self._used = UsedOutcome(leaves[sample]) if traits.own else None
        else:
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

        Warn if they were added to one that a step has used, and the method may have an outcome added to.

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
        if self._used is not None and self._used.was_added:
            self._warnings.once(
                "used outcome",
                "this backward pass has added gradients to those that an optimizer's step has used before, and "
                f"{self._method} keeps of each pass what it does not send: if the gradients of such a pass are not "
                "used, as a generator's through its discriminator, run it under discriminator.no_sync(), or they reach "
                "later steps; otherwise clear gradients after each step, by module.zero_grad()",
            )
            self._used.end()
            self._used = None

    def begin_anew(self) -> None:
        """Note that a round has been started: what its parameters hold from now on is its outcome."""
        if self._used is not None:
            self._used.begin_anew()
        # A round may be repeated, with the gradients that have arrived before.
        self._outcomes, self._arrived = self._arrived or self._outcomes, set()
        self._was_added = self._was_cleared = False

    def end(self) -> None:
        """Remove the hooks."""
        stops, self._stops = self._stops, []
        for stop in stops:
            stop()
        if self._used is not None:
            self._used.end()


class UsedOutcome:
    """Notices that a backward pass has added gradients to an outcome that an optimizer's step has used.

    No step can use such a sum. Either the gradients of the pass are thrown away with it, as a generator's that pass
    through its discriminator, or the program forgets to clear. Passes whose gradients add up before one step, or are
    not exchanged, are not taken for that, nor is anything after a step that a scaler skips, or of an optimizer that
    PyTorch's hooks do not tell of. One parameter is looked at.

    Args:
        parameter: The parameter. It is not kept alive.

    Attributes:
        was_added: True if gradients were added to a used outcome since the parameter's were cleared.
    """

    def __init__(self, parameter: torch.Tensor) -> None:
        self._held, self._looks = weakref.ref(parameter), LOOKS
        self._is_outcome = self._was_used = self._adds = self.was_added = False
        self._stops = [
            parameter.register_hook(self._look).remove,
            parameter.register_post_accumulate_grad_hook(self._note).remove,
            AFTER_STEPS.add(self._step),
        ]

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._is_outcome and not self._was_used:
            held = self._held()
            self._was_used = any(p is held for group in optimizer.param_groups for p in group["params"])

    def _look(self, _: torch.Tensor) -> None:
        held = self._held()
        self._adds = False
        if held is None or not self._was_used:
            return
        if held.grad is not None and self._looks:
            self._looks -= 1
            self._adds = bool(held.grad.any())
        if not self._adds:
            self._is_outcome = self._was_used = self.was_added = False

    def _note(self, _: torch.Tensor) -> None:
        # torch.autograd.grad() calls the other hook alone, and adds its gradients to nothing.
        self.was_added = self.was_added or self._adds

    def begin_anew(self) -> None:
        """Note that a round has been started: what the parameter holds from now on is its outcome."""
        self._is_outcome, self._was_used, self.was_added = True, False, False

    def end(self) -> None:
        """Remove the hooks."""
        stops, self._stops = self._stops, []
        for stop in stops:
            stop()
