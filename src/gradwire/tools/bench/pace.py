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
"""Losses of a connection after which its window has its mean: under CUBIC each leaves 0.7 of it, ten leave 0.03."""


def settling_s(links: Sequence[Impairments], congestion: str) -> float:
    """Return the seconds for which an exchange takes steps before any are measured, until windows have their mean.

    A window begins as long as a message, and each loss shortens it. A benchmark of a few seconds would see few losses,
    where a training sees thousands (``benchmarks/speed/settling.py`` measures both). With the rate r in bytes a second
    of :func:`gradwire.model.machine.connection_rate`, the share p of lost segments and 1448 bytes a segment, a
    connection that sends all the time has lost ten segments after::

        10 * 1448 / (p r)

    Under BBR it is 0, since its rate is infinite there.

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
