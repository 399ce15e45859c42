"""Local steps of a link: its methods for users, and the schedule by which changes of parameters are exchanged."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch

from gradwire.errors import ExchangeError, IncompatibleError
from gradwire.exchange.method import Method
from gradwire.exchange.planning import own_buckets
from gradwire.exchange.protocols import Context, Workspace
from gradwire.link.buffers import means_over_channel
from gradwire.link.global_parameters import GlobalParameters, State, mean_over_ranks, parameters_of
from gradwire.link.link_runtime import LinkRuntime
from gradwire.link.parameters import put, swapped
from gradwire.link.round import Mean, Round, as_it_is
from gradwire.link.selection.control_channel import ControlChannel
from gradwire.link.step_counts import StepCount

Started = list[tuple[Sequence[str], Mean]]
"""For each bucket, the names of its pieces, and the future of their mean."""

MOST_DISCARDED = 3
"""Number of exchanges in a row with means that are not finite at which a link gives up."""

GIVES_UP = (
    f"before {MOST_DISCARDED} exchanges in a row a parameter was not finite on some rank, and all steps since the one "
    "before them are lost: load a checkpoint on all ranks, with the optimizer's state, which probably holds values "
    "that are not finite on a rank that warned of its parameters"
)


class Exchanger(Protocol):
    """The exchange of buckets, without local steps."""

    _runtime: LinkRuntime
    _round: Round | None

    def _settle(self) -> None:
        """Wait for the end of the latest round."""

    def begin(self, index: int, names: Sequence[str], flat: torch.Tensor, last: bool) -> Mean:
        """Start the exchange of a bucket."""

    def exchange_all(self, start: Callable[[], Started]) -> list[tuple[Sequence[str], torch.Tensor]]:
        """Exchange all buckets of a round."""

    def wait_for(self, started: Started) -> list[tuple[Sequence[str], torch.Tensor]]:
        """Wait for buckets that were started."""

    def after_exchange(self) -> None:
        """Called when an exchange has been applied."""


class LocalSteps:
    """Counts the steps of a link's optimizer, and starts and ends exchanges on schedule.

    Args:
        method: A method with local steps.
        named: The worker's own parameters, by name.
        most: Largest number of elements of a bucket.
        link: The link, which is not kept alive.
        channel, grad_scaler: Those of the link.

    Attributes:
        buffers: Floating-point buffers that are averaged at every exchange; under gossip, whenever parameters are.
        is_synchronous: True while gradients of this step were exchanged, as in warm-up.
    """

    def __init__(
        self,
        method: Method,
        named: dict[str, torch.Tensor],
        most: int,
        link: Exchanger,
        channel: ControlChannel,
        grad_scaler: Any,
    ) -> None:
        self._link, self._runtime, self._channel = weakref.ref(link), link._runtime, channel
        self.parameters = parameters_of(method, named, self._runtime.world_size)
        self._named, self._most, self._grad_scaler = named, most, grad_scaler
        self.buffers: list[torch.Tensor] = []
        self._hooks: list[Callable[[], None]] = []
        self.is_synchronous = False
        self._discarded = 0
        self._flying: Started | None = None

    def connect(self, channel: ControlChannel) -> None:
        """Go on over the connections of other ranks."""
        self._channel = channel
        self.parameters.workers = self._runtime.world_size

    def keep(self, flat: torch.Tensor, last: bool, warm_up: bool) -> Mean | None:
        """Return a future of a bucket of gradients as it is; None in warm-up rounds, in which it must be exchanged."""
        if warm_up:
            self.is_synchronous = self.is_synchronous or last
            return None
        # A step may take the gradients of several passes. If warm-up ended between them, parameters differ after it.
        self.is_synchronous = False
        self._runtime.refuse()
        return as_it_is(flat)

    def after_step(self) -> None:
        """Count a step, and exchange after the last one between two exchanges."""
        if self.is_synchronous:
            # Gradients were exchanged: the parameters are still equal on all ranks.
            self.is_synchronous = False
            self.parameters.take()
            return
        ends, begins = self.parameters.clock.step()
        if ends is not None:
            self._end(ends)
        names = [] if begins is None else self.parameters.pieces.fragments[begins]
        numel = sum(p.numel() for p in self._named.values())
        if begins is None or self.parameters.clock.delay:
            self._runtime.count(numel - self._begin(names))
        else:
            self._runtime.count(numel - self._exchange_now(names, begins))

    def synchronise(self) -> None:
        """Exchange all changes now, or set all ranks' own parameters to their mean (collective call)."""
        if not isinstance(self.parameters, GlobalParameters):
            put(list(self._named.values()), self._mean_parameters())
            put(self.buffers, self._mean_buffers())
            self.parameters.take()
            link = self._link()
            if link is not None:
                link._settle()
            for kind in self.parameters.method.traits.of_parameters:
                self._runtime.memory.forget(kind)
            return
        if self.parameters.clock.flying is not None:
            self._end(self.parameters.clock.flying)
        self.parameters.clock.reset()
        names, replaced = list(self.parameters.pieces), not self.parameters.method.keeps_own
        # Without a change of any worker, an outer step would go on by its momentum.
        self._exchange_now(names, self.parameters.clock.count - 1, replaced=replaced, wanted=self._have_moved)

    def global_parameters(self) -> AbstractContextManager[None]:
        """Return a context in which the parameters are the global ones, or their mean over ranks (collective call)."""
        if isinstance(self.parameters, GlobalParameters):
            return self.parameters.swapped()
        mean = self._mean_parameters()
        return swapped([*self._named.values(), *self.buffers], [*mean, *self._mean_buffers()])

    def weigh(self, samples: float) -> None:
        """Refuse: see :meth:`LocalStepsUser.weigh`."""
        raise IncompatibleError("all ranks have the same weight here: gradwire.join(..., quorum=...) has unlike ones")

    def _begin(self, names: Sequence[str]) -> int:
        """Start the exchange of some pieces, and return their number of elements."""
        link = self._link()
        if link is None or not names:
            self._runtime.refuse()
            return 0
        self._flying = self._started(link, names)
        return self._numel(names)

    def _exchange_now(
        self,
        names: Sequence[str],
        fragment: int,
        replaced: bool = False,
        wanted: Callable[[Exchanger], bool] | None = None,
    ) -> int:
        """Exchange some pieces, apply the outcome, and return their number of elements.

        Args:
            wanted: Returns False, alike on all ranks, if nothing is to be exchanged; it may be a collective call.
        """
        link = self._link()
        if link is None or not names:
            self._runtime.refuse()
            return 0
        means = link.exchange_all(lambda: self._started(link, names) if wanted is None or wanted(link) else [])
        self._apply(means, fragment, replaced)
        link.after_exchange()
        return self._numel(names)

    def _have_moved(self, link: Exchanger) -> bool:
        """Return whether any rank's own parameters have changed since all were exchanged together (collective call)."""
        self._runtime.refuse()
        # What a membership takes back, if a member is lost now, must not be the round before.
        link._settle()
        self._runtime.memory.begin()
        mine = cast(GlobalParameters, self.parameters).has_moved()
        return any(row[0] for row in self._channel.gather([float(mine)])) if self._runtime.world_size > 1 else mine

    def _numel(self, names: Sequence[str]) -> int:
        return sum(self.parameters.pieces[name].numel() for name in names)

    def _started(self, link: Exchanger, names: Sequence[str]) -> Started:
        """Start the exchange of each bucket of some pieces."""
        self._refuse()
        buckets = own_buckets({name: self.parameters.pieces[name] for name in names}, self._most)
        return [
            (names, link.begin(i, names, self._outgoing(names), i == len(buckets) - 1))
            for i, names in enumerate(buckets)
        ]

    def _outgoing(self, names: Sequence[str]) -> torch.Tensor:
        """Return the bucket of some pieces to send."""
        return self.parameters.outgoing(names)

    def _end(self, fragment: int) -> None:
        """Wait for the exchange in flight, and apply it."""
        means, self._flying = self.parameters.arrived() or self.waited(), None
        self._apply(means, fragment)

    def _apply(self, means: list[tuple[Sequence[str], torch.Tensor]], fragment: int, replaced: bool = False) -> None:
        """Apply the means of an exchange; average buffers after the last fragment."""
        finite = self.parameters.incoming(means, replaced=replaced)
        if means or not finite:
            self.judge(finite)
        last = fragment == self.parameters.clock.count - 1
        if self.buffers and last and isinstance(self.parameters, GlobalParameters):
            put(self.buffers, self._mean_buffers())

    def judge(self, finite: bool) -> None:
        """Note whether the means of an exchange were finite; see :meth:`_discard`."""
        if finite:
            self._discarded = 0
        else:
            self._discard()

    def _discard(self) -> None:
        """Count an exchange whose means were not finite, and say so; all ranks see the same means.

        Raises:
            ExchangeError: it is one of several in a row, so that steps do not lead on.
        """
        runtime, link, parameters = self._runtime, self._link(), cast(GlobalParameters, self.parameters)
        before = f"after the local steps before exchange {runtime.round}"
        self._discarded += 1
        if link is None or link._round is None:
            runtime.skipped_rounds += 1
        else:
            link._round.skip()
        runtime.warnings.once(
            "local steps",
            f"{before} a parameter was not finite on some rank: all ranks go on from the global parameters of the "
            "exchange before",
        )
        if parameters.spoilt is not None:
            runtime.warnings.here(
                "own parameters",
                f"{before} parameter {parameters.spoilt!r} was not finite here. The optimizer's state probably holds "
                "such values, too, and will spoil all later steps: load a checkpoint on all ranks, or make a new "
                "optimizer; to skip a step, look at gradients before optimizer.step()",
            )
        if self._discarded == MOST_DISCARDED:
            raise runtime.failures.record(ExchangeError(GIVES_UP), f"the outcome of exchange {runtime.round}")

    def waited(self) -> list[tuple[Sequence[str], torch.Tensor]]:
        """Wait for the exchange in flight, if there is one, and return its means."""
        link = self._link()
        return [] if link is None or self._flying is None else link.wait_for(self._flying)

    def replicated(self) -> Mapping[str, torch.Tensor]:
        """Return the parameters that are equal on all ranks when an exchange begins: the global ones."""
        return self.parameters.held if isinstance(self.parameters, GlobalParameters) else {}

    def load(self, state: State) -> dict[str, dict[str, torch.Tensor]]:
        """Load the part of a link's state that the parameters added; return the state without it."""
        self._flying, self._discarded = None, 0
        return self.parameters.load(state)

    def agree(self) -> None:
        """Set the same parameters on all ranks after a state of another world size was loaded (collective call).

        They are the global ones, or the mean over ranks if the method has no global ones.
        """
        if isinstance(self.parameters, GlobalParameters):
            self.parameters.restore()
        else:
            self.synchronise()

    def _refuse(self) -> None:
        """Raise the error of a broken link, and break the link if this rank has nothing valid to send."""
        self._runtime.refuse()
        problem = self.parameters.problem()
        if problem is not None:
            raise self._runtime.failures.record(ExchangeError(problem), f"the exchange of round {self._runtime.round}")

    def _mean_parameters(self) -> list[torch.Tensor]:
        """Return the mean over ranks of each parameter, float32, flat in memory order."""
        self._refuse()
        runtime, found = self._runtime, dict[str, torch.Tensor]()
        for number, names in enumerate(own_buckets(self._named, self._most)):
            flat = self.parameters.outgoing(names)
            context = Context(runtime.rank, runtime.world_size, runtime.round, number, workspace=Workspace())
            self._channel.run(mean_over_ranks(context, flat), "the mean of parameters")
            found.update(zip(names, flat.split([self._named[name].numel() for name in names])))
        return [found[name] for name in self._named]

    def _mean_buffers(self) -> list[torch.Tensor]:
        """Return the mean over ranks of each buffer's finite values."""
        runtime = self._runtime
        context = Context(runtime.rank, runtime.world_size, runtime.round)
        device = next(iter(self._named.values())).device
        return means_over_channel(self.buffers, self._channel, context, device)

    def bind(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """Count the steps of an optimizer or a scaler, if there is one; return a function that ends all counting."""
        if optimizer is not None or self._grad_scaler:
            self._count(optimizer)
        hooks = self._hooks

        def unbind() -> None:
            for remove in hooks:
                remove()

        return unbind

    def count_any_optimizer(self) -> None:
        """Count the steps of any optimizer that holds the parameters, unless an optimizer or a scaler was given."""
        if not self._hooks:
            self._count(None)

    def _count(self, optimizer: Any) -> None:
        count = StepCount(
            optimizer, self._grad_scaler, self._named, self._stepped(), self._link, self._runtime.warnings
        )
        self._hooks.append(count.end)

    def _stepped(self) -> Callable[[], None]:
        """Return a function that counts a step without keeping the link alive."""
        local = weakref.ref(self)

        def stepped() -> None:
            found = local()
            if found is not None:
                found.after_step()

        return stepped
