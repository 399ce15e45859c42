"""The number of steps that fit a budget, and of those before them that are not counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradwire.model.machine import SEGMENT_BYTES, connection_rate
from gradwire.tools.lab import Impairments

TURNS, SLOW_TURNS, LEAST_TURNS = 5, 3, 2
"""Turns of each exchange: normally, if its step takes longer than :data:`SLOW_S`, and at least in a cell."""
SLOW_S = 2.0
MOST_STEPS = 40
"""Most steps in one turn."""


def steps_of_budget(step_s: float, budget_s: float) -> tuple[int, int]:
    """Return the number of turns, and of steps in each, for an exchange that may take about ``budget_s`` seconds.

    Long steps are taken in fewer turns, since they hardly vary.
    """
    turns = SLOW_TURNS if step_s > SLOW_S else TURNS
    return turns, max(1, min(MOST_STEPS, int(budget_s / turns / step_s)))


def steps_of_cell(step_s: Mapping[str, float], left_s: float) -> dict[str, tuple[int, int]]:
    """Return the number of turns, and of steps in each, for all exchanges of a cell that may take about ``left_s``.

    Every exchange gets an equal share of a turn's time. If its step is longer than that, it takes a single step, at the
    expense of the others. All take the same number of turns, at least two, so that every row has a spread.
    """
    turns = max(LEAST_TURNS, min(TURNS, int(left_s / sum(step_s.values()))))
    turn_s, found = left_s / turns, {}
    slowest_first = sorted(step_s, key=lambda name: -step_s[name])
    for number, name in enumerate(slowest_first):
        share_s = turn_s / (len(slowest_first) - number)
        steps = max(1, min(MOST_STEPS, int(share_s / step_s[name])))
        turn_s = max(0.0, turn_s - steps * step_s[name])
        found[name] = turns, steps
    return {name: found[name] for name in step_s}


LEAD = 3
"""Most steps that begin a turn and are not counted, on links with a delay."""


def lead(step_s: float, budget_s: float, links: Sequence[Impairments]) -> int:
    """Return the number of steps that begin each turn and are not counted, of an exchange that takes so long.

    A connection that was idle for longer than TCP's timeout begins slowly again, which on links with a delay takes
    several round trips. In a training no exchange pauses for the turns of others.
    """
    return max(1, min(LEAD, int(budget_s / step_s))) if any(link.delay_s for link in links) else 0


SETTLING_LOSSES = 10
"""Losses of a connection after which its window has its mean: each makes Cubic's 0.7 times as long, all 0.03 times."""


def settling_s(links: Sequence[Impairments], congestion: str) -> float:
    """Return the seconds that exchanges take steps before any are measured, until windows have their mean.

    A connection begins with a window as long as a message, and each loss shortens it. A benchmark of a few seconds
    would see few losses, and a training sees thousands: 1.25 MB by Cubic at 1 Gbit/s, 20 ms and 0.1 % took 0.3 s at
    first, and 0.9 s from the fifteenth loss on. With the rate r of
    :func:`gradwire.model.machine.connection_rate` and the loss p, it is 10 segments / (p r): 0 under BBR, which hardly
    heeds losses.

    Args:
        links: Links of hosts, in one direction.
        congestion: TCP's congestion control.

    Example:
        >>> round(settling_s([Impairments(delay_s=0.02, loss=0.001)], "cubic"), 1)
        10.3
    """
    lossy = [link for link in links if link.loss]
    return max(
        (
            SETTLING_LOSSES * SEGMENT_BYTES / (link.loss * connection_rate(link.delay_s, link.loss, congestion))
            for link in lossy
        ),
        default=0.0,
    )
