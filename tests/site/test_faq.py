"""What the FAQ states of methods and versions is what the package states."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import gradwire as gw

pytestmark = pytest.mark.repository

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "faq.md").read_text()


def test_the_memory_of_every_method_is_stated() -> None:
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", PAGE, re.MULTILINE)
    stated = [(name, float(size)) for size, names in rows for name in re.findall(r"`(\w+)`", names)]
    assert len(stated) == len(dict(stated))
    assert dict(stated) == {name: info.state_bytes_per_element for name, info in gw.methods().items()}


def test_versions_are_those_that_are_installed_and_tested() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    python, torch = re.search(r'requires-python = ">=([\d.]+)"', project), re.search(r'"torch>=([\d.]+)"', project)
    assert python is not None
    assert torch is not None
    assert f"Python {python[1]} to " in PAGE
    assert f"torch {torch[1]} or later" in PAGE
    runs = re.findall(r'python: "([\d.]+)", torch: "([\d.]*)', (ROOT / ".github/workflows/ci.yml").read_text())
    assert [(p, t.rstrip(".")) for p, t in runs] == [
        ("3.10", "2.9"),
        ("3.11", "2.13"),
        ("3.12", "2.13"),
        ("3.13", "2.13"),
        ("3.13", ""),
    ]


def test_tests_that_the_page_names_exist() -> None:
    named = re.findall(r"`(\w+/\w+\.py)`", PAGE)
    assert named
    assert [name for name in named if not (ROOT / "tests" / name).exists()] == []
