"""The tutorials run and print what their pages say, and the messages that a page quotes are those of the package."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradwire.cli.app import app
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


def sentences() -> list[re.Pattern[str]]:
    """Return a pattern for each text of the package that is long enough to be a part of a message."""
    found = []
    for path in (ROOT / "src" / "gradwire").rglob("*.py"):
        tree = ast.parse(path.read_text())
        inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else None for p in node.values]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
                parts = [node.value]
            else:
                continue
            if sum(len(p) for p in parts if p is not None) >= 12:
                found.append(re.compile("".join(".*" if p is None else re.escape(str(p)) for p in parts), re.DOTALL))
    return found


def test_quoted_messages_are_those_of_the_package() -> None:
    quoted = [text.strip() for text in blocks(DOCS / "what-can-go-wrong.md", "text")]
    assert len(quoted) >= 20
    known = sentences()
    for message in quoted:
        assert any(pattern.fullmatch(message) for pattern in known), message
    assert not any(pattern.fullmatch("this link was shut: wrap the module anew") for pattern in known)


def test_every_error_has_a_section() -> None:
    from gradwire import errors

    titles = re.findall(r"^## (\w+)$", (DOCS / "what-can-go-wrong.md").read_text(), re.MULTILINE)
    assert set(titles) == set(errors.__all__) - {"GradwireError"}
