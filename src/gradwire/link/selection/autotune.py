"""Which method a round travels by: one for ever, or the fastest of several by trial."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.planning import Planner
from gradwire.methods.auto import Auto
from gradwire.methods.spec import method as read_method
from gradwire.model.machine import LinkModel
from gradwire.model.probing import Probed

STATE = ("choice", "choice_spec", "fallback", "fallback_told")
"""Keys of a selection's part of a link's state that are the same on all ranks."""

OWN_STATE = ("fallback_measured",)
"""Keys of it that are this rank's own."""

RESIDUAL = "residual"
"""What passes from one candidate to the next: the vector that a method has left out so far, by parameter."""

TIE = 0.01
"""Relative difference of step times below which the candidate listed first is taken."""

HOPELESS = 1.5
"""A candidate is not tried whose bytes over the link alone take this many times the step of the one with the fewest."""


def say_dropped(state: Mapping[str, torch.Tensor], warn: Callable[[str, str], None]) -> None:
    """Warn that a checkpoint's return to a fallback is not followed; to be called where there is no fallback."""
    if "fallback" in state:
        warn(
            "fallback",
            f"the checkpoint had left its method in round {int(state['fallback'][0])} for the errors that it made; "
            "without fallback= it is used again",
        )


class Channel(Protocol):
    """What a chooser asks of the group; every call is collective.

    Attributes:
        ranks: Global numbers of the ranks whose values are told, in the same order; for people.
    """

    ranks: Sequence[int]

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Return every rank's values, by rank."""

    def gathering(self, values: Sequence[float], about: str) -> Callable[[], list[list[float]]]:
        """Start to gather, without a wait; what is returned waits, and gives every rank's values."""

    def probe(self, most_bytes: int) -> Probed:
        """Measure what leaves a host while all ranks send, in rows of so many bytes in all; the same on all ranks."""


@dataclass(frozen=True)
class Change:
    """A change of the method for another, whose memory is another.

    Attributes:
        reason: To warn people of; None: nothing that they did not ask for.
        keeps: Kinds of vectors that the other goes on with; all else is dropped.
    """

    reason: str | None = None
    keeps: tuple[str, ...] = ()


class Selection(Protocol):
    """Says which planner serves a round."""

    def begin(self, round: int, network: Channel, skipped: bool = False) -> Change | None:
        """Note that a round's first bucket is ready on this rank, and whether the round before it was skipped.

        Returns:
            The change of the method, None where there is none or what it remembers goes on.
        """

    @property
    def planner(self) -> Planner:
        """The one that serves the current round."""

    @property
    def delivers(self) -> bool:
        """Whether the current round also sends the residuals that another method has left."""

    def record(self) -> dict[str, Any] | None:
        """Return what was chosen and why, in plain values."""

    def returned(self) -> dict[str, Any] | None:
        """Return where a plain method took the place of what was chosen: which, since when and why, in plain values."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return what was chosen, for a checkpoint; keys of :data:`STATE` and :data:`OWN_STATE`."""

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take what :meth:`state` gave."""

    def again(self) -> None:
        """Begin anew with the next round; to be called on all ranks.

        Raises:
            IncompatibleError: there is nothing to choose.
        """


class FixedSelection:
    """One planner for ever."""

    delivers = False

    def __init__(self, planner: Planner) -> None:
        self.planner = planner

    def begin(self, round: int, network: Channel, skipped: bool = False) -> None:
        """Nothing is to be chosen."""
        return

    def record(self) -> None:
        """Nothing was chosen."""
        return

    def returned(self) -> None:
        """Nothing takes its place."""
        return

    def state(self) -> dict[str, torch.Tensor]:
        """Nothing is to be kept."""
        return {}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Nothing is taken."""

    def again(self) -> None:
        """Refuse: there is one method."""
        raise IncompatibleError(f"this link has one method, {self.planner.method!r}: attach with 'auto' to choose")


@dataclass(frozen=True)
class Trial:
    """One round of the trial."""

    spec: str
    timed: bool


class Autotuner:
    """Tries candidates in the first rounds, in turns, and keeps the fastest.

    A round's time runs from its first bucket to the next round's: it holds the whole exchange, and what a user waits
    for. The candidate with the fewest bytes goes first; with its step and a measurement of the link, those that the
    link alone makes hopeless are left out. All decisions are functions of numbers that every rank gathered.

    Args:
        method: The list, and how long to try.
        planners: By spec, in the list's order.
    """

    def __init__(self, method: Auto, planners: Mapping[str, Planner], clock: Callable[[], float] = time.perf_counter):
        self.method, self._planners, self._clock = method, dict(planners), clock
        self._rememberers = {spec for spec in self._planners if read_method(spec).traits.remembers}
        self._keepers = {spec for spec in self._planners if RESIDUAL in read_method(spec).traits.remembers}
        everything = list(next(iter(self._planners.values())).parameters)
        self._counted = {spec: planner.counted(everything) for spec, planner in self._planners.items()}
        self._bytes = {spec: meter.sent_bytes for spec, meter in self._counted.items()}
        self.again()

    def again(self) -> None:
        """Begin a new trial with the next round; to be called on all ranks."""
        self.choice: str | None = None
        self._owing = True
        self._last: str | None = None
        self._smallest = min(self._bytes, key=lambda spec: self._bytes[spec])
        # DDP lays its buckets out anew after the first round, and buffers grow in the second.
        self._schedule = [Trial(self._smallest, timed) for timed in (False, False, True, True)]
        self._left_out: dict[str, str] = {}
        self._tried = False
        self._samples: dict[str, list[float]] = {}
        self._running: Trial | None = None
        self._begun_s = 0.0
        self._means: dict[str, float] = {}
        self._probed: Probed | None = None

    @property
    def planner(self) -> Planner:
        """That of the current round's method."""
        return self._planners[self._current()]

    @property
    def delivers(self) -> bool:
        """Whether this round's method keeps no residuals, and another's may have been left."""
        return self._owing and bool(self._keepers) and self._current() not in self._keepers

    def _current(self) -> str:
        return self.choice or (self._running.spec if self._running else self._smallest)

    def begin(self, round: int, network: Channel, skipped: bool = False) -> Change | None:
        """Note the time of the round before, and decide which method this one travels by."""
        before = self._last
        if before is not None and not skipped:
            # Residuals are left by those that keep them, and sent by the others.
            self._owing = before in self._keepers
        self._try_on(network)
        self._last = self._current()
        return Change(keeps=(RESIDUAL,)) if before in self._rememberers and before != self._last else None

    def _try_on(self, network: Channel) -> None:
        if self.choice is not None:
            return
        now_s = self._clock()
        if self._running is not None and self._running.timed:
            self._samples.setdefault(self._running.spec, []).append(now_s - self._begun_s)
        if not self._schedule:
            self._decide(network) if self._tried else self._shorten(network)
            now_s = self._clock()
        self._begun_s = now_s
        self._running = self._schedule.pop(0) if self._schedule else None

    def fix(self, spec: str, reason: str) -> None:
        """Take a candidate without a trial, or end one.

        Raises:
            KeyError: it is none of the candidates.
        """
        self._planners[spec]
        self.choice, self._reason = spec, reason
        self._schedule, self._running = [], None

    def state(self) -> dict[str, torch.Tensor]:
        """Return the choice as tensors: its place in the list, -1 before there is one, and its spec as text."""
        if self.choice is None:
            return {"choice": torch.tensor(-1)}
        spec = torch.tensor(list(self.choice.encode()), dtype=torch.uint8)
        return {"choice": torch.tensor(list(self._planners).index(self.choice)), "choice_spec": spec}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take the choice of a checkpoint; where it has none, the trial goes on.

        Raises:
            IncompatibleError: the choice is no candidate here.
        """
        index, specs = int(state.get("choice", -1)), list(self._planners)
        if index < 0:
            return
        if "choice_spec" in state:
            saved = bytes(state["choice_spec"].tolist()).decode()
            same = [spec for spec in specs if read_method(spec) == read_method(saved)]
            wrong = f"{saved!r}, which is none of the candidates {', '.join(specs)}"
        else:
            # From before the spec was kept.
            same = specs[index : index + 1]
            wrong = f"candidate {index}, counted from 0, and there are {len(specs)}"
        if not same:
            raise IncompatibleError(
                f"the checkpoint's choice is {wrong}: add it to the list, and call choose_again() for another trial"
            )
        self.fix(same[0], "taken from a checkpoint")

    def _shorten(self, network: Channel) -> None:
        """Leave out what the link makes hopeless, and plan turns for the others."""
        rows = network.gather([median(self._samples[self._smallest])])
        step_s = sum(row[0] for row in rows) / len(rows)
        # No more than a step of the largest candidate's, so that a small model's trial stays small.
        self._probed = network.probe(max(self._bytes.values()))
        for spec in self._planners:
            size, wire_s = self._over_the_link(spec, self._probed)
            if spec != self._smallest and wire_s > HOPELESS * step_s:
                self._left_out[spec] = (
                    f"not tried: {size / 1e6:.2f} MB of a host at {size / wire_s / 1e6:.1f} MB/s take {wire_s:.3g} s,"
                    f" a whole step of {self._smallest} {step_s:.3g} s"
                )
        chosen = [spec for spec in self._planners if spec not in self._left_out]
        self._tried = True
        if len(chosen) == 1:
            self._means = {chosen[0]: step_s}
            self.fix(chosen[0], "the link makes every other candidate slower")
            return
        self._samples = {}
        self._schedule = [Trial(spec, False) for spec in chosen]
        for _ in range(self.method.turns):
            for before, spec in zip([chosen[-1], *chosen], chosen):
                if before in self._keepers and spec not in self._keepers:
                    # It sends what is left, too.
                    self._schedule.append(Trial(spec, False))
                self._schedule += [Trial(spec, True)] * self.method.steps

    def _over_the_link(self, spec: str, probed: Probed) -> tuple[float, float]:
        """Return the bytes of a step that leave a host, and the least seconds that takes: 0 where no link limits."""
        rate, here, ranks = probed.host_bytes_per_s, probed.ranks_per_host, range(probed.world_size)
        link, meter = LinkModel(ranks_per_host=here), self._counted[spec]
        others = meter.sent_bytes - meter.ring_bytes
        leaving = here * (link.leaving(meter.ring_bytes, True, ranks) + link.leaving(others, False, ranks))
        return leaving, leaving / rate if rate else 0.0

    def _decide(self, network: Channel) -> None:
        specs = [spec for spec in self._planners if spec in self._samples]
        rows = network.gather([median(self._samples[spec]) for spec in specs])
        self._means = {spec: sum(row[i] for row in rows) / len(rows) for i, spec in enumerate(specs)}
        best_s = min(self._means.values())
        choice = next(spec for spec in specs if self._means[spec] <= best_s * (1 + TIE))
        self.fix(choice, f"the fastest of {len(specs)} in {self.method.turns} turns of {self.method.steps} steps")

    def returned(self) -> None:
        """Nothing takes the place of the choice."""
        return

    def record(self) -> dict[str, Any]:
        """Return the choice, its reason, and what each candidate took or why it was not tried.

        ``link_bytes_per_s`` is what left a host while all ranks sent; None before it is measured, and without a link.
        """
        return {
            "chosen": self.choice,
            "reason": self._reason if self.choice else "the trial still runs",
            "step_s": dict(self._means),
            "left_out": dict(self._left_out),
            "sent_bytes_per_step": dict(self._bytes),
            "link_bytes_per_s": self._probed and self._probed.host_bytes_per_s,
            "ranks_per_host": self._probed and self._probed.ranks_per_host,
        }
