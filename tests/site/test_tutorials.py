"""The tutorials run and print what their pages say, and the messages that a page quotes are those of the package."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradwire.tools.cli.app import app
from ranks import run_script

pytestmark = pytest.mark.repository

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(page.name for page in (DOCS / "tutorials").glob("*.md"))]
NUMBER = r"\d+(?:\.\d+)?"


def blocks(page: Path, kind: str) -> list[str]:
    """Return the fenced blocks of one kind."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.ranks
@pytest.mark.parametrize("page", [*(DOCS / "tutorials" / name for name in PAGES), DOCS / "from-pytorch-hooks.md"])
def test_a_tutorial_prints_what_its_page_says(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command in "".join(blocks(page, "console")).splitlines():
        program, *words = shlex.split(command)
        assert program == "gradwire"
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
    script = tmp_path / "train.py"
    script.write_text(f"import os\nos.chdir({str(tmp_path)!r})\n" + "\n".join(blocks(page, "python")))
    ranks = re.search(r"torchrun --standalone --nproc-per-node (\d+)", page.read_text())
    told = run_script(script, world_size=int(ranks[1]) if ranks else 1).splitlines()
    expected = "".join(blocks(page, "text")).splitlines()
    assert [re.sub(NUMBER, "#", line) for line in told] == [re.sub(NUMBER, "#", line) for line in expected]
    numbers, its = ([float(n) for line in lines for n in re.findall(NUMBER, line)] for lines in (told, expected))
    assert numbers == pytest.approx(its, rel=0.05)


def sentences() -> list[list[str | None]]:
    """Return the texts of the package that are long enough to be a part of a message; None stands for a value."""
    found = []
    for path in (ROOT / "src" / "gradwire").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            parts: list[str | None] = []
            if isinstance(node, ast.JoinedStr):
                parts = [str(p.value) if isinstance(p, ast.Constant) else None for p in node.values]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                first, *more = re.split(r"%(?:\.\d+)?[dsf]", node.value)
                parts = [first, *(part for text in more for part in (None, text))]
            if sum(len(p) for p in parts if p is not None) >= 12:
                found.append(without_senders(parts))
    return found


def without_senders(parts: list[str | None]) -> list[str | None]:
    """Return parts with a value in the place of each "{sender}", which PayloadError fills in."""
    found: list[str | None] = []
    for part in parts:
        first, *more = (part,) if part is None else part.split("{sender}")
        found.append(first)
        for text in more:
            found += [None, text]
    return found


def said(message: str, known: list[list[str | None]]) -> bool:
    """Return whether one of the texts can become the message, after the rank that it is said of."""
    message = re.sub(r"^rank \d+ (?=ended by itself)", "", message)
    near = (parts for parts in known if all(p in message for p in parts if p is not None))
    return any(re.fullmatch("".join(".*" if p is None else re.escape(p) for p in parts), message) for parts in near)


def test_quoted_messages_are_those_of_the_package() -> None:
    quoted = [text.strip() for text in blocks(DOCS / "what-can-go-wrong.md", "text")]
    assert len(quoted) >= 20
    known = sentences()
    assert [message for message in quoted if not said(message, known)] == []
    assert not said("this link was shut: wrap the module anew and attach again", known)


def test_every_error_has_a_section() -> None:
    from gradwire import errors

    titles = re.findall(r"^## (\w+)$", (DOCS / "what-can-go-wrong.md").read_text(), re.MULTILINE)
    assert set(titles) == set(errors.__all__) - {"GradwireError"}
