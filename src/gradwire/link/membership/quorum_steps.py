"""Local steps of a member whose rounds are taken by another thread, with or without its contribution."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch

from gradwire.exchange.method import is_number, require
from gradwire.exchange.segments import flat_view
from gradwire.link.global_parameters import GlobalParameters, Means
from gradwire.link.local_steps import LocalSteps, Started
from gradwire.link.membership.quorum import Presence
from gradwire.link.parameters import put, swapped

STILL_S = 10.0
"""Time that the state of an optimizer is waited for while it steps; a step that raised has no end."""

WAKE_S = 1.0
"""Time between two looks of a waiting thread whether the other one still runs."""


class TakesRounds(Protocol):
    """The link of such a member, as its local steps see it."""

    def goes_on(self) -> bool:
        """Return False in the step in which this worker has left without a last round; raise in later ones."""

    def nudge(self) -> None:
        """Let the next roll call come at once."""

    def take_over(self) -> None:
        """Take over the global parameters as they are now."""

    @property
    def lock(self) -> Any:
        """Held while a round is taken."""

    @property
    def leaving(self) -> bool:
        """True if this member leaves as soon as it has contributed."""


@dataclass
class Turn:
    """What the thread that trains and the one that takes rounds tell each other.

    Attributes:
        steps: Local steps since this worker took over the global parameters.
        samples: Samples in them, as far as they were told.
        ready: What this worker contributes while it waits to do so; None while it computes.
        called: True while a round waits for those that have not contributed.
        replaced: True if this worker came in again while it computed: its parameters are not those of the others.
        changed: Held while the above are read and written together; notified after each change.
        still: Held while the optimizer steps.
    """

    steps: int = 0
    samples: float = 0.0
    ready: Presence | None = None
    called: bool = False
    replaced: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)
    still: threading.Lock = field(default_factory=threading.Lock)
    _steps_now: bool = False

    def before_step(self) -> None:
        """Note that the optimizer begins a step."""
        if not self._steps_now:
            self.still.acquire()
            self._steps_now = True

    def after_step(self) -> None:
        """Note that it has ended."""
        if self._steps_now:
            self._steps_now = False
            self.still.release()

    def begin_anew(self) -> None:
        """Forget the steps, after the global parameters were taken over; hold :attr:`changed`."""
        self.steps, self.samples, self.ready, self.replaced = 0, 0.0, None, False
        self.changed.notify_all()


class QuorumSteps(LocalSteps):
    """Counts the steps of a member's optimizer, and hands its difference to the thread that takes rounds.

    That thread calls :meth:`share`, :meth:`started` and :meth:`take`; all others belong to the thread that trains.
    Without a contribution the global parameters change as on all other members, and the worker's own stay as they are.
    Its difference is to the global parameters from which it computes, of which a copy is made when the first round
    passes without it.

    Attributes:
        turn: What the two threads tell each other.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.turn = Turn()
        self._share = 1.0
        self._base: dict[str, torch.Tensor] | None = None
        # Zeros of those that do not contribute must be those of a difference.
        self._global.sends_values = False

    @property
    def _global(self) -> GlobalParameters:
        return cast(GlobalParameters, self.parameters)

    # ------------------------------------------------------------------ the thread that trains

    def weigh(self, samples: float) -> None:
        require(is_number(samples, above=0), "samples", f"a number above 0 is needed, not {samples!r}")
        with self.turn.changed:
            self.turn.samples += float(samples)

    def after_step(self) -> None:
        link, turn = cast(TakesRounds, self._link()), self.turn
        turn.after_step()
        self._runtime.count(sum(p.numel() for p in self._named.values()))
        if not link.goes_on():
            return
        with turn.changed:
            turn.steps += 1
        if turn.replaced:
            link.take_over()
        elif turn.steps >= self._global.method.every:
            self._contribute(link, full=True)
        elif turn.called or link.leaving:
            self._contribute(link, full=False)

    def synchronise(self) -> None:
        """Contribute what there is to the next round, and take over the global parameters."""
        link = cast(TakesRounds, self._link())
        if not link.goes_on():
            return
        if self.turn.steps and not self.turn.replaced:
            self._contribute(link, full=True)
        else:
            link.take_over()

    def global_parameters(self) -> AbstractContextManager[None]:
        with cast(TakesRounds, self._link()).lock:
            held = [x.clone() for x in self._global.held.values()]
        return swapped(list(self._global.pieces.values()), held)

    def _contribute(self, link: TakesRounds, *, full: bool) -> None:
        """Wait until this worker's difference has been merged, or the round that called for it has begun."""
        turn = self.turn
        with turn.changed:
            if turn.replaced or not (full or turn.called or link.leaving):
                return
            turn.ready = Presence(turn.samples or float(turn.steps), full)
            link.nudge()
            while turn.ready is not None:
                if not link.goes_on():
                    return
                turn.changed.wait(WAKE_S)

    def bind(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        if optimizer is not None:
            turn = self.turn
            self._hooks.append(optimizer.register_step_pre_hook(lambda *_: turn.before_step()).remove)
        return super().bind(optimizer, parameters)

    # ------------------------------------------------------------------ the thread that takes rounds

    def call(self, met: bool, leaving: bool) -> None:
        """Note whether a round waits for those that have not contributed yet."""
        with self.turn.changed:
            self.turn.called = met
            if not met:
                self._let_go(leaving)

    def begin_round(self, share: float, leaving: bool) -> None:
        """Note what this member's difference is multiplied by in the round that begins."""
        self._share = share
        with self.turn.changed:
            self.turn.called = False
            if not share:
                self._let_go(leaving)

    def _let_go(self, leaving: bool) -> None:
        """Let a worker that was about to contribute what it had, and came too late, go on to compute."""
        ready = self.turn.ready
        if ready is not None and not ready.full and not leaving:
            self.turn.ready = None
            self.turn.changed.notify_all()

    def started(self) -> Started:
        """Start the exchange of all pieces."""
        link, names = self._link(), list(self._global.pieces)
        if link is None:
            return []
        self._runtime.count(-self._numel(names))  # counted with the steps
        return self._started(link, names)

    def _outgoing(self, names: Sequence[str]) -> torch.Tensor:
        held = self._global.held if self._base is None else self._base
        if not self._share:
            return torch.zeros(sum(held[name].numel() for name in names), dtype=torch.float32, device="cpu")
        parts = [held[name] - flat_view(self._global.pieces[name]).to(torch.float32) for name in names]
        flat = torch.cat(parts)
        return flat if self._share == 1.0 else flat.mul_(self._share)

    def take(self, means: Means) -> bool:
        """Apply the means of a round that counts; return whether they were finite.

        Raises:
            ExchangeError: they were not, for one of several rounds in a row.
        """
        if not self._share:
            if self._base is None:
                self._base = {name: x.clone() for name, x in self._global.held.items()}
            finite = self._global.incoming(means, apart=True)
            self.judge(finite)
            return finite
        with self.turn.changed:
            finite = self._global.incoming(means)
            self._base = None
            # Before the thread that trains goes on, so that the step of such a round raises the error.
            self.judge(finite)
            self.turn.begin_anew()
        return finite

    def take_values(self) -> None:
        """Set the worker's own parameters to the global ones; hold :attr:`Turn.changed`."""
        put(list(self._global.pieces.values()), list(self._global.held.values()))
        self._base = None
        self.turn.begin_anew()
