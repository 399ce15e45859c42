"""How many steps each exchange of a cell takes, so that the cell ends in about a stated time."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["LEAST_TURNS", "MOST_STEPS", "TURNS", "steps_of_budget", "steps_of_cell"]

TURNS, SLOW_TURNS, LEAST_TURNS = 5, 3, 2
"""Of each exchange: as a rule, where a step takes longer than :data:`SLOW_S`, and where a cell's time is short."""
SLOW_S = 2.0
MOST_STEPS = 40
"""Of one turn."""


def steps_of_budget(step_s: float, budget_s: float) -> tuple[int, int]:
    """Return turns, and steps in each turn, of an exchange that may take about ``budget_s`` seconds.

    Long steps are taken in fewer turns: they hardly vary.
    """
    turns = SLOW_TURNS if step_s > SLOW_S else TURNS
    return turns, max(1, min(MOST_STEPS, int(budget_s / turns / step_s)))


def steps_of_cell(step_s: Mapping[str, float], left_s: float) -> dict[str, tuple[int, int]]:
    """Return turns, and steps in each turn, of all exchanges of a cell, which together may take about ``left_s``.

    Every exchange gets an equal share of a turn's time. One whose step is longer than its share takes a single step,
    at the expense of the others. All take the same number of turns, at least two, so that every row has a spread.
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
