"""A link whose rounds go on with a quorum of its members."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

import torch

from gradwire.errors import ExchangeError, GradwireError, IncompatibleError
from gradwire.link.local_steps import LocalSteps
from gradwire.link.membership import steps as p
from gradwire.link.membership.membership_link import MembershipLink
from gradwire.link.membership.quorum import Presence, Quorum, shares
from gradwire.link.membership.quorum_steps import STILL_S, QuorumSteps
from gradwire.link.membership.records import Member
from gradwire.link.membership.transfer import copied
from gradwire.link.round import Mean

T = TypeVar("T")

LEAST_PAUSE_S, MOST_PAUSE_S = 0.01, 0.25
"""Shortest and longest time between two roll calls."""

PAUSES = 100
"""Roll calls in the time of a round: what a round waits for the next one is about so small a part of it."""

COUNTED = ("contributions", "late_contributions", "dropped_contributions", "rounds_missed")
"""Counts in :meth:`QuorumLink.diagnostics`."""


class QuorumLink(MembershipLink):
    """A :class:`MembershipLink` under ``gradwire.join(..., quorum=...)``; ``gradwire.Link`` makes one.

    The thread that trains only computes. After its local steps it leaves its difference to a thread of the link, and
    waits until that has merged it. The link's thread takes all rounds, together with those of the other members: with
    the difference, or with nothing while this worker still computes.

    Args:
        parameters, method, group, lanes, grad_scaler, optimizer, options: As for :class:`MembershipLink`.

    Raises:
        HyperparameterError, BackendError, IncompatibleError, ExchangeError, LeftOutError: as for
            :class:`MembershipLink`.
    """

    _local: QuorumSteps

    def __init__(self, *given: Any, **more: Any) -> None:
        self._nudge = threading.Event()
        self._going: p.Steps[None] | None = None
        self._over: Exception | None = None
        self._left_in_step = False
        self._deferred: Any = None
        self._rolled: tuple[Presence, ...] = ()
        self._rolled_of: tuple[Member, ...] = ()
        self._met_s: float | None = None
        self._began_s, self._pause_s = time.monotonic(), LEAST_PAUSE_S
        self._ages: Counter[int] = Counter()
        self._weights: defaultdict[str, float] = defaultdict(float)
        super().__init__(*given, **more)
        threading.Thread(
            target=_take_rounds,
            args=(weakref.WeakMethod(self._advance), self._nudge),
            name="gradwire rounds",
            daemon=True,
        ).start()

    def _checked(self) -> str:
        terms = super()._checked()
        method: Any = self.method
        refused = {
            "it exchanges at every step: use a method with local steps, such as DiLoCo(inner=...)": (
                not method.traits.local_steps
            ),
            "it exchanges fragments in turn, which workers of unlike speed would not reach together": (
                getattr(method, "fragments", 1) > 1
            ),
            "workers keep parameters of their own beside the global ones": (
                getattr(method, "keeps_own", False) or bool(getattr(method, "mixing", 0.0))
            ),
            "what all hold, such as the mean of what each has sent before, is right where all send in each round": (
                bool(method.traits.of_ranks)
            ),
            "in rounds of warm-up gradients are exchanged at every step: use warmup_steps=0": (
                self.options.warmup_steps > 0
            ),
        }
        for reason, holds in refused.items():
            if holds:
                raise IncompatibleError(f"{self.method!r} cannot go on with a quorum: {reason}")
        return hashlib.blake2b(f"{terms} {self._seat.quorum!r}".encode(), digest_size=32).hexdigest()

    def _local_steps(self, most: int) -> LocalSteps:
        return QuorumSteps(self.method, self._parameters, most, self, self._channel, self.grad_scaler)

    # ------------------------------------------------------------------ for users

    def exchange_all(self, start: Callable[[], Iterable[tuple[T, Mean]]]) -> list[tuple[T, torch.Tensor]]:
        raise IncompatibleError(f"{self.method!r} takes local steps: leave out reduce_()")

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        with self._lock:
            return super().state_dict()

    def diagnostics(self) -> dict[str, Any]:
        with self._lock:
            found = super().diagnostics()
            counts = self._party.counts
            found["membership"] |= {name: counts[name] for name in COUNTED}
            found["membership"] |= {"ages": dict(sorted(self._ages.items())), "weights": dict(self._weights)}
        return found

    def depart(self) -> None:
        super().depart()
        self._going = None
        self._nudge.set()

    @property
    def lock(self) -> Any:
        """Held while a round is taken."""
        return self._lock

    @property
    def leaving(self) -> bool:
        """True if this member leaves as soon as it has contributed."""
        return self._seat.leaving

    def nudge(self) -> None:
        """Let the next roll call come at once."""
        self._nudge.set()

    def goes_on(self) -> bool:
        """Return whether this worker takes further rounds: False only in the step in which it left without a last one.

        Raises:
            GradwireError: it has left before this step, or the training has failed.
        """
        if self._left_in_step:
            self._left_in_step = False
            return False
        if self._over is not None:
            self._problem = None
            raise self._over
        if not self.close.alive:
            raise ExchangeError("this worker has left the training: look at membership.left after every step")
        return True

    # ------------------------------------------------------------------ the thread that takes rounds

    def _advance(self) -> float | None:
        """Call the roll, and take the round if it begins; return the time until the next call, None at the end."""
        with self._lock:
            pause_s = 0.0
            try:
                if self._over is None and not self._seat.left and self.close.alive:
                    self._raise_problem()
                    if self._rests():
                        pause_s = self._pause_s
                    else:
                        self._take()
                        self._run(self._seat.change())
            except p.LeftOut:
                self._return()
            except Exception as error:
                self._over = error
            if self._over is None and not self._seat.left and self.close.alive:
                return pause_s
            self._end()
            return None

    def _rests(self) -> bool:
        """Go on with the round up to the next rest; return False when it counts."""
        if self._going is None:
            self._going = self._seat.round()
        going, self._going = self._going, None
        reply: Any = None
        with contextlib.suppress(StopIteration):
            while True:
                step = going.send(reply)
                if isinstance(step, p.Rest):
                    self._going = going
                    return True
                reply = self._do(step)
        return False

    def _take(self) -> None:
        """Apply the round that counts."""
        present, names = self._rolled, [member.name for member in self._rolled_of]
        self._local.take(self._means)
        counts = self._party.counts
        for member, name in zip(present, names):
            if member.weight > 0:
                counts.update(contributions=1, late_contributions=int(member.age > 0))
                self._ages[member.age] += 1
                self._weights[name] += member.weight
            else:
                counts["rounds_missed"] += 1
        now_s = time.monotonic()
        self._pause_s = min(max((now_s - self._began_s) / PAUSES, LEAST_PAUSE_S), MOST_PAUSE_S)
        self._began_s = now_s

    def _return(self) -> None:
        """Come in again, after the others went on without this worker: what it has computed since is dropped."""
        turn = self._local.turn
        with turn.changed:
            # From now on it does not hand in what is dropped.
            turn.replaced = True
            waits = turn.ready is not None
            self._party.counts["dropped_contributions"] += bool(turn.steps)
        try:
            self._come_again()
        except GradwireError as error:
            self._over = error
            return
        if self._seat.left:
            # The step that runs now shall end as that of one that has contributed.
            self._left_in_step = True
        elif waits:
            self.take_over()

    def _end(self) -> None:
        """Let the thread that trains know that no further round comes."""
        self._over = self._over or ExchangeError("this worker has left the training: look at membership.left")
        self._problem = self._party.failure
        turn = self._local.turn
        with turn.changed:
            turn.changed.notify_all()

    def take_over(self) -> None:
        """Take over the global parameters as they are now, and other state of a member that took this worker in."""
        with self._lock, self._local.turn.changed:
            self._left_in_step = False
            state, self._deferred = self._deferred, None
            if state is not None:
                super()._take_values(state)
            self._local.take_values()
            self._seat.since = self._seat.rounds

    # ------------------------------------------------------------------ the protocol's steps

    def _look(self) -> None:
        """Break off a round with members that are gone; the thread that takes rounds agrees with the others."""
        group = self._epoch_group
        if group is None:
            return
        self._party.board.try_again()
        # Until the lanes are open over this group, the link's circle is that of an epoch that has ended.
        lost = group.gone() or (self._linked is group and self._runtime.failures.circle.lost())
        if lost and group is self._epoch_group:
            self._abort()
            self._nudge.set()

    def _do(self, step: p.Step) -> Any:
        if isinstance(step, p.Roll):
            return self._roll(step)
        if isinstance(step, p.Exchange):
            self._begin(step)
        return super()._do(step)

    def _roll(self, step: p.Roll) -> tuple[Presence, ...] | None:
        group, turn, quorum = self._epoch_group, self._local.turn, cast(Quorum, self._seat.quorum)
        if group is None or group.gone():
            return None
        with turn.changed:
            ready = turn.ready
        late = self._met_s is not None and time.monotonic() - self._met_s >= self._party.late_s
        mine = Presence(ready.weight, ready.full, step.age, late) if ready else Presence(age=step.age, late=late)
        try:
            present = self._told_by_all(mine)
        except Exception as error:
            self._refuse_own(error)
            return None
        if not quorum.is_met(present):
            self._met_s = None
        elif self._met_s is None:
            self._met_s = time.monotonic()
        self._local.call(self._met_s is not None, self._seat.leaving)
        return present

    def _told_by_all(self, mine: Presence) -> tuple[Presence, ...]:
        if self.world_size == 1:
            return (mine,)
        rows = self._channel.gather([mine.weight, float(mine.full), float(mine.age), float(mine.late)])
        return tuple(Presence(weight, bool(full), int(age), bool(late)) for weight, full, age, late in rows)

    def _begin(self, step: p.Exchange) -> None:
        share = shares(step.present)[self.rank]
        self._rolled, self._rolled_of = step.present, self._seat.current.members
        self._met_s = None
        self._local.begin_round(share, self._seat.leaving)
        self._runtime.memory.sits_out = not share
        self._starting = self._local.started

    _prepares = False

    def _be_seen(self) -> None:
        """Do nothing: the thread that takes rounds is never long away."""

    # ------------------------------------------------------------------ state

    def _state_for_others(self) -> dict[str, Any]:
        if not self._opened:
            return super()._state_for_others()
        with self._still():
            state = super()._state_for_others()
            # The thread that trains steps again while they are sent.
            state |= {name: copied(state[name]) for name in ("optimizer", "carried")}
        named = {name: x.dtype for name, x in self._local.parameters.pieces.items()}
        held = self._local.replicated()
        state["parameters"] = {name: held[name].to(dtype) for name, dtype in named.items()}
        if self._deferred is not None:
            state["optimizer"] = self._deferred["optimizer"]
        return state

    @contextlib.contextmanager
    def _still(self) -> Iterator[None]:
        """Wait until the optimizer does not step, and keep it from stepping."""
        still = self._local.turn.still
        held = still.acquire(timeout=STILL_S)
        try:
            yield
        finally:
            if held:
                still.release()

    def _take_values(self, state: Any) -> None:
        if self._opened:
            # The thread that trains may be at work on them.
            self._deferred = state
        else:
            super()._take_values(state)

    def _take_state(self, state: Any) -> None:
        self.load_state_dict({**state, "rank": {}})
        if not self._local.turn.replaced:
            with self._local.turn.changed:
                self._local.take_values()


def _take_rounds(advance: weakref.WeakMethod[Callable[[], float | None]], nudge: threading.Event) -> None:
    """Take rounds as long as the link exists, and this worker belongs to the training."""
    while (call := advance()) is not None:
        pause_s = call()
        del call
        if pause_s is None:
            return
        nudge.wait(pause_s)
        nudge.clear()
