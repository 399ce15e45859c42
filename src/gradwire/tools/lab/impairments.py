"""What a link does to frames besides limiting their rate: delay, jitter, loss, reordering and outages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

from gradwire.errors import HyperparameterError
from gradwire.tools.lab.quantities import plain


@dataclass(frozen=True, kw_only=True)
class Impairments:
    """What a link does to the frames that are sent over it, in one direction.

    Losses follow a chain of two states (Gilbert, 1960), one step a frame: a frame after one that was not lost is lost
    with probability ``p = loss r / (1 - loss)``, and a frame after a lost one is not lost with probability
    ``r = 1 / burst``. So a share ``p / (p + r) = loss`` of all frames is lost, ``burst`` in a row on average. With
    ``burst = 1 / (1 - loss)``, the default, p and 1 - r are both ``loss``: losses are independent.

    Attributes:
        delay_s: Delay in seconds.
        jitter_s: Each frame's delay is uniform between ``delay_s - jitter_s`` and ``delay_s + jitter_s``. A frame is
            never delivered before an earlier one to the same host: where frames follow each other sooner than the
            jitter, it adds to the delay.
        loss: Share of frames that are lost.
        burst: Mean number of frames that are lost in a row; None: losses are independent.
        reorder: Share of frames that are not delayed, and so overtake those before them.

    Raises:
        HyperparameterError: a number is out of range, or two do not go together.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    burst: float | None = None
    reorder: float = 0.0

    def __post_init__(self) -> None:
        if self.delay_s < 0:
            raise HyperparameterError(f"delay={self.delay_s}: must not be negative")
        if not 0 <= self.jitter_s <= self.delay_s:
            raise HyperparameterError(
                f"jitter={self.jitter_s * 1e3:g}ms: at most delay={self.delay_s * 1e3:g}ms is possible, since a delay"
                " cannot be negative"
            )
        if not 0 <= self.loss < 1:
            raise HyperparameterError(f"loss={self.loss * 100:g}%: from 0% to below 100% are possible")
        if not 0 <= self.reorder <= 1:
            raise HyperparameterError(f"reorder={self.reorder * 100:g}%: from 0% to 100% are possible")
        if self.reorder and not self.delay_s:
            raise HyperparameterError("reorder=... lets frames overtake delayed ones: give delay=... too")
        if self.burst is not None and not self.loss:
            raise HyperparameterError("burst=... is the length of losses: give loss=... too")
        if self.burst is not None and (self.burst < 1 or self.loss / (1 - self.loss) > self.burst):
            raise HyperparameterError(
                f"burst={self.burst:g}: at least 1 frame, and with loss={self.loss * 100:g}% at least"
                f" {self.loss / (1 - self.loss):.3g} frames in a row must be lost"
            )

    @property
    def ends(self) -> float:
        """Probability that the frame after a lost one is not lost."""
        return 1 - self.loss if self.burst is None else 1 / self.burst

    @property
    def begins(self) -> float:
        """Probability that the frame after one that was not lost is lost."""
        return min(1.0, self.loss * self.ends / (1 - self.loss))

    @property
    def single(self) -> bool:
        """Whether each frame has a fate of its own, so that the kernel must not join several."""
        return bool(self.loss or self.reorder)


UNIMPAIRED = Impairments()
"""A link that only limits the rate."""


@dataclass(frozen=True, kw_only=True)
class Outage:
    """An interval in which links are silent: frames that enter or leave them are dropped.

    Attributes:
        lasts_s: Length in seconds.
        from_s: Its beginning, in seconds after the network was opened.
        host: Number of the host whose link is silent; None: all links.
        peer: Number of a second host: only frames between the two are dropped; None: those to and from all hosts.

    Raises:
        HyperparameterError: a number is out of range.
    """

    lasts_s: float
    from_s: float
    host: int | None = None
    peer: int | None = None

    def __post_init__(self) -> None:
        if self.peer is not None and self.host in (None, self.peer):
            raise HyperparameterError(f"outage={self.spec()}: two different hosts are needed")
        if self.lasts_s <= 0 or self.from_s < 0:
            raise HyperparameterError(
                f"outage={self.spec()}: a length above 0 s is needed, and no beginning before 0 s"
            )

    @classmethod
    def parse(cls, text: str) -> Outage:
        """Read ``10s@60s``, ten seconds from the sixtieth second on.

        ``10s@60s:host2`` is an outage of one host's link, ``10s@60s:host2-host3`` one of what two send to each other.

        Raises:
            HyperparameterError: the text is something else.
        """
        found = re.fullmatch(r"(\d+(?:\.\d+)?)s@(\d+(?:\.\d+)?)s(?::host(\d+)(?:-host(\d+))?)?", text.strip())
        if not found:
            raise HyperparameterError(
                f"outage {text!r}: a length and a beginning are needed, such as 10s@60s, or 10s@60s:host2 for one"
                " host, or 10s@60s:host2-host3 for what two send to each other"
            )
        host, peer = (None if number is None else int(number) for number in found.group(3, 4))
        return cls(lasts_s=float(found[1]), from_s=float(found[2]), host=host, peer=peer)

    def spec(self) -> str:
        """Return the outage as text that :meth:`parse` reads back."""
        lasts, begins = (plain(Decimal(repr(value))) for value in (self.lasts_s, self.from_s))
        hosts = "-".join(f"host{number}" for number in (self.host, self.peer) if number is not None)
        return f"{lasts}s@{begins}s" + (f":{hosts}" if hosts else "")
