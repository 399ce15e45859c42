"""Fixtures of the tests of experiments."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
from run_help import Listener, write_small_libsvm, write_small_mnist


@pytest.fixture(autouse=True)
def _undrawn(undrawn: None) -> None:
    """What is drawn is tested in ``report``, and whole pages by commands of ``cli``."""


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def small_mnist(tmp_path: Path) -> Path:
    return write_small_mnist(tmp_path / "mnist")


@pytest.fixture
def small_libsvm(tmp_path: Path) -> Path:
    return write_small_libsvm(tmp_path / "small.txt")
