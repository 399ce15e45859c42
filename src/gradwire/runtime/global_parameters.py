"""The global parameters of workers that step by themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from gradwire.errors import IncompatibleError
from gradwire.local_steps import GLOBAL, VELOCITY, StepsLocally
from gradwire.segments import flat_view

__all__ = ["STEPS", "GlobalParameters"]

STEPS = "local_steps"
"""Key, in a link's state, of the optimizer steps since the last exchange."""

State = Mapping[str, Mapping[str, torch.Tensor]]


class GlobalParameters:
    """The global parameters of one worker's link, the outer optimizer's memory, and the steps since the last exchange.

    It exchanges nothing itself: an owner takes :meth:`outgoing`, replaces it by the mean over workers, and hands that
    to :meth:`incoming`. So a real link and a simulation do the same arithmetic.

    Args:
        method: What is done with a mean.
        parameters: The worker's own, by name.
        workers: How many there are.

    Attributes:
        steps: Optimizer steps since the last exchange.
        held: The global parameters by name, float32, flat in memory order.
    """

    def __init__(self, method: StepsLocally, parameters: Mapping[str, torch.Tensor], workers: int) -> None:
        self.method, self.workers, self.steps = method, workers, 0
        self._parameters = dict(parameters)
        self._velocity: dict[str, torch.Tensor] | None = None
        self.held: dict[str, torch.Tensor] = {}
        self.take()

    @torch.no_grad()
    def take(self) -> None:
        """Make the worker's own parameters the global ones, which all workers must do with the same parameters."""
        self.held = {name: flat_view(p).to(torch.float32, copy=True) for name, p in self._parameters.items()}
        if VELOCITY in self.method.remembers_beside:
            self._velocity = {name: torch.zeros_like(x) for name, x in self.held.items()}
        self.steps = 0

    @torch.no_grad()
    def outgoing(self, names: Sequence[str]) -> torch.Tensor:
        """Return what a bucket of these parameters is to send: the global ones less the worker's own, float32.

        Of a method that exchanges parameters, these themselves.
        """
        parts = [flat_view(self._parameters[name]).to(torch.float32) for name in names]
        if self.method.exchanges_parameters:
            return torch.cat(parts)
        return torch.cat([self.held[name] - part for name, part in zip(names, parts)])

    @torch.no_grad()
    def incoming(self, means: Iterable[tuple[Sequence[str], torch.Tensor]]) -> bool:
        """Step by the means over workers of what all have sent, of all buckets.

        Returns:
            Whether all were finite. Where not, the worker's own parameters are the global ones of before again, and
            nothing else changes: all workers see the same means, so that all do the same.
        """
        buckets = list(means)
        self.steps = 0
        if not all(bool(torch.isfinite(flat).all()) for _, flat in buckets):
            for name, p in self._parameters.items():
                flat_view(p).copy_(self.held[name])
            return False
        for names, flat in buckets:
            for name, part in zip(names, flat.split([self.held[name].numel() for name in names])):
                held, place = self.held[name], flat_view(self._parameters[name])
                mean = part if self.method.exchanges_parameters else held - part
                own = place if place.dtype == torch.float32 else place.to(torch.float32)
                velocity = None if self._velocity is None else self._velocity[name]
                self.method.step_(own, held, mean, velocity, self.workers)
                if own is not place:
                    place.copy_(own)
        return True

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Put the global parameters in the place of the worker's own while the context lasts."""
        with torch.no_grad():
            own = {name: flat_view(p).clone() for name, p in self._parameters.items()}
            for name, p in self._parameters.items():
                flat_view(p).copy_(self.held[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, p in self._parameters.items():
                    flat_view(p).copy_(own[name])

    def add_state(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        """Add copies of all that is kept to a link's state."""
        kept = {f"{GLOBAL}/{name}": x.clone() for name, x in self.held.items()}
        if self._velocity is not None:
            kept |= {f"{VELOCITY}/{name}": x.clone() for name, x in self._velocity.items()}
        state["global"][STEPS] = torch.tensor(self.steps)
        state["replicated"].update(kept)

    def _kinds(self) -> list[str]:
        return [GLOBAL] if self._velocity is None else [GLOBAL, VELOCITY]

    def check(self, state: State) -> None:
        """Check that a link's state has what :meth:`add_state` adds.

        Raises:
            IncompatibleError: it has not, as that of a method without local steps.
        """
        kept, kinds = state["replicated"], self._kinds()
        missing = [f"{kind}/{name}" for kind in kinds for name in self.held if f"{kind}/{name}" not in kept]
        if missing or STEPS not in state["global"]:
            raise IncompatibleError(
                f"the state has no {missing[0] if missing else STEPS!r}: it is of a method without local steps; attach "
                f"{self.method!r} without loading it, and the parameters as they are become the global ones"
            )

    def load(self, state: State) -> dict[str, dict[str, torch.Tensor]]:
        """Take back what :meth:`add_state` added and :meth:`check` has passed; return the state without it."""
        kept, kinds = state["replicated"], self._kinds()
        for name, x in self.held.items():
            x.copy_(kept[f"{GLOBAL}/{name}"].reshape(-1))
            if self._velocity is not None:
                self._velocity[name].copy_(kept[f"{VELOCITY}/{name}"].reshape(-1))
        self.steps = int(state["global"][STEPS])
        ours = {f"{kind}/{name}" for kind in kinds for name in self.held}
        return {scope: {key: x for key, x in part.items() if key not in ours} for scope, part in state.items()}
