"""The page of properties: every test that it names exists, and no property is left out in between."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.repository
def test_every_test_that_the_page_names_exists() -> None:
    page = (ROOT / "docs" / "properties.md").read_text()
    named = set(re.findall(r"`([\w/]+\.py)::(\w+)`", page))
    assert len(named) > 50
    for file in {file for file, _ in named}:
        tree = ast.parse((ROOT / "tests" / file).read_text())
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert {name for other, name in named if other == file} <= defined, file


@pytest.mark.repository
def test_the_properties_of_a_method_are_numbered_one_by_one() -> None:
    parts = (ROOT / "docs" / "properties.md").read_text().split("\n## ")[1:]
    for part in parts:
        numbers = [int(n) for n in re.findall(r"^\| (\d+) \|", part, re.MULTILINE)]
        assert numbers == list(range(1, len(numbers) + 1)), part.splitlines()[0]
        rows = [line for line in part.splitlines() if re.match(r"\| \d+ \|", line)]
        assert all("::" in row or re.search(r"\]\(methods/[\w-]+\.md", row) for row in rows)
