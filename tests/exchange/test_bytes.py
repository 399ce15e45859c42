"""What the operating system counts on the interface is what ``traffic()`` says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.ranks
@pytest.mark.repository
def test_interface_counters_agree_within_five_percent() -> None:
    flags = "-n" if os.geteuid() == 0 else "-rn"
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", flags, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("this machine gives no network namespace (unshare)")
    command = [sys.executable, str(ROOT / "benchmarks" / "speed" / "bench_bytes.py"), "--workers", "3", "--rounds", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("3 workers") == 4
