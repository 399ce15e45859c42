"""How well the exchange serves the training, measured now and then."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradwire.exchange.protocols import Memory
from gradwire.exchange.segments import Segment

__all__ = ["EARLY", "INTERVAL", "Comparison", "Diagnostics", "parameter_rows"]

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
