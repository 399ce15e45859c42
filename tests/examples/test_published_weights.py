"""The example of a trainer and a reader: the reader has the trainer's bytes at each step that it sees."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.repository

EXAMPLE = Path(__file__).parents[2] / "examples" / "published_weights.py"


def test_the_reader_follows_to_the_last_step_with_the_trainers_bytes() -> None:
    command = [sys.executable, str(EXAMPLE), "--epochs", "6"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=280).stdout
    trained = dict(re.findall(r"trainer: step (\d+), .* weights (\w+)", told))
    followed = dict(re.findall(r"reader: step (\d+), .* weights (\w+)", told))
    assert len(trained) == 6
    assert "5" in followed
    assert all(trained[step] == weights for step, weights in followed.items())
