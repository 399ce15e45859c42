"""Measured times of variants, kept beside the compiled code for the next process on the same machine."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

__all__ = ["cache_folder", "default_file", "machine_name", "read_times", "source_digest", "write_times"]


@cache
def machine_name() -> str:
    """Return the name of the processor, as the operating system tells it, and what Numba compiles for."""
    from llvmlite.binding import get_host_cpu_name
    from numba.core import config

    model = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    except OSError:
        pass
    return f"{model} ({getattr(config, 'CPU_NAME', None) or get_host_cpu_name()})"


@cache
def source_digest() -> str:
    """Return a digest of all that kernels are compiled from, and of the compiler's versions."""
    import llvmlite
    import numba

    home = Path(__file__).parent
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for path in sorted(home.rglob("*.py")):
        digest.update(path.relative_to(home).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def cache_folder() -> Path | None:
    """Return the folder in which Numba keeps compiled code, or None where it keeps nothing."""
    from gradwire.kernels.moments.loops import moments_range

    folder = moments_range.stats.cache_path
    return Path(folder) if folder else None


def default_file() -> Path | None:
    """Return the file beside the compiled code in which times are kept, or None where Numba keeps nothing."""
    folder = cache_folder()
    return None if folder is None else folder / "gradwire-kernel-times.json"


def read_times(file: Path | None) -> dict[str, dict[str, float]]:
    """Return the kept seconds by what was measured and variant.

    Nothing where the file is damaged, or of another machine or version.
    """
    try:
        kept = json.loads(file.read_text()) if file is not None else {}
        if kept["machine"] != machine_name() or kept["sources"] != source_digest():
            return {}
        times = {name: {str(k): float(v) for k, v in row.items()} for name, row in kept["times_s"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return {name: row for name, row in times.items() if row and min(row.values()) > 0}


def write_times(file: Path | None, times: Mapping[str, Mapping[str, float]]) -> None:
    """Keep times, beside what is kept of others; a file that cannot be written is none."""
    if file is None:
        return
    rows = {**read_times(file), **{name: dict(row) for name, row in times.items()}}
    kept = {"machine": machine_name(), "sources": source_digest(), "times_s": rows}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=file.name)
        with os.fdopen(handle, "w") as stream:
            json.dump(kept, stream, indent=1)
        os.replace(name, file)
    except OSError:
        pass
