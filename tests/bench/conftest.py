"""The tests of benchmarks use helpers of the tests of experiments."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))

import pytest
from run_help import write_small_libsvm


@pytest.fixture
def small_libsvm(tmp_path: Path) -> Path:
    return write_small_libsvm(tmp_path / "small.txt")
