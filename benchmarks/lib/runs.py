"""Grids of training runs that may be stopped, started again, and shared by several copies of a script."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

__all__ = ["claim", "cores_of_others", "earlier", "final", "machine", "release", "train", "write"]


def final(folder: Path, steps: int) -> dict[str, Any] | None:
    """Return the last evaluation of a run, if the run is whole."""
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return None
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    found = [row for row in rows if row["event"] == "eval" and row["step"] == steps]
    return found[-1] if found and (folder / "checkpoint").is_dir() else None


def claim(folder: Path) -> bool:
    """Take a run for this process; a claim of a process that is gone does not count."""
    lock = _lock(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        owner = lock.read_text().strip()
        if not owner or Path(f"/proc/{owner}").exists():
            return False
        lock.unlink()
        return claim(folder)
    os.write(handle, str(os.getpid()).encode())
    os.close(handle)
    return True


def release(folder: Path) -> None:
    """Let go of a claimed run."""
    _lock(folder).unlink()


def _lock(folder: Path) -> Path:
    return folder.parent / f"{folder.name}.lock"


def train(task: str, folder: Path, options: dict[str, Any]) -> None:
    """Run ``gradwire train --simulate`` on a claimed folder, let go of the claim, and print how it ended.

    The folder's ``took.json`` has the seconds of the clock and of the processor.
    """
    start, before = time.monotonic(), os.times()
    command = [sys.executable, "-m", "gradwire.tools.cli.main", "train", task, "--simulate", "--overwrite", "--json"]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    subprocess.run([*command, "--out", str(folder)], check=True, stdout=subprocess.DEVNULL)
    wall_s, after = time.monotonic() - start, os.times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    (folder / "took.json").write_text(json.dumps({"wall_s": round(wall_s, 1), "cpu_s": round(cpu_s, 1)}) + "\n")
    release(folder)
    row = final(folder, options["steps"])
    print(f"{folder.name}: {row and row['accuracy']} ({wall_s:.0f} s)", flush=True)


def earlier(path: Path | None, field: str) -> list[dict[str, Any]]:
    """Return the rows under ``field`` of a result that was written before; none where there is none."""
    if path is None or not path.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(path.read_text()).get(field, [])
    return rows


def write(path: Path | None, **found: Any) -> None:
    """Write what was found, with what ran and when; nothing without a path."""
    if path:
        path.write_text(json.dumps({**machine(), **found}, indent=1) + "\n")


def cores_of_others(seconds: float = 2.0) -> float:
    """Return how many cores other work keeps busy, measured while this process sleeps; call it before any own work."""

    def busy_s() -> float:
        # user, nice, system, idle, iowait, irq, softirq, steal
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")

    before, start = busy_s(), time.monotonic()
    time.sleep(seconds)
    return round((busy_s() - before) / (time.monotonic() - start), 2)


def machine() -> dict[str, Any]:
    """Describe what ran, and when."""
    import numba
    import torch

    import gradwire

    lines = Path("/proc/cpuinfo").read_text().split("\n")
    return {
        "date_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": next((line.split(":")[1].strip() for line in lines if "model name" in line), ""),
        "cores": os.cpu_count(),
        "versions": {
            "gradwire": gradwire.__version__,
            "torch": torch.__version__,
            "numba": numba.__version__,
            "python": platform.python_version(),
        },
    }
