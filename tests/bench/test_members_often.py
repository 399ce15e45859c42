"""Thousands of faults, ``benchmarks/trials/members_often.py``, and the page that shows them."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pages import trials_page
from benchmarks.trials import members_often
from benchmarks.trials.churn import KINDS

pytestmark = pytest.mark.repository


def row(method: str = "terngrad", **more: Any) -> dict[str, Any]:
    """Return what a trial found."""
    usual: dict[str, Any] = dict.fromkeys(members_often.KEPT, 1)
    usual |= {"method": method, "faults": 50, **dict.fromkeys((f"faults_{kind}" for kind in KINDS), 10)}
    usual |= {"hangs": 0, "rounds_with_differing_digests": 0, "halted": "", "differing_after": {}, "left out": 5}
    return usual | more


class Trial:
    """A trial that has ended, with a row or without."""

    returncode = 0

    def wait(self) -> int:
        """Return at once."""
        return 0


def run(monkeypatch: pytest.MonkeyPatch, path: Path, *told: str, **found: Any) -> tuple[int, list[tuple[str, int]]]:
    """Run the program with trials that find a row at once; return its status and the draws of the trials."""
    begun = []

    def start(given: argparse.Namespace, method: str, seed: int, into: Path) -> Trial:
        begun.append((method, seed))
        into.with_suffix(".log").write_text("why")
        if (method, seed) not in found.get("nothing", ()):
            own = {name: x for name, x in found.items() if name != "nothing"}
            into.write_text(json.dumps({"rows": [row(method, seed=seed, **own)]}))
        return Trial()

    monkeypatch.setattr(members_often, "start", start)
    monkeypatch.setattr(sys, "argv", ["members_often.py", "--json", str(path), "--at-once", "3", *told])
    return members_often.main(), begun


def test_trials_go_on_with_other_draws_until_there_were_enough_faults(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "often.json"
    status, begun = run(monkeypatch, path, "--faults", "301")
    assert status == 0
    assert begun == [(members_often.METHODS[i % 4], i // 4) for i in range(9)]
    found = json.loads(path.read_text())
    assert found["sum"] == {
        "trials": 9, "faults": 450, **dict.fromkeys((f"faults_{kind}" for kind in KINDS), 90), "rounds": 9,
        "rejoined": 9, "ended_by_itself": 9, "digests_compared": 9, "rounds_compared": 9,
        "rounds_with_differing_digests": 0, "hangs": 0, "lost_all": 0,
    }  # fmt: skip
    assert all(set(one) == set(members_often.KEPT) for one in found["rows"])
    assert run(monkeypatch, path, "--faults", "450") == (0, [])
    assert run(monkeypatch, path, "--faults", "451")[1][0] == (members_often.METHODS[1], 2)


@pytest.mark.parametrize("what", ["hangs", "rounds_with_differing_digests"])
def test_what_is_looked_for_is_an_error(what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert run(monkeypatch, tmp_path / "often.json", "--faults", "1", **{what: 1})[0] == 1


def test_trials_go_on_where_one_ends_without_a_row_which_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, lost = tmp_path / "often.json", (members_often.METHODS[1], 0)
    status, begun = run(monkeypatch, path, "--faults", "201", nothing=[lost])
    assert (status, len(begun), json.loads(path.read_text())["sum"]["trials"]) == (1, 6, 5)
    # It is tried again by the run that goes on.
    assert run(monkeypatch, path, "--faults", "251")[1][0] == lost


def test_it_ends_where_no_trial_begins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    none = [(method, 0) for method in members_often.METHODS]
    status, begun = run(monkeypatch, tmp_path / "often.json", "--faults", "1", nothing=none)
    assert (status, len(begun)) == (1, 3)


def test_the_page_sums_the_trials_of_each_method(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(), row(halted="lost", hangs=1, rejoin_s_median=None, rejoin_s_longest=None, rejoined=0), row("other")]
    machine = {"cpu": "a", "cores": 2, "versions": {"gradwire": "9"}, "date_utc": "2026-01-01T"}
    found = {"trials/trials_members_often": {**machine, "sum": members_often.summed(rows), "rows": rows}}
    monkeypatch.setattr(trials_page, "result", found.get)
    lines = trials_page._members_often()
    table = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    assert len({len(cells) for cells in table}) == 1
    assert table[1][:4] == ["`terngrad`", "2", "1", "100"]
    assert table[1][-4:] == ["0 of 2", "1", "1", "1"]
    assert table[2][-4:] == ["0 of 1", "0", "0", "1"]
    assert "150 faults in sum" in lines[0]
    found.clear()
    assert trials_page._members_often() == []
