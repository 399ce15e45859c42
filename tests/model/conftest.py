"""Scripts that are profiled are forks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from interpreters import forks_for


@pytest.fixture(autouse=True)
def _commands_are_forks(request: pytest.FixtureRequest) -> Iterator[None]:
    with forks_for(request):
        yield
