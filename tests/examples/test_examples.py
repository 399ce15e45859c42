"""Every example runs and learns."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.repository

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["attach_ddp", "no_ddp"])
def test_an_example_learns_under_torchrun(name: str) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            EXAMPLES / f"{name}.py",
        ],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert float(words[2].rstrip(",")) > 0.9
    assert float(words[3]) > 10


def test_the_plain_script_has_never_heard_of_gradwire() -> None:
    """Beyond its docstring; it is run in tests/cli/test_run.py."""
    assert "gradwire" not in (EXAMPLES / "plain_ddp.py").read_text().split('"""', 2)[2]


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"plain_ddp", "attach_ddp", "no_ddp"}
