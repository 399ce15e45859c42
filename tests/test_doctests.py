"""Every example in a docstring runs."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import gradwire

NAMES = [
    m.name
    for m in pkgutil.walk_packages(gradwire.__path__, "gradwire.")
    if not m.name.startswith(("gradwire.tools.cli", "gradwire.tools.report", "gradwire.tools.experiments"))
]


@pytest.mark.parametrize("name", NAMES)
def test_examples(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder()
    count = sum(len(t.examples) for n in NAMES for t in finder.find(importlib.import_module(n)))
    assert count >= 10
