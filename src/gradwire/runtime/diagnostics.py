"""How well the exchange serves each parameter, measured now and then."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch

from gradwire.segments import Segment

__all__ = ["Diagnostics"]


class Diagnostics:
    """Relative error and cosine of what this rank sent against its gradient, by parameter.

    Measured in every ``interval``-th round (0: never), since it reads each gradient twice more.

    Args:
        interval: Rounds from one measurement to the next.
        scaled: Whether gradients are those of a scaled loss, so that an overflow says nothing of the method.
    """

    def __init__(self, interval: int, *, scaled: bool = False) -> None:
        self.interval, self._scaled = interval, scaled
        self._discounted = -1
        self._lock = threading.Lock()
        self._rows: dict[str, dict[str, float]] = {}

    def wanted(self, round: int) -> bool:
        """Tell whether that round is to be measured."""
        return self.interval > 0 and round % self.interval == 0

    def measure(self, gradient: torch.Tensor, sent: torch.Tensor, segments: Sequence[Segment], round: int) -> None:
        """Compare two flat vectors, segment by segment."""
        rows = {}
        for s in segments:
            g, e = gradient[s.offset : s.offset + s.numel], sent[s.offset : s.offset + s.numel]
            norm, other, product = float(g.norm()), float(e.norm()), float(g @ e)
            both = norm * other
            rows[s.parameter.name] = {
                "round": round,
                "relative_error": float((e - g).norm()) / norm if norm else other,
                "cosine": min(1.0, max(-1.0, product / both)) if both else float(norm == other),
                "gradient_norm": norm,
            }
        with self._lock:
            self._rows.update(rows)

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
