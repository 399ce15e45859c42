"""The change to a plain method once the error of an exchange exceeds a limit, and the construction of selections."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from gradwire.errors import ExchangeError, IncompatibleError
from gradwire.exchange.method import Method
from gradwire.exchange.planning import Options, Planner
from gradwire.exchange.protocols import REDUCE_SCATTER
from gradwire.kernels import checksum
from gradwire.link.failures import WarnOnce
from gradwire.link.selection.autotune import Autotuner, Change, Channel, FixedSelection, Selection
from gradwire.link.selection.link_cost import CoderSelection
from gradwire.methods.auto import Auto
from gradwire.methods.spec import method as read_method
from gradwire.seeds import LinkNumber


def check_fallback(method: Method) -> None:
    """Raise if a mean cannot replace the outcome of a method.

    Raises:
        IncompatibleError: it cannot; the message has the reason.
    """
    reason = (
        "gives a direction, which needs a learning rate of its own"
        if method.traits.direction
        else "brings a momentum, without which steps would be smaller"
        if method.traits.owns_momentum
        else "exchanges no gradients that another method could take"
        if method.traits.local_steps
        else None
    )
    if reason is not None:
        raise IncompatibleError(f"fallback= has no place here: {method!r} {reason}; leave it out")


class MeasuredErrors(Protocol):
    """Errors of the vectors that this rank sends, measured in some rounds."""

    def wanted(self, round: int) -> bool:
        """Return whether a round is measured."""

    def squares(self, round: int) -> tuple[float, float]:
        """Return |sent - gradient|^2 and |gradient|^2 of a measured round; the latter is NaN after an overflow."""


class Fallback:
    """Uses another selection until an error exceeds the limit, and a plain method from then on.

    With |e_i| the error |sent - gradient| of rank i over all parameters in a measured round, all ranks change if

        max_i |e_i| / sqrt(mean_i |g_i|^2) > limit

    The denominator is a mean over ranks, since a single rank may have a zero gradient and a residual to send. A round
    in which a gradient overflowed is ignored. Ranks start to gather the errors in the round after the measurement, and
    judge them in the next one, when all have sent theirs: no rank waits during backward, and all ranks change together.
    A checkpoint holds measured errors that were not sent yet, and gathered ones that were not judged yet.

    Args:
        chosen: The selection in use until then.
        fallback: The planner in use afterwards.
        limit: The limit above.
        errors: Gives |e_i|^2 and |g_i|^2 of measured rounds.
    """

    def __init__(self, chosen: Selection, fallback: Planner, limit: float, errors: MeasuredErrors) -> None:
        self._chosen, self._fallback, self._limit, self._errors = chosen, fallback, limit, errors
        self._told: Callable[[], list[list[float]]] | None = None
        self._round, self._measured = -1, (-1, 0.0, 0.0)
        self._since: int | None = None
        self._error, self._rank = 0.0, 0

    @property
    def planner(self) -> Planner:
        """The planner of the fallback if it is in use, else that of the other selection."""
        return self._chosen.planner if self._since is None else self._fallback

    @property
    def delivers(self) -> bool:
        """The value of the other selection while that is in use."""
        return self._since is None and self._chosen.delivers

    def begin(self, round: int, network: Channel, skipped: bool = False) -> Change | None:
        """Start to gather the errors measured in the round before, or judge those gathered in it."""
        self._round = round
        if self._since is not None:
            return None
        told, self._told = self._told, None
        if told is not None:
            changed = self._judge(told(), round, network.ranks)
            if changed is not None:
                return Change(changed)
        if round and self._errors.wanted(round - 1):
            self._told = network.gathering(self._found(round - 1), "the check of fallback_limit")
        return self._chosen.begin(round, network, skipped)

    def _found(self, round: int) -> tuple[float, float]:
        """Return the errors measured in a round, before or after the last checkpoint."""
        loaded, off, gradient = self._measured
        return (off, gradient) if loaded == round else self._errors.squares(round)

    def _judge(self, rows: list[list[float]], round: int, ranks: Sequence[int]) -> str | None:
        square = sum(gradient for _, gradient in rows) / len(rows)
        if not 0 < square < math.inf:
            return None
        errors = [math.sqrt(off / square) for off, _ in rows]
        worst = max(errors)
        if worst <= self._limit:
            return None
        at = errors.index(worst)
        # A checkpoint of more ranks may hold the error of one that is not there any more.
        self._since, self._error, self._rank = round, worst, ranks[at] if at < len(ranks) else at
        return (
            f"what rank {self._rank} sent in round {round - 2} has a relative error of {worst:.4g}, above "
            f"fallback_limit={self._limit:g}: gradients travel by {self._fallback.method!r} from now on, and what the "
            "method remembered is dropped"
        )

    def again(self) -> None:
        """Use the other selection again."""
        self._chosen.again()
        self._forget()

    def record(self) -> dict[str, Any] | None:
        """Return the record of the other selection, or that the fallback came before its choice."""
        found = self._chosen.record()
        if found and found["chosen"] is None and self._since is not None:
            found["reason"] = "the trial ended with the return to the fallback"
        return found

    def returned(self) -> dict[str, Any] | None:
        """Return the first round of the fallback and the rank whose error caused it; None before."""
        if self._since is None:
            return None
        return {
            "method": repr(self._fallback.method),
            "since_round": self._since,
            "relative_error": self._error,
            "rank": self._rank,
        }

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state of the other selection, with the fallback in use, or measured and gathered errors.

        Call it between rounds: then all ranks have sent their errors, and the wait for them is short.
        """
        found = self._chosen.state()
        if self._since is not None:
            found["fallback"] = _doubles([self._since, self._error, self._rank])
            return found
        if self._round >= 0 and self._errors.wanted(self._round):
            found["fallback_measured"] = _doubles([self._round, *self._found(self._round)])
        if self._told is not None:
            # If a rank is gone, the next round raises the error.
            with contextlib.suppress(ExchangeError):
                found["fallback_told"] = _doubles(self._told())
        return found

    def check(self, state: Mapping[str, torch.Tensor]) -> None:
        """Raise IncompatibleError if the selection beside it would refuse a state."""
        self._chosen.check(state)

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load a state of :meth:`state`."""
        self._chosen.load(state)
        self._forget()
        if "fallback" in state:
            since, self._error, rank = state["fallback"].tolist()
            self._since, self._rank = int(since), int(rank)
        if "fallback_measured" in state:
            round, off, gradient = state["fallback_measured"].tolist()
            self._round, self._measured = int(round), (int(round), off, gradient)
        if "fallback_told" in state:
            rows: list[list[float]] = state["fallback_told"].tolist()
            self._told = lambda: rows

    def _forget(self) -> None:
        self._since, self._told = None, None
        self._round, self._measured = -1, (-1, 0.0, 0.0)


def _doubles(values: Sequence[object]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def _plain(options: Options) -> Options:
    """Return the options of a fallback: any collective, unless it is a reduce-scatter."""
    return options if options.collective == REDUCE_SCATTER else replace(options, collective="auto")


def make_selection(
    method: Method,
    options: Options,
    parameters: Mapping[str, torch.Tensor],
    world_size: int,
    errors: MeasuredErrors,
    coders: CoderSelection,
    number: LinkNumber,
    warnings: WarnOnce,
    optimizer: Any = None,
) -> Selection:
    """Return the selection of a link.

    Args:
        method: Method of the link.
        options: Options of the link.
        parameters: The parameters that are exchanged, by name.
        world_size: Number of ranks.
        errors: Errors of the vectors sent, for a fallback.
        coders: Chooses the coders that methods leave open, before the first round.
        number: Number of the link.
        warnings: Warnings of the link.
        optimizer: The optimizer of the parameters; None if none was given.

    Raises:
        IncompatibleError: the method cannot do what the options ask.
    """

    compiled_s: list[float] = []

    def ready(one: Method, its: Options) -> Planner:
        made = coders.watch(Planner(one, parameters, world_size, its, number))
        made.check()
        compiled_s.append(made.compile())
        return made

    chosen: Selection
    if isinstance(method, Auto):
        # Trials are compared by values with a checksum, whatever the candidates send.
        compiled_s.append(checksum.warm_up())
        left_out, planners = method.unsuited(optimizer, parameters), dict[str, Planner]()
        for spec in (spec for spec in method.traits.tries if spec not in left_out):
            try:
                planners[spec] = ready(read_method(spec), options)
            except IncompatibleError as error:
                if spec not in method.dispensable:
                    raise
                left_out[spec] = f"not tried: {error}"
        chosen = Autotuner(method, planners, left_out=left_out)
    else:
        chosen = FixedSelection(ready(method, options))
    if options.fallback is not None and options.fallback_limit is not None:
        check_fallback(method)
        # The user's collective applies to the method, not to the fallback.
        plain = ready(read_method(options.fallback), _plain(options))
        chosen = Fallback(chosen, plain, options.fallback_limit, errors)
    warnings.compiled(sum(compiled_s))
    return chosen
