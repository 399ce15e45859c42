"""The parameters of a worker under a method with local steps: global ones, or its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import cast

import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.codecs import DenseCodec, NoSummary
from gradwire.exchange.method import Method
from gradwire.exchange.ops import Exchange
from gradwire.exchange.planning import FragmentClock, FragmentPieces, cut_fragments
from gradwire.exchange.protocols import Context, Section, two_shot
from gradwire.exchange.protocols.bucket_plan import DENSE_TAG, in_range
from gradwire.exchange.segments import Parameter, flat_view, lay_out
from gradwire.exchange.steps_locally import GLOBAL, VELOCITY, StepsLocally
from gradwire.link.handshake import digest
from gradwire.link.parameters import put, swapped

STEPS, FLYING, LEFT = "local_steps", "local_fragment", "local_steps_left"
"""Keys in a link's state: optimizer steps since the last exchange of the last fragment, number of the fragment in
flight if there is one, and steps until that takes effect."""

CLOCK = (STEPS, FLYING, LEFT)

ARRIVED = "arrived"
"""Kind, in a link's state, of means that have arrived but are not in effect yet."""

Means = list[tuple[Sequence[str], torch.Tensor]]
"""For each bucket, the names of its pieces, and their mean."""

State = Mapping[str, Mapping[str, torch.Tensor]]
"""The state of a link."""


class GlobalParameters:
    """The global parameters of one worker's link, the outer optimizer's state, and the schedule of exchanges.

    It does no communication: its owner replaces the vector of :meth:`outgoing` by the mean over workers, and passes
    that to :meth:`incoming`. A real link and a simulation thus do the same arithmetic.

    Args:
        method: The method with local steps.
        parameters: The worker's own parameters, by name.
        workers: Number of workers.

    Attributes:
        pieces: The units of exchange by name: whole parameters, or blocks of rows of one.
        clock: Counts the optimizer's steps.
        held: The global parameters by name of piece, float32, flat in memory order.
        sends_values: True if workers' own parameters are exchanged, and not differences.
        spoilt: The first of the worker's own pieces that was not finite when the means of an exchange were not; None if
            all were.
    """

    spoilt: str | None = None

    def __init__(self, method: StepsLocally, parameters: Mapping[str, torch.Tensor], workers: int) -> None:
        self.method, self.workers = method, workers
        self.sends_values = method.exchanges_parameters
        self.pieces: FragmentPieces = cut_fragments(parameters, method)
        self.clock = FragmentClock(method.every, method.fragments, method.delay)
        self._arrived: Means | None = None
        self._velocity: dict[str, torch.Tensor] | None = None
        self.held: dict[str, torch.Tensor] = {}
        self._left: list[int] | None = None
        self._counted = False
        self.take()

    def problem(self) -> str | None:
        """Return None: a value that is not finite reaches all workers, which then all restore the global parameters."""
        return None

    @torch.no_grad()
    def take(self) -> None:
        """Set the global parameters to the worker's own; all workers must do so with the same parameters."""
        self.held = {name: flat_view(p).to(torch.float32, copy=True) for name, p in self.pieces.items()}
        if VELOCITY in self.method.remembers_beside:
            self._velocity = {name: torch.zeros_like(x) for name, x in self.held.items()}
        self.clock.reset()
        self._leave()

    def is_apart(self) -> bool:
        """Return whether the worker's own parameters differ from the global ones."""
        return any(not torch.equal(flat_view(p.detach()), self.held[n].to(p.dtype)) for n, p in self.pieces.items())

    def has_moved(self) -> bool:
        """Return whether the worker's own parameters have changed since all were exchanged together.

        A method that keeps them apart leaves them so: digests tell whether they are still the same. After a state was
        loaded, steps do, until the next exchange.
        """
        if not self.method.keeps_own:
            return self.is_apart()
        if self._left is None:
            return self._counted or bool(self.clock.steps)
        return self._digests() != self._left

    def _leave(self) -> None:
        """Note what an exchange leaves, if that is not the global parameters."""
        if self.method.keeps_own:
            self._left = self._digests()

    def _digests(self) -> list[int]:
        return [digest(p) for p in self.pieces.values()]

    @torch.no_grad()
    def restore(self) -> None:
        """Set the worker's own parameters to the global ones."""
        put(list(self.pieces.values()), list(self.held.values()))
        self._leave()

    @torch.no_grad()
    def outgoing(self, names: Sequence[str]) -> torch.Tensor:
        """Return the bucket of some pieces to send: the global ones less the worker's own, float32.

        If the method exchanges parameters, it holds these themselves.
        """
        parts = [flat_view(self.pieces[name]).to(torch.float32) for name in names]
        if self.sends_values:
            return torch.cat(parts)
        return torch.cat([self.held[name] - part for name, part in zip(names, parts)])

    @torch.no_grad()
    def incoming(
        self, means: Iterable[tuple[Sequence[str], torch.Tensor]], *, replaced: bool = False, apart: bool = False
    ) -> bool:
        """Update the parameters by the means over workers, of all buckets.

        Args:
            means: Means of some or all pieces.
            replaced: True to set the worker's own parameters to the global ones, whatever the method does otherwise.
            apart: True to leave the worker's own parameters as they are.

        Returns:
            True if all were finite. If not, the worker's own parameters are set to the old global ones, and nothing
            else changes: all workers see the same means, so that all do the same.
        """
        buckets = list(means)
        if not all(bool(torch.isfinite(flat).all()) for _, flat in buckets):
            odd = (name for name, p in self.pieces.items() if not bool(torch.isfinite(p.detach()).all()))
            self.spoilt = next(odd, None)
            if not apart:
                self.restore()
            return False
        for names, flat in buckets:
            for name, part in zip(names, flat.split([self.held[name].numel() for name in names])):
                held, place = self.held[name], self.pieces[name]
                mean = part if self.sends_values else held - part
                # A view of the parameter, or a copy if it has another dtype or gaps.
                own = held.clone() if apart else flat_view(place).to(torch.float32)
                velocity = None if self._velocity is None else self._velocity[name]
                self.method.step_(own, held, mean, velocity, self.workers)
                if apart:
                    continue
                if replaced or own.data_ptr() != place.data_ptr():
                    put([place], [held if replaced else own])
        if buckets:
            self._leave()
        return True

    def swapped(self) -> AbstractContextManager[None]:
        """Return a context in which the parameters hold the global values instead of the worker's own."""
        return swapped(list(self.pieces.values()), list(self.held.values()))

    def arrived(self) -> Means | None:
        """Return the means that a loaded state had in flight, at the first call only; None if there are none."""
        found, self._arrived = self._arrived, None
        return found

    def add_state(self, state: dict[str, dict[str, torch.Tensor]], flying: Means | None = None) -> None:
        """Add copies of all that is kept here to a link's state, with the means of the exchange in flight."""
        kept = {f"{GLOBAL}/{name}": x.clone() for name, x in self.held.items()}
        if self._velocity is not None:
            kept |= {f"{VELOCITY}/{name}": x.clone() for name, x in self._velocity.items()}
        state["global"][STEPS] = torch.tensor(self.clock.steps, device="cpu")
        if self.clock.flying is not None:
            state["global"] |= {
                FLYING: torch.tensor(self.clock.flying, device="cpu"),
                LEFT: torch.tensor(self.clock.left, device="cpu"),
            }
        for names, flat in flying or self._arrived or ():
            parts = flat.split([self.held[name].numel() for name in names])
            kept |= {f"{ARRIVED}/{name}": part.clone() for name, part in zip(names, parts)}
        state["replicated"].update(kept)

    def _kinds(self) -> list[str]:
        return [GLOBAL] if self._velocity is None else [GLOBAL, VELOCITY]

    def check(self, state: State) -> None:
        """Check that a link's state has what :meth:`add_state` adds.

        Raises:
            IncompatibleError: it has not, for example because the method had no local steps.
        """
        kept, kinds = state["replicated"], self._kinds()
        needed = [f"{kind}/{name}" for kind in kinds for name in self.held]
        fragment = state["global"].get(FLYING)
        if fragment is not None:
            if not 0 <= int(fragment) < len(self.pieces.fragments) or LEFT not in state["global"]:
                raise IncompatibleError(
                    f"the state has fragment {int(fragment)} in flight, which {self.method!r} has not"
                )
            if not 1 <= int(state["global"][LEFT]) <= self.clock.delay:
                raise IncompatibleError(
                    f"in the state an exchange takes effect after {int(state['global'][LEFT])} steps more, and with "
                    f"{self.method!r} after {self.clock.delay} at most: call synchronise() before it is saved"
                )
            steps, left = (int(state["global"].get(key, 0)) for key in (STEPS, LEFT))
            if self.clock.overtakes(steps, left):
                raise IncompatibleError(
                    f"in the state an exchange takes effect after {left} steps more, and with {self.method!r} the next "
                    "one begins before: call synchronise() before it is saved"
                )
            needed += [f"{ARRIVED}/{name}" for name in self.pieces.fragments[int(fragment)]]
        missing = [key for key in needed if key not in kept]
        if missing or STEPS not in state["global"]:
            raise IncompatibleError(
                f"the state has no {missing[0] if missing else STEPS!r}: it is of a method without local steps; attach "
                f"{self.method!r} without loading it, and the parameters as they are become the global ones"
            )

    def load(self, state: State) -> dict[str, dict[str, torch.Tensor]]:
        """Load the part that :meth:`add_state` added, after :meth:`check`; return the state without it."""
        kept, kinds = state["replicated"], self._kinds()
        for name, x in self.held.items():
            x.copy_(kept[f"{GLOBAL}/{name}"].reshape(-1))
            if self._velocity is not None:
                self._velocity[name].copy_(kept[f"{VELOCITY}/{name}"].reshape(-1))
        self._arrived, clock = None, {key: int(state["global"][key]) for key in CLOCK if key in state["global"]}
        self.clock.go_on(clock[STEPS], clock.get(FLYING), clock.get(LEFT, 0))
        self._left, self._counted = None, bool(clock[STEPS])
        if self.clock.flying is not None:
            names = self.pieces.fragments[self.clock.flying]
            parts = [kept[f"{ARRIVED}/{name}"].reshape(-1) for name in names]
            self._arrived = [(names, torch.cat(parts))] if parts else None
        ours = {f"{kind}/{name}" for kind in (*kinds, ARRIVED) for name in self.held}
        return {scope: {key: x for key, x in part.items() if key not in ours} for scope, part in state.items()}


class OwnParameters:
    """The parameters of one worker that has its own, and the steps since the last exchange.

    The counterpart of :class:`gradwire.link.global_parameters.GlobalParameters` for methods without global parameters.
    It does no communication: its owner replaces the vector of :meth:`outgoing` by this worker's outcome, and passes
    that to :meth:`incoming`.

    Args:
        method: The method that exchanges them.
        parameters: Parameters by name.
        workers: Number of workers.

    Attributes:
        pieces: The units of exchange by name: the parameters.
        clock: Counts the optimizer's steps.
    """

    def __init__(self, method: Method, parameters: Mapping[str, torch.Tensor], workers: int) -> None:
        self.method, self._parameters, self.workers = method, dict(parameters), workers
        self.pieces = FragmentPieces(self._parameters, 1, "sequential")
        self.clock = FragmentClock(method.traits.local_steps, 1, 0)
        self._common: list[int] | None = None

    def take(self) -> None:
        """Reset the step count; all workers must do so with the same parameters."""
        self.clock.reset()
        self.note_common()

    def note_common(self) -> None:
        """Note that all workers have the same parameters now."""
        self._common = self._digests()

    def is_apart(self) -> bool:
        """Return whether the worker's parameters differ from the latest that all workers had in common, if any."""
        return self._digests() != self._common

    def _digests(self) -> list[int]:
        return [digest(p) for p in self._parameters.values()]

    def problem(self) -> str | None:
        """Return the reason why these parameters must not reach another worker, or None."""
        for name, p in self._parameters.items():
            if not in_range(p.detach()):
                return (
                    f"parameter {name!r} is not finite here, or beyond 2^40, and by {self.method!r} no other worker "
                    "has it to go back to: load a checkpoint, and use a lower learning rate"
                )
        return None

    @torch.no_grad()
    def outgoing(self, names: Sequence[str]) -> torch.Tensor:
        """Return a bucket of these parameters, float32."""
        return torch.cat([flat_view(self._parameters[name]).to(torch.float32) for name in names])

    @torch.no_grad()
    def incoming(self, outcomes: Iterable[tuple[Sequence[str], torch.Tensor]], *, replaced: bool = False) -> bool:
        """Set this worker's parameters to the outcomes of an exchange, of all buckets; return True.

        Those in float64 get the change by the exchange, so that it rounds nothing else of them to float32.
        """
        for names, flat in outcomes:
            parameters = [self._parameters[name] for name in names]
            for p, outcome in zip(parameters, flat.split([p.numel() for p in parameters])):
                own = flat_view(p)
                put([p], [own + (outcome - own.to(torch.float32)) if p.dtype == torch.float64 else outcome])
        return True

    def arrived(self) -> None:
        """Return None: an exchange takes effect when it ends."""

    def add_state(self, state: dict[str, dict[str, torch.Tensor]], flying: object = None) -> None:
        """Add the steps to a link's state."""
        state["global"][STEPS] = torch.tensor(self.clock.steps, device="cpu")

    def check(self, state: State) -> None:
        """Check that a link's state has what :meth:`add_state` adds.

        Raises:
            IncompatibleError: it has not, for example because the method exchanged gradients.
        """
        if STEPS not in state["global"]:
            raise IncompatibleError(
                f"the state has no {STEPS!r}: it is of a method that exchanges gradients; attach {self.method!r} "
                "without loading it"
            )

    def load(self, state: State) -> dict[str, dict[str, torch.Tensor]]:
        """Load the part that :meth:`add_state` added; return the state."""
        self.clock.go_on(int(state["global"][STEPS]))
        return {scope: dict(part) for scope, part in state.items()}


def parameters_of(method: Method, named: Mapping[str, torch.Tensor], workers: int) -> GlobalParameters | OwnParameters:
    """Return the parameters of one of some workers under a method with local steps."""
    if method.traits.outcomes_differ:
        return OwnParameters(method, named, workers)
    return GlobalParameters(cast(StepsLocally, method), named, workers)


def mean_over_ranks(context: Context, flat: torch.Tensor) -> Exchange[None]:
    """Replace a float32 vector by its mean over ranks, added in the order of ranks."""
    codec = DenseCodec(lay_out([Parameter("(mean)", (flat.numel(),), (1,))]), context.world_size)
    yield from two_shot(context, DENSE_TAG, [Section(codec, NoSummary())], flat)
