"""The list of faults does not rot, and the harness tells a fault that is caught from one that survives."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from anchors import Sources
from run_mutants import (
    HERE,
    LIST,
    PACKAGE,
    ROOT,
    Fault,
    Outcome,
    digest,
    located,
    read_faults,
    read_list,
    run,
    selected,
    sources_of,
    summarise,
)

pytestmark = pytest.mark.repository

FAULTS = read_faults()
LAYERS = """
exchange/codecs exchange/drivers exchange/planning exchange/protocols exchange/wire kernels link link/adapters methods
model tools/bench tools/cli tools/experiments tools/lab tools/report
""".split()  # noqa: SIM905


def test_there_are_enough_faults_in_every_layer() -> None:
    assert len(FAULTS) >= 100
    files = [fault.path or "" for fault in located(FAULTS, sources_of(PACKAGE))]
    counts = {layer: sum(file.startswith(f"{layer}/") for file in files) for layer in LAYERS}
    assert {layer: count for layer, count in counts.items() if count < 4} == {}
    assert sum(fault.spared is not None for fault in FAULTS) <= len(FAULTS) / 10


@pytest.mark.parametrize("path", sorted(LIST.glob("*.toml")), ids=lambda path: path.stem)
def test_every_fault_can_be_applied_and_names_tests_that_exist(path: Path) -> None:
    faults = read_list(path)
    assert {fault.name: problem for fault in faults if (problem := fault.problem(sources_of(PACKAGE)))} == {}
    assert {fault.name: missing for fault in faults if (missing := fault.missing_tests(ROOT))} == {}
    assert [fault.name for fault in faults if not fault.tests] == []


def test_faults_are_selected_by_a_part_of_their_name_or_path() -> None:
    faults = located(FAULTS, sources_of(PACKAGE))
    assert selected(faults, []) == faults
    assert {fault.path for fault in selected(faults, ["report/figures"])} == {"tools/report/figures.py"}
    assert selected(faults, [FAULTS[3].name])[0].path


HALF = Fault(
    name="half",
    where="total",
    old="a + b",
    new="a - b",
    tests=("tests/test_sums.py::test_sum",),
    means="differences for sums",
)


@pytest.fixture
def attempt(tmp_path: Path) -> Callable[..., tuple[bool, list[str]]]:
    """Try faults on a package of one module; return whether that was enough, and what was said."""
    package, tests = tmp_path / "src" / "arithmetic", tmp_path / "tests"
    package.mkdir(parents=True)
    tests.mkdir()
    (package / "__init__.py").touch()
    (package / "sums.py").write_text("def total(a, b):\n    return a + b\n")
    code = "from arithmetic.sums import total\n\n\ndef test_sum():\n    assert total(2, 1) == 3\n"
    code += "\n\ndef test_zeros():\n    assert total(0, 0) == 0\n\n\ndef test_wrong():\n    assert total(2, 1) == 4\n"
    (tests / "test_sums.py").write_text(code)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -ra\n")

    def attempting(*changes: dict[str, object], fresh: bool = True) -> tuple[bool, list[str]]:
        said: list[str] = []
        faults = [dataclasses.replace(HALF, **{"name": str(i), **change}) for i, change in enumerate(changes)]  # type: ignore[arg-type]
        options = {"root": tmp_path, "package": package, "work": tmp_path / "work", "jobs": 1}
        enough = run(faults, fresh=fresh, say=said.append, **options)  # type: ignore[arg-type]
        assert (package / "sums.py").read_text() == "def total(a, b):\n    return a + b\n", "the package stays as it is"
        return enough, said

    return attempting


Attempt = Callable[..., tuple[bool, list[str]]]
ZEROS, WRONG = ("tests/test_sums.py::test_zeros",), ("tests/test_sums.py::test_wrong",)


def test_a_fault_that_is_caught_is_enough_and_is_not_tried_again(attempt: Attempt) -> None:
    enough, said = attempt({})
    assert enough
    assert "1 of 1 faults were caught" in said
    enough, said = attempt({}, fresh=False)
    assert enough
    assert not any("without a fault first" in line for line in said)


def test_faults_that_survive_or_cannot_be_tried_are_named(attempt: Attempt) -> None:
    other = {"old": "a * b"}
    gone = {"tests": ("tests/test_sums.py::test_gone",)}
    enough, said = attempt({}, {"tests": ZEROS}, other, gone, {"new": "a +"}, {"new": "a + b"}, {"where": "mean"})
    assert not enough
    told = "\n".join(said)
    assert "survived: 1 (sums.py): differences for sums" in told
    assert "stale: 2 (sums.py): its 'old' occurs 0 times in total (sums.py), not once" in told
    assert "stale: 3 (sums.py): no such test: tests/test_sums.py::test_gone" in told
    assert "stale: 4 (sums.py): the changed file is not Python" in told
    assert "stale: 5 (sums.py): it changes nothing" in told
    assert "stale: 6 (nowhere): there is no definition of mean" in told
    assert "1 of 7 faults were caught" in told


def test_outcomes_are_kept_for_the_same_files_alone_wherever_they_lie(tmp_path: Path) -> None:
    folder = tmp_path / LIST.name
    for file in ("sums.py", f"{LIST.name}/sums.toml"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("")
    before = digest(folder)
    (folder / LIST.name / "sums.toml").write_text("# Each fault has its own outcome.")
    assert digest(folder) == before
    (folder / "sums.py").write_text("# Changed.")
    assert digest(folder) != before


def test_a_test_that_fails_without_a_fault_proves_nothing(attempt: Attempt) -> None:
    enough, said = attempt({"tests": WRONG})
    assert not enough
    assert said[-1] == f"without any fault: {WRONG[0]}: it fails"


def test_run_as_a_program_it_is_not_imported_by_processes_that_tests_start(tmp_path: Path) -> None:
    fault = """
[[fault]]
name = "wrong"
where = "RIGHT"
old = "True"
new = "False"
tests = ["tests/test_spawned.py::test_that_starts_a_process"]
means = "what is right is wrong"
"""
    test = """
import multiprocessing

from gradwire import RIGHT


def test_that_starts_a_process():
    process = multiprocessing.get_context("spawn").Process(target=print)
    process.start()
    process.join()
    assert process.exitcode == 0
    assert RIGHT
"""
    for path, text in {
        "src/gradwire/__init__.py": "RIGHT = True\n",
        "tests/mutants/faults/right.toml": fault,
        "tests/mutants/anchors.py": (HERE / "anchors.py").read_text(),
        "tests/mutants/run_mutants.py": (HERE / "run_mutants.py").read_text(),
        "tests/test_spawned.py": test,
        "pytest.ini": "[pytest]\naddopts = -ra\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    command = [sys.executable, tmp_path / "tests" / "mutants" / "run_mutants.py", "--jobs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 faults were caught" in done.stdout


def test_nine_of_ten_must_be_caught_and_what_is_spared_counts_as_not() -> None:
    def told(caught: int, spared: int, **changes: object) -> bool:
        faults = [dataclasses.replace(HALF, name=str(i)) for i in range(caught)]
        faults += [dataclasses.replace(HALF, name=f"s{i}", spared="cannot be seen") for i in range(spared)]
        statuses = ["caught"] * caught + ["spared"] * spared
        outcomes = {f.name: Outcome(status=s, seconds=0.0) for f, s in zip(faults, statuses)}
        return summarise(faults, {**outcomes, **changes}, lambda line: None)  # type: ignore[dict-item]

    assert told(9, 1)
    assert not told(8, 1)
    assert not told(20, 1, s0=Outcome(status="caught", seconds=0.0)), "what is caught after all is not to be spared"
    assert not told(20, 0, **{"3": Outcome(status="broken", seconds=0.0)})


BEFORE = """\
LIMIT, LEAST = 8, 7


class Sum:
    scale: float = 1.0

    def total(self, a, b):
        if a > LIMIT:
            return self.scaled(a + b, 2)
        return a

    def scaled(self, value, times):
        return times * (value + 1)
"""
"""A module that is formatted anew, and whose definitions move, in the tests of anchors."""

Changed = Callable[..., str]


@pytest.fixture
def changed(tmp_path: Path) -> Changed:
    """Apply a fault to a package of some files; return what the file that it changes says then."""

    def changing(files: dict[str, str], **anchor: str) -> str:
        for file, text in files.items():
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).write_text(text)
        fault = Fault(**{"name": "x", "means": "", "tests": (), **anchor})  # type: ignore[arg-type]
        sources = Sources(tmp_path)
        if problem := fault.problem(sources):
            return problem
        file, text = fault.changed(sources)
        assert located([fault], sources)[0].path == file
        return text

    return changing


def replaced(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1
    return text.replace(old, new)


REFORMATTED = replaced(
    BEFORE,
    "return self.scaled(a + b, 2)",
    """return (
                self.scaled(
                    a  # Of the first
                    + b,  # and the second.

                    2,
                )
            )""",
)


@pytest.mark.parametrize(
    ("old", "new", "before", "after"),
    [
        ("a + b", "a - b", "+ b", "- b"),
        ("scaled(a + b, 2)", "scaled(a + b, 3)", "2,\n", "3,\n"),
        ("scaled(a + b, 2)", "scaled(a + b, 2, 1)", "2,\n", "2, 1,\n"),
        (
            "return self.scaled(a + b, 2)",
            "return self.scaled(a + b, 2) + 1",
            "    )\n            )",
            "    ) + 1\n            )",
        ),
        ("return self.scaled(a + b, 2)", "return scaled(a + b, 2)", "self.scaled", "scaled"),
        (", 2", "", ",  # and the second.\n\n                    2,", ""),
    ],
)
def test_a_fault_stays_valid_under_new_line_breaks_and_a_move(
    changed: Changed, old: str, new: str, before: str, after: str
) -> None:
    fault = {"where": "Sum.total", "old": old, "new": new}
    plain = changed({"sums.py": BEFORE}, **fault)
    assert plain == replaced(BEFORE, old, new)
    found = changed({"sums.py": REFORMATTED}, **fault)
    assert found == replaced(REFORMATTED, before, after)
    assert ast.dump(ast.parse(found)) == ast.dump(ast.parse(plain))
    moved = {"sums.py": "from elsewhere.other import Sum\n", "elsewhere/other.py": REFORMATTED}
    assert changed(moved, **fault) == found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("first, second = a, b", "second, first = a, b"),
        ("first, second = a, b", "first, second = b, a"),
        ("for x, y in first.pairs(second):", "for y, x in first.pairs(second):"),
        ("for x, y in first.pairs(second):\n    x += y", ""),
        ("return first and second", "return first or second"),
        ("return first and second", "return first, second"),
        ("return first", "return not first"),
        ("raise ValueError(x or y)", "raise ValueError"),
        ("(*first, *second)", "first"),
    ],
)
def test_parentheses_that_a_formatter_adds_do_not_count(changed: Changed, old: str, new: str) -> None:
    plain = """\
def joined(a, b):
    first, second = a, b
    for x, y in first.pairs(second):
        x += y
    if first:
        return first and second
    yield *first, *second
    raise ValueError(x or y)
"""
    broken = """\
def joined(a, b):
    (
        first,
        second,
    ) = (a, b)
    for (
        x,
        y,
    ) in first.pairs(second):
        x += (
            y  # More.
        )
    if (first):
        return (
            first
            and second
        )
    yield (
        *first,
        *second,
    )
    raise (ValueError(
        (x or y),
    ))
"""
    texts = [changed({"joined.py": text}, where="joined", old=old, new=new) for text in (plain, broken)]
    assert ast.dump(ast.parse(texts[0])) == ast.dump(ast.parse(texts[1])) != ast.dump(ast.parse(plain))


def test_statements_are_replaced_at_their_own_indentation(changed: Changed) -> None:
    old = "if a > LIMIT:\n    return self.scaled(a + b, 2)\n"
    new = "if a < LIMIT:\n    b = 0\nwhile b:\n    b -= 1"
    expected = """\
        if a < LIMIT:
            b = 0
        while b:
            b -= 1
"""
    found = changed({"sums.py": BEFORE}, where="Sum.total", old=old, new=new)
    assert expected in found
    assert changed({"sums.py": REFORMATTED}, where="Sum.total", old=old, new=new) == found
    without = changed({"sums.py": REFORMATTED}, where="Sum.total", old=old, new="")
    assert without == replaced(found, expected.strip(), "")


@pytest.mark.parametrize(
    ("where", "old", "new"),
    [
        ("LEAST", "7", "6"),
        ("Sum", "1.0", "2.0"),
        ("Sum.scaled", "(value + 1)", "value"),
        ("Sum", "class Sum:", "class Sum(int):"),
    ],
)
def test_a_definition_is_searched_without_those_inside_it(changed: Changed, where: str, old: str, new: str) -> None:
    assert changed({"sums.py": BEFORE}, where=where, old=old, new=new) == replaced(BEFORE, old, new)


def test_a_comma_that_makes_a_tuple_counts(changed: Changed) -> None:
    text = "def pair(a):\n    return f((a,), [a,], a[0,],), (a)\n"
    anchor = {"where": "pair", "new": "b"}
    assert changed({"pairs.py": text}, old="(a,)", **anchor) == replaced(text, "(a,)", "b")
    assert changed({"pairs.py": text}, old="[a]", **anchor) == replaced(text, "[a,]", "b")
    assert "occurs 0 times" in changed({"pairs.py": text}, old="a[0]", **anchor)


@pytest.mark.parametrize(
    ("anchor", "problem"),
    [
        ({"where": "Sum.mean"}, "there is no definition of Sum.mean; there is one of Mean.mean"),
        ({"where": "median"}, "there is no definition of median"),
        (
            {"where": "Sum.total", "old": "value"},
            "its 'old' occurs 0 times in Sum.total (sums.py), not once; it occurs in Sum.scaled",
        ),
        (
            {"where": "Sum.total", "old": "a"},
            "its 'old' occurs 4 times in Sum.total (sums.py), not once: in lines 7, 8, 9, 10",
        ),
        ({"where": "Sum.total", "old": "a + b, 2)"}, "its 'old' is not made of whole tokens and brackets: "),
        ({"where": "Sum.total", "old": "'a + b"}, "its 'old' is not made of whole tokens and brackets: "),
        ({"where": "Sum.total", "new": "a + b)"}, "its 'new' is not made of whole tokens and brackets: "),
        ({"where": "Sum.total", "new": "if"}, "the changed file is not Python: "),
        ({"where": "Sum.total", "new": "a +\\\n  b"}, "it changes nothing"),
        ({"where": "Sum.total", "old": "# a"}, "its 'old' is empty"),
        (
            {"where": "LIMIT"},
            "LIMIT is defined in several files: 'path' has to name one of a/means.py, a/mode.py, sums.py",
        ),
        (
            {"where": "LIMIT", "path": "a"},
            "LIMIT is defined in several files in a: 'path' has to name one of a/means.py",
        ),
        ({"where": "LIMIT", "path": "b"}, "there is no b; LIMIT is defined in a/means.py, a/mode.py, sums.py"),
        ({"where": "Sum", "path": "a"}, "there is no definition of Sum in a; it is defined in sums.py"),
        ({"where": "<module>"}, "<module> is defined in several files: "),
        ({"path": "sums.py"}, "'where' has to name a definition"),
        ({"path": "page.html"}, "its 'old' occurs 2 times in page.html, not once"),
        ({"path": "page.css"}, "there is no file page.css"),
    ],
)
def test_an_anchor_that_is_missing_or_ambiguous_is_told(changed: Changed, anchor: dict[str, str], problem: str) -> None:
    means = "LIMIT = 3\n\n\nclass Mean:\n    def mean(self, a, b):\n        return (a + b) / 2\n"
    files = {"sums.py": BEFORE, "a/means.py": means, "a/mode.py": "LIMIT = 3\n", "page.html": "a + b, a + b"}
    assert changed(files, **{"old": "a + b", "new": "a - b", **anchor}).startswith(problem)


def test_a_path_narrows_a_name_and_a_file_of_another_kind_is_compared_by_characters(changed: Changed) -> None:
    files = {"sums.py": BEFORE, "a/means.py": "LIMIT = 8, 1\n", "page.html": "<b>a</b>"}
    for path in ("a/means.py", "a"):
        assert changed(files, where="LIMIT", path=path, old="8", new="9") == "LIMIT = 9, 1\n"
    assert changed(files, where="LIMIT", path="sums.py", old="8", new="9") == replaced(BEFORE, "8", "9")
    assert changed(files, path="page.html", old="<b>a", new="<b>b") == "<b>b</b>"
