"""The example runs and learns in each of its modes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ranks import run_script

pytestmark = pytest.mark.repository

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits.py"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("mode", "method", "factor"),
    [("attach", "TernGrad(clip=2.5)", 10), ("loop", "qsgdinf", 3), ("amp", "ef_signsgd", 10), ("choose", "", 0.9)],
)
def test_the_example_learns_in_every_mode(mode: str, method: str, factor: float) -> None:
    told = run_script(EXAMPLE, "--mode", mode, *(["--method", method] if method else []))
    words = told.split()
    assert float(words[2].rstrip(",")) > 0.9
    assert float(words[3]) > factor
    assert ("chosen: " in told) == (mode == "choose")


def test_the_plain_mode_has_never_heard_of_gradwire() -> None:
    """``gradwire run`` attaches to a script that does not import it; it is run in tests/cli/test_run.py."""
    code = f"import runpy, sys; runpy.run_path({str(EXAMPLE)!r}); sys.exit('gradwire' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
