"""The shelves of ``benchmarks/``: which way imports point, programs that start, and an index that is whole."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import gradwire as gw
from benchmarks.speed.every_method import GROUPS

pytestmark = pytest.mark.repository

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"
PATH_LINE = "sys.path.insert(0, str(Path(__file__).resolve().parents[2]))"


@cache
def modules() -> dict[str, str]:
    """Return the text of every module, by its path in the repository."""
    return {str(path.relative_to(ROOT)): path.read_text() for path in sorted(BENCHMARKS.rglob("*.py"))}


def programs() -> list[str]:
    """Return the paths of the modules that are to be run."""
    return [path for path, text in modules().items() if 'if __name__ == "__main__":' in text]


def imported(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield f"{'.' * node.level}{node.module or ''}"


def wrong_imports(shelf: str, text: str, own: set[str]) -> list[str]:
    """Return what a module of a shelf must not import; ``own`` are the bare names of tests and benchmarks."""
    allowed = ("benchmarks.lib", f"benchmarks.{shelf}")
    return [
        name
        for name in imported(text)
        if name.startswith(".")
        or (name.split(".")[0] == "benchmarks" and not name.startswith(allowed))
        or name.split(".")[0] in own
    ]


def test_shelves_import_the_library_what_they_share_and_themselves() -> None:
    """Above all not the tests. What two shelves need lies in ``lib``, which imports no other shelf."""
    own = {"tests", *(path.stem for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py"))}
    wrong = {
        path: found for path, text in modules().items() if (found := wrong_imports(Path(path).parent.name, text, own))
    }
    assert wrong == {}
    bad = (
        "import cases\nfrom tests import laws\nfrom runs import write\nfrom benchmarks.speed import x\nfrom . import y"
    )
    assert len(wrong_imports("claims", bad, own)) == 5
    assert wrong_imports("lib", "from benchmarks.claims.variance import exact", own)


def test_the_library_imports_no_benchmark() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        assert "benchmarks" not in {name.split(".")[0] for name in imported(path.read_text())}, path


def test_programs_find_the_shelves_by_one_line_and_no_other() -> None:
    for path, text in modules().items():
        found = [line for line in text.splitlines() if "sys.path" in line] if path != "benchmarks/__init__.py" else []
        needs = path in programs() and any(name.startswith("benchmarks") for name in imported(text))
        assert found == [PATH_LINE] * needs, path


STARTING = """
import runpy, sys
own = sys.path[1:]
for path in sys.argv[1:]:
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        del sys.modules[name]
    sys.path[:] = [path.rpartition("/")[0], *own]
    try:
        runpy.run_path(path, run_name="imported")
    except ModuleNotFoundError as error:
        if error.name != "atheris":
            print(path, error)
    except Exception as error:
        print(path, repr(error))
"""


def test_programs_find_all_that_they_import_when_they_are_run_by_their_paths() -> None:
    paths = [str(ROOT / path) for path in programs()]
    done = subprocess.run(
        [sys.executable, "-c", STARTING, *paths], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


NAMED = re.compile(r"benchmarks/[\w/]+\.(?:py|jsonl?|txt|md)\b")


def test_every_path_that_is_named_leads_to_a_file() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not listed:
        pytest.skip("not a git checkout")
    # Results are as they were written, by programs that may have had another name.
    texts = [
        ROOT / name
        for name in listed
        if Path(name).suffix in {".py", ".md", ".toml", ".js", ".sh", ".yml", ".ipynb", ""}
    ]
    named = {(path, name) for path in texts if path.is_file() for name in NAMED.findall(path.read_text())}
    assert len(named) > 200
    assert {f"{path.relative_to(ROOT)}: {name}" for path, name in named if not (ROOT / name).is_file()} == set()


@dataclass(frozen=True)
class Row:
    """A row of the index.

    Attributes:
        result: The result's path below ``results/``.
        command: What makes it.
        takes: How long that takes.
        shown: Links to the sections that show it, or why it is kept without one.
    """

    result: str
    command: str
    takes: str
    shown: str


COMMAND = re.compile(r"gradwire bench \w+|make demo")
"""What makes a result without a program of benchmarks."""


@cache
def index() -> list[Row]:
    """Return the rows of the index, of all its tables."""
    rows = []
    for line in (BENCHMARKS / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 5 and cells[0] != "what":
            rows.append(Row(cells[1].strip("`"), *cells[2:]))
    return rows


def test_the_index_has_one_row_a_result_and_none_of_what_is_not_there() -> None:
    listed = [row.result for row in index()]
    there = [path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*") if path.is_file()]
    assert sorted(listed) == sorted(there)
    stems = [path.rpartition("/")[2].partition(".")[0] for path in there]
    assert len(set(stems)) == len(stems), "the site has all results in one folder"
    assert {Path(path).parts[0] for path in there} <= {path.name for path in BENCHMARKS.iterdir()}


def test_the_index_names_every_program_and_none_that_is_not_there() -> None:
    text = (BENCHMARKS / "README.md").read_text()
    programs_named = set(re.findall(r"benchmarks/\w+/\w+\.py", text))
    assert programs_named - set(programs()) == set(), "named, and not there"
    assert set(programs()) - programs_named == set(), "there, and not named"


def test_commands_of_the_index_have_options_that_their_programs_take() -> None:
    for row in index():
        assert row.takes, row.result
        (command,) = re.findall(r"`([^`]+)`", row.command)
        program = re.search(r"benchmarks/\w+/\w+\.py", command)
        if program is None:
            assert COMMAND.search(command), command
            continue
        own = command[program.end() :]
        missing = [option for option in re.findall(r"--[\w-]+", own) if f'"{option}"' not in modules()[program[0]]]
        # Modules on which others build have their options.
        shared = modules()["benchmarks/claims/cifar_gradients.py"] + modules()["benchmarks/trials/churn.py"]
        assert [option for option in missing if f'"{option}"' not in shared] == [], command
        if "--json" in own:
            assert f"--json benchmarks/results/{row.result}" in own, command


def test_every_method_with_an_exchange_a_step_is_timed() -> None:
    specs = [name.removeprefix("gradwire ") for group in GROUPS for name in group if name.startswith("gradwire ")]
    timed = {type(gw.method(spec)).name for spec in specs}
    wanted = {name for name in gw.methods() if gw.method(name).traits.local_steps <= 1}
    # TernGrad is in every group, and a link exchanges the gradients of AsyncServer's workers as the method inside does.
    assert wanted - timed == {"terngrad", "async_server"}


def slug(heading: str) -> str:
    """Return the anchor that GitHub and the site make of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def section(page: str, anchor: str) -> str:
    """Return the text of a section with all below it, the whole page without an anchor; empty where there is none."""
    lines = page.splitlines()
    if not anchor:
        return page
    heads = {i: found for i, line in enumerate(lines) if (found := re.match(r"(#+) (.*)", line))}
    for start, head in heads.items():
        if slug(head[2]) == anchor:
            end = next((i for i, other in heads.items() if i > start and len(other[1]) <= len(head[1])), len(lines))
            return "\n".join(lines[start:end])
    return ""


def test_results_are_shown_where_the_index_says_or_kept_for_a_reason() -> None:
    for row in index():
        links = re.findall(r"\]\(([^)#]+)#?([^)]*)\)", row.shown)
        if not links:
            assert re.match(r"kept: \w+ \w+", row.shown), (
                f"{row.result}: link to a page that shows it, or say kept: why"
            )
            continue
        command = re.findall(r"`([^`]+)`", row.command)[0]
        program = re.search(r"benchmarks/\w+/\w+\.py", command)
        # Pages name a result by its file or by what makes it.
        made_by = program or COMMAND.search(command)
        names = (row.result.rpartition("/")[2], made_by[0] if made_by else command)
        for page, anchor in links:
            text = section((BENCHMARKS / page).read_text(), anchor)
            assert text, f"{row.result}: {page} has no section {anchor}"
            assert any(name in text for name in names), f"{row.result}: {page}#{anchor} names neither {names}"


def test_sections_end_where_the_next_one_of_their_level_begins() -> None:
    page = "# A\na\n## B, `c`\nb\n### D\nd\n## E\ne"
    assert section(page, "b-c") == "## B, `c`\nb\n### D\nd"
    assert section(page, "f") == ""
