"""Helpers of the tests of the site."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(ROOT / "scripts"))


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly, by one runner of all: a broken link or reference fails here."""
    if sys.version_info < (3, 11):
        pytest.skip("Zensical needs Python 3.11")
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "site"
    # What a build left that failed, or was ended, has another name.
    with open(shared / "site.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            building = tmp_path_factory.mktemp("site") / "site"
            command = [sys.executable, ROOT / "scripts" / "site_pages.py", building]
            built = subprocess.run(command, capture_output=True, text=True, check=False)
            assert built.returncode == 0, built.stdout + built.stderr
            building.rename(folder)
    return folder
