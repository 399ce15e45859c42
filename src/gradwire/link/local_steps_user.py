"""The methods for users of a link whose method takes local steps."""

from __future__ import annotations

from contextlib import AbstractContextManager

from gradwire.errors import IncompatibleError
from gradwire.exchange.method import Method
from gradwire.link.local_steps import LocalSteps


class LocalStepsUser:
    """Methods of a link whose method takes local steps."""

    method: Method
    _local: LocalSteps | None = None

    def after_step(self) -> None:
        """Count an optimizer step, and exchange if it is the last of the method's ``every`` steps (collective call).

        A link that was given the optimizer or the GradScaler calls it itself.

        Raises:
            IncompatibleError: the method exchanges gradients.
            ExchangeError: the link is broken or closed, or parameters were not finite before three exchanges in a row;
                the global parameters did not change.
        """
        self.local.after_step()

    def synchronise(self) -> None:
        """Exchange the changes since the last exchange now, after any number of steps (collective call).

        Call it before evaluations and checkpoints of the common parameters. An exchange in flight ends first. The
        schedule of exchanges starts anew. If no rank's parameters have changed since the last exchange of all of them,
        they stay as they are. Under gossip, where ranks keep parameters of their own, all of them are set to their mean
        over ranks.

        Raises:
            IncompatibleError: the method exchanges gradients.
            ExchangeError: the link is broken or closed; the global parameters did not change.
        """
        self.local.synchronise()

    def weigh(self, samples: float) -> None:
        """Count samples, or tokens, of this worker's current step: the next difference is weighted by their sum.

        For a membership that goes on with a quorum, ``gradwire.join(..., quorum=...)``. Call it before every step, on
        all members, or not at all: then the weight is the number of local steps.

        Raises:
            IncompatibleError: the method exchanges gradients, or all ranks have the same weight.
            HyperparameterError: the number is not above 0.
        """
        self.local.weigh(samples)

    def global_parameters(self) -> AbstractContextManager[None]:
        """Return a context in which the parameters are the global ones, the same on all ranks.

        ::

            with link.global_parameters():
                evaluate(model)

        Under gossip, where ranks keep parameters of their own, parameters and buffers are their mean over ranks in the
        context. The mean is computed here: all ranks must enter the context (collective call).

        Raises:
            IncompatibleError: the method exchanges gradients.
            ExchangeError: the link is broken or closed.
        """
        return self.local.global_parameters()

    def left_apart(self, remedy: str) -> str | None:
        """Return a line for a program that ends now and leaves this worker with parameters of its own, or None.

        Args:
            remedy: How the program may exchange the last steps.
        """
        if not self.method.traits.local_steps or not self.local.parameters.is_apart():
            return None
        clock = self.local.parameters.clock
        after, more = f"{clock.steps} optimizer steps lie after the last exchange", clock.every - clock.steps
        plain = clock.steps and clock.count == 1 and not clock.delay and not self.method.traits.outcomes_differ
        why = f"{after}, and" if clock.steps else "after the last exchange"
        either = f"train {more} steps more or {clock.steps} fewer, or " if plain else ""
        return (
            f"{self.method!r}: {why} each worker has parameters of its own, which are what it has saved: "
            f"{either}{remedy}"
        )

    @property
    def local(self) -> LocalSteps:
        """The local steps of the link.

        Raises:
            IncompatibleError: the method exchanges gradients.
        """
        if self._local is None:
            raise IncompatibleError(f"{self.method!r} exchanges gradients at every step: it has no local steps")
        return self._local
