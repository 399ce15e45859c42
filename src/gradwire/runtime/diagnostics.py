"""How well the exchange serves each parameter, measured now and then."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

import torch

from gradwire.segments import Segment

__all__ = ["RESIDUAL_LIMIT", "Diagnostics"]

RESIDUAL_LIMIT = 3.0
"""How many times as long as its gradient a residual may be without a warning.

A residual of L gradients means that what is sent is L rounds old on average, where gradients change little from round
to round.
"""


class Diagnostics:
    """Relative error and cosine of what this rank sent against its gradient, by parameter.

    Measured in every ``interval``-th round (0: never), since it reads each gradient twice more. Where a method applies
    momentum before compression, the momentum takes the place of the gradient.

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
        """Return whether that round is to be measured."""
        return self.interval > 0 and round % self.interval == 0

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
                "gradient_norm": norm / scale,
            }
        with self._lock:
            self._rows.update(rows)

    def check_residuals(
        self, round: int, norm_of: Callable[[str], float | None], warn: Callable[[str, str], None]
    ) -> None:
        """Warn of the longest residual of a measured round, if it is too long beside its gradient.

        Args:
            norm_of: Returns the norm of a parameter's residual after that round; None where none is kept.
            warn: ``warn(kind, text)`` gives the first warning of a kind.
        """
        if not self.wanted(round):
            return
        with self._lock:
            norms = {name: row["gradient_norm"] for name, row in self._rows.items() if row["round"] == round}
        # No multiple is too much of a gradient that is zero, as of a layer that this rank did not use.
        found = [(norm_of(name) or 0.0, norm, name) for name, norm in norms.items() if norm > 0]
        residual, norm, name = max(found, key=lambda row: row[0] / row[1], default=(0.0, 1.0, ""))
        if residual > RESIDUAL_LIMIT * norm:
            warn(
                "residual",
                f"round {round}: what has not been sent of {name!r} yet, its residual, is {residual / norm:.1f} times "
                f"as long as its gradient (norms {residual:.3g} and {norm:.3g}; more than {RESIDUAL_LIMIT:g} times is "
                "warned of): it arrives many rounds late and in bursts, which an optimizer's momentum carries too far. "
                "Use smaller blocks (block_size=64) or more levels, the method's own momentum before compression, or "
                "an optimizer without momentum; link.diagnostics() has both norms of all parameters",
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
