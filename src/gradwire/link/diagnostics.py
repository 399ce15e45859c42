"""How well the exchange serves the training, measured now and then."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gradwire.errors import HyperparameterError
from gradwire.exchange.method import Method
from gradwire.exchange.protocols import Memory
from gradwire.exchange.segments import Segment
from gradwire.link.failures import WarnOnce
from gradwire.methods.feedback.error_feedback import ErrorFeedback

INTERVAL = 100


"""Rounds from one measurement to the next."""


EARLY = (10, 30)


"""Rounds that are measured beside those: a training of a few hundred rounds is to be warned while it can be mended."""


@dataclass(frozen=True)
class Comparison:
    """What a rank sent in a measured round, over all parameters, against its gradient.

    Attributes:
        relative_error: |sent - gradient| / |gradient|.
        cosine: Of the two.
        kept: Share of the gradient that is sent, <sent, gradient> / |gradient|^2: about 1 for what is right on average.
        density: Share of the elements sent that are not zero.
        age: |what waits to be sent| / |gradient|; None where the method keeps nothing of the kind. Where gradients
            change little from round to round, what is sent is so many rounds old.
    """

    relative_error: float
    cosine: float
    kept: float
    density: float
    age: float | None = None


def parameter_rows(diagnostics: Diagnostics, memory: Memory, waiting: str) -> dict[str, dict[str, float]]:
    """Return what is known of each parameter: the latest measurement, what waits of it now, and its dial.

    Args:
        waiting: The kind of vector in which it does.
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


class Diagnostics:
    """Relative error and cosine of what this rank sent against its gradient, by parameter and over all of them.

    Comparison in the rounds of :data:`EARLY` and in every ``interval``-th one, since it reads each gradient four times
    more. Where a method applies momentum before compression, the momentum takes the place of the gradient.

    Args:
        scaled: Whether gradients are those of a scaled loss, so that an overflow says nothing of the method.

    Attributes:
        interval: Rounds from one measurement to the next; 0 for none at all.
    """

    def __init__(self, *, scaled: bool = False) -> None:
        self.interval, self._scaled = INTERVAL, scaled
        self._discounted = -1
        self._lock = threading.Lock()
        self._rows: dict[str, dict[str, float]] = {}
        self._elements: dict[str, int] = {}

    def wanted(self, round: int) -> bool:
        """Return whether that round is to be measured."""
        return self.interval > 0 and (round % self.interval == 0 or round in EARLY)

    def measure(
        self, gradient: torch.Tensor, sent: torch.Tensor, segments: Sequence[Segment], round: int, scale: float = 1.0
    ) -> None:
        """Compare two flat vectors, segment by segment.

        Args:
            gradient: What this rank's contribution should have been.
            sent: What it was.
            scale: The loss scale in both, which norms leave out, as residuals do.
        """
        rows = {}
        for s in segments:
            g, e = gradient[s.offset : s.offset + s.numel], sent[s.offset : s.offset + s.numel]
            norm, other, product = float(g.norm()), float(e.norm()), float(g @ e)
            both = norm * other
            rows[s.parameter.name] = {
                "round": round,
                "relative_error": float((e - g).norm()) / norm if norm else other / scale,
                "cosine": min(1.0, max(-1.0, product / both)) if both else float(norm == other),
                "density": int(e.count_nonzero()) / max(1, s.numel),
                "gradient_norm": norm / scale,
                "sent_norm": other / scale,
            }
        with self._lock:
            self._rows.update(rows)
            self._elements.update({s.parameter.name: s.numel for s in segments})

    def over_all(self, round: int, waiting: float | None) -> Comparison | None:
        """Return what was measured in a round over all parameters.

        None where it was not measured, or tells nothing: no gradient, or one that is not finite.

        Args:
            waiting: Norm of what waits to be sent after that round; None where nothing is kept.
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

    def discount(self, round: int) -> None:
        """Note that a round overflowed: its errors tell nothing of the method."""
        self._discounted = round

    def squares(self, round: int) -> tuple[float, float]:
        """Return |sent - gradient|^2 and |gradient|^2 over all parameters that were measured in a round.

        Both are 0 if none was. The first is infinite where what was sent is not finite; the second is NaN where the
        round overflowed.
        """
        with self._lock:
            rows = [row for row in self._rows.values() if row["round"] == round]
        gradients = [row["gradient_norm"] ** 2 for row in rows]
        # Beside a zero gradient the relative error is the absolute one.
        off = sum(row["relative_error"] ** 2 * (square or 1.0) for row, square in zip(rows, gradients))
        off = math.inf if math.isnan(off) else off
        overflow = self._discounted == round or (self._scaled and not math.isfinite(off))
        return off, math.nan if overflow else sum(gradients)

    def forget(self) -> None:
        """Drop all measurements: rounds with these numbers come again."""
        with self._lock:
            self._rows, self._discounted = {}, -1

    def rows(self) -> dict[str, dict[str, float]]:
        """Return the latest measurement of each parameter."""
        with self._lock:
            return {name: dict(row) for name, row in self._rows.items()}


OLD, LATE_COSINE = 1.5, 0.48
"""Age of what is sent, in rounds, without a warning whatever the cosine; and the cosine above which any age is fine."""

ELEMENTS, KEPT = 0.25, 0.75
"""Share of the elements, and share of the gradient, from which on nothing is said of what is left out for good."""

ALIKE = 0.9
"""Squared cosine over the share of the gradient, above which elements count as sent as they are."""

ERROR = 4.0
"""Relative error that may be noise without a warning."""

MOMENTUM = 0.9
"""What an optimizer usually has."""


class Judge:
    """Looks at every measured round of a link, and warns once.

    Args:
        serving: Returns the method that serves at present.
        diagnostics: Of the link.
        warnings: Of the link.
    """

    def __init__(self, serving: Callable[[], Method], diagnostics: Diagnostics, warnings: WarnOnce) -> None:
        self._serving, self._diagnostics, self._warnings = serving, diagnostics, warnings

    def look(self, memory: Memory, round: int) -> None:
        """Warn of a round that has ended, if it was measured and what was measured costs accuracy."""
        if not self._diagnostics.wanted(round):
            return
        method = self._serving()
        found = self._diagnostics.over_all(round, memory.norm(method.traits.waiting))
        told = None if found is None else judge(method, found, round)
        if told is not None:
            self._warnings.once("judgement", told)


def judge(method: Method, measured: Comparison, round: int) -> str | None:
    """Return a warning of three lines where what was measured costs accuracy; None where it does not."""
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
        # A rank that sends one shard for its node says nothing of the rest of its gradient, and a direction has neither
        # the length nor the angle of one.
        return None
    if measured.age is not None:
        if measured.age <= OLD or measured.cosine >= LATE_COSINE:
            return None
        return (
            f"what it sends says little of the gradient ({cosine}), and what waits to be sent is "
            f"{measured.age:.1f} gradients long, about so many rounds late"
        )
    if measured.density < ELEMENTS and measured.kept < KEPT and measured.cosine**2 > ALIKE * measured.kept:
        return (
            f"it sends {100 * measured.density:.2g} % of the elements and keeps nothing of the others, so that "
            f"{100 * (1 - measured.kept):.0f} % of the gradient is lost ({cosine})"
        )
    if measured.relative_error > ERROR:
        return f"what it sends errs by {measured.relative_error:.1f} times the gradient ({cosine}), which is noise"
    return None


def _changes(method: Method, keeps: bool) -> list[str]:
    """Return specs with a field that lets more through, and what else may help."""
    found = [repr(changed) for changed in (_with(method, field, change) for field, change in MORE.items()) if changed]
    around = None if keeps or method.traits.unbiased else _built(partial(ErrorFeedback, compressor=method))
    if around is not None:
        found.append(repr(around))
    if keeps and getattr(method, "momentum", None) == 0.0:
        found.append(f"momentum={MOMENTUM} of the method in place of the optimizer's")
    return found


def _with(method: Method, name: str, change: Callable[[Any], Any]) -> Method | None:
    """Return a method with a field of it, or of one inside it, changed; None where there is no more to be had."""
    for field in dataclasses.fields(method):
        value = getattr(method, field.name)
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
    """Return what is built, or None where there is no such method."""
    try:
        return build()
    except HyperparameterError:
        return None


def _density(value: float) -> float:
    return min(1.0, float(f"{max(10 * value, 0.05):.2g}"))


MORE: dict[str, Callable[[Any], Any]] = {
    "density": _density,
    "fixed_bytes": lambda value: None if value is None else 10 * max(value, 1500.0),
    "cycle": lambda value: max(1, value // 8),
    "matrix_rank": lambda value: 4 * value,
    "block_size": lambda value: 64 if value is None or value > 64 else None,
}
"""How to change a field so that more is sent; None or the same value: not at all."""
