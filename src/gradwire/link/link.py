"""The class Link: the exchange of one set of parameters over one process group."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist

from gradwire.exchange.drivers import LANES, Group, TransferOrder, group_of, profiled
from gradwire.exchange.method import Method
from gradwire.exchange.planning import LinkOptions, Options, exchanged, own_buckets, refuse_scatter
from gradwire.exchange.protocols import REDUCE_SCATTER
from gradwire.exchange.segments import flat_view
from gradwire.link.accumulation import Accumulation
from gradwire.link.bucket_exchange import BucketExchange, StepBuffer
from gradwire.link.checks import caution_about, caution_alone, check_optimizer, optimizer_terms
from gradwire.link.detached import lost
from gradwire.link.diagnostics import Diagnostics, Judge
from gradwire.link.failures import WarnOnce, place
from gradwire.link.found_optimizers import LearningRates, OptimizerSearch, check_kinds, check_unscaled
from gradwire.link.handshake import ReplicaCheck, Terms, agreement, code_terms, compared, default_group, value_terms
from gradwire.link.link_runtime import LinkRuntime, check_lanes, close_link
from gradwire.link.link_state import LinkState
from gradwire.link.local_steps import LocalSteps
from gradwire.link.local_steps_user import LocalStepsUser
from gradwire.link.parameters import (
    check_parameters,
    check_still_frozen,
    frozen_parameters,
    gradient,
    listed,
    named_parameters,
)
from gradwire.link.round import Mean, Round
from gradwire.link.selection.control_channel import ControlChannel
from gradwire.link.selection.fallback import make_selection
from gradwire.link.selection.link_cost import CoderSelection, CostKeeper
from gradwire.link.site import Site, lowest_free, numbers_in_use, register, share_a_number
from gradwire.methods.auto import delivering
from gradwire.methods.spec import method as read_method
from gradwire.seeds import LinkNumber

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

T = TypeVar("T")


class Link(LinkState, LocalStepsUser):
    """Exchanges the gradients of some parameters over a process group by a method.

    :func:`gradwire.attach` is for DDP modules. For a loop without DDP::

        link = gw.Link(model.named_parameters(), "terngrad")
        loss.backward()
        link.reduce_()
        optimizer.step()

    The constructor is a collective call: all ranks of the group make the same links in the same order, on parameters
    with equal values. Values may differ for gossip, where ranks keep parameters of their own.

    A single rank, for example after an elastic restart, trains on without an exchange and logs a warning: gradients do
    not change, rounds are counted, and the method's state is kept and saved.

    Args:
        parameters: (name, parameter) pairs, or parameters (then named "0", "1", ...). Those that require no gradient
            are not exchanged; if one does so later, the next exchange raises IncompatibleError.
        method: A method or its spec.
        group: Process group, or what :func:`gradwire.join` returned; the default group if None.
        lanes: Number of lanes: threads with connections of their own that exchange buckets in parallel. Results do not
            depend on it. Over NCCL there is one, which enqueues and does not wait.
        grad_scaler: The scaler of automatic mixed precision. Methods with state, or whose outcome is a direction,
            refuse gradients of a scaled loss without it. False: gradients are not scaled when they are exchanged, even
            if the program has a scaler. Other methods do not need it: a non-finite gradient on any rank becomes
            non-finite on all, so that every rank's scaler skips the step.
        optimizer: The optimizer of the parameters. Needed by methods that use its learning rate, which is read when a
            round begins; checked by methods with their own momentum; its steps are counted by methods with local steps.
            With a residual that may grow large, its momentum causes a warning. If an optimizer that is not given has a
            momentum beside the method's own, its first ``step()`` raises IncompatibleError, no parameter changes, and
            the link is broken.
        unit_by_unit: True for the units of FSDP2, whose parameters are shards, and whose buckets are never joined.
        beside: Ranks outside the group that exchange other shards of the same module. The lowest rank of all logs the
            warnings that concern all, and the end of any rank breaks the link.
        options: See :class:`Options`.

    Attributes:
        part: Name of the link's own folder in a checkpoint, if several groups of ranks exchange shards of one module.
        close: Call it to end the link's threads and connections; also called when the link is garbage-collected. Keep
            the link as long as the training lasts: one that was collected counts no steps of its optimizer.
        number: Number of the link among the open links of this process, counted from 0 in the order in which they were
            made. Random numbers depend on it, so that links whose parameters have the same names draw independently.
            The number of a closed link is used again; a checkpoint restores the number of its link.

    Raises:
        HyperparameterError: a spec, an option or an exclude pattern is wrong.
        IncompatibleError: a parameter or the number of ranks does not suit the method.
        BackendError: a kernel backend is not installed.
        RankMismatchError: ranks differ in version, method, options or parameters, or in the values of parameters unless
            the method lets them differ.
    """

    part: str = ""
    _unit_by_unit = False
    _compared_number: int | None = None

    def __new__(cls, parameters: Any = None, method: Any = None, *, group: Any = None, **_: Any) -> Self:
        # Ranks that come and go bring the kind of link that follows them.
        return cast("Self", object.__new__(getattr(group, "link_type", cls)))

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.Tensor]] | Iterable[torch.Tensor],
        method: str | Method,
        *,
        group: dist.ProcessGroup | Group | None = None,
        lanes: int | None = None,
        grad_scaler: Any = None,
        optimizer: Any = None,
        beside: Iterable[int] = (),
        unit_by_unit: bool = False,
        **options: Unpack[LinkOptions],
    ) -> None:
        self._unit_by_unit = unit_by_unit
        self._ask(parameters, method, lanes, grad_scaler, optimizer, options)
        self._open(default_group() if group is None else group_of(group), beside)
        self._begin_once()

    def _ask(
        self, parameters: Iterable[Any], method: str | Method, lanes: int | None, grad_scaler: Any, optimizer: Any,
        options: LinkOptions,
    ) -> None:  # fmt: skip
        """Keep what the user asked for, unchecked: ranks tell one another what is wrong with it."""
        self._asked = (parameters, method, LANES if lanes is None else lanes, options)
        self.grad_scaler, self.optimizer = grad_scaler, optimizer
        self.number = LinkNumber()
        self._diagnostics, self._warnings = Diagnostics(scaled=bool(grad_scaler)), WarnOnce()
        self.buffer_bytes: Callable[[], int] = lambda: 0

    def _open(self, group: Group, beside: Iterable[int] = (), *, again: bool = False) -> None:
        """Connect the ranks of a group (collective call).

        Args:
            group: The ranks.
            beside: See the class.
            again: True if the link was open over other ranks: what it has learnt stays.
        """
        self.group, self.rank, self.world_size = group, group.place, group.world_size
        beside = list(beside)
        self._warnings.take_place(group.rank, min([*group.ranks, *beside]))
        kept = {**self._coders.state(), **self._cost.state()} if again else {}
        with agreement(group, beside) as mine:
            count = self._take_terms(mine)
        if not again:
            self.number.value = lowest_free(mine.open_links)
        self._coders.agree(mine.everyone)
        order, scopes = TransferOrder(), self.method.scopes(self.world_size)
        lanes = mine.circle.connected(
            "the connections of a link",
            *(partial(self._site.lane, i, order=order, scopes=scopes) for i in range(count)),
        )
        selection = self._selection
        judge = Judge(lambda: selection.planner.method, self._diagnostics, self._warnings)
        if again:
            self._runtime.connect(lanes, mine.circle, judge)
        else:
            scaler = None if self.method.traits.local_steps else self.grad_scaler  # differences have no scale
            passes, check = 1 if self.options.collective == REDUCE_SCATTER else 2, self.options.check
            self._runtime = LinkRuntime(
                lanes, mine.circle, self._diagnostics,
                grad_scaler=scaler, check=check, passes=passes, device=self._site.device,
                staged=self._site.exchanges_copies, checks=self._site.checks, warnings=self._warnings, judge=judge,
            )  # fmt: skip
        self._channel = ControlChannel(lanes[0], self._runtime.failed_between_buckets, mine.circle.ranks)
        self._replicas = ReplicaCheck(self.options.check_every, mine.circle.ranks)
        self._step: StepBuffer | None = None
        self._round = None
        if self._local is not None:
            self._local.connect(self._channel)
        if self.world_size > 1:
            self._cost.measure(self._channel)
        self._coders.load(kept)
        self._cost.load(kept)
        self._runtime.link_cost = self._cost.value

    def _take_terms(self, mine: Terms) -> int:
        """Fill in this rank's terms of an agreement; return the number of lanes."""
        given, method, count, options = self._asked
        parameters = listed(given)
        self._asked = (parameters, method, count, options)
        self._parameters, self._frozen = named_parameters(parameters), frozen_parameters(parameters)
        # First, since a rank that refuses the rest tells the others so.
        self.group.prefer(next((p.device for p in self._parameters.values()), torch.device("cpu")))
        self.method = read_method(method).with_files(self.world_size)
        check_kinds(self.grad_scaler, self.optimizer, counts=bool(self.method.traits.local_steps))
        self.options = Options.of(options)
        check_parameters(self._parameters, shards=self._unit_by_unit)
        check_lanes(count)
        self._coders = CoderSelection()
        self._cost = CostKeeper(self.method, self.options.link_cost)
        self._exchanged, its_options = exchanged(self.method, self._parameters, self.options)
        self._site = Site.of(self.method, self._parameters, self.options, self.group)
        its_options = replace(its_options, backend=self._site.backend)
        with self._site.device.current():
            self._selection = make_selection(
                self.method, its_options, self._exchanged, self.world_size,
                self._diagnostics, self._coders, self.number, self._warnings, self.optimizer,
            )  # fmt: skip
        check_optimizer(self.method, self.optimizer, self._parameters)
        self._rates = LearningRates(self.method, self.optimizer, self._parameters)
        # Operations of all lanes are enqueued on one stream, and their order must be the same on all ranks.
        count = count if self._site.transport != "nccl" else 1
        terms = {"lanes": count, "learning rates": self._rates.read(), **self.method.terms(self.world_size)}
        terms |= self._site.terms() | optimizer_terms(self.method, self.optimizer, self._parameters)
        mine.fields = compared(self.method, self.options, self._parameters, terms | code_terms(self._selection.planner))
        if self.options.has_replicas(self.method) and self._compares_values():
            mine.fields |= value_terms(self._parameters)
        mine.told = self._coders.measure()
        mine.open_links = numbers_in_use(but=self)
        return count

    def _compares_values(self) -> bool:
        """Return whether all ranks must hold equal parameters when the link is opened."""
        return True

    def _begin_once(self) -> None:
        """Count the optimizer's steps, and register the link; once in its life."""
        if self.method.traits.local_steps:
            self._local = self._local_steps(4 * self.options.chunk_numel)
        unbind = (self._local or self.method).bind(self.optimizer, self._parameters)
        dense = self._selection.planner.dense
        self._compressed = compressed = {n: p for n, p in self._exchanged.items() if n not in dense}
        caution_about(self.method, self.optimizer, compressed, self._warnings)
        self._search = OptimizerSearch(
            self.method, self.optimizer, self._parameters, compressed, self._runtime.failures, self._warnings
        )
        self._accumulation = Accumulation(self.method, compressed, self._warnings)
        # Threads and connections end with the link, also if it is collected or the interpreter ends without close().
        unbinders = [unbind, self._search.end, self._accumulation.end]
        self.close = weakref.finalize(self, close_link, self._runtime, unbinders)
        if self.group.meetings is None:
            # Ranks of one process draw as those of several do, where each link is the first of its process.
            register(self)
        if self.world_size == 1:
            self._warnings.once("one rank", caution_alone(self.method))

    def _local_steps(self, most: int) -> LocalSteps:
        """Make what counts the optimizer's steps; ``most`` is the largest number of elements of a bucket."""
        return LocalSteps(self.method, self._parameters, most, self, self._channel, self.grad_scaler)

    def exchange(
        self, index: int, names: Sequence[str], flat: torch.Tensor, last: bool
    ) -> torch.futures.Future[torch.Tensor]:
        """Start the exchange of one bucket; call it in the same order on all ranks.

        Args:
            index: Index of the bucket in this step.
            names: Names of the parameters in ``flat``, which holds them whole, one after the other, in memory order.
            flat: Their gradients, overwritten by the mean over ranks.
            last: True for the last bucket of the step.

        Returns:
            A future of ``flat``.

        Raises:
            ExchangeError: the link is broken or closed, or the exchange cannot be started.
        """
        with profiled("bucket", str(index)):
            if self._local is not None:
                kept = self._local.keep(flat, last, self._selection.planner.is_warm_up(self._runtime.round))
                if kept is not None:
                    return kept
                names = self._local.parameters.pieces.of(names)
            return self.begin(index, names, flat, last)

    def begin(self, index: int, names: Sequence[str], flat: torch.Tensor, last: bool) -> Mean:
        """Start the exchange of one bucket, of gradients or of what local steps exchange; see :meth:`exchange`."""
        runtime = self._runtime
        if index == 0:
            self._settle()
        runtime.refuse()
        try:
            round = self._round
            if index == 0 or round is None:
                round = self._round = self._next_round()
            if self.world_size == 1:
                future = round.leave(flat, last)
            else:
                if last:
                    self._accumulation.refuse()
                future = self._joined(round, index, names, flat, last) or self._start(round, index, names, flat, last)
        except Exception as error:
            raise runtime.failures.record(error, place(index, None, runtime.round, names)) from error
        if last:
            runtime.next_round()
            self._accumulation.begin_anew()
        return future

    def _next_round(self) -> Round:
        """Begin a round: read or choose what all of its buckets share, with the same result on all ranks."""
        runtime, before = self._runtime, self._round
        if self.world_size == 1:
            return Round(runtime)
        check_still_frozen(self._frozen)
        self._site.check_orders(self._parameters)
        self._search.end_when_done()
        if runtime.rounds_here == 0:
            check_unscaled(self.method, self.grad_scaler)
        if self.number.value != self._compared_number:
            self._compared_number = self.number.value  # first round, or another number was loaded
            if (shared := share_a_number(self)) is not None:
                runtime.warnings.once(shared, shared)
        replicated = self._parameters if self._local is None else self._local.replicated()
        self._replicas.begin(runtime.round, self._channel, replicated)
        learning_rates = self._rates.read()
        skipped = before is not None and before.skipped and before.number == runtime.round - 1
        changed = self._selection.begin(runtime.round, self._channel, skipped)
        if changed is not None:
            if changed.reason is not None:
                runtime.warnings.once(changed.reason, changed.reason)
            with runtime.device.in_order():
                runtime.memory.keep(changed.keeps)
        return Round(runtime, learning_rates)

    def _joined(self, round: Round, index: int, names: Sequence[str], flat: torch.Tensor, last: bool) -> Mean | None:
        """Hold a bucket back until the last one of the step arrives, if buckets are joined."""
        planner = self._selection.planner
        needed = planner.method.traits.whole_step
        if not needed and (self._unit_by_unit or (index == 0 and last) or not planner.joins_buckets):
            return None
        if self._step is None or (index == 0 and self._step.order != planner.step_order()):
            self._step = StepBuffer(planner.step_order(), planner.parameters, self._runtime.device)
        future = self._step.add(index, names, flat)
        if last:
            whole = self._start(round, 0, *self._step.joined(needs_all=needed), last=True)
            whole.add_done_callback(self._step.give_back)
        return future

    def _start(self, round: Round, index: int, names: Sequence[str], flat: torch.Tensor, last: bool) -> Mean:
        planner = self._selection.planner
        plan, segments = planner.plan(names, round.number), planner.segments(names)
        if self._selection.delivers:
            plan = delivering(plan, segments)
        return BucketExchange(round, plan, segments, flat, index).start(last)

    def end_round(self) -> None:
        """End the round after all of its buckets have been exchanged, if none was passed as the last one."""
        if self._round is not None:
            self._round.end()

    @torch.no_grad()
    def reduce_(self) -> None:
        """Replace the gradient of every parameter by its mean over ranks; for loops without DDP (collective call).

        A parameter without a gradient on this rank takes part with zeros, and receives the mean, unless it was frozen
        after the link was made. Under a method with local steps, gradients do not change, and None stays None.
        """
        unused = [p for p in self._parameters.values() if p.grad is None]
        refuse_scatter(self.options.collective, "reduce_()")
        buckets = own_buckets(self._parameters, 4 * self.options.chunk_numel)

        def start() -> Iterator[tuple[list[torch.Tensor], Mean]]:
            for i, names in enumerate(buckets):
                grads = [flat_view(gradient(self._parameters[n])) for n in names]
                yield grads, self.exchange(i, names, torch.cat(grads), i == len(buckets) - 1)

        for grads, flat in self.exchange_all(start):
            torch._foreach_copy_(grads, list(flat.split([g.numel() for g in grads])))
        for p in unused if self._local is not None and not self._local.is_synchronous else ():
            p.grad = None

    def exchange_all(self, start: Callable[[], Iterable[tuple[T, Mean]]]) -> list[tuple[T, torch.Tensor]]:
        """Exchange all buckets of a round, and return their means beside what they were started with.

        Args:
            start: Starts the exchange of each bucket.
        """
        return self.wait_for(list(start()))

    def wait_for(self, started: Iterable[tuple[T, Mean]]) -> list[tuple[T, torch.Tensor]]:
        """Wait for the means of buckets that were started; return them beside what they were started with.

        Raises:
            ExchangeError: the link is broken.
        """
        try:
            return [(what, future.wait()) for what, future in started]
        except Exception:
            self._runtime.failures.refuse()
            raise

    def after_exchange(self) -> None:
        """Called when local steps have applied an exchange."""

    def __reduce__(self) -> Any:
        return lost, (repr(self.method),)
