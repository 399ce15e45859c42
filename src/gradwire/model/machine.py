"""What a machine's collectives and cores cost: a few numbers, calibrated on measured steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from gradwire.errors import HyperparameterError

FAR = 2.0
"""A prediction is extrapolated where it lies this many times outside of what was calibrated."""


@dataclass(frozen=True, kw_only=True)
class LinkModel:
    """A rank's connection to the others.

    Attributes:
        bandwidth_bytes_per_s: What it may send, and receive, at once; None where memory is the limit.
        latency_s: Added to each message that waits for another.
        ranks_per_host: That share the connection; what they tell each other does not take it.
    """

    bandwidth_bytes_per_s: float | None = None
    latency_s: float = 0.0
    ranks_per_host: int = 1

    def elsewhere(self, ranks: Sequence[int]) -> int:
        """Return how many of some ranks are not on the host of the first; each host has the next ranks."""
        return sum(rank // self.ranks_per_host != ranks[0] // self.ranks_per_host for rank in ranks)

    def leaving(self, sent_bytes: float, ring: bool, ranks: Sequence[int]) -> float:
        """Return the bytes of a rank that leave its host: one rank's of a ring, else those for ranks on other hosts.

        Args:
            sent_bytes: By the first of the ranks.
            ring: Whether each sends to the next alone.
            ranks: Among whom.

        Example:
            >>> link = LinkModel(ranks_per_host=2)
            >>> [link.leaving(90, False, ranks) for ranks in (range(4), (0, 1), (0, 2))]
            [60.0, 0.0, 90.0]
        """
        away = self.elsewhere(ranks)
        if not away:
            return 0.0
        return sent_bytes / (len(ranks) - away) if ring else sent_bytes * away / (len(ranks) - 1)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Calibrated costs.

    Seconds of CPU are those of a rank whose core is its own; ``contention`` and the number of ranks per core stretch
    them.

    Attributes:
        ring_efficiency: Share of the bandwidth that payloads get where each rank hears one sender: a ring, or pairs.
        crowd_efficiency: The same where all send to all: receivers' links are crowded at times and idle at others.
        round_s: Latency of one dependent message, scheduling included.
        call_s: CPU of one collective.
        message_s: CPU of one message to one rank.
        byte_s: CPU of one byte that is sent and received.
        sum_byte_s: CPU of one byte in a ring that adds.
        bucket_s: CPU of handing over a bucket, on the thread that computes.
        contention: Factor on all work beside the timeline, which was measured with all ranks running.
        residual: Standard deviation of log(measured / predicted) in the calibration.
        source: Where the numbers come from.
        most_workers: Of the steps that they were fitted to; None where that is not known.
        slowest_bytes_per_s, fastest_bytes_per_s: Of the limited links among them; None where there was none.
    """

    ring_efficiency: float = 0.9
    crowd_efficiency: float = 0.75
    round_s: float = 5e-4
    call_s: float = 4e-4
    message_s: float = 5e-5
    byte_s: float = 3e-10
    sum_byte_s: float = 1e-9
    bucket_s: float = 1e-4
    contention: float = 1.5
    residual: float = 0.25
    source: str = "not calibrated"
    most_workers: int | None = None
    slowest_bytes_per_s: float | None = None
    fastest_bytes_per_s: float | None = None

    def beyond(self, workers: int, link: LinkModel) -> str | None:
        """Describe how a prediction lies far outside of the fitted steps; None where it does not."""
        if self.most_workers is None:
            return None
        if workers > FAR * self.most_workers:
            return f"more workers than calibrated (at most {self.most_workers})"
        rate = link.bandwidth_bytes_per_s
        if rate is None or workers <= link.ranks_per_host:
            return None
        if self.slowest_bytes_per_s is None or self.fastest_bytes_per_s is None:
            return "no limited link was calibrated"
        if not self.slowest_bytes_per_s / FAR <= rate <= FAR * self.fastest_bytes_per_s:
            low, high = 8e-6 * self.slowest_bytes_per_s, 8e-6 * self.fastest_bytes_per_s
            return f"a link far from those calibrated ({low:g} to {high:g} Mbit/s)"
        return None

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as JSON values."""
        return asdict(self)

    def save(self, path: Path) -> None:
        """Write the numbers to a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Machine:
        """Read :meth:`save`'s file.

        Raises:
            HyperparameterError: it holds no calibration.
        """
        known = {f.name for f in fields(cls)}
        try:
            found = json.loads(path.read_text())
            missing = [k for k in COSTS if k not in found]
            wrong = [k for k in COSTS if k in found and not _is_cost(found[k])]
            if missing or wrong:
                raise ValueError(f"it lacks {', '.join(missing)}" if missing else f"{wrong[0]} is {found[wrong[0]]!r}")
            return cls(**{k: v for k, v in found.items() if k in known})
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise HyperparameterError(
                f"{path} holds no calibration ({error}): make one with gradwire plan --calibrate"
            ) from None


COSTS = tuple(f.name for f in fields(Machine) if f.type == "float")
"""What a calibration must hold."""


def _is_cost(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


DEFAULT = Machine()
