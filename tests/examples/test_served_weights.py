"""The examples of published weights: a served Transformers model, and readers over a network."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire.tools.lab import missing
from ranks import run_script

pytestmark = pytest.mark.repository

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_server_generates_the_trainers_text_at_each_step() -> None:
    command = [sys.executable, str(EXAMPLES / "served_weights.py"), "--steps", "3"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=280).stdout
    rows = re.findall(r"step (\d): (\d+) bytes, loaded .*served, the trainer's text: True", told)
    assert [int(step) for step, _ in rows] == [0, 1, 2]
    sizes = [int(nbytes) for _, nbytes in rows]
    assert max(sizes[1:]) < sizes[0]


def check(told: str, steps: int) -> None:
    """Check that all readers came to the last step with the trainer's bytes."""
    trained = dict(re.findall(r"trainer: step (\d+), .* weights (\w+)", told))
    followed = re.findall(r"reader (\d): step (\d+), .* weights (\w+)", told)
    assert len(trained) == steps
    assert {reader for reader, step, _ in followed if int(step) == steps - 1} == {"1", "2"}
    assert all(trained[step] == weights for _, step, weights in followed)


@pytest.mark.lab
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_two_readers_follow_over_a_lab() -> None:
    words = ["lab", "--hosts", "3", "--bandwidth", "100mbit", "--", sys.executable]
    command = [sys.executable, "-m", "gradwire", *words, str(EXAMPLES / "published_lab.py"), "--steps", "6"]
    check(subprocess.run(command, capture_output=True, text=True, check=True, timeout=280).stdout, 6)


@pytest.mark.ranks
def test_ranks_of_any_launcher_follow() -> None:
    """Without a lab: what rank 0 prints is the trainer's."""
    told = run_script(EXAMPLES / "published_lab.py", "--steps", 4, world_size=2)
    assert len(re.findall(r"trainer: step \d", told)) == 4
