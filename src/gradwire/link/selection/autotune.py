"""The choice of the method for a round: a fixed one, or the fastest of several in a trial."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.drivers import Meter
from gradwire.exchange.planning import Planner
from gradwire.methods.accuracy import accuracy_text, note_of
from gradwire.methods.auto import Auto
from gradwire.methods.spec import method as read_method
from gradwire.model.machine import LinkModel
from gradwire.model.probing import Probed

STATE = ("choice", "choice_spec", "fallback", "fallback_told")
"""Keys of a selection in a link's state whose values are the same on all ranks."""

OWN_STATE = ("fallback_measured",)
"""Keys of a selection in a link's state whose values are those of this rank."""

RESIDUAL = "residual"
"""Kind of the vectors that candidates pass on to each other: the parts not sent so far, by parameter."""

TIE = 0.03
"""Relative difference of step times below which the candidate listed first is taken: noise is as large."""

CLOSE = 1.3
"""Candidates that take up to this many times the least step time are tried again.

Noise is not all: in the first turns, connections still widen their windows, which costs those with many bytes a tenth.
"""

FINAL_S, MOST_FINAL = 5.0, 8
"""Seconds for the second part of a trial, whose turns have at least the steps of the first part's, and at most this
many times as many: where methods alternate after a few steps, each step finds the caches and windows of another."""

HOPELESS = 1.5
"""A candidate is not tried if its bytes alone take this many times the step of the one with the fewest bytes."""


def say_dropped(state: Mapping[str, torch.Tensor], warn: Callable[[str, str], None]) -> None:
    """Warn that a checkpoint used a fallback and this link does not; call it if no fallback is set."""
    if "fallback" in state:
        warn(
            "fallback",
            f"the checkpoint had left its method in round {int(state['fallback'][0])} for the errors that it made; "
            "without fallback= it is used again",
        )


class Channel(Protocol):
    """Communication of a selection with the group; every call is collective.

    Attributes:
        ranks: Global numbers of the ranks, in the order of their values; for messages.
    """

    ranks: Sequence[int]

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Return every rank's values, by rank."""

    def gathering(self, values: Sequence[float], about: str) -> Callable[[], list[list[float]]]:
        """Start to gather without waiting; return a function that waits and returns every rank's values."""

    def probe(self, most_bytes: int) -> Probed:
        """Measure the bandwidth of a host while all ranks send rows of ``most_bytes`` in all; the same on all ranks."""


@dataclass(frozen=True)
class Change:
    """A change to a method with other state.

    Attributes:
        reason: Reason for a warning; None if the user asked for the change.
        keeps: Kinds of vectors that the new method keeps; all other state is dropped.
    """

    reason: str | None = None
    keeps: tuple[str, ...] = ()


class Selection(Protocol):
    """Chooses the planner of a round."""

    def begin(self, round: int, network: Channel, skipped: bool = False) -> Change | None:
        """Begin a round, whose first bucket is ready on this rank; ``skipped`` refers to the round before.

        Returns:
            The change of the method; None if there is none, or its state does not change.
        """

    @property
    def planner(self) -> Planner:
        """The planner of the current round."""

    @property
    def delivers(self) -> bool:
        """True if the current round also sends the residuals of another method."""

    def record(self) -> dict[str, Any] | None:
        """Return the choice and its reason as plain values."""

    def returned(self) -> dict[str, Any] | None:
        """Return the fallback in use, its first round and the reason as plain values, or None."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return the choice for a checkpoint, with keys of :data:`STATE` and :data:`OWN_STATE`."""

    def check(self, state: Mapping[str, torch.Tensor]) -> object:
        """Raise IncompatibleError if :meth:`load` would refuse a state."""

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load a state of :meth:`state`."""

    def again(self) -> None:
        """Choose again from the next round on; call it on all ranks.

        Raises:
            IncompatibleError: there is only one method.
        """


class FixedSelection:
    """A fixed planner."""

    delivers = False

    def __init__(self, planner: Planner) -> None:
        self.planner = planner

    def begin(self, round: int, network: Channel, skipped: bool = False) -> None:
        """Do nothing."""
        return

    def record(self) -> None:
        """Return None: there was no choice."""
        return

    def returned(self) -> None:
        """Return None: there is no fallback."""
        return

    def state(self) -> dict[str, torch.Tensor]:
        """Return an empty state."""
        return {}

    def check(self, state: Mapping[str, torch.Tensor]) -> None:
        """Refuse nothing."""

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Ignore the state."""

    def again(self) -> None:
        """Raise, since there is only one method."""
        raise IncompatibleError(f"this link has one method, {self.planner.method!r}: attach with 'auto' to choose")


@dataclass(frozen=True)
class Trial:
    """One round of the trial."""

    spec: str
    timed: bool


def _counted(planner: Planner) -> Meter:
    """Count the bytes of a step; casts exchange parameters of each dtype in buckets of their own."""
    whole, parts = Meter(), defaultdict[torch.dtype | None, list[str]](list)
    for name, parameter in planner.parameters.items():
        parts[None if planner.method.cast_dtype is None else parameter.dtype].append(name)
    for names in parts.values():
        whole.include(planner.counted(names))
    return whole


class Autotuner:
    """Tries candidates in turn in the first rounds after the warm-up, and keeps the fastest.

    The time of a round runs from its first bucket to that of the next, so that it includes the whole exchange and all
    waits of the user. The candidate with the fewest bytes is tried first. The time of its step and a measurement of the
    network show which candidates are too slow because of their bytes; these are left out. The others are tried in
    turns. Those within :data:`CLOSE` of the fastest are then tried in longer turns, whose times alone decide between
    them: more steps cost little, since none of them is much slower. If several are within :data:`TIE` of the least
    time, the one listed first is kept. All decisions are functions of numbers that every rank has gathered.

    Args:
        method: The candidates and the length of the trial.
        planners: Planners by spec, in the order of the candidates.
        clock: Returns seconds.
        left_out: Candidates without a planner, which are not tried, and the reason for each.
    """

    def __init__(
        self,
        method: Auto,
        planners: Mapping[str, Planner],
        clock: Callable[[], float] = time.perf_counter,
        left_out: Mapping[str, str] | None = None,
    ) -> None:
        self.method, self._planners, self._clock = method, dict(planners), clock
        self._never = dict(left_out or {})
        self._rememberers = {spec for spec in self._planners if read_method(spec).traits.remembers}
        self._keepers = {spec for spec in self._planners if RESIDUAL in read_method(spec).traits.remembers}
        self._counted = {spec: _counted(planner) for spec, planner in self._planners.items()}
        self._bytes = {spec: meter.sent_bytes for spec, meter in self._counted.items()}
        self.again()

    def again(self) -> None:
        """Begin a new trial with the next round; call it on all ranks."""
        self.choice: str | None = None
        self._owing = True
        self._last: str | None = None
        self._smallest = min(self._bytes, key=lambda spec: self._bytes[spec])
        # DDP changes its buckets after the first round, and buffers grow in the second: neither is timed.
        self._schedule = [Trial(self._smallest, timed) for timed in (False, False, True, True)]
        self._left_out = dict(self._never)
        self._tried, self._final_steps, self._begun_s = False, 0, 0.0
        self._samples: dict[str, list[float]] = {}
        self._running: Trial | None = None
        self._means: dict[str, float] = {}
        self._probed: Probed | None = None

    @property
    def planner(self) -> Planner:
        """The planner of the current round's method."""
        return self._planners[self._current()]

    @property
    def delivers(self) -> bool:
        """True if this round's method keeps no residuals, and another may have left some."""
        return self._owing and bool(self._keepers) and self._current() not in self._keepers

    def _current(self) -> str:
        return self.choice or (self._running.spec if self._running else self._smallest)

    def begin(self, round: int, network: Channel, skipped: bool = False) -> Change | None:
        """Record the time of the round before, and choose the method of this one."""
        before = self._last
        if before is not None and not skipped:
            # Methods with residuals leave them, and the others send them.
            self._owing = before in self._keepers
        # In rounds of warm-up all candidates send float32, so that their times would not differ.
        if self.choice is None and not self.planner.is_warm_up(round):
            self._try_on(network)
        self._last = self._current()
        return Change(keeps=(RESIDUAL,)) if before in self._rememberers and before != self._last else None

    def _try_on(self, network: Channel) -> None:
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
            KeyError: it is not one of the candidates.
        """
        self._planners[spec]
        self.choice, self._reason = spec, reason
        self._schedule, self._running = [], None

    def state(self) -> dict[str, torch.Tensor]:
        """Return the choice as tensors: its index in the list, -1 before there is one, and its spec as text."""
        if self.choice is None:
            return {"choice": torch.tensor(-1, device="cpu")}
        spec = torch.tensor(list(self.choice.encode()), dtype=torch.uint8, device="cpu")
        return {"choice": torch.tensor(list(self._planners).index(self.choice), device="cpu"), "choice_spec": spec}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the choice of a checkpoint; if it has none, the trial goes on.

        A loaded memory may hold residuals that the method of the next round does not keep, so that it sends them. The
        round that was interrupted is tried again, after one that is not timed.

        Raises:
            IncompatibleError: the choice is not a candidate here.
        """
        chosen = self.check(state)
        self._owing, self._last = True, None
        if self._running is not None:
            self._schedule[:0] = [Trial(self._running.spec, False), self._running]
            self._running = None
        if chosen is not None:
            self.fix(chosen, "taken from a checkpoint")

    def check(self, state: Mapping[str, torch.Tensor]) -> str | None:
        """Return the choice of a checkpoint; raise IncompatibleError if it is not a candidate here."""
        index, specs = int(state.get("choice", -1)), list(self._planners)
        if index < 0:
            return None
        if "choice_spec" in state:
            saved = bytes(state["choice_spec"].tolist()).decode()
            same = [spec for spec in specs if read_method(spec) == read_method(saved)]
            wrong = f"{saved!r}, which is none of the candidates {', '.join(specs)}"
        else:
            # An older checkpoint has no spec.
            same = specs[index : index + 1]
            wrong = f"candidate {index}, counted from 0, and there are {len(specs)}"
        if not same:
            raise IncompatibleError(
                f"the checkpoint's choice is {wrong}: add it to the list, and call choose_again() for another trial"
            )
        return same[0]

    def _shorten(self, network: Channel) -> None:
        """Leave out candidates that are too slow for the network, and schedule the others."""
        rows = network.gather([median(self._samples[self._smallest])])
        step_s = sum(row[0] for row in rows) / len(rows)
        # At most the bytes of a step of the largest candidate, so that a small model's trial stays short.
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
        self._schedule = [Trial(spec, False) for spec in chosen]
        self._take_turns(chosen, self.method.steps)

    def _take_turns(self, specs: Sequence[str], steps: int, final: bool = False) -> None:
        """Schedule turns of candidates, and forget the times so far; the first steps of final turns are not timed."""
        self._samples = {}
        for _ in range(self.method.turns):
            for before, spec in zip([specs[-1], *specs], specs):
                if final or (before in self._keepers and spec not in self._keepers):
                    # A round after a keeper's also sends the residuals that were left.
                    self._schedule.append(Trial(spec, False))
                self._schedule += [Trial(spec, True)] * steps

    def _over_the_link(self, spec: str, probed: Probed) -> tuple[float, float]:
        """Return the bytes of a step that leave a host, and the least seconds for them: 0 if no network limits."""
        rate, here, ranks = probed.host_bytes_per_s, probed.ranks_per_host, range(probed.world_size)
        link, meter = LinkModel(ranks_per_host=here), self._counted[spec]
        others = meter.sent_bytes - meter.ring_bytes
        leaving = here * (link.leaving(meter.ring_bytes, True, ranks) + link.leaving(others, False, ranks))
        return leaving, leaving / rate if rate else 0.0

    def _decide(self, network: Channel) -> None:
        specs = [spec for spec in self._planners if spec in self._samples]
        rows = network.gather([median(self._samples[spec]) for spec in specs])
        means = {spec: sum(row[i] for row in rows) / len(rows) for i, spec in enumerate(specs)}
        self._means |= means
        best_s, turns, steps = min(means.values()), self.method.turns, self.method.steps
        close = [spec for spec in specs if means[spec] <= best_s * CLOSE]
        if len(close) > 1 and not self._final_steps:
            step_of_each_s = turns * sum(means[spec] for spec in close)
            self._final_steps = min(max(steps, int(FINAL_S / max(step_of_each_s, 1e-9))), MOST_FINAL * steps)
            self._take_turns(close, self._final_steps, final=True)
            return
        choice = next(spec for spec in specs if means[spec] <= best_s * (1 + TIE))
        reason = f"the fastest of {len(self._means)} in {turns} turns of {steps} steps"
        if self._final_steps:
            reason += f", and of the {len(specs)} closest in {turns} turns of {self._final_steps}"
        self.fix(choice, reason)

    def returned(self) -> None:
        """Return None: there is no fallback."""
        return

    def record(self) -> dict[str, Any]:
        """Return the choice, its reason, and for each candidate its time or why it was not tried.

        ``note`` is what there is to say of the choice beside its speed: whether it keeps a residual, how trainings by
        it ended in the committed tables, and which momentum and learning rate to use. ``accuracy`` has the tables'
        figures for every candidate, None where they have none. ``link_bytes_per_s`` is the bandwidth of a host while
        all ranks send; None before the measurement, and on one host.
        """
        return {
            "chosen": self.choice,
            "reason": self._reason if self.choice else "the trial still runs",
            "note": note_of(self.choice) if self.choice else None,
            "accuracy": {spec: accuracy_text(spec) for spec in self.method.traits.tries},
            "step_s": dict(self._means),
            "left_out": dict(self._left_out),
            "sent_bytes_per_step": dict(self._bytes),
            "link_bytes_per_s": self._probed and self._probed.host_bytes_per_s,
            "ranks_per_host": self._probed and self._probed.ranks_per_host,
        }
