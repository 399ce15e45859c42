"""How many steps each exchange of a cell takes."""

from __future__ import annotations

from gradwire.tools.bench.pace import LEAST_TURNS, MOST_STEPS, TURNS, lead, settling_s, steps_of_budget, steps_of_cell
from gradwire.tools.lab import Impairments


def seconds(step_s: dict[str, float], counts: dict[str, tuple[int, int]]) -> float:
    return sum(turns * steps * step_s[name] for name, (turns, steps) in counts.items())


def test_a_cells_exchanges_share_its_time() -> None:
    step_s = {"slow": 1.0, "fast": 0.01, "middle": 0.1}
    counts = steps_of_cell(step_s, 10.0)
    assert list(counts) == list(step_s)
    # A turn has two seconds. The slow one's share of it, 2/3 s, is less than a step; the others halve the rest.
    assert counts == {"slow": (TURNS, 1), "fast": (TURNS, MOST_STEPS), "middle": (TURNS, 5)}
    assert seconds(step_s, counts) <= 10.0


def test_a_cell_whose_time_is_too_short_still_gives_every_row_a_spread() -> None:
    step_s = {"slow": 13.0, "fast": 0.5}
    for left_s in (-5.0, 0.0, 3.0, 30.0):
        assert steps_of_cell(step_s, left_s) == {
            "slow": (LEAST_TURNS, 1),
            "fast": (LEAST_TURNS, 1 if left_s < 29 else 4),
        }
    assert LEAST_TURNS >= 2


def test_no_more_than_the_time_is_taken_where_single_steps_fit() -> None:
    for left_s in (4.0, 9.0, 31.0):
        step_s = {name: 0.013 * 1.9**i for i, name in enumerate("abcdef")}
        counts = steps_of_cell(step_s, left_s)
        assert seconds(step_s, counts) <= left_s
        assert len({turns for turns, _ in counts.values()}) == 1


def test_an_exchange_of_its_own_takes_fewer_turns_where_steps_are_long() -> None:
    assert steps_of_budget(0.125, 3.0) == (5, 4)
    assert steps_of_budget(2.5, 3.0) == (3, 1)
    assert steps_of_budget(1e-4, 3.0) == (5, MOST_STEPS)


def test_where_links_have_a_delay_a_turn_begins_with_steps_that_are_not_counted() -> None:
    near, far = [Impairments()], [Impairments(), Impairments(delay_s=0.02)]
    assert [lead(step_s, 1.0, near) for step_s in (0.1, 5.0)] == [0, 0]
    assert [lead(step_s, 1.0, far) for step_s in (0.1, 0.5, 5.0)] == [3, 2, 1]


def test_the_slowest_link_decides_how_long_windows_settle() -> None:
    near, far = Impairments(delay_s=0.02, loss=0.001), Impairments(delay_s=0.08, loss=0.001)
    assert settling_s([near, far, Impairments()], "cubic") == settling_s([far], "cubic") > settling_s([near], "cubic")
    assert settling_s([near], "bbr") == settling_s([Impairments(delay_s=0.02)], "cubic") == settling_s([], "cubic") == 0
    # Losses without a delay leave a connection as fast as it is.
    assert settling_s([Impairments(loss=0.001)], "cubic") == 0
