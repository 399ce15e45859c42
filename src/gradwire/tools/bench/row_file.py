"""The files that benchmarks write, which are refused before anything is measured if they cannot be written."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradwire.tools.experiments.folder import writing

ADVICE = "free space or choose another place"


def check_writable(path: Path) -> None:
    """Make the folder of a file, and open the file to append to it; it stays as it is.

    Raises:
        RunError: it cannot be written.
    """
    with writing(path, ADVICE):
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append a row to a file of JSON lines; raises RunError."""
    # A truncated last line must not be joined with this one.
    with writing(path, ADVICE), path.open("ab+") as file:
        if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            file.write(b"\n")
        file.write((json.dumps(row) + "\n").encode())


def write_text(path: Path, text: str) -> None:
    """Write a file; raises RunError."""
    with writing(path, ADVICE):
        path.write_text(text)
