"""The tests of the command line use their own helpers and those of the tests of experiments."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))

import pytest

from interpreters import forks_for


@pytest.fixture(autouse=True)
def _commands_are_forks(request: pytest.FixtureRequest) -> Iterator[None]:
    with forks_for(request):
        yield
