"""The list of faults does not rot, and the harness tells a fault that is caught from one that survives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from run_mutants import ROOT, Fault, Outcome, read_faults, run, selected, summarise

pytestmark = pytest.mark.repository

PACKAGE = ROOT / "src" / "gradwire"
FAULTS = read_faults()
LAYERS = """
exchange/codecs exchange/drivers exchange/planning exchange/protocols exchange/wire kernels link link/adapters methods
model tools/bench tools/cli tools/experiments tools/lab tools/report
""".split()  # noqa: SIM905


def test_there_are_enough_faults_in_every_layer() -> None:
    assert len(FAULTS) >= 100
    counts = {layer: sum(fault.file.startswith(f"{layer}/") for fault in FAULTS) for layer in LAYERS}
    assert {layer: count for layer, count in counts.items() if count < 4} == {}
    assert sum(fault.spared is not None for fault in FAULTS) <= len(FAULTS) / 10


@pytest.mark.parametrize("layer", sorted({fault.layer for fault in FAULTS}))
def test_every_fault_can_be_applied_and_names_tests_that_exist(layer: str) -> None:
    faults = [fault for fault in FAULTS if fault.layer == layer]
    assert {fault.name: problem for fault in faults if (problem := fault.problem(PACKAGE))} == {}
    assert {fault.name: missing for fault in faults if (missing := fault.missing_tests(ROOT))} == {}
    assert [fault.name for fault in faults if not fault.tests] == []


def test_faults_are_selected_by_a_part_of_their_name_or_file() -> None:
    assert selected(FAULTS, []) == FAULTS
    assert {fault.file for fault in selected(FAULTS, ["report/steps"])} == {"tools/report/figures.py"}
    assert selected(FAULTS, [FAULTS[3].name])[0].file


HALF = Fault(
    name="half",
    file="sums.py",
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
    enough, said = attempt({}, {"tests": ZEROS}, other, gone, {"old": "a + b\n", "new": "a +\n"}, {"new": "a + b"})
    assert not enough
    told = "\n".join(said)
    assert "survived: 1 (sums.py): differences for sums" in told
    assert "stale: 2 (sums.py): its source text occurs 0 times in sums.py, not once" in told
    assert "stale: 3 (sums.py): no such test: tests/test_sums.py::test_gone" in told
    assert "stale: 4 (sums.py): the changed file is not Python" in told
    assert "stale: 5 (sums.py): it changes nothing" in told
    assert "1 of 6 faults were caught" in told


def test_a_test_that_fails_without_a_fault_proves_nothing(attempt: Attempt) -> None:
    enough, said = attempt({"tests": WRONG})
    assert not enough
    assert said[-1] == f"without any fault: {WRONG[0]}: it fails"


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
