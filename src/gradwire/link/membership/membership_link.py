"""A link whose ranks come and go."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from gradwire.errors import ExchangeError, IncompatibleError, LeftOutError, PayloadError, RankMismatchError
from gradwire.exchange.method import Method
from gradwire.exchange.planning import LinkOptions, Options
from gradwire.link.found_optimizers import check_kinds
from gradwire.link.handshake import compared
from gradwire.link.link_runtime import check_lanes
from gradwire.link.membership import steps as p
from gradwire.link.membership.epoch_group import LOOK_S
from gradwire.link.membership.method_rules import refusal
from gradwire.link.membership.party import COUNTED, Party
from gradwire.link.membership.records import Epoch, EpochReport, Request, text_of
from gradwire.link.membership.watching_link import WatchingLink
from gradwire.link.parameters import listed, named_parameters
from gradwire.link.round import Mean
from gradwire.link.site import warm_up
from gradwire.link.state import of_another_first, of_other_ranks
from gradwire.methods.spec import method as read_method

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")


class MembershipLink(WatchingLink):
    """A :class:`Link` over a membership; ``gradwire.Link(..., group=membership)`` makes one.

    It runs the protocol of :mod:`gradwire.link.membership.protocol`: a round is repeated by those who are left when
    members are lost in it, and what workers keep follows the members. :meth:`reduce_`, and steps of the optimizer under
    a method with local steps, return when the round counts.

    Args:
        parameters, method, lanes, grad_scaler, optimizer, options: As for :class:`Link`.
        group: The membership.

    Raises:
        HyperparameterError, BackendError: as for :class:`Link`.
        IncompatibleError: the method cannot follow members that come and go, or what another member has does not suit.
        ExchangeError: nobody took this worker in.
        LeftOutError: this worker was told to leave before it was taken in.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.Tensor]] | Iterable[torch.Tensor],
        method: str | Method,
        *,
        group: Party,
        lanes: int | None = None,
        grad_scaler: Any = None,
        optimizer: Any = None,
        **options: Unpack[LinkOptions],
    ) -> None:
        self._party, self._seat = group, group.seat
        self._ask(listed(parameters), method, lanes, grad_scaler, optimizer, options)
        self._terms = self._checked()
        group.take_link(self)
        # A newcomer that compiles lets all others wait.
        warm_up(self.method, self.options.backend)
        self._lock = group.lock
        self._epoch_group = self._broken_s = None
        self._opened = self._in_flight = self._held = self._differed = False
        self._heed_steps()
        self._of: Epoch | None = None
        self._starting: Callable[[], Iterable[tuple[Any, Mean]]] = tuple
        self._means: list[tuple[Any, torch.Tensor]] = []
        self._before, self._asked_s, self._read = (0, 0, 0), (-LOOK_S, ()), (-math.inf, [])
        self._enter()

    def _enter(self) -> None:
        """Become a member, and watch the others."""
        self._warm_up_state()
        with self._lock:
            # A member that takes this one in may be stopped meanwhile.
            self._watch()
            if not self._come_in():
                raise LeftOutError(f"this worker ({self._seat.me.name}) was told to leave before it was taken in")

    def _checked(self) -> str:
        """Check what the user asked for; return the digest of what all members must have in common."""
        parameters, method, count, options = self._asked
        check_lanes(count)
        self.method, self.options = read_method(method), Options.of(options)
        check_kinds(self.grad_scaler, self.optimizer, counts=bool(self.method.traits.local_steps))
        self._party.check_carried(self.optimizer)
        self._check_heeded()
        named, reason = named_parameters(parameters), refusal(self.method)
        if self.options.fallback is not None:
            reason = "a fallback is chosen over fixed ranks"
        if reason is not None:
            raise IncompatibleError(f"{self.method!r} cannot follow members that come and go: {reason}")
        if any(tensor.device.type != "cpu" for tensor in named.values()):
            raise IncompatibleError("a membership exchanges over Gloo: parameters in main memory are needed")
        shared = {"lanes": count, "carried": sorted(self._party.carried), "keyed": self._party.keyed}
        terms = compared(self.method, self.options, named, shared)
        return hashlib.blake2b(text_of({k: repr(v) for k, v in terms.items()}).encode(), digest_size=32).hexdigest()

    # ------------------------------------------------------------------ for users

    def exchange_all(self, start: Callable[[], Iterable[tuple[T, Mean]]]) -> list[tuple[T, torch.Tensor]]:
        with self._lock:
            self._refuse_after_the_end()
            self._starting, self._means = start, []
            try:
                self._raise_problem()
                self._run(self._seat.round())
                self._be_seen()
            except p.LeftOut:
                told = self._come_again()
                if not self.method.traits.local_steps:
                    raise LeftOutError(told) from None
                self._applying = True
                return []
            # Samples for the next round have not been drawn yet.
            self._seat.reserve, self._applied, self._applying = 0, False, True
            return self._means

    def after_exchange(self) -> None:
        with self._lock:
            self._applying = False
            if self._seat.left:
                return
            try:
                self._raise_problem()
                self._run(self._seat.change())
                self._meet_early()
            except p.LeftOut:
                self._come_again()

    def diagnostics(self) -> dict[str, Any]:
        epoch = self._seat.epoch
        found = super().diagnostics()
        found["membership"] = {
            "epoch": 0 if epoch is None else epoch.number,
            "members": 0 if epoch is None else len(epoch.members),
            **{name: self._party.counts[name] for name in COUNTED},
        }
        return found

    def depart(self) -> None:
        """Leave now, between two rounds: what was not sent yet is lost, unless the others end, too."""
        with self._lock:
            self._stop_serving()
            self._drop_preparation()
            seat = self._seat
            if seat.epoch is not None and not seat.left:
                for report in seat.part():
                    # A program that ends does not wait for the coordinator.
                    self._party.board.put_unless_away(p.report_key(report.number, report.id), report)
            self._hang_up("left the training")

    def _refuse_after_the_end(self) -> None:
        failure = self._party.failure
        if failure is not None:
            self._problem = None
            raise failure
        if self._seat.left or not self.close.alive:
            raise ExchangeError("this worker has left the training: look at membership.left after every step")

    # ------------------------------------------------------------------ coming in

    def _come_in(self) -> bool:
        """Become a member; return False if this worker was told to leave before it was named."""
        while not self._seat.leaving:
            try:
                self._bring()
                self._run(self._seat.enter())
                self._drop_brought()
                return True
            except p.LeftOut:
                if not self._seat.leaving:
                    self._tell_left_out()
                self._drop_brought()
                self._seat.again()
        # Members that are connected with it would take it in, and wait for it.
        self._drop_preparation()
        self._party.board.withdraw()
        self._seat.left = True
        self._hang_up("left the training")
        return False

    def _come_again(self) -> str:
        """Come in as a new member, after the others went on without this one, or leave; return what has happened."""
        if self._seat.leaving:
            self._seat.left = True
            self._hang_up("left the training")
            return "this worker has left the training, in which the others' round broke: it applies nothing"
        self._party.counts["left_out"] += 1
        self._tell_left_out()
        self._problem, self._in_flight = None, False
        self._hang_up("comes again")
        self._drop_preparation()
        self._seat.again()
        if not self._come_in():
            return "the others went on without this worker, and it was told to leave before it was in again"
        return (
            f"the others went on without this worker ({self._seat.me.name}), and have taken it in again in epoch "
            f"{self._seat.current.number} at round {self._seat.rounds}: its parameters are theirs now; compute the "
            "gradient again"
        )

    def _tell_left_out(self) -> None:
        epoch = self._seat.epoch
        logging.getLogger("gradwire").info(
            "the others went on without this worker%s: it asks to be taken in",
            "" if epoch is None else f" after epoch {epoch.number}",
        )

    def _raise_problem(self) -> None:
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    # ------------------------------------------------------------------ the protocol's steps

    def _run(self, steps: p.Steps[None]) -> None:
        try:
            step = next(steps)
            while True:
                step = steps.send(self._do(step))
        except StopIteration:
            return

    def _do(self, step: p.Step) -> Any:
        board, seat = self._party.board, self._seat
        if isinstance(step, p.Put):
            self._put(step)
        elif isinstance(step, p.Propose):
            return self._propose(step)
        elif isinstance(step, p.Collect):
            return self._collect(step.keys)
        elif isinstance(step, p.Await):
            return self._named(step.key) if step.for_ever else self._awaited(step.key)
        elif isinstance(step, p.Ask):
            board.ask(Request(step.member, self._terms))
        elif isinstance(step, p.Founders):
            return self._founders()
        elif isinstance(step, p.Requests):
            return self._requests()
        elif isinstance(step, p.Meet):
            return self._meet(step.epoch)
        elif isinstance(step, p.Exchange):
            return self._exchange()
        elif isinstance(step, p.Vote):
            return self._vote(step.word)
        elif isinstance(step, p.Count):
            self._in_flight = self._held = self._misses_residuals = False
        elif isinstance(step, p.Undo):
            self._rewind()
        elif isinstance(step, p.Break):
            self._break_off()
        elif isinstance(step, p.Serve):
            self._serve(step)
        elif isinstance(step, p.Hand):
            self._hand(step, seat.current)
        return None

    def _put(self, step: p.Put) -> None:
        board = self._party.board
        if not step.waits:
            board.put_unless_away(step.key, step.record)
            return
        try:
            board.put(step.key, step.record)
        except ExchangeError:
            # Nobody shall wait for this member's part of a round, nor its program find half of one.
            self._break_off()
            raise

    def _propose(self, step: p.Propose) -> Epoch | None:
        found = self._party.board.propose(step.key, step.epoch)
        names = None if found is None else [member.name for member in found.members]
        told = "epoch %d: proposed with %s, agreed with %s"
        logging.getLogger("gradwire").debug(told, step.epoch.number, [m.name for m in step.epoch.members], names)
        return found

    def _break_off(self) -> None:
        """End the connections of this epoch, and a round that does not count."""
        self._hang_up("has gone on to the next epoch")
        if self._in_flight and not self._held:
            self._rewind()

    # ------------------------------------------------------------------ rounds

    def _exchange(self) -> bool:
        runtime = self._runtime
        group = self._epoch_group
        if group is None or group.gone():
            return False
        self._before = (runtime.round, runtime.rounds_here, runtime.skipped_rounds)
        self._in_flight, self._held = True, False
        try:
            self._means = self.wait_for(list(self._starting()))
            self._settle()
        except Exception as error:
            self._count_repeat(error)
            return False
        self._held = True
        return True

    def _vote(self, word: p.Word) -> tuple[p.Word, ...] | None:
        if self.world_size == 1:
            return (word,)
        try:
            said = [word.leaving, word.joins, word.position, word.offers]
            rows = self._channel.gather(list(map(float, said)))
        except Exception as error:
            self._count_repeat(error)
            return None
        return tuple(p.Word(bool(a), bool(b), int(position), bool(c)) for a, b, position, c in rows)

    def _rewind(self) -> None:
        """Return to the state before the round."""
        runtime = self._runtime
        runtime.memory.undo()
        runtime.diagnostics.discount(self._before[0])
        runtime.round, runtime.rounds_here, runtime.skipped_rounds = self._before
        self._in_flight = self._held = False
        self._means = []

    # ------------------------------------------------------------------ epochs

    def _meet(self, epoch: Epoch) -> tuple[str, ...] | None:
        """Connect the members of an epoch; return None, or the ids of those that were not reached."""
        group = self._epoch_group
        if group is None or group.epoch.number != epoch.number:
            self._hang_up("has gone on to the next epoch")
            group = self._epoch_group = self._group_of(epoch)
        is_new = self._seat.me.id in epoch.new
        lost = self._lost_before(epoch)
        if self._opened and self._of is not None and self._of.ids() != epoch.ids():
            self._begin_anew_without(lost, self._of.ids()[0] != epoch.ids()[0])
        try:
            group.connect(self._asked[2])
            state = self._pass_state(group, epoch)
            if state is not None:
                self._take_values(state)
            self._open(group, again=self._opened)
            self._linked = group
            if not self._opened:
                self._begin_once()
                self._runtime.memory.undoes = self._opened = True
            if state is not None and state["link"] is not None:
                self._take_state(state["link"])
            self._compare_state()
        except (RankMismatchError, IncompatibleError) as error:
            if epoch.new and not is_new:
                # It may be this member's own fault, as where it carries what cannot be handed over.
                told = "epoch %d: a newcomer was not taken in: %s"
                logging.getLogger("gradwire").warning(told, epoch.number, error)
                return epoch.new
            if isinstance(error, RankMismatchError) and not is_new and not self._differed:
                # A program may have been about to change parameters once more after its optimizer's step.
                self._differed = True
                return ()
            self._fail(error)
        except (ExchangeError, PayloadError, RuntimeError, dist.DistError) as error:
            logging.getLogger("gradwire").info("epoch %d: not all members met: %s", epoch.number, error)
            return self._missed(group)
        seconds = 0.0 if self._broken_s is None else time.monotonic() - self._broken_s
        keeps = self.method.traits.waiting in self.method.traits.remembers
        self._party.note(self._of, epoch, lost, seconds, keeps)
        self._of, self._broken_s, self._differed = epoch, None, False
        self._voted_out = self._were_disconnected = frozenset()
        return None

    def _lost_before(self, epoch: Epoch) -> set[str]:
        """Return the ids of members that are no longer there and had not said that they leave."""
        if self._of is None:
            return set()
        # Who left may have said so in an epoch that never met. Who said so by its vote may still be writing its report.
        gone, numbers = set(self._of.ids()) - set(epoch.ids()), range(self._of.number, epoch.number)
        keys = [p.report_key(number, id) for number in numbers for id in gone]
        reports = self._party.board.get_all(keys, EpochReport, each=True).values()
        return gone - self._voted_out - {report.id for report in reports if report.leaving}

    def _begin_anew_without(self, lost: set[str], another_first: bool) -> None:
        """Let what is right only for the former members begin anew."""
        memory, traits = self._runtime.memory, self.method.traits
        of_other_ranks(memory)
        if another_first:
            of_another_first(memory, self.method)
        if lost and traits.subtracts_mean:
            memory.forget(traits.waiting)
