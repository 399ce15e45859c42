"""Measurements of the error of an exchange in some rounds, and warnings about it."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gradwire.errors import HyperparameterError
from gradwire.exchange.method import Method
from gradwire.exchange.norms import dot, norm
from gradwire.exchange.protocols import Memory
from gradwire.exchange.segments import Segment
from gradwire.link.failures import WarnOnce
from gradwire.methods.feedback.error_feedback import ErrorFeedback
from gradwire.methods.feedback.waiting import longest, momentum_beside_residual

INTERVAL = 100


"""Rounds from one measurement to the next."""


EARLY = (10, 30)


"""Further rounds that are measured, so that a training of a few hundred rounds is warned early."""


@dataclass(frozen=True)
class Comparison:
    """Comparison of the vector that a rank sent in a measured round with its gradient, over all parameters.

    Attributes:
        relative_error: |sent - gradient| / |gradient|.
        cosine: Cosine of the angle between sent and gradient.
        kept: Share of the gradient that is sent, <sent, gradient> / |gradient|^2: about 1 for an unbiased method.
        density: Share of the elements sent that are not zero.
        age: |residual| / |gradient|; None if the method keeps no residual. If gradients change little from round to
            round, the vector sent is so many rounds old.
    """

    relative_error: float
    cosine: float
    kept: float
    density: float
    age: float | None = None


def parameter_rows(diagnostics: Diagnostics, memory: Memory, waiting: str) -> dict[str, dict[str, float]]:
    """Return a row for each parameter: the latest measurement, the norm of its residual, and its dial.

    Args:
        waiting: Kind of the vector, in the method's state, that waits to be sent.
    """
    rows = diagnostics.rows()
    for name, row in rows.items():
        residual = memory.norm(waiting, name)
        if residual is not None:
            row["residual_norm"] = residual
        dial = memory.value(f"dial/{name}")
        if dial is not None:
            row["dial"] = float(dial)
    return rows


def wait_report(
    method: Method, optimizer: Any, compressed: Mapping[str, torch.Tensor], measured: float | None
) -> dict[str, Any]:
    """Return how long gradients wait in the residual, and what to do if that and the optimizer's momentum do not agree.

    Args:
        optimizer: The optimizer that was given; None if none was.
        compressed: The parameters that are not sent in float32, by name.
        measured: The wait by the latest measured round, see :meth:`Diagnostics.wait`.
    """
    expected = method.wait_of(longest(compressed))
    told = None if optimizer is None else method.caution(optimizer, compressed)
    if told is None and expected is not None and measured is not None:
        told = momentum_beside_residual(method, optimizer, wait=measured)
    return {"expected_rounds": expected, "measured_rounds": measured, "advice": told}


def squares_of(rows: Iterable[Mapping[str, float]]) -> tuple[float, float]:
    """Return |sent - gradient|^2 and |gradient|^2 over parameters, from a row of measurements of each.

    The first is infinite if the vector sent is not finite.
    """
    off = gradient = 0.0
    for row in rows:
        square = row["gradient_norm"] ** 2
        # If the gradient is zero, the relative error is the absolute one.
        off += row["relative_error"] ** 2 * (square or 1.0)
        gradient += square
    return (math.inf if math.isnan(off) else off), gradient


def _within_one(cosine: float) -> float:
    """Return a cosine without what rounding adds to it; one that is not known stays NaN."""
    return cosine if math.isnan(cosine) else min(1.0, max(-1.0, cosine))


class Diagnostics:
    """Relative error and cosine of the vector that this rank sent to its gradient, by parameter and over all of them.

    It measures the rounds of :data:`EARLY` and every ``interval``-th one, since a measurement reads each gradient four
    more times. If a method applies momentum before compression, the momentum takes the place of the gradient.

    Args:
        scaled: True if gradients are those of a scaled loss. An overflow is then not an error of the method.

    Attributes:
        interval: Number of rounds between two measurements; 0: none.
    """

    def __init__(self, *, scaled: bool = False) -> None:
        self.interval, self._scaled = INTERVAL, scaled
        self._discounted = -1
        self._lock = threading.Lock()
        self._rows: dict[str, dict[str, float]] = {}
        self._elements: dict[str, int] = {}
        self._compressed: set[str] = set()
        self._wait: float | None = None

    def wanted(self, round: int) -> bool:
        """Return whether a round is to be measured."""
        return self.interval > 0 and (round % self.interval == 0 or round in EARLY)

    def measure(
        self, gradient: torch.Tensor, sent: torch.Tensor, segments: Sequence[Segment], round: int, scale: float = 1.0
    ) -> None:
        """Compare two flat vectors, segment by segment.

        Args:
            gradient: The exact contribution of this rank.
            sent: The contribution that it sent.
            scale: The loss scale in both; norms are those of unscaled vectors, as residuals are.
        """
        rows = {}
        for s in segments:
            g, e = gradient[s.offset : s.offset + s.numel], sent[s.offset : s.offset + s.numel]
            size, other, product = norm(g), norm(e), dot(g, e)
            both = size * other
            rows[s.parameter.name] = {
                "round": round,
                "relative_error": norm(e - g) / size if size else other / scale,
                "cosine": _within_one(product / both) if both else float(size == other),
                "density": int(e.count_nonzero()) / max(1, s.numel),
                "gradient_norm": size / scale,
                "sent_norm": other / scale,
            }
        with self._lock:
            self._rows.update(rows)
            self._elements.update({s.parameter.name: s.numel for s in segments})
            self._compressed.update(s.parameter.name for s in segments if not s.dense)

    def over_all(self, round: int, waiting: float | None) -> Comparison | None:
        """Return the measurement of a round over all parameters.

        Return None if the round was not measured, or if the gradient is zero or not finite.

        Args:
            waiting: Norm of the residual after that round; None if the method keeps none.
        """
        with self._lock:
            rows = {name: row for name, row in self._rows.items() if row["round"] == round}
            numel = {name: self._elements[name] for name in rows}
        gradient = math.hypot(*(row["gradient_norm"] for row in rows.values()))
        sent = math.hypot(*(row["sent_norm"] for row in rows.values()))
        if not 0 < gradient < math.inf or not math.isfinite(sent):
            return None
        product = sum(row["cosine"] * row["gradient_norm"] * row["sent_norm"] for row in rows.values())
        return Comparison(
            relative_error=math.sqrt(self.squares(round)[0]) / gradient,
            cosine=product / (gradient * sent) if sent else 0.0,
            kept=product / gradient**2,
            density=sum(rows[name]["density"] * n for name, n in numel.items()) / sum(numel.values()),
            age=None if waiting is None else waiting / gradient,
        )

    def note_wait(self, round: int, waiting: float | None) -> None:
        """Keep the wait that a measured round implies, see ``gradwire/methods/feedback/waiting.py``.

        With e the residual after the round and s the vector sent, over compressed parameters, it is |e|^2 / |s|^2.

        Args:
            waiting: |e|; None if the method keeps no residual.
        """
        with self._lock:
            rows = [row for name, row in self._rows.items() if row["round"] == round and name in self._compressed]
            sent = sum(row["sent_norm"] ** 2 for row in rows)
            known = waiting is not None and 0 < sent < math.inf
            self._wait = waiting**2 / sent if waiting is not None and known else None

    def wait(self) -> float | None:
        """Return the wait in rounds by the latest measured round; None if none was measured or nothing waits."""
        with self._lock:
            return self._wait

    def discount(self, round: int) -> None:
        """Record that a round overflowed: its errors are not those of the method."""
        self._discounted = round

    def squares(self, round: int) -> tuple[float, float]:
        """Return |sent - gradient|^2 and |gradient|^2 over all parameters that were measured in a round.

        Both are 0 if none was. The first is infinite if the vector sent is not finite; the second is NaN if the round
        overflowed.
        """
        with self._lock:
            rows = [row for row in self._rows.values() if row["round"] == round]
        off, gradient = squares_of(rows)
        overflow = self._discounted == round or (self._scaled and not math.isfinite(off))
        return off, math.nan if overflow else gradient

    def forget(self) -> None:
        """Drop all measurements, since rounds with these numbers come again."""
        with self._lock:
            self._rows, self._discounted, self._wait = {}, -1, None

    def rows(self) -> dict[str, dict[str, float]]:
        """Return the latest measurement of each parameter."""
        with self._lock:
            return {name: dict(row) for name, row in self._rows.items()}


OLD, LATE_COSINE = 1.5, 0.48
"""Age of the vector sent, in rounds, up to which there is no warning; cosine above which there is none at any age."""

ELEMENTS, KEPT = 0.25, 0.75
"""Shares of the elements and of the gradient above which there is no warning about elements that are never sent."""

ALIKE = 0.9
"""Squared cosine over the share of the gradient, above which the elements sent count as exact."""

ERROR = 4.0
"""Relative error up to which there is no warning about noise."""

MOMENTUM = 0.9
"""The usual momentum of an optimizer."""


class Judge:
    """Checks every measured round of a link, and warns once.

    Args:
        serving: Returns the method in use.
        diagnostics: Diagnostics of the link.
        warnings: Warnings of the link.
    """

    def __init__(self, serving: Callable[[], Method], diagnostics: Diagnostics, warnings: WarnOnce) -> None:
        self._serving, self._diagnostics, self._warnings = serving, diagnostics, warnings

    def look(self, memory: Memory, round: int) -> None:
        """Warn if a round that has ended was measured, and its errors cost accuracy."""
        if not self._diagnostics.wanted(round):
            return
        method = self._serving()
        waiting = memory.norm(method.traits.waiting)
        self._diagnostics.note_wait(round, waiting)
        found = self._diagnostics.over_all(round, waiting)
        told = None if found is None else judge(method, found, round)
        if told is not None:
            self._warnings.once("judgement", told)


def judge(method: Method, measured: Comparison, round: int) -> str | None:
    """Return a warning of three lines if the measured errors cost accuracy, else None."""
    told = _problem(method, measured)
    if told is None:
        return None
    advice = [*_changes(method, measured.age is not None), "EDEN(bits=4), which leaves nothing out"]
    return (
        f"{method!r}, round {round}: {told}.\n"
        "A training of a few hundred rounds loses accuracy by this, a long one less.\n"
        f"Try {', or '.join(advice)}; link.diagnostics() has the numbers by parameter."
    )


def _problem(method: Method, measured: Comparison) -> str | None:
    cosine = f"cosine {measured.cosine:.2f}"
    if method.traits.sharded or (method.traits.direction and measured.age is None):
        # A rank that sends one shard for its node sends no other part of its gradient, and a direction has neither the
        # length nor the angle of a gradient.
        return None
    if measured.age is not None:
        if measured.age <= OLD or measured.cosine >= LATE_COSINE:
            return None
        return (
            f"what it sends says little of the gradient ({cosine}), and what waits to be sent is "
            f"{measured.age:.1f} gradients long, about so many rounds late"
        )
    few = measured.density < ELEMENTS and measured.kept < KEPT
    if few and measured.cosine**2 > ALIKE * measured.kept and not method.traits.sends_differences:
        return (
            f"it sends {100 * measured.density:.2g} % of the elements and keeps nothing of the others, so that "
            f"{100 * (1 - measured.kept):.0f} % of the gradient is lost ({cosine})"
        )
    if measured.relative_error > ERROR:
        return f"what it sends errs by {measured.relative_error:.1f} times the gradient ({cosine}), which is noise"
    return None


def _changes(method: Method, keeps: bool) -> list[str]:
    """Return specs with a field changed so that more is sent, and other advice."""
    found = [repr(changed) for changed in (_with(method, field, change) for field, change in MORE.items()) if changed]
    around = None if keeps or method.traits.unbiased else _built(partial(ErrorFeedback, compressor=method))
    if around is not None:
        found.append(repr(around))
    if keeps and getattr(method, "momentum", None) == 0.0:
        found.append(f"momentum={MOMENTUM} of the method in place of the optimizer's")
    return found


def _with(method: Method, name: str, change: Callable[[Any], Any]) -> Method | None:
    """Return a method with one of its fields, or of a method inside it, changed; None if no change sends more."""
    for field in dataclasses.fields(method):
        value = getattr(method, field.name)
        if not field.init:
            continue  # it follows from the others
        if field.name == name:
            more = change(value)
        elif isinstance(value, Method):
            more = _with(value, name, change)
        else:
            continue
        if more is not None and more != value:
            return _built(partial(dataclasses.replace, method, **{field.name: more}))
    return None


def _built(build: Callable[[], Method]) -> Method | None:
    """Return the method that ``build`` returns, or None if it raises."""
    try:
        return build()
    except HyperparameterError:
        return None


def _density(value: float) -> float | None:
    # A value and its index take 64 bits: half of the elements are as many bytes as all in float32.
    more = min(0.5, float(f"{max(10 * value, 0.05):.2g}"))
    return more if more > value else None


MORE: dict[str, Callable[[Any], Any]] = {
    "density": _density,
    "fixed_bytes": lambda value: None if value is None else 10 * max(value, 1500.0),
    "cycle": lambda value: max(1, value // 8),
    "matrix_rank": lambda value: 4 * value,
    "block_size": lambda value: 64 if value is None or value > 64 else None,
}
"""Functions that change the value of a field so that more is sent; None or the same value: no change."""
