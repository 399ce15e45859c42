"""The ledger of claims: rows that are whole, evidence that exists, figures that all have a row, and rows that age."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

import gradwire as gw
from benchmarks.lib.ledger import (
    OUTCOMES,
    Claim,
    faults,
    figures_of,
    read,
    rewrite,
    section_digest,
    state_of,
    unledgered,
)
from benchmarks.lib.outcomes import alike, outcome
from benchmarks.lib.results import ROOT
from benchmarks.pages.claims_page import OVERVIEW, pages

pytestmark = pytest.mark.repository

CLAIMS = read()
STORED = json.loads(OUTCOMES.read_text())


def test_rows_are_whole_and_what_they_name_exists() -> None:
    assert faults(CLAIMS, gw.methods()) == []


def test_every_result_belongs_to_a_row() -> None:
    """Pages that programs write show results alone, so that each of their figures has a row."""
    there = {path.relative_to(ROOT).as_posix() for path in (ROOT / "benchmarks" / "results").rglob("*.json*")}
    assert there - {claim.result for claim in CLAIMS} == set()


def test_every_figure_that_a_person_wrote_has_a_row() -> None:
    assert unledgered(CLAIMS) == {}


def test_every_method_has_a_row() -> None:
    assert set(gw.methods()) - {name for claim in CLAIMS for name in claim.methods} == set()


def test_rows_whose_code_has_changed_since_say_that_they_are_old() -> None:
    """If this fails: measure and record them again, or let ``python benchmarks/claims/ledger.py mark`` mark them."""
    changed = [claim.name for claim in CLAIMS if claim.command and not claim.old and claim.state != state_of(claim)]
    assert changed == []


@pytest.mark.parametrize("spec", sorted({spec for claim in CLAIMS for spec in claim.outcomes}))
def test_what_a_method_sends_and_what_comes_out_is_what_rows_were_measured_with(spec: str) -> None:
    """If this fails, a change of code changed results: ``ledger.py mark`` marks all rows that depend on them."""
    found = outcome(spec)
    assert alike(STORED[spec], found), found


def row(**given: object) -> Claim:
    known = {"file": "x.toml", "name": "a-row", "claim": "It holds.", "source": "A paper", "verdict": "reproduced"}
    return Claim(**{**known, "here": "1 %", **given})  # type: ignore[arg-type]


OPEN = {"verdict": "open", "why": "not measured"}
HERE = "tests/bench/test_ledger.py::"
MISSING = ["neither depends nor outcomes ''", "minutes None", "date None", "commit ''", "state ''"]
CHANGED = "sections: no such section, or its figures have changed: 'README.md#none 12345678'"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"tests": (f"{HERE}test_every_method_has_a_row",)}, []),
        ({"tests": (f"{HERE}test_missing",)}, [f"tests '{HERE}test_missing'"]),
        ({}, ["neither tests nor command ''"]),
        ({"verdict": "refuted"}, ["why ''", "neither tests nor command ''"]),
        ({**OPEN, "here": ""}, []),
        ({"verdict": "true"}, ["verdict 'true'", "why ''"]),
        ({**OPEN, "methods": ("terngard",)}, ["methods 'terngard'"]),
        ({**OPEN, "name": "A row"}, ["name 'A row'"]),
        ({"command": "python x.py"}, MISSING),
        ({**OPEN, "result": "no/such.json"}, ["result 'no/such.json'"]),
        ({**OPEN, "pages": ("README.md",), "figures": ("123456.7 %",)}, ["figures '123456.7 %'"]),
        ({**OPEN, "pages": ("README.md",)}, ["pages without figures, or figures without pages ()"]),
        ({**OPEN, "sections": ("README.md#none 12345678",)}, [CHANGED]),
    ],
)
def test_a_row_that_is_not_whole_is_told(given: dict[str, object], told: list[str]) -> None:
    assert faults([row(**given)], gw.methods()) == [f"x.toml: {given.get('name', 'a-row')}: {text}" for text in told]


def test_two_rows_have_two_names() -> None:
    one = row(verdict="open", why="not measured")
    assert faults([one, one], []) == ["x.toml: a-row: the name of two rows"] * 2


def test_a_page_with_a_figure_that_no_row_has_is_found(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("It takes 3 ms, `4 ms` it does not.\n")
    made = "<!-- measured: begin -->\n9 ms\n<!-- measured: end -->"
    (tmp_path / "docs" / "page.md").write_text(f"# A\n\n5 ms of 7 %\n{made}\n\n## B\n\n| 0.25 | 6 bits |\n")
    assert unledgered([], tmp_path) == {"README.md": ["3 ms"], "docs/page.md": ["5 ms", "7 %", "0.25", "6 bits"]}
    digest = section_digest("docs/page.md#b", tmp_path)
    named = [
        row(pages=("README.md",), figures=("3 ms",)),
        row(pages=("docs/page.md",), figures=("5 ms of 7 %",)),
        row(sections=(f"docs/page.md#b {digest}",)),
    ]
    assert unledgered(named, tmp_path) == {}
    (tmp_path / "docs" / "page.md").write_text("# A\n\n## B\n\n| 0.26 | 6 bits |\n")
    assert section_digest("docs/page.md#b", tmp_path) != digest


def test_figures_are_numbers_with_a_unit_or_a_point() -> None:
    text = "1,024 bytes, 1.5 times; in 2017 and 4 workers, [3 ms](page.md#3-ms), v2.13.0, 0.5, 20 Mbit/s, 3 %."
    assert figures_of(text) == ["1,024 bytes", "1.5 times", "3 ms", "0.5", "20 Mbit/s", "3 %"]


def test_a_state_follows_code_and_outcomes_but_not_comments(tmp_path: Path) -> None:
    texts = {
        "one": '"""Doc."""\nx = 1  # why\n\ndef f():\n    """What."""\n    return x\n',
        "two": '"""Other."""\nx = 1\ndef f():\n    return x\n',
        "three": "x = 2\ndef f():\n    return x\n",
    }
    claim, states = row(depends=("code",), outcomes=("fp32",)), {}
    for name, text in texts.items():
        (tmp_path / name / "code").mkdir(parents=True)
        (tmp_path / name / "code" / "a.py").write_text(text)
        states[name] = state_of(claim, tmp_path / name, {"fp32": 1})
    assert states["one"] == states["two"] != states["three"]
    assert state_of(claim, tmp_path / "one", {"fp32": 2}) != states["one"]


def test_a_field_is_rewritten_in_place(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text('# head\n[[claim]]\nname = "a"\nold = false\n\n[[claim]]\nname = "b"\n# kept\nhere = "1"\n')
    rewrite(path, "a", {"old": True, "date": datetime.date(2026, 11, 25)})
    rewrite(path, "b", {"here": "2 %"})
    assert path.read_text() == (
        '# head\n[[claim]]\nname = "a"\nold = true\ndate = 2026-11-25\n\n[[claim]]\nname = "b"\n# kept\nhere = "2 %"\n'
    )
    with pytest.raises(ValueError, match="no row named 'c'"):
        rewrite(path, "c", {})


def test_outcomes_differ_where_results_do() -> None:
    plain, clipped = outcome("TernGrad(clip=None)"), outcome("TernGrad(clip=2.5)")
    assert alike(plain, outcome("TernGrad(clip=None)"))
    assert not alike(plain, clipped)
    near = {**plain, "values": [[x * (1 + 1e-6) for x in row] for row in plain["values"]]}
    assert alike(plain, near)
    assert not alike(plain, {**plain, "bytes": [n + 1 for n in plain["bytes"]]})


def test_the_pages_count_and_show_every_row() -> None:
    made = pages(CLAIMS)
    for claim in CLAIMS:
        assert f"`{claim.name}`" in made[f"docs/claims/{claim.file.removesuffix('.toml')}.md"]
        assert claim.verdict != "refuted" or f"`{claim.name}`" in made[OVERVIEW]
    (line,) = [line for line in made[OVERVIEW].splitlines() if line.startswith("| **all** |")]
    assert line.split(" | ")[5] == str(len(CLAIMS))
